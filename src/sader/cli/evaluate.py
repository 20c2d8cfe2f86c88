"""`sader evaluate`, `compare` and `reproduce`: parse, call one function, print."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from sader.cli.options import AsJson

app = typer.Typer()


@app.command()
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Shipped names, checkpoint files, run folders or classical names.")
    ],
    data: Annotated[list[Path], typer.Option("--data", help="Shards, or a folder of scenes; may be repeated.")],
    task: Annotated[str, typer.Option(help="clean (this date), paper (another date), simulated (clouds).")] = "clean",
    mask: Annotated[str, typer.Option(help="Masks the models get: true, reference, or own (none).")] = "true",
    steps: Annotated[str | None, typer.Option(help="Sampling steps: 1, 4, or 4+1 with resampling.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Results averaged; from 2 on the spread is scored.")] = 1,
    guide: Annotated[str | None, typer.Option(help="Guide of the resampling: none, mean, conv, mae.")] = None,
    dates: Annotated[int | None, typer.Option(min=1, help="Only so many dates of each item.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per place.")] = None,
    split: Annotated[
        str, typer.Option(help="Part of the known datasets: val, train or all; with --dataset also test.")
    ] = "val",
    dataset: Annotated[
        str | None, typer.Option(help="--data is this public dataset: sen2_mtc_new, ... (sader data list).")
    ] = None,
    sampler: Annotated[str, typer.Option(help="With --dataset: leak_free or published.")] = "leak_free",
    protocol: Annotated[
        str | None, typer.Option(help="With --dataset: mtc_stretch beside reflectance, or reflectance alone.")
    ] = None,
    lists: Annotated[str | None, typer.Option(help="With --dataset: folder, frozen, hash, or a list file.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="With --dataset: use the places on disk.")] = False,
    coverage: Annotated[
        str, typer.Option(help="SEN12MS-CR-TS: cloud cover by auto, masks, rules or a table (sader data cover).")
    ] = "auto",
    clouds: Annotated[list[Path] | None, typer.Option("--clouds", help="Labelled places to take clouds from.")] = None,
    lpips: Annotated[bool | None, typer.Option("--lpips/--no-lpips", help="Default: if installed.")] = None,
    rules: Annotated[bool, typer.Option("--rules", help="Also classical methods with rule-based masks.")] = False,
    pictures: Annotated[int, typer.Option(min=0, help="Best and worst cases drawn for each model.")] = 2,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for table, JSON, CSV, pictures.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of every choice.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Score models beside the classical methods on items with known truth."""
    from sader.evaluation.run import EvaluationRequest, run_evaluation
    from sader.evaluation.summary import markdown, print_summary

    request = EvaluationRequest(
        models=tuple(models), data=tuple(data), task=task, mask=mask, steps=steps, samples=samples, guide=guide,
        dates=dates, limit=limit, split=split, dataset=dataset, sampler=sampler, protocol=protocol, lists=lists,
        partial=partial, coverage=coverage, clouds=tuple(clouds or ()), lpips=lpips, rules=rules,
        pictures=pictures, out=out, seed=seed,
    )  # fmt: skip
    result = run_evaluation(request, lambda done, name: typer.echo(f"{done:4d} {name}", err=True))
    if as_json:
        print(json.dumps({**result.facts, **result.summary.as_dict()}, indent=2))
        return
    title = f"{dataset} {split}, sampler {sampler}" if dataset else task
    if sys.stdout.isatty():
        print_summary(result.summary, title=title)
        if out is None:
            typer.echo("all tables, with intervals, places and regions: --out FOLDER, or to a pipe.", err=True)
    else:
        print(markdown(result.summary, title=title))
    for path in result.files:
        typer.echo(f"wrote {path}", err=True)


