"""Cloud masks of tiles: the estimate of a network, the fallback network, and the mask that is used.

`estimate` is the only place where masks are predicted: dates, validity, given masks and bands in, probability out.
`used_mask` turns a probability into the mask that is used: widened, thresholded, with cloud remnants beside nodata and
thin strips between gaps added. Masks that are given are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sader.bands import BANDS_RGBN
from sader.checkpoint import load_checkpoint, shipped, verified
from sader.model.blocks import is_exporting
from sader.model.mtcdn import MTCDN

FALLBACK_MODEL = "sader-s2-rgbn"
"""Shipped model with four bands that estimates the masks where a model of many bands is given too few of them."""
ENOUGH_BANDS = 0.75
"""Share of a model's bands from which its own masks are better than those of the fallback: with 6 of its 13 bands
`sader-s2-msi` marks half of the clear land as cloud, with 10 it is the better one (MODELS.md)."""
BESIDE_NODATA = 6
"""Distance in pixels: a pixel this close to both estimated cloud and nodata is a remnant of a removed cloud."""
STRIP, GAP = 3, 3
"""Radius in pixels: data that no square of the first fits into is a thin strip, nodata that one of the second fits into
is a gap."""
LEAST_SEEN = 0.15
"""Share of clear pixels that the reference date needs in a tile for the other dates to be matched to it there."""


def estimate(
    network: MTCDN, cloudy: Tensor, valid: Tensor, given: Tensor, band_present: Tensor, reference: Tensor
) -> Tensor:
    """Return the probability (B, T, H, W) of cloud or shadow, estimated by a network where no mask is given.

    cloudy: (B, T, C, H, W) in the model's range; valid: bool (B, T, H, W); given: (B, T, H, W), NaN = unknown;
    band_present: bool (B, C); reference: (B,), -1 = none.
    """
    use = valid[:, :, None] & band_present[:, None, :, None, None]
    return network.cloud_estimate(cloudy.masked_fill(~use, 0.0), valid, band_present, given=given, reference=reference)


def used_mask(probability: Tensor, valid: Tensor, given: Tensor, *, threshold: float, growth: int) -> Tensor:
    """Return the mask (B, T, H, W) of 0 and 1: the given masks, and the estimate where they are NaN.

    growth: pixels by which the estimate is widened. Intermediate probabilities would weigh in every fit and cost half
    a dB, so the estimate is thresholded.
    """
    mask = (grown(probability, growth) >= threshold).to(given.dtype)
    # Skipped when all pixels are valid; never skipped in an exported graph or on a GPU, where the check would
    # synchronise.
    if is_exporting() or valid.is_cuda or not bool(valid.all()):
        mask = torch.maximum(mask, cloud_remnants(mask, valid))
    return torch.where(given.isnan(), mask, given)


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


def leading_date(reference: Tensor, cloud: Tensor, valid: Tensor, *, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the date (B,) that the others are matched to in each tile, and the pixels it shows where it is replaced.

    The reference date leads, except in tiles where it shows less than `LEAST_SEEN` clearly: there -1 selects the
    clearest date, which the scene match has brought to the reference's radiometry. The second result is bool
    (B, H, W), False throughout in tiles led by the reference date.
    """
    rows = torch.arange(reference.shape[0], device=reference.device)
    date = reference.clamp(min=0)
    clear = (cloud[rows, date] < threshold) & valid[rows, date]
    hidden = (reference >= 0) & (clear.float().mean(dim=(-2, -1)) < LEAST_SEEN)
    return torch.where(hidden, -1, reference), clear & hidden[:, None, None]


def has_few_bands(bands: Sequence[str], present: Sequence[bool]) -> bool:
    """Whether the fallback's masks are better than those of a model of `bands`, of which some are `present`."""
    found = {band for band, there in zip(bands, present, strict=True) if there}
    return len(found) < ENOUGH_BANDS * len(bands) and set(BANDS_RGBN) <= found


def load_fallback(device: torch.device, *, multiple: int) -> MTCDN | None:
    """Return the fallback network, or None where it is not shipped or does not take tiles of `multiple` pixels."""
    path = shipped().get(FALLBACK_MODEL)
    if path is None:
        return None
    network = load_checkpoint(verified(path)).model.network
    assert isinstance(network, MTCDN)
    return network.to(device).eval() if multiple % network.config.multiple == 0 else None


def four_bands(bands: Sequence[str], cloudy: Tensor, band_present: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cloudy (B, T, 4, H, W), band_present (B, 4)) for the fallback network."""
    chosen = [list(bands).index(band) for band in BANDS_RGBN]
    return cloudy[:, :, chosen], band_present[:, chosen]
