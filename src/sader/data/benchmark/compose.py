"""One benchmark item from a place: a window, the target date, three input dates and their clouds.

Inputs are real dates of the place. Where it has fewer than three besides the target, the missing ones are pseudo-dates
of another mostly clear date, or of the target where there is none. An input without clouds of its own gets pasted or
simulated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sader.data.batch import CLEAR, SHADOW, THICK, UNKNOWN
from sader.data.benchmark.exact import Draw, paste_clouds, pseudo_date, simulate_clouds, whole_counts
from sader.data.shards import SeriesRecord

DATES = 3
STEP = 4
"""Counts between stored values; the sources themselves were compressed with an error of up to 6 counts."""
STRIDE = 16
"""Distance of the corners of possible windows in pixels."""
SMALLEST = 64
"""Shortest side of an item in pixels."""
TARGET_CLEAR = 0.95
"""Smallest clear share of the target in the window."""
OBSERVED = 0.9
"""Smallest observed share of an input in the window."""
OWN_CLOUDS = 0.05
"""An input with a smaller share of clouds gets pasted or simulated ones."""
BASE_CLEAR = 0.5
"""Smallest clear share of a date from which pseudo-dates are derived."""
RECOVERABLE = 0.5
"""Paper's task: smallest share of the scored pixels that some input shows clear."""
LEAST_HIDDEN = 0.05
"""Clean-this-date: smallest share of the window that is scored."""
NEAREST = 8
"""Inputs are drawn from so many dates nearest in time, where days are known."""
CLOUDY_FIRST = 0.6
"""Probability that dates with clouds of their own are preferred as inputs."""
TRIES = 12


@dataclass(frozen=True, eq=False)
class Place:
    """A place with the cloudy windows of other places of the same part."""

    record: SeriesRecord
    donors: Sequence[Place] = ()
    """Labelled places whose clouds may be pasted; the place itself is not used."""
    _windows: dict[tuple[int, int], list[tuple[Place, int, int, int]]] = field(default_factory=dict)

    @cached_property
    def labels(self) -> np.ndarray:
        """Uint8 (T, H, W); UNKNOWN also where nothing was observed."""
        given = self.record.labels
        labels = np.full(self.record.dn[:, 0].shape, UNKNOWN, np.uint8) if given is None else given
        return np.where((self.record.dn > 0).all(1), labels, UNKNOWN)

    @cached_property
    def seen(self) -> np.ndarray:
        """Bool (T, H, W): observed and, on a date with labels, labelled."""
        known = self.labels != UNKNOWN
        return (self.record.dn > 0).all(1) & (known | ~known.any((1, 2), keepdims=True))

    def size(self, side: int) -> tuple[int, int]:
        """Return height and width of an item: `side`, or those of a smaller place."""
        height, width = self.record.dn.shape[2:]
        return min(side, height), min(side, width)

    def targets(self, side: int) -> dict[int, list[tuple[int, int]]]:
        """Return date -> corners of windows in which the date is clear and most other dates are observed."""
        size = self.size(side)
        if min(size) < SMALLEST:
            return {}
        clear = _shares(self.labels == CLEAR, size) >= TARGET_CLEAR
        observed = _shares(self.seen, size) >= OBSERVED
        others = np.where(clear, np.minimum(observed.sum(0)[None] - observed, DATES), -1)
        found: dict[int, list[tuple[int, int]]] = {}
        for date, row, column in np.argwhere((others == others.max()) & clear).tolist():
            found.setdefault(date, []).append((row * STRIDE, column * STRIDE))
        return found

    def cloudy_windows(self, size: tuple[int, int]) -> list[tuple[Place, int, int, int]]:
        """Return (donor, date, y, x) of partly cloudy windows without nodata, where clouds would end in lines."""
        if size not in self._windows:
            others = [donor for donor in self.donors if donor.record.group != self.record.group]
            self._windows[size] = [(donor, *spot) for donor in others for spot in _cloudy_spots(donor, size)]
        return self._windows[size]


