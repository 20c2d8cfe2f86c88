"""The training runs of a plan: trained, gone on with where they were interrupted, or as they are.

A run is guarded by a file lock that dies with its process, and says what it was made from, so that nothing stale is
taken for done. The plan `here` trains every system alike (`here_recipe`); the others as published.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sader.baselines.baseline import BaselineModelConfig
from sader.checkpoint import shipped_guide
from sader.errors import ConfigError
from sader.evaluation.reproduce.made import TRAIN, tiny_overrides
from sader.evaluation.reproduce.plans import HERE, PlanRow, RunSpec
from sader.evaluation.reproduce.setting import Setting, digest, file_digest, locked, open_part
from sader.files import write_atomically
from sader.models import BASELINES

ENDLESS = 10_000_000
"""Steps of a run that only time ends."""
SHORT = 300.0
"""Seconds up to which a run keeps no states on its way: killed, it starts again, which costs less than writing them."""
GUIDE_SHARE = 0.25
"""Part of the seconds of a system that a guide of the resampling gets: a small network that sees single images."""
LEAST_RATE = 2e-4
"""Peak rates below this were published for days of training; the plan here raises them to it."""
HERE_BATCH = {"ctgan": ("train.crop=256", "train.batch_size=4"), "crtsnet": ("train.batch_size=4",)}
"""CTGAN knows one size, 256 (the same pixels a step); CR-TS Net costs 7.5 TMAC a series (steps of a second)."""
_PAPER_TASK = tuple(
    f"data.maker.{text}"
    for text in (
        "tasks=[0, 1, 0]", "fewer_dates=0", "extra_clouds=0", "heavy=0", "rescale=0", "jitter=0", "band_dropout=[]",
        "wanted_clear=0",
    )
)  # fmt: skip
"""Training as published: the dataset's own series, turned and mirrored, with nothing added."""


def here_recipe(base: str) -> list[str]:
    """Return how the plan here trains a system: the same batches and schedule for all, loss and optimiser its own.

    Crops of 128 pixels, 4 dates, 16 series a step (`HERE_BATCH` names the exceptions); 2 % of the time the rate rises,
    then it falls along a cosine to 1 % of its peak: the published one, at least `LEAST_RATE`. Steps are recorded as
    CUDA graphs where a system can be (`Baseline.recordable`): each trains as fast as this package trains it.
    """
    changes = ["crop=128", "dates=4", "batch_size=16", "schedule=cosine", "warmup=0.02"]
    if base in BASELINES:
        rate = max(float(BASELINES[base].train["adam_lr"]), LEAST_RATE)
        changes.append(f"adam_lr={rate:g}")
    return [*(f"train.{text}" for text in changes), *HERE_BATCH.get(base, ())]


def training_shards(setting: Setting) -> tuple[str, ...]:
    """Return the shards to train on, packed from the public dataset the first time."""
    if setting.dataset == HERE:
        return setting.shards
    from sader.data.pack import pack_dataset

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
    if setting.dataset == HERE:
        changes += here_recipe(spec.base)
    else:
        changes += [*_PAPER_TASK, "train.crop=256", "train.dates=3"]
    if setting.tiny:
        changes += tiny_overrides(spec.base)
        if spec.base == "small":
            changes.append("train.dates=4")
    changes += [f"train.seed={setting.seed}", "train.validate_every=0", *_budget(setting)]
    if not setting.tiny:
        brief = setting.seconds is not None and setting.seconds <= SHORT
        changes.append(f"train.checkpoint_every={ENDLESS if brief else 200}")
    return [*changes, *setting.overrides]


def _budget(setting: Setting, share: float = 1.0) -> list[str]:
    if setting.seconds is None:
        return [] if setting.steps is None else [f"train.steps={setting.steps}"]
    return [f"train.max_seconds={setting.seconds * share:g}", f"train.steps={setting.steps or ENDLESS}"]


def train_run(setting: Setting, spec: RunSpec, *, progress: bool = False) -> Path:
    """Return the weights of a run: trained, gone on with where it was interrupted, or as they are."""
    from sader.training.launch import run_training
    from sader.training.run import MODEL_FILE

    shards, overrides = training_shards(setting), run_overrides(setting, spec)
    key = digest({"base": spec.base, "overrides": overrides, "shards": list(shards)})

    def train(folder: Path, resume: bool) -> None:
        run_training(spec.base, folder, data=shards, overrides=overrides, resume=resume, progress=progress)

    return _made_once(setting, spec.name, MODEL_FILE, key, train)


def guide_name(kind: str) -> str:
    """Return the name of the run of a guide."""
    return f"guide-{kind}"


def train_guide(setting: Setting, kind: str, bands: Sequence[str], *, progress: bool = False) -> Path:
    """Return the weights of a guide of the resampling (mae or conv), trained on the same data."""
    from sader.training.guide import GUIDE_FILE, run_guide

    form = kind if setting.tiny or setting.dataset == HERE or kind == "conv" else "mae-paper"
    shards = training_shards(setting)
    overrides = [f"train.seed={setting.seed}", *_budget(setting, GUIDE_SHARE if setting.dataset == HERE else 1.0)]
    overrides += [text for text in TRAIN if not text.startswith("train.dates")] if setting.tiny else []
    key = digest({"kind": form, "bands": list(bands), "overrides": overrides, "shards": list(shards)})

    def train(folder: Path, resume: bool) -> None:
        run_guide(
            shards, folder, kind=form, bands=",".join(bands), overrides=overrides, resume=resume, progress=progress
        )

    return _made_once(setting, guide_name(kind), GUIDE_FILE, key, train)


def needed_guide(setting: Setting, row: PlanRow) -> tuple[str, tuple[str, ...]] | None:
    """Return (kind, bands) of the guide that has to be trained for a row; None where it needs none or one is shipped.

    The shipped guide saw other places than the shards at hand; for the paper's tables one is trained on the dataset.
    """
    from sader.training.config import resolve

    if row.run is None or row.guide not in ("mae", "conv"):
        return None
    if row.steps is None or "+" not in row.steps or row.steps.endswith("+0"):
        return None
    model = resolve(row.run.base, run_overrides(setting, row.run)).model
    if isinstance(model, BaselineModelConfig):
        return None
    bands = tuple(model.network.bands)
    if setting.dataset == HERE and shipped_guide(row.guide, bands) is not None:
        return None
    return row.guide, bands


def training_facts(weights: Path) -> dict[str, Any]:
    """Return what `done.json` beside the weights of a finished run says of its training."""
    found = json.loads((weights.parent / "done.json").read_text(encoding="utf-8"))
    return {"trained_at_once": found.get("at_once", 1)}


def _made_once(setting: Setting, name: str, file: str, key: str, train: Callable[[Path, bool], None]) -> Path:
    """Return the file of a run, made by `train(folder, resume)` unless it is there already."""
    from sader.training.run import CONFIG_FILE
    from sader.training.state import FOLDER, drop_partial_files

    folder = setting.out / "runs" / setting.label / name
    weights = folder / file
    with locked(folder.with_name(f"{folder.name}.lock")):
        if _finished(folder, key, weights):
            return weights
        resume = (folder / CONFIG_FILE).is_file()
        if folder.is_dir() and not resume:
            drop_partial_files(folder)  # killed before its config was whole
        train(folder, resume)
        done = {"key": key, "sha256": file_digest(weights), "at_once": setting.workers}
        write_atomically(folder / "done.json", json.dumps(done).encode())
        # States are for going on; those of the largest baseline alone fill ten gigabytes.
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
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
    return weights.is_file() and found.get("sha256") == file_digest(weights)
