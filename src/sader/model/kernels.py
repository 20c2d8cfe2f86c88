"""Triton kernels for maps that lie channels last: group normalisation, activation and gate in few passes over memory.

PyTorch's group normalisation on CUDA copies such maps to channels first and back, and every activation, product and
bias is a pass of its own. Here a block's norm is a pass of sums and a scale and shift per channel that the next kernel
applies while it reads. Sums, norms and activations are float32. Needs Triton; `model.fused` decides whether it is used.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Activation = Literal["none", "gelu", "silu"]
Resample = Literal["none", "down", "up"]
ACTIVATIONS = {"none": 0, "gelu": 1, "silu": 2}
RESAMPLES = {"none": 0, "down": 1, "up": 2}
MOST_SPLITS = 128
"""Programs that share the pixels of one image in a sum."""

GATE_ROWS = 64
"""Pixels that a program of the gate takes."""


def pixels_first(x: Tensor) -> Tensor:
    """Return (N, C, H, W) so that neighbouring channels are neighbours in memory and rows of pixels follow each other.

    A slice of channels of such a map is one already; anything else is copied.
    """
    _, c, h, w = x.shape
    s = x.stride()
    # The stride of an axis of one says nothing, and PyTorch sets it as it likes.
    dense = (c == 1 or s[1] == 1) and (h == 1 or s[2] == w * s[3])
    return x if dense and s[3] >= c else x.contiguous(memory_format=torch.channels_last)


@triton.jit
def _gelu(x):
    # x Phi(x), with Phi = 1/2 + z P(z^2) and z = x kept within 4.25, where Phi is 0 or 1 but for 1e-5: at most 6e-5
    # off, a quarter of what rounding the result to float16 costs at 1. tl.erf takes three times the instructions, and
    # they, not memory, were what the gate waited for.
    z = tl.minimum(tl.maximum(x, -4.25), 4.25)
    s = z * z
    r = s * 6.67036079149419e-11 - 6.260646667755054e-09
    r = r * s + 2.584792184734397e-07
    r = r * s - 6.2563935898651835e-06
    r = r * s + 0.0001004754813038744
    r = r * s - 0.0011552015785127878
    r = r * s + 0.009989365004003048
    r = r * s - 0.0666634812951088
    r = r * s + 0.3991096019744873
    return x * (z * r + 0.5)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == 1:
        x = _gelu(x)
    elif KIND == 2:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def _sums_kernel(
    x_ptr, out_ptr, x_item, x_pixel, pixels, channels, STEPS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    item, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = block * BC + tl.arange(0, BC)
    inside = c < channels
    # Summed over pixels once, after the loop: in it, that would be a barrier at every step.
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    base = x_ptr + item.to(tl.int64) * x_item
    for step in range(STEPS):
        p = (split * STEPS + step) * BP + tl.arange(0, BP)
        seen = (p < pixels)[:, None] & inside[None, :]
        x = tl.load(base + p[:, None].to(tl.int64) * x_pixel + c[None, :], mask=seen, other=0.0).to(tl.float32)
        total += x
        squares += x * x
    place = out_ptr + ((item * tl.num_programs(1) + split) * 2) * channels + c
    tl.store(place, tl.sum(total, axis=0), mask=inside)
    tl.store(place + channels, tl.sum(squares, axis=0), mask=inside)


@triton.jit
def _norm_kernel(
    sums_ptr, weight_ptr, bias_ptr, gain_ptr, before_ptr, scale_ptr, shift_ptr, pixels, channels, eps,
    SPLITS: tl.constexpr, PER: tl.constexpr, WIDE: tl.constexpr, AFFINE: tl.constexpr, GAIN: tl.constexpr,
    BEFORE: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    item, group = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, WIDE)
    inside = k < PER
    c = group * PER + k
    rows = tl.arange(0, BS)
    total = tl.zeros((WIDE,), tl.float32)
    squares = tl.zeros((WIDE,), tl.float32)
    for start in range(0, SPLITS, BS):
        split = start + rows
        place = sums_ptr + ((item * SPLITS + split[:, None]) * 2) * channels + c[None, :]
        seen = (split < SPLITS)[:, None] & inside[None, :]
        total += tl.sum(tl.load(place, mask=seen, other=0.0), axis=0)
        squares += tl.sum(tl.load(place + channels, mask=seen, other=0.0), axis=0)
    count = pixels * 1.0
    added = tl.zeros((WIDE,), tl.float32)
    if BEFORE:  # a bias that was left out of the map: its part in the sums is known
        added = tl.load(before_ptr + c, mask=inside, other=0.0).to(tl.float32)
        squares += 2 * added * total + count * added * added
        total += count * added
    mean = tl.sum(total, axis=0) / (count * PER)
    variance = tl.maximum(tl.sum(squares, axis=0) / (count * PER) - mean * mean, 0.0)
    scale = tl.zeros((WIDE,), tl.float32) + 1.0 / tl.sqrt(variance + eps)
    shift = -mean * scale
    if AFFINE:
        weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
        scale, shift = scale * weight, shift * weight + tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if GAIN:
        gain = 1.0 + tl.load(gain_ptr + item * channels + c, mask=inside, other=0.0).to(tl.float32)
        scale, shift = scale * gain, shift * gain
    shift += scale * added
    tl.store(scale_ptr + item * channels + c, scale, mask=inside)
    tl.store(shift_ptr + item * channels + c, shift, mask=inside)


@triton.jit
def _apply_kernel(
    x_ptr, scale_ptr, shift_ptr, out_ptr, x_item, x_pixel, width, pixels, channels,
    KIND: tl.constexpr, MODE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # width, pixels: of the output.
    item = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    seen = (p < pixels)[:, None] & inside[None, :]
    scale = tl.load(scale_ptr + item * channels + c, mask=inside, other=0.0)[None, :]
    shift = tl.load(shift_ptr + item * channels + c, mask=inside, other=0.0)[None, :]
    base = x_ptr + item * x_item + c[None, :]
    if MODE == 0:
        x = tl.load(base + p[:, None].to(tl.int64) * x_pixel, mask=seen, other=0.0).to(tl.float32)
        y = _activated(x * scale + shift, KIND)
    elif MODE == 2:
        source = (p // width // 2) * (width // 2) + (p % width) // 2
        x = tl.load(base + source[:, None].to(tl.int64) * x_pixel, mask=seen, other=0.0).to(tl.float32)
        y = _activated(x * scale + shift, KIND)
    else:
        y = tl.zeros((BP, BC), tl.float32)
        corner = (p // width * 2) * (width * 2) + (p % width) * 2
        for dy in tl.static_range(2):
            for dx in tl.static_range(2):
                source = corner + dy * width * 2 + dx
                x = tl.load(base + source[:, None].to(tl.int64) * x_pixel, mask=seen, other=0.0).to(tl.float32)
                y += _activated(x * scale + shift, KIND)
        y = y * 0.25
    place = out_ptr + (item * pixels + p[:, None]) * channels + c[None, :]
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=seen)


@triton.jit
def _gate_kernel(
    x_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, out_ptr, x_item, x_pixel, pixels, blocks,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # weight: (C, 2C), rows = inputs; columns a then b. C need not be a multiple of the blocks. Programs that read the
    # same pixels follow each other, so that all but the first find them in the cache.
    SHARES: tl.constexpr = (C + BN - 1) // BN
    number = tl.program_id(0)
    n = (number % SHARES) * BN + tl.arange(0, BN)
    item = (number // SHARES // blocks).to(tl.int64)
    p = (number // SHARES % blocks) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    seen = (p < pixels)[:, None]
    wanted = n < C
    rows = x_ptr + item * x_item + p[:, None].to(tl.int64) * x_pixel
    a = tl.zeros((BM, BN), tl.float32)
    b = tl.zeros((BM, BN), tl.float32)
    for first in range(0, C, BK):
        c = first + k
        there = c < C
        scale = tl.load(scale_ptr + item * C + c, mask=there, other=0.0)[None, :]
        shift = tl.load(shift_ptr + item * C + c, mask=there, other=0.0)[None, :]
        u = tl.load(rows + c[None, :], mask=seen & there[None, :], other=0.0).to(tl.float32) * scale + shift
        u = u.to(x_ptr.dtype.element_ty)
        both = there[:, None] & wanted[None, :]
        left = tl.load(weight_ptr + c[:, None] * (2 * C) + n[None, :], mask=both, other=0.0)
        right = tl.load(weight_ptr + c[:, None] * (2 * C) + C + n[None, :], mask=both, other=0.0)
        a = tl.dot(u, left, a)
        b = tl.dot(u, right, b)
    a += tl.load(bias_ptr + n, mask=wanted, other=0.0).to(tl.float32)[None, :]
    b += tl.load(bias_ptr + C + n, mask=wanted, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(scale_ptr + item * C + n, mask=wanted, other=0.0)[None, :]
    shift = tl.load(shift_ptr + item * C + n, mask=wanted, other=0.0)[None, :]
    inside = seen & wanted[None, :]
    own = tl.load(rows + n[None, :], mask=inside, other=0.0).to(tl.float32) * scale + shift
    y = _gelu(own) + a * _gelu(b)
    place = out_ptr + (item * pixels + p[:, None]) * C + n[None, :]
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(
    x_ptr, skip_ptr, bias_ptr, out_ptr, skip_item, skip_pixel, width, pixels, channels,
    MODE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # x lies densely; skip is read at half, the same or twice the size.
    item = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    seen = (p < pixels)[:, None] & inside[None, :]
    place = (item * pixels + p[:, None]) * channels + c[None, :]
    y = tl.load(x_ptr + place, mask=seen, other=0.0).to(tl.float32)
    y += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    base = skip_ptr + item * skip_item + c[None, :]
    if MODE == 0:
        y += tl.load(base + p[:, None].to(tl.int64) * skip_pixel, mask=seen, other=0.0).to(tl.float32)
    elif MODE == 2:
        source = (p // width // 2) * (width // 2) + (p % width) // 2
        y += tl.load(base + source[:, None].to(tl.int64) * skip_pixel, mask=seen, other=0.0).to(tl.float32)
    else:
        corner = (p // width * 2) * (width * 2) + (p % width) * 2
        for dy in tl.static_range(2):
            for dx in tl.static_range(2):
                source = corner + dy * width * 2 + dx
                value = tl.load(base + source[:, None].to(tl.int64) * skip_pixel, mask=seen, other=0.0)
                y += 0.25 * value.to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=seen)


@triton.jit
def _dates_kernel(
    query_ptr, key_ptr, value_ptr, there_ptr, out_ptr,
    q_item, q_date, q_pixel, k_item, k_date, k_pixel, v_item, v_date, v_pixel, pixels, root,
    T: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, MEAN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    # One query per pixel over T dates. MEAN: the query is the mean of the available dates' queries.
    item = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    seen = p < pixels
    rows = seen[:, None]
    at = p[:, None].to(tl.int64)
    d = tl.arange(0, D)[None, :]
    queries = query_ptr + item * q_item + at * q_pixel + d
    keys = key_ptr + item * k_item + at * k_pixel + d
    is_there = there_ptr + item * T * pixels + p
    if MEAN:
        count = tl.zeros((BP,), tl.float32)
        query = tl.zeros((BP, D), tl.float32)
        for t in tl.static_range(T):
            there = tl.load(is_there + t * pixels, mask=seen, other=0).to(tl.float32)
            query += tl.load(queries + t * q_date, mask=rows, other=0.0).to(tl.float32) * there[:, None]
            count += there
        query = query / tl.maximum(count, 1.0)[:, None]
    else:
        query = tl.load(queries, mask=rows, other=0.0).to(tl.float32)
    high = tl.zeros((BP,), tl.float32) - float("inf")
    for t in tl.static_range(T):
        there = tl.load(is_there + t * pixels, mask=seen, other=1)
        key = tl.load(keys + t * k_date, mask=rows, other=0.0).to(tl.float32)
        high = tl.maximum(high, tl.where(there != 0, tl.sum(query * key, axis=1) * root, -float("inf")))
    for first in tl.static_range(0, DV, BV):
        v = first + tl.arange(0, BV)[None, :]
        total = tl.zeros((BP,), tl.float32)
        out = tl.zeros((BP, BV), tl.float32)
        for t in tl.static_range(T):
            there = tl.load(is_there + t * pixels, mask=seen, other=1)
            key = tl.load(keys + t * k_date, mask=rows, other=0.0).to(tl.float32)
            logit = tl.sum(query * key, axis=1) * root
            weight = tl.where(there != 0, tl.exp(logit - high), 0.0)
            value = tl.load(value_ptr + item * v_item + t * v_date + at * v_pixel + v, mask=rows, other=0.0)
            out += weight[:, None] * value.to(tl.float32)
            total += weight
        out = out / total[:, None]
        tl.store(out_ptr + (item * pixels + at) * DV + v, out.to(out_ptr.dtype.element_ty), mask=rows)


def channel_block(channels: int) -> int:
    """Return how many channels a program takes."""
    return 64 if channels % 64 == 0 else min(128, triton.next_power_of_2(channels))


def norm_coefficients(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, *, gain: Tensor | None = None,
    before: Tensor | None = None, sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return float32 (N, C) scale and shift: group_norm(x + before) * (1 + gain) = x * scale + shift.

    x: as `pixels_first` gives it. before: (C,), a bias that x still lacks. gain: (N, C). sums: those of x (N, splits,
    2, C), where they are known (`join`).
    """
    n, channels, height, width = x.shape
    pixels = height * width
    if sums is None:
        block = channel_block(channels)
        rows = 64 if block <= 64 else 32
        steps = triton.cdiv(pixels, rows * MOST_SPLITS)
        splits = triton.cdiv(pixels, rows * steps)
        sums = torch.empty(n, splits, 2, channels, device=x.device, dtype=torch.float32)
        grid = (n, splits, triton.cdiv(channels, block))
        _sums_kernel[grid](x, sums, x.stride(0), pixel_stride(x), pixels, channels, STEPS=steps, BP=rows, BC=block)
    splits = sums.shape[1]
    scale = torch.empty(n, channels, device=x.device, dtype=torch.float32)
    shift = torch.empty_like(scale)
    per = channels // groups
    wide = triton.next_power_of_2(per)
    nothing = scale  # a pointer that is not read
    _norm_kernel[(n, groups)](
        sums, nothing if weight is None else weight, nothing if bias is None else bias,
        nothing if gain is None else gain, nothing if before is None else before, scale, shift, pixels, channels, eps,
        SPLITS=splits, PER=per, WIDE=wide, AFFINE=weight is not None, GAIN=gain is not None,
        BEFORE=before is not None, BS=min(triton.next_power_of_2(splits), max(16, 4096 // wide)),
    )  # fmt: skip
    return scale, shift


def pixel_stride(x: Tensor) -> int:
    """Return the distance of neighbouring pixels of a map."""
    return int(x.stride(3)) if x.shape[3] > 1 else int(x.stride(2)) if x.shape[2] > 1 else int(x.shape[1])


def empty_map(n: int, channels: int, height: int, width: int, like: Tensor) -> Tensor:
    """Return room for a map (N, C, H, W), channels last."""
    return torch.empty(
        (n, channels, height, width), device=like.device, dtype=like.dtype, memory_format=torch.channels_last
    )


def apply_norm(
    x: Tensor, scale: Tensor, shift: Tensor, *, activation: Activation, resample: Resample = "none"
) -> Tensor:
    """Return resample(activation(x * scale + shift)), channels last; scale and shift are float32 (N, C)."""
    n, channels, height, width = x.shape
    if resample == "down":
        height, width = height // 2, width // 2
    elif resample == "up":
        height, width = 2 * height, 2 * width
    out = empty_map(n, channels, height, width, x)
    block = channel_block(channels)
    rows = max(1, (1024 if resample == "down" else 4096) // block)  # four pixels for one take four times the registers
    grid = (n, triton.cdiv(height * width, rows), triton.cdiv(channels, block))
    _apply_kernel[grid](
        x, scale, shift, out, x.stride(0), pixel_stride(x), width, height * width, channels,
        KIND=ACTIVATIONS[activation], MODE=RESAMPLES[resample], BP=rows, BC=block,
    )  # fmt: skip
    return out


def gate(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return GELU(u) + a * GELU(b) with u = x * scale + shift and [a, b] = u weight + bias.

    weight: (C, 2C) in the type of x; bias: (2C,).
    """
    n, channels, height, width = x.shape
    out = empty_map(n, channels, height, width, x)
    wide = 64 if channels > 32 else max(16, triton.next_power_of_2(channels))
    # 128 registers a thread: a little is spilled, but four programs share a multiprocessor instead of two.
    settings: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "maxnreg": 128} if x.is_cuda else {}
    blocks = triton.cdiv(height * width, GATE_ROWS)
    _gate_kernel[(n * blocks * triton.cdiv(channels, wide),)](
        x, scale, shift, weight, bias, out, x.stride(0), pixel_stride(x), height * width, blocks, C=channels,
        BM=GATE_ROWS, BN=wide, BK=wide, **settings,
    )  # fmt: skip
    return out


def add_skip(x: Tensor, bias: Tensor, skip: Tensor, *, resample: Resample = "none") -> Tensor:
    """Return x + bias + resample(skip), channels last; x lies densely, skip as `pixels_first` gives it."""
    n, channels, height, width = x.shape
    out = empty_map(n, channels, height, width, x)
    block = channel_block(channels)
    rows = max(1, 4096 // block)
    grid = (n, triton.cdiv(height * width, rows), triton.cdiv(channels, block))
    _add_kernel[grid](
        x, skip, bias, out, skip.stride(0), pixel_stride(skip), width, height * width, channels,
        MODE=RESAMPLES[resample], BP=rows, BC=block,
    )  # fmt: skip
    return out


def can_attend(width_k: int, width_v: int) -> bool:
    """Whether `attend` takes keys and values of these widths: a power of two, and a multiple of 16."""
    return width_k >= 16 and width_k & (width_k - 1) == 0 and width_v % 16 == 0


def attend(query: Tensor, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
    """Return attention of one query per pixel over the dates, (B, Dv, H, W), channels last.

    query: (B, D, H, W), or (B, T, D, H, W) of which the mean over the dates that are there is taken. keys (B, T, D, H,
    W), values (B, T, Dv, H, W); in all three neighbouring channels are neighbours in memory. there: bool (B, T, H, W).
    """
    batch, dates, width_k, height, width = keys.shape
    width_v = values.shape[2]
    own = query.ndim == 5
    out = empty_map(batch, width_v, height, width, values)
    pixels = height * width
    rows = 64
    grid = (batch, triton.cdiv(pixels, rows))
    _dates_kernel[grid](
        query, keys, values, there.contiguous().view(torch.uint8), out,
        query.stride(0), query.stride(1) if own else 0, query.stride(-1),
        keys.stride(0), keys.stride(1), keys.stride(-1),
        values.stride(0), values.stride(1), values.stride(-1), pixels, width_k**-0.5,
        T=dates, D=width_k, DV=width_v, BV=min(64, width_v & -width_v), MEAN=own, BP=rows,
    )  # fmt: skip
    return out
