"""Which of the dates of a patch are the inputs and which is the target: the published samplers, and ours without leak.

METHOD 6 (SEN12MS-CR-TS). All are pure functions of the cloud cover of the dates and a key; USERS 0.6 has the story.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sader.data.batch import keyed_generator
from sader.errors import DataError

CLEAR_COVER = 1e-3
"""Cloud cover below which a date counts as clear."""
SAMPLERS = {
    "leak_free": "target: the least cloudy date; inputs: the first T dates of another day than the target's",
    "published": "target: the least cloudy date; inputs: the first T dates, the target among them whenever it is one "
    "of these (the answer is then an input; the published val and test figures)",
    "published_random": "target: a date under 0.1 % cover drawn by (seed, epoch, index), else the least cloudy; "
    "inputs: the other dates of the middle window of T + 1 dates around it (published training; no leak)",
}


@dataclass(frozen=True)
class Dates:
    """Numbers of the chosen dates."""

    inputs: tuple[int, ...]
    target: int

    @property
    def leaks(self) -> bool:
        """Whether the target is an input."""
        return self.target in self.inputs


def choose_dates(
    sampler: str,
    coverage: Sequence[float] | np.ndarray,
    *,
    inputs: int = 3,
    days: Sequence[float] | None = None,
    key: tuple[int, int, int] = (0, 0, 0),
) -> Dates:
    """Return the dates a sampler of `SAMPLERS` chooses.

    coverage: cloud cover of each date, 1 for blank ones; days: acquisition days, of which `leak_free` takes none twice
    with the target's; key: (seed, epoch, index) of `published_random`.
    """
    cover = np.asarray(coverage, np.float64)
    if len(cover) < inputs + 1:
        raise DataError(
            f"a patch has {len(cover)} dates; expected at least {inputs + 1}: {inputs} inputs and a target."
        )
    target = int(cover.argmin())
    if sampler == "published":
        return Dates(tuple(range(inputs)), target)
    if sampler == "published_random":
        clear = np.flatnonzero(cover < CLEAR_COVER)
        if len(clear):
            target = int(clear[keyed_generator(*key, 0xDA7E).integers(len(clear))])
        first, last = max(0, target - inputs), min(target, len(cover) - inputs - 1)
        start = range(first, last + 1)[(last + 1 - first) // 2]
        return Dates(tuple(date for date in range(start, start + inputs + 1) if date != target), target)
    assert sampler == "leak_free", sampler
    others = [date for date in range(len(cover)) if date != target and (days is None or days[date] != days[target])]
    if len(others) < inputs:
        raise DataError(
            f"a patch has {len(others)} dates of other days than its target; expected {inputs}. Ask for fewer inputs."
        )
    return Dates(tuple(others[:inputs]), target)
