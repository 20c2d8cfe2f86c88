"""`sader remove`: parses the command line, calls `run_remove`, prints the report."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sader.cli.options import AsJson
from sader.errors import printable

READING, TILES, WRITING, WORKING = "Reading the input", "Masks and tiles", "More outputs", "Model and machine"
LOG_EVERY = 60.0
"""Seconds between lines about progress where there is no terminal for a bar."""

app = typer.Typer()


def _option(help: str, panel: str | None = None, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@app.command()
def remove(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(help="GeoTIFFs, folders, .SAFE products or STAC items of one place, or one Zarr store."),
    ] = None,
    out: Annotated[Path, _option("GeoTIFF to write (.zarr for a Zarr store).", None, "--out", "-o")] = Path(
        "clear.tif"
    ),
    reference: Annotated[
        str, _option("Date to clean: a file name, a date, auto (the clearest) or none (a new image).")
    ] = "auto",
    overwrite: Annotated[bool, _option("Replace existing outputs.", None, "--overwrite")] = False,
    as_json: AsJson = False,
    bands: Annotated[
        str | None,
        _option("Names in the order of the file, or rgb, rgbn, bgrn, grn, 10-band, 12-band, 13-band.", READING),
    ] = None,
    offset: Annotated[str, _option("auto, none, or counts such as -1000 (baseline 04.00).", READING)] = "auto",
    scale: Annotated[float | None, _option("Reflectance per count; default: that of the file.", READING)] = None,
    grid: Annotated[
        str | None,
        _option("Output grid: a raster file, EPSG:32632 or EPSG:32632/20; default: the first input.", READING),
    ] = None,
    stac: Annotated[str | None, _option("STAC API to search instead of files.", READING)] = None,
    bbox: Annotated[str | None, _option("west,south,east,north in degrees, with --stac.", READING)] = None,
    dates: Annotated[str | None, _option("2022-03-01/2022-05-31, with --stac.", READING)] = None,
    collection: Annotated[str | None, _option("STAC collection; default sentinel-2-l2a.", READING)] = None,
    mask: Annotated[
        list[str] | None,
        _option("auto, scl, own, s2cloudless, omnicloudmask, a folder, or a mask file for each date (repeat).", TILES),
    ] = None,
    cloud_threshold: Annotated[
        float | None, _option("Probability that counts as cloud in masks of the model; default 0.5.", TILES)
    ] = None,
    mask_growth: Annotated[
        int | None, _option("Pixels by which masks of the model are widened; default 2.", TILES)
    ] = None,
    tile: Annotated[int | None, _option("Edge of a tile in pixels; default 512.", TILES)] = None,
    overlap: Annotated[int | None, _option("Pixels shared by neighbouring tiles; default 64.", TILES)] = None,
    uncertainty: Annotated[
        bool, _option("OUT_uncertainty.tif: expected error in reflectance.", WRITING, "--uncertainty")
    ] = False,
    count: Annotated[bool, _option("OUT_count.tif: number of clear observations.", WRITING, "--count")] = False,
    provenance: Annotated[
        bool, _option("OUT_provenance.tif: 1 observed, 2 reconstructed.", WRITING, "--provenance")
    ] = False,
    preview: Annotated[Path | None, _option("PNG of the inputs and the result.", WRITING)] = None,
    report: Annotated[
        Path | None, _option("HTML page about the run; also writes provenance (and uncertainty).", WRITING)
    ] = None,
    item: Annotated[bool, _option("STAC item beside the output.", WRITING, "--item/--no-item")] = True,
    model: Annotated[
        str | None,
        _option(
            "Shipped weights, a preset or a checkpoint file; default: sader-s2-rgbn, or for files with more bands "
            "sader-s2-msi.",
            WORKING,
        ),
    ] = None,
    steps: Annotated[str | None, _option("Sampling steps: 4, or 4+1; default: those of the model.", WORKING)] = None,
    resampling: Annotated[
        str | None, _option("Variant of the resampling: paper (Algorithm 1), public_code or default.", WORKING)
    ] = None,
    guide: Annotated[str | None, _option("Guide of the resampling: mae, conv, mean, lowpass or none.", WORKING)] = None,
    guide_weights: Annotated[
        str | None, _option("Weights of the guide mae or conv (sader pretrain-guide).", WORKING)
    ] = None,
    samples: Annotated[
        int | None,
        _option("Results averaged; default 1, or 4 for --uncertainty of a model that states no error.", WORKING, min=1),
    ] = None,
    seed: Annotated[int, _option("The same seed gives the same image.", WORKING)] = 0,
    device: Annotated[str | None, _option("cpu, cuda or cuda:1; default: a GPU if there is one.", WORKING)] = None,
    threads: Annotated[
        int | None, _option("Processor cores used on a CPU; default: all that are available.", WORKING, min=1)
    ] = None,
    batch_size: Annotated[int | None, _option("Tiles computed together on a GPU; default 8.", WORKING, min=1)] = None,
    backend: Annotated[
        str | None,
        _option("torch (default on a CPU), accelerated (half precision, default on a GPU) or onnx.", WORKING),
    ] = None,
    dask: Annotated[
        str | None,
        _option("Compute on a dask cluster: address or file of its scheduler, or local (this process).", WORKING),
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
        from sader.geo.scene.options import SceneOptions

        options = SceneOptions(
            reference=reference,
            steps=steps,
            resampling=resampling,
            guide=guide,
            guide_weights=guide_weights,
            seed=seed,
            samples=samples,
            tile=tile,
            overlap=overlap,
            batch_size=batch_size,
            threads=threads,
            cloud_threshold=cloud_threshold,
            mask_growth=mask_growth,
            uncertainty=uncertainty,
            count=count,
            provenance=provenance,
            overwrite=overwrite,
            backend=backend,
        )
        request = RemoveRequest(
            inputs=tuple(inputs or ()),
            out=str(out),
            options=options,
            bands=bands,
            offset=offset,
            scale=scale,
            mask=tuple(mask or ()),
            grid=grid,
            model=model,
            device=device,
            preview=None if preview is None else str(preview),
            report=None if report is None else str(report),
            item=item,
            dask=dask,
            stac=stac,
            bbox=bbox,
            dates=dates,
            collection=collection,
        )
        lines = None if live.is_terminal else ProgressLines(lambda text: print(text, file=sys.stderr, flush=True))

        def progress(done: int, total: int) -> None:
            if lines is not None:
                lines(done, total)
            bar.update(task, description="removing clouds", completed=done, total=total)
            speed = bar.tasks[0].speed
            bar.update(task, rate=f"{60 * speed:.1f} tiles/min" if speed else "")

        def notice(text: str) -> None:
            live.print(f"note: {printable(text)}", style="yellow", highlight=False, markup=False, soft_wrap=True)

        try:
            done = run_remove(request, progress=progress, notice=notice)
        except KeyboardInterrupt:
            notice("stopped. The same command continues from here; a different one with this output starts again.")
            raise
    if as_json:
        print(json.dumps(done.as_dict(), indent=2))
    else:
        print_report(done)


class ProgressLines:
    """Progress for a log: one line a minute."""

    def __init__(self, say: Callable[[str], None], *, every: float | None = None) -> None:
        self._say, self._every = say, LOG_EVERY if every is None else every
        self._began = self._last = time.monotonic()
        self._before: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """Print a line if the last one is a minute old; tiles that are done at the first call do not count as speed."""
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
    """Print the report in a few lines."""
    total = max(1, sum(report.pixels.values()))
    share = {name: number / total for name, number in report.pixels.items()}
    cleaned = f"cleaned {printable(report.reference)}" if report.reference else "a new image"
    height, width = report.size
    print(
        f"{cleaned} with {report.model}: {width} x {height} pixels, {', '.join(report.bands)}; "
        f"{share.get('observed', 0):.1%} observed, {share.get('reconstructed', 0):.1%} reconstructed, "
        f"{share.get('nodata', 0):.1%} without data; "
        f"{report.seconds:.1f} s"
    )
    for path in report.files:
        print(f"wrote {printable(path)}")
    sys.stdout.flush()
