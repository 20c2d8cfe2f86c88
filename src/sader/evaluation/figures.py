"""Figures: qualitative examples, quality against parameters and cost, pixel weights of the loss.

The qualitative figure shows for each example its dates, the result of every method, the target and the errors. The
trade-off figure marks the Pareto front. All are drawn with Pillow, imported inside the functions: training machines
may lack it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sader.data.items import Item
from sader.errors import DataError

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

    from sader.figures.picture import Panel

LARGEST = 512
"""Edge of an example in pixels; larger ones are cropped, since the figure would shrink them anyway."""


@dataclass(frozen=True)
class Example:
    """One item of the qualitative figure; arrays are cropped to `LARGEST` pixels."""

    name: str
    bands: tuple[str, ...]
    cloudy: np.ndarray
    """(T, C, H, W), NaN where not observed."""
    target: np.ndarray
    """(C, H, W), NaN where the truth is not known."""
    reference: int | None


def choose_examples(items: Sequence[Item], count: int) -> list[int]:
    """Return the indexes of `count` items spread over the whole list, the same for every method and machine."""
    if count <= 0 or not items:
        return []
    total = len(items)
    return sorted({round((k + 0.5) * total / min(count, total) - 0.5) for k in range(min(count, total))})


def example_of(item: Item) -> Example:
    """Return the item as an example of the figure."""
    known = item.scored | item.kept
    return Example(
        name=item.name,
        bands=item.bands,
        cloudy=cropped(np.where(item.valid[:, None], item.cloudy, np.nan)),
        target=cropped(np.where(known, item.clear, np.nan)),
        reference=item.reference,
    )


def cropped(image: np.ndarray) -> np.ndarray:
    """Return the corner of at most `LARGEST` pixels of (..., H, W) as float16."""
    return np.ascontiguousarray(image[..., :LARGEST, :LARGEST].astype(np.float16))


def draw_gallery(
    examples: Sequence[Example],
    predictions: Mapping[str, Sequence[np.ndarray]],
    *,
    title: str,
    scores: Mapping[tuple[str, str], float] | None = None,
    panel_width: int = 176,
    full_scale: float = 0.05,
) -> Image.Image:
    """Return the figure: for each example a row of dates and target, a row of results, and a row of their errors.

    predictions: method -> its images (C, H, W), one per example; scores: (item, method) -> PSNR for the captions.
    """
    from sader.figures.picture import Panel, compose, error_picture, stretch_limits, true_colour

    rows: list[list[Panel]] = []
    for number, example in enumerate(examples):
        bands, target = example.bands, example.target.astype(np.float32)
        limits = stretch_limits([target], bands=bands)

        def shown(image: np.ndarray, bands: Sequence[str] = bands, limits: tuple[float, float] = limits) -> np.ndarray:
            return true_colour(image.astype(np.float32), bands=bands, limits=limits)

        dates = [
            Panel(shown(image), f"date {date + 1}", marked=date == example.reference)
            for date, image in enumerate(example.cloudy)
        ]
        rows.append([*dates, Panel(shown(target), f"target ({example.name})")])
        results, errors = [], []
        for method, images in predictions.items():
            value = (scores or {}).get((example.name, method))
            caption = method if value is None else f"{method} {value:.2f}"
            results.append(Panel(shown(images[number]), caption))
            error = error_picture(images[number].astype(np.float32), target, bands=bands, full_scale=full_scale)
            errors.append(Panel(error, f"error of {method}"))
        # Long lists of methods are wrapped, with the results above their errors.
        each = -(-len(results) // max(-(-len(results) // 10), 1))
        for start in range(0, len(results), max(each, 1)):
            rows += [results[start : start + each], errors[start : start + each]]
    note = f"Errors: black 0, pale yellow {full_scale:g} reflectance; grey: no data. Numbers: PSNR in dB."
    return compose(rows, title=title, note=note, panel_width=panel_width)


def draw_loss_masks(items: Sequence[Item], *, title: str) -> Image.Image:
    """Return the figure of the cloud-aware loss: for each item its dates and target, thickness A, M_A and M_U."""
    import torch

    from sader.figures.picture import Panel, compose, heat_picture, mask_picture, stretch_limits, true_colour
    from sader.method.losses import CloudAwareLoss, cloud_thickness
    from sader.model.blocks import to_model_range

    rows: list[list[Panel]] = []
    for item in items:
        limits = stretch_limits([item.clear], bands=item.bands)
        images = [(f"date {k + 1}", image) for k, image in enumerate(item.cloudy)] + [(item.name, item.clear)]
        rows.append([Panel(true_colour(image, bands=item.bands, limits=limits), name) for name, image in images])
        cloudy, clear = (to_model_range(torch.from_numpy(x))[None].float() for x in (item.cloudy, item.clear))
        cloud, free = CloudAwareLoss().pixel_weights(cloudy, clear)
        panels = [("thickness A", cloud_thickness(cloudy, clear)), ("cloud weight M_A", cloud)]
        maps = [Panel(heat_picture(value[0, 0].numpy(), full_scale=1.0), name) for name, value in panels]
        rows.append([*maps, Panel(mask_picture(free[0, 0].bool().numpy()), "cloud-free pixels M_U")])
    return compose(rows, title=title, note="Black 0, pale yellow 1; white: M_U = 1.", panel_width=176)


FRONT = (118, 66, 168)
_COLOURS = (
    (31, 105, 176), (214, 72, 36), (52, 140, 82), (160, 110, 30), (120, 90, 180), (200, 80, 140), (90, 90, 90),
    (20, 150, 160), (150, 150, 30), (90, 50, 30),
)  # fmt: skip
_GREY = (205, 205, 205)
_PALE = (165, 150, 180)
Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels."""


