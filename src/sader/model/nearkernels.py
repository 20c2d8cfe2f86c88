"""Triton kernels for the hybrid attention: cosine attention in a small window, and the sum of its two branches.

The window is walked in the cache; queries, keys and values are read where the convolution left them, so nothing is
gathered, masked or laid out anew. See `model.attention` for the same in PyTorch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sader.model.joinkernels import JOIN_ROWS, JOIN_SPLITS
from sader.model.kernels import channel_block, empty_map, pixel_stride

ROWS = 8
"""Pixels that a program of the window attention takes."""


@triton.jit
def _window_kernel(
    x_ptr, bias_ptr, heat_ptr, out_ptr, x_item, x_pixel, height, width, pixels, blocks,
    HEADS: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    # x: queries, keys and values beside each other, (head, D) each, without their bias. heat: (HEADS,).
    C: tl.constexpr = HEADS * D
    number = tl.program_id(0)
    item = (number // blocks).to(tl.int64)
    p = (number % blocks) * BP + tl.arange(0, BP)
    rows = (p < pixels)[:, None, None]
    head = tl.arange(0, HEADS)
    c = head[None, :, None] * D + tl.arange(0, D)[None, None, :]
    base = x_ptr + item * x_item + c
    heat = tl.load(heat_ptr + head)[None, :]
    key_bias = tl.load(bias_ptr + C + c).to(tl.float32)
    query = tl.load(base + p[:, None, None].to(tl.int64) * x_pixel, mask=rows, other=0.0).to(tl.float32)
    query += tl.load(bias_ptr + c).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(query * query, axis=2)), 1e-6)
    query = query * (heat / length)[:, :, None]
    # At borders the window is shifted inward.
    top = tl.maximum(tl.minimum(p // width - KERNEL // 2, height - KERNEL), 0)
    left = tl.maximum(tl.minimum(p % width - KERNEL // 2, width - KERNEL), 0)
    high = tl.zeros((BP, HEADS), tl.float32) - 1e30
    total = tl.zeros((BP, HEADS), tl.float32)
    mixed = tl.zeros((BP, HEADS, D), tl.float32)
    for number_in_window in range(KERNEL * KERNEL):
        source = (top + number_in_window // KERNEL) * width + left + number_in_window % KERNEL
        place = base + source[:, None, None].to(tl.int64) * x_pixel
        key = tl.load(place + C, mask=rows, other=0.0).to(tl.float32) + key_bias
        size = tl.maximum(tl.sqrt(tl.sum(key * key, axis=2)), 1e-6)
        logit = tl.sum(query * key, axis=2) / size
        value = tl.load(place + 2 * C, mask=rows, other=0.0).to(tl.float32)
        higher = tl.maximum(high, logit)
        less = tl.exp(high - higher)
        weight = tl.exp(logit - higher)
        total = total * less + weight
        mixed = mixed * less[:, :, None] + weight[:, :, None] * value
        high = higher
    mixed = mixed / total[:, :, None] + tl.load(bias_ptr + 2 * C + c).to(tl.float32)  # weights sum to one
    place = out_ptr + (item * pixels + p[:, None, None]) * C + c
    tl.store(place, mixed.to(out_ptr.dtype.element_ty), mask=rows)


@triton.jit
def _branches_kernel(
    near_ptr, near_new_ptr, near_bias_ptr, far_ptr, far_new_ptr, gains_ptr, out_ptr, sums_ptr, near_item, near_pixel,
    far_item, far_pixel, pixels, channels, STEPS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # (1 + g1) (near + new + bias) + (1 + g2) (far + new), and the sums of it. The new maps lie densely.
    item = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    bias = tl.load(near_bias_ptr + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    near_gain = 1.0 + tl.load(gains_ptr + item * 2 * channels + c, mask=inside, other=0.0)[None, :]
    far_gain = 1.0 + tl.load(gains_ptr + (item * 2 + 1) * channels + c, mask=inside, other=0.0)[None, :]
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for step in range(STEPS):
        p = (split * STEPS + step) * BP + tl.arange(0, BP)
        at = p[:, None].to(tl.int64)
        seen = (p < pixels)[:, None] & inside[None, :]
        place = (item * pixels + at) * channels + c[None, :]
        near = tl.load(near_ptr + item * near_item + at * near_pixel + c[None, :], mask=seen, other=0.0)
        far = tl.load(far_ptr + item * far_item + at * far_pixel + c[None, :], mask=seen, other=0.0)
        near_new = tl.load(near_new_ptr + place, mask=seen, other=0.0).to(tl.float32)
        far_new = tl.load(far_new_ptr + place, mask=seen, other=0.0).to(tl.float32)
        y = near_gain * (near.to(tl.float32) + near_new + bias) + far_gain * (far.to(tl.float32) + far_new)
        rounded = y.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, rounded, mask=seen)
        z = tl.where(seen, rounded.to(tl.float32), 0.0)
        total += z
        squares += z * z
    at_sums = sums_ptr + ((item * tl.num_programs(1) + split) * 2) * channels + c
    tl.store(at_sums, tl.sum(total, axis=0), mask=inside)
    tl.store(at_sums + channels, tl.sum(squares, axis=0), mask=inside)


def can_window(height: int, width: int, heads: int, head_width: int, kernel: int) -> bool:
    """Whether `window_attention` takes such maps: the window fits in, widths are powers of two."""
    powers = all(number & (number - 1) == 0 for number in (heads, head_width))
    return powers and 16 <= heads * head_width <= 512 and min(height, width) >= kernel


def window_attention(x: Tensor, bias: Tensor, heat: Tensor, *, kernel: int) -> Tensor:
    """Return cosine attention of every pixel over its kernel x kernel window, (B, C, H, W), channels last.

    x: (B, 3C, H, W), queries, keys and values, each (heads, D), as `pixels_first` gives it, without their bias (3C,),
    which is in the type of x. heat: (heads,) float32, what the cosine is multiplied by.
    """
    batch, channels, height, width = x.shape
    heads = len(heat)
    out = empty_map(batch, channels // 3, height, width, x)
    blocks = triton.cdiv(height * width, ROWS)
    _window_kernel[(batch * blocks,)](
        x, bias, heat, out, x.stride(0), pixel_stride(x), height, width, height * width, blocks, HEADS=heads,
        D=channels // 3 // heads, KERNEL=kernel, BP=ROWS,
    )  # fmt: skip
    return out


def sum_of_branches(
    near: Tensor, near_new: Tensor, bias: Tensor, far: Tensor, far_new: Tensor, gains: Tensor, sums: Tensor
) -> Tensor:
    """Return (1 + g1) (near + near_new + bias) + (1 + g2) (far + far_new), channels last; its sums go into `sums`.

    Maps (B, C, H, W): near and far as `pixels_first` gives them, the others dense. gains: float32 (B, 2C), g1 then g2.
    sums: of `joinkernels.empty_sums`.
    """
    n, channels, height, width = near.shape
    out = empty_map(n, channels, height, width, near_new)
    block = channel_block(channels)
    settings: dict[str, Any] = {"num_warps": 8} if near.is_cuda else {}
    _branches_kernel[(n, sums.shape[1], triton.cdiv(channels, block))](
        near, near_new, bias, far, far_new, gains, out, sums, near.stride(0), pixel_stride(near), far.stride(0),
        pixel_stride(far), height * width, channels, STEPS=triton.cdiv(height * width, JOIN_ROWS * JOIN_SPLITS),
        BP=JOIN_ROWS, BC=block, **settings,
    )  # fmt: skip
    return out
