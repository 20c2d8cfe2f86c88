"""Pictures of a finished scene: the PNG of `sader remove --preview` and the HTML page of `--report`.

The page is meant to be sent to others, so that it does not contain the folders of this machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader._version import __version__
from sader.errors import require
from sader.figures.html import (
    Figure,
    Section,
    comparison,
    gallery,
    histogram,
    listing,
    page,
    paragraph,
    row_of,
    save_page,
    table,
)
from sader.figures.picture import Panel, Picture, clear_limits, compose, heat_picture, save_png, true_colour
from sader.geo.read.raster import open_raster, reading
from sader.geo.scene.options import PROVENANCE_LEGEND
from sader.geo.scene.source import overview_grid, read_overview
from sader.geo.stack import GeoStack
from sader.inference.scene_match import Overview
from sader.inference.values import RECONSTRUCTED, decode_array

if TYPE_CHECKING:
    from sader.geo.scene.run import SceneReport
    from sader.inference.remover import CloudRemover

EDGE = 480
"""Longest edge of a panel in pixels."""
PER_ROW = 4
SPREAD_SCALE = 0.02
"""Standard deviation, in reflectance, drawn in the brightest colour."""
COLOURS = np.array([colour[:3] for _, colour in PROVENANCE_LEGEND], np.uint8)
"""Provenance: nodata grey, observed dark blue, reconstructed white."""
MOST_DATES = 12
HIDDEN_FROM = 0.5
"""Probability of cloud or shadow from which a pixel is drawn as hidden."""
CARD = ("training_data", "licence", "attribution", "date")


def write_preview(path: str | Path, stack: GeoStack, report: SceneReport) -> Path:
    """Draw inputs and result with one stretch, the cleaned date framed; return the path of the PNG."""
    factor = max(1, -(-max(stack.grid.shape) // EDGE))
    grid = stack.grid if factor == 1 else stack.grid.coarser(factor)
    result = small_reflectance(report.output, grid.shape, stack)
    dates = []
    for source in stack.sources[:MOST_DATES]:
        values, valid = source.read(grid.whole, bands=stack.bands, grid=grid)
        dates.append(np.where(valid, values, np.float32(np.nan)))
    limits = clear_limits([result], dates, bands=stack.bands)

    def shown(image: NDArray[np.float32]) -> Picture:
        return true_colour(image, bands=stack.bands, limits=limits)

    panels = []
    for index, date in enumerate(dates):
        caption = f"{_day(stack, index)}, {report.clear_share[index]:.0%} clear"
        own = index == report.reference_index
        panels.append(Panel(shown(date), caption + (" (cleaned)" if own else ""), own))
    panels.append(Panel(shown(result), "result"))
    stem = Path(report.output).stem
    files = {Path(file).stem.removeprefix(stem + "_"): file for file in report.files}
    if "provenance" in files:
        codes = _numbers(files["provenance"], grid.shape)[0].astype(int)
        panels.append(Panel(COLOURS[np.clip(codes, 0, len(COLOURS) - 1)], "reconstructed pixels (white)"))
    if "uncertainty" in files:
        spread = np.asarray(_numbers(files["uncertainty"], grid.shape), np.float32).mean(axis=0)
        panels.append(Panel(heat_picture(spread, full_scale=SPREAD_SCALE), f"uncertainty (yellow: {SPREAD_SCALE})"))
    rows = [panels[start : start + PER_ROW] for start in range(0, len(panels), PER_ROW)]
    left_out = len(stack.sources) - MOST_DATES
    note = f"{left_out} more dates are not shown" if left_out > 0 else None
    return save_png(compose(rows, title=f"{Path(report.output).name}: {report.model}", note=note), path)


def write_scene_report(
    path: str | Path,
    stack: GeoStack,
    report: SceneReport,
    remover: CloudRemover,
    *,
    settings: Mapping[str, object],
) -> Path:
    """Write the page about a finished scene and return its path.

    stack: with the coding of the output. settings: options of the run, name -> value; folders are cut off file names.
    Pictures, masks and distributions are those of the overview, at most 512 pixels along the longer edge.
    """
    overview, grid = read_overview(stack, remover), overview_grid(stack)
    result = small_reflectance(report.output, grid.shape, stack)
    layers = {Path(file).stem.removeprefix(Path(report.output).stem + "_"): file for file in report.files[1:]}
    rebuilt: NDArray[np.bool_] | None = None
    if "provenance" in layers:
        codes = _numbers(layers["provenance"], grid.shape)[0].astype(int)
        rebuilt = codes == RECONSTRUCTED
    spread = _numbers(layers["uncertainty"], grid.shape) if "uncertainty" in layers else None

    sections = [
        Section("Result", _result(stack, report, overview, result)),
        Section("Dates", _dates(stack, report, overview, result)),
    ]
    if rebuilt is not None:
        sections.append(Section("Provenance", _provenance(report, codes)))
    if spread is not None:
        sections.append(Section("Uncertainty", _uncertainty(stack, spread.astype(np.float32), rebuilt)))
    sections += [
        Section("Distributions", _histograms(stack, report, overview, result)),
        Section("Settings", table((name, _shown(value)) for name, value in _settings(report, settings).items())),
        Section("Model", table(_model(report, remover).items())),
        Section("Files", _files(stack, report)),
        Section("Notes of the run", listing(_without_folders(text) for text in report.notices)),
    ]
    height, width = report.size
    subtitle = (
        f"sader {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {len(report.dates)} dates, "
        f"{width} x {height} pixels, {', '.join(report.bands)}"
    )
    return save_page(page(f"Cloud removal: {Path(report.output).name}", sections, subtitle=subtitle), path)


def _result(stack: GeoStack, report: SceneReport, overview: Overview, result: NDArray[np.float32]) -> str:
    """The cleaned date against the result; without one, the result alone."""
    total = max(1, sum(report.pixels.values()))
    share = {name: f"{number / total:.1%} {name}" for name, number in report.pixels.items()}
    words = ", ".join(share[name] for name in ("observed", "reconstructed", "nodata") if name in share)
    after = Figure(_colour(result, stack, overview, result), "result")
    index = report.reference_index
    if index is None:
        return gallery([after]) + paragraph(f"A new image of all dates: {words}.")
    before = Figure(_colour(_date(overview, index), stack, overview, result), f"{_day(stack, index)}, as it was taken")
    return comparison(before, after) + paragraph(f"{report.reference} was cleaned: {words}.")


def _dates(stack: GeoStack, report: SceneReport, overview: Overview, result: NDArray[np.float32]) -> str:
    figures, rows, grid = [], [], overview_grid(stack)
    for index, source in enumerate(stack.sources):
        own = index == report.reference_index
        clear = f"{report.clear_share[index]:.0%} clear"
        known = source.read_mask(grid.whole, grid=grid) is not None
        rows.append((source.name, _day(stack, index), clear, "given" if known else "the model's own"))
        if index < MOST_DATES:
            caption = f"{_day(stack, index)}, {clear}" + (" (cleaned)" if own else "")
            hidden = (np.nan_to_num(overview.cloud[index]) >= HIDDEN_FROM) & overview.valid[index]
            figures.append(Figure(_colour(_date(overview, index), stack, overview, result), caption, hidden, own))
    left_out = len(stack.sources) - MOST_DATES
    more = paragraph(f"{left_out} more dates are not shown.") if left_out > 0 else ""
    note = "Masks are those of the overview; the result uses masks at full size."
    return gallery(figures) + more + paragraph(note) + table(rows, head=("input", "date", "clear", "mask"))


def _provenance(report: SceneReport, codes: NDArray[Any]) -> str:
    picture = COLOURS[np.clip(codes, 0, len(COLOURS) - 1)]
    caption = "dark blue: observed, unchanged; white: reconstructed; grey: no data"
    total = max(1, sum(report.pixels.values()))
    rows = [(name, f"{number:,}", f"{number / total:.2%}") for name, number in report.pixels.items()]
    return gallery([Figure(picture, caption)]) + table(rows, head=("pixels", "number", "share"))


def _uncertainty(stack: GeoStack, spread: NDArray[np.float32], rebuilt: NDArray[np.bool_] | None) -> str:
    """The map, and its percentiles over the reconstructed pixels of each band."""
    heat = heat_picture(spread.mean(axis=0), full_scale=SPREAD_SCALE)
    figure = Figure(heat, f"expected standard deviation, mean over bands; black 0, pale yellow {SPREAD_SCALE} or more")
    rows = []
    for band, values in zip(stack.bands, spread, strict=True):
        seen = values[np.isfinite(values) & (values > 0 if rebuilt is None else rebuilt)]
        cells = [f"{x:.4f}" for x in np.percentile(seen, (50, 90, 99))] if seen.size else ["-"] * 3
        rows.append((band, *cells))
    head = ("reconstructed pixels, reflectance", "median", "90 %", "99 %")
    return gallery([figure]) + table(rows, head=head)


def _histograms(stack: GeoStack, report: SceneReport, overview: Overview, result: NDArray[np.float32]) -> str:
    clear = (np.nan_to_num(overview.cloud) < HIDDEN_FROM) & overview.valid
    index = report.reference_index
    parts = []
    for number, band in enumerate(stack.bands):
        if index is None:
            name, values = "clear pixels of all dates", overview.cloudy[:, number][clear]
        else:
            name, values = "clear pixels of the cleaned date", overview.cloudy[index, number][clear[index]]
        parts.append(histogram(band, {name: values, "result": result[number].ravel()}))
    return row_of(parts)


def _settings(report: SceneReport, settings: Mapping[str, object]) -> dict[str, object]:
    used = {"steps": report.steps, "seed": report.seed, "samples": report.samples, "tiles": report.tiles}
    return {**settings, **used, "seconds": f"{report.seconds:.1f}"}


def _model(report: SceneReport, remover: CloudRemover) -> dict[str, object]:
    card = {name.replace("_", " "): remover.card[name] for name in CARD if remover.card.get(name)}
    parameters = sum(parameter.numel() for parameter in remover.model.parameters())
    trained = "yes" if remover.card.get("trained", True) else "NO: random weights, the result means nothing"
    return {"name": report.model, "trained": trained, "parameters": f"{parameters / 1e6:.2f} M", **card}


def _files(stack: GeoStack, report: SceneReport) -> str:
    rows: list[tuple[str, object]] = []
    for file in report.files:
        with open(file, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        rows.append((Path(file).name, f"{Path(file).stat().st_size:,} bytes, SHA-256 {digest}"))
    across, down = stack.grid.resolution
    left, bottom, right, top = stack.grid.bounds
    coding = stack.coding
    rows += [
        ("grid", f"{_crs_name(stack.grid.crs)}, pixels of {across:g} x {down:g}"),
        ("extent", f"{left:.12g}, {bottom:.12g} to {right:.12g}, {top:.12g}"),
        ("values", f"{coding.dtype}, reflectance = DN * {coding.scale:g} + {coding.offset:g}, nodata {coding.nodata}"),
    ]
    return table(rows)


def _crs_name(crs: str) -> str:
    if not crs:
        return "no reference system"
    found = require("rasterio.crs", extra="geo", purpose="naming reference systems").CRS.from_user_input(crs)
    return found.to_string() if found.to_epsg() else found.to_wkt().split('"')[1]


def _shown(value: object) -> str:
    """A setting as text; of a path only its last part."""
    if isinstance(value, list | tuple):
        return ", ".join(_shown(one) for one in value) or "-"
    if value is None:
        return "-"
    text = str(value)
    return text if "://" in text or text.upper().startswith("EPSG:") else text.replace("\\", "/").rsplit("/", 1)[-1]


def _without_folders(text: str) -> str:
    """Return a note with the folders of absolute paths cut off; web addresses stay."""
    return re.sub(r"(?<![\w:/.])(?:[A-Za-z]:)?[/\\](?:[^/\\\s'\",;]+[/\\])+", "", text)


def _date(overview: Overview, index: int) -> NDArray[np.float32]:
    return np.where(overview.valid[index], overview.cloudy[index], np.float32(np.nan))


def _day(stack: GeoStack, index: int) -> str:
    source = stack.sources[index]
    return f"{source.date:%Y-%m-%d}" if source.date else source.name


def _colour(image: NDArray[np.float32], stack: GeoStack, overview: Overview, result: NDArray[np.float32]) -> Picture:
    """One stretch for all pictures: that of the result and of the ground in all dates."""
    dates = [_date(overview, index) for index in range(len(stack.sources))]
    return true_colour(image, bands=stack.bands, limits=clear_limits([result], dates, bands=stack.bands))


def small_reflectance(path: str, shape: tuple[int, int], stack: GeoStack) -> NDArray[np.float32]:
    """Return a small version (C, h, w) of a result in reflectance, NaN where there is no data."""
    values, valid = decode_array(_numbers(path, shape), (stack.coding,) * len(stack.bands))
    return np.where(valid, values, np.float32(np.nan))


def _numbers(path: str, shape: tuple[int, int]) -> NDArray[np.generic]:
    """Return a small version (C, h, w) of a result, from its overviews."""
    with reading(path), open_raster(path) as dataset:
        numbers: NDArray[np.generic] = dataset.read(out_shape=(dataset.count, *shape))
    return numbers
