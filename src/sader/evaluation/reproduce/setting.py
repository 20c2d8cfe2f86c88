"""The request of `sader reproduce`, and its setting on one dataset: data, budget and scored items."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from sader.data.items import Item
from sader.data.public.dataset import PublicDataset, ReadOptions
from sader.data.public.registry import open_dataset, training_sampler
from sader.data.shards import fingerprint
from sader.errors import ConfigError, DataError
from sader.evaluation.data import DataRequest, load_records, open_data
from sader.evaluation.reproduce.plans import HELPING_BANDS, HERE, SCORED_BANDS
from sader.evaluation.reproduce.tiny import write_data
from sader.files import locked

EUROSAT = "eurosat_ms"
"""Name in --data of the images on which the guides of the paper's tables are trained."""


@dataclass(frozen=True)
class ReproduceRequest:
    """Which tables to reproduce from which data, with which training budget."""

    tables: tuple[str, ...]
    """Names of `plans.TABLES`, or all."""
    data: tuple[str, ...] = ()
    """NAME:FOLDER or FOLDER of the public datasets; with `here` the shards to train on. eurosat_ms:FOLDER is for the
    guides."""
    validation: tuple[str, ...] = ()
    """With `here`: shards to score on."""
    out: Path = Path("reproduce")
    seconds: float | None = None
    """Training time of every system."""
    steps: int | None = None
    """Optimiser steps of every system."""
    overrides: tuple[str, ...] = ()
    """Changes to every run, as in `sader train --set`; guide.KEY=VALUE changes the runs of the guides instead."""
    tiny: bool = False
    """Synthetic data and tiny networks."""
    only: tuple[str, ...] = ()
    """Run only these rows; the table shows all finished ones."""
    report_only: bool = False
    """Write the tables of finished rows without running any."""
    sampler: str = "leak_free"
    split: str = "test"
    lists: str | None = None
    partial: bool = False
    coverage: str = "auto"
    draws: int = 1
    """Training series of each patch of SEN12MS-CR-TS."""
    limit: int | None = None
    """Scored items per place."""
    lpips: bool | None = None
    examples: int = 3
    """Items in the qualitative figure."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("limit", 1), ("draws", 1), ("examples", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; expected {least} or more.")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds is {self.seconds}; expected more than 0.")


@dataclass(frozen=True)
class Setting:
    """A request on one dataset: everything that its rows share."""

    request: ReproduceRequest
    dataset: str
    """A public dataset, or `plans.HERE`."""
    root: Path | None = None
    """Folder of the public dataset."""
    shards: tuple[str, ...] = ()
    """With HERE: shards to train on."""
    validation: tuple[str, ...] = ()
    """With HERE: shards to score on."""
    guide_root: Path | None = None
    """Folder of EuroSAT-MS; None: guides are trained on the targets of the dataset."""

    @property
    def out(self) -> Path:
        """The folder of runs, rows and tables."""
        return Path(self.request.out)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that are scored."""
        return ("clean", "paper") if self.dataset == HERE else ("paper",)

    @property
    def label(self) -> str:
        """The name of the dataset's folder; each sampler has its own."""
        sampler = self.request.sampler
        return self.dataset if self.dataset == HERE or sampler == "leak_free" else f"{self.dataset}-{sampler}"

    @property
    def budget(self) -> str:
        """The budget of every system, in words."""
        request = self.request
        parts = [f"{request.seconds:g} s of training"] if request.seconds else []
        parts += [f"{request.steps} steps"] if request.steps else []
        return " and at most ".join(parts) + " for each system" if parts else "each system's own number of epochs"

    @property
    def scored(self) -> DataRequest:
        """The data that is scored."""
        request = self.request
        if self.dataset == HERE:
            paths = tuple(Path(path) for path in self.validation)
            return DataRequest(paths, split="all", limit=request.limit, seed=request.seed)
        assert self.root is not None
        return DataRequest(
            (self.root,),
            dataset=self.dataset,
            split=request.split,
            sampler=request.sampler,
            lists=request.lists,
            partial=request.partial,
            coverage=request.coverage,
            limit=request.limit,
            seed=request.seed,
        )

    @property
    def scored_key(self) -> dict[str, Any]:
        """Everything the scores of a row depend on besides its weights."""
        request, data = self.request, asdict(self.scored)
        if self.dataset == HERE:
            data["data"] = fingerprint(self.validation)
        else:
            # Of a coverage table the values, of a partial dataset the places on disk.
            data |= {"data": [self.root and self.root.name], "coverage": None, "facts": open_data(self.scored).facts}
        return {**data, "examples": request.examples, "tiny": request.tiny, "lpips": request.lpips}


def tiny_setting(setting: Setting) -> Setting:
    """Return the setting on synthetic data, with two training steps unless another budget is given."""
    request, folder = setting.request, setting.out / "data" / setting.dataset
    with locked(folder.with_suffix(".lock"), wait=True):
        write_data(setting.dataset, folder)
    request = replace(request, steps=request.steps if request.seconds or request.steps else 2)
    if setting.dataset == HERE:
        shards, validation = (str(folder / "train"),), (str(folder / "validation"),)
        return replace(setting, request=replace(request, limit=2), shards=shards, validation=validation)
    images = setting.out / "data" / EUROSAT
    with locked(images.with_suffix(".lock"), wait=True):
        write_data(EUROSAT, images)
    request = replace(request, partial=True, examples=min(request.examples, 2))
    return replace(setting, request=request, root=folder, guide_root=images)


def training_set(setting: Setting) -> PublicDataset:
    """Return the training split of the setting's public dataset."""
    request = setting.request
    assert setting.root is not None
    options = ReadOptions(lists=request.lists, partial=request.partial, coverage=request.coverage, draws=request.draws)
    sampler = training_sampler(setting.dataset, request.sampler)
    return open_dataset(setting.root, dataset=setting.dataset, split="train", sampler=sampler, options=options)


@lru_cache(maxsize=4)
def scored_items(setting: Setting, task: str) -> tuple[Sequence[Item], str, dict[str, Any]]:
    """Return the items of a task, the protocol and the facts of the data."""
    data = open_data(setting.scored)
    items = data.items(task, SCORED_BANDS[setting.dataset], HELPING_BANDS[setting.dataset])
    return items, data.protocol, {**data.facts, "items": len(items)}


def check_data(setting: Setting) -> None:
    """Raise for data that cannot be used, before anything is trained."""
    if setting.dataset != HERE:
        training_set(setting).check()
        dataset = open_data(setting.scored).dataset
        assert dataset is not None
        dataset.check()
        return
    if not setting.shards or not setting.validation:
        missing = "--data" if not setting.shards else "--validation"
        raise DataError(f"no {missing} given; the plan here trains on --data SHARDS and scores on --validation SHARDS.")
    for path in (*setting.shards, *setting.validation):
        if not Path(path).exists():
            raise DataError(f"{path} does not exist; expected shards (write them with: sader data pack).")
    train = {(record.source, record.name) for record in load_records(setting.shards, split="all")}
    held = load_records(setting.validation, split="all")
    both = sorted(f"{r.source}/{r.name}" for r in held if (r.source, r.name) in train)
    if both:
        raise DataError(f"{len(both)} places are in both --data and --validation ({both[0]}); expected none in both.")


def digest(values: dict[str, Any]) -> str:
    """Return a key of `values`."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
