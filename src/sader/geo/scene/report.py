"""Pictures of finished scenes: the PNG of `sader remove --preview` and the HTML page of `--report`.

The page is meant to be sent to others, so that it does not contain the folders of this machine. Of a series: the
animation of its dates, and the NDVI of points before and after.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader._version import __version__
from sader.errors import BandError, ConfigError, require
from sader.figures import html
from sader.figures.html import Figure, Section
from sader.figures.picture import (
    Curve,
    Panel,
    Picture,
    clear_limits,
    compose,
    draw_curves,
    heat_picture,
    save_gif,
    save_png,
    true_colour,
)
from sader.files import file_digest, write_atomically
from sader.geo.grid import DEGREES, Grid, crs_of, in_degrees
from sader.geo.read.raster import open_raster, reading
from sader.geo.scene.cog import PROVENANCE_LEGEND
from sader.geo.scene.run import SceneReport
from sader.geo.scene.source import overview_grid, read_overview
from sader.geo.stack import DateSource, GeoStack
from sader.inference.tiling import Window
from sader.inference.values import RECONSTRUCTED, decode_array

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover

EDGE = 480
"""Longest edge of a panel in pixels."""
PER_ROW = 4
SPREAD_SCALE = 0.02
"""Standard deviation, in reflectance, drawn in the brightest colour."""
COLOURS = np.array([colour[:3] for _, colour in PROVENANCE_LEGEND], np.uint8)
"""Provenance: nodata grey, observed dark blue, reconstructed white."""
KINDS = ("observed", "reconstructed", "nodata")
MOST_DATES = 12
HIDDEN_FROM = 0.5
"""Probability of cloud or shadow from which a pixel is drawn as hidden."""
CARD = ("training_data", "licence", "attribution", "date")


def write_preview(path: str | Path, stack: GeoStack, report: SceneReport) -> Path:
    """Draw inputs and result with one stretch, the cleaned date framed; return the path of the PNG."""
    grid = _small_grid(stack)
    result = small_reflectance(report.output, grid.shape, stack)
    dates = [_image(stack, source, grid) for source in stack.sources[:MOST_DATES]]
    limits = clear_limits([result], dates, bands=stack.bands)

    def shown(image: NDArray[np.float32]) -> Picture:
        return true_colour(image, bands=stack.bands, limits=limits)

    panels = []
    for index, date in enumerate(dates):
        panels.append(Panel(shown(date), _caption(stack, report, index), index == report.reference_index))
    panels.append(Panel(shown(result), "result"))
    codes, spread = _layer(report, "provenance", grid.shape), _layer(report, "uncertainty", grid.shape)
    if codes is not None:
        panels.append(Panel(COLOURS[codes[0].astype(int)], "reconstructed pixels (white)"))
    if spread is not None:
        heat = heat_picture(spread.astype(np.float32).mean(axis=0), full_scale=SPREAD_SCALE)
        panels.append(Panel(heat, f"uncertainty (yellow: {SPREAD_SCALE})"))
    rows = [panels[start : start + PER_ROW] for start in range(0, len(panels), PER_ROW)]
    left_out = len(stack.sources) - MOST_DATES
    note = f"{left_out} more dates are not shown" if left_out > 0 else None
    return save_png(compose(rows, title=f"{Path(report.output).name}: {report.model}", note=note), path)


def write_scene_report(
    path: str | Path, stack: GeoStack, report: SceneReport, remover: CloudRemover, *, settings: Mapping[str, object]
) -> Path:
    """Write the page about a finished scene and return its path.

    stack: with the coding of the output. settings: options of the run, name -> value; folders are cut off file names.
    Pictures, masks and distributions are those of the overview, at most 512 pixels along the longer edge.
    """
    content = _Content(stack, report, remover)
    sections = [Section("Result", content.result()), Section("Dates", content.dates())]
    if content.codes is not None:
        sections.append(Section("Provenance", _provenance(report, content.codes[0].astype(int))))
    if content.spread is not None:
        sections.append(Section("Uncertainty", content.uncertainty(content.spread.astype(np.float32))))
    used = {"steps": report.steps, "seed": report.seed, "samples": report.samples, "tiles": report.tiles}
    settings = {**settings, **used, "seconds": f"{report.seconds:.1f}"}
    sections += [
        Section("Distributions", content.histograms()),
        Section("Settings", html.table((name, _shown(value)) for name, value in settings.items())),
        Section("Model", html.table(_model(report, remover).items())),
        Section("Files", _files(stack, report)),
        Section("Notes of the run", html.listing(_without_folders(text) for text in report.notices)),
    ]
    height, width = report.size
    subtitle = (
        f"sader {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {len(report.dates)} dates, "
        f"{width} x {height} pixels, {', '.join(report.bands)}"
    )
    return html.save_page(html.page(f"Cloud removal: {Path(report.output).name}", sections, subtitle=subtitle), path)


class _Content:
    """The parts of the page that show pixels, under one stretch: that of the result and of the ground in all dates."""

    def __init__(self, stack: GeoStack, report: SceneReport, remover: CloudRemover) -> None:
        self.stack, self.report, self.overview = stack, report, read_overview(stack, remover)
        shape = overview_grid(stack).shape
        self.image = small_reflectance(report.output, shape, stack)
        self.codes, self.spread = _layer(report, "provenance", shape), _layer(report, "uncertainty", shape)
        self.images = np.where(self.overview.valid[:, None], self.overview.cloudy, np.float32(np.nan))
        self.limits = clear_limits([self.image], list(self.images), bands=stack.bands)

    def colour(self, image: NDArray[np.float32]) -> Picture:
        return true_colour(image, bands=self.stack.bands, limits=self.limits)

    def result(self) -> str:
        """The cleaned date against the result; without one, the result alone."""
        pixels, index = self.report.pixels, self.report.reference_index
        total = max(1, sum(pixels.values()))
        words = ", ".join(f"{pixels[name] / total:.1%} {name}" for name in KINDS if name in pixels)
        after = Figure(self.colour(self.image), "result")
        if index is None:
            return html.gallery([after]) + html.paragraph(f"A new image of all dates: {words}.")
        before = Figure(self.colour(self.images[index]), f"{_day(self.stack.sources[index])}, as it was taken")
        return html.comparison(before, after) + html.paragraph(f"{self.report.reference} was cleaned: {words}.")

    def dates(self) -> str:
        """The dates with their masks."""
        figures, rows, grid = [], [], overview_grid(self.stack)
        for index, source in enumerate(self.stack.sources):
            clear = f"{self.report.clear_share[index]:.0%} clear"
            known = source.read_mask(grid.whole, grid=grid) is not None
            rows.append((source.name, _day(source), clear, "given" if known else "the model's own"))
            if index < MOST_DATES:
                hidden = (np.nan_to_num(self.overview.cloud[index]) >= HIDDEN_FROM) & self.overview.valid[index]
                caption, own = _caption(self.stack, self.report, index), index == self.report.reference_index
                figures.append(Figure(self.colour(self.images[index]), caption, own, hidden))
        left_out = len(self.stack.sources) - MOST_DATES
        more = html.paragraph(f"{left_out} more dates are not shown.") if left_out > 0 else ""
        note = "Masks are those of the overview. The date that was cleaned is masked at full size, and more cautiously."
        table = html.table(rows, head=("input", "date", "clear", "mask"))
        return html.gallery(figures) + more + html.paragraph(note) + table

    def uncertainty(self, spread: NDArray[np.float32]) -> str:
        """The map, and its percentiles over the reconstructed pixels of each band."""
        heat = heat_picture(spread.mean(axis=0), full_scale=SPREAD_SCALE)
        text = f"expected standard deviation, mean over bands; black 0, pale yellow {SPREAD_SCALE} or more"
        rows = []
        for band, values in zip(self.stack.bands, spread, strict=True):
            rebuilt = values > 0 if self.codes is None else self.codes[0] == RECONSTRUCTED
            seen = values[np.isfinite(values) & rebuilt]
            cells = [f"{x:.4f}" for x in np.percentile(seen, (50, 90, 99))] if seen.size else ["-"] * 3
            rows.append((band, *cells))
        head = ("reconstructed pixels, reflectance", "median", "90 %", "99 %")
        return html.gallery([Figure(heat, text)]) + html.table(rows, head=head)

    def histograms(self) -> str:
        """The distributions of each band in the result and in the dates, or the date, that it was made of."""
        index = self.report.reference_index
        chosen = slice(None) if index is None else slice(index, index + 1)
        clear = ((np.nan_to_num(self.overview.cloud) < HIDDEN_FROM) & self.overview.valid)[chosen]
        name = f"clear pixels of {'all dates' if index is None else 'the cleaned date'}"
        parts = []
        for number, band in enumerate(self.stack.bands):
            values = {name: self.overview.cloudy[chosen, number][clear], "result": self.image[number].ravel()}
            parts.append(html.histogram(band, values))
        return html.row_of(parts)


def _caption(stack: GeoStack, report: SceneReport, index: int) -> str:
    """Return the day of a date and how much of it is clear, for the cleaned date how much was kept."""
    day = _day(stack.sources[index])
    if index != report.reference_index:
        return f"{day}, {report.clear_share[index]:.0%} clear"
    return f"{day}, {report.pixels.get('observed', 0) / max(1, sum(report.pixels.values())):.0%} kept (cleaned)"


def _provenance(report: SceneReport, codes: NDArray[Any]) -> str:
    caption = "dark blue: observed, unchanged; white: reconstructed; grey: no data"
    total = max(1, sum(report.pixels.values()))
    rows = [(name, f"{number:,}", f"{number / total:.2%}") for name, number in report.pixels.items()]
    return html.gallery([Figure(COLOURS[codes], caption)]) + html.table(rows, head=("pixels", "number", "share"))


def _model(report: SceneReport, remover: CloudRemover) -> dict[str, object]:
    card = {name.replace("_", " "): remover.card[name] for name in CARD if remover.card.get(name)}
    parameters = sum(parameter.numel() for parameter in remover.model.parameters())
    trained = "yes" if remover.card.get("trained", True) else "NO: random weights, the result means nothing"
    return {"name": report.model, "trained": trained, "parameters": f"{parameters / 1e6:.2f} M", **card}


def _files(stack: GeoStack, report: SceneReport) -> str:
    rows: list[tuple[str, object]] = []
    for file in report.files:
        path = Path(file)
        rows.append((path.name, f"{path.stat().st_size:,} bytes, SHA-256 {file_digest(path)}"))
    across, down = stack.grid.resolution
    left, bottom, right, top = stack.grid.bounds
    coding = stack.coding
    rows += [
        ("grid", f"{_crs_name(stack.grid.crs)}, pixels of {across:g} x {down:g}"),
        ("extent", f"{left:.12g}, {bottom:.12g} to {right:.12g}, {top:.12g}"),
        ("values", f"{coding.dtype}, reflectance = DN * {coding.scale:g} + {coding.offset:g}, nodata {coding.nodata}"),
    ]
    return html.table(rows)


def _crs_name(crs: str) -> str:
    if not crs:
        return "no reference system"
    found = crs_of(crs)
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


def small_reflectance(path: str, shape: tuple[int, int], stack: GeoStack) -> NDArray[np.float32]:
    """Return a small version (C, h, w) of a result in reflectance, NaN where there is no data."""
    values, valid = decode_array(_numbers(path, shape), (stack.coding,) * len(stack.bands))
    return np.where(valid, values, np.float32(np.nan))


def _layer(report: SceneReport, name: str, shape: tuple[int, int]) -> NDArray[np.generic] | None:
    """Return a small version (C, h, w) of a layer beside the result; None where it was not written."""
    file = report.layer(name)
    return None if file is None else _numbers(file, shape)


def _numbers(path: str, shape: tuple[int, int]) -> NDArray[np.generic]:
    """Return a small version (C, h, w) of a result, from its overviews."""
    with reading(path), open_raster(path) as dataset:
        numbers: NDArray[np.generic] = dataset.read(out_shape=(dataset.count, *shape))
    return numbers


RED, NIR = "B04", ("B08", "B8A")
COLUMNS = ("point", "date", "input", "before", "ndvi_before", "ndvi_after", "after")

Done = Sequence[tuple[int, SceneReport]]
"""(index of the date, report) of each result."""


def animate(stack: GeoStack, done: Done, path: str) -> Path:
    """Write the dates before and after as a GIF, under one stretch: that of the ground."""
    grid = _small_grid(stack)
    after = [small_reflectance(scene.output, grid.shape, stack.coded_as(date)) for date, scene in done]
    before = [_image(stack, stack.sources[date], grid) for date, _ in done]
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
        found = [_values(stack.coded_as(date), date, scene, place, bands) for date, scene in done]
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
    rebuilt = int(_pixel(scene.layer("provenance") or "", place)[0, 0, 0]) == RECONSTRUCTED
    state = "nodata" if not valid[0, 0] else "hidden" if rebuilt else "clear"
    origin = "nodata" if not there[0, 0] else "reconstructed" if rebuilt else "observed"
    return _ndvi(values, valid), _ndvi(after, there), state, origin


def _small_grid(stack: GeoStack) -> Grid:
    """Return the grid of the stack with pixels so large that no edge is longer than `EDGE`."""
    factor = max(1, -(-max(stack.grid.shape) // EDGE))
    return stack.grid if factor == 1 else stack.grid.coarser(factor)


def _image(stack: GeoStack, source: DateSource, grid: Grid) -> NDArray[np.float32]:
    """Return the reflectance of a date on a grid, NaN where it has no data."""
    values, valid = source.read(grid.whole, bands=stack.bands, grid=grid)
    return np.where(valid, values, np.float32(np.nan))


def _day(source: DateSource) -> str:
    return source.day or source.name


def _vegetation_bands(stack: GeoStack) -> tuple[str, str]:
    nir = next((band for band in NIR if band in stack.bands), None)
    if RED not in stack.bands or nir is None:
        raise BandError(f"NDVI needs {RED} and {' or '.join(NIR)}; the series has {', '.join(stack.bands)}.")
    return RED, nir


def _pixel_at(text: str, stack: GeoStack) -> Window:
    grid = stack.grid
    try:
        x, y = (float(part) for part in text.split(","))
        if grid.crs and not (abs(x) <= 360 and abs(y) <= 90):
            raise ValueError("metres, or latitude before longitude")
    except ValueError as error:
        raise ConfigError(
            f"the point is {text!r}; expected longitude,latitude in degrees, such as 7.71,46.02."
        ) from error
    col, row = x, y
    if grid.crs:
        warp = require("rasterio.warp", extra="geo", purpose="placing a point").transform
        (x,), (y,) = warp(DEGREES, grid.crs, [x], [y])
        col, row = grid.pixel(x, y)
    if not (0 <= col < grid.width and 0 <= row < grid.height):
        box = f"{in_degrees(grid)} (west,south,east,north)" if grid.crs else f"0,0,{grid.width},{grid.height} (pixels)"
        raise ConfigError(f"the point {text} lies outside the scene; expected longitude,latitude within {box}.")
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
