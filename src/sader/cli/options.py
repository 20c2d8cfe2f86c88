"""Options that several commands share, each declared once."""

from typing import Annotated

import typer

DATA = "Data"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: a GPU if there is one.")]
Model = Annotated[
    str | None, typer.Option(help="Shipped weights, a preset or a checkpoint file; default: the shipped weights.")
]
Seed = Annotated[int, typer.Option(help="Seed of the noise: the same seed gives the same image.")]
Steps = Annotated[str | None, typer.Option(help="Sampling steps: 4, or 4+1 with resampling; default: the model's own.")]

Dataset = Annotated[
    str | None,
    typer.Option(help="The data is this public dataset (sader data list) in its own layout.", rich_help_panel=DATA),
]
Sampler = Annotated[str, typer.Option(help="Dates of a public dataset: leak_free or published.", rich_help_panel=DATA)]
Lists = Annotated[
    str | None,
    typer.Option(help="Split lists of a public dataset: folder, frozen, hash, or a file.", rich_help_panel=DATA),
]
Partial = Annotated[
    bool, typer.Option("--partial", help="Use the places on disk where some are missing.", rich_help_panel=DATA)
]
Coverage = Annotated[
    str,
    typer.Option(
        help="SEN12MS-CR-TS: cloud cover by auto, masks, s2cloudless, rules or a table (sader data cover).",
        rich_help_panel=DATA,
    ),
]
