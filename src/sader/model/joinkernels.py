"""Triton kernels between blocks: one map added to another with the sums for the next norm, and a * GELU(b).

With them a map that a block has made is not read again only to be summed up, to get a bias or to be put beside another
one. What they write lies channels last; see `model.kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sader.model.kernels import RESAMPLES, Resample, _gelu, channel_block, empty_map, pixel_stride

JOIN_SPLITS, JOIN_ROWS = 256, 64
"""Programs that share the pixels of one image, and the pixels that a program takes at a time."""


@triton.jit
def _join_kernel(
    x_ptr, skip_ptr, bias_ptr, more_ptr, out_ptr, next_ptr, sums_ptr, skip_item, skip_pixel, more_item, more_pixel,
    out_item, out_pixel, width, pixels, channels, sums_width, STEPS: tl.constexpr, MODE: tl.constexpr,
    MORE: tl.constexpr, KEEP: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # As _add_kernel; further adds `more`, and leaves the sums of the last map that is written. Of these maps x and next
    # lie densely.
    item = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    bias = tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    base = skip_ptr + item * skip_item + c[None, :]
    total = tl.zeros((BP, BC), tl.float32)  # summed over pixels after the loop, as in _sums_kernel
    squares = tl.zeros((BP, BC), tl.float32)
    for step in range(STEPS):
        p = (split * STEPS + step) * BP + tl.arange(0, BP)
        at = p[:, None].to(tl.int64)
        seen = (p < pixels)[:, None] & inside[None, :]
        place = (item * pixels + at) * channels + c[None, :]
        y = tl.load(x_ptr + place, mask=seen, other=0.0).to(tl.float32) + bias
        if MODE == 0:
            y += tl.load(base + at * skip_pixel, mask=seen, other=0.0).to(tl.float32)
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
        rounded = y.to(out_ptr.dtype.element_ty)
        if KEEP:
            tl.store(out_ptr + item * out_item + at * out_pixel + c[None, :], rounded, mask=seen)
        if MORE:
            added = tl.load(more_ptr + item * more_item + at * more_pixel + c[None, :], mask=seen, other=0.0)
            rounded = (rounded.to(tl.float32) + added.to(tl.float32)).to(out_ptr.dtype.element_ty)
            tl.store(next_ptr + place, rounded, mask=seen)
        z = tl.where(seen, rounded.to(tl.float32), 0.0)
        total += z
        squares += z * z
    at_sums = sums_ptr + ((item * tl.num_programs(1) + split) * 2) * sums_width + c
    tl.store(at_sums, tl.sum(total, axis=0), mask=inside)
    tl.store(at_sums + sums_width, tl.sum(squares, axis=0), mask=inside)


@triton.jit
def _product_kernel(x_ptr, out_ptr, x_item, x_pixel, pixels, channels, BP: tl.constexpr, BC: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    seen = (p < pixels)[:, None] & (c < channels)[None, :]
    at = p[:, None].to(tl.int64)
    a_ptr = x_ptr + item * x_item + at * x_pixel + c[None, :]
    a = tl.load(a_ptr, mask=seen, other=0.0).to(tl.float32)
    b = tl.load(a_ptr + channels, mask=seen, other=0.0).to(tl.float32)
    place = out_ptr + (item * pixels + at) * channels + c[None, :]
    tl.store(place, (a * _gelu(b)).to(out_ptr.dtype.element_ty), mask=seen)


@triton.jit
def _interleave_kernel(
    first_ptr, second_ptr, third_ptr, fourth_ptr, out_ptr, sums_ptr, width, pixels, channels,
    STEPS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # Four maps (N, C, h + 1, w + 1), each for one of the four pixels inside a pixel, become one of twice the size.
    # width, pixels: of the small map, w and h w.
    item = tl.program_id(0).to(tl.int64)
    phase = tl.program_id(1) % 4
    split = tl.program_id(1) // 4
    down, right = phase // 2, phase % 2
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    x_ptr = first_ptr
    if phase == 1:
        x_ptr = second_ptr
    if phase == 2:
        x_ptr = third_ptr
    if phase == 3:
        x_ptr = fourth_ptr
    height = pixels // width
    x_ptr += item * (height + 1) * (width + 1) * channels
    out_ptr += item * 4 * pixels * channels
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for step in range(STEPS):
        p = (split * STEPS + step) * BP + tl.arange(0, BP)
        seen = (p < pixels)[:, None] & inside[None, :]
        row, column = p // width, p % width
        source = ((row + down) * (width + 1) + column + right).to(tl.int64)
        x = tl.load(x_ptr + source[:, None] * channels + c[None, :], mask=seen, other=0.0)
        target = ((2 * row + down) * (2 * width) + 2 * column + right).to(tl.int64)
        tl.store(out_ptr + target[:, None] * channels + c[None, :], x, mask=seen)
        z = x.to(tl.float32)
        total += z
        squares += z * z
    at_sums = sums_ptr + ((item * tl.num_programs(1) + tl.program_id(1)) * 2) * channels + c
    tl.store(at_sums, tl.sum(total, axis=0), mask=inside)
    tl.store(at_sums + channels, tl.sum(squares, axis=0), mask=inside)


def empty_sums(n: int, channels: int, height: int, width: int, like: Tensor) -> Tensor:
    """Return the room (N, splits, 2, C) for the sums that `join` leaves of a map of this size."""
    steps = triton.cdiv(height * width, JOIN_ROWS * JOIN_SPLITS)
    splits = triton.cdiv(height * width, JOIN_ROWS * steps)
    return torch.empty(n, splits, 2, channels, device=like.device, dtype=torch.float32)


def join(
    x: Tensor, bias: Tensor, skip: Tensor, sums: Tensor, *, resample: Resample = "none", more: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x + bias + resample(skip) (+ more), channels last, and leave its sums in `sums`.

    x lies densely; skip, more and out as `pixels_first` gives them. out: room for the map without `more`; without it,
    and with `more`, that map is not kept. sums: (N, splits, 2, C) of `empty_sums`, or a slice of its channels.
    """
    n, channels, height, width = x.shape
    pixels = height * width
    following = None if more is None else empty_map(n, channels, height, width, x)
    keep = out is not None or more is None
    if out is None:
        out = empty_map(n, channels, height, width, x) if keep else following
    assert out is not None
    block = channel_block(channels)
    splits = sums.shape[1]
    steps = triton.cdiv(pixels, JOIN_ROWS * JOIN_SPLITS)
    other = x if more is None else more
    settings: dict[str, Any] = {"num_warps": 8 if block <= 64 else 16} if x.is_cuda else {}
    _join_kernel[(n, splits, triton.cdiv(channels, block))](
        x, skip, bias, other, out, out if following is None else following, sums, skip.stride(0), pixel_stride(skip),
        other.stride(0), pixel_stride(other), out.stride(0), pixel_stride(out), width, pixels, channels,
        sums.stride(2), STEPS=steps, MODE=RESAMPLES[resample], MORE=more is not None, KEEP=keep, BP=JOIN_ROWS, BC=block,
        **settings,
    )  # fmt: skip
    return out if following is None else following


