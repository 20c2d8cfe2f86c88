"""The command line: the root command, `sader demo` and `sader info`.

Every other file of this folder holds one Typer app with the commands of a subject; they are joined here. Commands are
plain functions that parse, call one function and print. Torch, NumPy and Rich are imported inside the commands, so that
`sader --help` needs none of them. A `SaderError` is printed as one message, with exit status 2.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from sader._version import __version__
from sader.cli import data, evaluate, remove, tools, train
from sader.cli.options import AsJson, Model, Seed, Steps
from sader.errors import SaderError, printable

if TYPE_CHECKING:
    from sader.demo import DemoReport
    from sader.evaluation.costs import ModelDescription, ModelEntry, PartDescription


class PlainFlags(TyperGroup):
    """A group whose help shows flags without the type `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the group itself."""
        return _without_flag_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command of the group."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_flag_types(command.get_params(ctx))
        return command


def _without_flag_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
    return parameters


app = typer.Typer(
    name="sader",
    cls=PlainFlags,
    help="One cloud-free image from several cloudy satellite acquisitions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    model: Model = None,
    steps: Steps = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Remove the clouds of a built-in real scene with known truth, and score the result."""
    with remove.watched(resumes=False) as callbacks:
        from sader.demo import run_demo

        report = run_demo(out, model=model, steps=steps, seed=seed, **callbacks)
    remove.show(report, as_json, _print_demo)


def _print_demo(report: DemoReport) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    steps = report.steps.removesuffix("+0")
    title = f"{report.model}, {steps} step{'' if steps == '1' else 's'}, {report.seconds:.1f} s"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("hidden pixels\nerror", justify="right", no_wrap=True)
    for heading in ("PSNR dB", "SSIM", "SAM °"):
        table.add_column(f"\n{heading}", justify="right")
    table.add_column("all pixels\nPSNR dB", justify="right", no_wrap=True)
    for masks, title_of_part in (("none", "no masks given"), ("true", "true masks given")):
        table.add_row(f"[bold]{title_of_part}[/bold]")
        for row in (row for row in report.scores if row.masks == masks):
            score = row.hidden
            cells = [f"{score.mae:.4f}", f"{score.psnr:.2f}", f"{score.ssim:.3f}", f"{score.sam:.2f}"]
            table.add_row(f"  {row.method}", *cells, f"{row.whole.psnr:.2f}")
        table.add_section()
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
    every: Annotated[bool, typer.Option("--all", help="Baseline systems too, or all settings of a training.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the models, or print the cost, the bands and the training data of one."""
    from sader.evaluation.costs import describe, describe_part, list_models

    if model is None:
        remove.show(list_models(baselines=every), as_json, lambda entries: _print_models(entries, every))
    else:
        found = describe_part(model) or describe(model, dates=dates, size=size)
        remove.show(found, as_json, lambda details: _print_model(details, every))


def _print_models(entries: list[ModelEntry], every: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from sader.evaluation.costs import list_parts

    table = Table()
    for heading in ("model", "kind", "bands", "auxiliary", "parameters"):
        table.add_column(heading, justify="right" if heading == "parameters" else "left")
    for entry in entries:
        count = f"{entry.parameters / 1e6:.2f} M"
        table.add_row(entry.name, entry.kind, " ".join(entry.bands), " ".join(entry.aux_bands) or "-", count)
    console = Console()
    console.print(table)
    lines = ["weights: ready for sader remove. Other kinds have no weights: train them with sader train NAME."]
    lines += [f"Used by the models: {', '.join(list_parts())}."]
    lines += [] if every else ["The baseline systems of the paper's tables: sader info --all"]
    console.print("\n".join([*lines, "One model in detail: sader info MODEL"]), highlight=False)


def _print_model(details: ModelDescription | PartDescription, every: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in details.rows(every=every):
        table.add_row(label, value)
    Console().print(table, highlight=False)


for part in (remove, train, evaluate, tools):
    app.add_typer(part.app)
app.add_typer(data.app, name="data", cls=PlainFlags)


MALLOC = {"MALLOC_MMAP_THRESHOLD_": (-3, 2**30), "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1)}
"""Environment variable of glibc -> parameter of `mallopt` (malloc.h) and its value in bytes."""


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it: getting it anew takes a sixth of the time of a tile.

    Variables that are set stay as they are. Child processes inherit the setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for name, (parameter, value) in MALLOC.items():
        if mallopt is not None and name not in os.environ:
            mallopt(parameter, value)
            os.environ[name] = str(value)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a `SaderError` becomes one line on standard error and exit status 2."""
    if arguments is None:
        keep_freed_memory()
        arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        # Removed here, so that `sader demo --debug` works as well as `sader --debug demo`.
        app([argument for argument in arguments if argument != "--debug"], prog_name="sader")
    except SaderError as error:
        if debug:
            raise
        print(f"{type(error).__name__}: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
