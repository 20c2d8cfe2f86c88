"""`sader remove --report`: gathers what was put in, what came out and how, and lays it out with `sader.figures.html`.

Folders of the sender's machine are not written into the page: it is made to be sent.
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
from sader.figures.picture import Picture, heat_picture, stretch_limits, true_colour
from sader.geo.read.raster import open_raster, reading
from sader.geo.scene.overview import Look, take_look
from sader.geo.scene.preview import COLOURS, SPREAD_SCALE
from sader.geo.scene.rows import RECONSTRUCTED
from sader.geo.stack import GeoStack
from sader.geo.values import decode

if TYPE_CHECKING:
    from sader.geo.scene.run import SceneReport
    from sader.inference.remover import CloudRemover

MOST_DATES = 12
HIDDEN_FROM = 0.5
"""Probability of cloud or shadow from which a pixel is drawn as hidden."""
CARD = ("training_data", "licence", "attribution", "date")


def write_scene_report(
    path: str | Path,
    stack: GeoStack,
    report: SceneReport,
    remover: CloudRemover,
    *,
    settings: Mapping[str, object],
) -> Path:
    """Write the page about a finished scene and return its path.

    stack: with the coding of the output. settings: what was asked for, name -> value; folders are cut off file names.
    Pictures, masks and distributions are those of a look from afar, at most 512 pixels along the longer edge.
    """
    look = take_look(stack, remover)
    result = _reflectance(report.output, look.grid.shape, stack)
    layers = {Path(file).stem.removeprefix(Path(report.output).stem + "_"): file for file in report.files[1:]}
    made: NDArray[np.bool_] | None = None
    if "provenance" in layers:
        codes = _numbers(layers["provenance"], look.grid.shape)[0].astype(int)
        made = codes == RECONSTRUCTED
    spread = _numbers(layers["uncertainty"], look.grid.shape) if "uncertainty" in layers else None

    sections = [
        Section("Result", _result(stack, report, look, result)),
        Section("Dates", _dates(stack, report, look, result)),
    ]
    if made is not None:
        sections.append(Section("Provenance", _provenance(report, codes)))
    if spread is not None:
        sections.append(Section("Uncertainty", _uncertainty(stack, spread.astype(np.float32), made)))
    sections += [
        Section("Distributions", _histograms(stack, report, look, result)),
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


def _result(stack: GeoStack, report: SceneReport, look: Look, result: NDArray[np.float32]) -> str:
    """The cleaned date against the result; without one, the result alone."""
    total = max(1, sum(report.pixels.values()))
    share = {name: f"{number / total:.1%} {name}" for name, number in report.pixels.items()}
    words = ", ".join(share[name] for name in ("observed", "reconstructed", "nodata") if name in share)
    after = Figure(_colour(result, stack, result), "result")
    index = report.reference_index
    if index is None:
        return gallery([after]) + paragraph(f"A new image of all dates: {words}.")
    before = Figure(_colour(_date(look, index), stack, result), f"{_day(stack, index)}, as it was taken")
    return comparison(before, after) + paragraph(f"{report.reference} was cleaned: {words}.")


def _dates(stack: GeoStack, report: SceneReport, look: Look, result: NDArray[np.float32]) -> str:
    figures, rows = [], []
    for index, source in enumerate(stack.sources):
        own = index == report.reference_index
        clear = f"{report.clear_share[index]:.0%} clear"
        known = source.read_mask(look.grid.whole, grid=look.grid) is not None
        rows.append((source.name, _day(stack, index), clear, "given" if known else "the model's own"))
        if index < MOST_DATES:
            caption = f"{_day(stack, index)}, {clear}" + (" (cleaned)" if own else "")
            hidden = (np.nan_to_num(look.cloud[index]) >= HIDDEN_FROM) & look.valid[index]
            figures.append(Figure(_colour(_date(look, index), stack, result), caption, hidden, own))
    left_out = len(stack.sources) - MOST_DATES
    more = paragraph(f"{left_out} more dates are not shown.") if left_out > 0 else ""
    note = "Masks are drawn as the model sees them from afar; the work itself uses them at full size."
    return gallery(figures) + more + paragraph(note) + table(rows, head=("input", "date", "clear", "mask"))


def _provenance(report: SceneReport, codes: NDArray[Any]) -> str:
    picture = COLOURS[np.clip(codes, 0, len(COLOURS) - 1)]
    caption = "dark blue: observed, unchanged; white: reconstructed; grey: no data"
    total = max(1, sum(report.pixels.values()))
    rows = [(name, f"{number:,}", f"{number / total:.2%}") for name, number in report.pixels.items()]
    return gallery([Figure(picture, caption)]) + table(rows, head=("pixels", "number", "share"))


def _uncertainty(stack: GeoStack, spread: NDArray[np.float32], made: NDArray[np.bool_] | None) -> str:
    """The map, and what it says about the reconstructed pixels of each band."""
    heat = heat_picture(spread.mean(axis=0), full_scale=SPREAD_SCALE)
    figure = Figure(heat, f"expected standard deviation, mean over bands; black 0, pale yellow {SPREAD_SCALE} or more")
    rows = []
    for band, values in zip(stack.bands, spread, strict=True):
        seen = values[np.isfinite(values) & (values > 0 if made is None else made)]
        cells = [f"{x:.4f}" for x in np.percentile(seen, (50, 90, 99))] if seen.size else ["-"] * 3
        rows.append((band, *cells))
    head = ("reconstructed pixels, reflectance", "median", "90 %", "99 %")
    return gallery([figure]) + table(rows, head=head)


def _histograms(stack: GeoStack, report: SceneReport, look: Look, result: NDArray[np.float32]) -> str:
    clear = (np.nan_to_num(look.cloud) < HIDDEN_FROM) & look.valid
    index = report.reference_index
    parts = []
    for number, band in enumerate(stack.bands):
        if index is None:
            name, values = "clear pixels of all dates", look.cloudy[:, number][clear]
        else:
            name, values = "clear pixels of the cleaned date", look.cloudy[index, number][clear[index]]
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


def _date(look: Look, index: int) -> NDArray[np.float32]:
    return np.where(look.valid[index], look.cloudy[index], np.float32(np.nan))


def _day(stack: GeoStack, index: int) -> str:
    source = stack.sources[index]
    return f"{source.date:%Y-%m-%d}" if source.date else source.name


def _colour(image: NDArray[np.float32], stack: GeoStack, result: NDArray[np.float32]) -> Picture:
    """One stretch for all pictures: that of the result, which has no clouds."""
    return true_colour(image, bands=stack.bands, limits=stretch_limits([result], bands=stack.bands))


def _reflectance(path: str, shape: tuple[int, int], stack: GeoStack) -> NDArray[np.float32]:
    values, valid = decode(_numbers(path, shape), stack.coding)
    return np.where(valid, values, np.float32(np.nan))


def _numbers(path: str, shape: tuple[int, int]) -> NDArray[np.generic]:
    """Return a small version (C, h, w) of a result, from its overviews."""
    with reading(path), open_raster(path) as dataset:
        numbers: NDArray[np.generic] = dataset.read(out_shape=(dataset.count, *shape))
    return numbers