def interleave(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the map (N, C, 2h, 2w), channels last, of the four pixels inside each pixel, and its sums for a norm.

    parts: four of (N, C, h + 1, w + 1), dense and channels last, of which part 2 r + c counts from row r and column c.
    """
    n, channels, height, width = parts[0].shape
    height, width = height - 1, width - 1
    out = empty_map(n, channels, 2 * height, 2 * width, parts[0])
    pixels = height * width
    steps = triton.cdiv(pixels, JOIN_ROWS * (JOIN_SPLITS // 4))
    splits = 4 * triton.cdiv(pixels, JOIN_ROWS * steps)
    sums = torch.empty(n, splits, 2, channels, device=out.device, dtype=torch.float32)
    block = channel_block(channels)
    settings: dict[str, Any] = {"num_warps": 8 if block <= 64 else 16} if out.is_cuda else {}
    _interleave_kernel[(n, splits, triton.cdiv(channels, block))](
        *parts, out, sums, width, pixels, channels, STEPS=steps, BP=JOIN_ROWS, BC=block, **settings
    )
    return out, sums


def product_gelu(x: Tensor) -> Tensor:
    """Return a * GELU(b) for the halves a and b of the channels of x (N, 2C, H, W), channels last."""
    n, channels, height, width = x.shape
    out = empty_map(n, channels // 2, height, width, x)
    block = channel_block(channels // 2)
    rows = max(1, 4096 // block)
    grid = (n, triton.cdiv(height * width, rows), triton.cdiv(channels // 2, block))
    _product_kernel[grid](x, out, x.stride(0), pixel_stride(x), height * width, channels // 2, BP=rows, BC=block)
    return out
