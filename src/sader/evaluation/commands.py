"""`sader evaluate`: parses, calls `run_evaluation`, prints. `register(app)` adds it to the command line."""

import json
from pathlib import Path
from typing import Annotated, Any

# No "from __future__ import annotations" here: Typer is imported inside `register` and evaluates the annotations there.


def register(app: Any) -> None:
    """Add the command `evaluate` to a Typer app."""
    import typer

    @app.command()
    def evaluate(
        models: Annotated[list[str], typer.Argument(help="Shipped names, checkpoint files or classical names.")],
        data: Annotated[list[Path], typer.Option("--data", help="Shards, or a folder of scenes; may be repeated.")],
        task: Annotated[
            str, typer.Option(help="clean (this date), paper (another date), simulated (clouds).")
        ] = "clean",
        mask: Annotated[str, typer.Option(help="Masks the models get: true, reference, or own (none).")] = "true",
        steps: Annotated[str | None, typer.Option(help="Sampling steps: 1, 4, or 4+1 with resampling.")] = None,
        samples: Annotated[int, typer.Option(min=1, help="Results averaged; from 2 on the spread is scored.")] = 1,
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
        clouds: Annotated[
            list[Path] | None, typer.Option("--clouds", help="Labelled places to take clouds from.")
        ] = None,
        lpips: Annotated[bool | None, typer.Option("--lpips/--no-lpips", help="Default: if installed.")] = None,
        rules: Annotated[bool, typer.Option("--rules", help="Also classical methods with rule-based masks.")] = False,
        pictures: Annotated[int, typer.Option(min=0, help="Best and worst cases drawn for each model.")] = 2,
        out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for table, JSON, CSV, pictures.")] = None,
        seed: Annotated[int, typer.Option(help="Seed of every choice.")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
    ) -> None:
        """Score models beside the classical methods on items with known truth."""
        from sader.evaluation.run import EvaluationRequest, run_evaluation
        from sader.evaluation.summary import markdown

        request = EvaluationRequest(
            models=tuple(models), data=tuple(data), task=task, mask=mask, steps=steps, samples=samples, dates=dates,
            limit=limit, split=split, dataset=dataset, sampler=sampler, protocol=protocol, lists=lists, partial=partial,
            coverage=coverage,
            clouds=tuple(clouds or ()), lpips=lpips, rules=rules, pictures=pictures, out=out,
            seed=seed,
        )  # fmt: skip
        result = run_evaluation(request, lambda done, name: typer.echo(f"{done:4d} {name}", err=True))
        if as_json:
            print(json.dumps({**result.facts, **result.summary.as_dict()}, indent=2))
            return
        print(markdown(result.summary, title=f"{dataset} {split}, sampler {sampler}" if dataset else task))
        for path in result.files:
            typer.echo(f"wrote {path}", err=True)
