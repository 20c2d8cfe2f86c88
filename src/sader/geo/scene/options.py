"""Options of one scene, and the images that are written for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sader.errors import ConfigError
from sader.geo.scene.cog import Layer, check_names
from sader.geo.stack import GeoStack
from sader.inference.scene import GPU_BATCH
from sader.inference.values import NODATA, UNKNOWN, ValueCoding

SPREAD_SAMPLES = 4
"""Samples for an uncertainty layer of a network that does not state its error."""
MOST_THREADS = 1024
COUNTS = ValueCoding("uint8", 1.0, 0.0, None, declared=False)
CODES = ValueCoding("uint8", 1.0, 0.0, float(NODATA), declared=False)
MASKS = ValueCoding("uint8", 1.0, 0.0, float(UNKNOWN), declared=False)
SPREAD = ValueCoding("float32", 1.0, 0.0, float("nan"), declared=False)

PROVENANCE_LEGEND = (
    ("nodata", (128, 128, 128, 0)),
    ("observed", (28, 46, 84, 255)),
    ("reconstructed", (245, 245, 245, 255)),
)
"""Name and colour of `NODATA`, `OBSERVED` and `RECONSTRUCTED`."""


@dataclass(frozen=True)
class SceneOptions:
    """Options of one scene."""

    reference: str | int | None = "auto"
    """"auto" = the clearest date, a name, a date, an index, or "none" for a new image throughout."""
    steps: int | str | None = None
    """Sampling steps, such as 4 or "4+1"; None = those of the checkpoint."""
    resampling: str | None = None
    """Variant of the resampling, "paper", "public_code" or "default"; None = that of the remover."""
    guide: str | None = None
    """Guide of the resampling; None = that of the remover."""
    guide_weights: str | None = None
    """Weights of a learned guide; None = those of the remover."""
    seed: int = 0
    samples: int | None = None
    """Results averaged; None = 1, or 4 for an uncertainty layer of a network that does not state its error."""
    tile: int | None = None
    """Edge of a tile in pixels, 64 to 1024; None = that of the remover."""
    overlap: int | None = None
    """Pixels shared by neighbouring tiles; None = those of the remover, at most a quarter of the tile."""
    batch_size: int | None = None
    """Tiles computed together on a GPU; None = 8."""
    threads: int | None = None
    """Processor cores used on a CPU; None = all that are available. The result does not depend on it."""
    cloud_threshold: float | None = None
    """Probability from which a pixel counts as hidden in the masks of the model; None = that of the remover."""
    mask_growth: int | None = None
    """Pixels by which the masks of the model are widened; None = those of the remover."""
    haze: str | None = None
    """"remove" or "keep": whether thin cloud and haze hide a pixel; None = as the remover does."""
    masks: str | None = None
    """Estimate of unknown masks: "network" or "head"; None = that of the remover."""
    uncertainty: bool = False
    """Also write the expected standard deviation."""
    count: bool = False
    """Also write how many dates show the ground clearly."""
    save_masks: bool = False
    """Also write the mask of each date that was used: 0 clear, 1 hidden, 255 nodata."""
    provenance: bool = False
    """Also write the origin of each pixel: 0 nodata, 1 observed in the reference date, 2 reconstructed."""
    overwrite: bool = False
    backend: str | None = None
    """Backend of the tiles: "torch", "accelerated" or "onnx"; None = "accelerated" on a GPU, "torch" on a CPU."""
    model_name: str | None = None
    """Name of the model in the tags of the result; None = the name in its config."""

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; expected 1 to {MOST_THREADS} processor cores.")

    @property
    def sample_count(self) -> int:
        """Samples; 4 for an uncertainty layer where the number is not given."""
        return self.samples if self.samples is not None else (SPREAD_SAMPLES if self.uncertainty else 1)

    def remover_changes(self, *, overlap: int, batch_size: int, on_gpu: bool) -> dict[str, Any]:
        """Return the options of a remover that differ; overlap, batch_size: its own."""
        batch = GPU_BATCH if self.batch_size is None and on_gpu and batch_size == 1 else self.batch_size
        if self.tile is not None and self.overlap is None:
            overlap = min(overlap, self.tile // 4)
        given = {
            "tile": self.tile,
            "overlap": overlap if self.overlap is None else self.overlap,
            "batch_size": batch,
            "cloud_threshold": self.cloud_threshold,
            "mask_growth": self.mask_growth,
            "haze": self.haze,
            "masks": self.masks,
            "resampling": self.resampling,
            "guide": self.guide,
            "guide_weights": self.guide_weights,
        }
        return {key: value for key, value in given.items() if value is not None}


def side_file(target: Path, name: str) -> Path:
    """Return the path of a layer beside the output: clear.tif -> clear_count.tif."""
    return target.with_name(f"{target.stem}_{name}{target.suffix}")


def layers_of(stack: GeoStack, options: SceneOptions) -> tuple[Layer, ...]:
    """Return the images to write."""
    bands = check_names(stack.bands)
    layers = [Layer("result", bands, stack.coding)]
    if options.uncertainty:
        layers.append(Layer("uncertainty", tuple(f"{band} standard deviation" for band in bands), SPREAD))
    if options.count:
        layers.append(Layer("count", ("clear observations",), COUNTS, categories=True))
    if options.save_masks:
        layers.append(Layer("masks", check_names([one.name for one in stack.sources]), MASKS, categories=True))
    if options.provenance:
        meaning = ("provenance: 0 nodata, 1 observed, 2 reconstructed",)
        layers.append(Layer("provenance", meaning, CODES, categories=True, legend=PROVENANCE_LEGEND))
    return tuple(layers)
