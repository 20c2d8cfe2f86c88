"""Triton kernels for the temporal fusion of the paper's network: its attention over dates and what surrounds it.

At full resolution and for all dates, maps of queries and keys are what costs. The softmax over dates needs neither:
with u the normalised features of a date and m their mean over the dates,
    q . k = (Wq m + bq) . (Wk u + bk) = (Wk' Wq m + Wk' bq) . u + what is the same for all dates,
so that one small product per pixel takes the place of both maps. See `model.folded` for who calls these.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sader.model.kernels import _gelu, empty_map, pixel_stride

ROWS = 64
"""Pixels that a program takes."""
FRAME = 8
"""Channels of a frame as it is kept: those it has, and zeros."""


@triton.jit
def _mixed_dates_kernel(
    x_ptr, scale_ptr, shift_ptr, there_ptr, match_ptr, offset_ptr, weight_ptr, bias_ptr, out_ptr, sums_ptr,
    x_item, x_pixel, pixels, blocks, T: tl.constexpr, C: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    # x: (B T, C, H, W). match: (C, C), from the mean over dates to what each date is compared with; weight: (C, C).
    number = tl.program_id(0)
    item = (number // blocks).to(tl.int64)
    p = (number % blocks) * BP + tl.arange(0, BP)
    seen = p < pixels
    rows = seen[:, None]
    at = p[:, None].to(tl.int64)
    c = tl.arange(0, C)
    is_there = there_ptr + item * T * pixels + p
    count = tl.zeros((BP,), tl.float32)
    mean = tl.zeros((BP, C), tl.float32)
    for t in range(T):  # not unrolled: all dates at once would not fit into the registers
        frame = item * T + t
        scale = tl.load(scale_ptr + frame * C + c)[None, :]
        shift = tl.load(shift_ptr + frame * C + c)[None, :]
        u = tl.load(x_ptr + frame * x_item + at * x_pixel + c[None, :], mask=rows, other=0.0).to(tl.float32)
        there = tl.load(is_there + t * pixels, mask=seen, other=1).to(tl.float32)
        mean += (u * scale + shift) * there[:, None]
        count += there
    mean = mean / tl.maximum(count, 1.0)[:, None]
    match = tl.load(match_ptr + c[:, None] * C + c[None, :])
    wanted = tl.dot(mean.to(x_ptr.dtype.element_ty), match) + tl.load(offset_ptr + c)[None, :]
    high = tl.zeros((BP,), tl.float32) - 1e30
    total = tl.zeros((BP,), tl.float32)
    mixed = tl.zeros((BP, C), tl.float32)
    for t in range(T):
        frame = item * T + t
        scale = tl.load(scale_ptr + frame * C + c)[None, :]
        shift = tl.load(shift_ptr + frame * C + c)[None, :]
        u = tl.load(x_ptr + frame * x_item + at * x_pixel + c[None, :], mask=rows, other=0.0).to(tl.float32)
        u = u * scale + shift
        there = tl.load(is_there + t * pixels, mask=seen, other=1) != 0
        logit = tl.where(there, tl.sum(u * wanted, axis=1), -1e30)
        higher = tl.maximum(high, logit)
        less = tl.exp(high - higher)
        weight = tl.where(there, tl.exp(logit - higher), 0.0)
        total = total * less + weight
        mixed = mixed * less[:, None] + weight[:, None] * u
        high = higher
    mixed = mixed / total[:, None]
    weights = tl.load(weight_ptr + c[:, None] * C + c[None, :])
    y = tl.dot(mixed.to(x_ptr.dtype.element_ty), weights) + tl.load(bias_ptr + c)[None, :]
    rounded = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (item * pixels + at) * C + c[None, :], rounded, mask=rows)
    z = tl.where(rows, rounded.to(tl.float32), 0.0)
    place = sums_ptr + number.to(tl.int64) * 2 * C + c
    tl.store(place, tl.sum(z, axis=0))
    tl.store(place + C, tl.sum(z * z, axis=0))


@triton.jit
def _feed_forward_kernel(
    x_ptr, scale_ptr, shift_ptr, widen_ptr, widen_bias_ptr, weight_ptr, bias_ptr, out_ptr, pixels, blocks,
    C: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    # x + out(a GELU(b)), [a, b] = widen(x scale + shift); x lies densely.
    number = tl.program_id(0)
    item = (number // blocks).to(tl.int64)
    p = (number % blocks) * BP + tl.arange(0, BP)
    rows = (p < pixels)[:, None]
    c = tl.arange(0, C)
    place = (item * pixels + p[:, None]) * C + c[None, :]
    scale = tl.load(scale_ptr + item * C + c)[None, :]
    shift = tl.load(shift_ptr + item * C + c)[None, :]
    u = tl.load(x_ptr + place, mask=rows, other=0.0).to(tl.float32) * scale + shift
    u = u.to(x_ptr.dtype.element_ty)
    left = tl.load(widen_ptr + c[:, None] * (2 * C) + c[None, :])
    right = tl.load(widen_ptr + c[:, None] * (2 * C) + C + c[None, :])
    a = tl.dot(u, left) + tl.load(widen_bias_ptr + c)[None, :]
    b = tl.dot(u, right) + tl.load(widen_bias_ptr + C + c)[None, :]
    weights = tl.load(weight_ptr + c[:, None] * C + c[None, :])
    y = tl.dot((a * _gelu(b)).to(x_ptr.dtype.element_ty), weights) + tl.load(bias_ptr + c)[None, :]
    y += tl.load(x_ptr + place, mask=rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=rows)


@triton.jit
def _frames_kernel(
    state_ptr, fixed_ptr, present_ptr, there_ptr, out_ptr, deep_ptr, mean_ptr, width, pixels, blocks,
    T: tl.constexpr, CS: tl.constexpr, CF: tl.constexpr, FACTOR: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    # state (B, T, CS, H, W) and fixed (B, T, CF, H, W), float32, beside each other, channels last and filled up with
    # zeros: as they are, as cells of FACTOR x FACTOR pixels (row, column, channel), and their mean over the dates.
    number = tl.program_id(0)
    item = (number // blocks).to(tl.int64)
    p = (number % blocks) * BP + tl.arange(0, BP)
    seen = p < pixels
    rows = seen[:, None]
    c = tl.arange(0, WIDE)[None, :]
    row, column = p // width, p % width
    cell = (row // FACTOR) * (width // FACTOR) + column // FACTOR
    inner = (row % FACTOR) * FACTOR + column % FACTOR
    count = tl.zeros((BP,), tl.float32)
    mean = tl.zeros((BP, WIDE), tl.float32)
    for t in tl.static_range(T):
        frame = item * T + t
        exists = tl.load(present_ptr + frame) != 0
        own = rows & (c < CS) & exists
        value = tl.load(state_ptr + (frame * CS + c) * pixels + p[:, None], mask=own, other=0.0)
        other = rows & (c >= CS) & (c < CS + CF)
        value += tl.load(fixed_ptr + (frame * CF + c - CS) * pixels + p[:, None], mask=other, other=0.0)
        there = tl.load(there_ptr + frame * pixels + p, mask=seen, other=0).to(tl.float32)
        mean += value * there[:, None]
        count += there
        rounded = value.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (frame * pixels + p[:, None]) * WIDE + c, rounded, mask=rows)
        inside = (frame * pixels + cell * (FACTOR * FACTOR) + inner)[:, None]
        tl.store(deep_ptr + inside * WIDE + c, rounded, mask=rows)
    mean = mean / tl.maximum(count, 1.0)[:, None]
    tl.store(mean_ptr + (item * pixels + p[:, None]) * WIDE + c, mean, mask=rows)


@triton.jit
def _gated(u, weight_ptr, bias_ptr, out_ptr, out_bias_ptr, k, n, W: tl.constexpr, dtype: tl.constexpr):
    # out(GELU(u) + a GELU(b)) with all matrices filled up with zeros to W.
    small = u.to(dtype)
    a = tl.dot(small, tl.load(weight_ptr + k * (2 * W) + n)) + tl.load(bias_ptr + n)
    b = tl.dot(small, tl.load(weight_ptr + k * (2 * W) + W + n)) + tl.load(bias_ptr + W + n)
    g = _gelu(u) + a * _gelu(b)
    return tl.dot(g.to(dtype), tl.load(out_ptr + k * W + n)) + tl.load(out_bias_ptr + n)


@triton.jit
def _blend_kernel(
    near_ptr, scale_ptr, shift_ptr, own_ptr, mean_ptr, blend_ptr, near_weights_ptr, near_bias_ptr, near_out_ptr,
    near_out_bias_ptr, own_weights_ptr, own_bias_ptr, own_out_ptr, own_out_bias_ptr, out_ptr, own_item, own_pixel,
    pixels, blocks, C: tl.constexpr, KEPT: tl.constexpr, W: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    # mean + v (near + gated(near scale + shift)) + (1 - v) gated(own), C channels kept as KEPT; W: as tl.dot wants it.
    number = tl.program_id(0)
    item = (number // blocks).to(tl.int64)
    p = (number % blocks) * BP + tl.arange(0, BP)
    at = p[:, None].to(tl.int64)
    n = tl.arange(0, W)[None, :]
    k = tl.arange(0, W)[:, None]
    inside = (p < pixels)[:, None] & (n < C)
    v = 1.0 / (1.0 + tl.exp(-tl.load(blend_ptr)))
    near = tl.load(near_ptr + (item * pixels + at) * KEPT + n, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + item * C + n, mask=n < C, other=0.0)
    shift = tl.load(shift_ptr + item * C + n, mask=n < C, other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    near += _gated(
        near * scale + shift, near_weights_ptr, near_bias_ptr, near_out_ptr, near_out_bias_ptr, k, n, W, dtype
    )
    own = tl.load(own_ptr + item * own_item + at * own_pixel + n, mask=inside, other=0.0).to(tl.float32)
    own = _gated(own, own_weights_ptr, own_bias_ptr, own_out_ptr, own_out_bias_ptr, k, n, W, dtype)
    mean = tl.load(mean_ptr + (item * pixels + at) * KEPT + n, mask=inside, other=0.0)
    y = tl.where(n < C, mean + v * near + (1.0 - v) * own, 0.0)
    room = (p < pixels)[:, None] & (n < KEPT)
    tl.store(out_ptr + (item * pixels + at) * KEPT + n, y.to(out_ptr.dtype.element_ty), mask=room)


def mixed_dates(
    x: Tensor, scale: Tensor, shift: Tensor, there: Tensor, match: Tensor, offset: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention over dates and a product after it, (B, C, H, W) channels last, and its sums for a norm.

    x: (B T, C, H, W) as `pixels_first` gives it; u = x * scale + shift, both (B T, C). there: bool (B, T, H, W).
    match (C, C), offset (C,): a date's logit is u . (mean of u @ match + offset). weight (C, C), bias (C,): the
    product. Matrices in the type of x, rows = inputs; vectors float32. C: a power of two from 16 to 64.
    """
    batch, dates = there.shape[:2]
    _, channels, height, width = x.shape
    out = empty_map(batch, channels, height, width, x)
    pixels = height * width
    blocks = triton.cdiv(pixels, ROWS)
    sums = torch.empty(batch, blocks, 2, channels, device=x.device, dtype=torch.float32)
    _mixed_dates_kernel[(batch * blocks,)](
        x, scale, shift, there.contiguous().view(torch.uint8), match, offset, weight, bias, out, sums, x.stride(0),
        pixel_stride(x), pixels, blocks, T=dates, C=channels, BP=ROWS, **_settings(x, registers=160),
    )  # fmt: skip
    return out, sums


