"""Archives and public datasets written as training shards: what is behind `sader data pack`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sader.data.pack import MSI, READERS, RGBN, kind_of
from sader.data.public.dataset import PublicDataset
from sader.data.shards import DEFAULT_STEP, SeriesRecord, ShardWriter, split_of
from sader.errors import BandError, ConfigError, DataError, did_you_mean


@dataclass(frozen=True)
class PackedSplit:
    """What `pack_sources` wrote for one split."""

    files: tuple[Path, ...]
    records: int
    size: int


def pack_sources(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    bands: Sequence[str] = RGBN,
    level: str | None = None,
    step: int = DEFAULT_STEP,
    split: str = "all",
    clear: bool = False,
    assume: Sequence[str] | None = None,
    offset: int = 0,
    eurosat_step: int | None = None,
    eurosat_limit: int | None = None,
    progress: Callable[[SeriesRecord], None] | None = None,
) -> dict[str, PackedSplit]:
    """Write the series of `sources` as shards under `out`/train and `out`/val, and return what was written.

    A source is a path, or KIND:PATH with a kind of `READERS`. `split` "all" writes both, "train" or "val" one of them,
    "none" puts everything into `out` itself. `level` overrides the level of places, dated and folder sources.
    """
    if split not in ("all", "train", "val", "none"):
        raise ConfigError(f"unknown split {split}{did_you_mean(split, ('all', 'train', 'val', 'none'))}")
    unknown = [name for name in bands if name not in MSI]
    if unknown:
        raise BandError(f"unknown band {unknown[0]}{did_you_mean(unknown[0], MSI)}")
    packed: dict[str, PackedSplit] = {}
    for number, source in enumerate(sources):
        kind, path = _parse(source)
        options: dict[str, Any] = {"bands": bands}
        if level is not None and kind in ("places", "dated", "folder"):
            options["level"] = level
        if kind == "folder":
            options |= {"clear": clear, "assume": assume, "offset": offset}
        if kind == "eurosat":
            options["limit"] = eurosat_limit
            path = next(path.glob("*.tar"), path) if path.is_dir() else path
        writers: dict[str, ShardWriter] = {}
        for record in READERS[kind](path, **options):
            side = split_of(record)
            if split in ("train", "val") and side != split:
                continue
            where = "." if split == "none" else side
            if where not in writers:
                used = eurosat_step if kind == "eurosat" and eurosat_step else step
                writers[where] = ShardWriter(Path(out) / where, f"{number:02d}-{record.source}", step=used)
            writers[where].add(record)
            if progress:
                progress(record)
        for where, writer in writers.items():
            writer.flush()
            before = packed.get(where, PackedSplit((), 0, 0))
            size = sum(file.stat().st_size for file in writer.files)
            files = (*before.files, *writer.files)
            packed[where] = PackedSplit(files, before.records + writer.records, before.size + size)
    if not packed:
        raise DataError(f"nothing of {', '.join(map(str, sources))} belongs to split {split}. Try --split none.")
    return packed


def pack_dataset(
    dataset: PublicDataset,
    out: str | Path,
    *,
    bands: Sequence[str] | None = None,
    step: int = DEFAULT_STEP,
    progress: Callable[[SeriesRecord], None] | None = None,
) -> dict[str, PackedSplit]:
    """Write one split of a public dataset as shards under `out`/SPLIT, and return what was written.

    Each record is the dataset's own task: the target first and labelled clear, then the cloudy inputs. `bands`: those
    to keep of the dataset's, None all. Shards of an earlier run of the same are replaced.
    """
    split = dataset.request.split
    writer = ShardWriter(Path(out) / split, dataset.request.name, step=step)
    for record in dataset.records(bands):
        writer.add(record)
        if progress:
            progress(record)
    writer.flush()
    for old in writer.folder.glob(f"{writer.name}-[0-9][0-9][0-9].shard"):
        if old not in writer.files:  # of an earlier, longer run: they would be trained on as well
            old.unlink()
    size = sum(file.stat().st_size for file in writer.files)
    return {split: PackedSplit(tuple(writer.files), writer.records, size)}


def _parse(source: str | Path) -> tuple[str, Path]:
    kind, colon, rest = str(source).partition(":")
    if colon and kind.isalnum() and len(kind) > 1:
        if kind not in READERS:
            raise ConfigError(f"unknown kind of source {kind}{did_you_mean(kind, READERS)}")
        return kind, Path(rest)
    return kind_of(Path(source)), Path(source)
