"""Under which conditions the rows of a plan are trained and scored, on which data, and the items they are scored on.

`Conditions` is what the user chooses once; a `Setting` is the conditions on one dataset. Nothing is trained here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from sader.data.items import Item
from sader.data.public.dataset import PublicDataset, ReadOptions
from sader.data.public.registry import open_dataset
from sader.errors import DataError, OutputError
from sader.evaluation.reproduce.made import make_data
from sader.evaluation.reproduce.plans import HELPING_BANDS, HERE, SCORED_BANDS
from sader.evaluation.run import EvaluationRequest, load_records, open_items


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What holds for every row, whatever the dataset: budget, samplers, limits and seed."""

    seconds: float | None = None
    """Training time of every system."""
    steps: int | None = None
    """Optimiser steps of every system."""
    tiny: bool = False
    """Made data and tiny networks."""
    sampler: str = "leak_free"
    split: str = "test"
    lists: str | None = None
    partial: bool = False
    coverage: str = "auto"
    limit: int | None = None
    """Scored items per place."""
    lpips: bool | None = None
    examples: int = 3
    """Items in the qualitative figure."""
    seed: int = 0
    overrides: tuple[str, ...] = ()
    """Changes to every run, as in `sader train --set`."""
    workers: int = 1
    """Systems trained at the same time, on the same device."""

    def conditions(self) -> dict[str, Any]:
        """Return name -> value of the conditions alone, for another holder of them."""
        return {each.name: getattr(self, each.name) for each in fields(Conditions)}

    def arguments(self) -> list[str]:
        """Return the conditions as options of `python -m sader.evaluation.reproduce.run`."""
        words: list[str] = []
        for name, value in self.conditions().items():
            if name == "overrides":
                words += [word for change in value for word in ("--set", change)]
            elif name == "lpips":
                words += [] if value is None else ["--lpips" if value else "--no-lpips"]
            elif isinstance(value, bool):
                words += [f"--{name}"] * value
            elif value is not None:
                words += [f"--{name}", str(value)]
        return words


@dataclass(frozen=True, kw_only=True)
class Setting(Conditions):
    """The conditions on one dataset: everything that its rows share."""

    dataset: str
    """A public dataset, or `plans.HERE`."""
    root: Path | None = None
    """Folder of the public dataset."""
    out: Path
    shards: tuple[str, ...] = ()
    """With HERE: shards to train on."""
    validation: tuple[str, ...] = ()
    """With HERE: shards to score on."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that are scored."""
        return ("clean", "paper") if self.dataset == HERE else ("paper",)

    @property
    def label(self) -> str:
        """The folder of this dataset; scores of two samplers are two sets of rows."""
        return self.dataset if self.dataset == HERE or self.sampler == "leak_free" else f"{self.dataset}-{self.sampler}"

    @property
    def budget(self) -> str:
        """The budget of every system, in words."""
        parts = [f"{self.seconds:g} s of training"] if self.seconds else []
        parts += [f"{self.steps} steps"] if self.steps else []
        return " and at most ".join(parts) + " for each system" if parts else "each system's own number of steps"


def open_part(setting: Setting, split: str) -> PublicDataset:
    """Return one split of the setting's public dataset."""
    assert setting.root is not None
    options = ReadOptions(lists=setting.lists, partial=setting.partial, coverage=setting.coverage)
    return open_dataset(
        setting.root, dataset=setting.dataset, split=split, sampler=setting.sampler, options=options
    )  # fmt: skip


def made_setting(setting: Setting) -> Setting:
    """Return the setting on made data, with a budget of two steps unless another is given."""
    folder = setting.out / "made" / setting.dataset
    with locked(folder.with_suffix(".lock")):  # several processes may be the first
        make_data(setting.dataset, folder)
    few = setting if setting.seconds or setting.steps else replace(setting, steps=2)
    if setting.dataset == HERE:
        return replace(few, shards=(str(folder / "train"),), validation=(str(folder / "validation"),), limit=2)
    return replace(few, root=folder, partial=True, examples=min(setting.examples, 2))


def scored_items(setting: Setting, task: str) -> tuple[Any, str, dict[str, Any]]:
    """Return the items, the protocol and the facts of the data."""
    bands, others = SCORED_BANDS[setting.dataset], HELPING_BANDS[setting.dataset]
    request = EvaluationRequest(models=(), data=(), task=task, limit=setting.limit, seed=setting.seed)
    if setting.dataset == HERE:
        items = _shard_items(request, setting.validation, tuple(bands))
        facts: dict[str, Any] = {"data": [Path(path).name for path in setting.validation], "items": len(items)}
        return items, "reflectance", facts
    dataset = open_part(setting, setting.split).limited(setting.limit, seed=setting.seed)
    return open_items(request, dataset, [], tuple(bands), others), dataset.request.protocol, dict(dataset.facts)


@lru_cache(maxsize=2)
def _shard_items(request: EvaluationRequest, validation: tuple[str, ...], bands: tuple[str, ...]) -> list[Item]:
    """Return the items of shards, read once per process and task: nobody changes them."""
    records = list(load_records([Path(path) for path in validation], split="all"))
    return list(open_items(request, None, records, bands))


def scored_on(setting: Setting) -> dict[str, Any]:
    """Return what the items of a setting depend on, for the key of a result."""
    names = ("dataset", "sampler", "split", "lists", "limit", "seed", "examples", "tiny", "lpips")
    values: dict[str, Any] = {name: getattr(setting, name) for name in names}
    if setting.dataset == HERE:
        files = [file for path in setting.validation for file in _files(Path(path))]
        return {**values, "validation": [(file.name, file.stat().st_size) for file in files]}
    return values | {"root": None if setting.root is None else setting.root.name}


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.shard")) if path.is_dir() else [path]


def check_setting(setting: Setting) -> None:
    """Raise for data that cannot be used, before anything is trained."""
    if setting.dataset != HERE:
        for split in ("train", setting.split):
            open_part(setting, split)[0]  # an image that cannot be read is better found now than after hours
        return
    if not setting.shards or not setting.validation:
        missing = "--data" if not setting.shards else "--validation"
        raise DataError(f"no {missing} given; the plan here trains on --data SHARDS and scores on --validation SHARDS.")
    for path in (*setting.shards, *setting.validation):
        if not Path(path).exists():
            raise DataError(f"{path} does not exist; expected shards (make them with: sader data pack).")
    train = {(record.source, record.name) for record in load_records([Path(p) for p in setting.shards], split="all")}
    held = [r for r in load_records([Path(p) for p in setting.validation], split="all")]
    both = sorted(f"{r.source}/{r.name}" for r in held if (r.source, r.name) in train)
    if both:
        raise DataError(f"{len(both)} places are in both --data and --validation ({both[0]}); expected none in both.")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run: another process waits. The system lets go of it when a process dies, however it dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}. Choose another --out.") from error
    with file:
        try:
            import fcntl
        except ImportError:  # no such locks on this system: rows must then not share a run at the same time
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(values: dict[str, Any]) -> str:
    """Return the key of what something was made from."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
