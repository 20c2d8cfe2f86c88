"""Cloud detectors that may be installed: s2cloudless and OmniCloudMask, run on the values of a source.

They work on fixed blocks of the grid with a margin around each, so that a mask does not depend on the window that asks
for it, and the last blocks are remembered.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import require
from sader.geo.stack import DateSource, Grid
from sader.inference.tiling import Window

BLOCK, MARGIN = 512, 64
"""Pixels of the blocks a detector works on, and of what it sees around them."""
CACHED_BLOCKS = 32


@dataclass(frozen=True)
class DetectorMask:
    """A detector run on the values, block by block; the last blocks are remembered."""

    detector: Callable[[NDArray[np.float32]], NDArray[np.bool_]]
    """Reflectance (C, h, w) of `bands` -> cloud (h, w). Module level, so that it can be sent to another process."""
    bands: tuple[str, ...]
    blocks: BlockCache = field(default_factory=lambda: BlockCache(), compare=False, repr=False)

    def mask(self, source: DateSource, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return where the detector finds cloud or shadow; False where there is no data."""
        out = np.zeros((window.height, window.width), dtype=bool)
        for top in range(window.row // BLOCK * BLOCK, window.row + window.height, BLOCK):
            for left in range(window.col // BLOCK * BLOCK, window.col + window.width, BLOCK):
                make = partial(self._block, source, grid, top, left)
                block = self.blocks.get((source.name, id(source), grid, top, left), make)
                r0, c0 = max(top, window.row), max(left, window.col)
                r1 = min(top + block.shape[0], window.row + window.height)
                c1 = min(left + block.shape[1], window.col + window.width)
                out[r0 - window.row : r1 - window.row, c0 - window.col : c1 - window.col] = block[
                    r0 - top : r1 - top, c0 - left : c1 - left
                ]
        return out

    def _block(self, source: DateSource, grid: Grid, top: int, left: int) -> NDArray[np.bool_]:
        height, width = min(BLOCK, grid.height - top), min(BLOCK, grid.width - left)
        row, col = max(0, top - MARGIN), max(0, left - MARGIN)
        around = Window(
            row, col, min(grid.height, top + height + MARGIN) - row, min(grid.width, left + width + MARGIN) - col
        )
        values, valid = source.read(around, bands=self.bands, grid=grid)
        found = np.zeros(valid.shape, dtype=bool) if not valid.any() else self.detector(values) & valid
        return found[top - row : top - row + height, left - col : left - col + width]


class BlockCache:
    """The last blocks a detector made; safe between threads, empty after a journey to another process."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Any, NDArray[np.bool_]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """Return the block of `key`, made where it is not there."""
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = make()
                while len(self._blocks) > CACHED_BLOCKS:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(key)
            return self._blocks[key]

    def __reduce__(self) -> tuple[type[BlockCache], tuple[()]]:
        return BlockCache, ()


S2CLOUDLESS_BANDS = ("B01", "B02", "B04", "B05", "B08", "B8A", "B09", "B10", "B11", "B12")
OMNICLOUDMASK_BANDS = ("B04", "B03", "B08")


def detect_s2cloudless(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return clouds (h, w) in reflectance (10, h, w) of an L1C scene; shadows are not found."""
    package = require("s2cloudless", extra="s2cloudless", purpose="the mask s2cloudless")
    detector = package.S2PixelCloudDetector(threshold=0.4, average_over=4, dilation_size=2, all_bands=False)
    found = detector.get_cloud_masks(np.ascontiguousarray(np.moveaxis(values, 0, -1))[None])
    return np.asarray(found[0]).astype(bool)


def detect_omnicloudmask(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return thick and thin cloud and shadow (h, w) in reflectance (3, h, w): red, green, near infrared."""
    package = require("omnicloudmask", extra="masks", purpose="the mask omnicloudmask")
    size = max(32, min(values.shape[1:]))
    found = package.predict_from_array(values, patch_size=min(1000, size), patch_overlap=min(300, size // 2))
    return np.asarray(found).reshape(values.shape[1:]) > 0


def s2cloudless_mask() -> DetectorMask:
    """Return the provider, or raise with the install command now: an error after an hour of work would be too late."""
    require("s2cloudless", extra="s2cloudless", purpose="the mask s2cloudless")
    return DetectorMask(detect_s2cloudless, S2CLOUDLESS_BANDS)


def omnicloudmask_mask() -> DetectorMask:
    """Return the provider, or raise with the install command now."""
    require("omnicloudmask", extra="masks", purpose="the mask omnicloudmask")
    return DetectorMask(detect_omnicloudmask, OMNICLOUDMASK_BANDS)


DETECTORS: dict[str, Callable[[], DetectorMask]] = {
    "s2cloudless": s2cloudless_mask,
    "omnicloudmask": omnicloudmask_mask,
}
