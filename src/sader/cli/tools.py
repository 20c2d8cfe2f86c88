"""`sader export` and `sader bench`: parse, call one function, print."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sader.cli.options import AsJson, Device

app = typer.Typer()


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Shipped weights, a preset or a checkpoint file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: *.onnx or *.pt2.")],
    format: Annotated[
        str | None,
        typer.Option(help="onnx, or torch-export (takes about a minute); default: by the file's ending."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps; default: the model's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model as one graph that runs without sader, for any number of dates."""
    from sader.inference.onnx import export_model

    if format is None:
        format = "torch-export" if out.suffix == ".pt2" else "onnx"
    facts = export_model(model, out, format=format, steps=steps)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps({**facts, "file": str(out)}, indent=2))
        return
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB): {facts['model']}, steps {facts['steps']}")
    print(f"inputs {', '.join(facts['inputs'])}; outputs {', '.join(facts['outputs'])}")
    print(f"height and width: multiples of {facts['multiple']} up to {facts['largest']}")


@app.command()
def bench(
    model: Annotated[str | None, typer.Argument(help="Shipped weights, a preset or a checkpoint file.")] = None,
    steps: Annotated[str, typer.Option(help="Step counts to time, with commas.")] = "1,4",
    size: Annotated[int, typer.Option(min=16, help="Edge of a tile in pixels.")] = 256,
    dates: Annotated[int, typer.Option(min=1, help="Dates of a series.")] = 3,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 5,
    backend: Annotated[str | None, typer.Option(help="Only these, with commas: torch, accelerated, onnx.")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Time this machine: tiles and megapixels per second and memory, for each backend and step count."""
    from sader.cli.bench import measure, print_table

    rows = measure(
        model, steps=steps.split(","), size=size, dates=dates, runs=runs, device=device,
        backends=None if backend is None else backend.split(","),
    )  # fmt: skip
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        print_table(rows)
