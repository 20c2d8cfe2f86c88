"""`sader train` and `sader pretrain-guide`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Set = Annotated[list[str] | None, typer.Option("--set", help="A changed key, such as train.steps=2000; repeatable.")]
Run = Annotated[Path, typer.Option("--run", help="Folder of the run: config, log, checkpoints, weights.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


@app.command()
def train(
    run: Run,
    preset: Annotated[
        str | None, typer.Argument(help="A preset, baseline or YAML file; not needed with --resume or --init.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Shards to train on, files or folders; repeatable.")] = None,
    validation: Annotated[list[str] | None, typer.Option(help="Shards of other places to validate on.")] = None,
    set_: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    init: Annotated[str | None, typer.Option(help="Fine-tune these weights: a shipped name or a file.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a network on packed shards, fine-tune shipped weights, or resume an interrupted run."""
    from sader.training.run import run_training

    path = run_training(
        preset,
        run,
        data=data or (),
        validation=validation or (),
        overrides=set_ or (),
        resume=resume,
        init=init,
        progress=not quiet,
    )
    typer.echo(f"wrote {path}")


@app.command("pretrain-guide")
def pretrain_guide(
    run: Run,
    data: Annotated[list[str] | None, typer.Option(help="Shards to train on, files or folders; repeatable.")] = None,
    kind: Annotated[str | None, typer.Option(help="mae (shipped), mae-paper (as published) or conv.")] = None,
    bands: Annotated[str | None, typer.Option(help="Bands of the images: B02,B03,...")] = None,
    set_: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    quiet: Quiet = False,
) -> None:
    """Pretrain the guide of the resampling (a masked autoencoder) on packed shards."""
    from sader.training.guide import run_guide

    path = run_guide(data or (), run, kind=kind, bands=bands, overrides=set_ or (), resume=resume, progress=not quiet)
    typer.echo(f"wrote {path}")
