"""The same network for inference in half precision: blocks whose norms, activations, gates and sums are few kernels.

`half_network` copies a network with its convolutions in float16 or bfloat16 and channels last; `fuse` exchanges its
blocks for ones that compute the same with the kernels of `model.kernels` (CUDA and Triton). Norm statistics, softmax,
embeddings and sums stay float32. The copy is for inference: no gradient, no dropout. Run it under autocast.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.model.blocks import Gate, GroupNorm32, ResBlock, ScalarEmbedding, depth_to_space, space_to_depth
from sader.model.blocks import without_autocast as plain
from sader.model.condition import InjectionHead
from sader.model.fusion import TemporalAttention, TemporalFusion, attend_over_dates, masked_mean

N = TypeVar("N", bound=nn.Module)
Better = Callable[[nn.Module], nn.Module | None]
"""A module -> what takes its place, or None to leave it and look inside."""
ALIGNED = 8
"""Channels that tensor cores take at a time; maps with fewer or an odd number are filled up with zeros."""


def can_fuse(device: torch.device) -> bool:
    """Whether the kernels run on `device`: Triton is there, and a GPU or Triton's interpreter for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> ModuleType:
    from sader.model import kernels  # needs Triton, so not at the top

    return kernels


def half_network(network: N, dtype: torch.dtype) -> N:
    """Return a copy whose convolutions are in `dtype` and channels last; everything else stays float32."""
    made = copy.deepcopy(network).eval().requires_grad_(False)
    made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            module.to(dtype)
    # Noise levels and dates steer every block: their little arithmetic is not worth a rounding.
    return exchanged(made, lambda module: Float32(module) if isinstance(module, nn.Linear | ScalarEmbedding) else None)


def known_sums(x: Tensor) -> Tensor | None:
    """Return the sums that `model.joined` left with a map, for its norm; None for any other tensor."""
    return getattr(x, "sader_sums", None)


def fuse(network: N, dtype: torch.dtype, *, joined: bool = False, folded: bool = False, doubled: bool = False) -> N:
    """Return `half_network` with fused blocks; joined: also what lies between them (`model.joined`).

    folded: with `joined`, attention and the dates' maps in few kernels as well (`model.folded`). doubled: with
    `joined`, blocks that double the resolution convolve before they do.
    """

    def better(module: nn.Module) -> nn.Module | None:
        if joined:
            from sader.model.joined import joined_part

            part = joined_part(module, better, dtype)
            if part is not None:
                return part
        if isinstance(module, ResBlock):
            return FusedResBlock(module, dtype)
        if isinstance(module, InjectionHead):
            return FusedInjection(module, dtype)
        if isinstance(module, TemporalFusion):
            return FusedFusion(module, better, dtype, joined=joined)
        if isinstance(module, TemporalAttention):
            return FusedDates(exchanged(module, better), dtype)
        if isinstance(module, GroupNorm32):
            return FusedNorm(module, dtype)
        if isinstance(module, nn.Conv2d) and (module.in_channels % ALIGNED or module.out_channels % ALIGNED):
            return AlignedConv(module)
        return None

    made = exchanged(half_network(network, dtype), better)
    if joined:
        from sader.model.joined import join_blocks

        join_blocks(made, doubled=doubled)
        if folded:
            from sader.model.folded import fold

            fold(made)
    return made


def exchanged(module: N, better: Better) -> N:
    """Return `module` with every part below it exchanged for what `better` makes of it, from the outside in."""
    for name, child in module.named_children():
        other = better(child)
        if other is None:
            exchanged(child, better)
        else:
            setattr(module, name, other)
    return module


class Float32(nn.Module):
    """A module outside autocast, whose numbers come out in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with plain(x):
            result: Tensor = self.module(x.float())
            return result


class AlignedConv(nn.Module):
    """A convolution with its channels filled up to a multiple of 8 with zeros; what is added is cut off again."""

    bias: Tensor | None

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.out_channels = conv.out_channels
        extra_in, extra_out = -conv.in_channels % ALIGNED, -conv.out_channels % ALIGNED
        self.padding = conv.padding
        weight = F.pad(conv.weight.detach(), (0, 0, 0, 0, 0, extra_in, 0, extra_out))
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", None if conv.bias is None else F.pad(conv.bias.detach(), (0, extra_out)))

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(x, self.bias)

    def apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution with another bias, or none."""
        weight = self.get_buffer("weight")
        missing = weight.shape[1] - x.shape[1]
        if missing:  # padding by nothing would be a copy
            x = F.pad(x, (0, 0, 0, 0, 0, missing))
        x = x.to(weight.dtype, memory_format=torch.channels_last)
        return F.conv2d(x, weight, bias, padding=self.padding)[:, : self.out_channels]