def feed_forward(
    x: Tensor, scale: Tensor, shift: Tensor, widen: Tensor, widen_bias: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Return x + (a * GELU(b)) weight + bias with [a, b] = (x * scale + shift) widen + widen_bias.

    x: (B, C, H, W), dense and channels last. widen (C, 2C), weight (C, C): rows = inputs, in the type of x; biases
    float32. C: a power of two from 16 to 64.
    """
    batch, channels, height, width = x.shape
    out = empty_map(batch, channels, height, width, x)
    blocks = triton.cdiv(height * width, ROWS)
    _feed_forward_kernel[(batch * blocks,)](
        x, scale, shift, widen, widen_bias, weight, bias, out, height * width, blocks, C=channels, BP=ROWS,
        **_settings(x),
    )  # fmt: skip
    return out


def frame_maps(
    state: Tensor, fixed: Tensor, present: Tensor, there: Tensor, factor: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (frames (B T, 8, H, W), cells (B T, 8 f f, H/f, W/f), mean over dates (B, 8, H, W)), channels last.

    state (B, T, S, H, W), fixed (B, T, F, H, W), float32, S + F at most 8: beside each other, filled up with zeros; the
    state of frames that are not `present` (B, T) is zero. A cell's channels are (row, column, channel) of its pixels.
    frames and cells are `dtype`, the mean over what is `there`, bool (B, T, H, W), is float32.
    """
    batch, dates, states, height, width = state.shape
    like = torch.empty(0, device=state.device, dtype=dtype)
    frames = empty_map(batch * dates, FRAME, height, width, like)
    cells = empty_map(batch * dates, FRAME * factor**2, height // factor, width // factor, like)
    mean = empty_map(batch, FRAME, height, width, state)
    pixels = height * width
    blocks = triton.cdiv(pixels, 128)
    _frames_kernel[(batch * blocks,)](
        state.contiguous(), fixed.contiguous(), present.contiguous().view(torch.uint8),
        there.contiguous().view(torch.uint8), frames, cells, mean, width, pixels, blocks, T=dates, CS=states,
        CF=fixed.shape[2], FACTOR=factor, WIDE=FRAME, BP=128,
    )  # fmt: skip
    return frames, cells, mean


def blend(
    near: Tensor, scale: Tensor, shift: Tensor, own: Tensor, mean: Tensor, share: Tensor, *, channels: int,
    near_matrices: list[Tensor], own_matrices: list[Tensor],
) -> Tensor:  # fmt: skip
    """Return mean + v (near + gated(near * scale + shift)) + (1 - v) gated(own), (B, 8, H, W), channels last.

    v = sigmoid(share). near, mean: (B, 8, H, W), dense; own: (B, C, H, W) as `pixels_first` gives it. scale, shift: (B,
    C). The matrices of a gate and the product after it, filled up with zeros to 16: (16, 32), (32,), (16, 16), (16,).
    """
    batch, kept, height, width = near.shape
    out = empty_map(batch, kept, height, width, near)
    blocks = triton.cdiv(height * width, ROWS)
    _blend_kernel[(batch * blocks,)](
        near, scale, shift, own, mean, share, *near_matrices, *own_matrices, out, own.stride(0), pixel_stride(own),
        height * width, blocks, C=channels, KEPT=kept, W=16, BP=ROWS, **_settings(near),
    )  # fmt: skip
    return out


def _settings(x: Tensor, *, registers: int = 128) -> dict[str, Any]:
    """Return how a kernel is built: with so few registers a thread that three or four programs run side by side."""
    return {"num_warps": 4, "num_stages": 2, "maxnreg": registers} if x.is_cuda else {}
