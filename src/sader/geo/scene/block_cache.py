"""Dates of a scene read by many threads at once, every block of a file unpacked once for all of them.

Tiles overlap, and they do not lie on a file's own blocks: read tile by tile, a block is unpacked four times, and again
when rows are finished. Here the threads share rectangles of stored numbers that consist of whole blocks. What is read
is to the bit what `GeoStack.read` reads; a date that is warped, or is no plain file, is read as it always was.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.geo.read.masks import MaskedSource
from sader.geo.read.products import ProductSource
from sader.geo.read.raster import GeoTiffSource, grid_of, opened, reading
from sader.geo.stack import DateSource, GeoStack, StackWindow
from sader.geo.values import decode, is_data
from sader.inference.scene_match import SceneMatch, _interpolation
from sader.inference.tiling import Window
from sader.model.matching import MOST_CHANGE

MOST_BYTES = 768 * 2**20
"""Stored numbers that are kept at a time. A Sentinel-2 tile of four bands and three dates needs 540 MiB for no block to
be unpacked twice; where a scene needs more, some are."""
EDGE = 512
"""Pixels along a shared rectangle at least: of small blocks there are several in it."""
LINES = 128
"""The same for files whose blocks are whole lines."""
MOST_PIXELS = 2048 * 2048
"""Of a shared rectangle; larger blocks are not shared."""
CHUNK = 64
"""Rows turned into reflectance at a time, so that what lies between stays in the processor's cache."""

Key = tuple[int, int, int]
"""(date, row, column) of a shared rectangle, counted in rectangles."""


