"""`sader data`: pack archives into training shards, list the content of shards, build the benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sader.cli.options import declared, takes
from sader.evaluation.request import DataOptions

app = typer.Typer(help="Prepare training data.", no_args_is_help=True)


def _bands_of(text: str) -> tuple[str, ...]:
    """Return the bands of --bands: rgbn, msi, or names separated by commas."""
    from sader.bands import BANDS_13, BANDS_RGBN

    named = {"rgbn": BANDS_RGBN, "msi": BANDS_13}
    return named.get(text.lower()) or tuple(name.strip() for name in text.split(","))


@app.callback()
def data() -> None:
    """Prepare training data."""


@app.command()
@takes(declared("coverage", of=(DataOptions,)))
def pack(
    sources: Annotated[list[str], typer.Argument(help="Folders or tars; KIND:PATH to name the layout "
                                                      "(places, dated, sen12mscr, eurosat, eurosatms, folder).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the shards.")],
    bands: Annotated[str, typer.Option(help="Bands to keep: rgbn (B02 B03 B04 B08), msi, or B02,B03,...")] = "rgbn",
    level: Annotated[str | None, typer.Option(help="Processing level of the scenes: L1C or L2A.")] = None,
    step: Annotated[int, typer.Option(help="Counts between stored values, 1 to 64; reflectance 1 is 10000.")] = 4,
    split: Annotated[str, typer.Option(help="all (folders train and val), train, val, or none; with --dataset "
                                            "also test.")] = "all",
    dataset: Annotated[str | None, typer.Option(help="The source is this public dataset in its published layout: "
                                                     "sen2_mtc_new, sen12mscrts, ... (sader data list).")] = None,
    sampler: Annotated[str, typer.Option(help="With --dataset: leak_free or published; training dates of "
                                              "SEN12MS-CR-TS are always drawn at random.")] = "leak_free",
    draws: Annotated[int, typer.Option(help="SEN12MS-CR-TS: training series of each patch, each with a target drawn "
                                            "from its clear dates.")] = 1,
    lists: Annotated[str | None, typer.Option(help="With --dataset: folder, frozen, hash, or a list file.")] = None,
    sar: Annotated[bool, typer.Option("--sar", help="With --dataset: pack Sentinel-1 (VV, VH) too. Folders: "
                                                    "NAME_s1.tif beside NAME.tif is always packed.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="With --dataset: accept missing places.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Treat observed pixels of unlabelled dates as clear.")] = False,
    assume: Annotated[str | None, typer.Option(help="Band names of files without descriptions: B02,B03,...")] = None,
    offset: Annotated[int, typer.Option(help="Added to counts; -1000 for baseline 04.00 and later.")] = 0,
    eurosat_step: Annotated[int | None, typer.Option(help="--step of EuroSAT, if another.")] = None,
    eurosat_limit: Annotated[int | None, typer.Option(help="Number of mosaics kept of each EuroSAT class.")] = None,
    **given: Any,
) -> None:  # fmt: skip
    """Pack scenes into shards, the files that training reads."""
    from sader.data.pack import PackedSplit, pack_dataset, pack_sources
    from sader.data.shards import SeriesRecord
    from sader.errors import ConfigError

    chosen = _bands_of(bands)

    def show(record: SeriesRecord) -> None:
        typer.echo(f"  {record.source} {record.name} {record.dn.shape}", err=True)

    packed: dict[str, PackedSplit] = {}
    if dataset is not None:
        from sader.data.public.dataset import ReadOptions
        from sader.data.public.registry import DATASETS, open_dataset, training_sampler

        if len(sources) != 1:
            raise ConfigError(f"{len(sources)} folders given; expected one of {dataset}. Pack each on its own.")
        # "all" does not include the test split, which must be named.
        known = DATASETS[dataset].splits if dataset in DATASETS else (split,)
        parts = [name for name in known if name in ("train", "val")] if split == "all" else [split]
        for part in parts or [split]:
            options = ReadOptions(lists=lists, partial=partial, draws=draws, sar="default" if sar else None, **given)
            drawn = training_sampler(dataset, sampler) if part == "train" and dataset in DATASETS else sampler
            series = open_dataset(sources[0], dataset=dataset, split=part, sampler=drawn, options=options)
            series.check()
            packed |= pack_dataset(series, out, bands=chosen, step=step, progress=show)
    else:
        packed = pack_sources(
            sources, out, bands=chosen, level=level, step=step, split=split, clear=clear, offset=offset,
            assume=tuple(assume.split(",")) if assume else None, eurosat_step=eurosat_step,
            eurosat_limit=eurosat_limit, progress=show,
        )  # fmt: skip
    for name, done in packed.items():
        typer.echo(f"{out / name}: {done.records} series in {len(done.files)} shards, {done.size / 2**20:.2f} MiB")
        if done.moved is not None:
            typer.echo(
                f"note: no labelled place fell to validation, where about one in ten goes; {done.moved} was taken "
                "and is not trained on.",
                err=True,
            )
    if split == "all" and ("val" not in packed or not packed["val"].truth):
        typer.echo(
            "note: there is no labelled validation: it needs two places or more, one of them with labels of clear "
            "pixels (NAME_label.tif, NAME_scl.tif, ... or --clear).",
            err=True,
        )


@app.command("list")
def list_datasets() -> None:
    """List the public datasets that can be read, with their splits and samplers."""
    from sader.data.public.registry import DATASETS

    for name, kind in DATASETS.items():
        typer.echo(f"{name}: {kind.about}")
        typer.echo(f"  splits {', '.join(kind.splits)}; published protocol {kind.protocol}; download: {kind.source}")
        for sampler, meaning in kind.samplers.items():
            typer.echo(f"  sampler {sampler}: {meaning}")


@app.command()
def cover(
    folder: Annotated[Path, typer.Argument(help="Folder of SEN12MS-CR-TS.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON to write; --coverage takes it.")],
    split: Annotated[str, typer.Option(help="train, val, test or all.")] = "test",
    dataset: Annotated[str, typer.Option(help="sen12mscrts or one of its regions.")] = "sen12mscrts",
    source: Annotated[
        str, typer.Option(help="auto, masks (*_mask.npy beside the images), s2cloudless (as in the paper) or rules.")
    ] = "auto",
    partial: Annotated[bool, typer.Option("--partial", help="Accept missing regions.")] = False,
) -> None:
    """Write the cloud cover of every date of SEN12MS-CR-TS to a file, for --coverage."""
    from sader.data.public.dataset import ReadOptions
    from sader.data.public.registry import open_dataset
    from sader.data.public.sen12mscrts import coverage_table

    series = open_dataset(folder, dataset=dataset, split=split, options=ReadOptions(partial=partial, coverage=source))
    typer.echo(f"wrote {coverage_table(series, out)}: {len(series)} patches")


@app.command()
def benchmark(
    folder: Annotated[Path, typer.Argument(help="Folder of the source folders; with --check, of the built items.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for val, test and train.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Also write the training places as shards.")] = False,
    bands: Annotated[
        str,
        typer.Option(
            help="With --train: bands of the training places, rgbn, msi, or B02,B03,...; each place has those "
            "of them that its files have."
        ),
    ] = "rgbn",
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept missing source folders; the items then differ from the list.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare built items with the list; build nothing.")] = False,
    listing: Annotated[Path | None, typer.Option("--list", help="JSON to write: items and checksums.")] = None,
) -> None:
    """Build the benchmark TriClear from its sources and compare every item with the published checksums."""
    import json

    from sader.data.benchmark import build
    from sader.errors import ConfigError
    from sader.files import write_atomically

    if out is None and not check:
        raise ConfigError("no output folder given; expected --out FOLDER, or --check to compare built items.")
    if out is None or check:
        found = build.read_listing(folder)
    else:
        found = build.build(
            folder, out, train=train, bands=_bands_of(bands), partial=partial,
            progress=lambda name, count: typer.echo(f"{name}: {count}"),
        )  # fmt: skip
    if listing is not None:
        write_atomically(listing, (json.dumps(found, indent=1) + "\n").encode())
    changed = build.differences(found, build.frozen())
    total = sum(len(entry["items"]) for entry in found["sets"].values())
    for line in changed[:20]:
        typer.echo(line, err=True)
    if changed:
        typer.echo(f"{len(changed)} differences from {build.NAME} {build.VERSION} in {total} items", err=True)
        raise typer.Exit(1)
    typer.echo(f"all {total} items have the checksums of {build.NAME} {build.VERSION}")


@app.command()
def show(shards: Annotated[list[Path], typer.Argument(help="Shards or folders of them.")]) -> None:
    """List the series in shards and check each."""
    from sader.data.shards import read_shards

    for record in read_shards(shards):
        t, c, h, w = record.dn.shape
        observed = float((record.dn > 0).all(1).mean())
        typer.echo(
            f"{record.source:10s} {record.name:32s} {t} dates {c} bands {h}x{w} {record.level} observed {observed:.0%}"
        )
