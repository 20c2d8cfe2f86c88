"""`sader reproduce TABLE`: train the runs that are missing, score the rows, write the tables.

Each row is trained and scored on its own and kept in its folder: an interrupted command continues with the rows that
are missing. Every result records a key of everything it depends on, so that no stale result is reused. `dry_run` lists
settings, samples, epochs and hours of every run without training.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sader.baselines.baseline import BaselineModelConfig
from sader.checkpoint import read_header
from sader.config import to_dict
from sader.data.pack import is_eurosat_ms
from sader.data.public.registry import DATASETS, recognise
from sader.errors import ConfigError, DataError, SaderError, check_known, did_you_mean
from sader.evaluation.costs import model_cost
from sader.evaluation.evaluate import chosen_metrics, score_methods
from sader.evaluation.methods import RemoverMethod, make_method
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import COMPLEXITY, HERE, LOSS_MASKS, TABLES, PlanRow, RunSpec, Table, get_tables
from sader.evaluation.reproduce.setting import (
    EUROSAT,
    Setting,
    check_data,
    digest,
    scored_items,
    tiny_setting,
    training_set,
)
from sader.evaluation.reproduce.tables import failure_file, row_folder, write_complexity, write_loss_masks, write_table
from sader.evaluation.reproduce.training import (
    guide_changes,
    guide_shards,
    needed_guide,
    run_overrides,
    train_guide,
    train_run,
    training_shards,
)
from sader.evaluation.request import ReproduceRequest
from sader.evaluation.scoring import Method, load, save
from sader.files import file_digest, write_atomically
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.models import BASELINES, AnyModelConfig, get_system
from sader.training.config import RunConfig, TrainConfig, flat, in_steps, resolve
from sader.training.guide import GuideRunConfig, resolve_guide

Notify = Callable[[str], None]
NEEDS_DAYS = frozenset({"linear_in_time"})
"""Classical methods that need the acquisition day of every date."""


@dataclass(frozen=True)
class Outcome:
    """The written files and tables, and the rows that failed."""

    files: list[Path] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The tables in Markdown."""
    failed: dict[str, str] = field(default_factory=dict)
    """Row -> reason."""


def list_plans() -> list[tuple[str, str, list[str]]]:
    """Return (table, description, rows) of every plan."""
    lines = []
    for table in TABLES.values():
        names = list(dict.fromkeys(row.name for rows in table.rows.values() for row in rows))
        where = ", ".join(table.rows) or "no data needed"
        lines.append((table.name, f"{table.number}: {table.title} ({where})", names))
    return lines


def run_reproduce(request: ReproduceRequest, notify: Notify = lambda text: None) -> Outcome:
    """Run the rows that are not done and write every table; a row that fails is reported and the others continue.

    Wrong names, folders and files raise before anything is trained.
    """
    tables = get_tables(request.tables)
    settings = find_settings(request, tables)
    work = list(plan_rows(request, tables, settings))
    outcome = Outcome()
    if not request.report_only:
        for setting in settings.values():
            check_data(setting)
            if any(where is setting and row.run is not None for where, row in work):
                training_shards(setting)  # an unreadable image fails here once, not in every row
            if any(where is setting and needed_guide(setting, row) for where, row in work):
                guide_shards(setting)
        _run_rows(work, outcome, notify)
    for table in tables:
        write = write_loss_masks if table.name == LOSS_MASKS else write_table
        present = [settings[dataset] for dataset in table.rows if dataset in settings]
        parts = [write(setting, table, request.out / table.name / setting.label) for setting in present]
        if table.name == COMPLEXITY:
            parts = [write_complexity(request.out / table.name, table)]
        for files, text in parts:
            outcome.files.extend(files)
            outcome.texts.append(text)
    return outcome


def plan_rows(
    request: ReproduceRequest, tables: Sequence[Table], settings: dict[str, Setting]
) -> Iterator[tuple[Setting, PlanRow]]:
    """Yield the rows to run, each once, in the order of the tables."""
    known = {row.name for table in tables for rows in table.rows.values() for row in rows}
    for name in request.only:
        if name not in known:
            raise ConfigError(f"no row {name!r} in {', '.join(request.tables)}{did_you_mean(name, known)}")
    seen = set()
    for table in tables:
        for dataset, rows in table.rows.items():
            for row in rows:
                wanted = dataset in settings and (not request.only or row.name in request.only)
                if wanted and (dataset, row.name) not in seen:
                    seen.add((dataset, row.name))
                    yield settings[dataset], row


