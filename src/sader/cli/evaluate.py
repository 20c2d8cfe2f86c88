"""`sader evaluate`, `sader compare` and `sader reproduce`.

The first two build the same request from the same options; `compare` adds paired tests, costs and figures.
"""

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sader.cli.options import AsJson, declared, filled, option, takes
from sader.evaluation.request import DATA, DataRequest, EvaluationRequest, ReproduceRequest

app = typer.Typer()

SCORED = declared(
    "models", "data", "split", "dataset", "sampler", "protocol", "lists", "partial", "coverage", "clouds", "dates",
    "limit", "seed", "mask", "steps", "samples", "guide", "guide_weights", "resampling", "classical", "rules", "lpips",
    "pictures", "out", of=(EvaluationRequest, DataRequest),
)  # fmt: skip
"""Data and models, methods, report."""
TABLES = declared(
    "tables", "data", "validation", "sampler", "split", "lists", "partial", "coverage", "draws", "limit", "seed",
    "seconds", "steps", "overrides", "only", "tiny", "report_only", "lpips", "examples", "out", of=(ReproduceRequest,),
)  # fmt: skip


@app.command()
@takes(SCORED)
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
@takes(SCORED, declared("against", "metric", "examples", of=(EvaluationRequest,)))
def compare(
    task: Annotated[
        list[str] | None, option("clean, paper or simulated; repeatable; default: clean and paper.", DATA)
    ] = None,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Score models as evaluate does, and add paired tests, costs and figures."""
    from sader.evaluation.evaluate import run_evaluation
    from sader.evaluation.report import markdown, report_json

    tasks = task or ["clean", "paper"]
    found = run_evaluation(_request({**given, "tasks": tasks, "compare": True}), _show_progress)
    if as_json:
        print(json.dumps([report_json(each.report) for each in found], indent=2))
        return
    for each in found:
        print(markdown(each.report))
        for path in each.files:
            typer.echo(f"wrote {path}", err=True)


def _request(given: Mapping[str, Any]) -> Any:
    """Return the `EvaluationRequest` of the options of a command, by name."""
    return filled(EvaluationRequest, {**given, "data": filled(DataRequest, given)})


def _show_progress(done: int, name: str) -> None:
    typer.echo(f"{done:4d} {name}", err=True)


@app.command()
@takes(TABLES)
def reproduce(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print settings, samples, epochs and hours of every run; train nothing.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and their rows.")] = False,
    **given: Any,
) -> None:
    """Train and score what a table or figure of the paper needs; resumes interrupted runs."""
    from sader.evaluation.reproduce import run

    if listed:
        for name, about, rows in run.list_plans():
            typer.echo(f"{name}: {about}\n  rows: {', '.join(rows) or '-'}")
        return
    request = filled(ReproduceRequest, given)
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
