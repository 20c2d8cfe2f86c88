"""Options of scenes, each declared once: of one (`SceneOptions`), of a request (`RemoveRequest`), of many scenes.

A field that `config.option` declares is an option of the command line with the name of the field, and an argument of
the Python functions. This module imports nothing heavy, so that `sader --help` is fast.
"""

# No "from __future__ import annotations": the command line reads the types of the fields.

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from sader.config import check_limits, option
from sader.errors import ConfigError, did_you_mean

READING, TILES, WRITING, WORKING = "Reading the input", "Masks and tiles", "More outputs", "Model and machine"
MANY = "Many scenes"
"""Panels of the help page."""
SPREAD_SAMPLES = 4
"""Samples for an uncertainty layer of a network that does not state its error."""
MOST_THREADS = 1024


@dataclass(frozen=True)
class SceneOptions:
    """Options of one scene; None = as the remover or its checkpoint has it."""

    reference: str | int | None = "auto"
    """"auto" = the clearest date, a name, a date, an index, or "none" for a new image throughout."""
    steps: int | str | None = option(
        "Sampling steps: 4, or 4+1; default: those of the model.", WORKING, kind=str | None
    )
    resampling: str | None = option("Variant of the resampling: paper (Algorithm 1), public_code or default.", WORKING)
    guide: str | None = option("Guide of the resampling: mae, conv, mean, lowpass or none.", WORKING)
    guide_weights: str | None = option("Weights of the guide mae or conv (sader pretrain-guide).", WORKING)
    seed: int = option("Seed of the noise: the same seed gives the same image.", WORKING, default=0)
    samples: int | None = option(
        "Number of results averaged; default 1, or 4 for --uncertainty without an error head.", WORKING, min=1
    )
    tile: int | None = option("Edge of a tile in pixels; default 512.", TILES)
    overlap: int | None = option("Pixels shared by neighbouring tiles; default 64.", TILES)
    """At most a quarter of the tile where only the tile is given."""
    batch_size: int | None = option("Tiles computed together on a GPU; default 8.", WORKING, min=1)
    threads: int | None = option("Processor cores used on a CPU; default: all that are available.", WORKING, min=1)
    """The result does not depend on it."""
    cloud_threshold: float | None = option("Probability from which estimated masks hide a pixel; default 0.5.", TILES)
    mask_growth: int | None = option("Pixels by which estimated masks are widened; default 1.", TILES)
    haze: str | None = option("Thin cloud and haze in estimated masks: remove (default) or keep.", TILES)
    min_count: int | None = option(
        "Nodata in hidden pixels with fewer clear dates than this; default 0: filled.", WRITING, min=0
    )
    max_uncertainty: float | None = option(
        "Nodata where the expected error of a band is above this reflectance; default: none.", WRITING
    )
    masks: str | None = None
    """Estimate of unknown masks: "network" or "head"."""
    uncertainty: bool = option("NAME_uncertainty.tif: expected error in reflectance.", WRITING, default=False)
    count: bool = option("NAME_count.tif: number of clear dates, 255 outside.", WRITING, default=False)
    save_masks: bool = option(
        "NAME_masks.tif: the masks that were used, one band for each date.", WRITING, default=False
    )
    """0 clear, 1 hidden, 255 nodata."""
    provenance: bool = option("NAME_provenance.tif: 1 observed, 2 reconstructed.", WRITING, default=False)
    source_date: bool = option(
        "NAME_source_date.tif: the date that contributes most to each pixel.", WRITING, default=False
    )
    """1 the first input, ..., 255 none (filled), 0 nodata."""
    overwrite: bool = option("Replace existing outputs.", default=False)
    backend: str | None = option(
        "torch (default on a CPU), accelerated (half precision, default on a GPU) or onnx.", WORKING
    )
    model_name: str | None = None
    """Name of the model in the tags of the result; None = the name in its config."""

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; expected 1 to {MOST_THREADS} processor cores.")

    @property
    def sample_count(self) -> int:
        """Samples; 4 where the expected error is needed and the number is not given."""
        return self.samples if self.samples is not None else (SPREAD_SAMPLES if self.needs_spread else 1)

    @property
    def needs_spread(self) -> bool:
        """Whether the expected error is needed."""
        return self.uncertainty or self.max_uncertainty is not None


