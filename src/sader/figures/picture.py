"""Pictures of arrays: true colour under one shared stretch, masks, error maps, captioned panels in one PNG.

Of a series of dates also an animation, and curves over time. Needs NumPy and Pillow only.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from sader.bands import rgb_indices
from sader.errors import ShapeError, ValueRangeError
from sader.files import write_atomically

Picture = NDArray[np.uint8]
"""(H, W, 3), ready for the screen."""

PERCENTILES = (1.0, 99.0)
"""Shares of all values together that are shown as black and as white."""
NODATA_GREY = 128
BACKGROUND = (255, 255, 255)
INK = (34, 34, 34)
ACCENT = (214, 72, 36)
# Lightness rises in even steps: readable in greyscale and with colour blindness.
_HEAT = np.array([(0, 0, 4), (66, 10, 104), (147, 38, 103), (221, 81, 58), (252, 165, 10), (252, 255, 164)], np.float32)


@dataclass(frozen=True)
class Panel:
    """One picture of a figure."""

    picture: Picture
    """(H, W, 3)"""
    caption: str
    """One line above the picture, cut where it would run into the next panel."""
    marked: bool = False
    """Draw a coloured frame: the date to clean."""


def _colour_bands(image: NDArray[np.floating], bands: Sequence[str] | None) -> NDArray[np.float32]:
    """Return red, green, blue (3, H, W) by name; without names the first three bands, or the first as grey."""
    if image.ndim != 3 or 0 in image.shape:
        raise ShapeError(f"image has shape {image.shape}; expected (C, H, W) with at least one band and pixel.")
    if bands is not None and len(bands) != image.shape[0]:
        raise ShapeError(
            f"image has {image.shape[0]} bands but {len(bands)} names {tuple(bands)}; give one name per band."
        )
    unnamed = (0, 1, 2) if image.shape[0] >= 3 else (0, 0, 0)
    chosen = unnamed if bands is None else rgb_indices(bands)
    return np.asarray(image, np.float32)[list(chosen)]


def stretch_limits(
    images: Sequence[NDArray[np.floating]], *, bands: Sequence[str] | None = None
) -> tuple[float, float]:
    """Return the reflectances (low, high) shown as black and white, shared by all panels of a figure.

    One pair for the three colours keeps the hue; one pair for all panels keeps brightness comparable. Use images
    without clouds: clouds would take most of the range and leave the ground dark.

    images: (C, H, W) each; NaN is ignored.
    """
    if not images:
        raise ShapeError("no image given; stretch_limits needs at least one (C, H, W) array.")
    values = np.concatenate([_colour_bands(image, bands).ravel() for image in images])
    values = values[np.isfinite(values)]
    if values.size == 0:
        raise ValueRangeError("the images hold no finite value; give at least one with valid pixels.")
    low, high = (float(value) for value in np.percentile(values, PERCENTILES))
    return low, max(high, low + 1e-4)  # avoids a division by zero for a constant image


def clear_limits(
    results: Sequence[NDArray[np.floating]],
    dates: Sequence[NDArray[np.floating]],
    *,
    bands: Sequence[str] | None = None,
) -> tuple[float, float]:
    """Return the limits of cloud-free results and of the ground in dates: their pixels no brighter than the results.

    A date that is darker than the result (low sun, shadow) is then dark in its picture, but not black.
    """
    _, high = stretch_limits(results, bands=bands)
    ground = []
    for date in dates:
        with np.errstate(invalid="ignore"):
            seen = (_colour_bands(date, bands) <= high).all(axis=0)
        ground.append(np.where(seen, date, np.float32(np.nan)))
    return stretch_limits([*results, *ground], bands=bands)


def true_colour(
    image: NDArray[np.floating], *, bands: Sequence[str] | None = None, limits: tuple[float, float] | None = None
) -> Picture:
    """Return the image (C, H, W) as a picture; NaN becomes grey. Without `limits` the image's own are used."""
    low, high = limits or stretch_limits([image], bands=bands)
    colours = _colour_bands(image, bands)
    with np.errstate(invalid="ignore"):
        shown = np.rint(np.clip((colours - low) / (high - low), 0, 1) * 255)
    shown = np.where(np.isfinite(colours).all(axis=0), shown, NODATA_GREY)
    return np.ascontiguousarray(np.moveaxis(shown.astype(np.uint8), 0, -1))


