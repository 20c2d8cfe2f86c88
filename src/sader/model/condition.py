"""The condition network (docs/method.md#network): features of the cloudy dates for every step of the diffusion.

It sees neither the diffused state nor the noise level, so it runs once per scene. An encoder shared by the dates,
attention over them (TAE), and a decoder whose every block feeds one encoder block of the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.model.attention import TemporalAttention, masked_mean, pool_available
from sader.model.blocks import ResBlock, group_norm, zero_init
from sader.model.composite import MatchedDates


@dataclass(frozen=True)
class ConditionFeatures:
    """Outputs of the condition network for the backbone."""

    injections: tuple[Tensor, ...]
    """One map per backbone encoder block, added to its input."""
    keys: Tensor
    """(B, T, Dk, h, w) at the coarsest level."""
    values: Tensor
    """(B, T, D, h, w) at the coarsest level."""
    dates_fine: Tensor
    """(B, T, width, H, W): each date's features at the finest level, for the composite's weights."""
    fused_fine: Tensor
    """(B, width, H, W): the decoder's last map, from all dates together."""


class SeriesInput(NamedTuple):
    """A batch of series as network input: padded, 0 for missing values."""

    cloudy: Tensor
    aux: Tensor
    observed: Tensor
    """bool (B, T, H, W): the date is present and has data at the pixel."""
    use: Tensor
    """bool (B, T, C, H, W): observed, in a present band."""
    present: Tensor
    band_present: Tensor
    available: Tensor
    """bool (B, T, H/stem, W/stem): pixels that take part in the attention over the dates."""
    emb: Tensor
    """(B*T, E)"""
    size: tuple[int, int]


@dataclass(frozen=True)
class Condition:
    """Features of a series for the denoiser; computed once, used at every step."""

    features: ConditionFeatures
    frames: Tensor
    """(B, T, F, H/stem, W/stem): the part of the backbone's input that does not change from step to step."""
    mean: Tensor
    """(B, S, C, H, W): what the diffusion reverts to: the dates, or the composite (S = 1). Padded size."""
    present: Tensor
    """bool (B, S): which state frames count."""
    available: Tensor
    """bool (B, T, H/stem, W/stem)."""
    size: tuple[int, int]
    """Height and width before padding."""
    weights: Tensor | None = None
    """(B, T + 1, H, W): the composite's weights, the smooth fill last; None without a composite."""
    matched: MatchedDates | None = None
    log_error: Tensor | None = None
    """(B, C, H, W): logarithm of the error to be expected, in the model's range; None without an error head."""
    contrast: Tensor | None = None
    """(B,): factor for the details of a one-step result; None without a composite."""
    others: Tensor | None = None
    """(B, C, H, W): prediction of the anchor from the other dates alone; None without a composite."""


class InjectionHead(nn.Module):
    """norm, SiLU, conv that starts at zero: turns a decoder map into an addition to the backbone."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm = group_norm(channels_in)
        self.conv = zero_init(nn.Conv2d(channels_in, channels_out, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(x)))


class ConditionNet(nn.Module):
    """Encoder per date, attention over the dates, decoder; a head after every decoder block.

    injection_channels: input channels of the backbone's encoder blocks, finest first.
    """

    def __init__(
        self,
        channels_in: int,
        *,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        injection_channels: list[int],
        emb_width: int,
        key_width: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.levels = len(widths)
        self.stem = nn.Conv2d(channels_in, widths[0], 3, padding=1)
        self.encoder = nn.ModuleList()
        channels = widths[0]
        for level, width in enumerate(widths):
            for _ in range(blocks[level]):
                self.encoder.append(ResBlock(channels, width, emb_width=emb_width, dropout=dropout))
                channels = width
            if level < self.levels - 1:
                self.encoder.append(ResBlock(width, width, emb_width=emb_width, resample="down", dropout=dropout))
        self.fine_index = blocks[0] - 1  # the last block before the first halving
        self.attention = TemporalAttention(channels, key_width=key_width, dropout=dropout)
        self.middle = ResBlock(channels, channels, dropout=dropout)
        self.decoder = nn.ModuleList()
        made = []
        for level in reversed(range(self.levels)):
            for _ in range(blocks[level]):
                self.decoder.append(ResBlock(channels, widths[level], dropout=dropout))
                channels = widths[level]
                made.append(channels)
            if level > 0:
                self.decoder.append(ResBlock(channels, channels, resample="up", dropout=dropout))
                made.append(channels)
        # Head k serves encoder block k: the finest decoder map goes to the first encoder block.
        self.heads = nn.ModuleList(
            InjectionHead(source, target) for source, target in zip(reversed(made), injection_channels, strict=True)
        )

    def forward(self, frames: Tensor, available: Tensor, emb: Tensor) -> ConditionFeatures:
        """Return the features of frames (B, T, F, H, W); available bool (B, T, H, W); emb (B*T, E) per date."""
        dates = frames.shape[1]
        h = self.stem(rearrange(frames, "b t c h w -> (b t) c h w"))
        fine = h
        for index, block in enumerate(self.encoder):
            h = block(h, emb)
            if index == self.fine_index:
                fine = h
        encoded = rearrange(h, "(b t) c h w -> b t c h w", t=dates)
        available_low = pool_available(available, 2 ** (self.levels - 1))
        fused, keys, values = self.attention(encoded, available_low)
        h = self.middle(fused + masked_mean(encoded, available_low))
        maps = []
        for block in self.decoder:
            h = block(h)
            maps.append(h)
        injections = tuple(head(x) for head, x in zip(self.heads, reversed(maps), strict=True))
        return ConditionFeatures(
            injections=injections,
            keys=keys,
            values=values,
            dates_fine=rearrange(fine, "(b t) c h w -> b t c h w", t=dates),
            fused_fine=h,
        )
