"""A look at the whole scene from afar, before the work: which date is clearest, and can the values be reflectance?

The look is at most `scene_match.LOOK` pixels along its longer edge; every pixel is the mean of what it covers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sader.errors import ConfigError, DataError, ValueRangeError
from sader.geo.stack import DateSource, GeoStack, Grid
from sader.geo.values import for_network
from sader.inference.inputs import HIGHEST, LOWEST
from sader.inference.scene_match import look_factor
from sader.inference.tiling import Window

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover

READERS = 12
"""Threads that read a look, at most; unpacking the whole scene is most of the work."""
STRIP = 64
"""Rows of the look read at a time."""
IMPOSSIBLE_SHARE = 0.01
"""Part of a date's pixels that may be outside what reflectance can be (glint, faults) before the scene is refused."""
NODATA_HINT = "and the nodata value of the file; rio edit-info --nodata VALUE FILE sets one that is missing."


@dataclass(frozen=True)
class Look:
    """All dates from afar."""

    grid: Grid
    factor: int
    """Pixels of the scene along one pixel of the look."""
    cloudy: NDArray[np.float32]
    """(T, C, h, w) reflectance, 0 where not valid."""
    valid: NDArray[np.bool_]
    """(T, h, w)"""
    cloud: NDArray[np.float32]
    """(T, h, w) probability of cloud or shadow; NaN where nobody knows."""

    @property
    def clear_share(self) -> NDArray[np.float64]:
        """(T,): the part of the scene each date shows clearly. What nobody knows counts as clear."""
        clear = 1 - np.nan_to_num(self.cloud, nan=0.0)
        return (clear * self.valid).mean(axis=(1, 2), dtype=np.float64)


def take_look(stack: GeoStack, remover: CloudRemover, *, ready: Callable[[], None] | None = None) -> Look:
    """Return the look at a scene; refuse values that cannot be reflectance. ready: waits for the remover's device."""
    factor = look_factor(*stack.grid.shape)
    grid = stack.grid if factor == 1 else stack.grid.coarser(factor)
    with ThreadPoolExecutor(max(1, min(READERS, os.cpu_count() or 1)), thread_name_prefix="sader-look") as pool:
        asked = [
            [
                pool.submit(_read_strip, source, window, stack.bands, grid)
                for window in _strips(source, stack.grid, grid)
            ]
            for source in stack.sources
        ]
        pairs, masks = [], []
        for source, strips in zip(stack.sources, asked, strict=True):
            parts = [strip.result() for strip in strips]
            values, valid = (np.concatenate([part[i] for part in parts], axis=-2) for i in (0, 1))
            check_values(source.name, values, valid)
            pairs.append((values, valid))
            masks.append(source.read_mask(grid.whole, grid=grid))
    cloudy, valid = np.stack([values for values, _ in pairs]), np.stack([there for _, there in pairs])
    if not valid.any():
        names = ", ".join(source.name for source in stack.sources)
        raise DataError(
            f"no date has a valid pixel: {names} hold nodata only. Check the files, their nodata value and --grid."
        )
    if ready is not None:
        ready()
    cloud = remover.estimate_cloud(for_network(cloudy), valid=valid, cloud_mask=masks, bands=stack.bands)
    return Look(grid, factor, cloudy, valid, cloud)


def _strips(source: DateSource, whole: Grid, grid: Grid) -> list[Window]:
    """Return the parts of a look that are read at a time: strips of rows, or all of it where the file is warped.

    Means of the file's own pixels do not depend on how they are asked for; a warp approximates over what it is given.
    """
    if not source.grid.same_as(whole):
        return [grid.whole]
    return [Window(row, 0, min(STRIP, grid.height - row), grid.width) for row in range(0, grid.height, STRIP)]


def _read_strip(
    source: DateSource, window: Window, bands: Sequence[str], grid: Grid
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    return source.read(window, bands=bands, grid=grid)


def check_values(name: str, values: NDArray[np.float32], valid: NDArray[np.bool_]) -> None:
    """Refuse a date whose values cannot be reflectance in more than a few pixels."""
    seen = values[:, valid]
    if seen.size == 0:
        return
    above, below = float((seen > HIGHEST).mean()), float((seen < LOWEST).mean())
    if above > IMPOSSIBLE_SHARE:
        raise ValueRangeError(
            f"{name}: {above:.0%} of the values are above {HIGHEST:g} (up to {seen.max():g}); expected reflectance, "
            f"about 0 to 1. Check the scale (--scale 0.0001 for counts of Sentinel-2) {NODATA_HINT}"
        )
    if below > IMPOSSIBLE_SHARE:
        raise ValueRangeError(
            f"{name}: {below:.0%} of the values are below {LOWEST:g} (down to {seen.min():g}); expected reflectance, "
            f"about 0 to 1. Check --offset {NODATA_HINT}"
        )
    if float(seen.max()) == float(seen.min()) == 0.0:
        raise ValueRangeError(f"{name} is 0 everywhere: that is nodata, not reflectance. Check the file and its bands.")


def find_reference(wanted: str | int | None, stack: GeoStack, look: Look) -> int | None:
    """Return the index of the reference date.

    wanted: "auto" (the clearest), "none" or None (a new image), an index, a file's name or part of it, or a date.
    """
    if wanted is None or (isinstance(wanted, str) and wanted.lower() == "none"):
        return None
    count = len(stack.sources)
    if isinstance(wanted, int):
        if not -count <= wanted < count:
            raise ConfigError(f"reference is {wanted}; there are {count} dates, so it goes from 0 to {count - 1}.")
        return wanted % count
    if wanted.lower() == "auto":
        return int(look.clear_share.argmax())
    matches = [i for i, source in enumerate(stack.sources) if _means(wanted, source.name, source.date)]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(f"{s.name}{f' ({s.date:%Y-%m-%d})' if s.date else ''}" for s in stack.sources)
    found = "none of the dates" if not matches else f"{len(matches)} of the dates"
    raise ConfigError(
        f"--reference {wanted!r} means {found}: {known}. Give one file's name, its date as YYYY-MM-DD, auto or none."
    )


def _means(wanted: str, name: str, date: object) -> bool:
    path = wanted.replace("\\", "/").rstrip("/")
    last = path.rsplit("/", 1)[-1]
    if path.endswith(f"/{name}") or last == name or path == name or last.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]:
        return True
    digits = "".join(letter for letter in wanted if letter.isdigit())
    return date is not None and len(digits) == 8 and f"{date:%Y%m%d}" == digits


def find_apart(grid: Grid, others: Sequence[Grid]) -> list[int]:
    """Return the positions of those whose rectangle does not touch the grid's."""
    from sader.errors import require

    apart = []
    left, bottom, right, top = grid.bounds
    for position, other in enumerate(others):
        box = other.bounds
        if other.crs and grid.crs and other.crs != grid.crs:
            transform_bounds = require("rasterio.warp", extra="geo", purpose="warping").transform_bounds
            box = transform_bounds(other.crs, grid.crs, *box)
        if box[2] <= left or box[0] >= right or box[3] <= bottom or box[1] >= top:
            apart.append(position)
    return apart
