"""`sader reproduce TABLE`: the paper's tables and figures as a plan that trains, scores, resumes and prints.

Each row is trained and scored on its own (`rows.py`); tables are merged from the folders of the rows, so that rows may
run in any order, in several processes (`pool.py`), and be killed. `python -m sader.evaluation.reproduce.run` needs no
Typer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sader.data.public.registry import DATASETS, recognise
from sader.errors import ConfigError, DataError, SaderError, did_you_mean
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.archive import write_archive
from sader.evaluation.reproduce.outcome import write_complexity, write_outcome
from sader.evaluation.reproduce.plans import HERE, TABLES, PlanRow, Table, chosen_rows, get_tables
from sader.evaluation.reproduce.pool import STOPPED, Plan, Task, run_tasks, serve
from sader.evaluation.reproduce.rows import note_failure, run_row
from sader.evaluation.reproduce.setting import Conditions, Setting, check_setting, made_setting
from sader.evaluation.reproduce.training import (
    GUIDE_SHARE,
    guide_name,
    needed_guide,
    train_guide,
    train_run,
    training_shards,
)

Say = Callable[[str], None]
Work = list[tuple[Setting, PlanRow]]


@dataclass(frozen=True)
class ReproduceRequest(Conditions):
    """Which tables from what, within which budget."""

    tables: tuple[str, ...]
    """Names of `plans.TABLES`, or all."""
    data: tuple[str, ...] = ()
    """NAME:FOLDER or FOLDER of the public datasets; with `here` the shards to train on."""
    validation: tuple[str, ...] = ()
    """With `here`: shards to score on."""
    out: Path = Path("reproduce")
    only: tuple[str, ...] = ()
    """Only these rows are run; the table shows all that are there."""
    report_only: bool = False
    """Run nothing, write the tables of what is there."""
    isolate: bool | None = None
    """Work in processes of their own; None: unless tiny with one worker."""
    scorers: int | None = None
    """Processes that only score, beside the `workers`; None: half as many."""
    deadline: float | None = None
    """Seconds after which nothing is started or left running and the tables are written."""
    archive: bool = False
    """Also write results.tgz: tables, figures and scores, without weights."""


@dataclass(frozen=True)
class Outcome:
    """What became of the request."""

    files: list[Path] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The tables in Markdown."""
    failed: dict[str, str] = field(default_factory=dict)
    """Row -> why it could not be run."""
    left: list[str] = field(default_factory=list)
    """Rows that the deadline left out."""


def list_plans() -> list[tuple[str, str, list[str]]]:
    """Return (table, what it is, its rows) of every plan."""
    lines = []
    for table in TABLES.values():
        names = list(dict.fromkeys(row.name for rows in table.rows.values() for row in rows))
        where = ", ".join(table.rows) or "no data needed"
        lines.append((table.name, f"{table.number}: {table.title} ({where})", names))
    return lines


def run_reproduce(request: ReproduceRequest, say: Say = lambda text: None) -> Outcome:
    """Run the rows that are not done and write every table; a row that fails is told and the others go on.

    Whatever is wrong with names, folders and files is raised before anything is trained.
    """
    started = time.monotonic()
    _check_numbers(request)
    tables = get_tables(request.tables)
    settings = find_settings(request, tables)
    work = _work(request, tables, settings)
    outcome = Outcome()
    if not request.report_only:
        for setting in settings.values():
            check_setting(setting)
            training_shards(setting)  # a broken image is named once and at once, not by every row
        deadline = None if request.deadline is None else started + request.deadline
        alone = request.tiny and request.workers == 1 if request.isolate is None else not request.isolate
        (_run_here if alone else _run_pool)(request, work, outcome, deadline, say)
    for table in tables:
        if not table.rows:
            _add(outcome, write_complexity(request.out / table.name, table))
        for dataset in table.rows:
            if dataset in settings:
                where = request.out / table.name / settings[dataset].label
                _add(outcome, write_outcome(settings[dataset], table, where))
    if request.archive:
        outcome.files.append(write_archive(request.out, [table.name for table in tables]))
    return outcome


def _add(outcome: Outcome, made: tuple[list[Path], str]) -> None:
    outcome.files.extend(made[0])
    outcome.texts.append(made[1])


