"""Squares of dates and results as PNG: band combinations, overlays, and values of single pixels.

A square is named by a reduction factor (1, 2, 4 ...) and its column and row on the reduced grid, in units of `SQUARE`
pixels, so that the page fetches only the visible part of a scene of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import BandError
from sader.figures.picture import heat_picture, ramp_colours
from sader.geo.grid import Grid
from sader.geo.read.raster import open_raster, read_bands, reading
from sader.geo.stack import DateSource
from sader.inference.scene_match import overview_factor
from sader.inference.tiling import Window
from sader.inference.values import ValueCoding
from sader.viewer.problems import NotFoundError
from sader.viewer.schema import Square

SQUARE = 512
MASK_COLOUR = (230, 97, 1, 150)
"""Of cloud and shadow; the legend in static/style.css has it too."""
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "true": ("B04", "B03", "B02"),
    "false": ("B08", "B04", "B03"),
    "ndvi": ("B08", "B04"),
}
"""Name -> bands: true colour, false colour (vegetation in red), vegetation index."""
RAMP = np.array(
    [(94, 58, 30), (171, 123, 71), (226, 205, 150), (190, 207, 110), (98, 163, 66), (29, 104, 45), (6, 60, 34)],
    np.float32,
)
NDVI_RANGE = (-0.2, 0.9)
SPREAD_SCALE = 0.05
"""Standard deviation, in reflectance, of the brightest colour; the legend in static/app.js states it too."""
SAMPLE_EDGE = 256
"""Longer edge, in pixels, of the reduced image from which display limits are computed."""
SAMPLED = (8, 48)
"""Windows along each edge and their size, used instead for scenes larger than eight times `SAMPLE_EDGE`."""


def combination(bands: Sequence[str], wanted: str) -> tuple[str, ...]:
    """Return the bands of a combination; raise where the scene lacks one."""
    if wanted not in COMBINATIONS:
        raise NotFoundError(f"there is no combination {wanted!r}; expected {', '.join(COMBINATIONS)}.")
    missing = [band for band in COMBINATIONS[wanted] if band not in bands]
    if missing:
        raise BandError(f"{wanted} needs {', '.join(missing)}; the scene has {', '.join(bands)}.")
    return COMBINATIONS[wanted]


def possible(bands: Sequence[str]) -> list[str]:
    """Return the combinations whose bands are present."""
    return [name for name, needed in COMBINATIONS.items() if set(needed) <= set(bands)]


def shared_limits(sources: Sequence[DateSource], grid: Grid, bands: Sequence[str]) -> tuple[float, float]:
    """Return the reflectances shown as black and white for all dates: those of the date with the darkest highlights.

    Clouds are bright, so this is the least cloudy date, and the ground keeps its contrast.
    """
    found = []
    for source in sources:
        seen = _some_values(source, grid, bands)
        if seen.size:
            found.append(
                (float(np.percentile(seen, 90)), float(np.percentile(seen, 1)), float(np.percentile(seen, 98)))
            )
    if not found:
        return 0.0, 0.3
    _, low, high = min(found)
    return low, max(min(high, 0.6), low + 0.01)


def _some_values(source: DateSource, grid: Grid, bands: Sequence[str]) -> NDArray[np.float32]:
    """Return a sample (C, n) of the values of a date: the reduced image, or windows of a large scene.

    Reducing a whole Sentinel-2 tile reads all of its pixels, which is too slow for the first display.
    """
    factor = max(1, -(-max(grid.shape) // SAMPLE_EDGE))
    if factor <= 8:
        small = grid if factor == 1 else grid.coarser(factor)
        values, valid = source.read(small.whole, bands=list(bands), grid=small)
        return values[:, valid]
    count, size = SAMPLED
    parts = []
    for i in range(count):
        for j in range(count):
            top, left = i * (grid.height - size) // (count - 1), j * (grid.width - size) // (count - 1)
            window = Window(max(0, top), max(0, left), min(size, grid.height), min(size, grid.width))
            values, valid = source.read(window, bands=list(bands), grid=grid)
            parts.append(values[:, valid])
    return np.concatenate(parts, axis=1)


def window_of(wanted: Square, grid: Grid) -> tuple[Grid, Window]:
    """Return the reduced grid and the window of one square of it."""
    factor, column, row = int(wanted.factor), wanted.column, wanted.row
    small = grid if factor == 1 else grid.coarser(factor)
    left, top = column * SQUARE, row * SQUARE
    if left >= small.width or top >= small.height:
        raise NotFoundError(f"there is no square {column}, {row} at 1:{factor}.")
    return small, Window(top, left, min(SQUARE, small.height - top), min(SQUARE, small.width - left))


def colours(
    values: NDArray[np.float32], valid: NDArray[np.bool_], wanted: str, limits: tuple[float, float]
) -> NDArray[np.uint8]:
    """Return RGBA (h, w, 4) of reflectance (C, h, w); transparent where there is no data."""
    if wanted == "ndvi":
        near, red = values[0].clip(0, None), values[1].clip(0, None)
        index = (near - red) / np.maximum(near + red, 1e-6)
        shown = ramp_colours((index - NDVI_RANGE[0]) / (NDVI_RANGE[1] - NDVI_RANGE[0]), RAMP)
    else:
        low, high = limits
        # Gamma brightens dark surfaces.
        share = np.clip((values - low) / (high - low), 0, 1) ** 0.8
        shown = np.rint(np.moveaxis(share, 0, -1) * 255)
    alpha = np.where(valid, 255, 0)[..., None]
    return np.concatenate([shown, alpha], axis=-1).astype(np.uint8)


def spread_colours(spread: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return RGBA of a standard deviation (h, w): transparent where it is small."""
    picture = heat_picture(spread, full_scale=SPREAD_SCALE)
    alpha = np.where(np.isfinite(spread), np.clip(np.nan_to_num(spread) / SPREAD_SCALE * 4, 0, 1) * 235, 0)
    return np.concatenate([picture, np.rint(alpha)[..., None].astype(np.uint8)], axis=-1)


def provenance_colours(codes: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return RGBA of provenance (h, w): reconstructed pixels in magenta."""
    shown = np.zeros((*codes.shape, 4), np.uint8)
    shown[codes == 2] = (232, 62, 160, 150)
    return shown


def mask_colours(mask: NDArray[np.bool_], wanted: Square, grid: Grid) -> NDArray[np.uint8]:
    """Return RGBA of a square of a scene on `grid`, from a mask (h, w) in its overview."""
    _, window = window_of(wanted, grid)
    places = []
    for drawn, size, cells in zip(window.slices, grid.shape, mask.shape, strict=True):
        # The middle of each drawn pixel, in pixels of the overview.
        middle = (np.arange(drawn.start, drawn.stop) + 0.5) * min(int(wanted.factor), size)
        places.append(np.minimum(middle / min(overview_factor(*grid.shape), size), cells - 1).astype(int))
    shown = np.zeros((window.height, window.width, 4), np.uint8)
    shown[mask[np.ix_(*places)]] = MASK_COLOUR
    return shown


def read_numbers(path: str, window: Window, grid: Grid, *, categories: bool) -> NDArray[Any]:
    """Return the stored values (C, h, w) of an output layer in a window of a reduced grid."""
    with reading(path), open_raster(path) as dataset:
        count, kind, nodata = dataset.count, dataset.dtypes[0], dataset.nodata
    coding = ValueCoding(kind, 1.0, 0.0, nodata, declared=False)
    return read_bands(path, range(1, count + 1), window, grid=grid, coding=coding, categories=categories)
