"""Dates of one place on one grid: the interface of a date (`DateSource`) and the stack of them (`GeoStack`).

Modules outside `sader.geo` see arrays only; a map projection never leaves this package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import BandError, ShapeError
from sader.geo.grid import Grid
from sader.inference.tiling import Window
from sader.inference.values import ValueCoding, decode_array


class DateSource(ABC):
    """One acquisition, read window by window and warped where the requested grid is not its own.

    It holds paths, not open files, so that it can be sent to another process.
    """

    name: str
    """File or item name, for messages."""
    date: datetime | None
    """Time of acquisition, if known."""
    bands: tuple[str, ...]
    """Canonical names "B01" .. "B12", "B8A" where they are known, else those of the file."""
    grid: Grid
    """The native grid (that of the 10 m bands of a .SAFE product)."""
    coding: ValueCoding
    """How values are stored, after the decision about the offset; a result is stored the same way."""

    @abstractmethod
    def read_numbers(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        """Return the stored numbers (C, h, w) of a window of `grid`."""

    def codings(self, bands: Sequence[str]) -> tuple[ValueCoding, ...]:
        """Return how `read_numbers` codes each band."""
        return (self.coding,) * len(bands)

    def read(
        self, window: Window, *, bands: Sequence[str], grid: Grid
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return reflectance (C, h, w), 0 where it is not valid, and valid (h, w)."""
        return decode_array(self.read_numbers(window, bands=bands, grid=grid), self.codings(bands))

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return the cloud mask (h, w), True = cloud or shadow, or None where it is unknown."""
        return None

    def read_classes(self, window: Window, *, grid: Grid, kind: str = "scl") -> NDArray[Any] | None:
        """Return the classes or flags (h, w) of a kind of `sader.geo.read.quality`; None where there are none."""
        return None

    def block_shape(self, bands: Sequence[str], grid: Grid) -> tuple[int, int] | None:
        """Return (height, width) of the blocks of the files; None where they are warped onto `grid`, or no files."""
        return None

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that are read, each once; empty for an array."""
        return ()

    @property
    def origins(self) -> tuple[tuple[str, str], ...]:
        """(title, address or path) of each acquisition, for the links of a result."""
        return ((self.name, self.paths[0] if self.paths else ""),)

    @property
    def day(self) -> str | None:
        """The day of acquisition as YYYY-MM-DD, if known."""
        return None if self.date is None else f"{self.date:%Y-%m-%d}"

    def position(self, band: str) -> int:
        """Return the index of a band."""
        if band not in self.bands:
            raise BandError(f"{self.name} has no band {band}; it has {', '.join(self.bands)}.")
        return self.bands.index(band)


@dataclass(frozen=True)
class WrappedSource(DateSource):
    """A source that differs from another one in a few respects; the rest is handed on."""

    source: DateSource
    name: str = field(init=False)
    date: datetime | None = field(init=False)
    bands: tuple[str, ...] = field(init=False)
    grid: Grid = field(init=False)
    coding: ValueCoding = field(init=False)

    def __post_init__(self) -> None:
        for name in ("name", "date", "bands", "grid", "coding"):
            object.__setattr__(self, name, getattr(self.source, name))

    def read_numbers(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        return self.source.read_numbers(window, bands=bands, grid=grid)

    def codings(self, bands: Sequence[str]) -> tuple[ValueCoding, ...]:
        return self.source.codings(bands)

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        return self.source.read_mask(window, grid=grid)

    def read_classes(self, window: Window, *, grid: Grid, kind: str = "scl") -> NDArray[Any] | None:
        return self.source.read_classes(window, grid=grid, kind=kind)

    def block_shape(self, bands: Sequence[str], grid: Grid) -> tuple[int, int] | None:
        return self.source.block_shape(bands, grid)

    @property
    def paths(self) -> tuple[str, ...]:
        return self.source.paths

    @property
    def origins(self) -> tuple[tuple[str, str], ...]:
        return self.source.origins


@dataclass(frozen=True)
class GeoStack:
    """The dates of one place on one grid."""

    sources: tuple[DateSource, ...]
    grid: Grid
    bands: tuple[str, ...]
    coding: ValueCoding
    """Of the output: that of the reference date, or of the first."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ShapeError("the stack holds no date; give at least one.")

    def coded_as(self, date: int | None) -> GeoStack:
        """Return the stack with the coding of a date, of the first for None: that of the result of this date."""
        return replace(self, coding=self.sources[date or 0].coding)

    @property
    def days(self) -> list[float] | None:
        """Days since the first date, or None where one of them is unknown."""
        dates = [source.date for source in self.sources]
        known = [date.replace(tzinfo=None) for date in dates if date is not None]
        if len(known) < len(dates):
            return None
        return [(date - min(known)).total_seconds() / 86400 for date in known]

    @cached_property
    def codings(self) -> tuple[tuple[ValueCoding, ...], ...]:
        """How the numbers of each date and band are stored."""
        return tuple(source.codings(self.bands) for source in self.sources)
