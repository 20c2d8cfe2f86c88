"""Builds the benchmark's items from the source folders, writes them as shards and compares checksums.

`frozen.json` lists every item of version 1 with the first 16 digits of its SHA-256, and the SHA-256 of each set.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from sader.bands import BANDS_RGBN
from sader.data.benchmark.compose import STEP, Place, compose
from sader.data.benchmark.exact import Draw
from sader.data.benchmark.places import read_benchmark_places
from sader.data.shards import SUFFIX, SeriesRecord, ShardWriter, read_shards
from sader.errors import DataError

NAME, VERSION, SEED = "TriClear", 1, 0
SKIES = ("pasted", "simulated")
DIGITS = 16
Progress = Callable[[str, int], None]
"""Called with a set and the number of its items."""


@dataclass(frozen=True)
class ItemSet:
    """The items of one part, task and size."""

    part: str
    task: str
    side: int
    divisor: int
    """A place gives its number of items (`places.SOURCES`) divided by this, rounded up."""

    @property
    def name(self) -> str:
        """Folder of the set: PART/TASK-SIDE."""
        return f"{self.part}/{self.task}-{self.side}"


SETS = (
    ItemSet("val", "paper", 128, 1),
    ItemSet("val", "clean", 128, 2),
    ItemSet("test", "paper", 128, 1),
    ItemSet("test", "paper", 256, 2),
    ItemSet("test", "clean", 128, 2),
    ItemSet("test", "clean", 256, 4),
)


def set_items(which: ItemSet, places: Sequence[Place]) -> Iterator[SeriesRecord]:
    """Yield the items of a set; the places are those of its part, in the order of the sources."""
    for place in places:
        count = -(-int(str(place.record.extra["items"])) // which.divisor)
        if which.side > 128 and min(place.size(which.side)) < which.side:
            continue
        yield from place_items(place, which, count)


def place_items(place: Place, which: ItemSet, count: int) -> Iterator[SeriesRecord]:
    """Yield up to `count` items of one place: targets in turn, windows far from those already used."""
    key = f"{NAME}/{VERSION}/{SEED}/{which.name}/{place.record.group}/{place.record.name}"
    draw = Draw(key)
    corners = {date: draw.shuffled(spots) for date, spots in place.targets(which.side).items()}
    order = draw.shuffled(sorted(corners))
    used: list[tuple[int, int, int]] = []
    made = 0
    for attempt in range(3 * count):
        if made == count or not order:
            return
        target = order[attempt % len(order)]
        y, x = max(corners[target], key=lambda corner: _distance(corner, target, used))
        used.append((target, y, x))
        drawn, sky = Draw(f"{key}/{attempt}"), SKIES[made % 2]
        item = compose(place, drawn, task=which.task, sky=sky, window=used[-1], side=which.side)
        if item is not None:
            made += 1
            name = item.group if item.group.endswith(item.name) else f"{item.group}/{item.name}"
            name = f"{name}/{which.task}{which.side}/{made:02d}-{item.extra['sky']}-{item.extra['ground']}"
            yield replace(item, name=name)


def _distance(corner: tuple[int, int], target: int, used: Sequence[tuple[int, int, int]]) -> int:
    """Return the squared distance to the nearest used window; windows of other targets count as twice as far."""
    squares = [((corner[0] - y) ** 2 + (corner[1] - x) ** 2) * (1 if date == target else 4) for date, y, x in used]
    return min(squares, default=0)


def checksum(item: SeriesRecord) -> str:
    """Return the SHA-256 of an item: its metadata as sorted JSON, then counts and labels as little-endian bytes."""
    keys = ("name", "group", "bands", "days", "level", "extra")
    meta = {key: getattr(item, key) for key in keys} | {"shape": item.dn.shape}
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True, separators=(",", ":")).encode())
    digest.update(np.ascontiguousarray(item.dn, "<u2").tobytes())
    digest.update(b"" if item.labels is None else np.ascontiguousarray(item.labels).tobytes())
    return digest.hexdigest()


def load_places(folder: str | Path, part: str, *, partial: bool = False) -> list[Place]:
    """Return the places of one part; clouds are pasted from the labelled places of the same part alone."""
    records = list(read_benchmark_places(folder, part, partial=partial))
    donors = [Place(record) for record in records if record.source == "cloudsen12"]
    return [Place(record, donors) for record in records]


def build(
    folder: str | Path,
    out: str | Path,
    *,
    train: bool = False,
    bands: Sequence[str] = BANDS_RGBN,
    partial: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write all sets under `out`, with `train` also the training places, and return the list of the items.

    `folder` holds the source folders (`places.SOURCES`); with `partial` some may be missing, and the items differ.
    `bands` are those of the training places; the items have four.
    """
    out = Path(out)
    # Before the items, which take minutes: wrong bands are an error here.
    training = read_benchmark_places(folder, "train", partial=partial, bands=bands) if train else None
    sets: dict[str, Any] = {}
    for part in ("val", "test"):
        places = load_places(folder, part, partial=partial)
        chosen = [which for which in SETS if which.part == part]
        write = functools.partial(_write_set, places=places, out=out)
        # The compression of shards releases the interpreter lock: one set is compressed while another is composed.
        with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            for which, items in zip(chosen, pool.map(write, chosen), strict=True):
                sets[which.name] = list_items(items)
                if progress:
                    progress(which.name, len(items))
    listing: dict[str, Any] = {"name": NAME, "version": VERSION, "seed": SEED, "sets": sets}
    if training is not None:
        listing["train"] = sorted(_write_training_places(training, out / "train"))
        if progress:
            progress("train", len(listing["train"]))
    return listing


