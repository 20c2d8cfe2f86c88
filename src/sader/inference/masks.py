"""Cloud masks of tiles: the estimate of the mask network, and the mask that is used.

`TileMasks` is the only place where masks are predicted: dates, validity, given masks and bands in, mask out.
`used_mask` turns a probability into the mask that is used: widened, thresholded, with cloud remnants beside nodata and
thin strips between gaps added. Masks that are given are never changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from sader.checkpoint import WEIGHTS_DIR, verified
from sader.errors import ConfigError
from sader.model.blocks import is_exporting, to_model_range
from sader.model.composite import at_date, is_date
from sader.model.heads import (
    MASK_BANDS,
    MASK_CLASSES,
    DateHeads,
    MaskNetwork,
    MaskNetworkConfig,
    band_sources,
    hidden_probability,
)
from sader.model.mtcdn import MTCDN

if TYPE_CHECKING:
    from sader.inference.tile import TileInputs

MASK_WEIGHTS = WEIGHTS_DIR / "masks" / "sader-masks.safetensors"
HEAD_WEIGHTS = WEIGHTS_DIR / "sader-s2-rgbn.safetensors"
"""Weights whose cloud head and mask refinement find the clouds of the reference date, for all models."""
HEAD_BANDS = slice(1, 5)
"""The bands of these weights among `MASK_BANDS`."""
HAZE = ("remove", "keep")
MASKS = ("network", "head")
LARGEST_GROWTH = 64
"""Pixels; the smallest edge of a tile."""
BESIDE_NODATA = 6
"""Distance in pixels: a pixel this close to both estimated cloud and nodata is a remnant of a removed cloud."""
STRIP, GAP = 3, 3
"""Radius in pixels: data that no square of the first fits into is a thin strip, nodata that one of the second fits into
is a gap."""
WATER = 0.7
"""Probability of water above which a pixel is visible: water that only one date shows resembles shadow."""
SURE, AROUND = 0.05, 4
"""A pixel is visible with certainty where the probability of cloud or shadow stays below the first number within the
second number of pixels."""
SURELY_HIDDEN = 0.98
"""Probability of cloud or shadow above which a pixel is hidden with certainty."""
LEAST_SEEN = 0.15
"""Share of clear pixels that the reference date needs in a tile for the other dates to be matched to it there."""
HARDLY_SEEN = 0.01
"""The same for the whole scene: with fewer clear pixels the other dates would be matched to its clouds."""


@cache
def mask_network(device: torch.device) -> MaskNetwork:
    """Return the shipped mask network; a process loads it once for each device."""
    with safe_open(verified(MASK_WEIGHTS), "pt") as file:
        config = json.loads(file.metadata()["config"])
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - no mapping
    with torch.device("meta"):
        network = MaskNetwork(MaskNetworkConfig(tuple(config["widths"]), tuple(config["blocks"]), config["heads"]))
    network.load_state_dict(weights, assign=True)
    return network.to(device).eval().requires_grad_(False)


@cache
def date_heads(device: torch.device) -> DateHeads:
    """Return the shipped networks for the reference date; a process loads them once for each device."""
    with safe_open(verified(HEAD_WEIGHTS), "pt") as file:
        network = json.loads(file.metadata()["sader"])["config"]["network"]
        names = [name for name in file.keys() if name.split(".")[1] in ("cloud_head", "mask_refinement")]  # noqa: SIM118
        weights = {name.partition(".")[2]: file.get_tensor(name).float() for name in names}
    assert tuple(network["bands"]) == MASK_BANDS[HEAD_BANDS]
    with torch.device("meta"):
        heads = DateHeads(
            len(network["bands"]),
            cloud_widths=tuple(network["cloud_widths"]),
            refinement_widths=tuple(network["refinement_widths"]),
            stem=network["stem"],
        )
    heads.load_state_dict(weights, assign=True)
    return heads.to(device).eval().requires_grad_(False)


@dataclass(frozen=True)
class MaskSettings:
    """How masks are estimated and used; the options of a remover extend it."""

    cloud_threshold: float = 0.5
    """Probability of cloud or shadow from which an estimated mask hides a pixel."""
    mask_growth: int = 1
    """Pixels by which estimated masks are widened: the fringe of a cloud costs more quality than lost clear pixels."""
    haze: str = "remove"
    """"remove": thin cloud and haze hide a pixel. "keep": they count as clear."""
    masks: str = "network"
    """Where no mask is given: "network", the shipped mask network for all bands and models; "head", the cloud head of
    the model, for models that you trained on masks of your own."""

    def __post_init__(self) -> None:
        for name, allowed in (("haze", HAZE), ("masks", MASKS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {' or '.join(allowed)}.")
        if not 0 < self.cloud_threshold < 1:
            raise ConfigError(
                f"cloud_threshold is {self.cloud_threshold}; expected a probability between 0 and 1, such as 0.5."
            )
        if not 0 <= self.mask_growth <= LARGEST_GROWTH:
            raise ConfigError(f"mask_growth is {self.mask_growth}; expected 0 to {LARGEST_GROWTH} pixels, such as 2.")

    def used(self, probability: Tensor, valid: Tensor, given: Tensor) -> Tensor:
        """Return the mask (B, T, H, W) of 0 and 1: the given masks, and the estimate where they are NaN.

        Intermediate probabilities would weigh in every fit and cost half a dB, so the estimate is thresholded.
        """
        mask = (grown(probability, self.mask_growth) >= self.cloud_threshold).to(given.dtype)
        # Skipped when all pixels are valid; never skipped in an exported graph or on a GPU, where the check would
        # synchronise.
        if is_exporting() or valid.is_cuda or not bool(valid.all()):
            mask = torch.maximum(mask, cloud_remnants(mask, valid))
        return torch.where(given.isnan(), mask, given)


class TileMasks(nn.Module):
    """The masks of a batch of tiles: the given ones, estimated where they are unknown."""

    def __init__(self, bands: Sequence[str], model: MTCDN | None, settings: MaskSettings) -> None:
        """model: the network whose cloud head estimates all masks where `settings.masks` is "head"."""
        super().__init__()
        self.model = model if settings.masks == "head" and model is not None and model.cloud_head is not None else None
        self.settings = settings
        self.sources = [-1 if source is None else source for source in band_sources(bands)]

    def class_scores(self, inputs: TileInputs) -> Tensor:
        """Return the scores (B, T, 6, H, W) of `heads.MASK_CLASSES`; sizes are multiples of 32."""
        return self._classified(*self._mask_bands(inputs), inputs.valid)

    def forward(self, inputs: TileInputs) -> Tensor:
        """Return the masks (B, T, H, W) of 0 and 1.

        The mask network classifies all dates. On the reference date a cloud head and its refinement decide, which
        compare the date with its prediction from the clear pixels of the others: a cloud that is missed there stays.
        They hide no pixel that the mask network calls visible with certainty, and no water, and every pixel that the
        mask network calls hidden with certainty.
        """
        if self.settings.masks == "head":
            return self._of_model(inputs)
        given, valid, keep_haze = inputs.cloud, inputs.valid, self.settings.haze == "keep"
        images, present = self._mask_bands(inputs)
        scores = self._classified(images, present, valid)
        hidden = hidden_probability(scores, dim=2, keep_haze=keep_haze)
        mask = self.settings.used(hidden, valid, given)
        decides = is_date(inputs.reference, valid.shape[1])[:, :, None, None] & given.isnan()
        images, present = images[:, :, HEAD_BANDS], present[:, HEAD_BANDS]
        probability = date_heads(images.device)(
            _in_model_range(images, valid, present),
            valid,
            present,
            given=mask.masked_fill(decides, torch.nan),
            reference=inputs.reference,
            only_reference=True,
            keep_haze=keep_haze,
        )
        water = scores.float().softmax(dim=2).select(2, MASK_CLASSES.index("water"))
        surely_visible = (grown(hidden, AROUND) < SURE) | (water > WATER)
        probability = probability.masked_fill(surely_visible, 0.0)
        probability = torch.maximum(probability, (hidden > SURELY_HIDDEN).to(probability.dtype))
        return self.settings.used(probability, valid, torch.where(decides, given, mask))

    def _of_model(self, inputs: TileInputs) -> Tensor:
        """Return the masks of the model's own cloud head."""
        if self.model is None:
            raise ConfigError("masks is 'head', but this model has no cloud head. Use masks='network'.")
        probability = self.model.cloud_estimate(
            _in_model_range(inputs.cloudy, inputs.valid, inputs.band_present),
            inputs.valid,
            inputs.band_present,
            given=inputs.cloud,
            reference=inputs.reference,
            keep_haze=self.settings.haze == "keep",
        )
        return self.settings.used(probability, inputs.valid, inputs.cloud)

    def _mask_bands(self, inputs: TileInputs) -> tuple[Tensor, Tensor]:
        """Return the `MASK_BANDS` of the dates, (B, T, 9, H, W), and which of them there are, bool (B, 9)."""
        # Slices, because an index from the host cannot be captured in a CUDA graph.
        images = torch.stack([inputs.cloudy[:, :, max(source, 0)] for source in self.sources], dim=2)
        absent = torch.zeros_like(inputs.band_present[:, 0])
        present = [absent if source < 0 else inputs.band_present[:, source] for source in self.sources]
        return images, torch.stack(present, dim=1)

    @staticmethod
    def _classified(images: Tensor, present: Tensor, valid: Tensor) -> Tensor:
        scores: Tensor = mask_network(images.device)(images, valid, present)
        return scores


