"""Options of one scene, and the images that are written for it."""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sader.errors import ConfigError
from sader.geo.scene.cog import Layer, check_names
from sader.geo.stack import DateSource
from sader.inference.remover import RemoverOptions, default_backend
from sader.inference.scene import GPU_BATCH
from sader.inference.values import FILLED, NODATA, UNKNOWN, ValueCoding

SPREAD_SAMPLES = 4
"""Samples for an uncertainty layer of a network that does not state its error."""
MOST_THREADS = 1024
GOLDEN = 0.618
"""Step of the hue from one date to the next: any number of hues stay apart."""
CODES = ValueCoding("uint8", 1.0, 0.0, float(NODATA), declared=False)
"""Provenance and source dates."""
MASKS = ValueCoding("uint8", 1.0, 0.0, float(UNKNOWN), declared=False)
"""Masks and counts of clear dates."""
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
    min_count: int | None = None
    """Clear dates below which a reconstructed pixel becomes nodata; None = as the remover does."""
    max_uncertainty: float | None = None
    """Expected error in reflectance above which a reconstructed pixel becomes nodata; None = as the remover does."""
    masks: str | None = None
    """Estimate of unknown masks: "network" or "head"; None = that of the remover."""
    uncertainty: bool = False
    """Also write the expected standard deviation."""
    count: bool = False
    """Also write how many dates show the ground clearly: 0 none of them, 255 nodata."""
    save_masks: bool = False
    """Also write the mask of each date that was used: 0 clear, 1 hidden, 255 nodata."""
    provenance: bool = False
    """Also write the origin of each pixel: 0 nodata, 1 observed in the reference date, 2 reconstructed."""
    source_date: bool = False
    """Also write which date contributes most to each pixel: 1 the first input, ..., 255 none (filled), 0 nodata."""
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
        """Samples; 4 where the expected error is needed and the number is not given."""
        return self.samples if self.samples is not None else (SPREAD_SAMPLES if self.needs_spread else 1)

    @property
    def needs_spread(self) -> bool:
        """Whether the expected error is needed."""
        return self.uncertainty or self.max_uncertainty is not None

    def for_remover(self, own: RemoverOptions, device: torch.device) -> dict[str, Any]:
        """Return the changes to the options of a remover on a device."""
        changes = {key: value for key, value in vars(self).items() if key in vars(own) and value is not None}
        if self.tile is not None and self.overlap is None:
            changes["overlap"] = min(own.overlap, self.tile // 4)
        if self.batch_size is None and own.batch_size == 1 and device.type != "cpu":
            changes["batch_size"] = GPU_BATCH
        if self.backend is None and own.backend == "torch":
            changes["backend"] = default_backend(device)
        return changes


def side_file(target: Path, name: str) -> Path:
    """Return the path of a layer beside the output: clear.tif -> clear_count.tif."""
    return target.with_name(f"{target.stem}_{name}{target.suffix}")


def layers_of(
    bands: Sequence[str], coding: ValueCoding, options: SceneOptions, sources: Sequence[DateSource] = ()
) -> tuple[Layer, ...]:
    """Return the images to write. coding: of the result; sources: the dates, by which masks and codes are named."""
    bands = check_names(bands)
    layers = [Layer("result", bands, coding)]
    if options.uncertainty:
        layers.append(Layer("uncertainty", tuple(f"{band} standard deviation" for band in bands), SPREAD))
    if options.count:
        layers.append(Layer("count", ("clear observations",), MASKS, categories=True))
    if options.save_masks:
        layers.append(Layer("masks", check_names([one.name for one in sources]), MASKS, categories=True))
    if options.provenance:
        meaning = ("provenance: 0 nodata, 1 observed, 2 reconstructed",)
        layers.append(Layer("provenance", meaning, CODES, categories=True, legend=PROVENANCE_LEGEND))
    if options.source_date:
        meaning = ("date that contributes most",)
        layers.append(Layer("source_date", meaning, CODES, categories=True, legend=source_legend(sources)))
    return tuple(layers)


def source_legend(sources: Sequence[DateSource]) -> tuple[tuple[str, tuple[int, int, int, int]], ...]:
    """Return name and colour of each code of the layer of source dates."""
    dates = []
    for number, source in enumerate(sources):
        red, green, blue = (round(255 * part) for part in hsv_to_rgb(0.6 + GOLDEN * number, 0.6, 0.9))
        name = source.name if source.date is None else f"{source.date:%Y-%m-%d}"
        dates.append((check_names([name])[0], (red, green, blue, 255)))
    unused = [("", (0, 0, 0, 0))] * (FILLED - 1 - len(dates))
    return PROVENANCE_LEGEND[NODATA], *dates, *unused, ("no date", (40, 40, 40, 255))