def _write_set(which: ItemSet, places: Sequence[Place], out: Path) -> list[SeriesRecord]:
    items = list(set_items(which, places))
    _write(out / which.name, items)
    return items


def _write(folder: Path, records: Iterable[SeriesRecord]) -> None:
    """Write records as the only shards of a folder."""
    for old in folder.glob(f"*{SUFFIX}"):
        old.unlink()
    writer = ShardWriter(folder, NAME.lower(), step=STEP)
    for record in records:
        writer.add(record)
    writer.flush()


def _write_training_places(places: Iterable[SeriesRecord], folder: Path) -> set[str]:
    """Write the training places as shards of whole series and return their names."""
    groups: set[str] = set()

    def records() -> Iterator[SeriesRecord]:
        for record in places:
            groups.add(record.group)
            yield replace(record, extra={"split": "train"})

    _write(folder, records())
    return groups


def list_items(items: Sequence[SeriesRecord]) -> dict[str, Any]:
    """Return the entry of a set: name -> first digits of the checksum of each item, and the checksum of all."""
    sums = {item.name: checksum(item) for item in items}
    whole = hashlib.sha256("".join(sums.values()).encode()).hexdigest()
    short = {name: value[:DIGITS] for name, value in sums.items()}
    return {"sha256": whole, "places": len({item.group for item in items}), "items": short}


def read_listing(out: str | Path) -> dict[str, Any]:
    """Return the list of the items in a built folder."""
    folders = {which.name: Path(out) / which.name for which in SETS}
    found = {name: list(folder.glob(f"*{SUFFIX}")) for name, folder in folders.items()}
    if not any(found.values()):
        raise DataError(f"no items in {out}; expected folders {', '.join(folders)}. Build them: sader data benchmark")
    sets = {name: list_items(list(read_shards(sorted(files)))) for name, files in found.items()}
    return {"name": NAME, "version": VERSION, "seed": SEED, "sets": sets}


def frozen() -> dict[str, Any]:
    """Return the list of the items of this version."""
    return json.loads((resources.files("sader.data.benchmark") / "frozen.json").read_text(encoding="utf-8"))


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return one line for each item that is missing, new or different in `found`."""
    lines = []
    for name in {**wanted["sets"], **found["sets"]}:
        mine, theirs = (side["sets"].get(name, {}).get("items", {}) for side in (found, wanted))
        for item in {**theirs, **mine}:
            if mine.get(item) != theirs.get(item):
                state = "missing" if item not in mine else "not in the list" if item not in theirs else "different"
                lines.append(f"{name} {item}: {state}")
    return lines
