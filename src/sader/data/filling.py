"""Small image operations that the classical methods share: smooth filling of holes and local shares. numpy only."""

from __future__ import annotations

import numpy as np


def fill_smoothly(image: np.ndarray, known: np.ndarray, *, sweeps: int = 8) -> np.ndarray:
    """Return `image` (C, H, W) with the pixels outside `known` (H, W) interpolated from the known ones around.

    A coarse-to-fine solution of the Laplace equation: holes are filled at half the size first, then relaxed by `sweeps`
    averages of the four neighbours. Known pixels are unchanged; values at unknown pixels are never read. Without any
    known pixel the result is zero.
    """
    filled = np.where(known, image, 0).astype(np.float32)
    if known.all() or not known.any():
        return filled
    if min(known.shape) > 1 or max(known.shape) > 2:
        coarse, share = _halve(filled), _halve(known[None].astype(np.float32))
        coarse = fill_smoothly(coarse / np.maximum(share, 1e-6), share[0] > 0, sweeps=sweeps)
        filled = np.where(known, filled, _double(coarse, known.shape))
    else:
        filled = np.where(known, filled, filled[:, known].mean(1)[:, None, None])
    for _ in range(sweeps):
        padded = np.pad(filled, ((0, 0), (1, 1), (1, 1)), mode="edge")
        around = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1] + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
        filled = np.where(known, filled, around / 4)
    return filled


def local_share(mask: np.ndarray, radius: int) -> np.ndarray:
    """Return the share of True in the square window of `radius` around each pixel, (..., H, W) in [0, 1]."""
    return _window_sum(mask.astype(np.float64), radius) / _window_sum(np.ones(mask.shape[-2:]), radius)


def grow(mask: np.ndarray, radius: int) -> np.ndarray:
    """Return the mask (..., H, W) widened by a square of `radius` pixels."""
    return mask if radius <= 0 else local_share(mask, radius) > 1e-9


def _window_sum(values: np.ndarray, radius: int) -> np.ndarray:
    """Return sums over the square window of `radius`, cut at the border."""
    for axis in (-2, -1):
        size = values.shape[axis]
        total = np.cumsum(values, axis=axis)
        total = np.concatenate([np.zeros_like(np.take(total, [0], axis=axis)), total], axis=axis)
        index = np.arange(size)
        upper, lower = np.minimum(index + radius + 1, size), np.maximum(index - radius, 0)
        values = np.take(total, upper, axis=axis) - np.take(total, lower, axis=axis)
    return values


def _halve(image: np.ndarray) -> np.ndarray:
    """Return the mean of each 2x2 block of (C, H, W); an odd last row or column counts as if zeros followed."""
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (0, height % 2), (0, width % 2)))
    return (padded[:, ::2, ::2] + padded[:, 1::2, ::2] + padded[:, ::2, 1::2] + padded[:, 1::2, 1::2]) / 4


def _double(image: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Return (C, h, w) bilinearly enlarged by two, cut to `size`."""
    for axis, length in ((1, size[0]), (2, size[1])):
        count = image.shape[axis]
        position = np.clip((np.arange(length) + 0.5) / 2 - 0.5, 0, count - 1)
        low = np.minimum(position.astype(int), max(count - 2, 0))
        part = (position - low).astype(np.float32).reshape([-1 if a == axis else 1 for a in range(3)])
        high = np.minimum(low + 1, count - 1)
        image = np.take(image, low, axis=axis) * (1 - part) + np.take(image, high, axis=axis) * part
    return image
