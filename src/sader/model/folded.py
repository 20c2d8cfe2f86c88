"""The joined network with its attentions in few kernels: over the dates, in the window, and what surrounds them.

Queries and keys over the dates are folded into one small matrix (`model.datekernels`), frames are laid out once per
evaluation for all who read them, and the window's attention reads its neighbours where they lie (`model.nearkernels`).
What is computed is what `model.joined` computes, to rounding. Parts of another shape stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.model import kernels
from sader.model.attention import HybridAttention
from sader.model.blocks import reflect_pad
from sader.model.condition import Condition
from sader.model.datekernels import FRAME, blend, feed_forward, frame_maps, mixed_dates
from sader.model.fused import AlignedConv, FusedDates, FusedFusion, FusedGate, FusedNorm
from sader.model.fusion import pool_available
from sader.model.joined import JoinedFeedForward, JoinedMTCDN, PointConv, joined_sum, with_sums
from sader.model.joinkernels import empty_sums
from sader.model.nearkernels import can_window, sum_of_branches, window_attention

PADDED = 16
"""Channels that a matrix product of Triton takes at least."""


def fold(network: nn.Module) -> None:
    """Make a joined network of the paper's kind compute its attentions as above."""
    if not isinstance(network, JoinedMTCDN):
        return
    if isinstance(network.attention, HybridAttention):
        network.attention.__class__ = FoldedHybrid
    config, fusion = network.config, network.fusion
    if config.composite or config.stem != 1 or not isinstance(fusion, FusedFusion) or not _fits(fusion):
        return
    network.fusion = FoldedFusion(fusion)
    network.__class__ = FoldedMTCDN


def _fits(fused: FusedFusion) -> bool:
    """Whether the kernels take the shapes of this fusion."""
    own = fused.fusion
    dates = own.self_attention
    if own.patches != "depth" or not isinstance(own.self_in, AlignedConv) or not isinstance(dates, FusedDates):
        return False
    points = (dates.to_query_key, dates.out, own.to_query, own.attended)
    if not all(isinstance(point, PointConv) for point in points):
        return False
    width = own.self_in.out_channels
    keys, values = own.to_query.get_buffer("weight").shape[0], own.attended.get_buffer("weight").shape[1]
    parts = isinstance(own.cross_out, AlignedConv) and isinstance(own.self_out, AlignedConv)
    plain = isinstance(own.patches_in, nn.Conv2d) and isinstance(own.patches_out, nn.Conv2d)
    fits = width in (16, 32, 64) and own.cross_out.out_channels <= FRAME and kernels.can_attend(keys, values)
    return parts and plain and fits and isinstance(dates.feed_forward, JoinedFeedForward)


def _rows(point: nn.Module) -> Tensor:
    """Return the matrix of a convolution of one pixel with its inputs as rows."""
    return point.get_buffer("weight").t().contiguous()


def _bias(module: nn.Module) -> Tensor:
    bias = module.bias
    assert isinstance(bias, Tensor)
    return bias.detach().float()


def _filled(gate: FusedGate, out: AlignedConv) -> list[Tensor]:
    """Return the matrices of a gate and of the product after it as `datekernels.blend` takes them."""
    weight, bias = gate.get_buffer("weight"), gate.get_buffer("bias")
    size = out.out_channels
    extra = PADDED - size
    wide = torch.cat([F.pad(half, (0, extra, 0, extra)) for half in weight.chunk(2, dim=1)], dim=1)
    offsets = torch.cat([F.pad(half, (0, extra)) for half in bias.chunk(2)])
    last = out.get_buffer("weight")[:size, :size, 0, 0].t()
    return [
        wide.contiguous(),
        offsets.float(),
        F.pad(last, (0, extra, 0, extra)).contiguous(),
        F.pad(_bias(out)[:size], (0, extra)),
    ]


