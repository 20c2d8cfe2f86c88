"""Hybrid attention (paper, HABlock, Eq. (14)): neighbourhood and global attention, mixed by the noise level.

Neighbourhood attention is plain PyTorch: queries in 8 x 8 tiles, each with the window of keys that its 64 queries can
reach, one boolean mask. No compiled extension is needed and the gradient works on the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.model.blocks import group_norm, zero_init

TILE = 8


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