class SharedBlocks:
    """The dates of a stack for many threads; see the module."""

    def __init__(self, stack: GeoStack, *, most_bytes: int = MOST_BYTES) -> None:
        self.stack, self.most_bytes = stack, most_bytes
        self._edges = [shared_edges(source, stack) for source in stack.sources]
        """(height, width) of each date's rectangles, None where they are not shared."""
        self._kept: OrderedDict[Key, Future[NDArray[Any]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.unpacked = 0
        """Rectangles that were read from files."""

    def read(self, window: Window) -> StackWindow:
        """Return all dates of a window of the stack's grid, as `GeoStack.read` does."""
        stack = self.stack
        size = window.height, window.width
        cloudy = np.empty((len(stack.sources), len(stack.bands), *size), dtype=np.float32)
        valid = np.empty((len(stack.sources), *size), dtype=bool)
        for date in range(len(stack.sources)):
            self._decode(date, window, cloudy[date], valid[date])
        return StackWindow(cloudy, valid, [source.read_mask(window, grid=stack.grid) for source in stack.sources])

    def read_for_finish(
        self, window: Window, reference: int | None
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.bool_]]:
        """Return the reference date's reflectance (C, h, w), if there is one, and valid (T, h, w)."""
        stack = self.stack
        size = window.height, window.width
        valid = np.empty((len(stack.sources), *size), dtype=bool)
        own = None
        for date in range(len(stack.sources)):
            values = None
            if date == reference:
                values = own = np.empty((len(stack.bands), *size), dtype=np.float32)
            self._decode(date, window, values, valid[date])
        return own, valid

    def _decode(self, date: int, window: Window, values: NDArray[np.float32] | None, valid: NDArray[np.bool_]) -> None:
        """Fill in reflectance (C, h, w), where it is wanted, and valid (h, w) of one date."""
        source = self.stack.sources[date]
        if self._edges[date] is None:
            found, valid[:] = source.read(window, bands=self.stack.bands, grid=self.stack.grid)
            if values is not None:
                values[:] = found
            return
        for place, numbers in self._parts(date, window):
            cols = slice(place.col, place.col + place.width)
            for first in range(0, place.height, CHUNK):
                part = numbers[:, first : first + CHUNK]
                rows = slice(place.row + first, place.row + first + part.shape[1])
                if values is None:
                    valid[rows, cols] = is_data(part, source.coding).all(axis=0)
                    continue
                reflectance, seen = decode(part, source.coding)
                valid[rows, cols] = everywhere = np.asarray(seen.all(axis=0))
                if not everywhere.all():
                    reflectance = np.where(everywhere, reflectance, np.float32(0))
                values[:, rows, cols] = reflectance

    def read_digital(self, date: int, window: Window) -> NDArray[Any] | None:
        """Return the stored numbers (C, h, w) of one date; None where its blocks are not shared."""
        if self._edges[date] is None:
            return None
        found: NDArray[Any] | None = None
        for place, numbers in self._parts(date, window):
            if found is None:
                found = np.empty((len(numbers), window.height, window.width), dtype=numbers.dtype)
            found[:, *place.slices] = numbers
        return found

    @property
    def all_shared(self) -> bool:
        """Whether the blocks of every date are shared."""
        return all(edges is not None for edges in self._edges)

    def fill_digital(self, date: int, window: Window, out: NDArray[Any]) -> None:
        """Put the stored numbers (C, h, w) of a date whose blocks are shared into `out`, which is of their type."""
        for place, numbers in self._parts(date, window):
            np.copyto(out[:, *place.slices], numbers, casting="no")

    def forget_above(self, row: int) -> None:
        """Let go of what lies wholly above a row of the scene: it will not be asked for again."""
        with self._lock:
            for key in list(self._kept):
                edges = self._edges[key[0]]
                assert edges is not None
                if (key[1] + 1) * edges[0] <= row and self._kept[key].done():
                    self._let_go(key)

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _parts(self, date: int, window: Window) -> Iterator[tuple[Window, NDArray[Any]]]:
        """Yield the parts of a window: where each lies in it, and its stored numbers (C, h, w)."""
        edges = self._edges[date]
        assert edges is not None
        rows = range(window.row // edges[0], (window.row + window.height - 1) // edges[0] + 1)
        cols = range(window.col // edges[1], (window.col + window.width - 1) // edges[1] + 1)
        later = []
        for key in ((date, row, col) for row in rows for col in cols):
            found = self._found(key)
            if found is None:
                later.append(key)
            else:
                yield self._cut(key, found, window)
        for key in later:  # another thread was reading it
            yield self._cut(key, self._waited_for(key), window)

    def _found(self, key: Key) -> NDArray[Any] | None:
        """Return a rectangle, reading it if nobody has begun to; None while another thread reads it."""
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known.result() if known.done() else None
            mine: Future[NDArray[Any]] = Future()
            self._kept[key] = mine
        try:
            numbers = self._read(key)
        except BaseException as error:
            with self._lock:
                if self._kept.get(key) is mine:
                    del self._kept[key]
            mine.set_exception(error)
            raise
        with self._lock:
            self.unpacked += 1
            if self._kept.get(key) is mine:
                self._bytes += numbers.nbytes
            mine.set_result(numbers)
            for old in list(self._kept):
                if self._bytes <= self.most_bytes:
                    break
                if old != key and self._kept[old].done():
                    self._let_go(old)
        return numbers

    def _waited_for(self, key: Key) -> NDArray[Any]:
        while True:
            with self._lock:
                known = self._kept.get(key)
            if known is not None:
                return known.result()  # or what went wrong in the other thread
            found = self._found(key)  # it was let go of in between
            if found is not None:
                return found

    def _let_go(self, key: Key) -> None:
        self._bytes -= self._kept.pop(key).result().nbytes

    def _rectangle(self, key: Key) -> Window:
        date, row, col = key
        edges = self._edges[date]
        assert edges is not None
        top, left = row * edges[0], col * edges[1]
        height, width = self.stack.grid.shape
        return Window(top, left, min(edges[0], height - top), min(edges[1], width - left))

    def _read(self, key: Key) -> NDArray[Any]:
        source: Any = self.stack.sources[key[0]]
        numbers: NDArray[Any] = source.read_digital(self._rectangle(key), bands=self.stack.bands, grid=self.stack.grid)
        return numbers

    def _cut(self, key: Key, numbers: NDArray[Any], window: Window) -> tuple[Window, NDArray[Any]]:
        own = self._rectangle(key)
        top, left = max(own.row, window.row), max(own.col, window.col)
        bottom = min(own.row + own.height, window.row + window.height)
        right = min(own.col + own.width, window.col + window.width)
        place = Window(top - window.row, left - window.col, bottom - top, right - left)
        return place, numbers[:, top - own.row : bottom - own.row, left - own.col : right - own.col]


def shared_edges(source: DateSource, stack: GeoStack) -> tuple[int, int] | None:
    """Return (height, width) of rectangles of whole blocks of a date's files; None where they cannot be shared.

    They can where reflectance follows from the stored numbers pixel by pixel: files on the stack's own grid, with one
    coding for all bands.
    """
    plain = source.source if isinstance(source, MaskedSource) else source
    if not isinstance(plain, GeoTiffSource | ProductSource) or not set(stack.bands) <= set(plain.bands):
        return None
    at = [plain.bands.index(band) for band in stack.bands]
    if isinstance(plain, ProductSource) and any(plain.codings[index] != plain.coding for index in at):
        return None
    found = set()
    for path in {plain.files[index].path for index in at}:
        with reading(path):
            dataset = opened(path)
            if not grid_of(dataset).same_as(stack.grid):
                return None
            found.add(dataset.block_shapes[0])
    height, width = (max(edge) for edge in zip(*found, strict=True))
    if width >= stack.grid.width:
        width, least = stack.grid.width, LINES
    else:
        width, least = _whole_blocks(width, EDGE), EDGE
    height = min(_whole_blocks(height, least), stack.grid.height)
    return (height, width) if height * width <= MOST_PIXELS else None


def _whole_blocks(block: int, least: int) -> int:
    return -(-least // block) * block


def quick_change(match: SceneMatch, window: Window, cloudy: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `SceneMatch.change`, a few rows at a time and with the cells near by alone: three times as fast."""
    cells = match.coefficients.shape[-2:]
    rows, high = _near(_interpolation(window.row, window.height, match.cell, cells[0]))
    cols, wide = _near(_interpolation(window.col, window.width, match.cell, cells[1]))
    out = np.zeros_like(cloudy)
    centre = match.centre[:, None, None]
    step = max(1, CHUNK // 4)
    for date, maps in enumerate(match.coefficients):
        if not maps.any():
            continue
        part = maps[..., high, wide]
        inputs, outputs = part.shape[:2]
        down = np.einsum("hp,ijpq->hijq", rows, part, optimize=True)
        for top in range(0, window.height, step):
            here = slice(top, top + step)
            smooth = (down[here].reshape(-1, down.shape[-1]) @ cols.T).reshape(-1, inputs, outputs, window.width)
            x = 2 * cloudy[date, :, here] - 1 - centre
            # In the order of the sums of `SceneMatch.change`.
            change = smooth[:, 0]
            change *= x[0][:, None]
            for index in range(1, inputs - 1):
                term = smooth[:, index]
                term *= x[index][:, None]
                change += term
            change += smooth[:, -1]
            out[date, :, here] = change.clip(-MOST_CHANGE, MOST_CHANGE).swapaxes(0, 1) / 2
    return out


def _near(weights: NDArray[np.float32]) -> tuple[NDArray[np.float32], slice]:
    """Return the columns of weights that count, and which they are."""
    used = np.flatnonzero(weights.any(axis=0))
    which = slice(int(used[0]), int(used[-1]) + 1)
    return weights[:, which], which
