"""`sader evaluate`, `sader compare` and `sader reproduce`.

The first two build the same request; `compare` adds paired tests, costs and figures. Their shared options are declared
once at the top.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from sader.cli.options import AsJson, Coverage, Dataset, Lists, Partial, Sampler

app = typer.Typer()

DATA, METHODS, REPORT = "Data", "Methods", "Report"

Models = Annotated[
    list[str],
    typer.Argument(
        help="Shipped names, checkpoint files, run folders or classical names; NAME=FILE sets the label, FILE@4+1 the "
        "sampling steps."
    ),
]
Data = Annotated[
    list[Path], typer.Option("--data", help="Shards or a folder of scenes; repeatable.", rich_help_panel=DATA)
]
Split = Annotated[
    str,
    typer.Option(help="Part of a known dataset: val, train, all; with --dataset also test.", rich_help_panel=DATA),
]
Protocol = Annotated[
    str | None,
    typer.Option(
        help="With --dataset: mtc_stretch (beside reflectance) or reflectance; default: as published.",
        rich_help_panel=DATA,
    ),
]
Clouds = Annotated[
    list[Path] | None,
    typer.Option("--clouds", help="Labelled places whose clouds are pasted; repeatable.", rich_help_panel=DATA),
]
Dates = Annotated[int | None, typer.Option(min=1, help="Dates of each item; default: all.", rich_help_panel=DATA)]
Limit = Annotated[int | None, typer.Option(min=1, help="Items per place; default: all.", rich_help_panel=DATA)]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.", rich_help_panel=DATA)]
Mask = Annotated[
    str, typer.Option(help="Masks given to the models: true, reference, or own (none).", rich_help_panel=METHODS)
]
Steps = Annotated[
    str | None,
    typer.Option(
        help="Sampling steps: 1, 4, or 4+1 with resampling; default: each model's own.", rich_help_panel=METHODS
    ),
]
Samples = Annotated[
    int, typer.Option(min=1, help="Results averaged; from 2 on their spread is scored.", rich_help_panel=METHODS)
]
Guide = Annotated[
    str | None, typer.Option(help="Guide of the resampling: none, mean, conv or mae.", rich_help_panel=METHODS)
]
GuideWeights = Annotated[
    str | None, typer.Option(help="Weights of the guide (sader pretrain-guide).", rich_help_panel=METHODS)
]
Resampling = Annotated[
    str | None,
    typer.Option(
        help="Variant of the resampling: paper (Algorithm 1), public_code or default; default: each model's own.",
        rich_help_panel=METHODS,
    ),
]
Classical = Annotated[
    bool, typer.Option("--classical/--no-classical", help="Score the classical methods too.", rich_help_panel=METHODS)
]
Rules = Annotated[
    bool, typer.Option("--rules", help="Score classical methods with rule-based masks too.", rich_help_panel=METHODS)
]
Lpips = Annotated[
    bool | None,
    typer.Option("--lpips/--no-lpips", help="Score LPIPS; default: if installed.", rich_help_panel=REPORT),
]
Pictures = Annotated[
    int, typer.Option(min=0, help="Best and worst cases drawn for each model.", rich_help_panel=REPORT)
]
Examples = Annotated[int, typer.Option(min=0, help="Items in the qualitative figure.", rich_help_panel=REPORT)]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder for tables, JSON, CSV, figures and pictures.", rich_help_panel=REPORT),
]


@app.command()
def evaluate(
    models: Models,
    data: Data,
    task: Annotated[
        str,
        typer.Option(help="clean (this date), paper (another date) or simulated (clouds).", rich_help_panel=DATA),
    ] = "clean",
    split: Split = "val",
    dataset: Dataset = None,
    sampler: Sampler = "leak_free",
    protocol: Protocol = None,
    lists: Lists = None,
    partial: Partial = False,
    coverage: Coverage = "auto",
    clouds: Clouds = None,
    dates: Dates = None,
    limit: Limit = None,
    seed: Seed = 0,
    mask: Mask = "true",
    steps: Steps = None,
    samples: Samples = 1,
    guide: Guide = None,
    guide_weights: GuideWeights = None,
    resampling: Resampling = None,
    classical: Classical = True,
    rules: Rules = False,
    lpips: Lpips = None,
    pictures: Pictures = 2,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Score models beside the classical methods on items with known truth."""
    from sader.evaluation.data import DataRequest
    from sader.evaluation.evaluate import EvaluationRequest, run_evaluation
    from sader.evaluation.report import markdown, print_summary, report_json

    source = DataRequest(
        data=tuple(data), split=split, dataset=dataset, sampler=sampler, protocol=protocol, lists=lists,
        partial=partial, coverage=coverage, clouds=tuple(clouds or ()), dates=dates, limit=limit, seed=seed,
    )  # fmt: skip
    request = EvaluationRequest(
        models=tuple(models), data=source, tasks=(task,), mask=mask, steps=steps, samples=samples, guide=guide,
        guide_weights=guide_weights, resampling=resampling, classical=classical, rules=rules, lpips=lpips,
        pictures=pictures, out=out,
    )  # fmt: skip
    (found,) = run_evaluation(request, _show_progress)
    if as_json:
        print(json.dumps(report_json(found.report), indent=2))
        return
    if sys.stdout.isatty():
        print_summary(found.report)
        if out is None:
            typer.echo("all tables, with intervals, places and regions: --out FOLDER, or to a pipe.", err=True)
    else:
        print(markdown(found.report))
    for path in found.files:
        typer.echo(f"wrote {path}", err=True)