@dataclass(frozen=True)
class Point:
    """One method in the figure."""

    name: str
    quality: float
    """Higher is better."""
    parameters: float
    """Millions; 0 for a method without any."""
    gmacs: float
    """Of one whole image (of one forward where published); the size of the mark is its logarithm."""
    published: bool = False
    """Taken from the paper and not measured: drawn hollow."""


def pareto_front(points: Sequence[Point], *, cost: str = "parameters") -> list[Point]:
    """Return the points that no other beats in quality at the same or a lower cost, cheapest first.

    cost: "parameters" or "gmacs". Of equal points the first is kept.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (getattr(p, cost), -p.quality)):
        if math.isfinite(point.quality) and (not front or point.quality > front[-1].quality):
            front.append(point)
    return front


def draw_pareto(
    points: Sequence[Point], *, title: str, quality: str = "PSNR dB", size: tuple[int, int] = (680, 500)
) -> Image.Image:
    """Return the figure: left quality over parameters, right quality over GMACs of a sample (both logarithmic)."""
    from PIL import Image, ImageDraw, ImageFont

    from sader.figures.picture import BACKGROUND, INK

    shown = sorted((p for p in points if math.isfinite(p.quality)), key=lambda point: -point.quality)
    if not shown:
        raise DataError("no method has a finite quality to draw; expected at least one scored method.")
    width, height = size
    figure = Image.new("RGB", (2 * width, height), BACKGROUND)
    draw = ImageDraw.Draw(figure)
    draw.text((12, 8), title, fill=INK, font=ImageFont.load_default(18))
    colours = {point.name: _COLOURS[k % len(_COLOURS)] for k, point in enumerate(shown)}
    for left, cost, label in ((0, "parameters", "parameters, millions"), (width, "gmacs", "GMAC per sample")):
        _plot(draw, shown, colours, (left + 62, 46, left + width - 20, height - 10), cost, label, quality)
    return figure


def _plot(
    draw: ImageDraw.ImageDraw,
    points: Sequence[Point],
    colours: dict[str, tuple[int, int, int]],
    box: tuple[int, int, int, int],
    cost: str,
    label: str,
    quality: str,
) -> None:
    from PIL import ImageFont

    from sader.figures.picture import INK

    left, top, right, bottom = box
    small = ImageFont.load_default(12)
    costs = [max(getattr(p, cost), 0.0) for p in points]
    positive = [c for c in costs if c > 0] or [1.0]
    # Methods without a network are drawn at the left edge: the axis is logarithmic.
    low, high = math.log10(min(positive)) - 0.5, math.log10(max(positive)) + 0.2
    values = [p.quality for p in points]
    span = max(max(values) - min(values), 0.5)
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, span) if s >= span / 5)
    bottom_value = step * math.floor((min(values) - 0.05 * span) / step)
    top_value = step * math.ceil((max(values) + 0.05 * span) / step)

    def place(point: Point) -> tuple[float, float]:
        value = max(getattr(point, cost), 0.0)
        x = left + 12 if value <= 0 else left + (math.log10(value) - low) / (high - low) * (right - left)
        y = bottom - 34 - (point.quality - bottom_value) / (top_value - bottom_value) * (bottom - 34 - top)
        return x, y

    draw.rectangle((left, top, right, bottom - 34), outline=INK)
    for tick in _ticks(low, high):
        x = left + (math.log10(tick) - low) / (high - low) * (right - left)
        draw.line((x, top, x, bottom - 34), fill=_GREY)
        draw.text((x, bottom - 32), f"{tick:g}", fill=INK, font=small, anchor="ma")
    for value in np.arange(bottom_value, top_value + step / 2, step):
        y = bottom - 34 - (value - bottom_value) / (top_value - bottom_value) * (bottom - 34 - top)
        draw.line((left, y, right, y), fill=_GREY)
        draw.text((left - 34, y - 7), f"{value:.3g}", fill=INK, font=small)
    hollow = cost == "gmacs" and any(point.published for point in points)
    note = "left edge: none" + ("; hollow: of one forward, published" if hollow else "")
    draw.text((left, bottom - 16), f"{label} ({note})", fill=INK, font=small)
    draw.text((left + 4, top + 2), quality, fill=INK, font=small)
    marks = [(*place(point), 4 + 1.5 * math.log10(1 + max(point.gmacs, 0.0))) for point in points]
    taken = [(x - r, y - r, x + r, y + r) for x, y, r in marks]
    taken.append((left, top, left + 8 + small.getlength(quality), top + 18))
    # Two fronts: measured and published systems were trained and counted in different ways.
    for published, ink in ((True, _PALE), (False, FRONT)):
        group = [point for point in points if point.published == published]
        corners = [place(point) for point in pareto_front(group, cost=cost)]
        for start, end in pairwise(corners):
            _dashes(draw, start, end, ink)
            taken += [(x, y, x + 2, y + 2) for x, y in np.linspace(start, end, 60)]
    names = [f"{point.name}{' (published)' if point.published else ''}" for point in points]
    labels = label_boxes(marks, [small.getlength(name) for name in names], (left, top, right, bottom - 34), taken)
    for (x, y, r), at in zip(marks, labels, strict=True):
        ends = (x - r, at[2] + 2) if at[2] < x else (x + r, at[0] - 2)
        draw.line((ends[0], y, ends[1], (at[1] + at[3]) / 2), fill=(150, 150, 150))
    for point, (x, y, radius) in zip(points, marks, strict=True):
        colour = colours[point.name]
        fill = None if point.published else colour
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill, outline=colour, width=2)
    for name, corner in zip(names, labels, strict=True):
        draw.text(corner[:2], name, fill=INK, font=small)


def label_boxes(
    marks: Sequence[tuple[float, float, float]], widths: Sequence[float], frame: Box, taken: Sequence[Box]
) -> list[Box]:
    """Return the box of each mark's label: beside the mark, moved up or down where it would overlap.

    marks: centre and radius of each; taken: boxes that labels should not cover, besides each other.
    """
    high, boxes = 14, list[Box]()
    for (x, y, r), wide in zip(marks, widths, strict=True):
        lefts = (x + r + 4, x - r - 4 - wide, x + r + 24, x - r - 24 - wide)
        shifts = [shift * sign for shift in range(0, 160, 4) for sign in (1, -1)]
        around = [(left, y + by - high / 2, left + wide, y + by + high / 2) for by in shifts for left in lefts]
        covered = _shared(around, [*taken, *boxes]).sum(axis=1) - _shared(around, [frame])[:, 0]
        boxes.append(around[int(np.argmin(covered + np.repeat(np.abs(shifts), len(lefts))))])
    return boxes


def _shared(some: Sequence[Box], others: Sequence[Box]) -> np.ndarray:
    """Return the area (n, m) that each of n boxes has in common with each of m others."""
    one, other = np.asarray(some)[:, None], np.asarray(others)
    return np.prod(np.clip(np.minimum(one, other)[..., 2:] - np.maximum(one, other)[..., :2], 0, None), axis=-1)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between 10^low and 10^high: powers of ten, with 2 and 5 times them on a short axis."""
    factors = (1,) if high - low > 2.5 else (1, 2, 5)
    numbers = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in factors]
    return [number for number in numbers if low <= math.log10(number) <= high]


def _dashes(
    draw: ImageDraw.ImageDraw, start: tuple[float, float], end: tuple[float, float], ink: tuple[int, int, int]
) -> None:
    length = max(math.dist(start, end), 1e-6)
    for k in range(0, int(length), 10):
        a, b = k / length, min(k + 6, length) / length
        points = [tuple(s + (e - s) * t for s, e in zip(start, end, strict=True)) for t in (a, b)]
        draw.line([points[0][0], points[0][1], points[1][0], points[1][1]], fill=ink, width=2)
