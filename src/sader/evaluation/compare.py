"""`sader compare`: several models on the same data, in one table with paired tests, costs and figures.

Both tasks on shards and scenes, the dataset's own task on a public dataset. Nothing is trained here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sader.baselines.classical import CLASSICAL
from sader.data.items import Item
from sader.errors import ConfigError, DataError, did_you_mean
from sader.evaluation.bench import Bench, run_bench
from sader.evaluation.methods import MASKS, STANDARD, classical_methods, controls, make_method
from sader.evaluation.report import write_panels
from sader.evaluation.run import (
    TASKS,
    EvaluationRequest,
    load_records,
    lpips_installed,
    open_items,
    open_requested,
    other_bands,
    shared_bands,
)
from sader.evaluation.scoring import DEFAULT_METRICS, Method, Progress
from sader.evaluation.statistics import Comparison, compare_rows
from sader.evaluation.summary import Summary, summarise
from sader.evaluation.tables import write_comparison

WEIGHTS = "model.safetensors"
_STEPS = re.compile(r"@(\d+(?:\+\d+)?)$")


@dataclass(frozen=True)
class CompareRequest:
    """What to compare on what."""

    models: tuple[str, ...]
    """Shipped names, checkpoint files, run folders, classical names; NAME=... calls it so, ...@4+1 gives it steps."""
    data: EvaluationRequest
    """Data, split, masks and so on; its `models` and `task` are not read."""
    tasks: tuple[str, ...] = ("clean", "paper")
    """With shards; a public dataset has its own task."""
    against: str | None = None
    """The method all others are tested against; None: the first model."""
    classical: bool = True
    """The standard classical methods and the flat-colour control stand beside the models."""
    metric: str = "psnr"
    """What decides best and worst, the Pareto figure and the tests shown in the table."""
    examples: int = 3
    """Items in the qualitative figure."""


@dataclass(frozen=True)
class TaskComparison:
    """The comparison on one task."""

    task: str
    title: str
    bench: Bench
    summary: Summary
    comparisons: list[Comparison]
    facts: dict[str, Any] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


def run_compare(request: CompareRequest, progress: Progress | None = None) -> list[TaskComparison]:
    """Score, test and write; everything that can be wrong with the arguments is found before anything slow begins."""
    data = request.data
    for task in request.tasks:
        if task not in TASKS:
            raise ConfigError(f"unknown task {task!r}{did_you_mean(task, TASKS)}")
    if data.mask not in MASKS:
        raise ConfigError(f"unknown mask {data.mask!r}{did_you_mean(data.mask, MASKS)}")
    if not request.models:
        raise ConfigError("no model given; expected at least one name, checkpoint file or run folder to compare.")
    metrics = list(DEFAULT_METRICS)
    if lpips_installed() if data.lpips is None else data.lpips:
        metrics.append("lpips")
    dataset = None if data.dataset is None else open_requested(data)
    protocol = "reflectance" if dataset is None else dataset.request.protocol
    known = [*metrics, *(("mtc_psnr", "mtc_ssim") if protocol == "mtc_stretch" else ())]
    if request.metric not in known:
        raise ConfigError(f"unknown metric {request.metric!r}{did_you_mean(request.metric, known)}")
    models = named_methods(request.models, data)
    against = _against(request, models)
    methods: dict[str, Method] = dict(models)
    if request.classical:
        methods |= {name: method for name, method in classical_methods("true").items() if name not in methods}
        methods |= controls()
    records = [] if dataset is not None else list(load_records(data.data, split=data.split))
    bands, others = shared_bands(models), other_bands(models, records)
    results = []
    tasks = ("paper",) if dataset is not None else request.tasks
    opened: dict[str, Sequence[Item]] = {}
    missing: list[DataError] = []
    for task in tasks:
        try:
            opened[task] = open_items(replace(data, task=task), dataset, records, bands, others)
        except DataError as error:
            missing.append(error)
    if not opened:
        raise missing[0]
    for reason in missing:  # pairs, for one, have nothing for the paper's task: no reason to drop the other
        warnings.warn(str(reason), stacklevel=2)
    for task, items in opened.items():
        bench = run_bench(items, methods, metrics, protocol=protocol, examples=request.examples, progress=progress)
        summary = summarise(bench.rows, metric=request.metric, seed=data.seed)
        tested = [name for name in known if name not in ("rmse", "sharpness")]
        comparisons = compare_rows(bench.rows, against=against, metrics=tested, seed=data.seed)
        facts: dict[str, Any] = {
            "task": task, "mask": data.mask, "steps": data.steps, "data": [path.name for path in data.data],
            "split": data.split, "metric": request.metric, "against": against, "protocol": protocol,
        }  # fmt: skip
        title = f"{task}, masks of the models: {data.mask}"
        if dataset is not None:
            facts |= dataset.facts
            title = f"{data.dataset} {data.split}, sampler {data.sampler}, masks of the models: {data.mask}"
        files: list[Path] = []
        if data.out is not None:
            folder = Path(data.out) / task if len(opened) > 1 else Path(data.out)
            files = write_comparison(folder, bench, summary, comparisons, title=title, facts=facts)
            if data.pictures:
                for name in models:
                    files += write_panels(
                        folder / "pictures", items, bench.rows, methods, shown=name, baseline=summary.best_classical,
                        count=data.pictures,
                    )  # fmt: skip
        results.append(TaskComparison(task, title, bench, summary, comparisons, facts, files))
    return results


def named_methods(models: Sequence[str], data: EvaluationRequest) -> dict[str, Method]:
    """Return label -> method for what was typed: NAME, FILE, FOLDER, LABEL=FILE, each with @STEPS if wanted."""
    methods: dict[str, Method] = {}
    for text in models:
        label, target, steps = parse_model(text)
        if label in methods:
            raise ConfigError(f"two models are called {label}; expected different names. Use NAME={target}.")
        methods[label] = make_method(target, mask=data.mask, steps=steps or data.steps, samples=data.samples)
    return methods


def parse_model(text: str) -> tuple[str, str, str | None]:
    """Return (label, name or file, steps or None) of a model as typed."""
    label, equals, rest = text.partition("=")
    if not equals or Path(text).exists():
        label, rest = "", text
    found = _STEPS.search(rest)
    steps = found.group(1) if found and not Path(rest).exists() else None
    target = rest if steps is None else rest[: -len(steps) - 1]
    path = Path(target)
    if target not in CLASSICAL and path.is_dir():
        if not (path / WEIGHTS).is_file():
            raise ConfigError(f"{path} holds no {WEIGHTS}; expected the folder of a finished run, or a weights file.")
        path = path / WEIGHTS
        target = str(path)
    if not label:
        label = target if not path.is_file() else path.parent.name if path.name == WEIGHTS else path.stem
        label += "" if steps is None else f" {steps}"
    return label, target, steps


def _against(request: CompareRequest, models: dict[str, Method]) -> str:
    if request.against is None:
        return next(iter(models))
    known = [*models, *(STANDARD if request.classical else ())]
    if request.against not in known:
        raise ConfigError(f"nothing called {request.against!r} is compared{did_you_mean(request.against, known)}")
    return request.against