class FusedNorm(nn.Module):
    """`GroupNorm32` of a map that lies channels last, in two passes."""

    def __init__(self, norm: GroupNorm32, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.dtype = norm, dtype

    def coefficients(
        self, x: Tensor, *, gain: Tensor | None = None, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scale and shift (N, C); see `kernels.norm_coefficients`."""
        norm = self.norm
        made: tuple[Tensor, Tensor] = _kernels().norm_coefficients(
            x, norm.num_groups, norm.weight, norm.bias, norm.eps, gain=gain, before=before, sums=known_sums(x)
        )
        return made

    def forward(
        self, x: Tensor, activation: str = "none", resample: str = "none", before: Tensor | None = None
    ) -> Tensor:
        kernels = _kernels()
        x = kernels.pixels_first(x.to(self.dtype))
        scale, shift = self.coefficients(x, before=before)
        result: Tensor = kernels.apply_norm(x, scale, shift, activation=activation, resample=resample)
        return result


class FusedGate(nn.Module):
    """`Gate` of a map that is still to be scaled and shifted."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        split = gate.split
        assert split.bias is not None
        self.register_buffer("weight", split.weight.detach()[:, :, 0, 0].t().contiguous())
        self.register_buffer("bias", split.bias.detach().float())

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        kernels = _kernels()
        x = kernels.pixels_first(x.to(self.get_buffer("weight").dtype))
        if scale is None or shift is None:
            scale = torch.ones(x.shape[:2], device=x.device)
            shift = torch.zeros_like(scale)
        result: Tensor = kernels.gate(x, scale, shift, self.weight, self.bias)
        return result


class FusedResBlock(nn.Module):
    """`ResBlock`: three passes around the first convolution, one before and one after the second."""

    def __init__(self, block: ResBlock, dtype: torch.dtype) -> None:
        super().__init__()
        self.resample_mode, self.scale = block.resample_mode, block.scale
        self.norm_in, self.norm_out = FusedNorm(block.norm_in, dtype), FusedNorm(block.norm_out, dtype)
        self.gate = FusedGate(block.gate)
        assert block.conv_in.bias is not None
        assert block.conv_out.bias is not None
        self.conv_in, self.conv_out, self.skip = block.conv_in, block.conv_out, block.skip
        self.register_buffer("bias_in", block.conv_in.bias.detach().float())
        bias = block.conv_out.bias.detach().float()
        if isinstance(block.skip, nn.Conv2d):
            assert block.resample_mode == "none"
            assert block.skip.bias is not None
            bias = bias + block.skip.bias.detach().float()
        self.register_buffer("bias_out", bias)

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        kernels = _kernels()
        x = kernels.pixels_first(x.to(self.norm_in.dtype))
        h, skip, mode = self.before_the_sum(x, emb)
        result: Tensor = kernels.add_skip(h, self.bias_out, skip, resample=mode)
        return result

    def first_map(self, x: Tensor) -> Tensor:
        """Return the first convolution's map; `bias_in` is still missing in it."""
        h = self.norm_in(x, "gelu", self.resample_mode)
        made: Tensor = _kernels().pixels_first(F.conv2d(h, self.conv_in.weight, None, padding=1))
        return made

    def before_the_sum(self, x: Tensor, emb: Tensor | None) -> tuple[Tensor, Tensor, str]:
        """Return what the block adds: (h, skip, how skip is resampled); `bias_out` is still missing in h."""
        kernels = _kernels()
        h = self.first_map(x)
        gain = None
        if self.scale is not None:
            assert emb is not None
            gain = self.scale(F.silu(emb.float())).contiguous()
        scale, shift = self.norm_out.coefficients(h, gain=gain, before=self.get_buffer("bias_in"))
        h = F.conv2d(self.gate(h, scale, shift), self.conv_out.weight, None, padding=1)
        skip, mode = x, self.resample_mode
        if isinstance(self.skip, nn.Conv2d):
            skip, mode = kernels.pixels_first(F.conv2d(x, self.skip.weight)), "none"
        return h.contiguous(memory_format=torch.channels_last), skip, mode


class FusedInjection(nn.Module):
    """`InjectionHead` with norm and activation in one."""

    def __init__(self, head: InjectionHead, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.conv = FusedNorm(head.norm, dtype), head.conv

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(self.norm(x, "silu"))
        return result


class FusedDates(nn.Module):
    """`TemporalAttention` in which queries, keys and values are read once or twice, and nothing else is written."""

    def __init__(self, attention: TemporalAttention, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.to_query_key = attention.norm, attention.to_query_key
        self.out, self.feed_forward = attention.out, attention.feed_forward

    def forward(self, frames: Tensor, available: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `TemporalAttention` returns; before: a bias (D,) that the frames still lack."""
        kernels = _kernels()
        dates = frames.shape[1]
        flat = self.norm(rearrange(frames, "b t d h w -> (b t) d h w"), before=before)
        values = flat.unflatten(0, (-1, dates))
        query_key = kernels.pixels_first(self.to_query_key(flat)).unflatten(0, (-1, dates))
        queries, keys = query_key.chunk(2, dim=2)
        if kernels.can_attend(keys.shape[2], values.shape[2]):
            fused = kernels.attend(queries, keys, values, available)
        else:
            fused = attend_over_dates(masked_mean(queries, available), keys, values, available)
        return self.feed_forward(self.out(fused)), keys, values


class FusedFusion(nn.Module):
    """`TemporalFusion` with its gates fused with the norms before them."""

    def __init__(self, fusion: TemporalFusion, better: Better, dtype: torch.dtype, *, joined: bool = False) -> None:
        super().__init__()
        self.joined = joined
        self.cross_gate, self.self_gate = FusedGate(fusion.cross_gate), FusedGate(fusion.self_gate)
        self.fusion, self.dtype = exchanged(fusion, better), dtype

    def forward(
        self, frames: Tensor, keys: Tensor, values: Tensor, available: Tensor, available_low: Tensor, emb: Tensor
    ) -> Tensor:
        v = self.fusion.blend.sigmoid()
        near = self.cross(frames, keys, values, available_low, emb)
        return v * near.float() + (1 - v) * self.own(frames, available).float()

    def cross(self, frames: Tensor, keys: Tensor, values: Tensor, available: Tensor, emb: Tensor) -> Tensor:
        kernels, own = _kernels(), self.fusion
        dates = frames.shape[1]
        flat = rearrange(frames, "b t d h w -> (b t) d h w").to(self.dtype)
        deep = own.patches == "depth"
        small = space_to_depth(flat, own.factor) if deep else F.avg_pool2d(flat, own.factor)
        tokens = own.to_query(own.norm_query(own.patches_in(small)))
        query = masked_mean(rearrange(tokens, "(b t) d h w -> b t d h w", t=dates), available)
        u = own.patches_out(own.attended(attend_over_dates(query, keys, values, available)))
        u = depth_to_space(u, own.factor) if deep else F.interpolate(u, scale_factor=own.factor, mode="bilinear")
        u = kernels.pixels_first(u.to(self.dtype))
        gain, extra = own.cross_norm.modulation(F.silu(emb.float())).chunk(2, dim=1)
        scale, shift = kernels.norm_coefficients(u, 1, None, None, 1e-5, gain=gain.contiguous())
        return u + own.cross_out(self.cross_gate(u, scale, shift + extra))

    def own(self, frames: Tensor, available: Tensor) -> Tensor:
        own = self.fusion
        flat = rearrange(frames, "b t d h w -> (b t) d h w")
        lift, bias = own.self_in, None
        if self.joined and isinstance(lift, AlignedConv):
            # All dates at full resolution: the bias goes into the norm that comes next.
            lifted, bias = lift.apply_to(flat, None), lift.bias
        else:
            lifted = lift(flat)
        fused, _, _ = own.self_attention(
            rearrange(lifted, "(b t) d h w -> b t d h w", t=frames.shape[1]), available, before=bias
        )
        result: Tensor = own.self_out(self.self_gate(own.self_mix(fused)))
        return result