@app.command()
def compare(
    models: Annotated[
        list[str],
        typer.Argument(help="Shipped names, checkpoints, run folders, classical names; NAME=FILE, FILE@4+1."),
    ],
    data: Annotated[list[Path], typer.Option("--data", help="Shards, or a folder of scenes; may be repeated.")],
    task: Annotated[
        list[str] | None, typer.Option("--task", help="clean, paper or simulated; default: clean and paper.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Test all against this one; default: the first.")] = None,
    classical: Annotated[bool, typer.Option("--classical/--no-classical", help="Also the classical ones.")] = True,
    metric: Annotated[str, typer.Option(help="Decides tests, best cases and the Pareto figure.")] = "psnr",
    mask: Annotated[str, typer.Option(help="Masks the models get: true, reference, or own (none).")] = "true",
    steps: Annotated[str | None, typer.Option(help="Sampling steps of all models: 4, or 4+1.")] = None,
    dates: Annotated[int | None, typer.Option(min=1, help="Only so many dates of each item.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per place.")] = None,
    split: Annotated[str, typer.Option(help="val, train or all; with --dataset also test.")] = "val",
    dataset: Annotated[str | None, typer.Option(help="--data is this public dataset (sader data list).")] = None,
    sampler: Annotated[str, typer.Option(help="With --dataset: leak_free or published.")] = "leak_free",
    protocol: Annotated[str | None, typer.Option(help="With --dataset: mtc_stretch or reflectance.")] = None,
    lists: Annotated[str | None, typer.Option(help="With --dataset: folder, frozen, hash, or a list file.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="With --dataset: use the places on disk.")] = False,
    coverage: Annotated[str, typer.Option(help="SEN12MS-CR-TS: auto, masks, rules or a table.")] = "auto",
    clouds: Annotated[list[Path] | None, typer.Option("--clouds", help="Labelled places with clouds.")] = None,
    lpips: Annotated[bool | None, typer.Option("--lpips/--no-lpips", help="Default: if installed.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="Items in the qualitative figure.")] = 3,
    pictures: Annotated[int, typer.Option(min=0, help="Best and worst cases drawn for each model.")] = 2,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for tables, CSV and figures.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of every choice.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare models on the same items: scores, paired tests, costs, Pareto and qualitative figures."""
    from sader.evaluation.compare import CompareRequest, run_compare
    from sader.evaluation.run import EvaluationRequest
    from sader.evaluation.tables import comparison_json, comparison_markdown

    request = EvaluationRequest(
        models=(), data=tuple(data), mask=mask, steps=steps, dates=dates, limit=limit, split=split, dataset=dataset,
        sampler=sampler, protocol=protocol, lists=lists, partial=partial, coverage=coverage,
        clouds=tuple(clouds or ()), lpips=lpips, pictures=pictures, out=out, seed=seed,
    )  # fmt: skip
    asked = CompareRequest(
        models=tuple(models), data=request, tasks=tuple(task or ("clean", "paper")), against=against,
        classical=classical, metric=metric, examples=examples,
    )  # fmt: skip
    results = run_compare(asked, lambda done, name: typer.echo(f"{done:4d} {name}", err=True))
    if as_json:
        print(json.dumps([comparison_json(r.bench, r.summary, r.comparisons, r.facts) for r in results], indent=2))
        return
    for r in results:
        print(comparison_markdown(r.bench, r.summary, r.comparisons, title=r.title, metric=metric))
        for path in r.files:
            typer.echo(f"wrote {path}", err=True)


@app.command()
def reproduce(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            help="table1, table2, mtcdn-ablation, loss-ablation, steps, correction, complexity, pareto, "
            "qualitative, here, or all."
        ),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Folder or NAME:FOLDER of a dataset; for here: shards.")
    ] = None,
    validation: Annotated[list[str] | None, typer.Option(help="For here: shards to score on; repeatable.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of runs, rows and tables.")] = Path("reproduce"),
    seconds: Annotated[float | None, typer.Option(help="Training time of each system.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each system.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny networks on made data: minutes on a CPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run only this row; repeatable.")] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Only write what has been run.")] = False,
    isolate: Annotated[
        bool | None, typer.Option("--isolate/--no-isolate", help="Work in processes apart; default unless --tiny.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Systems trained at the same time.")] = 1,
    scorers: Annotated[
        int | None, typer.Option(min=0, help="Processes that only score; default half of --workers.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which all is stopped and the tables are written.")
    ] = None,
    archive: Annotated[bool, typer.Option("--archive", help="Also write results.tgz, without weights.")] = False,
    sampler: Annotated[str, typer.Option(help="leak_free or published.")] = "leak_free",
    split: Annotated[str, typer.Option(help="Split that is scored.")] = "test",
    lists: Annotated[str | None, typer.Option(help="Split lists: folder, frozen, hash, or a file.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Use the places on disk.")] = False,
    coverage: Annotated[str, typer.Option(help="SEN12MS-CR-TS: auto, masks, rules or a table.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Scored items per place.")] = None,
    lpips: Annotated[bool | None, typer.Option("--lpips/--no-lpips", help="Default: if installed.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="Items in the qualitative figure.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of every run and choice.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A change to every run; repeatable.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and their rows.")] = False,
) -> None:
    """Train and score a table or figure of the paper; goes on where it was interrupted."""
    from sader.errors import require
    from sader.evaluation.reproduce.run import ReproduceRequest, list_plans, run_reproduce

    if listed:
        for name, about, rows in list_plans():
            typer.echo(f"{name}: {about}\n  rows: {', '.join(rows) or '-'}")
        return
    if not report_only:
        require("pytorch_lightning", extra="train", purpose="training")
    request = ReproduceRequest(
        tables=tuple(tables or ()), data=tuple(data or ()), validation=tuple(validation or ()), out=out,
        seconds=seconds, steps=steps, tiny=tiny, only=tuple(only or ()), report_only=report_only, isolate=isolate,
        sampler=sampler, split=split, lists=lists, partial=partial, coverage=coverage, limit=limit, lpips=lpips,
        examples=examples, seed=seed, overrides=tuple(set_ or ()), workers=workers, scorers=scorers,
        deadline=deadline, archive=archive,
    )  # fmt: skip
    outcome = run_reproduce(request, lambda text: typer.echo(text, err=True))
    for text in outcome.texts:
        print(text)
    for path in outcome.files:
        typer.echo(f"wrote {path}", err=True)
    if outcome.failed:
        for name, reason in outcome.failed.items():
            typer.echo(f"failed: {name}: {reason}", err=True)
        raise typer.Exit(1)
