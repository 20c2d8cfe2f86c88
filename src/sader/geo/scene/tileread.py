"""Tiles of a scene read as reflectance, with what the match of the whole scene adds to them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sader.geo.read.raster import close_files
from sader.geo.scene.block_cache import SharedBlocks, quick_change
from sader.geo.stack import GeoStack, StackWindow
from sader.geo.values import for_network
from sader.inference.inputs import HIGHEST, LOWEST
from sader.inference.scene_match import SceneMatch
from sader.inference.tiling import Window


class TileRead(NamedTuple):
    """One window as it was read."""

    window: Window
    dates: StackWindow
    aux: NDArray[np.float32] | None
    cloudy: NDArray[np.float32]
    """(T, C, h, w) as the network takes it."""
    change: NDArray[np.float32] | None
    """What the match of the whole scene adds to it."""

    def for_network(self) -> dict[str, Any]:
        """Return what `CloudRemover.predict_tiles` takes for one window."""
        dates = self.dates
        return {"cloudy": self.cloudy, "valid": dates.valid, "cloud_mask": dates.masks, "scene_change": self.change}

    def given_clouds(self) -> NDArray[np.float32]:
        """Return the given masks as probabilities (T, h, w), NaN where there is none."""
        shape = self.dates.valid.shape[1:]
        masks = self.dates.masks
        return np.stack([np.full(shape, np.nan, np.float32) if m is None else m.astype(np.float32) for m in masks])


def read_tile(
    window: Window, stack: GeoStack, *, aux: GeoStack | None, match: SceneMatch | None, blocks: SharedBlocks | None
) -> TileRead:
    """Return one window as the network takes it. aux: the stack of auxiliary bands; blocks: what threads share."""
    dates = stack.read(window) if blocks is None else blocks.read(window)
    extra = None if aux is None else aux.read(window).cloudy
    if blocks is not None and dates.cloudy.min() >= LOWEST and dates.cloudy.max() <= HIGHEST:
        cloudy = dates.cloudy  # nothing to cut: no second copy of what waits for its turn
    else:
        cloudy = for_network(dates.cloudy)
    if match is None or not dates.valid.any():
        change = None
    elif blocks is None:
        change = match.change(window, cloudy)
    else:
        change = quick_change(match, window, cloudy)
    return TileRead(window, dates, extra, cloudy, change)


def read_ahead(windows: Sequence[Window], read: Callable[[Window], TileRead], *, ahead: int) -> Generator[TileRead]:
    """Yield windows as they are read by one thread, `ahead` of them before their turn."""
    with ThreadPoolExecutor(1, thread_name_prefix="sader-read") as pool:
        queue = []
        try:
            for window in windows:
                queue.append(pool.submit(read, window))
                if len(queue) > ahead:
                    yield queue.pop(0).result()
            for waiting in queue:
                yield waiting.result()
        finally:
            for waiting in queue:
                waiting.cancel()
            with suppress(RuntimeError):  # the program is ending after an error, and takes no more work
                pool.submit(close_files)
