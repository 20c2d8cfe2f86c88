"""One row of a plan: train what it needs (resumed or skipped), score it, keep the result in its folder.

Safe to kill at any moment and to run in several processes: a training run is guarded by a file lock that dies with its
process, results are whole files, and each says what it was made from, so that nothing stale is taken for done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sader.baselines.protocol import RivalModelConfig
from sader.checkpoint import read_header, shipped_guide, write_atomically
from sader.data.datasets import open_dataset
from sader.data.public import PublicDataset, ReadOptions
from sader.errors import ConfigError, DataError, OutputError
from sader.evaluation.bench import Bench, load_bench, run_bench, save_bench
from sader.evaluation.made import TRAIN, make_data, tiny_overrides
from sader.evaluation.methods import RemoverMethod, make_method
from sader.evaluation.plans import HELPING_BANDS, HERE, SCORED_BANDS, PlanRow, RunSpec
from sader.evaluation.run import EvaluationRequest, load_records, lpips_installed, open_items
from sader.evaluation.scoring import DEFAULT_METRICS, Method
from sader.pipeline import CloudRemover, RemoverOptions

NEEDS_DAYS = frozenset({"linear_in_time"})
"""Classical methods left out where a date has no day."""
ENDLESS = 10_000_000
"""Steps of a run that only time ends."""
_PAPER_TASK = tuple(
    f"data.maker.{text}"
    for text in (
        "tasks=[0, 1, 0]", "fewer_dates=0", "extra_clouds=0", "heavy=0", "rescale=0", "jitter=0", "band_dropout=[]",
        "wanted_clear=0",
    )
)  # fmt: skip
"""Training as published: the dataset's own series, turned and mirrored, with nothing added."""


@dataclass(frozen=True)
class Setting:
    """Everything that rows of one dataset share."""

    dataset: str
    """A public dataset, or `plans.HERE`."""
    root: Path | None
    """Folder of the public dataset."""
    out: Path
    shards: tuple[str, ...] = ()
    """With HERE: shards to train on."""
    validation: tuple[str, ...] = ()
    """With HERE: shards to score on."""
    seconds: float | None = None
    steps: int | None = None
    tiny: bool = False
    sampler: str = "leak_free"
    split: str = "test"
    lists: str | None = None
    partial: bool = False
    coverage: str = "auto"
    limit: int | None = None
    """Items per place."""
    lpips: bool | None = None
    examples: int = 3
    seed: int = 0
    overrides: tuple[str, ...] = ()
    """Changes to every run, as in `sader train --set`."""

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
    folder = make_data(setting.dataset, setting.out / "made" / setting.dataset)
    few = setting if setting.seconds or setting.steps else replace(setting, steps=2)
    if setting.dataset == HERE:
        return replace(few, shards=(str(folder / "train"),), validation=(str(folder / "validation"),), limit=2)
    return replace(few, root=folder, partial=True, examples=min(setting.examples, 2))


# ---------------------------------------------------------------------------------------------- training


def training_shards(setting: Setting) -> tuple[str, ...]:
    """Return the shards to train on, packed from the public dataset the first time."""
    if setting.dataset == HERE:
        return setting.shards
    from sader.data.readers import pack_dataset

    folder = setting.out / "shards" / setting.label
    done = folder / "packed.json"
    train = open_part(setting, "train")
    facts = {key: train.facts[key] for key in ("dataset", "split", "sampler", "series", "lists_sha256")}
    with locked(folder.with_suffix(".lock")):
        if not done.is_file() or json.loads(done.read_text(encoding="utf-8")) != facts:
            pack_dataset(train, folder, step=1)
            write_atomically(done, json.dumps(facts).encode())
    return (str(folder / "train"),)