class FoldedFusion(nn.Module):
    """`FusedFusion` from the state to the stem's input, mean over the dates included."""

    def __init__(self, fused: FusedFusion) -> None:
        super().__init__()
        # Its parts are no longer what TemporalFusion says they are (`_fits` has looked).
        own: Any = fused.fusion
        self.fusion = own
        self.dtype, self.factor = fused.dtype, own.factor
        self.channels = own.cross_out.out_channels
        cells = self.factor**2
        # The cells' channels come as (row, column, channel of 8); the paper's as (channel, row, column).
        weight = own.patches_in.weight.detach().unflatten(1, (self.channels, cells))
        weight = F.pad(weight.transpose(1, 2), (0, 0, 0, 0, 0, FRAME - self.channels)).flatten(1, 2)
        self.register_buffer("cells_in", weight.contiguous(memory_format=torch.channels_last))
        weight = own.patches_out.weight.detach().unflatten(0, (self.channels, cells))
        weight = F.pad(weight.transpose(0, 1), (0, 0, 0, 0, 0, 0, 0, FRAME - self.channels)).flatten(0, 1)
        self.register_buffer("cells_out", weight.contiguous(memory_format=torch.channels_last))
        bias = own.patches_out.bias.detach().unflatten(0, (self.channels, cells))
        self.register_buffer("cells_bias", F.pad(bias.t(), (0, FRAME - self.channels)).flatten().contiguous())

        dates = own.self_attention
        both, offsets = dates.to_query_key.get_buffer("weight").float(), _bias(dates.to_query_key)
        queries, keys = both.chunk(2)
        root = len(keys) ** -0.5
        # The keys' bias adds the same to all dates, which a softmax does not see.
        self.register_buffer("match", (queries.t() @ keys * root).to(self.dtype).contiguous())
        self.register_buffer("offset", (offsets[: len(queries)] @ keys * root).contiguous())
        self.register_buffer("out_rows", _rows(dates.out))
        self.register_buffer("out_bias", _bias(dates.out))
        after = dates.feed_forward
        self.register_buffer("widen_rows", _rows(after.widen))
        self.register_buffer("widen_bias", _bias(after.widen))
        self.register_buffer("last_rows", _rows(after.out))
        self.register_buffer("last_bias", _bias(after.out))
        self._near = [f"near_{index}" for index in range(4)]
        self._own = [f"own_{index}" for index in range(4)]
        for names, gate, out in (
            (self._near, fused.cross_gate, own.cross_out),
            (self._own, fused.self_gate, own.self_out),
        ):
            for name, matrix in zip(names, _filled(gate, out), strict=True):
                self.register_buffer(name, matrix)

    def forward(self, state: Tensor, condition: Condition, emb: Tensor) -> Tensor:
        """Return the mean over the dates and the fusion's say, (B, 8, H, W): what it has, and zeros.

        state: (B, T, C, H, W) float32.
        """
        available = condition.available
        frames, cells, mean = frame_maps(
            state, condition.frames.float(), condition.present, available, self.factor, self.dtype
        )
        near = self.near(cells, condition, pool_available(available, self.factor))
        own = self._parts()
        gain, extra = own.cross_norm.modulation(F.silu(emb.float())).chunk(2, dim=1)
        scale, shift = kernels.norm_coefficients(near[:, : self.channels], 1, None, None, 1e-5, gain=gain.contiguous())
        among = kernels.pixels_first(own.self_mix(self.dates(frames, available)))
        return blend(
            near, scale, shift + extra, among, mean, own.blend.detach().float(), channels=self.channels,
            near_matrices=[self.get_buffer(name) for name in self._near],
            own_matrices=[self.get_buffer(name) for name in self._own],
        )  # fmt: skip

    def _parts(self) -> Any:
        return self.fusion

    def near(self, cells: Tensor, condition: Condition, available: Tensor) -> Tensor:
        """Return attention to the condition's dates at full size, (B, 8, H, W), channels last."""
        own, features = self._parts(), condition.features
        batch, dates = available.shape[:2]
        tokens = F.conv2d(cells, self.get_buffer("cells_in"), own.patches_in.bias, padding=1)
        tokens = kernels.pixels_first(own.to_query(own.norm_query(tokens))).unflatten(0, (batch, dates))
        fused = own.attended(kernels.attend(tokens, features.keys, features.values, available))
        deep = F.conv2d(fused, self.get_buffer("cells_out"), self.get_buffer("cells_bias"), padding=1)
        deep = kernels.pixels_first(deep).permute(0, 2, 3, 1)
        flat = rearrange(deep, "b h w (r c d) -> b (h r) (w c) d", r=self.factor, c=self.factor).contiguous()
        return flat.permute(0, 3, 1, 2)

    def dates(self, frames: Tensor, available: Tensor) -> Tensor:
        """Return attention among the diffused dates, (B, D, H, W)."""
        own = self._parts()
        attention = own.self_attention
        lifted = kernels.pixels_first(own.self_in.apply_to(frames, None))
        bias = own.self_in.bias
        scale, shift = attention.norm.coefficients(lifted, before=bias)
        mixed, sums = mixed_dates(
            lifted, scale, shift, available, self.get_buffer("match"), self.get_buffer("offset"),
            self.get_buffer("out_rows"), self.get_buffer("out_bias"),
        )  # fmt: skip
        scale, shift = attention.feed_forward.norm.coefficients(with_sums(mixed, sums))
        return feed_forward(
            mixed, scale, shift, self.get_buffer("widen_rows"), self.get_buffer("widen_bias"),
            self.get_buffer("last_rows"), self.get_buffer("last_bias"),
        )  # fmt: skip


