"""Records as arrays of reflectance with masks, cut into windows: what the evaluation tasks are made from.

LESSONS 2. No item is made here and nothing is drawn at random; see `tasks.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from sader.data.batch import CLEAR, SHADOW, THICK, UNKNOWN
from sader.data.shards import SeriesRecord
from sader.errors import DataError

CLEAR_SHARE = 0.5
"""Least part of the frame that must be labelled clear for a date to be a truth."""
WINDOW = 300
"""Frames longer than twice this are cut into windows of about this many pixels a side."""
SMALLEST_WINDOW = 64
"""Side of the smallest image that simulated clouds are laid over."""
_MAY_BE_ZERO = ("B10",)


@dataclass(frozen=True, eq=False)
class Frames:
    """A record (or a window of it) as arrays; `labels` keeps UNKNOWN only on dates without any label."""

    name: str
    group: str
    images: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    days: tuple[float, ...] | None
    bands: tuple[str, ...]

    def labelled(self, date: int) -> bool:
        """Return whether every observed pixel of the date has a label."""
        return not bool((self.labels[date][self.valid[date]] == UNKNOWN).any())

    def clear(self, date: int) -> np.ndarray:
        """Return bool (H, W): labelled clear and observed."""
        return (self.labels[date] == CLEAR) & self.valid[date]

    def cloud(self, date: int) -> np.ndarray:
        """Return bool (H, W): labelled cloud, thick or thin, or shadow, and observed."""
        return (self.labels[date] >= THICK) & (self.labels[date] <= SHADOW) & self.valid[date]

    @property
    def dates(self) -> range:
        """Their numbers."""
        return range(len(self.images))

    @property
    def truths(self) -> list[int]:
        """Dates clear enough to be a truth."""
        return [date for date in self.dates if self.clear(date).mean() >= CLEAR_SHARE]

    @property
    def has_clouds(self) -> bool:
        """Whether any date has labelled clouds."""
        return any(bool(self.cloud(date).any()) for date in self.dates)


def read_frames(records: Iterable[SeriesRecord], bands: Sequence[str] | None, *, cut: bool = True) -> Iterator[Frames]:
    """Yield the records that have all `bands`, long ones cut into windows of about `WINDOW` pixels."""
    found = False
    for record in records:
        names = tuple(bands or record.bands)
        if any(name not in record.bands for name in names):
            continue
        found = True
        dn = record.dn[:, [record.bands.index(name) for name in names]]
        valid = observed(dn, names)
        labels = np.full(valid.shape, UNKNOWN, np.uint8) if record.labels is None else record.labels
        # "Not covered" on a date that has labels elsewhere is no data; on a date without any it is ignorance.
        some = ((labels != UNKNOWN) & valid).any((1, 2))
        valid = valid & ((labels != UNKNOWN) | ~some[:, None, None])
        images = np.minimum(dn.astype(np.float32) / 10000, 1) * valid[:, None]
        group = record.group or record.name
        whole = Frames(record.name, group, images, labels, valid, record.days, names)
        if not cut or max(valid.shape[1:]) <= 2 * WINDOW:
            yield whole
            continue
        for number, (rows, columns) in enumerate(_pieces(*valid.shape[1:])):
            yield replace(
                whole,
                name=f"{record.name}/{number}",
                images=images[..., rows, columns],
                labels=labels[..., rows, columns],
                valid=valid[..., rows, columns],
            )
    if not found:
        wanted = "any series" if bands is None else f"series with bands {', '.join(bands)}"
        raise DataError(f"the data holds no {wanted}. Check it with: sader data show SHARDS")


def observed(dn: np.ndarray, bands: Sequence[str]) -> np.ndarray:
    """Return bool (T, H, W), where counts (T, C, H, W) hold data; the cirrus band may be 0 over clear land."""
    must = [k for k, name in enumerate(bands) if name not in _MAY_BE_ZERO]
    return np.all(dn[:, must] > 0, axis=1)


def _pieces(height: int, width: int) -> Iterator[tuple[slice, slice]]:
    rows = np.linspace(0, height, max(round(height / WINDOW), 1) + 1).astype(int)
    columns = np.linspace(0, width, max(round(width / WINDOW), 1) + 1).astype(int)
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            yield slice(int(top), int(bottom)), slice(int(left), int(right))


def cloudy_windows(place: Frames, size: tuple[int, ...]) -> Iterator[tuple[int, slice, slice]]:
    """Yield (date, rows, columns) of windows observed throughout and partly cloudy: clouds must not end in lines."""
    height, width = place.valid.shape[1:]
    for date in place.dates:
        if not place.labelled(date):
            continue
        cloud = place.cloud(date)
        for top in range(0, height - size[0] + 1, 32):
            for left in range(0, width - size[1] + 1, 32):
                rows, columns = slice(top, top + size[0]), slice(left, left + size[1])
                share = cloud[rows, columns].mean()
                if 0.12 < share < 0.85 and place.valid[date][rows, columns].mean() > 0.97:
                    yield date, rows, columns


def clear_windows(place: Frames, side: int) -> list[tuple[int, slice, slice]]:
    """Return (date, rows, columns) of windows of `side` pixels (fewer in a smaller frame) that are all but clear."""
    height, width = place.valid.shape[1:]
    side = min(side, height, width)
    found = []
    for date in place.dates if side >= SMALLEST_WINDOW else ():
        clear = place.clear(date)
        for top in range(0, height - side + 1, 16):
            for left in range(0, width - side + 1, 16):
                rows, columns = slice(top, top + side), slice(left, left + side)
                if clear[rows, columns].mean() > 0.995:
                    found.append((date, rows, columns))
    return found
