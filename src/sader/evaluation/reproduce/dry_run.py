"""`sader reproduce TABLE --dry-run`: settings, samples, epochs and hours of every run, without training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sader.config import to_dict
from sader.evaluation.costs import model_cost
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import PlanRow, RunSpec, get_tables
from sader.evaluation.reproduce.run import find_settings, plan_rows
from sader.evaluation.reproduce.setting import EUROSAT, ReproduceRequest, Setting, training_set
from sader.evaluation.reproduce.training import guide_changes, needed_guide, run_overrides
from sader.models import AnyModelConfig
from sader.training.config import TrainConfig, resolve
from sader.training.guide import resolve_guide

UNKNOWN = "not known without --data"
DEVICE = "one H200, 256 px"
MEASURED = {"sen2_mtc_new": 43.0}
"""Training samples per second on `DEVICE` (benchmarks/training_throughput.py: 41 to 46 at batch 16 in float32)."""
GMACS = 361.6
"""One forward of the network of `MEASURED`, from which the speed of the others is estimated."""
STEPS = 30.0
"""Optimiser steps per second that the estimate does not exceed: launching limits small networks and batches."""
EUROSAT_IMAGES = 27_000


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
        sampled = [row.name + (f" ({row.steps} steps, guide {row.guide})" if row.steps else "") for row in rows]
        head = [f"## {setting.label} {spec.name} ({spec.base})", f"rows: {', '.join(sampled)}"]
        speed = training_speed(spec.base, config.model, config.train.batch_size * config.train.accumulate)
        head += _amounts(config.train, series, request.seconds, speed)
        texts.append("\n".join([*head, *_flat(to_dict(config))]) + "\n")
    for (dataset, kind), bands in guides.items():
        texts.append(_guide_text(settings[dataset], kind, bands))
    return texts


def _guide_text(setting: Setting, kind: str, bands: tuple[str, ...]) -> str:
    form, changes = guide_changes(setting, kind)
    config = resolve_guide([], setting.out, kind=form, bands=",".join(bands), overrides=changes)
    where = EUROSAT if setting.guide_root or not setting.root else "the targets of the training series"
    head = [f"## {setting.label} guide-{kind} ({form})", f"data: {where}"]
    series = EUROSAT_IMAGES if where == EUROSAT else len(training_set(setting)) if setting.root else None
    head += _amounts(config.train, series, setting.request.seconds, None)
    return "\n".join([*head, *_flat(to_dict(config))]) + "\n"


def training_speed(base: str, model: AnyModelConfig, batch: int) -> tuple[float, str]:
    """Return samples per second on `DEVICE` and how the figure was found; batch: samples of a step."""
    if base in MEASURED:
        return MEASURED[base], f"{MEASURED[base]:g} samples/s measured on {DEVICE}"
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


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"