def mask_picture(mask: NDArray[np.bool_]) -> Picture:
    """Return a mask (H, W) as a picture: True is white, False a dark blue."""
    return np.where(mask[..., None], np.uint8(245), np.array([28, 46, 84], np.uint8))


def error_picture(
    image: NDArray[np.floating],
    truth: NDArray[np.floating],
    *,
    bands: Sequence[str] | None = None,
    full_scale: float = 0.05,
) -> Picture:
    """Return the absolute error, averaged over the three colours, as a heat map: black 0, pale yellow `full_scale`.

    full_scale: reflectance, 0.02 to 0.3.
    """
    if image.shape != truth.shape:
        raise ShapeError(f"image has shape {image.shape}, truth {truth.shape}; they must be equal.")
    error = np.abs(_colour_bands(image, bands) - _colour_bands(truth, bands)).mean(axis=0)
    return heat_picture(error, full_scale=full_scale)


def heat_picture(values: NDArray[np.floating], *, full_scale: float) -> Picture:
    """Return values (H, W) from 0 on as a heat map: black 0, pale yellow `full_scale`, grey where not finite."""
    heat = np.rint(ramp_colours(np.nan_to_num(values) / full_scale, _HEAT))
    return np.where(np.isfinite(values)[..., None], heat, NODATA_GREY).astype(np.uint8)


def ramp_colours(share: NDArray[np.floating], ramp: NDArray[np.float32]) -> NDArray[np.floating]:
    """Return colours (..., 3) along a ramp (n, 3); share 0 is its start, 1 its end."""
    position = np.clip(np.nan_to_num(share), 0, 1) * (len(ramp) - 1)
    lower = np.minimum(position.astype(int), len(ramp) - 2)
    part = (position - lower)[..., None]
    return ramp[lower] * (1 - part) + ramp[lower + 1] * part


