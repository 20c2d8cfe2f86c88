"""Stored numbers of files, cached by rectangles of whole blocks and shared by all threads.

Tiles overlap and are not aligned with the blocks of a file: read tile by tile, a block would be unpacked four times.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.geo.stack import GeoStack
from sader.inference.tiling import Window, common

LIMIT = 768 * 2**20
"""Bytes that are kept. A Sentinel-2 tile of four bands and three dates needs 540 MiB for no block to be unpacked twice;
larger scenes unpack some blocks again."""
EDGE = 512
"""Least edge of a cached rectangle in pixels: small blocks are read several at a time."""
LINES = 128
"""The same for files whose blocks are whole lines."""
MOST_PIXELS = 2048 * 2048
"""Largest cached rectangle; files with larger blocks are read directly."""

Key = tuple[int, int, int]
"""(date, row, column), counted in rectangles."""


class BlockCache:
    """Reads the dates of a stack; dates that are warped are not cached."""

    def __init__(self, stack: GeoStack, *, limit: int | None = None) -> None:
        self.stack, self.limit = stack, LIMIT if limit is None else limit
        self.edges = [_edges(source.block_shape(stack.bands, stack.grid), stack) for source in stack.sources]
        """(height, width) of the rectangles of each date; None where it is read directly."""
        self.unpacked = 0
        """Rectangles that were read from files."""
        self._kept: OrderedDict[Key, Future[NDArray[Any]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, date: int, window: Window) -> NDArray[Any]:
        """Return the stored numbers (C, h, w) of one date."""
        edges = self.edges[date]
        if edges is None:
            return self._from_file(date, window)
        out: NDArray[Any] | None = None
        for row in range(window.row // edges[0], (window.row + window.height - 1) // edges[0] + 1):
            for col in range(window.col // edges[1], (window.col + window.width - 1) // edges[1] + 1):
                numbers = self._rectangle((date, row, col))
                if out is None:
                    out = np.empty((len(numbers), window.height, window.width), numbers.dtype)
                area = Window(row * edges[0], col * edges[1], *numbers.shape[1:])
                place, part = common(window, area), common(area, window)
                assert place is not None
                assert part is not None
                out[:, *place.slices] = numbers[:, *part.slices]
        assert out is not None
        return out

    def _from_file(self, date: int, window: Window) -> NDArray[Any]:
        return self.stack.sources[date].read_numbers(window, bands=self.stack.bands, grid=self.stack.grid)

    def _rectangle(self, key: Key) -> NDArray[Any]:
        """Return a rectangle; the first thread that needs it reads it, others wait for it."""
        with self._lock:
            future = self._kept.get(key)
            if future is not None:
                self._kept.move_to_end(key)
            else:
                mine = self._kept[key] = Future()
        if future is not None:
            return future.result()
        date, row, col = key
        height, width = self.edges[date] or (0, 0)
        top, left = row * height, col * width
        whole = self.stack.grid
        window = Window(top, left, min(height, whole.height - top), min(width, whole.width - left))
        try:
            numbers = self._from_file(date, window)
        except BaseException as error:
            with self._lock:
                del self._kept[key]
            mine.set_exception(error)
            raise
        with self._lock:
            self.unpacked += 1
            self._bytes += numbers.nbytes
            mine.set_result(numbers)
            for old in list(self._kept):
                if self._bytes <= self.limit:
                    break
                if old != key and self._kept[old].done():
                    self._bytes -= self._kept.pop(old).result().nbytes
        return numbers


def _edges(block: tuple[int, int] | None, stack: GeoStack) -> tuple[int, int] | None:
    """Return (height, width) of rectangles of whole blocks; None where they are too large or there is none."""
    if block is None:
        return None
    height, width = block
    grid = stack.grid
    lines = width >= grid.width
    width = grid.width if lines else -(-EDGE // width) * width
    least = LINES if lines else EDGE
    height = min(-(-least // height) * height, grid.height)
    return (height, width) if height * width <= MOST_PIXELS else None
