"""An acquisition delivered as one file per band (Sentinel-2 products, STAC items), and several tiles as one date.

Bands of 10, 20 and 60 m are put on one grid by the reader of `geo.read.raster`: interpolated when they become finer,
means when they become coarser, the nearest pixel for classes. Nothing here knows a provider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import BandError, DataError
from sader.geo.read.raster import BandFile, grid_of, opened, read_band, reading, shown
from sader.geo.stack import DateSource, Grid, ValueCoding
from sader.geo.values import decode, encode
from sader.inference.tiling import Window

CLASSES = ValueCoding("uint8", 1.0, 0.0, 0.0)
"""Of a scene classification: 0 = no data."""
SCL_CLOUD = (3, 8, 9, 10)
"""Shadow, cloud of medium and of high probability, thin cirrus: what is masked unless other classes are named."""


@dataclass(frozen=True)
class ProductSource:
    """One acquisition with one file per band and, where the product has one, a scene classification (SCL)."""

    name: str
    date: datetime | None
    bands: tuple[str, ...]
    grid: Grid
    """Of the finest band."""
    coding: ValueCoding
    """Of the acquisition as a whole: what most of its bands use."""
    files: tuple[BandFile, ...]
    """In the order of `bands`."""
    codings: tuple[ValueCoding, ...]
    """In the order of `bands`; the offset may differ from band to band."""
    classes: BandFile | None = None
    """Scene classification with the classes of Sen2Cor."""
    reason: str = ""
    """What decided the offset."""
    href: str = ""
    """Where the product or item is, for the links of the result."""

    def read(
        self, window: Window, *, bands: Sequence[str], grid: Grid
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return reflectance (C, h, w) and valid (h, w): every band has data. 0 where not valid."""
        pairs = [decode(self._counts(band, window, grid), self._coding(band)) for band in bands]
        valid = np.all([seen for _, seen in pairs], axis=0)
        return np.where(valid, np.stack([values for values, _ in pairs]), np.float32(0)), valid

    def read_digital(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        """Return the numbers on disk (C, h, w) in the source's own coding."""
        return np.stack([self._in_own_coding(band, window, grid) for band in bands])

    def read_classes(self, window: Window, *, grid: Grid) -> NDArray[np.uint8] | None:
        """Return the scene classification (h, w), 0 where there is none; None where the product has no such file."""
        if self.classes is None:
            return None
        return read_band(self.classes, window, grid=grid, coding=CLASSES, categories=True).astype(np.uint8)

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return where the scene classification says cloud or shadow (h, w); None without one."""
        classes = self.read_classes(window, grid=grid)
        return None if classes is None else np.isin(classes, SCL_CLOUD)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files behind it, each once."""
        files = [*self.files, *([self.classes] if self.classes else [])]
        return tuple(dict.fromkeys(file.path for file in files))

    def _position(self, band: str) -> int:
        if band not in self.bands:
            raise BandError(f"{self.name} has no band {band}; it has {', '.join(self.bands)}.")
        return self.bands.index(band)

    def _coding(self, band: str) -> ValueCoding:
        return self.codings[self._position(band)]

    def _counts(self, band: str, window: Window, grid: Grid) -> NDArray[Any]:
        return read_band(self.files[self._position(band)], window, grid=grid, coding=self._coding(band))

    def _in_own_coding(self, band: str, window: Window, grid: Grid) -> NDArray[Any]:
        counts = self._counts(band, window, grid)
        if self._coding(band) == self.coding:
            return counts
        values, valid = decode(counts, self._coding(band))
        return encode(values, valid, self.coding)


@dataclass(frozen=True)
class MosaicSource:
    """Neighbouring tiles of one overpass as one date: each pixel comes from the first tile that has it."""

    sources: tuple[DateSource, ...]
    grid: Grid
    """Of the area wanted, on the map of the first tile."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("a mosaic of no tiles; give at least one.")

    @property
    def name(self) -> str:
        return " + ".join(source.name for source in self.sources)

    @property
    def date(self) -> datetime | None:
        return self.sources[0].date

    @property
    def bands(self) -> tuple[str, ...]:
        """The bands that every tile has."""
        return tuple(band for band in self.sources[0].bands if all(band in source.bands for source in self.sources))

    @property
    def coding(self) -> ValueCoding:
        return self.sources[0].coding

    @property
    def href(self) -> str:
        return str(getattr(self.sources[0], "href", ""))

    @property
    def hrefs(self) -> tuple[str, ...]:
        """One for each tile."""
        return tuple(str(getattr(source, "href", "") or source.name) for source in self.sources)

    def read(
        self, window: Window, *, bands: Sequence[str], grid: Grid
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return reflectance (C, h, w) and valid (h, w); tiles may differ in coding."""
        values, valid = self.sources[0].read(window, bands=bands, grid=grid)
        for source in self.sources[1:]:
            if valid.all():
                break
            more, seen = source.read(window, bands=bands, grid=grid)
            values = np.where(valid, values, more)
            valid = valid | seen
        return values, valid

    def read_digital(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        """Return the numbers on disk (C, h, w) in the coding of the first tile."""
        values, valid = self.read(window, bands=bands, grid=grid)
        return encode(values, valid, self.coding)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files behind it, each once."""
        return tuple(dict.fromkeys(path for source in self.sources for path in getattr(source, "paths", ())))

    def read_classes(self, window: Window, *, grid: Grid) -> NDArray[np.uint8] | None:
        """Return the scene classification (h, w) from the tile the pixel comes from; None unless every tile has one."""
        parts = []
        for source in self.sources:
            reader = getattr(source, "read_classes", None)
            part = reader(window, grid=grid) if reader else None
            if part is None:
                return None
            parts.append(part)
        out: NDArray[np.uint8] = parts[0]
        for part in parts[1:]:
            out = np.where(out == 0, part, out)
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
    classes: BandFile | None = None,
    reason: str = "",
    href: str = "",
    grids: Sequence[Grid | None] = (),
) -> ProductSource:
    """Return a source on the finest grid among its bands; every file is opened once, so that a bad one is found now.

    grids: those of the bands where a catalogue says them: such files are not opened, which over a network takes long.
    """
    if not bands:
        raise DataError(f"{name} has no band; expected at least one band file.")
    finest: Grid | None = None
    for at, file in enumerate(files):
        told = grids[at] if at < len(grids) else None
        found = told if told is not None and file.path.startswith("/vsi") else _grid_of_file(name, file)
        if not found.crs:
            raise DataError(
                f"{file.path} has no reference system; expected a georeferenced band. Take the file as delivered."
            )
        if finest is None or min(found.resolution) < min(finest.resolution):
            finest = found
    assert finest is not None
    return ProductSource(
        name=name,
        date=date,
        bands=tuple(bands),
        grid=finest,
        coding=Counter(codings).most_common(1)[0][0],
        files=tuple(files),
        codings=tuple(codings),
        classes=classes,
        reason=reason,
        href=href,
    )


def _grid_of_file(name: str, file: BandFile) -> Grid:
    with reading(file.path):
        dataset = opened(file.path)
        if not 1 <= file.index <= dataset.count:
            raise DataError(f"{shown(file.path)} has {dataset.count} bands; {name} names band {file.index} of it.")
        return grid_of(dataset)
