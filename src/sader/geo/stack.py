"""What is known about the dates of a place: grid, coding of the values, bands, masks; frozen, no input or output.

Everything below this module sees arrays only; a map projection never leaves `sader.geo`. A source is one acquisition
that is read window by window and warped onto the stack's grid when its own differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sader.errors import ShapeError
from sader.inference.tiling import Window

Affine6 = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): x = a col + b row + c, y = d col + e row + f, pixel corners, in units of the CRS."""


@dataclass(frozen=True)
class Grid:
    """The pixels of an image on the map."""

    crs: str
    """WKT or an authority code such as "EPSG:32632"; "" for an image without a place."""
    transform: Affine6
    width: int
    height: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1:
            raise ShapeError(f"the grid is {self.width} x {self.height} pixels; expected at least one.")

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width)"""
        return self.height, self.width

    @property
    def whole(self) -> Window:
        """The window that covers the grid."""
        return Window(0, 0, self.height, self.width)

    @property
    def resolution(self) -> tuple[float, float]:
        """Size of a pixel along columns and rows, in units of the CRS."""
        a, b, _, d, e, _ = self.transform
        return float(np.hypot(a, d)), float(np.hypot(b, e))

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """(left, bottom, right, top) in units of the CRS."""
        a, b, c, d, e, f = self.transform
        xs = [a * col + b * row + c for col in (0, self.width) for row in (0, self.height)]
        ys = [d * col + e * row + f for col in (0, self.width) for row in (0, self.height)]
        return min(xs), min(ys), max(xs), max(ys)

    def same_as(self, other: Grid) -> bool:
        """Whether both have the same pixels, to within a hundredth of one (files round their transforms)."""
        if self.shape != other.shape or not same_crs(self.crs, other.crs):
            return False
        tolerance = 0.01 * min(self.resolution)
        mine, theirs = self.bounds, other.bounds
        corners = all(abs(a - b) <= tolerance for a, b in zip(mine, theirs, strict=True))
        # Equal bounds do not tell a north-up image from its mirror image.
        slopes = zip((self.transform[i] for i in (0, 1, 3, 4)), (other.transform[i] for i in (0, 1, 3, 4)), strict=True)
        return corners and all(abs(a - b) <= tolerance / max(self.shape) for a, b in slopes)

    def window_transform(self, window: Window) -> Affine6:
        """Return the transform of a window of this grid."""
        a, b, c, d, e, f = self.transform
        return a, b, a * window.col + b * window.row + c, d, e, d * window.col + e * window.row + f

    def part(self, window: Window) -> Grid:
        """Return the grid of a window."""
        return replace(self, transform=self.window_transform(window), width=window.width, height=window.height)

    def coarser(self, factor: int) -> Grid:
        """Return a grid of pixels `factor` times as large that covers this one."""
        a, b, c, d, e, f = self.transform
        scaled = (a * factor, b * factor, c, d * factor, e * factor, f)
        return replace(self, transform=scaled, width=-(-self.width // factor), height=-(-self.height // factor))


def same_crs(one: str, other: str) -> bool:
    """Whether two names mean one reference system; asks PROJ only where the texts differ."""
    if one == other:
        return True
    if not one or not other:
        return False
    from sader.errors import require

    crs = require("rasterio.crs", extra="geo", purpose="comparing reference systems").CRS
    return bool(crs.from_user_input(one) == crs.from_user_input(other))


@dataclass(frozen=True)
class ValueCoding:
    """How reflectance is stored: reflectance = DN * scale + offset. The formulas are in `sader.geo.values`."""

    dtype: str
    """NumPy's name: "uint16", "int16", "float32" ..."""
    scale: float
    offset: float
    nodata: float | None
    """The DN that means "no data"; None = every value counts. NaN and infinite values never count."""
    declared: bool = True
    """Whether the file itself says scale and offset; if not, a result of the same kind does not say them either."""


@runtime_checkable
class DateSource(Protocol):
    """One acquisition, lazily read, on its own native grid.

    It holds paths, not open files, so that it can be sent to another process.
    """

    @property
    def name(self) -> str:
        """File or item name, for messages."""

    @property
    def date(self) -> datetime | None:
        """When it was taken, if known."""

    @property
    def bands(self) -> tuple[str, ...]:
        """Canonical names "B01" .. "B12", "B8A" where they are known, else the file's own."""

    @property
    def grid(self) -> Grid:
        """The native grid (that of the 10 m bands of a .SAFE product)."""

    @property
    def coding(self) -> ValueCoding:
        """How values are stored, after the decision about the offset."""

    def read(
        self, window: Window, *, bands: Sequence[str], grid: Grid
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return reflectance (C, h, w) and valid (h, w) of a window of `grid`, warped where that is not the own grid.

        Where valid is False the reflectance is 0.
        """

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return the cloud mask (h, w), True = cloud or shadow, or None where nobody knows."""


@dataclass(frozen=True)
class StackWindow:
    """All dates of one window."""

    cloudy: NDArray[np.float32]
    """(T, C, h, w) reflectance; 0 where not valid."""
    valid: NDArray[np.bool_]
    """(T, h, w)"""
    masks: list[NDArray[np.bool_] | None]
    """One (h, w) or None per date."""


@dataclass(frozen=True)
class GeoStack:
    """The dates of one place on one grid, read window by window."""

    sources: tuple[DateSource, ...]
    grid: Grid
    bands: tuple[str, ...]
    coding: ValueCoding
    """Of the output: that of the reference date, or of the first."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ShapeError("a stack without any date; give at least one.")

    @property
    def days(self) -> list[float] | None:
        """Days since the first date, or None where one of them is unknown."""
        dates = [source.date for source in self.sources]
        known = [date.replace(tzinfo=None) for date in dates if date is not None]
        if len(known) < len(dates):
            return None
        return [(date - min(known)).total_seconds() / 86400 for date in known]

    def read(self, window: Window) -> StackWindow:
        """Return all dates of a window of the stack's grid."""
        pairs = [source.read(window, bands=self.bands, grid=self.grid) for source in self.sources]
        return StackWindow(
            cloudy=np.stack([values for values, _ in pairs]),
            valid=np.stack([valid for _, valid in pairs]),
            masks=[source.read_mask(window, grid=self.grid) for source in self.sources],
        )