def _check_numbers(request: ReproduceRequest) -> None:
    for name, least in (("steps", 1), ("workers", 1), ("scorers", 0), ("limit", 1), ("examples", 0)):
        value = getattr(request, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; expected {least} or more.")
    for name in ("seconds", "deadline"):
        value = getattr(request, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}; expected more than 0.")
    if request.isolate is False and request.workers > 1:
        raise ConfigError(f"--no-isolate with {request.workers} workers; expected 1. Leave one of the two out.")


def _work(request: ReproduceRequest, tables: Sequence[Table], settings: dict[str, Setting]) -> Work:
    """Return the rows to run, each once, in the order of the tables."""
    work: dict[tuple[str, str], tuple[Setting, PlanRow]] = {}
    unknown = set(request.only)
    for table in tables:
        for dataset in table.rows:
            if dataset not in settings:
                continue
            names = [row.name for row in table.rows[dataset]]
            wanted = [name for name in request.only if name in names]
            unknown -= set(wanted)
            if not request.only or wanted:
                for row in chosen_rows(table, dataset, wanted):
                    work.setdefault((dataset, row.name), (settings[dataset], row))
    if unknown:
        known = {row.name for table in tables for rows in table.rows.values() for row in rows}
        name = sorted(unknown)[0]
        raise ConfigError(f"no row {name!r} in {', '.join(request.tables)}{did_you_mean(name, known)}")
    return list(work.values())


# ---------------------------------------------------------------------------------------------- the rows


def _run_here(request: ReproduceRequest, work: Work, outcome: Outcome, deadline: float | None, say: Say) -> None:
    """Run one row after another in this process."""
    for number, (setting, row) in enumerate(work, 1):
        if deadline is not None and time.monotonic() >= deadline:
            outcome.left.append(f"{setting.label}/{row.name}")
            continue
        say(f"[{number}/{len(work)}] {setting.label} {row.name}: {row.title}")
        try:
            run_row(setting, row)
        except SaderError as error:
            _failed(outcome, setting, row, str(error))
            say(f"    failed: {error}")


def _run_pool(request: ReproduceRequest, work: Work, outcome: Outcome, deadline: float | None, say: Say) -> None:
    """Run the rows in processes of their own: their memory is given back, and a crash stays theirs."""
    scorers = request.workers // 2 if request.scorers is None else request.scorers
    command = [sys.executable, "-m", "sader.evaluation.reproduce.run", "--serve", str(request.workers + scorers)]
    command += process_arguments(request)
    plan: Plan = run_tasks(
        plan_tasks(work), command, out=request.out, workers=request.workers, scorers=scorers, deadline=deadline, say=say
    )
    for setting, row in work:
        if (setting.label, row.name) in plan.errors:
            _failed(outcome, setting, row, plan.errors[setting.label, row.name])
    outcome.left.extend(f"{task.label}/{task.row}" for task in plan.left if task.kind == "score")
    if outcome.left:
        say(f"{STOPPED}: {', '.join(outcome.left)}. Run the same command again to go on.")


def _failed(outcome: Outcome, setting: Setting, row: PlanRow, reason: str) -> None:
    outcome.failed[f"{setting.label}/{row.name}"] = reason
    note_failure(setting, row, reason)


def plan_tasks(work: Work) -> list[Task]:
    """Return what there is to do: each run and each guide once, turn by turn, then the rows that need them."""
    trained: dict[tuple[str, str], Task] = {}
    turns: dict[Task, int] = {}
    scored: list[Task] = []
    for setting, row in work:
        needs: list[str] = []
        seconds = setting.seconds or 0.0
        if row.run is not None:
            name = row.run.name
            task = Task("train", setting.label, row.name, name, (), seconds)
            turns.setdefault(trained.setdefault((setting.label, name), task), row.turn)
            needs.append(name)
        guide = needed_guide(setting, row)
        if guide is not None:
            name = guide_name(guide[0])
            share = GUIDE_SHARE if setting.dataset == HERE else 1.0
            task = Task("guide", setting.label, row.name, name, (), seconds * share)
            turns.setdefault(trained.setdefault((setting.label, name), task), row.turn)
            needs.append(name)
        scored.append(Task("score", setting.label, row.name, needs=tuple(needs)))
    return [*sorted(trained.values(), key=turns.__getitem__), *scored]


def process_arguments(request: ReproduceRequest) -> list[str]:
    """Return the arguments with which another process knows the same rows."""
    words = [*request.tables, "--out", str(request.out), *request.arguments()]
    words += [word for path in request.data for word in ("--data", path)]
    return words + [word for path in request.validation for word in ("--validation", path)]


def _serve(request: ReproduceRequest, processes: int) -> None:
    """Answer tasks of another process (`pool.py`)."""
    import os

    tables = get_tables(request.tables)
    settings = {setting.label: setting for setting in find_settings(request, tables).values()}
    rows = {
        (setting.label, row.name): row
        for table in tables
        for setting in settings.values()
        for row in table.rows.get(setting.dataset, ())
    }

    def do(task: dict[str, str]) -> None:
        setting, row = settings[task["label"]], rows[task["label"], task["row"]]
        if task["kind"] == "score":
            run_row(setting, row)
        elif task["kind"] == "train":
            assert row.run is not None
            train_run(setting, row.run)
        else:
            guide = needed_guide(setting, row)
            assert guide is not None
            train_guide(setting, *guide)

    serve(do, threads=max(1, (os.cpu_count() or 1) // processes))


# ---------------------------------------------------------------------------------------------- the data


def find_settings(request: ReproduceRequest, tables: Sequence[Table]) -> dict[str, Setting]:
    """Return dataset -> setting for everything the tables can be made of; raise where a table has nothing."""
    wanted = list(dict.fromkeys(dataset for table in tables for dataset in table.rows))
    first = Setting(dataset="", out=Path(request.out), **request.conditions())
    if request.tiny:
        if request.data or request.validation:
            raise ConfigError("--tiny makes its own data; leave out --data and --validation, or leave out --tiny.")
        return {dataset: made_setting(replace(first, dataset=dataset)) for dataset in wanted}
    if HERE in wanted:
        if len(wanted) > 1:
            raise ConfigError("the plan here works on shards, the others on public datasets; ask for here alone.")
        return {HERE: replace(first, dataset=HERE, shards=request.data, validation=request.validation)}
    if request.validation:
        raise ConfigError("--validation is for the plan here; a public dataset has its own splits. Leave it out.")
    found = {name: replace(first, dataset=name, root=root) for name, root in map(_dataset, request.data)}
    for table in tables:
        if table.rows and not any(dataset in found for dataset in table.rows):
            names = " or ".join(f"--data {dataset}:FOLDER" for dataset in table.rows)
            given = f"got {', '.join(found)}" if found else "no data given"
            raise DataError(f"{given}, but {table.name} needs {' or '.join(table.rows)}. Use {names}, or --tiny.")
    return {name: setting for name, setting in found.items() if name in wanted}


def _dataset(text: str) -> tuple[str, Path]:
    """Return (dataset of the paper, folder) of what was typed."""
    name, colon, rest = text.partition(":")
    if colon and len(name) > 1 and "/" not in name and "\\" not in name:
        if name not in DATASETS:
            raise ConfigError(f"unknown dataset {name!r}{did_you_mean(name, DATASETS)}")
        folder = Path(rest)
    else:
        folder = Path(text)
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder; expected that of a public dataset, or NAME:FOLDER. Check --data.")
        name = recognise(folder)
    # The paper's East Asia figures are ROIs1868/73 alone, whichever way the folder is called.
    if name.startswith("sen12mscrts"):
        name = paper.TS
    if name not in (paper.SEN2, paper.TS):
        raise ConfigError(f"{name} is in none of the paper's tables; expected {paper.SEN2} or {paper.TS}.")
    return name, folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 1 where a row failed; 2 where the input is at fault."""
    parser = argparse.ArgumentParser(prog="python -m sader.evaluation.reproduce.run", description=__doc__)
    parser.add_argument("tables", nargs="*", help="tables, figures, here, or all")
    for name in ("--data", "--validation", "--only"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", "-o", type=Path, default=Path("reproduce"))
    kinds: dict[str, Any] = {
        "seconds": float, "steps": int, "limit": int, "examples": int, "seed": int, "workers": int, "scorers": int,
        "deadline": float, "sampler": str, "split": str, "lists": str, "coverage": str,
    }  # fmt: skip
    defaults = {each.name: each.default for each in fields(ReproduceRequest)}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, default=defaults[name])
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--lpips", action=argparse.BooleanOptionalAction, default=None)
    for name in ("--tiny", "--partial", "--report-only", "--archive", "--quiet", "--list"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--serve", type=int, default=None, help=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    quiet, listed, processes = options.pop("quiet"), options.pop("list"), options.pop("serve")
    if listed:
        for name, about, rows in list_plans():
            print(f"{name}: {about}\n  rows: {', '.join(rows) or '-'}")
        return 0
    for name in ("tables", "data", "validation", "only", "overrides"):
        options[name] = tuple(options[name])
    started = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            print(f"{time.monotonic() - started:6.0f} s {text}", file=sys.stderr, flush=True)

    request = ReproduceRequest(**options)
    try:
        if processes is not None:
            _serve(request, processes)
            return 0
        outcome = run_reproduce(request, say)
    except SaderError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print("\n".join(outcome.texts))
    for name, reason in outcome.failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
