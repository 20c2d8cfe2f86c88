"""Options that several commands share, each declared once."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: a GPU if there is one.")]
Model = Annotated[
    str | None, typer.Option(help="Shipped weights, a preset or a checkpoint file; default: the shipped weights.")
]
Seed = Annotated[int, typer.Option(help="Seed of the noise: the same seed gives the same image.")]
Steps = Annotated[str | None, typer.Option(help="Sampling steps: 4, or 4+1 with resampling; default: the model's own.")]