# --------------------------------------------------------------------------------------------- rows


def _run_rows(work: Sequence[tuple[Setting, PlanRow]], outcome: Outcome, notify: Notify) -> None:
    for number, (setting, row) in enumerate(work, 1):
        notify(f"[{number}/{len(work)}] {setting.label} {row.name}: {row.title}")
        try:
            run_row(setting, row)
        except (SaderError, torch.OutOfMemoryError) as error:
            outcome.failed[f"{setting.label}/{row.name}"] = str(error)
            reason = json.dumps({"row": row.name, "reason": str(error)})
            write_atomically(failure_file(setting, row), reason.encode())
            notify(f"    failed: {error}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_row(setting: Setting, row: PlanRow) -> bool:
    """Train and score one row; return False where it was finished already."""
    methods, origin = _row_methods(setting, row)
    _reset_arithmetic()
    fresh = False
    for task in setting.tasks:
        folder = row_folder(setting, row, task)
        key = digest({**origin, "scored_on": setting.scored_key, "task": task})
        found = load(folder)
        if found is not None and found.facts.get("key") == key:
            continue
        items, protocol, facts = scored_items(setting, task)
        dated = all(item.days is not None for item in (items if isinstance(items, list) else items[:1]))
        usable = {name: method for name, method in methods.items() if dated or name not in NEEDS_DAYS}
        examples = setting.request.examples
        metrics = chosen_metrics(setting.request.lpips)
        results = score_methods(items, usable, metrics, protocol=protocol, examples=examples, costs=True)
        facts = {**facts, "key": key, "row": row.name, "title": row.title, "budget": setting.budget, **origin}
        save(replace(results, facts=facts), folder)
        fresh = True
    failure_file(setting, row).unlink(missing_ok=True)
    return fresh


def _reset_arithmetic() -> None:
    """Restore PyTorch's defaults, which a training in this process may have changed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = False  # items have many sizes, and each would be benchmarked again


def _row_methods(setting: Setting, row: PlanRow) -> tuple[dict[str, Method], dict[str, Any]]:
    """Return label -> method of a row, and where it comes from: run, weights, sampling."""
    if row.run is None:
        return {name: make_method(name) for name in row.methods}, {"methods": list(row.methods)}
    weights = train_run(setting, row.run)
    card = read_header(weights).get("card", {})
    train = card.get("train", {})
    origin: dict[str, Any] = {
        "run": row.run.name,
        "base": row.run.base,
        "overrides": run_overrides(setting, row.run),
        "weights_sha256": file_digest(weights),
        "steps": row.steps,
        "guide": row.guide,
        "trained_steps": card.get("steps"),
        "trained_seconds": card.get("seconds"),
        "series_seen": card.get("series_seen"),
        "device": card.get("device"),
        "batch_size": train.get("batch_size"),
        "crop": train.get("crop"),
    }
    options = RemoverOptions(guide=row.guide)
    guide = needed_guide(setting, row)
    if guide is not None:
        file = train_guide(setting, *guide)
        origin["guide_sha256"] = file_digest(file)
        origin["guide_data"] = EUROSAT if setting.guide_root is not None else "targets of the training series"
        options = replace(options, guide_weights=str(file))
    remover = CloudRemover.from_pretrained(weights, options=options)
    return {row.title: RemoverMethod(remover, mask="true", steps=row.steps)}, origin


# --------------------------------------------------------------------------------------------- data


def find_settings(request: ReproduceRequest, tables: Sequence[Table], *, needs_data: bool = True) -> dict[str, Setting]:
    """Return dataset -> setting for all datasets of the tables; raise for a table without any data."""
    wanted = list(dict.fromkeys(dataset for table in tables for dataset in table.rows))
    if request.tiny:
        if request.data or request.validation:
            raise ConfigError("--tiny has its own data; leave out --data and --validation, or leave out --tiny.")
        plain = {dataset: Setting(request, dataset) for dataset in wanted}
        return {name: tiny_setting(setting) for name, setting in plain.items()} if needs_data else plain
    if HERE in wanted:
        if len(wanted) > 1:
            raise ConfigError("the plan here uses shards, the others public datasets; run here alone.")
        return {HERE: Setting(request, HERE)}
    if request.validation:
        raise ConfigError("--validation is for the plan here; a public dataset has its own splits. Leave it out.")
    series = [text for text in request.data if not text.startswith(f"{EUROSAT}:")]
    guides = [Path(text.partition(":")[2]) for text in request.data if text.startswith(f"{EUROSAT}:")]
    if guides and not is_eurosat_ms(guides[0]):
        wrong = "holds no CLASS/CLASS_1.tif" if guides[0].is_dir() else "is no folder"
        raise DataError(f"{guides[0]} {wrong}; expected EuroSAT-MS, 13-band GeoTIFFs. Get it at {EUROSAT_SOURCE}.")
    guide_root = guides[0] if guides else None
    found = {name: Setting(request, name, root=root, guide_root=guide_root) for name, root in map(_parse_data, series)}
    for table in tables:
        if needs_data and table.rows and not any(dataset in found for dataset in table.rows):
            names = " or ".join(f"--data {dataset}:FOLDER" for dataset in table.rows)
            given = f"got {', '.join(found)}" if found else "no data given"
            sources = "; ".join(f"{dataset}: {DATASETS[dataset].source}" for dataset in table.rows)
            needed = " or ".join(table.rows)
            raise DataError(f"{given}, but {table.name} needs {needed} ({sources}). Use {names}, or --tiny.")
    present = [name for name in wanted if name in found or not (needs_data or found)]
    return {name: found.get(name, Setting(request, name)) for name in present}


def _parse_data(text: str) -> tuple[str, Path]:
    """Return (dataset of the paper, folder) of NAME:FOLDER or FOLDER."""
    name, colon, rest = text.partition(":")
    if colon and len(name) > 1 and "/" not in name and "\\" not in name:
        check_known("dataset", name, DATASETS)
        folder = Path(rest)
    else:
        folder = Path(text)
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder; expected that of a public dataset, or NAME:FOLDER. Check --data.")
        name = recognise(folder)
    # The paper's East Asia figures use ROIs1868/73 alone, whatever the name of the folder.
    if name.startswith("sen12mscrts"):
        name = paper.TS
    if name not in (paper.SEN2, paper.TS):
        raise ConfigError(f"{name} is in none of the paper's tables; expected {paper.SEN2} or {paper.TS}.")
    return name, folder


UNKNOWN = "not known without --data"
DEVICE = "one H200, 256 px"
MEASURED = {"sen2_mtc_new": 43.0, "sen12mscrts_ea": 7.6, "mcgan": 38.6, "pix2pix": 53.5, "ae": 63.0, "cyclegan": 6.8}
MEASURED |= {"stgan": 1.8, "ctgan": 7.8, "pmaa": 24.3, "crtsnet": 0.7, "uncrtaints": 22.0, "diffcr": 37.5}
MEASURED |= {"emrdm": 42.4, "seqdms": 16.0}
"""Training samples per second on `DEVICE`: benchmarks/training_throughput.py, with --systems except `sen2_mtc_new`."""
REMARKS = {"sen2_mtc_new": " in bf16; float32 is slower", "stgan": " with its memory full: a lower bound"}
OTHER_NETWORK = " with the network of the preset; this run has other bands or parts"
GMACS = 361.6
"""One forward of `sen2_mtc_new`, from which the speed of systems that were not measured is estimated."""
STEPS = 30.0
"""Optimiser steps per second that the estimate does not exceed: launching limits small networks and batches."""
EUROSAT_IMAGES, EUROSAT_SOURCE = 27_000, "https://github.com/phelber/EuroSAT"


def dry_run(request: ReproduceRequest) -> list[str]:
    """Return for every run of the tables its samples, epochs, hours and settings, in the notation of --set."""
    tables = get_tables(request.tables)
    settings = find_settings(request, tables, needs_data=False)
    rows_of: dict[tuple[str, RunSpec], list[PlanRow]] = {}
    guides: dict[tuple[str, str], tuple[str, ...]] = {}
    for setting, row in plan_rows(request, tables, settings):
        if row.run is not None:
            rows_of.setdefault((setting.dataset, row.run), []).append(row)
            if guide := needed_guide(setting, row):
                guides[setting.dataset, guide[0]] = guide[1]
    texts = []
    for (dataset, spec), rows in rows_of.items():
        setting = settings[dataset]
        config = resolve(spec.base, run_overrides(setting, spec))
        series = len(training_set(setting)) // config.data.draws if setting.root else paper.TRAINING_SERIES.get(dataset)
        steps = [f" ({r.steps} steps" + f", guide {r.guide}" * bool(r.guide) + ")" if r.steps else "" for r in rows]
        sampled = [row.name + text for row, text in zip(rows, steps, strict=True)]
        head = [f"## {setting.label} {spec.name} ({spec.base})", f"rows: {', '.join(sampled)}"]
        head += [f"loss: {get_system(spec.base).loss}"] if spec.base in BASELINES else []
        speed = training_speed(spec.base, config.model, config.train.batch_size * config.train.accumulate)
        head += _amounts(config.train, series, request.seconds, speed)
        texts.append("\n".join([*head, *_settings(config, series)]) + "\n")
    return texts + [_guide_text(settings[dataset], kind, bands) for (dataset, kind), bands in guides.items()]


def _guide_text(setting: Setting, kind: str, bands: tuple[str, ...]) -> str:
    form, changes = guide_changes(setting, kind)
    config = resolve_guide([], setting.out, kind=form, bands=",".join(bands), overrides=changes)
    where = EUROSAT if setting.guide_root or not setting.root else "the targets of the training series"
    head = [f"## {setting.label} guide-{kind} ({form})", f"data: {where}"]
    series = EUROSAT_IMAGES if where == EUROSAT else len(training_set(setting)) if setting.root else None
    head += _amounts(config.train, series, setting.request.seconds, None)
    return "\n".join([*head, *_settings(config, series)]) + "\n"


def training_speed(base: str, model: AnyModelConfig, batch: int) -> tuple[float, str]:
    """Return samples per second on `DEVICE` and how the figure was found; batch: samples of a step."""
    if base in MEASURED:
        own = model.network == resolve(base).model.network
        how = ";".join(filter(None, (REMARKS.get(base), "" if own else OTHER_NETWORK)))
        return MEASURED[base], f"{MEASURED[base]:g} samples/s measured on {DEVICE}{how}"
    speed = min(STEPS * batch, MEASURED["sen2_mtc_new"] * GMACS / model_cost(model).gmacs_forward)
    return speed, f"{speed:.1f} samples/s on {DEVICE} ESTIMATED from the GMACs of one forward, not measured"


def _amounts(
    train: TrainConfig, series: int | None, seconds: float | None, speed: tuple[float, str] | None
) -> list[str]:
    """Return the lines of samples, epochs and hours."""
    if seconds is not None:
        return ["samples, epochs: as many as the time allows", f"hours: {seconds / 3600:.2f}"]
    samples: float | None = train.steps * train.batch_size * train.accumulate
    if train.epochs is not None:
        samples = None if series is None else train.epochs * series
    epochs = UNKNOWN if train.epochs is None else f"{train.epochs:g}"
    if samples is not None and series is not None:
        epochs = f"{samples / series:.1f} of {series} series"
    lines = [f"samples: {UNKNOWN if samples is None else round(samples)}", f"epochs: {epochs}"]
    if speed is None or samples is None:
        return [*lines, "hours: not measured" if speed is None else f"hours: {UNKNOWN}; {speed[1]}"]
    return [*lines, f"hours: {samples / speed[0] / 3600:.1f} ({speed[1]})"]


def _settings(config: RunConfig | GuideRunConfig, series: int | None) -> list[str]:
    """Return the settings that have an effect: baselines have losses of their own, epochs replace the steps."""
    train = in_steps(config.train, series or 1)
    unused = ["objective."] * (isinstance(config, RunConfig) and isinstance(config.model, BaselineModelConfig))
    unused += ["train.muon_lr"] * (train.optimizer != "muon") + ["train.steps"] * bool(train.epochs and not series)
    settings = flat(to_dict(replace(config, train=train))).items()
    return [f"{key}={json.dumps(value)}" for key, value in settings if not key.startswith(tuple(unused))]
