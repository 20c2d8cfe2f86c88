"""`sader data`: pack archives into training shards, and show what shards hold. Parses, calls one function, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Prepare training data.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare training data."""


@app.command()
def pack(
    sources: Annotated[list[str], typer.Argument(help="Folders or tars; KIND:PATH to name the layout "
                                                      "(places, dated, sen12mscr, eurosat, folder).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the shards.")],
    bands: Annotated[str, typer.Option(help="Bands to keep: rgbn, msi, or names B02,B03,...")] = "rgbn",
    level: Annotated[str | None, typer.Option(help="Processing level of the scenes: L1C or L2A.")] = None,
    step: Annotated[int, typer.Option(help="Counts between stored values, 1 to 64; reflectance 1 is 10000.")] = 4,
    split: Annotated[str, typer.Option(help="all (folders train and val), train, val, or none.")] = "all",
    clear: Annotated[bool, typer.Option("--clear", help="Observed pixels of unlabelled folders are clear.")] = False,
    assume: Annotated[str | None, typer.Option(help="Band names of files without descriptions: B02,B03,...")] = None,
    offset: Annotated[int, typer.Option(help="Added to counts; -1000 for baseline 04.00 and later.")] = 0,
    eurosat_step: Annotated[int | None, typer.Option(help="Another step for EuroSAT.")] = None,
    eurosat_limit: Annotated[int | None, typer.Option(help="Keep so many mosaics of each EuroSAT class.")] = None,
) -> None:  # fmt: skip
    """Turn scenes into compact shards that need only NumPy to read."""
    from sader.data.readers import MSI, RGBN, pack_sources

    named = {"rgbn": RGBN, "msi": MSI}
    chosen = named.get(bands.lower()) or tuple(name.strip() for name in bands.split(","))
    packed = pack_sources(
        sources, out, bands=chosen, level=level, step=step, split=split, clear=clear, offset=offset,
        assume=tuple(assume.split(",")) if assume else None, eurosat_step=eurosat_step, eurosat_limit=eurosat_limit,
        progress=lambda record: typer.echo(f"  {record.source} {record.name} {record.dn.shape}", err=True),
    )  # fmt: skip
    for name, part in packed.items():
        typer.echo(f"{out / name}: {part.records} series in {len(part.files)} shards, {part.size / 2**20:.2f} MiB")


@app.command()
def show(shards: Annotated[list[Path], typer.Argument(help="Shards or folders of them.")]) -> None:
    """List the series that shards hold, checking each."""
    from sader.data.shards import read_shards

    for record in read_shards(shards):
        t, c, h, w = record.dn.shape
        observed = float((record.dn > 0).all(1).mean())
        typer.echo(
            f"{record.source:10s} {record.name:32s} {t} dates {c} bands {h}x{w} {record.level} observed {observed:.0%}"
        )