class FoldedHybrid(HybridAttention):
    """`HybridAttention` after `model.joined` has had its parts."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        near_branch, far_branch = self.neighbourhood, self.everywhere
        height, width = x.shape[-2:]
        head_width = x.shape[1] // near_branch.heads
        fits = can_window(height, width, near_branch.heads, head_width, near_branch.kernel)
        if not fits or not isinstance(self.out, PointConv) or not isinstance(self.norm_out, FusedNorm):
            return super().forward(x, emb)
        x = kernels.pixels_first(x)
        near, far = self.split(self.norm_in(x)).chunk(2, dim=1)
        gains = F.silu(self.gammas(F.silu(emb.float()))).float().contiguous()
        lift, out = near_branch.to_qkv, near_branch.out
        three = kernels.pixels_first(F.conv2d(near_branch.norm(near), lift.weight, None, padding=1))
        heat = near_branch.temperature.detach().float().clamp(min=1e-6)
        assert lift.bias is not None
        assert out.bias is not None
        attended = window_attention(three, lift.bias, heat, kernel=near_branch.kernel)
        near_new = F.conv2d(attended, out.weight, None, padding=1).contiguous(memory_format=torch.channels_last)
        q, k, v = rearrange(far_branch.to_qkv(far_branch.norm(far)), "b (n d) h w -> n b 1 (h w) d", n=3)
        everywhere = rearrange(F.scaled_dot_product_attention(q, k, v), "b 1 (h w) d -> b d h w", h=height)
        far_new = far_branch.out(everywhere).contiguous(memory_format=torch.channels_last)
        sums = empty_sums(len(x), x.shape[1], height, width, x)
        mixed = sum_of_branches(
            kernels.pixels_first(near), near_new, out.bias, kernels.pixels_first(far), far_new, gains, sums
        )
        h = self.out.apply_to(self.norm_out(with_sums(mixed, sums), "gelu"), None)
        return joined_sum(h.contiguous(memory_format=torch.channels_last), self.out.get_buffer("bias"), x, "none")


class FoldedMTCDN(JoinedMTCDN):
    """`JoinedMTCDN` whose frames become one map by `FoldedFusion`."""

    def _dates_as_one(self, scaled: Tensor, emb: Tensor, condition: Condition) -> Tensor:
        assert isinstance(self.fusion, FoldedFusion)
        state = reflect_pad(scaled, *condition.mean.shape[-2:]).float()
        dates = condition.frames.shape[1]
        return self.fusion(state.expand(-1, dates, -1, -1, -1), condition, emb)
