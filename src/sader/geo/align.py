"""Dates -> one stack: the bands that the model and all dates share, one grid, the dates that lie on it.

Bands and dates that are left out are reported to the user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.config import NetworkConfig
from sader.errors import BandError, ConfigError, DataError, listed, require
from sader.geo.grid import Box, Grid, area_window, bounds_in, crs_of, in_degrees, parse_dates
from sader.geo.read.raster import crs_text, grid_of, opened, reading
from sader.geo.stack import DateSource, GeoStack, WrappedSource
from sader.inference.tiling import Notice, Window

LESS_RELIABLE = "the model works without, less reliably."
"""End of the note about missing bands."""


def build_stack(
    sources: Sequence[DateSource],
    network: NetworkConfig,
    *,
    bands: Sequence[str] | None = None,
    grid: str | Path | Grid | None = None,
    notice: Notice | None = None,
) -> GeoStack:
    """Return the dates as one stack on the grid of the first (or on `grid`), with the bands the model works on.

    bands: only these. grid: a raster file whose grid is taken, "EPSG:32632", "EPSG:32632/20" (with the pixel size), or
    a `Grid`. Dates that lie elsewhere are left out; where only one is left of several, that is refused.
    """
    if not sources:
        raise DataError("no date given; name at least one file.")
    notify = notice or (lambda text: None)
    target = find_grid(grid, sources[0].grid)
    chosen = common_bands(sources, network, bands, notify)
    for source in sources:
        if bool(source.grid.crs) != bool(target.crs):
            raise DataError(
                f"{source.name} has {'a' if source.grid.crs else 'no'} reference system (CRS) and the output grid has "
                f"{'one' if target.crs else 'none'} ({sources[0].name} decides it unless --grid does): they cannot be "
                "laid over each other. Georeference all dates (gdalwarp, where there are only ground control points), "
                "or none."
            )
    apart = find_apart(target, [source.grid for source in sources])
    kept = [source for position, source in enumerate(sources) if position not in apart]
    if not kept or (len(kept) == 1 and len(sources) > 1):
        first = sources[0]
        other = sources[apart[0]]
        raise DataError(
            f"{len(apart)} of {len(sources)} dates do not touch the output grid {_box(target)} ({first.name} decides "
            f"it unless --grid does), for example {other.name} {_box(other.grid)}. Give scenes of one place."
        )
    if not target.crs:
        notify(
            f"{sources[0].name} names no reference system (CRS): pixels are laid on each other as they lie, and the "
            "result names none."
        )
    for position in apart:
        notify(f"{sources[position].name} does not touch the output grid and is left out.")
    if len(kept) == 1:
        notify(f"only one date ({kept[0].name}): no other date shows the ground under its clouds.")
    days: dict[str, list[str]] = {}
    for source in kept:
        if source.day is not None:
            days.setdefault(source.day, []).append(source.name)
    for day, names in days.items():
        if len(names) > 1:
            notify(
                f"{len(names)} inputs are of the same day {day}: {', '.join(names)}. Each counts as a date of its own."
            )
    return GeoStack(tuple(kept), target, chosen, kept[0].coding)


@dataclass(frozen=True)
class CroppedSource(WrappedSource):
    """A part of a source; on its own grid the stored numbers are read without resampling."""

    window: Window

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "grid", self.source.grid.part(self.window))

    def _of_source(self, window: Window, grid: Grid) -> tuple[Window, Grid]:
        """Return window and grid as the source takes them."""
        if not grid.same_as(self.grid):
            return window, grid
        moved = replace(window, row=window.row + self.window.row, col=window.col + self.window.col)
        return moved, self.source.grid

    def read_numbers(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        window, grid = self._of_source(window, grid)
        return self.source.read_numbers(window, bands=bands, grid=grid)

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        window, grid = self._of_source(window, grid)
        return self.source.read_mask(window, grid=grid)

    def read_classes(self, window: Window, *, grid: Grid, kind: str = "scl") -> NDArray[Any] | None:
        window, grid = self._of_source(window, grid)
        return self.source.read_classes(window, grid=grid, kind=kind)

    def block_shape(self, bands: Sequence[str], grid: Grid) -> tuple[int, int] | None:
        return self.source.block_shape(bands, self._of_source(Window(0, 0, 1, 1), grid)[1])


def cropped(sources: Sequence[DateSource], box: Box, notice: Notice) -> list[DateSource]:
    """Return the sources cut to a box in degrees; those that do not touch it are left out."""
    found: list[DateSource] = []
    for source in sources:
        window = area_window(source.grid, box)
        if window is None:
            notice(f"{source.name} does not touch the area and is left out.")
        else:
            found.append(source if window == source.grid.whole else CroppedSource(source, window))
    if not found:
        west, south, east, north = box
        raise DataError(
            f"no date touches the area {west:g},{south:g},{east:g},{north:g} (west,south,east,north in degrees); "
            f"{sources[0].name} covers {in_degrees(sources[0].grid)}. Check the order of the numbers."
        )
    return found


def in_period(sources: Sequence[DateSource], dates: str) -> list[DateSource]:
    """Return the sources of the days in a period such as 2022-03-01/2022-05-31, both ends included."""
    first, _, last = parse_dates(dates).partition("/")
    if unknown := next((source.name for source in sources if source.day is None), None):
        raise ConfigError(
            f"--dates needs the date of every input; that of {unknown} is unknown. Name the files instead."
        )
    found = [source for source in sources if first[:10] <= str(source.day) <= (last or first)[:10]]
    if not found:
        ends = sorted(str(source.day) for source in sources)
        raise DataError(f"none of {len(sources)} dates lies in {dates}; they go from {ends[0]} to {ends[-1]}.")
    return found


def common_bands(
    sources: Sequence[DateSource], network: NetworkConfig, bands: Sequence[str] | None, notify: Notice
) -> tuple[str, ...]:
    """Return the bands to work on, in the first date's order; warn about each that is left out."""
    first = sources[0]
    offered = tuple(band for band in first.bands if bands is None or band in bands)
    chosen = tuple(
        band for band in offered if band in network.bands and all(band in source.bands for source in sources)
    )
    needs, has = ", ".join(network.bands), "; ".join(f"{s.name} has {listed(s.bands)}" for s in sources[:3])
    missing = [band for band in network.bands if band not in chosen]
    if not chosen or (missing and network.needs_all_bands):
        raise BandError(
            f"{has}; this model works on {needs}. Missing in all or some dates: {', '.join(missing)}. Name the bands "
            "of the files with --bands if they are there under other names, or use a model that has yours."
        )
    if missing:
        unasked = [band for band in missing if bands is not None and band not in bands and band in first.bands]
        where = "left out by --bands" if missing == unasked else "missing in the files"
        notify(f"{', '.join(missing)} {_be(missing)} {where}; {LESS_RELIABLE}")
    unknown = [band for band in offered if band not in network.bands and band not in network.aux_bands]
    if unknown:
        notify(f"the model has no {listed(unknown)}: left out of the result, which has {', '.join(chosen)}.")
    partly = [band for band in offered if band in network.bands and band not in chosen]
    if partly:
        left = f"{', '.join(partly)} {_be(partly)} not in every date"
        notify(f"{left}: left out of the result, which has {', '.join(chosen)}.")
    helping = {band for source in sources for band in network.aux_bands if band in source.bands}
    lacking = [band for band in network.aux_bands if not all(band in source.bands for source in sources)]
    if helping and lacking:
        unused = f"the model works without its auxiliary bands {', '.join(network.aux_bands)}"
        notify(f"{', '.join(lacking)} {_be(lacking)} not in every date: {unused}.")
    return chosen


