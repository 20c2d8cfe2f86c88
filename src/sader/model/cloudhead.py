"""A small cloud-and-shadow detector (LESSONS 13): used for every date whose mask the user does not give.

It sees one date beside the darkest and the median of its series, because bright ground stays where it is and clouds do
not. With one date only it falls back to that date's own colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import torch
from einops import rearrange
from torch import Tensor, nn

from sader.model.blocks import ResBlock, depth_to_space, space_to_depth, zero_init

CLASSES = ("clear", "thick cloud", "thin cloud", "shadow")


def series_statistics(cloudy: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the lower median over the observed dates, each (B, C, H, W); 0 where none is.

    cloudy: (B, T, C, H, W); observed: bool (B, T, H, W).
    """
    ordered = cloudy.masked_fill(~observed[:, :, None], torch.inf).sort(dim=1).values
    count = observed.sum(dim=1)
    middle = ((count - 1) // 2).clamp(min=0)
    index = middle[:, None, None].expand(-1, 1, cloudy.shape[2], -1, -1)
    seen = (count > 0)[:, None]
    zero = torch.zeros((), dtype=cloudy.dtype, device=cloudy.device)
    lowest = torch.where(seen, ordered[:, 0], zero)
    median = torch.where(seen, ordered.gather(1, index)[:, 0], zero)
    return lowest, median


class MaskNet(nn.Module):
    """A small U-Net from maps (N, F, H, W) to class scores (N, 4, H, W), classes as in `CLASSES`.

    Height and width are multiples of stem * 2^(levels - 1).
    """

    def __init__(self, inputs: int, bands: int, *, widths: tuple[int, ...], stem: int) -> None:
        super().__init__()
        self.stem = stem
        self.lift = nn.Conv2d(inputs * stem**2, widths[0], 3, padding=1)
        self.bands = nn.Linear(bands, widths[0])
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        for fine, coarse in pairwise(widths):
            down = [ResBlock(fine, fine), ResBlock(fine, fine, resample="down"), ResBlock(fine, coarse)]
            self.down.append(nn.ModuleList(down))
            self.up.append(nn.ModuleList([ResBlock(coarse, coarse, resample="up"), ResBlock(coarse + fine, fine)]))
        self.middle = ResBlock(widths[-1], widths[-1])
        self.out = zero_init(nn.Conv2d(widths[0], len(CLASSES) * stem**2, 3, padding=1))

    def scores(self, inputs: Tensor, band_present: Tensor) -> Tensor:
        """Return the class scores; band_present: bool (N, C)."""
        flags = self.bands(band_present.to(inputs.dtype))[:, :, None, None]
        h = self.lift(space_to_depth(inputs, self.stem)) + flags
        skips = []
        for level in self.down:
            keep, halve, widen = cast(Iterable[nn.Module], level)
            h = keep(h)
            skips.append(h)
            h = widen(halve(h))
        h = self.middle(h)
        for level, skip in zip(reversed(self.up), reversed(skips), strict=True):
            double, join = cast(Iterable[nn.Module], level)
            h = join(torch.cat([double(h), skip], dim=1))
        return depth_to_space(self.out(h), self.stem)


class CloudHead(MaskNet):
    """Class scores per date and pixel: (B, T, C, H, W) -> (B, T, 4, H, W)."""

    def __init__(self, bands: int, *, widths: tuple[int, ...], stem: int) -> None:
        super().__init__(3 * bands + 1, bands, widths=widths, stem=stem)

    def forward(self, cloudy: Tensor, observed: Tensor, band_present: Tensor) -> Tensor:
        """Return logits; missing pixels of `cloudy` are 0."""
        dates = cloudy.shape[1]
        lowest, median = series_statistics(cloudy, observed)
        seen = observed[:, :, None].to(cloudy.dtype)
        inputs = torch.cat(
            [cloudy, (cloudy - lowest[:, None]) * seen, (cloudy - median[:, None]) * seen, seen - 1], dim=2
        )
        logits = self.scores(
            rearrange(inputs, "b t c h w -> (b t) c h w"), band_present.repeat_interleave(dates, dim=0)
        )
        return rearrange(logits, "(b t) k h w -> b t k h w", t=dates)


def not_clear(logits: Tensor, *, dim: int) -> Tensor:
    """Return the probability of anything but clear from class scores along `dim`, float32."""
    return 1 - logits.float().softmax(dim=dim).select(dim, 0)