@app.command()
def compare(
    models: Models,
    data: Data,
    task: Annotated[
        list[str] | None,
        typer.Option(help="clean, paper or simulated; repeatable; default: clean and paper.", rich_help_panel=DATA),
    ] = None,
    split: Split = "val",
    dataset: Dataset = None,
    sampler: Sampler = "leak_free",
    protocol: Protocol = None,
    lists: Lists = None,
    partial: Partial = False,
    coverage: Coverage = "auto",
    clouds: Clouds = None,
    dates: Dates = None,
    limit: Limit = None,
    seed: Seed = 0,
    mask: Mask = "true",
    steps: Steps = None,
    samples: Samples = 1,
    guide: Guide = None,
    guide_weights: GuideWeights = None,
    resampling: Resampling = None,
    classical: Classical = True,
    rules: Rules = False,
    lpips: Lpips = None,
    against: Annotated[
        str | None,
        typer.Option(help="The method all others are tested against; default: the first.", rich_help_panel=REPORT),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Metric of the tests and of the Pareto figure.", rich_help_panel=REPORT)
    ] = "psnr",
    examples: Examples = 3,
    pictures: Pictures = 2,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate models and add paired tests, costs, the Pareto figure and the qualitative figure."""
    from sader.evaluation.data import DataRequest
    from sader.evaluation.evaluate import EvaluationRequest, run_evaluation
    from sader.evaluation.report import markdown, report_json

    source = DataRequest(
        data=tuple(data), split=split, dataset=dataset, sampler=sampler, protocol=protocol, lists=lists,
        partial=partial, coverage=coverage, clouds=tuple(clouds or ()), dates=dates, limit=limit, seed=seed,
    )  # fmt: skip
    request = EvaluationRequest(
        models=tuple(models), data=source, tasks=tuple(task or ("clean", "paper")), mask=mask, steps=steps,
        samples=samples, guide=guide, guide_weights=guide_weights, resampling=resampling, classical=classical,
        rules=rules, lpips=lpips, compare=True, against=against, metric=metric, examples=examples, pictures=pictures,
        out=out,
    )  # fmt: skip
    found = run_evaluation(request, _show_progress)
    if as_json:
        print(json.dumps([report_json(each.report) for each in found], indent=2))
        return
    for each in found:
        print(markdown(each.report))
        for path in each.files:
            typer.echo(f"wrote {path}", err=True)


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
        typer.Option(
            "--data",
            help="Folder or NAME:FOLDER of a dataset, eurosat_ms:FOLDER for the guides; for here: shards to train on.",
            rich_help_panel=DATA,
        ),
    ] = None,
    validation: Annotated[
        list[str] | None, typer.Option(help="For here: shards to score on; repeatable.", rich_help_panel=DATA)
    ] = None,
    sampler: Sampler = "leak_free",
    split: Annotated[str, typer.Option(help="Split that is scored.", rich_help_panel=DATA)] = "test",
    lists: Lists = None,
    partial: Partial = False,
    coverage: Coverage = "auto",
    draws: Annotated[
        int,
        typer.Option(
            min=1, help="SEN12MS-CR-TS: training series of each patch, each with its own target.", rich_help_panel=DATA
        ),
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
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of runs, rows and tables.", rich_help_panel=REPORT)
    ] = Path("reproduce"),
) -> None:
    """Train and score a table or figure of the paper; an interrupted command continues where it stopped."""
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
        from sader.evaluation.reproduce.dry_run import dry_run as settings_of

        for text in settings_of(request):
            print(text)
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
