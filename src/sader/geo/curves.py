"""What a series shows at a glance: the animation of its dates, and the NDVI of points before and after."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import BandError, ConfigError, require
from sader.figures.picture import Panel, clear_limits, compose, save_png, true_colour
from sader.figures.series import Curve, draw_curves, save_gif
from sader.files import write_atomically
from sader.geo.read.raster import open_raster, reading
from sader.geo.scene.report import small_reflectance
from sader.geo.scene.run import SceneReport
from sader.geo.stack import DateSource, GeoStack
from sader.inference.tiling import Window
from sader.inference.values import RECONSTRUCTED, decode_array

EDGE = 480
"""Longest edge in pixels of a picture of the animation."""
RED, NIR = "B04", ("B08", "B8A")
COLUMNS = ("point", "date", "input", "before", "ndvi_before", "ndvi_after", "after")

Done = Sequence[tuple[int, SceneReport]]
"""(index of the date, report) of each result."""


def animate(stack: GeoStack, done: Done, path: str) -> Path:
    """Write the dates before and after as a GIF, under one stretch: that of the ground."""
    factor = max(1, -(-max(stack.grid.shape) // EDGE))
    grid = stack.grid if factor == 1 else stack.grid.coarser(factor)
    after = [small_reflectance(scene.output, grid.shape, _own(stack, date)) for date, scene in done]
    before = []
    for date, _ in done:
        values, valid = stack.sources[date].read(grid.whole, bands=stack.bands, grid=grid)
        before.append(np.where(valid, values, np.float32(np.nan)))
    limits = clear_limits(after, before, bands=stack.bands)
    frames = []
    for (date, _), *pair in zip(done, before, after, strict=True):
        pictures = [true_colour(image, bands=stack.bands, limits=limits) for image in pair]
        captions = (_day(stack.sources[date]), "without clouds")
        frames.append(compose([[Panel(picture, text) for picture, text in zip(pictures, captions, strict=True)]]))
    return save_gif(frames, path)


def find_pixels(points: Sequence[str], stack: GeoStack) -> dict[str, Window]:
    """Return the pixel of each "longitude,latitude", or "column,row" for a stack without a reference system."""
    if points:
        _vegetation_bands(stack)
    return {text: _pixel_at(text, stack) for text in points}


def write_points(stack: GeoStack, done: Done, pixels: Mapping[str, Window], beside: Path) -> list[str]:
    """Write NDVI before and after at some pixels as CSV and, where all dates are known, PNG; return the files.

    The results must have a provenance layer. beside: path of the files without their suffix.
    """
    bands = _vegetation_bands(stack)
    rows: list[tuple[object, ...]] = []
    curves = []
    for text, place in pixels.items():
        found = [_values(_own(stack, date), date, scene, place, bands) for date, scene in done]
        for (date, _), (before, after, state, origin) in zip(done, found, strict=True):
            source = stack.sources[date]
            rows.append((text, _day(source), source.name, state, _number(before), _number(after), origin))
        times = [stack.sources[date].date for date, _ in done]
        known = [time.replace(tzinfo=None) for time in times if time is not None]
        if len(known) == len(times):
            hidden = [state == "hidden" for _, _, state, _ in found]
            curves.append(Curve(text, known, [one[0] for one in found], [one[1] for one in found], hidden))
    content = io.StringIO()
    csv.writer(content).writerows([COLUMNS, *rows])
    write_atomically(beside.with_suffix(".csv"), content.getvalue().encode())
    files = [str(beside.with_suffix(".csv"))]
    if curves:
        files.append(str(save_png(draw_curves(curves, label="NDVI"), beside.with_suffix(".png"))))
    return files


def _values(
    stack: GeoStack, date: int, scene: SceneReport, place: Window, bands: tuple[str, str]
) -> tuple[float, float, str, str]:
    """Return NDVI before and after at a pixel, its state before (clear, hidden, nodata) and its origin after."""
    values, valid = stack.sources[date].read(place, bands=bands, grid=stack.grid)
    numbers = _pixel(scene.output, place)[[stack.bands.index(band) for band in bands]]
    after, there = decode_array(numbers, (stack.coding, stack.coding))
    side = next(file for file in scene.files if file.endswith("_provenance.tif"))
    rebuilt = int(_pixel(side, place)[0, 0, 0]) == RECONSTRUCTED
    state = "nodata" if not valid[0, 0] else "hidden" if rebuilt else "clear"
    origin = "nodata" if not there[0, 0] else "reconstructed" if rebuilt else "observed"
    return _ndvi(values, valid), _ndvi(after, there), state, origin


def _own(stack: GeoStack, date: int) -> GeoStack:
    """Return the stack with the coding of the result of a date."""
    return replace(stack, coding=stack.sources[date].coding)


def _day(source: DateSource) -> str:
    return source.name if source.date is None else f"{source.date:%Y-%m-%d}"


def _vegetation_bands(stack: GeoStack) -> tuple[str, str]:
    nir = next((band for band in NIR if band in stack.bands), None)
    if RED not in stack.bands or nir is None:
        raise BandError(f"NDVI needs {RED} and {' or '.join(NIR)}; the series has {', '.join(stack.bands)}.")
    return RED, nir


def _pixel_at(text: str, stack: GeoStack) -> Window:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"the point is {text!r}; expected longitude,latitude in degrees, such as 7.71,46.02."
        ) from error
    grid = stack.grid
    col, row = x, y
    if grid.crs:
        warp = require("rasterio.warp", extra="geo", purpose="placing a point").transform
        (x,), (y,) = warp("EPSG:4326", grid.crs, [x], [y])
        a, b, c, d, e, f = grid.transform
        scale = a * e - b * d
        col, row = (e * (x - c) - b * (y - f)) / scale, (a * (y - f) - d * (x - c)) / scale
    if not (0 <= col < grid.width and 0 <= row < grid.height):
        raise ConfigError(f"the point {text} lies outside the scene; expected longitude,latitude in degrees inside it.")
    return Window(int(row), int(col), 1, 1)


def _pixel(path: str, place: Window) -> NDArray[Any]:
    row, col = place.row, place.col
    with reading(path), open_raster(path) as dataset:
        numbers: NDArray[Any] = dataset.read(window=((row, row + 1), (col, col + 1)))
    return numbers


def _ndvi(values: NDArray[np.float32], valid: NDArray[np.bool_]) -> float:
    """Return the NDVI of one pixel of red and near infrared (2, 1, 1); NaN where it has none."""
    red, nir = float(values[0, 0, 0]), float(values[1, 0, 0])
    return (nir - red) / (nir + red) if valid[0, 0] and nir + red > 0 else float("nan")


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.4f}"
