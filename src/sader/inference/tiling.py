"""Tiles over an image of any size: windows that overlap, and a feathered blend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sader.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with (tiles done, tiles in all)."""
Notice = Callable[[str], None]
"""Called with a message for the user."""


class Notes:
    """A `Notice` that keeps the messages of a run in `texts` and hands each of them on once."""

    def __init__(self, notice: Notice | None) -> None:
        self._notice, self._seen = notice, dict[str, None]()

    def __call__(self, text: str) -> None:
        if text not in self._seen:
            self._seen[text] = None
            if self._notice is not None:
                self._notice(text)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self._seen)


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


def common(window: Window, other: Window) -> Window | None:
    """Return the part of `window` that `other` covers, in the coordinates of `window`; None where they are apart."""
    top, left = max(window.row, other.row), max(window.col, other.col)
    bottom = min(window.row + window.height, other.row + other.height)
    right = min(window.col + window.width, other.col + other.width)
    if bottom <= top or right <= left:
        return None
    return Window(top - window.row, left - window.col, bottom - top, right - left)


def copy_common(out: NDArray[Any], window: Window, array: NDArray[Any], area: Window) -> None:
    """Copy into `out` (..., h, w), the array of `window`, what `array`, that of `area`, shows of it."""
    place, part = common(window, area), common(area, window)
    if place is not None and part is not None:
        out[..., *place.slices] = array[..., *part.slices]


class Blend:
    """Weighted mean of tiles over a rectangle of a scene: all of it, the rows in progress, or one chunk.

    Tiles are added in the order of `plan_windows`, so the sums, and with them the bits, do not depend on the rectangle.
    area: the rectangle; shape: (height, width) of the scene.
    """

    def __init__(
        self, channels: int, area: Window, *, shape: tuple[int, int], overlap: int, device: torch.device | str = "cpu"
    ) -> None:
        self.area, self.shape, self.overlap = area, shape, overlap
        self.total = torch.zeros((channels, area.height, area.width), device=device)
        self.weight = torch.zeros((area.height, area.width), device=device)
        self._weights: dict[tuple[Window, tuple[bool, ...]], Tensor] = {}
        """Weights of a tile on the device, by the part that is added and the edges that have a neighbour."""

    def add(self, window: Window, planes: Tensor) -> None:
        """Add the planes (channels, h, w) of one tile; what lies outside the rectangle is left out."""
        place, part = common(self.area, window), common(window, self.area)
        if place is None or part is None:
            return
        height, width = self.shape
        bottom, right = window.row + window.height, window.col + window.width
        key = (part, (window.row > 0, window.col > 0, bottom < height, right < width))
        if key not in self._weights:
            weights = blend_weights(window, height=height, width=width, overlap=self.overlap)[part.slices]
            self._weights[key] = torch.from_numpy(np.ascontiguousarray(weights)).to(self.weight.device)
        weight = self._weights[key]
        for total, plane in zip(self.total, planes, strict=True):  # plane by plane: the product stays in the cache
            total[place.slices] += weight * plane[part.slices]
        self.weight[place.slices] += weight

    def result(self, rows: int | None = None) -> Tensor:
        """Return the mean (channels, rows, w) of the first rows, all by default; NaN where no tile was added."""
        return self.total[:, :rows] / self.weight[:rows]

    def advance(self, rows: int) -> None:
        """Move the rectangle down by so many rows."""
        for array in (self.total, self.weight):
            array[..., :-rows, :] = array[..., rows:, :].clone()
            array[..., -rows:, :] = 0
        self.area = replace(self.area, row=self.area.row + rows)

    def restore(self, total: Tensor, weight: Tensor) -> None:
        """Start from the sums of an earlier run, which cover the first rows."""
        self.total[:, : total.shape[1]] = total.to(self.total.device)
        self.weight[: weight.shape[0]] = weight.to(self.weight.device)
