"""Attention over the dates (paper, TAE and TFBlock, Eqs. (10) to (13)) and over the image (HABlock, Eq. (14)).

Over the dates it works per pixel, for any number of dates. The public code moved axes by reinterpreting memory, which
mixed time, channels and places; here they move by `rearrange`. Its learned T -> 1 sum of queries is a mean over the
dates at hand, so that T is free and a missing date has no influence. Shapes: frames are (B, T, D, H, W); `available` is
bool (B, T, H, W).

Over the image, neighbourhood and global attention are mixed by the noise level. Neighbourhood attention is plain
PyTorch: queries in 8 x 8 tiles, each with the window of keys that its 64 queries can reach, one boolean mask. No
compiled extension is needed and the gradient works on the CPU.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.model.blocks import Gate, depth_to_space, group_norm, space_to_depth, zero_init

TILE = 8
"""Edge in pixels of the tiles of queries of neighbourhood attention."""


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


# ------------------------------------------------------------------------------------------------- the image


def _axis_plan(size: int, kernel: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return query rows (tiles, 8), key rows (tiles, reach) and attended pairs (tiles, 8, reach) of one axis.

    Each query sees `kernel` keys; at borders the window is shifted inward, so that the count stays the same.
    """
    reach = TILE + kernel - 1
    tiles = (size + TILE - 1) // TILE
    queries = torch.arange(tiles * TILE, device=device).clamp(max=size - 1).view(tiles, TILE)
    # Two clamps: a map smaller than the window starts at 0, and keys beyond its end are masked. No branch on the
    # size, so that one exported graph serves all sizes.
    window_start = (queries - kernel // 2).clamp(max=size - kernel).clamp(min=0)
    key_start = window_start[:, :1].clamp(max=size - reach).clamp(min=0)
    keys = key_start + torch.arange(reach, device=device)
    seen = (keys[:, None] >= window_start[..., None]) & (keys[:, None] < window_start[..., None] + kernel)
    return queries, keys.clamp(max=size - 1), seen & (keys < size)[:, None]


def neighbourhood_attention(q: Tensor, k: Tensor, v: Tensor, kernel: int) -> Tensor:
    """Return attention of every pixel over its kernel x kernel window; q, k, v and the result are (B, K, H, W, D).

    Logits are q.k without a further scale: cosine attention puts its own temperature into q and k.
    """
    height, width = q.shape[2:4]
    rows, key_rows, see_rows = _axis_plan(height, kernel, q.device)
    cols, key_cols, see_cols = _axis_plan(width, kernel, q.device)

    def tiles(x: Tensor, row_index: Tensor, col_index: Tensor) -> Tensor:
        x = x[:, :, row_index[:, None, :, None], col_index[None, :, None, :]]  # (B, K, tr, tc, r, c, D)
        return rearrange(x, "b k tr tc r c d -> (b tr tc) k (r c) d")

    seen = see_rows[:, None, :, None, :, None] & see_cols[None, :, None, :, None, :]
    mask = rearrange(seen, "tr tc r c kr kc -> (tr tc) 1 (r c) (kr kc)").repeat(q.shape[0], 1, 1, 1)
    out = F.scaled_dot_product_attention(
        tiles(q, rows, cols), tiles(k, key_rows, key_cols), tiles(v, key_rows, key_cols), attn_mask=mask, scale=1.0
    )
    out = rearrange(
        out, "(b tr tc) k (r c) d -> b k (tr r) (tc c) d", tr=rows.shape[0], tc=cols.shape[0], r=TILE, c=TILE
    )
    return out[:, :, :height, :width]


class NeighbourhoodBranch(nn.Module):
    """Cosine attention in a kernel x kernel window, with a learned temperature per head, plus its input."""

    def __init__(self, channels: int, *, kernel: int, head_width: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.heads = channels // head_width
        self.norm = group_norm(channels)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 3, padding=1)
        self.temperature = nn.Parameter(torch.full((self.heads,), 10.0))
        self.out = zero_init(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.to_qkv(self.norm(x)), "b (n k d) h w -> n b k h w d", n=3, k=self.heads)
        root = self.temperature.clamp(min=1e-6).sqrt().view(1, -1, 1, 1, 1)
        q = (F.normalize(q.float(), dim=-1, eps=1e-6) * root).to(v.dtype)
        k = (F.normalize(k.float(), dim=-1, eps=1e-6) * root).to(v.dtype)
        attended = neighbourhood_attention(q, k, v, self.kernel)
        return x + self.out(rearrange(attended, "b k h w d -> b (k d) h w"))


class GlobalBranch(nn.Module):
    """One head over all pixels of the map, plus its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = zero_init(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.to_qkv(self.norm(x)), "b (n d) h w -> n b 1 (h w) d", n=3)
        attended = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(rearrange(attended, "b 1 (h w) d -> b d h w", h=x.shape[-2]))


class HybridAttention(nn.Module):
    """HABlock: x + conv(norm((1 + g1) neighbourhood + (1 + g2) global)), g1 and g2 from the noise level."""

    def __init__(self, channels: int, *, emb_width: int, kernel: int, head_width: int = 16) -> None:
        super().__init__()
        self.norm_in = group_norm(channels)
        self.split = nn.Conv2d(channels, 2 * channels, 1)
        self.neighbourhood = NeighbourhoodBranch(channels, kernel=kernel, head_width=head_width)
        self.everywhere = GlobalBranch(channels)
        self.gammas = nn.Linear(emb_width, 2 * channels)
        self.norm_out = group_norm(channels)
        self.out = zero_init(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        near, far = self.split(self.norm_in(x)).chunk(2, dim=1)
        near_gain, far_gain = F.silu(self.gammas(F.silu(emb)))[:, :, None, None].to(x.dtype).chunk(2, dim=1)
        mixed = (1 + near_gain) * self.neighbourhood(near) + (1 + far_gain) * self.everywhere(far)
        return x + self.out(F.gelu(self.norm_out(mixed)))
