"""Scores of the estimated masks against labels, and calibration of the stated spread against the error.

Labels and truths come from the records and items; nothing is trained or tuned here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sader.data.batch import CLEAR, SHADOW, THICK, UNKNOWN
from sader.data.cloud_rules import estimate_cloud_mask
from sader.data.items import Item, observed
from sader.data.shards import SeriesRecord
from sader.errors import DataError
from sader.inference.remover import CloudRemover
from sader.model.mask_network import HIDDEN_CLASSES


@dataclass(frozen=True)
class MaskScore:
    """Cloud and shadow against clear, over labelled pixels of one place or all."""

    place: str
    iou: float
    recall: float
    precision: float
    rules_iou: float
    """The rule-based mask on the same pixels."""
    pixels: int


def evaluate_masks(
    remover: CloudRemover, records: Iterable[SeriesRecord], *, threshold: float = 0.5
) -> list[MaskScore]:
    """Return the scores of each labelled place, and last those of all pixels together (place "all").

    Dates without any labelled cloud count as well: cloud found there is a false alarm.
    """
    counts: dict[str, np.ndarray] = {}
    for record in records:
        if record.labels is None or not bool(((record.labels >= THICK) & (record.labels <= SHADOW)).any()):
            continue
        bands = [name for name in record.bands if name in remover.bands]
        dn = record.dn[:, [record.bands.index(name) for name in bands]]
        valid = observed(dn, bands)
        images = np.minimum(dn.astype(np.float32) / 10000, 1) * valid[:, None]
        known = valid & (record.labels != UNKNOWN)
        truth = (record.labels != CLEAR) & known
        found = remover.classify(images, bands=bands, valid=valid)[:, list(HIDDEN_CLASSES)].sum(axis=1) >= threshold
        rules = estimate_cloud_mask(images, bands, valid=valid)
        both = [(mask & known, truth) for mask in (found, rules)]
        numbers = [[(mask & true).sum(), mask.sum(), true.sum(), (mask | true).sum()] for mask, true in both]
        counts[record.name] = np.array([*numbers[0], *numbers[1], known.sum()], np.int64)
    if not counts:
        raise DataError("no record has labelled clouds; expected places with labels such as CloudSEN12.")
    counts["all"] = np.sum(list(counts.values()), axis=0)
    return [
        MaskScore(
            place=place,
            iou=_share(c[0], c[3]),
            recall=_share(c[0], c[2]),
            precision=_share(c[0], c[1]),
            rules_iou=_share(c[4], c[7]),
            pixels=int(c[8]),
        )
        for place, c in counts.items()
    ]


@dataclass(frozen=True)
class Calibration:
    """How the stated spread compares with the error; for a Gaussian 0.68 of the errors lie inside one spread."""

    inside_one: float
    inside_two: float
    correlation: float
    """Rank correlation of spread and absolute error over pixels, mean over items."""
    ratio: float
    """Root mean square error / root mean square spread; 1 is calibrated, above 1 overconfident."""
    items: int


class CalibrationSum:
    """Collects spread and error over the scored pixels of many items."""

    def __init__(self) -> None:
        self._inside: list[list[float]] = []
        self._squares: list[list[float]] = []
        self._ranks: list[float] = []

    @property
    def items(self) -> int:
        """The number of items added."""
        return len(self._inside)

    def add(self, item: Item, image: np.ndarray, spread: np.ndarray) -> None:
        """Add an image (C, H, W) with its stated spread (C, H, W)."""
        error = np.abs(image - item.clear)[:, item.scored].mean(0)
        stated = spread[:, item.scored].mean(0)
        self._inside.append([(error <= stated).mean(), (error <= 2 * stated).mean()])
        self._squares.append([np.square(error).mean(), np.square(stated).mean()])
        self._ranks.append(_rank_correlation(stated, error))

    def result(self) -> Calibration:
        """Return the calibration over all added items."""
        if not self._inside:
            raise DataError("no item to calibrate on; expected at least one with a stated spread.")
        one, two = np.mean(self._inside, axis=0)
        wrong, stated = np.sqrt(np.mean(self._squares, axis=0))
        return Calibration(
            inside_one=float(one),
            inside_two=float(two),
            correlation=float(np.nanmean(self._ranks)) if np.isfinite(self._ranks).any() else float("nan"),
            ratio=float(wrong / stated) if stated > 0 else float("inf"),
            items=self.items,
        )


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation (ties broken by position); NaN for constants."""
    if a.std() == 0 or b.std() == 0:
        return float("nan")
    x, y = (np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / np.sqrt(np.square(x).sum() * np.square(y).sum()))


def _share(part: np.integer | int, whole: np.integer | int) -> float:
    return float(part / whole) if whole else float("nan")
