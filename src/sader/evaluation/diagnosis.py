"""Scores of the estimated masks against labels, and calibration of the stated spread against the error.

Labels and truths come from the records and items; nothing is trained or tuned here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from sader.data.batch import SHADOW, THICK, THIN, UNKNOWN
from sader.data.cloud_rules import S2CLOUDLESS_BANDS, detect_s2cloudless, estimate_cloud_mask
from sader.data.items import Item
from sader.data.shards import SeriesRecord, observed
from sader.errors import DataError
from sader.inference.remover import CloudRemover
from sader.model.heads import HIDDEN_CLASSES


@dataclass(frozen=True)
class MaskScore:
    """Masks against labels, over the labelled pixels of one place or all."""

    place: str
    method: str
    """"sader-masks", or beside it "rules" and "s2cloudless" (L1C with its ten bands; it looks for no shadows)."""
    iou: float
    """Cloud or shadow; the next two likewise."""
    recall: float
    precision: float
    cloud_iou: float
    """Cloud alone."""
    thick: float
    """Share of the labelled pixels that are found; the next two likewise."""
    thin: float
    shadow: float
    pixels: int


def evaluate_masks(
    remover: CloudRemover, records: Iterable[SeriesRecord], *, threshold: float = 0.5
) -> list[MaskScore]:
    """Return the scores of each labelled place and method, and last those of all pixels together (place "all").

    Dates without any labelled cloud count as well: cloud found there is a false alarm.
    """
    counts: dict[tuple[str, str], np.ndarray] = {}
    for record in records:
        if record.labels is None or not bool(((record.labels >= THICK) & (record.labels <= SHADOW)).any()):
            continue
        for method, (hidden, cloud) in _found_masks(remover, record, threshold).items():
            known = observed(record.dn, record.bands) & (record.labels != UNKNOWN)
            kinds = [(record.labels == kind) & known for kind in (THICK, THIN, SHADOW)]
            numbers = [*_overlap(hidden & known, np.any(kinds, axis=0)), *_overlap(cloud & known, kinds[0] | kinds[1])]
            numbers += [one for kind in kinds for one in ((hidden & kind).sum(), kind.sum())]
            counts[record.name, method] = np.array([*numbers, known.sum()], np.int64)
            before = counts.get(("all", method), 0)
            counts["all", method] = before + counts[record.name, method]
    if not counts:
        raise DataError("no record has labelled clouds; expected places with labels such as CloudSEN12.")
    return [
        MaskScore(
            place=place,
            method=method,
            iou=_share(c[0], c[3]),
            recall=_share(c[0], c[2]),
            precision=_share(c[0], c[1]),
            cloud_iou=_share(c[4], c[7]),
            thick=_share(c[8], c[9]),
            thin=_share(c[10], c[11]),
            shadow=_share(c[12], c[13]),
            pixels=int(c[14]),
        )
        for (place, method), c in sorted(counts.items(), key=lambda pair: pair[0][0] == "all")
    ]


def _found_masks(
    remover: CloudRemover, record: SeriesRecord, threshold: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return by method (cloud or shadow, cloud), each bool (T, H, W)."""

    def reflectance(bands: Sequence[str]) -> np.ndarray:
        dn = record.dn[:, [record.bands.index(name) for name in bands]]
        return np.minimum(dn.astype(np.float32) / 10_000, 1)

    bands = [name for name in record.bands if name in remover.bands]
    valid = observed(record.dn, record.bands)
    images = reflectance(bands) * valid[:, None]
    classes = remover.classify(images, bands=bands, valid=valid)
    hidden, cloud = (classes[:, list(some)].sum(axis=1) >= threshold for some in (HIDDEN_CLASSES, HIDDEN_CLASSES[:2]))
    rules = estimate_cloud_mask(images, bands, valid=valid)
    found = {"sader-masks": (hidden, cloud), "rules": (rules, rules)}
    if set(S2CLOUDLESS_BANDS) <= set(record.bands) and find_spec("s2cloudless"):
        detected = np.stack([detect_s2cloudless(date) for date in reflectance(S2CLOUDLESS_BANDS)])
        found["s2cloudless"] = (detected, detected)
    return found


def _overlap(mask: np.ndarray, true: np.ndarray) -> list[int]:
    return [(mask & true).sum(), mask.sum(), true.sum(), (mask | true).sum()]


@dataclass(frozen=True)
class Calibration:
    """How the stated spread compares with the error; for a Gaussian 0.68 of the errors lie inside one spread."""

    inside_one: float
    inside_two: float
    correlation: float
    """Rank correlation of spread and absolute error over pixels, mean over items."""
    between_items: float
    """Rank correlation of mean spread and mean absolute error over items; NaN for fewer than three."""
    ratio: float
    """Root mean square error / root mean square spread; 1 is calibrated, above 1 overconfident."""
    items: int


class CalibrationSum:
    """Collects spread and error over the scored pixels of many items."""

    def __init__(self) -> None:
        self._items: list[tuple[float, ...]] = []

    @property
    def items(self) -> int:
        """The number of items added."""
        return len(self._items)

    def add(self, item: Item, image: np.ndarray, spread: np.ndarray) -> None:
        """Add an image (C, H, W) with its stated spread (C, H, W)."""
        error = np.abs(image - item.clear)[:, item.scored].mean(0)
        stated = spread[:, item.scored].mean(0)
        inside = (error <= stated).mean(), (error <= 2 * stated).mean()
        squares = np.square(error).mean(), np.square(stated).mean()
        self._items.append((*inside, *squares, _rank_correlation(stated, error), stated.mean(), error.mean()))

    def result(self) -> Calibration:
        """Return the calibration over all added items."""
        if not self._items:
            raise DataError("no item to calibrate on; expected at least one with a stated spread.")
        one, two = np.mean([each[:2] for each in self._items], axis=0)
        wrong, stated = np.sqrt(np.mean([each[2:4] for each in self._items], axis=0))
        ranks, spreads, errors = np.array([each[4:] for each in self._items]).T
        return Calibration(
            inside_one=float(one),
            inside_two=float(two),
            correlation=float(np.nanmean(ranks)) if np.isfinite(ranks).any() else float("nan"),
            between_items=_rank_correlation(spreads, errors) if self.items > 2 else float("nan"),
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
