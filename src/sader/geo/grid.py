"""Pixel grids on a map, and areas and periods as users write them (a bbox in degrees, two days)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sader.errors import ConfigError, DataError, ShapeError, require
from sader.inference.tiling import Window

ROUNDING = 1e-3
"""Part of a pixel below which an excess over an edge is rounding error."""
Affine6 = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): x = a col + b row + c, y = d col + e row + f, pixel corners, in units of the CRS."""

DEGREES = "EPSG:4326"
Box = tuple[float, float, float, float]
"""(west, south, east, north) in degrees."""


@dataclass(frozen=True)
class Grid:
    """The pixels of an image on the map."""

    crs: str
    """WKT or an authority code such as "EPSG:32632"; "" for an image without georeference."""
    transform: Affine6
    width: int
    height: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1:
            raise ShapeError(f"the grid is {self.width} x {self.height} pixels; expected at least one.")
        a, b, _, d, e, _ = self.transform
        if not all(math.isfinite(number) for number in self.transform) or a * e == b * d:
            raise DataError(
                f"the geotransform is {self.transform}; expected six finite numbers and pixels with an area. Set it "
                "right (rio edit-info --transform), or warp the image from its source again."
            )

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
        corners = [self.place(col, row) for col in (0, self.width) for row in (0, self.height)]
        xs, ys = zip(*corners, strict=True)
        return min(xs), min(ys), max(xs), max(ys)

    @property
    def in_degrees(self) -> bool:
        """Whether the units of the CRS are degrees; False without a CRS."""
        return bool(self.crs and crs_of(self.crs).is_geographic)

    def place(self, col: Any, row: Any) -> tuple[Any, Any]:
        """Return x and y of positions (numbers or arrays) in pixels from the upper left corner."""
        a, b, c, d, e, f = self.transform
        return a * col + b * row + c, d * col + e * row + f

    def pixel(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return column and row of places: the inverse of `place`."""
        a, b, c, d, e, f = self.transform
        x, y, scale = x - c, y - f, a * e - b * d
        return (e * x - b * y) / scale, (a * y - d * x) / scale

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

    def part(self, window: Window) -> Grid:
        """Return the grid of a window."""
        a, b, _, d, e, _ = self.transform
        x, y = self.place(window.col, window.row)
        return Grid(self.crs, (a, b, x, d, e, y), window.width, window.height)

    def coarser(self, factor: int) -> Grid:
        """Return a grid of pixels `factor` times as large that covers this one; its pixels end at a shorter edge."""
        a, b, c, d, e, f = self.transform
        down, across = min(factor, self.height), min(factor, self.width)
        scaled = (a * across, b * down, c, d * across, e * down, f)
        return replace(self, transform=scaled, width=-(-self.width // across), height=-(-self.height // down))


def same_crs(one: str, other: str) -> bool:
    """Whether two names mean one reference system; PROJ compares them where the texts differ."""
    if one == other:
        return True
    if not one or not other:
        return False
    return bool(crs_of(one) == crs_of(other))


def crs_of(text: str) -> Any:
    """Return the reference system of a code or WKT as an object of rasterio."""
    return require("rasterio.crs", extra="geo", purpose="using reference systems").CRS.from_user_input(text)


def bounds_in(crs: str, target: str, bounds: Sequence[float]) -> tuple[float, float, float, float]:
    """Return (left, bottom, right, top) around a rectangle of one reference system in another."""
    left, bottom, right, top = require("rasterio.warp", extra="geo", purpose="warping").transform_bounds(
        crs, target, *bounds
    )
    return left, bottom, right, top


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


def parse_area(area: str | Path | Sequence[float]) -> Box:
    """Return (west, south, east, north) of a bbox, or of a GeoJSON file: the box around all its shapes."""
    if not isinstance(area, str | Path) or Path(area).suffix.lower() not in (".json", ".geojson"):
        return parse_bbox(area if not isinstance(area, Path) else str(area))
    try:
        content = json.loads(Path(area).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the area {area}: {error.strerror}. Name a GeoJSON file.") from error
    except ValueError as error:
        raise ConfigError(f"the area {area} is not JSON ({error}); expected GeoJSON.") from error
    points = np.array(list(_positions(content)), np.float64).reshape(-1, 2)
    if not len(points) or not np.isfinite(points).all():
        raise ConfigError(f"the area {area} holds no coordinates; expected GeoJSON with polygons.")
    box = (*points.min(axis=0).tolist(), *points.max(axis=0).tolist())
    crs = content.get("crs", {}).get("properties", {}).get("name", "") if isinstance(content, dict) else ""
    if crs and not crs.upper().endswith("CRS84"):  # older files name a reference system; newer ones are in degrees
        box = bounds_in(crs, DEGREES, box)
    if box[0] == box[2] or box[1] == box[3]:
        raise ConfigError(f"the area {area} has no extent ({box[0]:g}, {box[1]:g}); expected polygons, not one point.")
    try:
        return parse_bbox(box)
    except ConfigError as error:
        raise ConfigError(f"the area {area} is not in degrees, as GeoJSON is: {error}") from error


def _positions(content: Any) -> Iterator[tuple[float, float]]:
    """Yield all (x, y) of a GeoJSON object."""
    if isinstance(content, dict):
        for key in ("features", "geometry", "geometries", "coordinates"):
            yield from _positions(content.get(key))
    elif isinstance(content, list):
        if len(content) >= 2 and all(isinstance(value, int | float) for value in content):
            yield float(content[0]), float(content[1])
        else:
            for part in content:
                yield from _positions(part)


def parse_dates(dates: str | Sequence[str | datetime]) -> str:
    """Return "2022-03-01/2022-05-31" after checking both ends."""
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


def in_degrees(grid: Grid) -> str:
    """Return the box around a grid as a user would give it: west,south,east,north in degrees."""
    return ",".join(f"{value:.6g}" for value in bounds_in(grid.crs, DEGREES, grid.bounds))


def crop_grid(grid: Grid, bbox: Sequence[float]) -> Grid:
    """Return the pixels of `grid`, continued beyond its edge where needed, that cover a bbox in degrees."""
    if not grid.crs:
        raise DataError("the scene has no reference system, so a bbox cannot be located on it. Georeference it first.")
    return _snapped(grid, bounds_in(DEGREES, grid.crs, bbox))


def area_window(grid: Grid, box: Box) -> Window | None:
    """Return the pixels of `grid` that touch a box in degrees; None where none does."""
    found = crop_grid(grid, box)
    col = round((found.transform[2] - grid.transform[2]) / grid.transform[0])
    row = round((found.transform[5] - grid.transform[5]) / grid.transform[4])
    top, left = max(row, 0), max(col, 0)
    bottom, right = min(row + found.height, grid.height), min(col + found.width, grid.width)
    return Window(top, left, bottom - top, right - left) if bottom > top and right > left else None


def union_grid(grids: Sequence[Grid]) -> Grid:
    """Return the first grid, continued so that it covers all of them."""
    boxes = [bounds_in(grid.crs, grids[0].crs, grid.bounds) for grid in grids]
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
        grid, transform=(a, b, c + a * col0, d, e, f + e * row0), width=max(1, col1 - col0), height=max(1, row1 - row0)
    )
