"""Request bodies, validated by pydantic and published in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Path = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
SceneId = Annotated[str, StringConstraints(pattern=r"^[a-f0-9]{24}$")]
JobName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f-]{36}$")]
Words = Annotated[str, StringConstraints(max_length=200)]
Haze = Literal["remove", "keep"]


class Strict(BaseModel):
    """A body without unknown keys, so that a misspelt option is an error."""

    model_config = ConfigDict(extra="forbid")


class Reading(Strict):
    """How the files are to be read, where they do not state it."""

    bands: Words | None = Field(
        None, description="Names in file order, such as blue,green,red,nir; or 10-band, 12-band, 13-band."
    )
    offset: Annotated[str, StringConstraints(pattern=r"^(auto|none|-?\d{1,6})$")] | None = Field(
        None, description="auto, none, or counts such as -1000."
    )
    scale: float | None = Field(None, gt=0, le=1000, description="Reflectance per count.")


class NewScene(Strict):
    """A new scene: empty for uploads (neither key), files of the data folder, or the demo."""

    paths: list[Path] | None = Field(None, max_length=100, min_length=1)
    demo: bool = False


class Token(Strict):
    """The server's token, sent once by a browser."""

    token: Annotated[str, StringConstraints(max_length=500)]


class Square(BaseModel):
    """One square of 512 x 512 pixels of a layer, as query parameters."""

    combination: Literal["true", "false", "ndvi"] = "true"
    factor: Literal["1", "2", "4", "8", "16", "32", "64", "128", "256"] = "1"
    column: int = Field(0, ge=0, le=100_000)
    row: int = Field(0, ge=0, le=100_000)
    job: JobName | None = None
    threshold: float = Field(0.5, gt=0, lt=1, description="Of a mask: probability that counts as cloud.")
    growth: int = Field(1, ge=0, le=64, description="Of a mask: pixels by which an estimate is widened.")
    haze: Haze = Field("remove", description="Of a mask: whether thin cloud and haze hide a pixel.")


class RemoveInputs(Reading):
    """The inputs of the process remove-clouds."""

    scene: SceneId | None = Field(None, description="A scene created with POST /scenes.")
    paths: list[Path] | None = Field(
        None,
        max_length=100,
        min_length=1,
        description="GeoTIFFs, folders, .SAFE products or STAC items in the data folder.",
    )
    reference: Annotated[str, StringConstraints(min_length=1, max_length=200)] = Field(
        "auto", description="The date to clean: a file's name, YYYY-MM-DD, auto (the clearest) or none (a new image)."
    )
    mask: Literal["auto", "scl", "own", "s2cloudless", "omnicloudmask"] | None = None
    cloud_threshold: float | None = Field(
        None, gt=0, lt=1, description="Probability that counts as cloud; default 0.5."
    )
    mask_growth: int | None = Field(None, ge=0, le=64, description="Pixels added to estimated masks; default 1.")
    haze: Haze | None = Field(None, description="Thin cloud and haze in estimated masks; default remove.")
    model: Words | None = Field(None, description="One of the shipped weights; default: the server's.")
    steps: Annotated[str, StringConstraints(pattern=r"^([1-9]|[1-4]\d|50)(\+\d)?$")] | None = Field(
        None, description="Sampling steps, 4 or 4+1; default: the model's own."
    )
    seed: int = Field(0, ge=0, le=2**31 - 1)
    samples: int | None = Field(None, ge=1, le=16)
    tile: int | None = Field(None, ge=64, le=1024)
    uncertainty: bool = False
    provenance: bool = False
    count: bool = False
    report: bool = Field(False, description="An HTML page about the run.")


Output = Literal["clear", "item", "preview", "report", "uncertainty", "provenance", "count"]


class OutputChoice(BaseModel):
    """How one output is returned."""

    model_config = ConfigDict(extra="ignore")
    transmissionMode: Literal["value", "reference"] | None = None
    format: dict[str, Any] | None = None


class Execute(BaseModel):
    """OGC API - Processes: an execute request."""

    model_config = ConfigDict(extra="ignore")
    inputs: RemoveInputs
    outputs: dict[Output, OutputChoice] | None = None
    response: Literal["document", "raw"] = "document"