def compose(
    rows: Sequence[Sequence[Panel]], *, title: str | None = None, note: str | None = None, panel_width: int = 320
) -> Image.Image:
    """Return one image of captioned panels, row by row; all panels are `panel_width` pixels wide.

    note: a line under the panels.
    """
    if not rows or not all(rows):
        raise ShapeError("a figure needs at least one panel in each row.")
    gap, line = 10, 22
    heights = [max(round(panel_width * p.picture.shape[0] / p.picture.shape[1]) for p in row) for row in rows]
    width = gap + max(len(row) for row in rows) * (panel_width + gap)
    height = gap + sum(line + h + gap for h in heights) + (line + gap) * bool(title) + line * bool(note)
    canvas = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    caption_font, title_font = ImageFont.load_default(13), ImageFont.load_default(18)
    y = gap
    if title:
        draw.text((gap, y), _fit(title, title_font, width - 2 * gap), fill=INK, font=title_font)
        y += line + gap
    for row, row_height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            x = gap + column * (panel_width + gap)
            colour = ACCENT if panel.marked else INK
            draw.text((x, y), _fit(panel.caption, caption_font, panel_width), fill=colour, font=caption_font)
            tall = round(panel_width * panel.picture.shape[0] / panel.picture.shape[1])
            # Enlarging repeats pixels; only shrinking averages.
            way = Image.Resampling.NEAREST if panel_width >= panel.picture.shape[1] else Image.Resampling.BOX
            canvas.paste(Image.fromarray(panel.picture).resize((panel_width, tall), way), (x, y + line))
            if panel.marked:
                draw.rectangle((x - 2, y + line - 2, x + panel_width + 1, y + line + tall + 1), outline=ACCENT, width=2)
        y += line + row_height + gap
    if note:
        draw.text((gap, y - gap // 2), _fit(note, caption_font, width - 2 * gap), fill=ACCENT, font=caption_font)
    return canvas


def _fit(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """Return `text`, cut with "..." where it is wider than `width` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."


def before_after(
    cloudy: NDArray[np.floating],
    result: NDArray[np.floating],
    *,
    bands: Sequence[str] | None = None,
    truth: NDArray[np.floating] | None = None,
    cloud_mask: NDArray[np.bool_] | None = None,
    reference: int | None = None,
    days: Sequence[float] | None = None,
    baselines: Sequence[tuple[str, NDArray[np.floating]]] = (),
    spread: NDArray[np.floating] | None = None,
    title: str | None = None,
    note: str | None = None,
) -> Image.Image:
    """Return the figure: the dates (and the reference's mask) above; the result, its baselines, truth and error below.

    cloudy (T, C, H, W); result and truth (C, H, W); cloud_mask (T, H, W), True = cloud or shadow; baselines are
    (caption, image) pairs; spread (C, H, W) is the expected error. The reference date is framed.
    """
    if cloudy.ndim != 4 or cloudy.shape[1:] != result.shape:
        raise ShapeError(
            f"cloudy has shape {cloudy.shape}, result {result.shape}; expected (T, C, H, W) and (C, H, W) of one size."
        )
    limits = stretch_limits([result if truth is None else truth], bands=bands)

    def shown(image: NDArray[np.floating]) -> Picture:
        return true_colour(image, bands=bands, limits=limits)

    above = []
    for date, image in enumerate(cloudy):
        caption = f"date {date + 1}" if days is None else f"day {days[date]:.0f}"
        if cloud_mask is not None:
            caption += f", {cloud_mask[date].mean():.0%} hidden"
        caption += " (to be cleaned)" if date == reference else ""
        above.append(Panel(shown(image), caption, marked=date == reference))
    if cloud_mask is not None and reference is not None:
        above.append(Panel(mask_picture(cloud_mask[reference]), "its cloud and shadow (white)"))
    below = [Panel(shown(result), "result")]
    below += [Panel(shown(image), caption) for caption, image in baselines]
    if truth is not None:
        below.append(Panel(shown(truth), "truth"))
        below.append(Panel(error_picture(result, truth, bands=bands), "error of the result (yellow: 0.05)"))
    if spread is not None:
        below.append(Panel(heat_picture(spread.mean(axis=0), full_scale=0.05), "expected error (yellow: 0.05)"))
    return compose([above, below], title=title, note=note)


def save_png(image: Image.Image, path: Path | str) -> Path:
    """Write the figure as PNG and return its path."""
    target = Path(path)
    write_atomically(target, png(image))
    return target


def png(image: Image.Image | NDArray[np.uint8], **options: object) -> bytes:
    """Return the content of a PNG file; arrays are (H, W, 3 or 4), options those of Pillow's writer."""
    content = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(content, format="PNG", **({"optimize": True} | options))
    return content.getvalue()


GREEN, RULE = (46, 125, 50), (225, 225, 225)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 300, 60, 20, 34, 34
"""Size of a chart and its margins in pixels."""
MARKS: dict[str, tuple[int, tuple[int, int, int], tuple[int, int, int] | None]] = {
    "observed": (4, GREEN, GREEN),
    "reconstructed": (4, GREEN, BACKGROUND),
    "cloud or shadow, before": (5, ACCENT, None),
}
"""Legend of a chart: radius, outline, fill."""


@dataclass(frozen=True)
class Curve:
    """One value over time, before and after; NaN where there is none."""

    title: str
    times: Sequence[datetime]
    before: Sequence[float]
    after: Sequence[float]
    hidden: Sequence[bool]
    """Whether the value before is one of cloud or shadow."""


def save_gif(frames: Sequence[Image.Image], path: Path | str, *, milliseconds: int = 900) -> Path:
    """Write frames of one size as an endless animation and return its path."""
    if not frames:
        raise ShapeError("an animation needs at least one frame.")
    # One palette for all frames: colours of the ground do not flicker.
    strip = Image.fromarray(np.concatenate([np.asarray(frame)[::4, ::4] for frame in frames]))
    palette = strip.quantize(256, method=Image.Quantize.MEDIANCUT)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    content = io.BytesIO()
    small[0].save(content, format="GIF", save_all=True, append_images=small[1:], duration=milliseconds, loop=0)
    write_atomically(Path(path), content.getvalue())
    return Path(path)


def draw_curves(curves: Sequence[Curve], *, label: str) -> Image.Image:
    """Return charts below each other: the values after as a line, and the values of clouds before as red rings."""
    if not curves:
        raise ShapeError("a chart needs at least one curve.")
    canvas = Image.new("RGB", (WIDTH, HEIGHT * len(curves)), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for number, curve in enumerate(curves):
        _draw(draw, curve, HEIGHT * number, label)
    return canvas


def _draw(draw: ImageDraw.ImageDraw, curve: Curve, top: int, label: str) -> None:
    font, title = ImageFont.load_default(13), ImageFont.load_default(15)
    values = np.array([*curve.before, *curve.after], np.float64)
    values = values[np.isfinite(values)]
    low, high = (min(0.0, values.min()), max(0.1, values.max())) if values.size else (0.0, 1.0)
    step = next(step for step in (0.02, 0.05, 0.1, 0.2, 0.5, np.inf) if (high - low) / step < 6)
    ticks = step * np.arange(np.floor(low / step), np.ceil(high / step) + 1) if np.isfinite(step) else (low, high)
    low, high = ticks[0], ticks[-1]
    first = min(curve.times)
    span = max((max(curve.times) - first).total_seconds(), 86400.0)

    def place(time: datetime, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (time - first).total_seconds() / span
        return x, top + TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    def mark(x: float, y: float, kind: str) -> None:
        radius, outline, fill = MARKS[kind]
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=outline, fill=fill, width=2)

    draw.text((LEFT, top + 8), f"{label} at {curve.title}", fill=INK, font=title)
    for at, kind in zip((410, 310, 180), MARKS, strict=True):
        mark(WIDTH - at, top + 17, kind)
        draw.text((WIDTH - at + 11, top + 9), kind, fill=INK, font=font)
    for value in ticks:
        _, y = place(first, float(value))
        draw.line((LEFT, y, WIDTH - RIGHT, y), fill=RULE)
        draw.text((12, y - 8), f"{value:.2f}", fill=INK, font=font)
    for time in _ticks_of_time(curve.times):
        x, y = place(time, low)
        draw.line((x, y, x, y + 5), fill=INK)
        draw.text((x, y + 8), f"{time:%Y-%m-%d}", fill=INK, font=font, anchor="ma" if x < WIDTH - 60 else "ra")
    order = sorted(range(len(curve.times)), key=lambda at: curve.times[at])
    line = [(at, *place(curve.times[at], curve.after[at])) for at in order if np.isfinite(curve.after[at])]
    draw.line([(x, y) for _, x, y in line], fill=GREEN, width=2)
    for at in order:
        if curve.hidden[at] and np.isfinite(curve.before[at]):
            mark(*place(curve.times[at], curve.before[at]), "cloud or shadow, before")
    for at, x, y in line:
        observed = np.isfinite(curve.before[at]) and not curve.hidden[at]
        mark(x, y, "observed" if observed else "reconstructed")


def _ticks_of_time(times: Sequence[datetime]) -> list[datetime]:
    """Return the first days of up to eight months, evenly spaced, or the first and last time of a short period."""
    first, last = min(times), max(times)
    months = range(12 * first.year + first.month, 12 * last.year + last.month)
    step = next((step for step in (1, 2, 3, 6, 12) if len(months) <= 8 * step), 12 * (len(months) // 96 + 1))
    starts = [datetime(month // 12, month % 12 + 1, 1) for month in months if month % step == 0]
    return starts if len(starts) > 1 else [first, last]
