"""Tiles over an image of any size: windows that overlap, and a feathered blend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sader.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with (work done, work in all)."""


@dataclass(frozen=True)
class Window:
    """A rectangle of an image, in pixels."""

    row: int
    col: int
    height: int
    width: int

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.row, self.row + self.height), slice(self.col, self.col + self.width)


def _starts(size: int, tile: int, overlap: int) -> list[int]:
    """Return where tiles start along one axis; the last one is moved back to end at the border."""
    if size <= tile:
        return [0]
    stride = tile - overlap
    starts = list(range(0, size - tile, stride))
    return [*starts, size - tile]


def plan_windows(height: int, width: int, *, tile: int, overlap: int) -> list[Window]:
    """Return the windows that cover (height, width), row by row. overlap: pixels shared by neighbours."""
    if not 0 <= overlap <= tile // 2:
        raise ConfigError(f"overlap {overlap} with tile {tile}; expected 0 <= overlap <= tile / 2.")
    return [
        Window(row, col, min(tile, height), min(tile, width))
        for row in _starts(height, tile, overlap)
        for col in _starts(width, tile, overlap)
    ]


def blend_weights(window: Window, *, height: int, width: int, overlap: int) -> NDArray[np.float32]:
    """Return the weight (h, w) of a window's pixels: 1 inside, falling to near 0 towards inner edges.

    At the border of the image there is no neighbour, so there is no ramp.
    """

    def ramp(start: int, length: int, size: int) -> NDArray[np.float32]:
        weight = np.ones(length, dtype=np.float32)
        if overlap:
            rise = ((np.arange(overlap, dtype=np.float32) + 0.5) / overlap)[:length]
            if start > 0:
                weight[: len(rise)] = np.minimum(weight[: len(rise)], rise)
            if start + length < size:
                weight[-len(rise) :] = np.minimum(weight[-len(rise) :], rise[::-1])
        return weight

    return ramp(window.row, window.height, height)[:, None] * ramp(window.col, window.width, width)[None]


class Blend:
    """Sum of weighted windows, divided by the sum of the weights."""

    def __init__(self, channels: int, height: int, width: int, *, overlap: int) -> None:
        self.overlap = overlap
        self.total = np.zeros((channels, height, width), dtype=np.float32)
        self.weight = np.zeros((height, width), dtype=np.float32)

    def add(self, window: Window, values: NDArray[np.float32]) -> None:
        """Add the values (C, h, w) of one window."""
        rows, cols = window.slices
        height, width = self.weight.shape
        weight = blend_weights(window, height=height, width=width, overlap=self.overlap)
        self.total[:, rows, cols] += weight * values
        self.weight[rows, cols] += weight

    def result(self) -> NDArray[np.float32]:
        return self.total / self.weight


class Ticks:
    """Counts pieces of work and tells whoever shows the progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)