def run_overrides(setting: Setting, spec: RunSpec) -> list[str]:
    """Return every change to the run config of `spec`: network, data, budget, and what the user adds."""
    changes = list(spec.overrides)
    if setting.dataset != HERE:
        changes += [*_PAPER_TASK, "train.crop=256", "train.dates=3"]
    if setting.tiny:
        changes += tiny_overrides(spec.base)
        if spec.base == "small":
            changes.append("train.dates=4")
    changes += [f"train.seed={setting.seed}", "train.validate_every=0", *_budget(setting)]
    changes += [] if setting.tiny else ["train.checkpoint_every=200"]
    return [*changes, *setting.overrides]


def _budget(setting: Setting) -> list[str]:
    if setting.seconds is None:
        return [] if setting.steps is None else [f"train.steps={setting.steps}"]
    return [f"train.max_seconds={setting.seconds:g}", f"train.steps={setting.steps or ENDLESS}"]


def train_run(setting: Setting, spec: RunSpec, *, progress: bool = False) -> Path:
    """Return the weights of a run: trained, gone on with where it was interrupted, or as they are."""
    from sader.training.launch import run_training
    from sader.training.run import CONFIG_FILE, MODEL_FILE
    from sader.training.state import drop_partial_files

    shards, overrides = training_shards(setting), run_overrides(setting, spec)
    folder = setting.out / "runs" / setting.label / spec.name
    key = _digest({"base": spec.base, "overrides": overrides, "shards": list(shards)})
    with locked(folder.with_name(f"{folder.name}.lock")):
        weights = folder / MODEL_FILE
        if _finished(folder, key, weights):
            return weights
        if folder.is_dir() and not (folder / CONFIG_FILE).is_file():
            drop_partial_files(folder)  # killed before its config was whole
        resume = (folder / CONFIG_FILE).is_file()
        run_training(spec.base, folder, data=shards, overrides=overrides, resume=resume, progress=progress)
        _finish(folder, key, weights)
    return weights


def train_guide(setting: Setting, kind: str, bands: Sequence[str], *, progress: bool = False) -> Path:
    """Return the weights of a guide of the resampling (mae or conv), trained on the same data and budget."""
    from sader.training.guide import CONFIG_FILE, GUIDE_FILE, run_guide
    from sader.training.state import drop_partial_files

    form = kind if setting.tiny or setting.dataset == HERE or kind == "conv" else "mae-paper"
    shards = training_shards(setting)
    overrides = [f"train.seed={setting.seed}", *_budget(setting)]
    overrides += [text for text in TRAIN if not text.startswith("train.dates")] if setting.tiny else []
    folder = setting.out / "runs" / setting.label / f"guide-{kind}"
    key = _digest({"kind": form, "bands": list(bands), "overrides": overrides, "shards": list(shards)})
    with locked(folder.with_name(f"{folder.name}.lock")):
        weights = folder / GUIDE_FILE
        if _finished(folder, key, weights):
            return weights
        if folder.is_dir() and not (folder / CONFIG_FILE).is_file():
            drop_partial_files(folder)
        resume = (folder / CONFIG_FILE).is_file()
        run_guide(
            shards, folder, kind=form, bands=",".join(bands), overrides=overrides, resume=resume, progress=progress
        )
        _finish(folder, key, weights)
    return weights


def _finished(folder: Path, key: str, weights: Path) -> bool:
    try:
        found = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if found.get("key") != key:
        raise ConfigError(
            f"{folder} was trained with another budget, data or network. Use the old options, another --out, or remove "
            "that folder."
        )
    return weights.is_file() and found.get("sha256") == _sha256(weights)


def _finish(folder: Path, key: str, weights: Path) -> None:
    write_atomically(folder / "done.json", json.dumps({"key": key, "sha256": _sha256(weights)}).encode())


# ---------------------------------------------------------------------------------------------- scoring


def row_folder(setting: Setting, row: PlanRow, task: str) -> Path:
    """Return where the scores of a row lie."""
    return setting.out / "rows" / setting.label / task / row.name


