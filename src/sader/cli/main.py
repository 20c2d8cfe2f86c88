"""The command line: parse, call one function, print.

Nothing heavy is imported at the top: `sader --help` must answer at once, so torch, numpy and Rich's tables are imported
by the command that needs them. Mistakes in the input are printed as one message, with exit status 2.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sader._version import __version__
from sader.cli.data import app as data_commands
from sader.cli.evaluate import register as register_evaluation
from sader.cli.remove import register as register_geo
from sader.cli.serve import register as register_viewer
from sader.cli.tools import register as register_speed
from sader.cli.train import register as register_training
from sader.errors import SaderError

if TYPE_CHECKING:
    from rich.console import Console

    from sader.demo import DemoReport
    from sader.evaluation.description import BaselineInfo
    from sader.evaluation.info import ModelEntry, ModelInfo

app = typer.Typer(
    name="sader",
    help="One cloud-free image from several cloudy satellite acquisitions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on standard output.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"sader {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """One cloud-free image from several cloudy satellite acquisitions."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for clear.tif and before_after.png.")] = Path("."),
    model: Annotated[
        str | None, typer.Option(help="Shipped weights, a preset or a checkpoint file; default: the shipped weights.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Sampling steps: 4, or 4+1 with resampling; default: the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise: the same seed gives the same image.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Remove the clouds of a built-in scene with known truth and score the result."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=as_json)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    live = Console(stderr=True)
    with Progress(*columns, console=live, transient=True, disable=not live.is_terminal) as bar:
        task = bar.add_task("loading", total=None)
        # Importing torch takes seconds: the bar is already on the screen.
        from sader.demo import run_demo

        bar.update(task, description="removing clouds")

        def progress(done: int, total: int) -> None:
            bar.update(task, description="removing clouds", completed=done, total=total)

        def notice(text: str) -> None:
            live.print(text, style="yellow", highlight=False)

        report = run_demo(out, model=model, steps=steps, seed=seed, progress=progress, notice=notice)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print_demo(report, console)


def _print_demo(report: DemoReport, console: Console) -> None:
    from rich import box
    from rich.table import Table

    steps = report.steps.removesuffix("+0")
    title = f"{report.model}, {steps} step{'' if steps == '1' else 's'}, {report.seconds:.1f} s"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for region in ("all pixels", "hidden pixels"):
        table.add_column(f"{region}\nPSNR dB", justify="right", no_wrap=True)
        table.add_column("\nSSIM", justify="right")
        table.add_column("\nSAM °", justify="right")
    for row in report.scores:
        cells = []
        for score in (row.whole, row.hidden):
            cells += [f"{score.psnr:.2f}", f"{score.ssim:.3f}", f"{score.sam:.2f}"]
        table.add_row(row.method, *cells)
    console.print(title, style="bold", highlight=False)
    console.print(table)
    for path in report.files:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    for text in report.skipped:
        console.print(f"not written: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)


@app.command()
def info(
    model: Annotated[
        str | None, typer.Argument(help="A preset, a baseline system, shipped weights or a checkpoint file.")
    ] = None,
    dates: Annotated[int, typer.Option(min=1, help="Dates T the cost is counted for.")] = 3,
    size: Annotated[int, typer.Option(min=1, help="Image height and width in pixels the cost is counted for.")] = 256,
    as_json: AsJson = False,
) -> None:
    """List the models, or print what one costs, sees and was trained on."""
    from sader.evaluation.info import describe, list_models

    if model is None:
        entries = list_models()
        if as_json:
            print(json.dumps([entry.as_dict() for entry in entries], indent=2))
        else:
            _print_models(entries)
        return
    details = describe(model, dates=dates, size=size)
    if as_json:
        print(json.dumps(details.as_dict(), indent=2))
    else:
        _print_model(details)


def _print_models(entries: list[ModelEntry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("model", "kind", "bands", "auxiliary", "parameters"):
        table.add_column(heading, justify="right" if heading == "parameters" else "left")
    for entry in entries:
        count = f"{entry.parameters / 1e6:.2f} M"
        table.add_row(entry.name, entry.kind, " ".join(entry.bands), " ".join(entry.aux_bands) or "-", count)
    console = Console()
    console.print(table)
    if not any(entry.trained for entry in entries):
        console.print("No trained weights are shipped yet.", style="yellow")
    console.print(
        "weights: ready for sader remove. preset, baseline: no weights; train them with sader train NAME.\n"
        "More about one of them: sader info MODEL",
        highlight=False,
    )


def _print_model(details: ModelInfo | BaselineInfo) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in details.rows():
        table.add_row(label, value)
    Console().print(table, highlight=False)


register_geo(app)
register_training(app)
register_evaluation(app)
register_speed(app)
register_viewer(app)
app.add_typer(data_commands, name="data")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a `SaderError` becomes one line on standard error and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    try:
        # Taken out here, so that `sader demo --debug` works as well as `sader --debug demo`.
        app([argument for argument in arguments if argument != "--debug"], prog_name="sader")
    except SaderError as error:
        if debug:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
