"""Splits: lists shipped with the package, lists beside the data, and a hash rule; samplers of dates.

Every list has a SHA-256 (of its sorted names, one per line), which is part of the facts of a
dataset and of each report. No published list is guessed: where none exists, `by_hash` is labelled as a rule of sader.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from sader.data.batch import keyed_generator
from sader.errors import ConfigError, DataError, check_known, did_you_mean


@dataclass(frozen=True)
class SplitList:
    """The names of one part of a dataset, and where they come from."""

    names: tuple[str, ...]
    origin: str
    """Such as "frozen", "test.txt of the folder", "hash rule (not published)"."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the sorted names, regardless of order and line ends."""
        return list_hash(self.names)


def list_hash(names: Iterable[str]) -> str:
    """Return the SHA-256 of the sorted names, each followed by a line feed."""
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(names)).encode()).hexdigest()


def frozen_list(dataset: str, part: str) -> SplitList:
    """Return the list `part` of `dataset` as shipped; its hash is checked."""
    content = _shipped(dataset)
    if part not in content["lists"]:
        raise ConfigError(f"{dataset} has no list {part}{did_you_mean(part, content['lists'])}")
    found, wanted = SplitList(tuple(content["lists"][part]), "frozen"), content["sha256"][part]
    if found.sha256 != wanted:
        raise DataError(
            f"the shipped list {part} of {dataset} has SHA-256 {found.sha256}, not {wanted}. Install sader again."
        )
    return found


@cache
def _shipped(dataset: str) -> dict:
    path = resources.files("sader.data.public") / "splits" / f"{dataset}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def read_list(path: Path) -> tuple[str, ...]:
    """Return the names in a text file, one per line; blank lines and repeats are left out, repeats with a warning."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"cannot read the split file {path}: {reason}. Copy it again from the dataset.") from error
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise DataError(f"the split file {path} is empty; expected one name per line. Copy it again.")
    unique = tuple(dict.fromkeys(names))
    if len(unique) < len(names):
        warnings.warn(f"{path.name} repeats {len(names) - len(unique)} names; each is used once.", stacklevel=2)
    return unique


def folder_list(root: Path, split: str, *, file_names: Sequence[str] | None = None, instead: str) -> SplitList:
    """Return the list of `split` from the dataset's own folder.

    file_names: the names under which such a file is known, default SPLIT.txt. instead: advice at the end of
    the error if there is no file.
    """
    wanted = tuple(file_names or (f"{split}.txt",))
    for name in wanted:
        if (root / name).is_file():
            names = read_list(root / name)
            for other in sorted({"train.txt", "val.txt", "test.txt"} - {name}):
                shared = set(names) & set(read_list(root / other)) if (root / other).is_file() else ()
                if shared:
                    text = f"{root / name} and {other} share {len(shared)} names ({min(shared)}); expected none in two"
                    raise DataError(f"{text}. Copy the lists again from the dataset.")
            return SplitList(names, f"{name} of the folder")
    found = sorted(path.name for path in root.glob("*.txt"))
    raise DataError(
        f"no split file in {root}; expected {' or '.join(wanted)}, found "
        f"{', '.join(found) if found else 'no text file'}. {instead}"
    )


def chosen_list(lists: str | Path | None, dataset: str, **kinds: Callable[[], SplitList]) -> SplitList:
    """Return the list that `ReadOptions.lists` asks for: one of `kinds` (None: the first of them), or a file of names.

    kinds: folder, frozen or hash, as far as the dataset has them.
    """
    kind = next(iter(kinds)) if lists is None else str(lists)
    if kind in kinds:
        return kinds[kind]()
    if kind in ("folder", "frozen", "hash"):
        found = "published list to ship" if kind == "frozen" else f"lists of kind {kind}"
        raise DataError(f"{dataset} has no {found}; expected {', '.join(kinds)} or the path of a list.")
    return SplitList(read_list(Path(kind)), Path(kind).name)


def by_hash(names: Iterable[str], split: str, *, shares: tuple[float, float] = (0.8, 0.1)) -> SplitList:
    """Return the part of `names` in `split` by a rule of sader: order by SHA-256, first 80 %, 10 %, the rest.

    Not a published split. It depends on the set of names alone; names should be whole tiles or groups of equal
    images, so that none is in two splits.
    """
    ranked = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
    first = round(shares[0] * len(ranked))
    # Validation and test get at least one each from three names on.
    first = min(first, len(ranked) - 2) if len(ranked) > 2 else first
    second = min(first + max(round(shares[1] * len(ranked)), 1), max(len(ranked) - 1, first))
    parts = {"train": ranked[:first], "val": ranked[first:second], "test": ranked[second:], "all": ranked}
    check_known("split", split, parts)
    return SplitList(tuple(sorted(parts[split])), "hash rule of sader (not published)")


def joined(lists: Sequence[SplitList]) -> SplitList:
    """Return several lists as one."""
    names = dict.fromkeys(name for each in lists for name in each.names)
    return SplitList(tuple(names), ", ".join(dict.fromkeys(each.origin for each in lists)))


RANDOM = "published_random"
"""The published sampler of training series; the others are for validation and test."""
CLEAR_COVER = 1e-3
"""Cloud cover below which a date counts as clear."""
SAMPLERS = {
    "leak_free": "target: the least cloudy date; inputs: the first T dates of another day than the target's",
    "published": "target: the least cloudy date; inputs: the first T dates, the target among them whenever it is one "
    "of these (the answer is then an input; the published val and test figures)",
    RANDOM: "target: a date under 0.1 % cover drawn by the index of the series, else the least cloudy; "
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
    number: int = 0,
) -> Dates:
    """Return the dates chosen by a sampler of `SAMPLERS`.

    coverage: cloud cover of each date, 1 for blank ones; days: acquisition days; `leak_free` takes no input of the
    target's day; number: index of the series, the seed of `published_random`.
    """
    cover = np.asarray(coverage, np.float64)
    if len(cover) < inputs + 1:
        raise DataError(
            f"a patch has {len(cover)} dates; expected at least {inputs + 1}: {inputs} inputs and a target."
        )
    target = int(cover.argmin())
    if sampler == "published":
        return Dates(tuple(range(inputs)), target)
    if sampler == RANDOM:
        clear = np.flatnonzero(cover < CLEAR_COVER)
        if len(clear):
            target = int(clear[keyed_generator(0, 0, number, 0xDA7E).integers(len(clear))])
        first, last = max(0, target - inputs), min(target, len(cover) - inputs - 1)
        start = range(first, last + 1)[(last + 1 - first) // 2]
        return Dates(tuple(date for date in range(start, start + inputs + 1) if date != target), target)
    assert sampler == "leak_free", sampler
    others = [date for date in range(len(cover)) if date != target and (days is None or days[date] != days[target])]
    if len(others) < inputs:
        raise DataError(
            f"a patch has {len(others)} dates of other days than its target; expected {inputs}. Use fewer inputs."
        )
    return Dates(tuple(others[:inputs]), target)
