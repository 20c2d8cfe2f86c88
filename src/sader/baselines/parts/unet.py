"""The DDPM U-Net of DDPM-CR and SeqDMs (the sizes of their papers are not known).

The usual design of a DDPM: residual blocks scaled by the noise level, attention at the coarse levels, concatenated
skips; built from the blocks of `model/blocks.py` and `model/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.errors import ConfigError
from sader.model.attention import GlobalBranch
from sader.model.blocks import ResBlock, ScalarEmbedding, group_norm, zero_init


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of the U-Net."""

    width: int = 128
    """Channels at full resolution."""
    multipliers: tuple[int, ...] = (1, 2, 4, 8, 8)
    """Channels of each level in units of `width`; each level halves the resolution."""
    blocks: int = 2
    """Residual blocks per level (one more in the decoder)."""
    attention_from: int = 4
    """First level with attention over the whole map; costly at fine levels."""
    emb_width: int = 512
    """Width of the noise-level embedding."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not self.multipliers or self.blocks < 1:
            raise ConfigError(
                f"a U-Net of {len(self.multipliers)} levels with {self.blocks} blocks each; expected 1 or more of both."
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, finest first."""
        return tuple(self.width * multiplier for multiplier in self.multipliers)

    @property
    def multiple(self) -> int:
        """The divisor of height and width."""
        return 2 ** (len(self.multipliers) - 1)


class _Stage(nn.Module):
    """A residual block and, at coarse levels, attention."""

    def __init__(self, channels_in: int, channels_out: int, config: UNetConfig, *, attend: bool) -> None:
        super().__init__()
        self.block = ResBlock(channels_in, channels_out, emb_width=config.emb_width, dropout=config.dropout)
        self.attention = GlobalBranch(channels_out) if attend else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return self.attention(self.block(x, emb))


class UNet(nn.Module):
    """Predicts an image from a noised one and its noise level; also returns its decoder features."""

    def __init__(self, channels_in: int, channels_out: int, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths, emb = config.widths, config.emb_width
        self.embedding = ScalarEmbedding(emb)
        self.conv_in = nn.Conv2d(channels_in, widths[0], 3, padding=1)
        self.encoder, self.down = nn.ModuleList(), nn.ModuleList()
        skips = [widths[0]]
        here = widths[0]
        for level, width in enumerate(widths):
            stages = nn.ModuleList()
            for _ in range(config.blocks):
                stages.append(_Stage(here, width, config, attend=level >= config.attention_from))
                here = width
                skips.append(here)
            self.encoder.append(stages)
            if level < len(widths) - 1:
                self.down.append(ResBlock(here, here, emb_width=emb, resample="down", dropout=config.dropout))
                skips.append(here)
        self.middle = nn.ModuleList([_Stage(here, here, config, attend=a) for a in (True, False)])
        self.decoder, self.up = nn.ModuleList(), nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            stages = nn.ModuleList()
            for _ in range(config.blocks + 1):
                stages.append(_Stage(here + skips.pop(), width, config, attend=level >= config.attention_from))
                here = width
            self.decoder.append(stages)
            if level > 0:
                self.up.append(ResBlock(here, here, emb_width=emb, resample="up", dropout=config.dropout))
        self.norm_out = group_norm(here)
        self.conv_out = zero_init(nn.Conv2d(here, channels_out, 3, padding=1))

    def features(self, x: Tensor, level: Tensor) -> list[Tensor]:
        """Return the decoder's features, finest first: level l is (B, widths[l], H / 2^l, W / 2^l).

        x: (B, C, H, W), sizes divisible by `config.multiple`; level: the noise level of each item.
        """
        emb = self.embedding(level)
        x = self.conv_in(x)
        skips = [x]
        for number, stages in enumerate(self.encoder):
            for stage in cast(nn.ModuleList, stages):
                x = stage(x, emb)
                skips.append(x)
            if number < len(self.down):
                x = self.down[number](x, emb)
                skips.append(x)
        for stage in self.middle:
            x = stage(x, emb)
        found: list[Tensor] = []
        for number, stages in enumerate(self.decoder):
            for stage in cast(nn.ModuleList, stages):
                x = stage(torch.cat([x, skips.pop()], dim=1), emb)
            found.append(x)
            if number < len(self.up):
                x = self.up[number](x, emb)
        return found[::-1]

    def head(self, finest: Tensor) -> Tensor:
        """Return the output (B, channels_out, H, W) from the finest features."""
        return self.conv_out(F.silu(self.norm_out(finest)))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Return the output (B, channels_out, H, W); see `features`."""
        return self.head(self.features(x, level)[0])
