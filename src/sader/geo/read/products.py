"""An acquisition delivered as one file per band (Sentinel-2 products, STAC items), and several tiles as one date.

Bands of 10, 20 and 60 m are put on one grid by the reader of `geo.read.raster`: interpolated when they become finer,
averaged when they become coarser, the nearest pixel for classes. Nothing here is specific to a provider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import DataError
from sader.geo.grid import Grid
from sader.geo.read.quality import LAYOUTS, parse_quality
from sader.geo.read.raster import BandFile, GeoTiffSource, grid_of, opened, read_band, reading, shown
from sader.geo.stack import DateSource
from sader.inference.tiling import Window
from sader.inference.values import REFLECTANCE, ValueCoding, decode_array


@dataclass(frozen=True)
class ProductSource(GeoTiffSource):
    """One acquisition with one file per band and, where the product has one, a scene classification (SCL).

    Its grid is that of the finest band, and its coding what most of its bands use.
    """

    band_codings: tuple[ValueCoding, ...] = ()
    """In the order of `bands`; the offset may differ from band to band."""
    classes: BandFile | None = None
    """Its classification or quality band."""
    kind: str = "scl"
    """What the numbers of `classes` mean (`sader.geo.read.quality`)."""
    reason: str = ""
    """What decided the offset."""
    href: str = ""
    """Where the product or item is, for the links of the result."""

    def codings(self, bands: Sequence[str]) -> tuple[ValueCoding, ...]:
        return tuple(self.band_codings[self.position(band)] for band in bands)

    def read_classes(self, window: Window, *, grid: Grid, kind: str = "scl") -> NDArray[Any] | None:
        """Return the classification (h, w), its nodata value outside; None where the product has none of the kind."""
        if self.classes is None or kind != self.kind:
            return None
        return read_band(self.classes, window, grid=grid, coding=LAYOUTS[kind].coding, categories=True)

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return the cloud and shadow pixels (h, w) of the classification; None without one."""
        classes = self.read_classes(window, grid=grid, kind=self.kind)
        return None if classes is None else parse_quality(self.kind).mask(classes, unknown=False)

    @property
    def paths(self) -> tuple[str, ...]:
        files = [*self.files, *([self.classes] if self.classes else [])]
        return tuple(dict.fromkeys(file.path for file in files))

    @property
    def origins(self) -> tuple[tuple[str, str], ...]:
        return ((self.name, self.href or self.paths[0]),)


@dataclass(frozen=True)
class MosaicSource(DateSource):
    """Neighbouring tiles of one overpass as one date: each pixel comes from the first tile that has it."""

    sources: tuple[DateSource, ...]
    grid: Grid
    """Of the area, on the map of the first tile."""
    name: str = field(init=False)
    date: datetime | None = field(init=False)
    bands: tuple[str, ...] = field(init=False)
    """The bands that every tile has."""
    coding: ValueCoding = field(init=False)

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("a mosaic of no tiles; give at least one.")
        first = self.sources[0]
        common = tuple(band for band in first.bands if all(band in source.bands for source in self.sources))
        name = " + ".join(source.name for source in self.sources)
        for attribute, value in (("name", name), ("date", first.date), ("bands", common), ("coding", first.coding)):
            object.__setattr__(self, attribute, value)

    def codings(self, bands: Sequence[str]) -> tuple[ValueCoding, ...]:
        """Return the coding of the tiles, or reflectance where they differ."""
        found = {source.codings(bands) for source in self.sources}
        return found.pop() if len(found) == 1 else (REFLECTANCE,) * len(bands)

    def read_numbers(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        """Return the stored numbers (C, h, w); reflectance, with NaN for no data, where the tiles are coded apart."""
        alike = self.codings(bands) == self.sources[0].codings(bands)
        numbers, valid = self._part(self.sources[0], window, bands, grid, alike)
        for source in self.sources[1:]:
            if valid.all():
                break
            more, seen = self._part(source, window, bands, grid, alike)
            numbers, valid = np.where(valid, numbers, more), valid | seen
        return numbers

    @staticmethod
    def _part(
        source: DateSource, window: Window, bands: Sequence[str], grid: Grid, alike: bool
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        if not alike:
            values, valid = source.read(window, bands=bands, grid=grid)
            return np.where(valid, values, np.float32(np.nan)), valid
        numbers = source.read_numbers(window, bands=bands, grid=grid)
        return numbers, decode_array(numbers, source.codings(bands))[1]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for source in self.sources for path in source.paths))

    @property
    def origins(self) -> tuple[tuple[str, str], ...]:
        return tuple(origin for source in self.sources for origin in source.origins)

    def read_classes(self, window: Window, *, grid: Grid, kind: str = "scl") -> NDArray[Any] | None:
        """Return the classification (h, w) from the tile the pixel comes from; None unless every tile has one."""
        out: NDArray[Any] | None = None
        for source in self.sources:
            part = source.read_classes(window, grid=grid, kind=kind)
            if part is None:
                return None
            out = part if out is None else np.where(out == LAYOUTS[kind].coding.nodata, part, out)
        return out

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return the cloud mask (h, w) from the tile the pixel comes from; None unless every tile has one."""
        mask: NDArray[np.bool_] | None = None
        covered = np.zeros((window.height, window.width), dtype=bool)
        for source in self.sources:
            part = source.read_mask(window, grid=grid)
            if part is None:
                return None
            mask = part if mask is None else np.where(covered, mask, part)
            if len(self.sources) > 1:
                covered |= source.read(window, bands=self.bands[:1], grid=grid)[1]
        return mask


def product_source(
    name: str,
    date: datetime | None,
    bands: Sequence[str],
    files: Sequence[BandFile],
    codings: Sequence[ValueCoding],
    *,
    grids: Sequence[Grid | None] = (),
    **more: Any,
) -> ProductSource:
    """Return a source on the finest grid among its bands; every file is opened once, so that a bad one is found now.

    grids: those of the bands, where a catalogue lists them: such files are not opened, which is slow over a network.
    more: classes, kind, reason and href of the source.
    """
    if not bands:
        raise DataError(f"{name} has no band; expected at least one band file.")
    finest: Grid | None = None
    for at, file in enumerate(files):
        listed = grids[at] if at < len(grids) else None
        found = listed if listed is not None and file.path.startswith("/vsi") else _grid_of_file(name, file)
        if not found.crs:
            raise DataError(
                f"{file.path} has no reference system; expected a georeferenced band. Take the file as delivered."
            )
        if finest is None or min(found.resolution) < min(finest.resolution):
            finest = found
    assert finest is not None
    coding = Counter(codings).most_common(1)[0][0]
    return ProductSource(name, date, tuple(bands), finest, coding, tuple(files), tuple(codings), **more)


def _grid_of_file(name: str, file: BandFile) -> Grid:
    with reading(file.path):
        dataset = opened(file.path)
        if not 1 <= file.index <= dataset.count:
            raise DataError(f"{shown(file.path)} has {dataset.count} bands; {name} names band {file.index} of it.")
        return grid_of(dataset)
