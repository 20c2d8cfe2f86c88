"""The quick-look PNG of `sader remove --preview`: the dates, the result and, where asked for, its uncertainty."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sader.errors import DataError, OutputError
from sader.figures.picture import Panel, Picture, compose, heat_picture, save_png, stretch_limits, true_colour
from sader.geo.read.raster import open_raster, reading
from sader.geo.scene.rows import OBSERVED, RECONSTRUCTED
from sader.geo.stack import GeoStack
from sader.geo.values import decode

if TYPE_CHECKING:
    from sader.geo.scene.run import SceneReport

EDGE = 480
"""Longest edge of a panel in pixels."""
PER_ROW = 4
MOST_DATES = 12
SPREAD_SCALE = 0.02
"""Standard deviation, in reflectance, drawn in the brightest colour."""
COLOURS = np.array([(128, 128, 128), (28, 46, 84), (245, 245, 245)], np.uint8)
"""Provenance: nodata grey, observed dark blue, reconstructed white."""


def write_preview(path: str | Path, stack: GeoStack, report: SceneReport) -> Path:
    """Draw inputs and result with one stretch, the cleaned date framed; return the path of the PNG."""
    factor = max(1, -(-max(stack.grid.shape) // EDGE))
    grid = stack.grid if factor == 1 else stack.grid.coarser(factor)
    result = _read(report.output, grid.shape, stack)
    limits = stretch_limits([result], bands=stack.bands)

    def shown(image: NDArray[np.float32]) -> Picture:
        return true_colour(image, bands=stack.bands, limits=limits)

    panels = []
    for index, source in enumerate(stack.sources[:MOST_DATES]):
        values, valid = source.read(grid.whole, bands=stack.bands, grid=grid)
        day = f"{source.date:%Y-%m-%d}" if source.date else source.name
        caption = f"{day}, {report.clear_share[index]:.0%} clear"
        own = index == report.reference_index
        panels.append(Panel(shown(np.where(valid, values, np.nan)), caption + (" (cleaned)" if own else ""), own))
    panels.append(Panel(shown(result), "result"))
    stem = Path(report.output).stem
    files = {Path(file).stem.removeprefix(stem + "_"): file for file in report.files}
    if "provenance" in files:
        codes = _read_numbers(files["provenance"], grid.shape)[0].astype(int)
        colours = COLOURS[np.clip(codes, 0, max(OBSERVED, RECONSTRUCTED))]
        panels.append(Panel(colours, "reconstructed pixels (white)"))
    if "uncertainty" in files:
        spread = np.asarray(_read_numbers(files["uncertainty"], grid.shape), np.float32).mean(axis=0)
        panels.append(Panel(heat_picture(spread, full_scale=SPREAD_SCALE), f"uncertainty (yellow: {SPREAD_SCALE})"))
    rows = [panels[start : start + PER_ROW] for start in range(0, len(panels), PER_ROW)]
    left_out = len(stack.sources) - MOST_DATES
    note = f"{left_out} more dates are not shown" if left_out > 0 else None
    return save_png(compose(rows, title=f"{Path(report.output).name}: {report.model}", note=note), path)


def check_preview(path: str | Path) -> None:
    """Refuse now a picture that could not be written after the work."""
    folder = Path(path).parent
    if Path(path).suffix.lower() != ".png":
        raise OutputError(f"the preview is {path}; expected a name that ends in .png.")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(f"cannot write the preview into {folder}: no such folder, or it is read-only.")


def _read(path: str, shape: tuple[int, int], stack: GeoStack) -> NDArray[np.float32]:
    values, valid = decode(_read_numbers(path, shape), stack.coding)
    return np.where(valid, values, np.float32(np.nan))


def _read_numbers(path: str, shape: tuple[int, int]) -> NDArray[np.generic]:
    """Return a small version (C, h, w) of a result, from its overviews."""
    with reading(path), open_raster(path) as dataset:
        numbers: NDArray[np.generic] = dataset.read(out_shape=(dataset.count, *shape))
    if numbers.size == 0:
        raise DataError(f"{path} is empty.")
    return numbers