def _in_model_range(cloudy: Tensor, valid: Tensor, band_present: Tensor) -> Tensor:
    """Return reflectance (B, T, C, H, W) in the model's range, 0 for nodata and missing bands."""
    use = valid[:, :, None] & band_present[:, None, :, None, None]
    return to_model_range(cloudy).masked_fill(~use, 0.0)


def cloud_remnants(mask: Tensor, valid: Tensor) -> Tensor:
    """Return 1 for pixels (B, T, H, W) left over by a provider that removed clouds, else 0; mask: known clouds."""
    seen = valid.to(mask.dtype)
    # Pixels between a cloud and nodata belong to that cloud. Single nodata pixels have other causes (dark water,
    # sensor faults) and do not count.
    nodata, gaps = 1 - grown(seen, 1), 1 - grown(seen, GAP)
    between = grown(mask, BESIDE_NODATA) * grown(nodata, 1 + BESIDE_NODATA)
    # Thin strips of data between large gaps are remnants too: land is wider.
    strips = 1 - grown(1 - grown(1 - seen, STRIP), STRIP)
    return torch.maximum(between, strips * grown(gaps, GAP + BESIDE_NODATA))


def grown(x: Tensor, radius: int) -> Tensor:
    """Return the maximum of (B, T, H, W) within a square of `radius` pixels, one axis after the other."""
    edge = 2 * radius + 1
    tall = F.max_pool2d(x, (edge, 1), stride=1, padding=(radius, 0))
    return F.max_pool2d(tall, (1, edge), stride=1, padding=(0, radius))


def leading_date(
    reference: Tensor, cloud: Tensor, valid: Tensor, *, threshold: float, least: float
) -> tuple[Tensor, Tensor]:
    """Return the date (B,) that the others are matched to in each tile, and the pixels it shows where it is replaced.

    The reference date leads, except in tiles where it shows less than the share `least` clearly: there -1 selects the
    clearest date. The second result is bool (B, H, W), False throughout in tiles led by the reference date.
    """
    date = reference.clamp(min=0)
    clear = (at_date(cloud, date) < threshold) & at_date(valid, date)
    hidden = (reference >= 0) & (clear.float().mean(dim=(-2, -1)) < least)
    return torch.where(hidden, -1, reference), clear & hidden[:, None, None]