def run_row(setting: Setting, row: PlanRow, *, progress: bool = False) -> bool:
    """Train and score one row; returns False where everything was there already."""
    methods, made_of = row_methods(setting, row, progress=progress)
    fresh = False
    for task in setting.tasks:
        folder = row_folder(setting, row, task)
        key = _digest({**made_of, "scored_on": _scored_on(setting), "task": task})
        found = load_bench(folder)
        if found is not None and found.facts.get("key") == key:
            continue
        items, protocol, facts = scored_items(setting, task)
        metrics = [*DEFAULT_METRICS]
        if lpips_installed() if setting.lpips is None else setting.lpips:
            metrics.append("lpips")
        dated = all(item.days is not None for item in (items if isinstance(items, list) else items[:1]))
        usable = {name: method for name, method in methods.items() if dated or name not in NEEDS_DAYS}
        bench = run_bench(items, usable, metrics, protocol=protocol, examples=setting.examples)
        facts |= {"key": key, "row": row.name, "title": row.title, "budget": setting.budget, **made_of}
        save_bench(replace(bench, facts=facts), folder)
        fresh = True
    return fresh


def row_methods(setting: Setting, row: PlanRow, *, progress: bool = False) -> tuple[dict[str, Method], dict[str, Any]]:
    """Return label -> method of a row, and what it was made from, for its record."""
    if row.run is None:
        return {name: make_method(name) for name in row.methods}, {"methods": list(row.methods)}
    weights = train_run(setting, row.run, progress=progress)
    header = read_header(weights)
    card = header.get("card", {})
    made: dict[str, Any] = {
        "run": row.run.name, "base": row.run.base, "overrides": run_overrides(setting, row.run),
        "weights_sha256": _sha256(weights), "steps": row.steps, "guide": row.guide,
        "trained_steps": card.get("steps"), "trained_seconds": card.get("seconds"),
        "series_seen": card.get("series_seen"), "device": card.get("device"),
    }  # fmt: skip
    options = RemoverOptions(guide=row.guide)
    remover = CloudRemover.from_pretrained(weights, options=options)
    resamples = row.steps is not None and "+" in row.steps and not row.steps.endswith("+0")
    if resamples and row.guide in ("mae", "conv") and not isinstance(remover.config, RivalModelConfig):
        # The shipped guide saw other places than these; for other bands or kinds one is trained here.
        shipped = shipped_guide(row.guide, remover.bands) if setting.dataset == HERE else None
        guide = shipped or train_guide(setting, row.guide, remover.bands, progress=progress)
        made["guide_sha256"] = _sha256(guide)
        remover = CloudRemover.from_pretrained(weights, options=replace(options, guide_weights=str(guide)))
    return {row.title: RemoverMethod(remover, mask="true", steps=row.steps)}, made


def scored_items(setting: Setting, task: str) -> tuple[Any, str, dict[str, Any]]:
    """Return the items, the protocol and the facts of the data."""
    bands, others = SCORED_BANDS[setting.dataset], HELPING_BANDS[setting.dataset]
    request = EvaluationRequest(models=(), data=(), task=task, limit=setting.limit, seed=setting.seed)
    if setting.dataset == HERE:
        where = [Path(path) for path in setting.validation]
        records = list(load_records(where, split="all"))
        items = open_items(request, None, records, tuple(bands))
        facts: dict[str, Any] = {"data": [path.name for path in where], "items": len(items)}
        return items, "reflectance", facts
    dataset = open_part(setting, setting.split).limited(setting.limit, seed=setting.seed)
    return open_items(request, dataset, [], tuple(bands), others), dataset.request.protocol, dict(dataset.facts)


def _scored_on(setting: Setting) -> dict[str, Any]:
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


def load_row(setting: Setting, row: PlanRow, task: str) -> Bench | None:
    """Return the scores of a row, or None where it has not been run."""
    return load_bench(row_folder(setting, row, task))


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


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
