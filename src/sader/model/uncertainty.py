"""How far off the result may be at each pixel, said beforehand: a scale per band, trained on the errors it makes.

Not from the paper: the spread over seeds of a sampler knows what the noise changes, not what the dates never showed.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sader.model.blocks import depth_to_space, zero_init
from sader.model.composite import MatchedDates

LARGEST_FACTOR = 5.0
"""Bound on the logarithm of what the network adds to the classical estimate."""


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
