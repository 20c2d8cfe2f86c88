"""`sader reproduce TABLE`: the paper's tables and figures as a plan that trains, scores, resumes and prints.

Each row is trained and scored on its own (`rows.py`); tables are merged from the folders of the rows, so that rows may
run in any order, in several processes, and be killed. `python -m sader.evaluation.reproduce` needs no Typer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sader.data.datasets import DATASETS, recognise
from sader.errors import ConfigError, DataError, SaderError, did_you_mean
from sader.evaluation import published as paper
from sader.evaluation.outcome import write_complexity, write_outcome
from sader.evaluation.plans import HERE, TABLES, PlanRow, Table, chosen_rows, get_tables
from sader.evaluation.rows import Setting, check_setting, made_setting, run_row, training_shards

Say = Callable[[str], None]


@dataclass(frozen=True)
class ReproduceRequest:
    """Which tables from what, within which budget."""

    tables: tuple[str, ...]
    """Names of `plans.TABLES`, or all."""
    data: tuple[str, ...] = ()
    """NAME:FOLDER or FOLDER of the public datasets; with `here` the shards to train on."""
    validation: tuple[str, ...] = ()
    """With `here`: shards to score on."""
    out: Path = Path("reproduce")
    seconds: float | None = None
    """Training time of every system."""
    steps: int | None = None
    """Optimiser steps of every system."""
    tiny: bool = False
    """Made data and tiny networks."""
    only: tuple[str, ...] = ()
    """Only these rows are run; the table shows all that are there."""
    report_only: bool = False
    """Run nothing, write the tables of what is there."""
    isolate: bool | None = None
    """One process per row; None: unless tiny."""
    sampler: str = "leak_free"
    split: str = "test"
    lists: str | None = None
    partial: bool = False
    coverage: str = "auto"
    limit: int | None = None
    lpips: bool | None = None
    examples: int = 3
    seed: int = 0
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of the request."""

    files: list[Path] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The tables in Markdown."""
    failed: dict[str, str] = field(default_factory=dict)
    """Row -> why it could not be run."""


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
    tables = get_tables(request.tables)
    settings = find_settings(request, tables)
    work: list[tuple[Setting, Table, PlanRow]] = []
    unknown = set(request.only)
    for table in tables:
        for dataset in table.rows:
            if dataset not in settings:
                continue
            names = [row.name for row in table.rows[dataset]]
            wanted = [name for name in request.only if name in names]
            unknown -= set(wanted)
            if not request.only or wanted:
                rows = chosen_rows(table, dataset, wanted)
                work += [(settings[dataset], table, row) for row in rows]
    if unknown:
        known = {row.name for table in tables for rows in table.rows.values() for row in rows}
        name = sorted(unknown)[0]
        raise ConfigError(f"no row {name!r} in {', '.join(request.tables)}{did_you_mean(name, known)}")
    outcome = Outcome()
    if not request.report_only:
        for setting in settings.values():
            check_setting(setting)
            training_shards(setting)  # a broken image is named once and at once, not by every row
        _run_rows(request, work, outcome, say)
    for table in tables:
        if not table.rows:
            _add(outcome, write_complexity(request.out / table.name, table))
        for dataset in table.rows:
            if dataset in settings:
                where = request.out / table.name / settings[dataset].label
                _add(outcome, write_outcome(settings[dataset], table, where))
    return outcome


def _add(outcome: Outcome, made: tuple[list[Path], str]) -> None:
    outcome.files.extend(made[0])
    outcome.texts.append(made[1])


def _run_rows(
    request: ReproduceRequest, work: Sequence[tuple[Setting, Table, PlanRow]], outcome: Outcome, say: Say
) -> None:
    isolate = (not request.tiny) if request.isolate is None else request.isolate
    seen: set[tuple[str, str]] = set()
    for number, (setting, table, row) in enumerate(work, 1):
        if (setting.label, row.name) in seen:
            continue
        seen.add((setting.label, row.name))
        say(f"[{number}/{len(work)}] {setting.label} {row.name}: {row.title}")
        try:
            if isolate:
                _in_own_process(request, setting, table, row)
            else:
                run_row(setting, row)
        except SaderError as error:
            outcome.failed[f"{setting.label}/{row.name}"] = str(error)
            say(f"    failed: {error}")


def _in_own_process(request: ReproduceRequest, setting: Setting, table: Table, row: PlanRow) -> None:
    """Run one row in a process of its own: its memory is given back, and a crash stays its own."""
    command = [sys.executable, "-m", "sader.evaluation.reproduce", *row_arguments(request, setting, table, row)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        raise DataError(f"its process ended with status {done.returncode}: {last[0][:500]}")


def row_arguments(request: ReproduceRequest, setting: Setting, table: Table, row: PlanRow) -> list[str]:
    """Return the arguments that run one row alone, for another process or machine."""
    arguments = [table.name, "--only", row.name, "--no-isolate", "--quiet", "--out", str(request.out)]
    if setting.dataset == HERE and not request.tiny:
        arguments += [text for path in setting.shards for text in ("--data", path)]
        arguments += [text for path in setting.validation for text in ("--validation", path)]
    elif not request.tiny:
        arguments += ["--data", f"{setting.dataset}:{setting.root}"]
    values = {
        "--seconds": request.seconds, "--steps": request.steps, "--sampler": request.sampler, "--split": request.split,
        "--lists": request.lists, "--coverage": request.coverage, "--limit": request.limit,
        "--examples": request.examples, "--seed": request.seed,
    }  # fmt: skip
    arguments += [text for name, value in values.items() if value is not None for text in (name, str(value))]
    arguments += [text for change in request.overrides for text in ("--set", change)]
    arguments += ["--tiny"] * request.tiny + ["--partial"] * request.partial
    if request.lpips is not None:
        arguments.append("--lpips" if request.lpips else "--no-lpips")
    return arguments


def find_settings(request: ReproduceRequest, tables: Sequence[Table]) -> dict[str, Setting]:
    """Return dataset -> setting for everything the tables can be made of; raise where a table has nothing."""
    if request.seconds is not None and request.seconds <= 0:
        raise ConfigError(f"seconds is {request.seconds}; expected more than 0.")
    if request.steps is not None and request.steps < 1:
        raise ConfigError(f"steps is {request.steps}; expected 1 or more.")
    wanted = list(dict.fromkeys(dataset for table in tables for dataset in table.rows))
    first = Setting(
        dataset="", root=None, out=Path(request.out), seconds=request.seconds, steps=request.steps, tiny=request.tiny,
        sampler=request.sampler, split=request.split, lists=request.lists, partial=request.partial,
        coverage=request.coverage, limit=request.limit, lpips=request.lpips, examples=request.examples,
        seed=request.seed, overrides=request.overrides,
    )  # fmt: skip
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
    parser = argparse.ArgumentParser(prog="python -m sader.evaluation.reproduce", description=__doc__)
    parser.add_argument("tables", nargs="*", help="tables, figures, here, or all")
    parser.add_argument("--data", action="append", default=[])
    parser.add_argument("--validation", action="append", default=[])
    parser.add_argument("--out", "-o", type=Path, default=Path("reproduce"))
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--sampler", default="leak_free")
    parser.add_argument("--split", default="test")
    parser.add_argument("--lists", default=None)
    parser.add_argument("--coverage", default="auto")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--examples", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--lpips", action=argparse.BooleanOptionalAction, default=None)
    for name in ("--tiny", "--partial", "--report-only", "--quiet", "--list"):
        parser.add_argument(name, action="store_true")
    options = vars(parser.parse_args(arguments))
    quiet, listed = options.pop("quiet"), options.pop("list")
    if listed:
        for name, about, rows in list_plans():
            print(f"{name}: {about}\n  rows: {', '.join(rows) or '-'}")
        return 0
    for name in ("tables", "data", "validation", "only", "overrides"):
        options[name] = tuple(options[name])

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    try:
        outcome = run_reproduce(ReproduceRequest(**options), say)
    except SaderError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print("\n".join(outcome.texts))
    for name, reason in outcome.failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
