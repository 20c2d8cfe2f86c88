"""The training runs of a plan: trained, resumed where they were interrupted, or reused where they are finished.

A finished run records a key of everything it was trained from, so that no stale run is reused. The plan `here` trains
every system alike (`here_recipe`); the paper's tables train each system as published.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sader.bands import BANDS_13
from sader.baselines.baseline import BaselineModelConfig
from sader.checkpoint import shipped_guide
from sader.data.plan import MakerSettings
from sader.data.public.registry import DATASETS
from sader.data.public.splits import RANDOM
from sader.data.shards import fingerprint
from sader.errors import ConfigError
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import HERE, PlanRow, RunSpec
from sader.evaluation.reproduce.setting import EUROSAT, TINY_TRAIN, Setting, digest, tiny_overrides, training_set
from sader.files import file_digest, locked, write_atomically
from sader.models import BASELINES, PRESETS, get_preset, get_system

ENDLESS = 10_000_000
"""Steps of a run that only a time limit ends."""
SHORT = 300.0
"""Runs of at most this many seconds write no intermediate states: an interrupted one starts again."""
GUIDE_SHARE = 0.25
"""Part of a system's training time that a guide of the resampling gets in the plan `here`."""
GUIDE_KEY = "guide."
"""Start of the keys of --set that change the guides."""
LEAST_RATE = 2e-4
"""Smallest peak learning rate in the plan `here`; lower ones were published for days of training."""
HERE_BATCH = {"ctgan": ("train.crop=256", "train.batch_size=4"), "crtsnet": ("train.batch_size=4",)}
"""CTGAN has the fixed size 256 (the same pixels a step); CR-TS Net costs 7.5 TMAC a series."""


def here_recipe(base: str) -> list[str]:
    """Return the changes with which the plan `here` trains a system; loss and optimiser are the system's own.

    Crops of 128 pixels, 4 dates, 16 series a step (`HERE_BATCH` has the exceptions). The learning rate rises for 2 % of
    the time, then follows a cosine to 1 % of its peak: the published one, at least `LEAST_RATE`.
    """
    changes = ["crop=128", "dates=4", "batch_size=16", "schedule=cosine", "warmup=0.02"]
    if base in PRESETS:
        return [*_product_settings(base), *(f"train.{text}" for text in changes)]
    if base in BASELINES:
        rate = max(float(get_system(base).train["adam_lr"]), LEAST_RATE)
        changes += [f"adam_lr={rate:g}", "epochs=null", "precision=auto"]
    return [*(f"train.{text}" for text in changes), *HERE_BATCH.get(base, ())]


def _product_settings(base: str) -> list[str]:
    """Return the changes from a preset's own training settings and batches to the defaults."""
    from sader.training.config import TrainConfig, recipe

    own = recipe(get_preset(base))
    return _changes("train", own.train, TrainConfig()) + _changes("data.maker", own.data.maker, MakerSettings())


def _changes(part: str, before: Any, after: Any) -> list[str]:
    """Return the overrides that lead from one config to another of the same kind."""
    first, second = dataclasses.asdict(before), dataclasses.asdict(after)
    return [f"{part}.{key}={json.dumps(value)}" for key, value in second.items() if value != first[key]]


def training_shards(setting: Setting) -> tuple[str, ...]:
    """Return the shards to train on, packed from the public dataset on first use."""
    if setting.dataset == HERE:
        return setting.request.data
    from sader.data.pack import pack_dataset

    train = training_set(setting)
    folder = _packed_once(setting, setting.label, train.facts, lambda folder: pack_dataset(train, folder, step=1))
    return (str(folder / "train"),)


def _packed_once(setting: Setting, name: str, facts: Any, pack: Callable[[Path], object]) -> Path:
    """Return the folder of some shards; `pack(folder)` is called unless it was with the same facts."""
    folder, text = setting.out / "shards" / name, json.dumps(facts, default=str)
    done = folder / "packed.json"
    with locked(folder.with_suffix(".lock"), wait=True):
        if not done.is_file() or done.read_text(encoding="utf-8") != text:
            pack(folder)
            write_atomically(done, text.encode())
    return folder


