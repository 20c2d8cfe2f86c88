"""The transform from Web Mercator, the projection of map tiles, to the pixels of a scene.

The page draws a scene in its own pixels, without resampling, and warps the background map instead. The transform is a
polynomial fitted with PROJ and checked against it on a dense lattice; where its error exceeds `MOST_ERROR` of a pixel,
there is no background map.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import require
from sader.geo.grid import Grid
from sader.viewer.problems import NotFoundError

WORLD = 20037508.342789244
"""Half the width of the Web Mercator square, metres."""
MOST_ERROR = 0.25
"""Of a pixel of the scene."""
AROUND = (3.0, 1.0, 0.25)
"""Margin of the map around the scene, in scene widths; smaller margins are tried where the fit is not accurate."""
DEGREES = (3, 5, 7)
CHECKED = 41

Floats = NDArray[np.float64]


def mercator_fit(grid: Grid) -> dict[str, Any]:
    """Return the polynomial (Web Mercator -> column, row), the rectangle in which it is valid, and its largest error.

    u = (x - centre_x) / half_x, v likewise; column = sum of columns[k] * u**i * v**j over i, then j; i + j <= degree.
    """
    if not grid.crs:
        raise NotFoundError("the scene cannot be placed on a map: its files state no reference system.")
    steps = np.linspace(0, 1, 17)
    columns, rows = (part.ravel() for part in np.meshgrid(steps * grid.width, steps * grid.height))
    x, y = transformed(grid.crs, "EPSG:3857", *grid.place(columns, rows))
    if not (np.isfinite(x).all() and np.isfinite(y).all() and np.abs(y).max() < WORLD):
        raise NotFoundError("the scene lies outside the area of web maps.")
    middle = len(x) // 2
    x = x[middle] + _wrapped(x - x[middle], 2 * WORLD)
    side = max(np.ptp(x), np.ptp(y))
    for around in AROUND:
        west, east = x.min() - around * side, x.max() + around * side
        south, north = max(y.min() - around * side, -WORLD), min(y.max() + around * side, WORLD)
        centre = ((west + east) / 2, (south + north) / 2)
        half = ((east - west) / 2, (north - south) / 2)
        for degree in DEGREES:
            found = _fit(grid, centre, half, degree)
            if found is not None and found["error"] <= MOST_ERROR:
                return found
    raise NotFoundError(
        "no background map for this scene: it is too large, or its projection differs too much from Web Mercator."
    )


def _fit(grid: Grid, centre: tuple[float, float], half: tuple[float, float], degree: int) -> dict[str, Any] | None:
    # Chebyshev nodes spread the error evenly instead of letting it grow towards the corners.
    count = 2 * degree + 3
    nodes = np.cos(np.pi * (np.arange(count) + 0.5) / count)
    u, v = (part.ravel() for part in np.meshgrid(nodes, nodes))
    wanted = _pixels(grid, centre, half, u, v)
    dense = np.linspace(-1, 1, CHECKED)
    at, to = (part.ravel() for part in np.meshgrid(dense, dense))
    true = _pixels(grid, centre, half, at, to)
    if not (np.isfinite(wanted).all() and np.isfinite(true).all()):
        return None
    solved, *_ = np.linalg.lstsq(_terms(u, v, degree), wanted, rcond=None)
    error = float(np.abs(_terms(at, to, degree) @ solved - true).max())
    return {
        "centre": list(centre),
        "half": list(half),
        "degree": degree,
        "columns": solved[:, 0].tolist(),
        "rows": solved[:, 1].tolist(),
        "error": error,
    }


def _terms(u: Floats, v: Floats, degree: int) -> Floats:
    return np.stack([u**i * v**j for i in range(degree + 1) for j in range(degree + 1 - i)], axis=-1)


def _pixels(grid: Grid, centre: tuple[float, float], half: tuple[float, float], u: Floats, v: Floats) -> Floats:
    """Return (n, 2) column and row of points of the rectangle."""
    x, y = transformed("EPSG:3857", grid.crs, _wrapped(centre[0] + half[0] * u, 2 * WORLD), centre[1] + half[1] * v)
    if grid.in_degrees:
        # Across the antimeridian the longitude nearest to the scene applies.
        here, _ = grid.place(grid.width / 2, grid.height / 2)
        x = here + _wrapped(x - here, 360.0)
    return np.stack(grid.pixel(x, y), axis=-1)


def _wrapped(value: Floats, period: float) -> Floats:
    return value - period * np.round(value / period)


def transformed(source: str, target: str, x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return points in another reference system; infinite where PROJ has no result."""
    rasterio = require("rasterio.warp", extra="geo", purpose="maps")
    try:
        there = rasterio.transform(source, target, x.tolist(), y.tolist())
    except Exception as error:
        # rasterio raises GDAL errors here, whose classes are private.
        if not type(error).__name__.startswith(("CPLE_", "CRSError")):
            raise
        return np.full(x.shape, np.inf), np.full(x.shape, np.inf)
    return np.asarray(there[0], np.float64), np.asarray(there[1], np.float64)
