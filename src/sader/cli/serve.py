"""`sader serve`: options of the local page and OGC API server."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sader.cli.options import Device

app = typer.Typer()


@app.command()
def serve(
    data: Annotated[Path, typer.Argument(help="Folder of scenes; the only folder the server reads and writes.")] = Path(
        "sader-data"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen at; other than a loopback address it needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send; default: a new one is printed.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="An accepted host name of the server, such as maps.example.org.")
    ] = None,
    allow_remote: Annotated[
        list[str] | None, typer.Option(help="A host from which files of STAC items may be read over https.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Shipped weights, a preset or a checkpoint file.")] = None,
    device: Device = None,
    queue: Annotated[int, typer.Option(min=1, help="Largest number of waiting and running jobs.")] = 8,
    keep_hours: Annotated[
        float, typer.Option(min=0.01, help="Age at which results and uploads are deleted, in hours.")
    ] = 24.0,
    max_upload_mb: Annotated[int, typer.Option(min=1, help="Largest uploaded file, in MiB.")] = 2048,
    max_pixels: Annotated[int, typer.Option(min=1, help="Largest raster, in pixels.")] = 130_000_000,
) -> None:
    """Serve a local page to view scenes and remove their clouds; also an OGC API - Processes."""
    from sader.viewer.launch import launch
    from sader.viewer.settings import MIB, Limits, ServeSettings

    settings = ServeSettings(
        data=data,
        host=host,
        port=port,
        allow_hosts=tuple(allow_host or ()),
        allow_remote=tuple(allow_remote or ()),
        model=model,
        device=device,
        limits=Limits(upload_bytes=max_upload_mb * MIB, pixels=max_pixels, queue=queue, keep_s=keep_hours * 3600),
    )
    notify = partial(print, file=sys.stderr, flush=True)
    launch(settings, token_file=token_file, browser=browser, notify=notify)
