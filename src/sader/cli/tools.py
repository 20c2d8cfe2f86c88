"""`sader export`, `sader serve`, and `sader bench`: seconds, rate and memory of one tile on this machine.

All rows of a benchmark are timed in one process; the first run of each is not counted.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sader.cli.options import AsJson, Device, declared, filled, takes
from sader.cli.remove import show
from sader.errors import check_known
from sader.viewer.settings import MIB, Limits, ServeSettings

if TYPE_CHECKING:
    import torch

    from sader.inference.remover import CloudRemover

app = typer.Typer()


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Shipped weights, a preset or a checkpoint file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: *.onnx or *.pt2.")],
    format: Annotated[
        Literal["onnx", "torch-export"] | None,
        typer.Option(help="onnx, or torch-export (takes about a minute); default: by the file's ending."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps; default: the model's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model as an ONNX or torch.export graph that runs without sader."""
    from sader.inference.onnx import export_model

    if format is None:
        format = "torch-export" if out.suffix == ".pt2" else "onnx"
    facts = export_model(model, out, format=format, steps=steps)
    if as_json:
        print(json.dumps({**facts, "file": str(out)}, indent=2))
        return
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB): {facts['model']}, steps {facts['steps']}")
    print(f"inputs {', '.join(facts['inputs'])}; outputs {', '.join(facts['outputs'])}")
    print(f"height and width: multiples of {facts['multiple']} up to {facts['largest']}")


@app.command()
@takes(
    declared("data", "host", "port", "allow_hosts", "allow_remote", "model", "device", of=(ServeSettings,)),
    declared("queue", "pixels", of=(Limits,)),
)
def serve(
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send; default: a new one is printed.")
    ] = None,
    keep_hours: Annotated[
        float, typer.Option(min=0.01, help="Age at which results and uploads are deleted, in hours.")
    ] = 24.0,
    max_upload_mb: Annotated[int, typer.Option(min=1, help="Largest uploaded file, in MiB.")] = 2048,
    **given: Any,
) -> None:
    """Serve a local page to view scenes and remove their clouds; also an OGC API - Processes."""
    from sader.viewer.launch import launch

    limits = filled(Limits, {**given, "upload_bytes": max_upload_mb * MIB, "keep_s": keep_hours * 3600})
    settings = filled(ServeSettings, {**given, "limits": limits})
    notify = partial(print, file=sys.stderr, flush=True)
    launch(settings, token_file=token_file, browser=browser, notify=notify)


@app.command()
def bench(
    model: Annotated[str | None, typer.Argument(help="Shipped weights, a preset or a checkpoint file.")] = None,
    steps: Annotated[str, typer.Option(help="Numbers of steps, separated by commas.")] = "1,4",
    size: Annotated[int, typer.Option(min=16, help="Edge of a tile in pixels.")] = 256,
    dates: Annotated[int, typer.Option(min=1, help="Dates of a series.")] = 3,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each; the median is printed.")] = 5,
    backend: Annotated[str | None, typer.Option(help="Only these: torch,accelerated,onnx.")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed and memory on this machine, for each backend and number of steps."""
    backends = None if backend is None else backend.split(",")
    rows = measure(model, steps=steps.split(","), size=size, dates=dates, runs=runs, device=device, backends=backends)
    show(rows, as_json, print_table)


@dataclass(frozen=True)
class BenchRow:
    """One line of the table."""

    model: str
    device: str
    backend: str
    steps: str
    size: int
    dates: int
    seconds: float
    """Median of a tile."""
    start_seconds: float
    """Time of the first tile beyond that: exported graphs, compiled code, caches."""
    memory_mb: float
    """Peak memory so far: of the process on a CPU, allocated by PyTorch on a GPU."""

    @property
    def tiles_per_second(self) -> float:
        return 1 / self.seconds

    @property
    def megapixels_per_second(self) -> float:
        return self.size**2 / 1e6 / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        rates = {"tiles_per_second": self.tiles_per_second, "megapixels_per_second": self.megapixels_per_second}
        return asdict(self) | rates


def measure(
    model: str | None = None,
    *,
    steps: Sequence[str] = ("1", "4"),
    size: int = 256,
    dates: int = 3,
    runs: int = 5,
    device: str | None = None,
    backends: Sequence[str] | None = None,
) -> list[BenchRow]:
    """Return one row per backend and step count.

    model: as for `sader remove`; None = the shipped one. backends: None = all that are installed and suit the device.
    """
    from sader.checkpoint import load_any
    from sader.data.synthetic.scene import make_series
    from sader.inference.remover import BACKENDS, DEFAULT_MODEL, CloudRemover

    name = model or DEFAULT_MODEL
    plain = CloudRemover(load_any(name), device=device)
    chosen = list(backends) if backends is not None else _suitable(plain)
    for one in chosen:
        check_known("backend", one, BACKENDS)
    bands = len(plain.bands)
    scene = make_series(0, size=(size, size), dates=dates)
    cloudy = scene.cloudy.repeat(-(-bands // scene.cloudy.shape[1]), axis=1)[:, :bands]
    rows = []
    for backend in chosen:
        remover = plain.with_options(backend=backend)
        for count in steps:
            seconds, start = _timed(remover, cloudy, count.strip(), runs)
            rows.append(
                BenchRow(
                    model=name,
                    device=describe_device(plain.device),
                    backend=backend,
                    steps=count.strip(),
                    size=size,
                    dates=dates,
                    seconds=seconds,
                    start_seconds=start,
                    memory_mb=peak_memory(plain.device),
                )
            )
    return rows


def _suitable(remover: CloudRemover) -> list[str]:
    from sader.method.diffusion import Denoiser

    backends = ["torch"]
    if isinstance(remover.model, Denoiser):
        backends.append("accelerated")
    installed = all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))
    if installed and remover.matches_dates and remover.device.type == "cpu":
        backends.append("onnx")
    return backends


def _timed(remover: CloudRemover, cloudy: Any, steps: str, runs: int) -> tuple[float, float]:
    """Return (median seconds of a tile, seconds that the first one took beyond that)."""

    def run() -> None:
        # Without masks, as `sader remove` for plain files: the longest computation.
        remover.predict(cloudy, reference=0 if remover.matches_dates else None, steps=steps)
        if remover.device.type == "cuda":
            import torch

            torch.cuda.synchronize(remover.device)

    first = clocked(run)
    seconds = statistics.median(clocked(run) for _ in range(runs))
    return seconds, max(0.0, first - seconds)


def clocked(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def peak_memory(device: torch.device) -> float:
    """Return the most memory used so far in MB."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3  # bytes there, kilobytes elsewhere


def describe_device(device: torch.device) -> str:
    """Return the GPU's name, or the processor with its number of threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"


def print_table(rows: Sequence[BenchRow]) -> None:
    """Print the rows as one table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("backend", "steps", "s / tile", "tiles / s", "Mpixel / s", "start s", "memory MB"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for row in rows:
        rates = f"{row.seconds:.3f}", f"{row.tiles_per_second:.2f}", f"{row.megapixels_per_second:.3f}"
        table.add_row(row.backend, row.steps, *rates, f"{row.start_seconds:.1f}", f"{row.memory_mb:.0f}")
    console = Console()
    title = f"{first.model} on {first.device}: tiles of {first.size} x {first.size} pixels, {first.dates} dates"
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)
