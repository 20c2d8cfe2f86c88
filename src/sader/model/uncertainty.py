"""How far off the result may be at each pixel, said beforehand: a scale per band, trained on the errors it makes.

Not from the paper: the spread over seeds of a sampler knows what the noise changes, not what the dates never showed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.model.blocks import depth_to_space, zero_init
from sader.model.composite import NOISE_VARIANCE, VARIANCE_FLOOR, MatchedDates
from sader.model.matching import inlier_weight, spread_from_clear

LARGEST_FACTOR = 5.0
"""Bound on the logarithm of what the network adds to the classical estimate."""

SEEN_WELL = 0.6
"""Part of a tile that the anchor shows clearly from which the stated error is taken as it is."""
EXCESS = 0.4
"""Part of the excess, in logarithms, that is taken off where the anchor shows next to nothing. Set on one made scene
with a cloud larger than a tile: tiles that see 11, 17 and 30 % of the reference date stated 0.012, 0.028 and 0.021 for
nearly the same true error, and now 0.012, 0.013 and 0.013 (benchmarks/RESULTS.md)."""


class ErrorHead(nn.Module):
    """Logarithm of the usual absolute error (B, C, H, W) in the model's range.

    Untrained it is what the composite's candidates got wrong nearby, weighted as they are blended.
    """

    def __init__(self, width: int, bands: int, *, stem: int) -> None:
        super().__init__()
        self.stem = stem
        self.hidden = nn.Conv2d(width, width, 3, padding=1)
        self.out = zero_init(nn.Conv2d(width, bands * stem**2, 3, padding=1))

    def forward(self, features: Tensor, matched: MatchedDates, weights: Tensor) -> Tensor:
        """Return log scales; features (B, width, H/stem, W/stem) get no gradient from here."""
        learned = depth_to_space(self.out(F.gelu(self.hidden(features.detach()))), self.stem).float()
        usual = 0.5 * (weights.detach().float() * matched.variance).sum(dim=1, keepdim=True).log()
        return usual + learned.clamp(-LARGEST_FACTOR, LARGEST_FACTOR)


def steady_correction(matched: MatchedDates, weights: Tensor) -> Tensor:
    """Return what is to be added to `Condition.log_error` (B, 1, H, W) in tiles that lie in a large hole of the anchor.

    `MatchedDates.variance` is carried into a hole from the anchor's clear pixels. Far from any of them its floor
    decides, and that compares the dates with the anchor's cloud: a tile that sees a fifth of the reference date would
    state more than twice the error of its neighbour that sees a tenth and goes by another date. With the tile's usual
    variance as the floor that excess is known; it is taken off the more, the less of the anchor is seen, and not at all
    from `SEEN_WELL` on, where the network learned what to make of it. Its inputs stay as they were trained, and the
    image does not change.
    """
    dates = matched.dates.float()
    target, target_clear = matched.at_anchor(dates), matched.at_anchor(matched.clear)
    smooth = spread_from_clear(target, target_clear)
    squared = (torch.cat([dates, smooth[:, None]], dim=1) - target[:, None]).square().mean(dim=2)
    both = torch.cat([matched.clear, torch.ones_like(matched.clear[:, :1])], dim=1) * target_clear[:, None]
    both = both * inlier_weight(squared, both)
    evidence = both.sum(dim=(-2, -1), keepdim=True)
    usual = (both * squared).sum(dim=(-2, -1), keepdim=True) / evidence.clamp(min=1.0)
    values = (both * squared + VARIANCE_FLOOR * usual) / (both + VARIANCE_FLOOR)
    steady = spread_from_clear(values.flatten(0, 1)[:, None], both.flatten(0, 1), floor=VARIANCE_FLOOR)
    steady = steady.view(squared.shape) + NOISE_VARIANCE
    # A date that shares no clear pixel with the anchor has no usual variance: its own floor stays.
    steady = torch.where(evidence > 1.0, torch.minimum(steady, matched.variance), matched.variance)
    share = weights.float()
    excess = (share * matched.variance).sum(dim=1, keepdim=True) / (share * steady).sum(dim=1, keepdim=True)
    seen = target_clear.mean(dim=(-2, -1))[:, None, None, None]
    return -0.5 * EXCESS * (1 - seen / SEEN_WELL).clamp(min=0) * excess.log()
