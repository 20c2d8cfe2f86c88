"""What is asked of one scene, and the images that are written for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sader.geo.scene.cog import Layer, check_names
from sader.geo.scene.rows import CODES, PLAIN
from sader.geo.stack import GeoStack, ValueCoding

SPREAD_SAMPLES = 4
"""Samples for an uncertainty layer where the caller does not say."""


@dataclass(frozen=True)
class SceneOptions:
    """What is asked of one scene."""

    reference: str | int | None = "auto"
    """"auto" = the clearest date, a name, a date, an index, or "none" for a new image throughout."""
    steps: int | str | None = None
    seed: int = 0
    samples: int | None = None
    """Results averaged; None = 1, or 4 where an uncertainty layer is asked of a network that states no error itself."""
    tile: int | None = None
    """Edge of a tile, 64 to 1024; None = the remover's own."""
    overlap: int | None = None
    batch_size: int | None = None
    cloud_threshold: float | None = None
    """Probability from which the model's own masks call a pixel hidden; None = the remover's own."""
    mask_growth: int | None = None
    """Pixels by which the model's own masks are widened; None = the remover's own."""
    uncertainty: bool = False
    """Also write the standard deviation over the samples."""
    count: bool = False
    """Also write how many dates saw the ground clearly."""
    provenance: bool = False
    """Also write what each pixel is: 0 nodata, 1 observed in the reference date, 2 reconstructed."""
    overwrite: bool = False
    backend: str | None = None
    """Backend of the tiles: "torch", "accelerated" or "onnx"; None = "accelerated" on a GPU, "torch" on a CPU."""
    model_name: str | None = None
    """What the model is called in the result's tags; None = the name in its config."""

    @property
    def sample_count(self) -> int:
        return self.samples if self.samples is not None else (SPREAD_SAMPLES if self.uncertainty else 1)


def side_file(target: Path, name: str) -> Path:
    """Return the path of a layer beside the output: clear.tif -> clear_count.tif."""
    return target.with_name(f"{target.stem}_{name}{target.suffix}")


def layers_of(stack: GeoStack, options: SceneOptions) -> tuple[Layer, ...]:
    """Return the images to write."""
    bands = check_names(stack.bands)
    layers = [Layer("result", bands, stack.coding)]
    if options.uncertainty:
        spread = ValueCoding("float32", 1.0, 0.0, float("nan"), declared=False)
        layers.append(Layer("uncertainty", tuple(f"{band} standard deviation" for band in bands), spread))
    if options.count:
        layers.append(Layer("count", ("clear observations",), PLAIN, categories=True))
    if options.provenance:
        meaning = ("provenance: 0 nodata, 1 observed, 2 reconstructed",)
        layers.append(Layer("provenance", meaning, CODES, categories=True))
    return tuple(layers)
