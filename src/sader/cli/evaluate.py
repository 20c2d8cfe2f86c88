"""`sader evaluate`, `sader compare` and `sader reproduce`.

The first two build the same request from the same options; `compare` adds paired tests, costs and figures.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sader.cli.options import AsJson, Coverage, Dataset, Lists, Partial, Sampler, option, takes

app = typer.Typer()

DATA, METHODS, REPORT = "Data", "Methods", "Report"

Split = Annotated[str, option("Part of a known dataset: val, train, all; with --dataset also test.", DATA)]
Limit = Annotated[int | None, option("Items per place; default: all.", DATA, min=1)]
Seed = Annotated[int, option("Seed of every random choice.", DATA)]
Lpips = Annotated[bool | None, option("Score LPIPS; default: if installed.", REPORT, "--lpips/--no-lpips")]
Examples = Annotated[int, option("Items in the qualitative figure.", REPORT, min=0)]


def data_options(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Shipped names, checkpoint files, run folders, classical names or predictions (.npz, one array per "
            "item); NAME=FILE sets the label, FILE@4+1 the sampling steps."
        ),
    ],
    data: Annotated[list[Path], option("Shards or a folder of scenes; repeatable.", DATA, "--data")],
    split: Split = "val",
    dataset: Dataset = None,
    sampler: Sampler = "leak_free",
    protocol: Annotated[
        str | None,
        option("With --dataset: mtc_stretch (beside reflectance) or reflectance; default: as published.", DATA),
    ] = None,
    lists: Lists = None,
    partial: Partial = False,
    coverage: Coverage = "auto",
    clouds: Annotated[
        list[Path] | None, option("Labelled places whose clouds are pasted; repeatable.", DATA, "--clouds")
    ] = None,
    dates: Annotated[int | None, option("Dates of each item; default: all.", DATA, min=1)] = None,
    limit: Limit = None,
    seed: Seed = 0,
) -> None:
    """Options of the data that is scored, and the models."""


def method_options(
    mask: Annotated[str, option("Masks given to the models: true, reference, or own (none).", METHODS)] = "true",
    steps: Annotated[
        str | None, option("Sampling steps: 1, 4, or 4+1 with resampling; default: each model's own.", METHODS)
    ] = None,
    samples: Annotated[int, option("Results averaged; from 2 on their spread is scored.", METHODS, min=1)] = 1,
    guide: Annotated[str | None, option("Guide of the resampling: mae, conv, mean, lowpass or none.", METHODS)] = None,
    guide_weights: Annotated[str | None, option("Weights of the guide (sader pretrain-guide).", METHODS)] = None,
    resampling: Annotated[
        str | None,
        option(
            "Variant of the resampling: paper (Algorithm 1), public_code or default; default: each model's own.",
            METHODS,
        ),
    ] = None,
    classical: Annotated[
        bool, option("Score the classical methods too.", METHODS, "--classical/--no-classical")
    ] = True,
    rules: Annotated[bool, option("Score classical methods with rule-based masks too.", METHODS, "--rules")] = False,
    lpips: Lpips = None,
    pictures: Annotated[int, option("Best and worst cases drawn for each model.", REPORT, min=0)] = 2,
    out: Annotated[
        Path | None, option("Folder for tables, JSON, CSV, figures and pictures.", REPORT, "--out", "-o")
    ] = None,
) -> None:
    """Options of the methods and of the report."""


@app.command()
@takes(data_options, method_options)
def evaluate(
    task: Annotated[str, option("clean (this date), paper (another date) or simulated (clouds).", DATA)] = "clean",
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Score models and classical methods on items with known truth."""
    from sader.evaluation.evaluate import run_evaluation
    from sader.evaluation.report import markdown, print_summary, report_json

    (found,) = run_evaluation(_request({**given, "tasks": (task,)}), _show_progress)
    if as_json:
        print(json.dumps(report_json(found.report), indent=2))
        return
    if sys.stdout.isatty():
        print_summary(found.report)
        if given["out"] is None:
            typer.echo("all tables, with intervals, places and regions: --out FOLDER, or to a pipe.", err=True)
    else:
        print(markdown(found.report))
    for path in found.files:
        typer.echo(f"wrote {path}", err=True)