def find_apart(grid: Grid, others: Sequence[Grid]) -> list[int]:
    """Return the positions of the grids whose rectangle does not touch that of `grid`."""
    apart = []
    left, bottom, right, top = grid.bounds
    for position, other in enumerate(others):
        box = other.bounds
        if other.crs and grid.crs and other.crs != grid.crs:
            box = bounds_in(other.crs, grid.crs, box)
        if box[2] <= left or box[0] >= right or box[3] <= bottom or box[1] >= top:
            apart.append(position)
    return apart


def find_grid(wanted: str | Path | Grid | None, own: Grid) -> Grid:
    """Return the output grid: the given one, that of a file, or a reference system with the own extent."""
    if wanted is None:
        return own
    if isinstance(wanted, Grid):
        return wanted
    text = str(wanted)
    if Path(text).is_file():
        with reading(text):
            return grid_of(opened(text))
    found = re.fullmatch(r"((?:EPSG|ESRI|OGC|IAU[^:]*):\w+)(?:/([0-9.eE+-]+))?", text, re.IGNORECASE)
    if found is None:
        raise ConfigError(
            f"--grid is {text!r}, no file and no reference system; expected a raster whose grid to use, EPSG:32632, or "
            "EPSG:32632/20 for pixels of 20 units."
        )
    if not own.crs:
        raise DataError(f"--grid {text} needs images with a place on the map; the first one has no reference system.")
    errors = require("rasterio.errors", extra="geo", purpose="warping")
    warp = require("rasterio.warp", extra="geo", purpose="warping")
    try:
        with require("rasterio", extra="geo", purpose="warping").Env():  # keeps messages of PROJ off the terminal
            crs = crs_of(found[1])
        size = float(found[2]) if found[2] else None
        if size is not None and not 0 < size < math.inf:
            raise ValueError(f"pixels of {found[2]} units")
        transform, width, height = warp.calculate_default_transform(
            own.crs, crs, own.width, own.height, *own.bounds, resolution=size
        )
    except (errors.CRSError, errors.RasterioError, ValueError) as error:
        raise ConfigError(
            f"--grid {text}: {error}. Expected a known code such as EPSG:32632, or EPSG:32632/20."
        ) from error
    a, b, c, d, e, f = tuple(transform)[:6]
    return Grid(crs_text(crs), (a, b, c, d, e, f), width, height)


def _box(grid: Grid) -> str:
    left, bottom, right, top = grid.bounds
    place = grid.crs if len(grid.crs) < 20 else "its reference system"
    return f"[{left:.8g}, {bottom:.8g}, {right:.8g}, {top:.8g}] in {place or 'pixels'}"


def _be(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
