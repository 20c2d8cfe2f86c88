"""`sader remove`: parses, calls `run_remove`, prints. `register(app)` adds it to the command line."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

# No "from __future__ import annotations" here: Typer is imported inside `register` and evaluates the annotations there.


def register(app: Any) -> None:
    """Add the command `remove` to a Typer app."""
    import typer

    @app.command()
    def remove(
        inputs: Annotated[
            list[str] | None, typer.Argument(help="GeoTIFFs, folders, .SAFE products or STAC items of one place.")
        ] = None,
        out: Annotated[Path, typer.Option("--out", "-o", help="The cloud-free GeoTIFF to write.")] = Path("clear.tif"),
        reference: Annotated[
            str, typer.Option(help="The date to clean: FILE, DATE, auto (clearest), none (new image).")
        ] = "auto",
        bands: Annotated[
            str | None, typer.Option(help="Names in file order, or rgb, rgbn, bgrn, grn, 10-band, 12-band, 13-band.")
        ] = None,
        offset: Annotated[str, typer.Option(help="auto, none, or counts such as -1000 (baseline 04.00).")] = "auto",
        scale: Annotated[float | None, typer.Option(help="Reflectance per count; default: what the file says.")] = None,
        mask: Annotated[
            list[str] | None,
            typer.Option(help="auto, scl, own, s2cloudless, omnicloudmask, or a file; once per date for files."),
        ] = None,
        cloud_threshold: Annotated[
            float | None, typer.Option(help="Own masks: probability that is cloud; higher keeps haze. Default 0.5.")
        ] = None,
        mask_growth: Annotated[
            int | None, typer.Option(help="Own masks: pixels by which they are widened. Default 2.")
        ] = None,
        grid: Annotated[
            str | None,
            typer.Option(help="Output grid: a raster file, EPSG:32632 or EPSG:32632/20; default: first input."),
        ] = None,
        model: Annotated[str | None, typer.Option(help="Shipped weights, a preset or a checkpoint file.")] = None,
        steps: Annotated[str | None, typer.Option(help="Sampling steps: 4, or 4+1; default: the model's own.")] = None,
        seed: Annotated[int, typer.Option(help="The same seed gives the same image.")] = 0,
        samples: Annotated[int | None, typer.Option(min=1, help="Results averaged; more take longer.")] = None,
        tile: Annotated[int | None, typer.Option(help="Edge of a tile in pixels; default 512.")] = None,
        overlap: Annotated[int | None, typer.Option(help="Pixels shared by neighbouring tiles; default 64.")] = None,
        batch_size: Annotated[int | None, typer.Option(min=1, help="Tiles at a time on a GPU.")] = None,
        device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: a GPU if there is one.")] = None,
        backend: Annotated[
            str | None,
            typer.Option(help="torch, quick (half precision, on a GPU the default), onnx (ONNX Runtime), or auto."),
        ] = None,
        fast: Annotated[
            bool, typer.Option("--fast", help="One evaluation of the network: the same as --steps 1.")
        ] = False,
        uncertainty: Annotated[bool, typer.Option("--uncertainty", help="Also OUT_uncertainty.tif.")] = False,
        count: Annotated[bool, typer.Option("--count", help="Also OUT_count.tif: clear observations.")] = False,
        provenance: Annotated[
            bool, typer.Option("--provenance", help="Also OUT_provenance.tif: 1 observed, 2 reconstructed.")
        ] = False,
        preview: Annotated[Path | None, typer.Option(help="A PNG with inputs and result.")] = None,
        report: Annotated[
            Path | None, typer.Option(help="An HTML page to send around; brings --provenance (and --uncertainty).")
        ] = None,
        item: Annotated[bool, typer.Option("--item/--no-item", help="A STAC item beside the output.")] = True,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
        dask: Annotated[str | None, typer.Option(help="Address of a dask scheduler that does the work.")] = None,
        stac: Annotated[str | None, typer.Option(help="STAC API to search instead of files.")] = None,
        bbox: Annotated[str | None, typer.Option(help="west,south,east,north in degrees, with --stac.")] = None,
        dates: Annotated[str | None, typer.Option(help="2022-03-01/2022-05-31, with --stac.")] = None,
        collection: Annotated[str | None, typer.Option(help="STAC collection; default sentinel-2-l2a.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
    ) -> None:
        """Remove the clouds of your own scene: several dates in, one cloud-free map out."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if not inputs and stac is None:
            raise typer.BadParameter("name at least one GeoTIFF, folder, .SAFE product or STAC item.")
        if fast and steps is not None:
            raise typer.BadParameter(f"--fast is one step, but --steps {steps} is given as well. Leave one out.")
        live = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )  # fmt: skip
        with Progress(*columns, console=live, transient=True, disable=not live.is_terminal) as bar:
            task = bar.add_task("opening", total=None, rate="")
            # Importing torch takes seconds: the bar is already on the screen.
            from sader.geo.run import RemoveRequest, run_remove
            from sader.geo.scene import SceneOptions

            options = SceneOptions(
                reference=reference, steps="1" if fast else steps, seed=seed, samples=samples, tile=tile,
                overlap=overlap, batch_size=batch_size, uncertainty=uncertainty, count=count, provenance=provenance,
                overwrite=overwrite, backend=backend, cloud_threshold=cloud_threshold, mask_growth=mask_growth,
            )  # fmt: skip
            request = RemoveRequest(
                inputs=tuple(inputs or ()), out=str(out), options=options, bands=bands, offset=offset, scale=scale,
                mask=tuple(mask or ()), grid=grid, model=model, device=device,
                preview=None if preview is None else str(preview), report=None if report is None else str(report),
                item=item, dask=dask, stac=stac, bbox=bbox, dates=dates, collection=collection,
            )  # fmt: skip

            def progress(done: int, total: int) -> None:
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
