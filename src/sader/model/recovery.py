"""Ground that shows through thin cloud and shadow, for pixels that no date shows clearly.

The composite fills such pixels smoothly from their surroundings. Where the cloud or shadow of a date is thin, the date
still shows the ground. A ridge regression at pixels that this date hides and another one shows tells how; it is applied
where no date is clear. Not from the paper. Always float32, without randomness.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sader.model.blocks import is_exporting
from sader.model.matching import CELL, FARTHEST, NOISE_VARIANCE, box_mean, carried_inward, ridge_fit, spread_from_clear

DETAIL = 9
"""Edge of the window that separates detail, mostly ground, from slow changes, mostly cloud."""
EDGE_WEIGHT = 0.1
"""How well the level of the fill is known beside pixels that a date shows, relative to errors of its prediction."""
FAR_WEIGHT = 0.01
"""Weight of a pixel that the regression does not use in the local errors."""
MOST_RECOVERED = 0.25
"""Largest correction, in model units."""


@torch.no_grad()
def hidden_ground(image: Tensor, dates: Tensor, clear: Tensor, observed: Tensor) -> Tensor:
    """Return what thin cloud and shadow add to a composite (B, C, H, W): a correction where no date is clear, else 0.

    image: (B, C, H, W), the composite; dates: (B, T, C, H, W), as given; clear: (B, T, H, W) in [0, 1]; observed: bool
    (B, T, H, W). For each date the difference of the composite from a fill that does not know the hidden pixels of the
    date is regressed on its bands; what this prediction misses beside a gap is carried into it. Dates count by the
    inverse of their squared error nearby and by the share that the regression explains, and shrink by this share.
    """
    shown = observed & (clear > 0.5)
    hidden, seen = observed & ~shown, shown.any(dim=1)
    useful = (hidden & ~seen[:, None]).flatten(2).any(dim=2) & (hidden & seen[:, None]).flatten(2).any(dim=2)
    wide = (image[:, None].expand_as(dates), dates, hidden, seen[:, None].expand_as(hidden))
    series = [one.flatten(0, 1) for one in wide]
    # Reading values breaks a graph and makes a GPU wait: there all dates are computed.
    if is_exporting() or torch.compiler.is_compiling() or image.device.type != "cpu":
        part, worth = _recovered(*series)
        part, worth = part.view_as(dates) * useful[:, :, None, None, None], worth.view_as(dates[:, :, 0])
        worth = worth * useful[:, :, None, None]
    else:
        chosen = useful.flatten().nonzero()[:, 0]
        if not len(chosen):
            return torch.zeros_like(image)
        part, worth = dates.new_zeros(dates.shape), dates.new_zeros(hidden.shape)
        part.flatten(0, 1)[chosen], worth.flatten(0, 1)[chosen] = _recovered(*(one[chosen] for one in series))
    return part.sum(dim=1) / worth.sum(dim=1).clamp(min=1e-12)[:, None] * ~seen[:, None]


def _recovered(image: Tensor, date: Tensor, hidden: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted correction (N, C, H, W) by the hidden pixels of N dates, and the weights (N, H, W).

    image, date: (N, C, H, W); hidden, seen: bool (N, H, W), the pixels that the date hides and those that any shows.
    """
    both, elsewhere = (hidden & seen).to(image.dtype), (seen & ~hidden).to(image.dtype)[:, None]
    base, smooth = _coarse_fill(image, elsewhere), _mean_within(date, hidden[:, None].to(image.dtype))
    missing = image - base
    found, _ = ridge_fit(_clipped(torch.cat([date - smooth, smooth], dim=1), both), missing, both)
    found = found.clamp(-MOST_RECOVERED, MOST_RECOVERED)
    before, after = (_local_error(error, both) for error in (missing, missing - found))
    explained = (1 - after / before).clamp(0, 1).sqrt()
    worth = hidden * explained / after
    # The level is corrected by the error of the prediction beside the gap. Beside pixels that the date itself shows
    # there is none: there the fill has about the right level.
    change, gap = base + found - image, (hidden & ~seen)[:, None].to(image.dtype)
    edge = gap * (box_mean(elsewhere, DETAIL) > 0)
    level = torch.lerp(change, _mean_within(change, gap), edge)
    added = change - carried_inward(level, both[:, None] + EDGE_WEIGHT * edge)
    return (worth * explained)[:, None] * added, worth


def _clipped(features: Tensor, weight: Tensor) -> Tensor:
    """Return features (N, D, H, W) within `FARTHEST` standard deviations of those with weight (N, H, W)."""
    near = weight[:, None]
    total = near.sum(dim=(-2, -1), keepdim=True).clamp(min=1.0)
    mean = (features * near).sum(dim=(-2, -1), keepdim=True) / total
    reach = FARTHEST * (((features - mean).square() * near).sum(dim=(-2, -1), keepdim=True) / total).sqrt()
    return torch.minimum(torch.maximum(features, mean - reach), mean + reach)


def _mean_within(x: Tensor, inside: Tensor) -> Tensor:
    """Return the mean of x (N, C, H, W) over `DETAIL` pixels, of those inside (N, 1, H, W) alone."""
    return box_mean(x * inside, DETAIL) / box_mean(inside, DETAIL).clamp(min=1e-3)


def _coarse_fill(image: Tensor, known: Tensor) -> Tensor:
    """Return image (N, C, H, W) filled smoothly where known (N, 1, H, W) is 0, computed in cells."""
    height, width = image.shape[-2:]
    joined = F.avg_pool2d(torch.cat([image * known, known], dim=1), CELL, ceil_mode=True, count_include_pad=False)
    share = joined[:, -1:]
    cells = carried_inward(joined[:, :-1] / share.clamp(min=1e-6), (share > 0).to(image.dtype))
    return F.interpolate(cells, scale_factor=CELL, mode="bilinear", align_corners=False)[..., :height, :width]


def _local_error(error: Tensor, weight: Tensor) -> Tensor:
    """Return the mean squared error (N, H, W) of the bands around each pixel."""
    squared = error.square().mean(dim=1, keepdim=True)
    return spread_from_clear(squared, weight, floor=FAR_WEIGHT)[:, 0] + NOISE_VARIANCE
