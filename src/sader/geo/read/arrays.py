"""Arrays in memory as dates of a stack: NumPy arrays, and the result of a loading function of the user.

An array is not warped: the grid must be its own, or the grid of its overview.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.bands import names_of_file
from sader.errors import BandError, DataError, ShapeError
from sader.geo.grid import Grid
from sader.geo.stack import DateSource
from sader.inference.tiling import Window
from sader.inference.values import ValueCoding, coding_of

LoadFunction = Callable[[Path], tuple[NDArray[Any], Mapping[str, Any]]]
"""path -> (array (C, H, W), profile); the profile is rasterio's, with "descriptions" where bands have names."""


@dataclass(frozen=True)
class ArraySource(DateSource):
    """One acquisition as an array of stored numbers."""

    name: str
    date: datetime | None
    bands: tuple[str, ...]
    grid: Grid
    coding: ValueCoding
    array: NDArray[Any] = field(repr=False)
    """(C, H, W)"""
    mask: NDArray[np.bool_] | None = field(default=None, repr=False)
    """(H, W), True = cloud or shadow."""

    def __post_init__(self) -> None:
        wanted = (len(self.bands), *self.grid.shape)
        if self.array.shape != wanted:
            raise ShapeError(f"{self.name} is {self.array.shape}; expected (C, H, W) = {wanted}: bands and grid.")

    def read_numbers(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        """Return the stored numbers (C, h, w)."""
        places = [self.position(band) for band in bands]
        return self._cut(self.array, window, grid)[places]

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return the mask given with the array, or None."""
        return None if self.mask is None else self._cut(self.mask, window, grid)

    def _cut(self, array: NDArray[Any], window: Window, grid: Grid) -> NDArray[Any]:
        if grid.same_as(self.grid):
            return array[..., *window.slices]
        factor = round(max(grid.resolution) / max(self.grid.resolution))
        if factor > 1 and grid.same_as(self.grid.coarser(factor)):  # the overview: the middle of every n x n pixels
            down, across = (min(factor, size) for size in self.grid.shape)
            middle = array[..., down // 2 :: down, across // 2 :: across]
            short = [(0, max(0, want - have)) for want, have in zip(grid.shape, middle.shape[-2:], strict=True)]
            padded = np.pad(middle, [(0, 0)] * (array.ndim - 2) + short, mode="edge")
            return padded[..., *window.slices]
        raise DataError(f"{self.name} is an array on its own grid; arrays are not warped. Write it to a file first.")


def source_from(
    path: str | Path, load: LoadFunction, *, bands: Sequence[str] | None = None, date: datetime | None = None
) -> ArraySource:
    """Return the source of what a user's function loads: (array (C, H, W), rasterio profile).

    bands: names where the profile has no "descriptions". Keys read: crs, transform, nodata, scales, offsets.
    """
    array, profile = load(Path(path))
    array = np.asarray(array)
    if array.ndim != 3:
        raise ShapeError(f"{path}: the loading function returned shape {array.shape}; expected (C, H, W).")
    names = tuple(bands) if bands is not None else names_of_file(profile.get("descriptions") or ())
    if names is None or len(names) != len(array):
        raise BandError(
            f"{path}: {len(array)} bands and {0 if names is None else len(names)} names. Give bands=[...], one each, "
            "or put 'descriptions' into the profile."
        )
    a, b, c, d, e, f = tuple(profile.get("transform") or (1.0, 0.0, 0.0, 0.0, 1.0, 0.0))[:6]
    scales, offsets = profile.get("scales") or (1.0,), profile.get("offsets") or (0.0,)
    tagged = scales[0] != 1.0 or offsets[0] != 0.0
    coding = coding_of(
        str(path),
        dtype=str(array.dtype),
        scale=scales[0] if tagged else None,
        offset=offsets[0] if tagged else None,
        nodata=profile.get("nodata"),
    )
    grid = Grid(str(profile.get("crs") or ""), (a, b, c, d, e, f), array.shape[2], array.shape[1])
    return ArraySource(str(path), date, names, grid, coding, array)
