"""`sader serve`: parses, starts the server, opens the page."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sader.cli.options import Device

app = typer.Typer()


@app.command()
def serve(
    data: Annotated[
        Path, typer.Argument(help="Folder of your scenes; the only one the server reads and writes.")
    ] = Path("sader-data"),
    host: Annotated[
        str, typer.Option(help="Address to listen at; other than this machine's wants a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token callers must show; default: a new one is printed.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which the server may be called, such as maps.example.org.")
    ] = None,
    allow_remote: Annotated[
        list[str] | None, typer.Option(help="A host from which STAC items may be read over https.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Shipped weights, a preset or a checkpoint file.")] = None,
    device: Device = None,
    queue: Annotated[int, typer.Option(min=1, help="Jobs that may wait or run.")] = 8,
    keep_hours: Annotated[float, typer.Option(min=0.01, help="Age at which results and uploads are deleted.")] = 24.0,
    max_upload_mb: Annotated[int, typer.Option(min=1, help="Size of one uploaded file.")] = 2048,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels of one raster.")] = 130_000_000,
) -> None:
    """Open a local page to look at scenes and remove their clouds; the same server is an OGC API - Processes."""
    from sader.viewer.launch import launch
    from sader.viewer.settings import MIB, Limits, ServeSettings

    limits = Limits(upload_bytes=max_upload_mb * MIB, pixels=max_pixels, queue=queue, keep_s=keep_hours * 3600)
    settings = ServeSettings(
        data=data, host=host, port=port, allow_hosts=tuple(allow_host or ()),
        allow_remote=tuple(allow_remote or ()), model=model, device=device, limits=limits,
    )  # fmt: skip
    launch(settings, token_file=token_file, browser=browser, say=lambda text: print(text, file=sys.stderr, flush=True))