@app.command()
@takes(data_options, method_options)
def compare(
    task: Annotated[
        list[str] | None, option("clean, paper or simulated; repeatable; default: clean and paper.", DATA)
    ] = None,
    against: Annotated[
        str | None, option("The method all others are tested against; default: the first.", REPORT)
    ] = None,
    metric: Annotated[str, option("Metric of the tests and of the Pareto figure.", REPORT)] = "psnr",
    examples: Examples = 3,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Score models as evaluate does, and add paired tests, costs and figures."""
    from sader.evaluation.evaluate import run_evaluation
    from sader.evaluation.report import markdown, report_json

    own = {"tasks": task or ["clean", "paper"], "against": against, "metric": metric, "examples": examples}
    found = run_evaluation(_request({**given, **own, "compare": True}), _show_progress)
    if as_json:
        print(json.dumps([report_json(each.report) for each in found], indent=2))
        return
    for each in found:
        print(markdown(each.report))
        for path in each.files:
            typer.echo(f"wrote {path}", err=True)


def _request(given: Mapping[str, Any]) -> Any:
    """Return the `EvaluationRequest` of the options of a command, by name."""
    from sader.evaluation.data import DataRequest
    from sader.evaluation.evaluate import EvaluationRequest

    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    plain["clouds"] = plain["clouds"] or ()
    source = {name: plain[name] for name in DataRequest.__dataclass_fields__ if name in plain}
    rest = {name: plain[name] for name in EvaluationRequest.__dataclass_fields__ if name in plain and name != "data"}
    return EvaluationRequest(data=DataRequest(**source), **rest)


def _show_progress(done: int, name: str) -> None:
    typer.echo(f"{done:4d} {name}", err=True)


@app.command()
def reproduce(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            help="table1 to table7, pareto, qualitative, loss-masks, loss-weights, here, or all (of the paper)."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        option(
            "Folder or NAME:FOLDER of a dataset, eurosat_ms:FOLDER for the guides; for here: shards to train on.",
            DATA,
            "--data",
        ),
    ] = None,
    validation: Annotated[list[str] | None, option("For here: shards to score on; repeatable.", DATA)] = None,
    sampler: Sampler = "leak_free",
    split: Annotated[str, option("Split that is scored.", DATA)] = "test",
    lists: Lists = None,
    partial: Partial = False,
    coverage: Coverage = "auto",
    draws: Annotated[
        int, option("SEN12MS-CR-TS: training series of each patch, each with its own target.", DATA, min=1)
    ] = 1,
    limit: Limit = None,
    seed: Seed = 0,
    seconds: Annotated[float | None, typer.Option(help="Training time of each system.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each system.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A change to every run, or guide.KEY=VALUE; repeatable.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this row; repeatable.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny networks on synthetic data: minutes on a CPU.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print settings, samples, epochs and hours of every run; train nothing.")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the tables of finished rows only.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and their rows.")] = False,
    lpips: Lpips = None,
    examples: Examples = 3,
    out: Annotated[Path, option("Folder of runs, rows and tables.", REPORT, "--out", "-o")] = Path("reproduce"),
) -> None:
    """Train and score what a table or figure of the paper needs; resumes interrupted runs."""
    from sader.evaluation.reproduce import run
    from sader.evaluation.reproduce.setting import ReproduceRequest

    if listed:
        for name, about, rows in run.list_plans():
            typer.echo(f"{name}: {about}\n  rows: {', '.join(rows) or '-'}")
        return
    request = ReproduceRequest(
        tables=tuple(tables or ()), data=tuple(data or ()), validation=tuple(validation or ()), out=out,
        seconds=seconds, steps=steps, overrides=tuple(set_ or ()), tiny=tiny, only=tuple(only or ()),
        report_only=report_only, sampler=sampler, split=split, lists=lists, partial=partial, coverage=coverage,
        draws=draws, limit=limit, lpips=lpips, examples=examples, seed=seed,
    )  # fmt: skip
    if dry_run:
        print("\n".join(run.dry_run(request)) or f"{', '.join(request.tables)}: nothing is trained.")
        return
    outcome = run.run_reproduce(request, lambda text: typer.echo(text, err=True))
    for text in outcome.texts:
        print(text)
    for path in outcome.files:
        typer.echo(f"wrote {path}", err=True)
    for name, reason in outcome.failed.items():
        typer.echo(f"failed: {name}: {reason}", err=True)
    if outcome.failed:
        raise typer.Exit(1)