@dataclass(frozen=True)
class RemoveRequest:
    """Options of `sader remove`."""

    inputs: tuple[str, ...] = option(
        "GeoTIFFs, folders, Sentinel-2, Landsat or HLS products, STAC items of one place, or one Zarr store.",
        default=(),
        kind=list[str] | None,
        argument=True,
    )
    out: str = ""
    options: SceneOptions = field(default_factory=SceneOptions)
    bands: str | tuple[str, ...] | None = option(
        "Band names in the order of the file: blue,green,red,nir; or 10-band, 12-band, 13-band.",
        READING,
        kind=str | None,
    )
    offset: str | float | None = option(
        "Added to the counts: auto, none, or -1000 (baseline 04.00).", READING, default="auto", kind=str
    )
    scale: float | None = option("Reflectance per count; default: that of the file.", READING)
    mask: tuple[str, ...] = option(
        "Cloud masks: auto (of the product, otherwise own), own or head (estimated), scl, fmask, qa_pixel, qa60 "
        "(with classes or bits: scl:3,8,9), s2cloudless, omnicloudmask, a folder, or one file a date (repeat).",
        TILES,
        default=(),
        kind=list[str] | None,
    )
    mask_values: str | None = option("Values of mask files that count as cloud or shadow, such as 2,4.", TILES)
    aux: tuple[str, ...] = option(
        "Sentinel-1 VV and VH in dB (GeoTIFF): one file for all dates, or one for each (repeat).",
        READING,
        default=(),
        kind=list[str] | None,
    )
    grid: str | None = option(
        "Output grid: a raster file, EPSG:32632 or EPSG:32632/20; default: the first input.", READING
    )
    model: str | None = option(
        "Shipped weights, a preset or a checkpoint file; default: sader-s2-rgbn, or for files with more bands "
        "sader-s2-msi.",
        WORKING,
    )
    device: str | None = option("cpu, cuda or cuda:1; default: a GPU if there is one.", WORKING)
    preview: str | None = None
    report: str | None = None
    """An HTML page about the run; provenance, and uncertainty where it costs nothing, are then written as well."""
    item: bool = True
    """Write a STAC item beside the output."""
    dask: str | None = option(
        "Compute on a dask cluster: address or file of its scheduler, or local (this process).", WORKING
    )
    stac: str | None = option("STAC API to search instead of files.", READING)
    bbox: str | tuple[Any, ...] | None = option("Area: west,south,east,north in degrees.", READING, kind=str | None)
    """In Python also a GeoJSON file."""
    aoi: str | None = option("Area: the box around the shapes of a GeoJSON file.", READING)
    dates: str | None = option("Use the dates of this period: 2022-03-01/2022-05-31.", READING)
    collection: str | None = option("STAC collection; default sentinel-2-l2a.", READING)
    load: Callable[..., Any] | None = None
    """Opens files of another kind (`sader.geo.read.arrays.LoadFunction`)."""

    @classmethod
    def of(cls, given: Mapping[str, Any], names: Iterable[str] | None = None) -> Self:
        """Return the request of options by name: those of `SceneOptions` and of this class, or `names` of these."""
        known = [*(names or cls.__dataclass_fields__), *SceneOptions.__dataclass_fields__]
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"unknown option {unknown[0]}{did_you_mean(unknown[0], known)}")
        options = {name: value for name, value in given.items() if name in SceneOptions.__dataclass_fields__}
        own = {name: _plain(value) for name, value in given.items() if name in cls.__dataclass_fields__}
        for name in ("inputs", "mask", "aux"):
            value = own.get(name) or ()
            own[name] = (value,) if isinstance(value, str) else value
        return cls(**{**own, "options": SceneOptions(**options)})

    @property
    def scene_options(self) -> SceneOptions:
        """The options; the mask "head" is the cloud head of the model as the estimate of masks."""
        head = [word.strip().lower() for word in self.mask] == ["head"]
        return replace(self.options, masks="head") if head else self.options


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class BatchSettings:
    """How many scenes are run."""

    scenes: str = option(
        "Many scenes: a text file (one a line), a folder of folders, or a STAC catalogue.",
        MANY,
        default="",
        kind=str | None,
    )
    workers: int | None = option(
        "Processes on this machine, one scene each; default 1. For a cluster: --dask.", MANY, min=1
    )
    retries: int = option("Further attempts after an error of system, disk or network.", MANY, default=2, min=0)
    price: float | None = option("Price of a core hour (or GPU hour), for the cost in the report.", MANY, min=0)
    summary: str | None = option("JSON report of the run, with a text beside it; default run.json in the output.", MANY)
    """For object storage in a folder of that name."""
    series: bool = False
    """Clean every date of each scene instead of one."""
    nearest: int | None = None
    """Of a series: dates nearest in time that each date is cleaned with; None = all."""

    def __post_init__(self) -> None:
        check_limits(self)
