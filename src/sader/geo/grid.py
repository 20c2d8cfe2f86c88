"""Places and times as users write them (a bbox in degrees, two days) and the pixels that cover them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from sader.errors import ConfigError, DataError, require
from sader.geo.stack import Grid

ROUNDING = 1e-3
"""Of a pixel: less than this beyond an edge is rounding, not area."""


def parse_bbox(bbox: str | Sequence[float]) -> tuple[float, float, float, float]:
    """Return (west, south, east, north) from numbers or "7.6,46.0,7.7,46.1"."""
    try:
        parts = bbox.replace(" ", ",").split(",") if isinstance(bbox, str) else list(bbox)
        numbers = [float(part) for part in parts if str(part).strip()]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"bbox is {bbox!r}; expected west,south,east,north in degrees.") from error
    if len(numbers) != 4:
        raise ConfigError(f"bbox has {len(numbers)} numbers; expected west,south,east,north in degrees.")
    west, south, east, north = numbers
    if not (-180 <= west < east <= 180 and -90 <= south < north <= 90):
        raise ConfigError(
            f"bbox is {west:g},{south:g},{east:g},{north:g}; expected west < east within -180..180 and south < north "
            "within -90..90, in degrees."
        )
    return west, south, east, north


def parse_dates(dates: str | Sequence[str | datetime]) -> str:
    """Return "2022-03-01/2022-05-31" after a look at both ends."""
    ends = re.split(r"[/,]|\.\.", dates) if isinstance(dates, str) else list(dates)
    texts = [end.isoformat() if isinstance(end, datetime) else str(end).strip() for end in ends]
    texts = [text for text in texts if text]
    try:
        times = [datetime.fromisoformat(text.replace("Z", "+00:00")).replace(tzinfo=UTC) for text in texts]
    except ValueError as error:
        raise ConfigError(f"dates are {dates!r}; expected days such as 2022-03-01/2022-05-31.") from error
    if not 1 <= len(times) <= 2 or times[0] > times[-1]:
        raise ConfigError(f"dates are {dates!r}; expected the first and the last day, such as 2022-03-01/2022-05-31.")
    return "/".join(texts)


def crop_grid(grid: Grid, bbox: Sequence[float]) -> Grid:
    """Return the pixels of `grid`, continued beyond its edge where needed, that cover a bbox in degrees."""
    bounds = require("rasterio.warp", extra="geo", purpose="placing a bbox").transform_bounds
    if not grid.crs:
        raise DataError("the scene has no reference system, so a bbox cannot be placed on it.")
    left, bottom, right, top = bounds("EPSG:4326", grid.crs, *bbox)
    return _snapped(grid, (left, bottom, right, top))


def union_grid(grids: Sequence[Grid]) -> Grid:
    """Return the first grid, continued so that it covers all of them."""
    bounds = require("rasterio.warp", extra="geo", purpose="joining tiles").transform_bounds
    boxes = [bounds(grid.crs, grids[0].crs, *grid.bounds) for grid in grids]
    lefts, bottoms, rights, tops = zip(*boxes, strict=True)
    return _snapped(grids[0], (min(lefts), min(bottoms), max(rights), max(tops)))


def _snapped(grid: Grid, area: tuple[float, float, float, float]) -> Grid:
    """Return whole pixels of the grid's lattice that cover (left, bottom, right, top)."""
    a, b, c, d, e, f = grid.transform
    if b or d or a <= 0 or e >= 0:
        raise DataError("the scene is not north-up, so an area cannot be cut from it. Warp it first.")
    left, bottom, right, top = area
    col0, col1 = math.floor((left - c) / a + ROUNDING), math.ceil((right - c) / a - ROUNDING)
    row0, row1 = math.floor((f - top) / -e + ROUNDING), math.ceil((f - bottom) / -e - ROUNDING)
    return replace(
        grid,
        transform=(a, b, c + a * col0, d, e, f + e * row0),
        width=max(1, col1 - col0),
        height=max(1, row1 - row0),
    )
