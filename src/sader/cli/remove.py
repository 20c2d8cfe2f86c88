"""`sader remove`: parses, calls `run_remove`, prints."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sader.cli.options import AsJson

READING, WRITING, WORKING = "Reading", "Also written", "Model and machine"
LOG_EVERY = 60.0
"""Seconds between lines about progress where there is no terminal for a bar."""

app = typer.Typer()


@app.command()
def remove(
    inputs: Annotated[
        list[str] | None, typer.Argument(help="GeoTIFFs, folders, .SAFE products or STAC items of one place.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The cloud-free GeoTIFF to write.")] = Path("clear.tif"),
    reference: Annotated[
        str, typer.Option(help="The date to clean: FILE, DATE, auto (clearest), none (new image).")
    ] = "auto",
    mask: Annotated[
        list[str] | None,
        typer.Option(
            help="auto, scl, own, s2cloudless, omnicloudmask, a folder of masks, or a file for each date (repeat)."
        ),
    ] = None,
    preview: Annotated[Path | None, typer.Option(help="A PNG with inputs and result.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    as_json: AsJson = False,
    bands: Annotated[
        str | None,
        typer.Option(
            help="Names in file order, or rgb, rgbn, bgrn, grn, 10-band, 12-band, 13-band.", rich_help_panel=READING
        ),
    ] = None,
    offset: Annotated[
        str, typer.Option(help="auto, none, or counts such as -1000 (baseline 04.00).", rich_help_panel=READING)
    ] = "auto",
    scale: Annotated[
        float | None,
        typer.Option(help="Reflectance per count; default: what the file says.", rich_help_panel=READING),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="Output grid: a raster file, EPSG:32632 or EPSG:32632/20; default: first input.",
            rich_help_panel=READING,
        ),
    ] = None,
    stac: Annotated[
        str | None, typer.Option(help="STAC API to search instead of files.", rich_help_panel=READING)
    ] = None,
    bbox: Annotated[
        str | None, typer.Option(help="west,south,east,north in degrees, with --stac.", rich_help_panel=READING)
    ] = None,
    dates: Annotated[
        str | None, typer.Option(help="2022-03-01/2022-05-31, with --stac.", rich_help_panel=READING)
    ] = None,
    collection: Annotated[
        str | None, typer.Option(help="STAC collection; default sentinel-2-l2a.", rich_help_panel=READING)
    ] = None,
    uncertainty: Annotated[
        bool,
        typer.Option(
            "--uncertainty", help="Also OUT_uncertainty.tif: expected error, reflectance.", rich_help_panel=WRITING
        ),
    ] = False,
    count: Annotated[
        bool, typer.Option("--count", help="Also OUT_count.tif: clear observations.", rich_help_panel=WRITING)
    ] = False,
    provenance: Annotated[
        bool,
        typer.Option(
            "--provenance", help="Also OUT_provenance.tif: 1 observed, 2 reconstructed.", rich_help_panel=WRITING
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="An HTML page to send around; brings --provenance (and --uncertainty).", rich_help_panel=WRITING
        ),
    ] = None,
    item: Annotated[
        bool, typer.Option("--item/--no-item", help="A STAC item beside the output.", rich_help_panel=WRITING)
    ] = True,
    model: Annotated[
        str | None,
        typer.Option(
            help="Shipped weights, a preset or a checkpoint file; default: sader-s2-rgbn, or for files with more "
            "bands sader-s2-msi.",
            rich_help_panel=WORKING,
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Sampling steps: 4, or 4+1; default: the model's own.", rich_help_panel=WORKING),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Results averaged; default 1, or 4 for --uncertainty of a model that states no error.",
            rich_help_panel=WORKING,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same image.", rich_help_panel=WORKING)] = 0,
    cloud_threshold: Annotated[
        float | None,
        typer.Option(
            help="Own masks: probability that is cloud; higher keeps haze. Default 0.5.", rich_help_panel=WORKING
        ),
    ] = None,
    mask_growth: Annotated[
        int | None,
        typer.Option(help="Own masks: pixels by which they are widened. Default 2.", rich_help_panel=WORKING),
    ] = None,
    tile: Annotated[
        int | None, typer.Option(help="Edge of a tile in pixels; default 512.", rich_help_panel=WORKING)
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(help="Pixels shared by neighbouring tiles; default 64.", rich_help_panel=WORKING),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Tiles at a time on a GPU.", rich_help_panel=WORKING)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or cuda:1; default: a GPU if there is one.", rich_help_panel=WORKING),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="torch, accelerated (half precision, the default on a GPU), or onnx (ONNX Runtime).",
            rich_help_panel=WORKING,
        ),
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(
            help="Work on a dask cluster: its scheduler's address or file, or local (processes of this machine).",
            rich_help_panel=WORKING,
        ),
    ] = None,
) -> None:
    """Remove the clouds of your own scene: several dates in, one cloud-free map out."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not inputs and stac is None:
        raise typer.BadParameter("name at least one GeoTIFF, folder, .SAFE product or STAC item.")
    live = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    with Progress(*columns, console=live, transient=True, disable=not live.is_terminal) as bar:
        task = bar.add_task("opening", total=None, rate="")
        # Importing torch takes seconds: the bar is already on the screen.
        from sader.geo.remove import RemoveRequest, run_remove
        from sader.geo.scene.run import SceneOptions

        options = SceneOptions(
            reference=reference, steps=steps, seed=seed, samples=samples, tile=tile,
            overlap=overlap, batch_size=batch_size, uncertainty=uncertainty, count=count, provenance=provenance,
            overwrite=overwrite, backend=backend, cloud_threshold=cloud_threshold, mask_growth=mask_growth,
        )  # fmt: skip
        request = RemoveRequest(
            inputs=tuple(inputs or ()), out=str(out), options=options, bands=bands, offset=offset, scale=scale,
            mask=tuple(mask or ()), grid=grid, model=model, device=device,
            preview=None if preview is None else str(preview), report=None if report is None else str(report),
            item=item, dask=dask, stac=stac, bbox=bbox, dates=dates, collection=collection,
        )  # fmt: skip

        lines = None if live.is_terminal else ProgressLines(lambda text: print(text, file=sys.stderr, flush=True))

        def progress(done: int, total: int) -> None:
            if lines is not None:
                lines(done, total)
            bar.update(task, description="removing clouds", completed=done, total=total)
            speed = bar.tasks[0].speed
            bar.update(task, rate=f"{60 * speed:.1f} tiles/min" if speed else "")

        def notice(text: str) -> None:
            live.print(f"note: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)

        try:
            done = run_remove(request, progress=progress, notice=notice)
        except KeyboardInterrupt:
            notice("stopped. The same command goes on from here; another one with this output starts anew.")
            raise
    if as_json:
        print(json.dumps(done.as_dict(), indent=2))
    else:
        print_report(done)


class ProgressLines:
    """Progress for a log: a line now and then, none about work that is soon done."""

    def __init__(self, say: Callable[[str], None], *, every: float | None = None) -> None:
        self._say, self._every = say, LOG_EVERY if every is None else every
        self._began = self._last = time.monotonic()
        self._before: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """Take note that `done` of `total` tiles are made; the first call counts what was there before."""
        now = time.monotonic()
        if self._before is None:
            self._before, self._began = done, now
        if now - self._last < self._every or done >= total:
            return
        self._last = now
        text = f"removing clouds: {done} of {total} tiles"
        if fresh := done - self._before:
            rate = fresh / (now - self._began)
            left = (total - done) / rate
            text += f", {60 * rate:.1f} tiles/min, {int(left // 3600)}:{int(left // 60 % 60):02d} h left"
        self._say(text)


def print_report(report: Any) -> None:
    """Print what was done in a few lines."""
    total = max(1, sum(report.pixels.values()))
    share = {name: number / total for name, number in report.pixels.items()}
    cleaned = f"cleaned {report.reference}" if report.reference else "a new image"
    height, width = report.size
    print(
        f"{cleaned} with {report.model}: {width} x {height} pixels, {', '.join(report.bands)}; "
        f"{share.get('observed', 0):.1%} observed, {share.get('reconstructed', 0):.1%} reconstructed, "
        f"{share.get('nodata', 0):.1%} without data; "
        f"{report.seconds:.1f} s"
    )
    for path in report.files:
        print(f"wrote {path}")
    sys.stdout.flush()
