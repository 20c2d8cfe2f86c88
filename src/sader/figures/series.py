"""Pictures of a series of dates: an animation, and curves over time. Needs NumPy and Pillow only."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sader.errors import ShapeError
from sader.figures.picture import ACCENT, BACKGROUND, INK
from sader.files import write_atomically

GREY, GREEN = (150, 150, 150), (46, 125, 50)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 300, 60, 20, 34, 34
"""Size of a chart and its margins in pixels."""


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
    """Return charts below each other: the values after as a line, those before as dots, hidden ones as rings."""
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
    days = np.array([(time - min(curve.times)).total_seconds() / 86400 for time in curve.times])
    span = max(float(days.max()), 1.0)

    def place(day: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * day / span
        return x, top + TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    draw.text((LEFT, top + 8), f"{label} at {curve.title}", fill=INK, font=title)
    draw.text((WIDTH - 330, top + 10), "line: after; dots: before; rings: hidden before", fill=INK, font=font)
    for value in np.linspace(low, high, 5):
        _, y = place(0, float(value))
        draw.line((LEFT, y, WIDTH - RIGHT, y), fill=(225, 225, 225))
        draw.text((12, y - 8), f"{value:.2f}", fill=INK, font=font)
    first, last = min(curve.times), max(curve.times)
    draw.text((LEFT, top + HEIGHT - 24), f"{first:%Y-%m-%d}", fill=INK, font=font)
    draw.text((WIDTH - RIGHT - 75, top + HEIGHT - 24), f"{last:%Y-%m-%d}", fill=INK, font=font)
    order = np.argsort(days, kind="stable")
    line = [place(days[at], curve.after[at]) for at in order if np.isfinite(curve.after[at])]
    if len(line) > 1:
        draw.line(line, fill=GREEN, width=2)
    for x, y in line:
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=GREEN)
    for at in order:
        if np.isfinite(curve.before[at]):
            x, y = place(days[at], curve.before[at])
            ring = (x - 5, y - 5, x + 5, y + 5)
            draw.ellipse(ring, outline=ACCENT if curve.hidden[at] else GREY, width=2)
            if not curve.hidden[at]:
                draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=GREY)
