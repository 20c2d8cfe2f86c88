"""The composite: matched dates weighted per pixel, the image that the diffusion then corrects (LESSONS 3, 11, 12).

What some date shows sharply comes through because weights choose among dates instead of averaging features. The
weights start from the cloud masks alone, so even an untrained network gives a sensible mosaic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.model.blocks import depth_to_space, full_precision, zero_init
from sader.model.matching import match_dates, smooth_fill


@dataclass(frozen=True)
class MatchedDates:
    """The dates in the anchor's radiometry, and the anchor's smooth fill."""

    dates: Tensor
    """(B, T, C, H, W)"""
    fill: Tensor
    """(B, C, H, W)"""
    clear: Tensor
    """(B, T, H, W) in [0, 1]: how surely a pixel is observed and clear."""
    flag: Tensor
    """(B, T): 1 for the reference date, 0.5 for an anchor nobody asked for, else 0."""


def prepare_dates(cloudy: Tensor, *, cloud: Tensor, observed: Tensor, reference: Tensor) -> MatchedDates:
    """Return the dates matched to the reference date, or to the clearest one where reference is -1.

    cloud: (B, T, H, W) in [0, 1]; observed: bool (B, T, H, W); reference: (B,) long.
    """
    clear = (1 - cloud.float()) * observed
    asked = reference >= 0
    clearest = clear.sum(dim=(2, 3)).argmax(dim=1)
    anchor = torch.where(asked, reference.clamp(min=0), clearest)
    dates = match_dates(cloudy, clear, anchor)
    rows = torch.arange(len(anchor), device=anchor.device)
    fill = smooth_fill(cloudy[rows, anchor], clear[rows, anchor])
    flag = F.one_hot(anchor, cloudy.shape[1]).to(cloudy.dtype) * torch.where(asked, 1.0, 0.5).to(cloudy.dtype)[:, None]
    return MatchedDates(dates=dates, fill=fill.to(cloudy.dtype), clear=clear, flag=flag)


class CompositeHead(nn.Module):
    """Per-pixel weights over the matched dates and the smooth fill, from the condition network's finest features."""

    def __init__(self, width: int, *, stem: int) -> None:
        super().__init__()
        self.stem = stem
        self.date = nn.Conv2d(width, width, 1)
        self.place = nn.Conv2d(width, width, 1)
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.logit = zero_init(nn.Conv2d(width, stem**2, 3, padding=1))
        self.fill_logit = zero_init(nn.Conv2d(width, stem**2, 3, padding=1))
        self.trust_mask = nn.Parameter(torch.tensor(1.0))
        self.prefer_reference = nn.Parameter(torch.tensor(4.0))
        self.prefer_fill = nn.Parameter(torch.tensor(-3.0))

    def forward(
        self, matched: MatchedDates, dates_fine: Tensor, fused_fine: Tensor, available: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (composite (B, C, H, W), weights (B, T + 1, H, W)); the last weight is the smooth fill's."""
        batch, dates = dates_fine.shape[:2]
        place = self.place(fused_fine)
        h = F.gelu(self.date(dates_fine.flatten(0, 1)) + place.repeat_interleave(dates, dim=0))
        h = F.gelu(self.mix(h))
        learned = depth_to_space(self.logit(h), self.stem).view(batch, dates, *matched.clear.shape[-2:])
        fill = depth_to_space(self.fill_logit(F.gelu(place)), self.stem)
        with full_precision(fill):
            prior = self.trust_mask * (matched.clear.float() + 1e-3).log()
            bonus = self.prefer_reference * (matched.flag == 1)[:, :, None, None] * matched.clear
            logits = (learned.float() + prior + bonus).masked_fill(~available, float("-inf"))
            weights = torch.cat([logits, fill.float() + self.prefer_fill], dim=1).softmax(dim=1)
            candidates = torch.cat([matched.dates, matched.fill[:, None]], dim=1).float()
            composite = torch.einsum("bthw,btchw->bchw", weights, candidates)
        return composite, weights
