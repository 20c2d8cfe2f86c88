"""Building blocks of the networks: residual blocks, gate, embeddings, space-to-depth, padding, the model's range.

The blocks have no time axis: callers fold dates into the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

GROUPS = 16
M = TypeVar("M", bound=nn.Module)
Array = TypeVar("Array", Tensor, np.ndarray)
Resample = Literal["none", "down", "up"]


def to_model_range(reflectance: Array) -> Array:
    """Return reflectance [0, 1] mapped to the model's range [-1, 1]."""
    return reflectance * 2 - 1


def to_reflectance(model_range: Array) -> Array:
    """Return the model's range [-1, 1] mapped to reflectance; values outside are not clipped."""
    return (model_range + 1) / 2


def is_exporting() -> bool:
    """Whether a graph with free sizes is being traced (`sader.inference.onnx`); sizes must not become constants."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that turns autocast off for operations on `x`."""
    # "meta" tensors (operation counts) have no autocast; exported graphs cannot express it.
    if x.device.type == "meta" or is_exporting():
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """A context for least squares on `x`: no autocast and no TF32, whose 10 bits are too few for covariances."""
    # torch.get_float32_matmul_precision raises where the settings of the backends differ, so it is not used here.
    tf32 = x.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    if tf32:
        torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with without_autocast(x):
            yield
    finally:
        if tf32:
            torch.backends.cuda.matmul.allow_tf32 = True


class GroupNorm32(nn.GroupNorm):
    """Group normalisation with float32 statistics for every input type."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            # F.group_norm refuses a single value per group, which one pixel at the coarsest level can be.
            return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        # Half-precision kernels of group_norm accumulate in float32. Autocast would write a float32 result: twice the
        # memory traffic for the same statistics.
        with without_autocast(x):
            return torch.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def group_norm(channels: int) -> GroupNorm32:
    """Return the paper's normalisation: 16 groups, or the largest smaller number that divides the channels."""
    groups = next(g for g in range(min(GROUPS, channels), 0, -1) if channels % g == 0)
    return GroupNorm32(groups, channels, eps=1e-5)


def zero_init(module: M) -> M:
    """Return `module` with all parameters set to zero, so that its residual branch adds nothing at first."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def space_to_depth(x: Tensor, factor: int) -> Tensor:
    """Return (..., C*f*f, H/f, W/f) from (..., C, H, W): each f x f block becomes channels."""
    if factor == 1:
        return x
    return rearrange(x, "... c (h fh) (w fw) -> ... (c fh fw) h w", fh=factor, fw=factor)


def depth_to_space(x: Tensor, factor: int) -> Tensor:
    """Return (..., C, H*f, W*f) from (..., C*f*f, H, W), the inverse of `space_to_depth`."""
    if factor == 1:
        return x
    return rearrange(x, "... (c fh fw) h w -> ... c (h fh) (w fw)", fh=factor, fw=factor)


def reflect_pad(x: Tensor, height: int, width: int) -> Tensor:
    """Return x (..., H, W) extended at the bottom and right to (height, width) by reflection.

    Unlike `F.pad` it takes any rank and dtype, and padding longer than the image is reflected again.
    """

    def reflected(size: int, wanted: int) -> Tensor:
        period = max(2 * (size - 1), 1)
        position = torch.arange(wanted, device=x.device) % period
        return torch.where(position < size, position, period - position)

    h, w = x.shape[-2:]
    if h != height:
        x = x.index_select(-2, reflected(h, height))
    if w != width:
        x = x.index_select(-1, reflected(w, width))
    return x


class Gate(nn.Module):
    """u -> GELU(u) + a * GELU(b) with [a, b] = Conv1x1(u): an activation that can also multiply."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.split = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.split(x).chunk(2, dim=1)
        return F.gelu(x) + a * F.gelu(b)


class FourierFeatures(nn.Module):
    """cos and sin of a scalar at fixed random frequencies : (B,) -> (B, features)."""

    frequencies: Tensor

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # fixed: models of one preset agree
        frequencies = torch.randn(features // 2, generator=generator, device="cpu")
        self.register_buffer("frequencies", frequencies.to(torch.get_default_device()))

    def forward(self, value: Tensor) -> Tensor:
        angle = 2 * torch.pi * value.float()[..., None] * self.frequencies
        return torch.cat([angle.cos(), angle.sin()], dim=-1)


class ScalarEmbedding(nn.Module):
    """Embedding of one number per item (noise level, day): Fourier features and a small MLP, (N,) -> (N, width)."""

    def __init__(self, width: int = 256, features: int = 64) -> None:
        super().__init__()
        self.features = FourierFeatures(features)
        self.mix = nn.Linear(features, features, bias=False)
        self.layers = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, value: Tensor) -> Tensor:
        return self.layers(self.mix(self.features(value)))


class ResBlock(nn.Module):
    """Residual block: norm, GELU, resample, conv; norm scaled by the embedding; gate, conv.

    The embedding scales the features and does not shift them. `emb_width=None` gives the unconditioned block of the
    condition decoder. The last convolution starts at zero, so that a new block returns its input.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        emb_width: int | None = None,
        resample: Resample = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.resample_mode = resample
        self.norm_in = group_norm(channels_in)
        self.conv_in = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm_out = group_norm(channels_out)
        self.scale = nn.Linear(emb_width, channels_out) if emb_width else None
        self.gate = Gate(channels_out)
        self.dropout = nn.Dropout(dropout)
        self.conv_out = zero_init(nn.Conv2d(channels_out, channels_out, 3, padding=1))
        self.skip = nn.Identity() if channels_in == channels_out else nn.Conv2d(channels_in, channels_out, 1)

    def resample(self, x: Tensor) -> Tensor:
        if self.resample_mode == "down":
            return F.avg_pool2d(x, 2)
        if self.resample_mode == "up":
            return F.interpolate(x, scale_factor=2, mode="nearest")
        return x

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        h = self.norm_out(self.conv_in(self.resample(F.gelu(self.norm_in(x)))))
        if self.scale is not None:
            assert emb is not None, "this block was built with an embedding"
            h = h * (1 + self.scale(F.silu(emb)))[:, :, None, None].to(h.dtype)
        return self.conv_out(self.dropout(self.gate(h))) + self.skip(self.resample(x))
