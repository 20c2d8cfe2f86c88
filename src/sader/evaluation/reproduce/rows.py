"""One row of a plan: train what it needs (`training.py`), score it, keep the result in its folder.

Safe to kill at any moment and to run in several processes: results are whole files, and each says what it was made
from, so that nothing stale is taken for done. A row that failed leaves its reason, for the table.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sader.checkpoint import read_header
from sader.evaluation.bench import Bench, load_bench, run_bench, save_bench
from sader.evaluation.methods import RemoverMethod, make_method
from sader.evaluation.reproduce.plans import PlanRow
from sader.evaluation.reproduce.setting import Setting, digest, file_digest, scored_items, scored_on
from sader.evaluation.reproduce.training import needed_guide, run_overrides, train_guide, train_run, training_facts
from sader.evaluation.run import lpips_installed
from sader.evaluation.scoring import DEFAULT_METRICS, Method
from sader.files import write_atomically
from sader.inference.remover import CloudRemover, RemoverOptions

NEEDS_DAYS = frozenset({"linear_in_time"})
"""Classical methods left out where a date has no day."""


def row_folder(setting: Setting, row: PlanRow, task: str) -> Path:
    """Return where the scores of a row lie."""
    return setting.out / "rows" / setting.label / task / row.name


def run_row(setting: Setting, row: PlanRow, *, progress: bool = False) -> bool:
    """Train and score one row; returns False where everything was there already."""
    methods, made_of = row_methods(setting, row, progress=progress)
    _usual_arithmetic()
    fresh = False
    for task in setting.tasks:
        folder = row_folder(setting, row, task)
        key = digest({**made_of, "scored_on": scored_on(setting), "task": task})
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
    failure_file(setting, row).unlink(missing_ok=True)
    return fresh


def _usual_arithmetic() -> None:
    """Undo what a training in this process chose: a row must not depend on what ran before it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = False  # items have many sizes, and each would be tried out anew


def row_methods(setting: Setting, row: PlanRow, *, progress: bool = False) -> tuple[dict[str, Method], dict[str, Any]]:
    """Return label -> method of a row, and what it was made from, for its record."""
    if row.run is None:
        return {name: make_method(name) for name in row.methods}, {"methods": list(row.methods)}
    weights = train_run(setting, row.run, progress=progress)
    card = read_header(weights).get("card", {})
    train = card.get("train", {})
    made: dict[str, Any] = {
        "run": row.run.name, "base": row.run.base, "overrides": run_overrides(setting, row.run),
        "weights_sha256": file_digest(weights), "steps": row.steps, "guide": row.guide,
        "trained_steps": card.get("steps"), "trained_seconds": card.get("seconds"),
        "series_seen": card.get("series_seen"), "device": card.get("device"),
        "batch_size": train.get("batch_size"), "crop": train.get("crop"), **training_facts(weights),
    }  # fmt: skip
    options = RemoverOptions(guide=row.guide)
    guide = needed_guide(setting, row)
    if guide is not None:
        file = train_guide(setting, *guide, progress=progress)
        made["guide_sha256"] = file_digest(file)
        options = replace(options, guide_weights=str(file))
    remover = CloudRemover.from_pretrained(weights, options=options)
    return {row.title: RemoverMethod(remover, mask="true", steps=row.steps)}, made


def load_row(setting: Setting, row: PlanRow, task: str) -> Bench | None:
    """Return the scores of a row, or None where it has not been run."""
    return load_bench(row_folder(setting, row, task))


def failure_file(setting: Setting, row: PlanRow) -> Path:
    """Return where the reason lies why a row could not be run."""
    return setting.out / "rows" / setting.label / "failed" / f"{row.name}.json"


def note_failure(setting: Setting, row: PlanRow, reason: str) -> None:
    """Keep the reason for the table; a later success removes it."""
    write_atomically(failure_file(setting, row), json.dumps({"row": row.name, "reason": reason}).encode())


def failure_of(setting: Setting, row: PlanRow) -> str | None:
    """Return why a row could not be run the last time, or None."""
    try:
        return str(json.loads(failure_file(setting, row).read_text(encoding="utf-8"))["reason"])
    except (OSError, ValueError, KeyError):
        return None