def guide_shards(setting: Setting) -> tuple[str, ...]:
    """Return the shards to train guides on: EuroSAT-MS, packed on first use, or those of the dataset."""
    if setting.guide_root is None:
        return training_shards(setting)
    from sader.data.pack import pack_sources

    root = setting.guide_root
    facts = {path.name: path.stat().st_size for path in sorted(root.glob("*/*.tif"))}

    def pack(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        pack_sources([f"eurosatms:{root}"], folder, bands=BANDS_13, step=1, split="none")

    return (str(_packed_once(setting, EUROSAT, facts, pack)),)


def run_overrides(setting: Setting, spec: RunSpec) -> list[str]:
    """Return every change to the run config of `spec`: network, data, budget, and the user's own."""
    request, changes = setting.request, list(spec.overrides)
    if setting.dataset == HERE:
        changes += here_recipe(spec.base)
    else:
        # As published: the dataset's own series with nothing added, those of Sen2_MTC_New rotated and mirrored.
        maker = MakerSettings.paper(symmetries=setting.dataset == paper.SEN2)
        changes += [*_changes("data.maker", MakerSettings(), maker), "train.crop=256", "train.dates=3"]
        if RANDOM in DATASETS[setting.dataset].samplers:
            changes.append(f"data.draws={request.draws}")
    if request.tiny:
        changes += tiny_overrides(spec.base)
        if spec.base == "small":
            changes.append("train.dates=4")
    changes += [f"train.seed={request.seed}", "train.validate_every=0", *_budget(setting)]
    if not request.tiny:
        brief = request.seconds is not None and request.seconds <= SHORT
        changes += [f"train.checkpoint_every={ENDLESS if brief else 200}", "train.checkpoint_seconds=600"]
    return [*changes, *(text for text in request.overrides if not text.startswith(GUIDE_KEY))]


def _budget(setting: Setting, share: float = 1.0) -> list[str]:
    seconds, steps = setting.request.seconds, setting.request.steps
    if seconds is None:
        return [] if steps is None else [f"train.steps={steps}"]
    return [f"train.max_seconds={seconds * share:g}", f"train.steps={steps or ENDLESS}"]


def train_run(setting: Setting, spec: RunSpec) -> Path:
    """Return the weights of a run, trained or resumed where it is not finished."""
    from sader.training.run import MODEL_FILE, run_training

    shards, overrides = training_shards(setting), run_overrides(setting, spec)
    key = digest({"base": spec.base, "overrides": overrides, "shards": fingerprint(shards)})

    def train(folder: Path, resume: bool) -> None:
        run_training(spec.base, folder, data=shards, overrides=overrides, resume=resume, progress=False)

    return _finished_run(setting, spec.name, MODEL_FILE, key, train)


def train_guide(setting: Setting, kind: str, bands: Sequence[str]) -> Path:
    """Return the weights of a guide of the resampling (mae or conv)."""
    from sader.training.guide import GUIDE_FILE, run_guide

    form, overrides = guide_changes(setting, kind)
    shards = guide_shards(setting)
    key = digest({"kind": form, "bands": list(bands), "overrides": overrides, "shards": fingerprint(shards)})

    def train(folder: Path, resume: bool) -> None:
        run_guide(shards, folder, kind=form, bands=",".join(bands), overrides=overrides, resume=resume, progress=False)

    return _finished_run(setting, f"guide-{kind}", GUIDE_FILE, key, train)


def guide_changes(setting: Setting, kind: str) -> tuple[str, list[str]]:
    """Return the form of a guide in `sader pretrain-guide` and the changes to its config.

    The paper's tables train guides as published, on EuroSAT-MS; without it, on whole targets of the dataset.
    """
    from sader.training.guide import recipe_of

    request = setting.request
    form = kind if request.tiny or setting.dataset == HERE else "mae-paper" if kind == "mae" else kind
    share = GUIDE_SHARE if setting.dataset == HERE else 1.0
    changes = [f"train.seed={request.seed}", *_budget(setting, share)]
    if form == "conv" and setting.dataset != HERE and not request.tiny:
        published = recipe_of("mae-paper")
        changes = [*_changes("train", recipe_of("conv").train, published.train), *changes]
        changes = [f"size={published.size}", f"rates={list(published.rates)}", "altered=false", *changes]
    if setting.dataset != HERE and not request.tiny and setting.root is not None and setting.guide_root is None:
        changes += ["train.crop=256", "size=null"]
    if request.tiny:
        changes += [text for text in TINY_TRAIN if not text.startswith("train.dates")]
    own = [text.removeprefix(GUIDE_KEY) for text in request.overrides if text.startswith(GUIDE_KEY)]
    return form, [*changes, *own]


def needed_guide(setting: Setting, row: PlanRow) -> tuple[str, tuple[str, ...]] | None:
    """Return (kind, bands) of the guide that must be trained for a row; None where it needs none or one is shipped.

    The shipped guide was trained on other places than the user's shards. For the paper's tables a guide is trained.
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


def _finished_run(setting: Setting, name: str, file: str, key: str, train: Callable[[Path, bool], None]) -> Path:
    """Return the file of a run; `train(folder, resume)` is called where the run is not finished."""
    from sader.training.record import FOLDER
    from sader.training.run import CONFIG_FILE

    folder = setting.out / "runs" / setting.label / name
    weights = folder / file
    with locked(folder.with_name(f"{folder.name}.lock"), wait=True):
        if _is_finished(folder, key, weights):
            return weights
        resume = (folder / CONFIG_FILE).is_file()
        train(folder, resume)
        done = {"key": key, "sha256": file_digest(weights)}
        write_atomically(folder / "done.json", json.dumps(done).encode())
        # States are needed for resuming only; those of the largest baseline take ten gigabytes.
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return weights


def _is_finished(folder: Path, key: str, weights: Path) -> bool:
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
