"""From raw tiles to finished rows: the rolling blend of one band of rows, and the layers that are written from it.

Only the rows that tiles can still change are in memory. Tiles are added in the order of `plan_windows`, so the sums,
and with them the bits, are those of `sader.inference.tiling.Blend` over the whole image.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader.geo.scene.cog import Layer
from sader.geo.stack import GeoStack, ValueCoding
from sader.geo.values import encode
from sader.inference.tiling import Window, blend_weights

if TYPE_CHECKING:
    from sader.geo.scene.block_cache import SharedBlocks
    from sader.inference.remover import CloudRemover

NODATA, OBSERVED, RECONSTRUCTED = 0, 1, 2
"""Codes of the provenance layer."""
COLUMNS = 1024
"""Columns finished at a time, which bounds the memory of a wide scene."""
ROWS = 64
"""Rows finished at a time where threads do it: what lies between then stays in the processor's cache."""
PLAIN = ValueCoding("uint8", 1.0, 0.0, None, declared=False)
CODES = ValueCoding("uint8", 1.0, 0.0, float(NODATA), declared=False)


@dataclass(frozen=True)
class Channels:
    """Which planes of a raw tile are what: image, cloud probability of some dates, spread."""

    bands: int
    cloud: tuple[int, ...]
    """The dates whose probability is kept."""
    spread: bool

    @property
    def count(self) -> int:
        return self.bands * (2 if self.spread else 1) + len(self.cloud)

    def join(
        self, image: NDArray[np.float32], cloud: NDArray[np.float32], spread: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Return the planes (count, h, w) of one tile; cloud is (T, h, w)."""
        parts = [image, cloud[list(self.cloud)]]
        if self.spread:
            assert spread is not None
            parts.append(spread)
        return np.concatenate(parts).astype(np.float32)

    def split(
        self, planes: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], dict[int, NDArray[np.float32]], NDArray[np.float32] | None]:
        """Return (image, date -> probability, spread)."""
        image, rest = planes[: self.bands], planes[self.bands :]
        cloud = {date: rest[index] for index, date in enumerate(self.cloud)}
        return image, cloud, rest[len(self.cloud) :] if self.spread else None


class RowBlend:
    """The blend of the rows from `top` on that tiles can still change.

    places: 0 = what is taken is new memory; n = it lies in one of n places in turn and is good for n - 1 further takes.
    """

    def __init__(
        self, channels: int, *, height: int, width: int, rows: int, top: int, overlap: int, places: int = 0
    ) -> None:
        self.height, self.width, self.overlap, self.top = height, width, overlap, top
        self.total = np.zeros((channels, rows, width), dtype=np.float32)
        self.weight = np.zeros((rows, width), dtype=np.float32)
        self._places = [np.empty_like(self.total) for _ in range(places)]
        self._product = np.empty((0, 0), dtype=np.float32)

    def add(self, window: Window, values: NDArray[np.float32]) -> None:
        """Add the planes of one tile; rows above `top` are finished and left alone."""
        skip = max(0, self.top - window.row)
        if skip >= window.height:
            return
        weight = blend_weights(window, height=self.height, width=self.width, overlap=self.overlap)[skip:]
        first = window.row + skip - self.top
        place = slice(first, first + window.height - skip), window.slices[1]
        if self._product.shape != weight.shape:
            self._product = np.empty_like(weight)
        for total, plane in zip(self.total, values, strict=True):  # in one small place, which stays in the cache
            total[place] += np.multiply(weight, plane[skip:], out=self._product)
        self.weight[place] += weight

    def take(self, count: int) -> NDArray[np.float32]:
        """Return the first `count` rows (channels, count, W) and move on; NaN where no tile has been."""
        done: NDArray[np.float32] | None = None
        if self._places:
            self._places.append(self._places.pop(0))
            done = self._places[-1][:, :count]
        with np.errstate(invalid="ignore", divide="ignore"):
            done = np.divide(self.total[:, :count], self.weight[:count], out=done)
        for array in (self.total, self.weight):
            array[..., :-count, :] = array[..., count:, :].copy()
            array[..., -count:, :] = 0
        self.top += count
        return done


@dataclass(frozen=True)
class Finisher:
    """Turns blended rows into the numbers of each layer."""

    stack: GeoStack
    remover: CloudRemover
    reference: int | None
    channels: Channels
    layers: tuple[Layer, ...]
    threads: int = 1
    """Parts of a row of tiles finished at a time; each takes memory."""
    blocks: SharedBlocks | None = None
    """What was read for the tiles, where it is shared."""
    _places: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Where threads finish rows, those of a layer lie in one place; they are good until the next are asked for."""

    def rows(self, top: int, planes: NDArray[np.float32]) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """Return layer name -> (C, n, W) of the rows from `top` on, and the pixels by what became of them."""
        count, width = planes.shape[1:]
        made = {layer.name: self._place(layer, count, width) for layer in self.layers}
        codes = np.zeros(3, dtype=np.int64)
        high = count if self.threads == 1 else ROWS
        windows = [
            Window(first, left, min(high, top + count - first), min(COLUMNS, width - left))
            for first in range(top, top + count, high)
            for left in range(0, width, COLUMNS)
        ]

        def finish(window: Window) -> NDArray[np.int64]:
            place = slice(window.row - top, window.row - top + window.height), window.slices[1]
            part, provenance = self._finish(window, planes[:, *place])
            for name, values in part.items():
                made[name][:, *place] = values
            return np.bincount(provenance.ravel(), minlength=3)

        if self.threads == 1:
            codes += sum(map(finish, windows))
        else:
            with ThreadPoolExecutor(self.threads, thread_name_prefix="sader-finish") as pool:
                codes += sum(pool.map(finish, windows))
        names = {"nodata": NODATA, "observed": OBSERVED, "reconstructed": RECONSTRUCTED}
        return made, {name: int(codes[code]) for name, code in names.items()}

    def _place(self, layer: Layer, count: int, width: int) -> NDArray[Any]:
        """Return room for rows (C, n, W) of a layer, laid out as `RowFile` writes them."""
        shape = count, len(layer.bands), width
        place = self._places.get(layer.name)
        if place is None or len(place) < count:
            place = np.empty(shape, dtype=layer.coding.dtype)
            if self.threads > 1:
                self._places[layer.name] = place
        return place[:count].swapaxes(0, 1)

    def _finish(
        self, window: Window, planes: NDArray[np.float32]
    ) -> tuple[Mapping[str, NDArray[Any]], NDArray[np.uint8]]:
        stack = self.stack
        image, probability, spread = self.channels.split(planes)
        numbers = self._shared_numbers(window)
        if self.blocks is None:
            dates = stack.read(window)
            own, valid = None if self.reference is None else dates.cloudy[self.reference], dates.valid
        else:
            own, valid = self.blocks.read_for_finish(window, self.reference if numbers is None else None)
            if numbers is not None:
                own = image  # what is kept is put in below, as it is on disk
        cloud = np.full(valid.shape, np.nan, dtype=np.float32)
        for date, plane in probability.items():
            cloud[date] = plane
        clear, kept = self.remover.finish(image, own, cloud=cloud, valid=valid, reference=self.reference)
        seen: NDArray[np.bool_] = np.asarray(valid.any(axis=0))
        digital = encode(clear, seen, stack.coding)
        if self.reference is not None:
            if numbers is None:
                numbers = self._own_numbers(window, clear, seen)
            np.copyto(digital, numbers, where=kept)
        provenance = np.where(kept, OBSERVED, np.where(seen, RECONSTRUCTED, NODATA)).astype(np.uint8)
        made: dict[str, NDArray[Any]] = {"result": digital, "provenance": provenance[None]}
        threshold = self.remover.options.cloud_threshold
        made["count"] = (valid & (cloud < threshold)).sum(axis=0).clip(max=255).astype(np.uint8)[None]
        if spread is not None:
            made["uncertainty"] = np.where(seen, np.where(kept, 0.0, spread), np.nan).astype(np.float32)
        return {layer.name: made[layer.name] for layer in self.layers}, provenance

    def _own_numbers(self, window: Window, clear: NDArray[np.float32], seen: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the reference date's numbers as they are on disk, where its pixels are the result's."""
        assert self.reference is not None
        source = self.stack.sources[self.reference]
        read = getattr(source, "read_digital", None)
        if read is None or not source.grid.same_as(self.stack.grid) or source.coding != self.stack.coding:
            return encode(clear, seen, self.stack.coding)
        numbers: NDArray[Any] = read(window, bands=self.stack.bands, grid=self.stack.grid)
        return numbers

    def _shared_numbers(self, window: Window) -> NDArray[Any] | None:
        """Return the same from what was read for the tiles; None where it is not shared, or of another coding."""
        if self.blocks is None or self.reference is None:
            return None
        if self.stack.sources[self.reference].coding != self.stack.coding:
            return None
        return self.blocks.read_digital(self.reference, window)
