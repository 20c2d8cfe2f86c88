"""Attention over the dates (paper, TAE and TFBlock, Eqs. (10) to (13)), per pixel, for any number of dates.

The public code moved axes by reinterpreting memory, which mixed time, channels and places; here they move by
`rearrange`. Its learned T -> 1 sum of queries is a mean over the dates at hand, so that T is free and a missing date
has no influence. Shapes: frames are (B, T, D, H, W); `available` is bool (B, T, H, W).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.model.blocks import Gate, depth_to_space, group_norm, space_to_depth, zero_init


def masked_mean(frames: Tensor, available: Tensor) -> Tensor:
    """Return the mean over the available dates, (B, T, D, H, W) and (B, T, H, W) -> (B, D, H, W)."""
    weight = available[:, :, None].to(frames.dtype)
    return (frames * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


def attend_over_dates(query: Tensor, keys: Tensor, values: Tensor, available: Tensor) -> Tensor:
    """Return per-pixel attention of one query over the dates: (B, Dk, H, W) x (B, T, Dk, H, W) -> (B, Dv, H, W)."""
    # Products and sums rather than einsum: as batched products of tiny matrices this is several times slower.
    logits = (query[:, None] * keys).sum(dim=2, dtype=torch.float32) / keys.shape[2] ** 0.5
    weights = logits.masked_fill(~available, float("-inf")).softmax(dim=1)
    return (weights[:, :, None].to(values.dtype) * values).sum(dim=1)


def pool_available(available: Tensor, factor: int) -> Tensor:
    """Return availability at 1/factor of the resolution: a cell is available where any of its pixels is."""
    if factor == 1:
        return available
    return F.max_pool2d(available.float(), factor).bool()


class FeedForward(nn.Module):
    """o + [norm, Conv1x1 d -> 2d, a * GELU(b), dropout, Conv1x1 d -> d]."""

    def __init__(self, channels: int, *, dropout: float) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.widen = nn.Conv2d(channels, 2 * channels, 1)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.widen(self.norm(x)).chunk(2, dim=1)
        return x + self.out(self.dropout(a * F.gelu(b)))


class TemporalAttention(nn.Module):
    """TAE: one map from the dates, with the keys and values that the backbone attends to later.

    The values are the normalised features themselves; one head.
    """

    def __init__(self, channels: int, *, key_width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.to_query_key = nn.Conv2d(channels, 2 * key_width, 1)
        self.out = zero_init(nn.Conv2d(channels, channels, 1))
        self.feed_forward = FeedForward(channels, dropout=dropout)

    def forward(self, frames: Tensor, available: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (fused (B, D, H, W), keys (B, T, Dk, H, W), values (B, T, D, H, W))."""
        dates = frames.shape[1]
        flat = self.norm(rearrange(frames, "b t d h w -> (b t) d h w"))
        values = rearrange(flat, "(b t) d h w -> b t d h w", t=dates)
        query_key = rearrange(self.to_query_key(flat), "(b t) d h w -> b t d h w", t=dates)
        queries, keys = query_key.chunk(2, dim=2)
        fused = attend_over_dates(masked_mean(queries, available), keys, values, available)
        return self.feed_forward(self.out(fused)), keys, values


class AdaptiveNorm(nn.Module):
    """Normalise over channels and space together, then scale and shift by the noise level (AdaLN, starts neutral)."""

    def __init__(self, channels: int, *, emb_width: int) -> None:
        super().__init__()
        self.modulation = zero_init(nn.Linear(emb_width, 2 * channels))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.modulation(F.silu(emb))[:, :, None, None].to(x.dtype).chunk(2, dim=1)
        return F.group_norm(x, 1) * (1 + scale) + shift


class TemporalFusion(nn.Module):
    """TFBlock: v * cross attention to the condition's dates + (1 - v) * self attention among the diffused dates.

    channels: of a frame, in and out. factor: resolution step between the frames and the condition's keys and values.
    """

    def __init__(
        self,
        channels: int,
        *,
        width: int,
        value_width: int,
        factor: int,
        emb_width: int,
        patches: Literal["depth", "pool"] = "depth",
        key_width: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.factor = factor
        self.patches = patches
        depth = factor**2 if patches == "depth" else 1
        self.patches_in = nn.Conv2d(channels * depth, width, 3, padding=1)
        self.norm_query = group_norm(width)
        self.to_query = nn.Conv2d(width, key_width, 1)
        self.attended = zero_init(nn.Conv2d(value_width, width, 1))
        self.patches_out = nn.Conv2d(width, channels * depth, 3, padding=1)
        self.cross_norm = AdaptiveNorm(channels, emb_width=emb_width)
        self.cross_gate = Gate(channels)
        self.cross_out = nn.Conv2d(channels, channels, 1)
        self.self_in = nn.Conv2d(channels, width, 3, padding=1)
        self.self_attention = TemporalAttention(width, key_width=key_width, dropout=dropout)
        self.self_mix = nn.Conv2d(width, channels, 3, padding=1)
        self.self_gate = Gate(channels)
        self.self_out = nn.Conv2d(channels, channels, 1)
        self.dropout = nn.Dropout(dropout)
        # The paper leaves v undefined and the public code leaves it unbounded; a sigmoid keeps the blend a blend.
        self.blend = nn.Parameter(torch.zeros(()))

    def cross(self, frames: Tensor, keys: Tensor, values: Tensor, available: Tensor, emb: Tensor) -> Tensor:
        dates = frames.shape[1]
        flat = rearrange(frames, "b t d h w -> (b t) d h w")
        deep = self.patches == "depth"
        small = space_to_depth(flat, self.factor) if deep else F.avg_pool2d(flat, self.factor)
        tokens = self.to_query(self.norm_query(self.patches_in(small)))
        query = masked_mean(rearrange(tokens, "(b t) d h w -> b t d h w", t=dates), available)
        attended = self.attended(attend_over_dates(query, keys, values, available))
        u = self.patches_out(attended)
        u = depth_to_space(u, self.factor) if deep else F.interpolate(u, scale_factor=self.factor, mode="bilinear")
        return u + self.cross_out(self.dropout(self.cross_gate(self.cross_norm(u, emb))))

    def own(self, frames: Tensor, available: Tensor) -> Tensor:
        dates = frames.shape[1]
        lifted = self.self_in(rearrange(frames, "b t d h w -> (b t) d h w"))
        fused, _, _ = self.self_attention(rearrange(lifted, "(b t) d h w -> b t d h w", t=dates), available)
        return self.self_out(self.dropout(self.self_gate(self.self_mix(fused))))

    def forward(
        self, frames: Tensor, keys: Tensor, values: Tensor, available: Tensor, available_low: Tensor, emb: Tensor
    ) -> Tensor:
        """Return one fused map (B, D, H, W) from frames (B, T, D, H, W).

        available and available_low mark the dates that count, at the resolution of the frames and of the keys.
        """
        v = self.blend.sigmoid()
        return v * self.cross(frames, keys, values, available_low, emb) + (1 - v) * self.own(frames, available)
