"""The qualitative figure: for each example its dates, what every method made of it, the target, and the errors.

The paper's visual comparison. Predictions are kept (float16, a few examples) so that rows scored in other processes can
be drawn side by side later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sader.data.items import Item

if TYPE_CHECKING:
    from PIL import Image

    from sader.figures.picture import Panel

LARGEST = 512
"""Pixels a side of an example; larger ones are cut, since a figure would shrink them anyway."""


@dataclass(frozen=True)
class Example:
    """One item as it is shown; arrays are cut to `LARGEST` pixels."""

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
    """Return the item for a figure."""
    known = item.scored | item.kept
    return Example(
        name=item.name,
        bands=item.bands,
        cloudy=cut(np.where(item.valid[:, None], item.cloudy, np.nan)),
        target=cut(np.where(known, item.clear, np.nan)),
        reference=item.reference,
    )


def cut(image: np.ndarray) -> np.ndarray:
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
        # Long lists of methods are folded, results above their errors.
        each = -(-len(results) // max(-(-len(results) // 10), 1))
        for start in range(0, len(results), max(each, 1)):
            rows += [results[start : start + each], errors[start : start + each]]
    note = f"Errors: black 0, pale yellow {full_scale:g} reflectance; grey: not known. Numbers: PSNR dB."
    return compose(rows, title=title, note=note, panel_width=panel_width)
