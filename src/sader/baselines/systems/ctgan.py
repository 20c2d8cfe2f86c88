"""CTGAN (Huang and Wu, ICIP 2022, "CTGAN: Cloud Transformer Generative Adversarial Network").

Published: the per-date extractor of `parts/adversarial.py`; pairs of dates (64 channels) through two stride-2
convolutions 128, 256; the concatenated 768 maps of 64x64 are 768 tokens of size 4096 in one Conformer block (16 heads
of 1024, feed-forward x4, convolution kernel 31, dropout 0.1); transposed convolutions 384, 192; 7x7 to 4; tanh. Fixed
input of 256 pixels: larger images are worked on in such blocks. Batches of 2 to 4.
Chosen here: the Conformer as published (half feed-forwards before and after, attention with learned relative positions
up to 512 apart, gated convolution of expansion 2, a last norm), no bias in queries, keys and values; see also
`parts/adversarial.py`. The counts agree with the paper's table. The reference date, if given, comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.baselines.baseline import BaselineConfig, System
from sader.baselines.parts.adversarial import DateExtractor, ExtractorGan
from sader.baselines.parts.resnet import ReflectConv, down, up
from sader.errors import ConfigError

CONFORMER_RECIPE = {
    "optimizer": "adamw", "adam_lr": 5e-4, "betas": (0.5, 0.999), "weight_decay": 5e-4, "schedule": "cosine",
    "ema_decay": 0.0, "epochs": 100.0, "batch_size": 4,
}  # fmt: skip
"""AdamW as published for CTGAN and PMAA; the cosine here ends at 1 % of the peak, theirs at 1e-6."""


@dataclass(frozen=True)
class CtGanConfig(BaselineConfig):
    """Sizes of extractor, Conformer and discriminator."""

    size: int = 256
    """Height and width of the images, fixed by the tokens."""
    width: int = 32
    """Channels of a date's features; a pair has twice that, then four and eight times."""
    hidden: int = 128
    """Hidden width of the pyramid pooling."""
    heads: int = 16
    head_width: int = 1024
    expansion: int = 4
    """Of the feed-forward parts."""
    kernel: int = 31
    """Of the Conformer's convolution along the tokens."""
    reach: int = 512
    """Tokens further apart than this share one relative position."""
    dropout: float = 0.1
    judge_widths: tuple[int, ...] = (64, 64, 128, 256, 512)

    least_dates, use_of_dates = 2, "CTGAN joins pairs of dates"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 4 or self.size % 4:
            raise ConfigError(f"network.size is {self.size}; expected a multiple of 4.")

    @property
    def multiple(self) -> int:
        return self.size

    @property
    def fixed_size(self) -> int | None:
        return self.size

    @property
    def token(self) -> int:
        """Size of a token: one map at a quarter of the resolution."""
        return (self.size // 4) ** 2


class FeedForward(nn.Sequential):
    """(B, N, D) -> (B, N, D), with its own norm in front."""

    def __init__(self, width: int, *, expansion: int, dropout: float) -> None:
        super().__init__(
            nn.LayerNorm(width), nn.Linear(width, expansion * width), nn.SiLU(), nn.Dropout(dropout),
            nn.Linear(expansion * width, width), nn.Dropout(dropout),
        )  # fmt: skip


class RelativeAttention(nn.Module):
    """Self-attention over tokens with relative positions (Shaw 2018)."""

    def __init__(self, width: int, *, heads: int, head_width: int, reach: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.reach = heads, reach
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key_value = nn.Linear(width, 2 * heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width)
        self.positions = nn.Embedding(2 * reach + 1, head_width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        normed = self.norm(x)
        q, k, v = (
            rearrange(part, "b n (h d) -> b h n d", h=self.heads)
            for part in (self.query(normed), *self.key_value(normed).chunk(2, dim=-1))
        )
        place = torch.arange(count, device=x.device)
        apart = (place[:, None] - place).clamp(-self.reach, self.reach) + self.reach
        # Every query against every distance, then the distances picked: a table of N x N vectors would take gigabytes.
        by_distance = q @ self.positions.weight.to(q.dtype).mT
        bias = by_distance.gather(-1, apart.expand(*by_distance.shape[:2], count, count))
        scale = q.shape[-1] ** -0.5
        answer = F.scaled_dot_product_attention(q, k, v, attn_mask=bias * scale, scale=scale)
        return self.dropout(self.out(rearrange(answer, "b h n d -> b n (h d)")))


class TokenConvolution(nn.Module):
    """The Conformer's convolution along the tokens: widen, gate, depthwise, norm, narrow."""

    def __init__(self, width: int, *, kernel: int, dropout: float) -> None:
        super().__init__()
        wide = 2 * width
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Conv1d(width, 2 * wide, 1)
        self.depthwise = nn.Conv1d(wide, wide, kernel, padding=kernel // 2, groups=wide)
        self.batch_norm = nn.BatchNorm1d(wide)
        self.narrow = nn.Conv1d(wide, width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = F.glu(self.widen(self.norm(x).mT), dim=1)
        h = F.silu(self.batch_norm(self.depthwise(h)))
        return self.dropout(self.narrow(h).mT)


class ConformerBlock(nn.Module):
    """(B, N, D) -> (B, N, D): half feed-forward, attention, convolution, half feed-forward, norm (Gulati 2020)."""

    def __init__(self, width: int, config: CtGanConfig) -> None:
        super().__init__()
        sizes = {"expansion": config.expansion, "dropout": config.dropout}
        self.first = FeedForward(width, **sizes)  # type: ignore[arg-type]
        self.attention = RelativeAttention(
            width, heads=config.heads, head_width=config.head_width, reach=config.reach, dropout=config.dropout
        )
        self.convolution = TokenConvolution(width, kernel=config.kernel, dropout=config.dropout)
        self.second = FeedForward(width, **sizes)  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x) / 2
        x = x + self.attention(x)
        x = x + self.convolution(x)
        return self.norm(x + self.second(x) / 2)


class CtGenerator(nn.Module):
    """Extractor, pairs, Conformer over maps, decoder; only `forward` parts are called by `CtGan`."""

    def __init__(self, config: CtGanConfig) -> None:
        super().__init__()
        self.pairs = list(combinations(range(config.slots), 2))
        self.extractor = DateExtractor(
            config.date_channels, config.channels, width=config.width, hidden=config.hidden, norm="batch"
        )
        pair = 2 * config.width
        self.encoder = nn.Sequential(down(pair, 2 * pair, norm="batch"), down(2 * pair, 4 * pair, norm="batch"))
        self.conformer = ConformerBlock(config.token, config)
        merged = 4 * pair * len(self.pairs)
        self.decoder = nn.Sequential(
            up(merged, merged // 2, norm="batch"),
            up(merged // 2, merged // 4, norm="batch"),
            ReflectConv(merged // 4, config.channels, 7),
            nn.Tanh(),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Return the clear image from the features (B, T, width, H, W)."""
        joined = torch.cat([self.encoder(torch.cat([maps[:, a], maps[:, b]], dim=1)) for a, b in self.pairs], dim=1)
        height, width = joined.shape[-2:]
        return self.decoder(self.conformer(joined.flatten(2)).unflatten(2, (height, width)))


class CtGan(ExtractorGan):
    """The generator with its extractor, and a strided discriminator over all dates and the image."""

    config: CtGanConfig

    def __init__(self, config: CtGanConfig) -> None:
        super().__init__(config, CtGenerator(config), judge_widths=config.judge_widths)


SYSTEM = System(
    name="ctgan",
    title="CTGAN",
    year=2022,
    loss="LSGAN + 100 L1 + MSE of the cloud masks + 50 L1 of the auxiliary images",
    config=CtGanConfig,
    network=CtGan,
    printed=(642.92, 632.05),
    reference="Huang and Wu, ICIP 2022",
    train={**CONFORMER_RECIPE, "crop": 256},
)