def _cloudy_spots(place: Place, size: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (date, y, x) of windows of a labelled place."""
    cloud = _shares((place.labels >= THICK) & (place.labels <= SHADOW), size)
    known = _shares(place.labels != UNKNOWN, size)
    for date, row, column in np.argwhere((known >= 0.97) & (cloud > 0.12) & (cloud < 0.85)).tolist():
        yield date, row * STRIDE, column * STRIDE


def _shares(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the share of True in the windows of `size` with corners on a grid, (T, H, W) -> (T, rows, columns)."""
    total = np.pad(np.cumsum(np.cumsum(mask.astype(np.int64), 1), 2), ((0, 0), (1, 0), (1, 0)))
    height, width = size
    count = total[:, height:, width:] - total[:, :-height, width:] - total[:, height:, :-width]
    count = count + total[:, :-height, :-width]
    return count[:, ::STRIDE, ::STRIDE] / (height * width)


@dataclass(eq=False)
class _Input:
    """One input date: the image before clouds are added, and where the clouds come from."""

    image: np.ndarray
    labels: np.ndarray
    date: int
    derived: bool
    sky: str = "own"


class _Window:
    """All dates of a place in the window of an item."""

    def __init__(self, place: Place, window: tuple[int, int, int], side: int) -> None:
        self.target, y, x = window
        height, width = place.size(side)
        box = (..., slice(y, y + height), slice(x, x + width))
        self.images, self.labels, self.seen = place.record.dn[box], place.labels[box], place.seen[box]
        self.clear, self.days = self.labels[self.target] == CLEAR, place.record.days
        cloud = (self.labels >= THICK) & (self.labels <= SHADOW)
        # A date without any label may have clouds, as the cloudy dates of SEN12MS-CR.
        self.cloudy = (cloud.mean((1, 2)) >= OWN_CLOUDS) | (place.labels == UNKNOWN).all((1, 2))

    def others(self) -> list[int]:
        """Return the dates besides the target that may be inputs, nearest first where days are known."""
        dates = [k for k in range(len(self.images)) if k != self.target and self.seen[k].mean() >= OBSERVED]
        if (days := self.days) is not None:
            dates = sorted(dates, key=lambda k: (abs(days[k] - days[self.target]), k))[:NEAREST]
        return dates

    def input(self, date: int, draw: Draw | None = None) -> _Input:
        """Return a date as an input; with `draw`, a pseudo-date of it."""
        image = np.where(self.seen[date], self.images[date], 0).astype(np.float64)
        labels = np.where(self.seen[date], self.labels[date], UNKNOWN)
        return _Input(image if draw is None else pseudo_date(image, draw), labels, date, draw is not None)

    def inputs(self, draw: Draw, wanted: int) -> list[_Input]:
        """Return `wanted` inputs: real dates as far as there are any, then pseudo-dates."""
        others = self.others()
        bases = [k for k in others if (self.labels[k] == CLEAR).mean() >= BASE_CLEAR] or [self.target]
        others = draw.shuffled(others)
        if draw.uniform() < CLOUDY_FIRST:
            others = sorted(others, key=lambda k: not self.cloudy[k])
        chosen = sorted(others[:wanted])
        missing = [bases[draw.below(len(bases))] for _ in range(wanted - len(chosen))]
        return [self.input(date) for date in chosen] + [self.input(date, draw) for date in missing]


def compose(
    place: Place, draw: Draw, *, task: str, sky: str, window: tuple[int, int, int], side: int
) -> SeriesRecord | None:
    """Return one item as a record of the target and `DATES` inputs; None where no draw of clouds fits.

    task: "paper" (the target is none of the inputs) or "clean" (an input is the target under clouds); sky: "pasted" or
    "simulated", for inputs without clouds of their own; window: target date, row and column.
    """
    view = _Window(place, window, side)
    reference = draw.below(DATES) if task == "clean" else None
    inputs = view.inputs(draw, DATES - (reference is not None))
    if reference is not None:
        inputs.insert(reference, view.input(view.target))
    for number, one in enumerate(inputs):
        if number == reference or one.derived or not view.cloudy[one.date]:
            one.sky = sky
    clouded = _add_clouds(place, inputs, view.clear, draw, reference)
    if clouded is None:
        return None
    images, labels = clouded
    truth = np.where(view.seen[view.target], view.images[view.target], 0)
    derived = [one.date for one in inputs if one.derived]
    record, days = place.record, view.days
    return SeriesRecord(
        dn=whole_counts(np.concatenate([truth[None], images]), STEP),
        name=record.name,
        source="triclear",
        bands=record.bands,
        labels=np.concatenate([np.where(view.clear, CLEAR, UNKNOWN)[None], labels]).astype(np.uint8),
        level=record.level,
        resolution=record.resolution,
        days=None if days is None or derived else (days[view.target], *(days[one.date] for one in inputs)),
        group=record.group,
        extra={
            "target": 0,
            "reference": reference,
            "task": task,
            "window": list(window),
            "sky": next((one.sky for one in inputs if one.sky != "own"), "real"),
            "ground": "pseudo" if view.target in derived else "filled" if derived else "real",
            "inputs": [{"date": one.date, "derived": one.derived, "sky": one.sky} for one in inputs],
        },
    )


def _add_clouds(
    place: Place, inputs: Sequence[_Input], clear: np.ndarray, draw: Draw, reference: int | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return counts (T, C, H, W) and labels (T, H, W) under the first draw of clouds that suits the task, or None."""
    for _ in range(TRIES):
        pairs = [_clouded(place, one, draw, number == reference) for number, one in enumerate(inputs)]
        images, labels = (np.stack(part) for part in zip(*pairs, strict=True))
        if reference is None:
            fits = (labels == CLEAR).any(0)[clear].mean() >= RECOVERABLE
        else:
            fits = ((labels[reference] != CLEAR) & (labels[reference] != UNKNOWN) & clear).mean() >= LEAST_HIDDEN
        if fits:
            return images, labels
        if all(one.sky == "own" for one in inputs):
            return None
    return None


def _clouded(place: Place, one: _Input, draw: Draw, is_reference: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return counts and labels of an input under its clouds; simulated ones where no other place has any to paste."""
    if one.sky == "own":
        return one.image, one.labels
    observed = one.image.min(0) > 0
    height, width = observed.shape
    spots = place.cloudy_windows((height, width)) if one.sky == "pasted" else []
    if spots:
        donor, date, y, x = spots[draw.below(len(spots))]
        box = (date, ..., slice(y, y + height), slice(x, x + width))
        image, labels = donor.record.dn[box].astype(np.float64), donor.labels[box]
        for axis in (-2, -1):
            if draw.uniform() < 0.5:
                image, labels = np.flip(image, axis), np.flip(labels, axis)
        image, labels = paste_clouds(one.image, image, labels)
    else:
        one.sky = "simulated"
        coverage = draw.uniform(0.05, 0.55) if draw.uniform() < 0.85 else draw.uniform(0.55, 1.0)
        image, labels = simulate_clouds(one.image, max(coverage, 0.15) if is_reference else coverage, draw)
    before = np.where(one.labels == UNKNOWN, CLEAR, one.labels) if one.derived else one.labels
    labels = np.where(labels == CLEAR, before, labels)
    return np.where(observed, np.maximum(image, 1), 0), np.where(observed, labels, UNKNOWN)
