"""Readers that turn archives into `SeriesRecord`s; `pack_sources` and `pack_dataset` write them as shards.

One function per layout: CloudSEN12-like places, a folder of dated scenes, SEN12MS-CR pairs, EuroSAT (a tar of JPEGs, or
a folder of 13-band GeoTIFFs), any folder of GeoTIFFs. rasterio is imported inside the functions, because a training
machine reads shards only.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from sader.bands import BANDS_13, BANDS_RGBN, canonical
from sader.data.batch import CLEAR, UNKNOWN
from sader.data.labels import MOST_MASKED, is_label_file, label_file, read_labels
from sader.data.public.dataset import PublicDataset
from sader.data.public.images import check_counts, check_files, check_order, opened_tiff, read_bands, read_counts
from sader.data.radar import RADAR_BANDS, check_decibel, radar_counts, scale_sar
from sader.data.shards import DEFAULT_STEP, SeriesRecord, ShardWriter, split_of
from sader.errors import BandError, DataError, check_known, did_you_mean, require
from sader.files import files_under

EUROSAT_SCALE = 0.28
"""Reflectance of the value 255 in EuroSAT's RGB JPEGs (approximate)."""
EUROSAT_BANDS = (*BANDS_13[:8], *BANDS_13[9:], "B8A")
"""Order of the bands in the GeoTIFFs of EuroSAT-MS, which carry no names: B8A is the last."""
WINDOW = 1200
"""Large scenes become records of at most this many pixels a side."""
VALIDATION_STRIP, GAP = 300, 32
"""Columns at the east of a dated scene kept for validation, and unused columns between the two parts."""
SPARE = "first"
"""Name of the writer, and end of its shards, for the group that validates where no other does."""
RADAR_END = "_s1"
"""End of the name of a file with Sentinel-1 beside a scene."""
_PLACES, _PAIRS = "place_*/date_*.tif", "ROIs*_clear.tif"
_DATE = re.compile(r"(20\d\d)-?([01]\d)-?([0-3]\d)")


def read_dn(
    path: Path, bands: Sequence[str] | None, *, window: Any = None, assume: Sequence[str] | None = None, offset: int = 0
) -> tuple[np.ndarray, tuple[str, ...], float | None]:
    """Return counts uint16 (C, H, W), the band names and metres per pixel of one GeoTIFF.

    `bands` chooses by description; those the file lacks are left out, unless all are. `assume` names the bands of a
    file without descriptions. Floats are reflectance. `offset` is added to counts: -1000 since baseline 04.00.
    """
    with opened_tiff(path) as file:
        names = [canonical(text or "") or "" for text in file.descriptions]
        if assume is not None and not any(names):
            names = list(assume)[: file.count]
        wanted = list(bands) if bands is not None else [name for name in names if name]
        chosen = [name for name in wanted if name in names]
        if not chosen:
            raise BandError(
                f"{path} has bands {file.descriptions}; expected some of {tuple(wanted) or BANDS_13}. "
                "Name its bands with --assume B02,B03,... in the order of the file."
            )
        values = file.read([names.index(name) + 1 for name in chosen], window=window)
        nodata = file.nodata
        metres = float(abs(file.transform.a)) if file.crs is not None and file.crs.is_projected else None
    absent = ~np.isfinite(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    if nodata is not None:
        absent |= values == nodata
    if values.dtype.kind == "f":
        values = np.where(absent, 0, values) * 10000.0
    counts = np.where(values == 0, 0, np.clip(np.rint(values.astype(np.float64)) + offset, 1, 65535))
    return np.where(absent, 0, counts).astype(np.uint16), tuple(chosen), metres


def _date(path: Path) -> date | None:
    """Return the date in the name of a file; None without one."""
    found = _DATE.search(path.name)
    return date(*map(int, found.groups())) if found else None


def _stack(
    paths: Sequence[Path], bands: Sequence[str] | None, **options: Any
) -> tuple[np.ndarray, tuple[str, ...], float | None]:
    """Return the dates of one place as (T, C, H, W); they must share size and bands."""
    dates = [read_dn(path, bands, **options) for path in paths]
    first, first_names, metres = dates[0]
    for path, (dn, names, _) in zip(paths, dates, strict=True):
        if dn.shape != first.shape or names != first_names:
            raise DataError(
                f"{path} is {dn.shape} with bands {names}, but {paths[0].name} is {first.shape} with {first_names}; "
                "one series needs one grid. Put them into separate folders or warp them first."
            )
    return np.stack([dn for dn, _, _ in dates]), first_names, metres


def read_places(
    folder: str | Path, *, bands: Sequence[str] | None = BANDS_RGBN, level: str = "L1C"
) -> Iterator[SeriesRecord]:
    """Yield the places of a CloudSEN12 layout: `**/place_XX/date_k.tif` with `date_k_label.tif`."""
    folder = Path(folder)
    places = sorted({path.parent for path in files_under(folder) if path.match(_PLACES)})
    if folder.name.startswith("place_"):
        places = [folder]
    if not places:
        raise DataError(f"no place_*/date_*.tif under {folder}; expected the CloudSEN12 layout. Try read_folder.")
    for place in places:
        files = sorted(path for path in place.glob("date_*.tif") if not is_label_file(path))
        dn, names, _ = _stack(files, bands)
        labels = np.full((len(files), *dn.shape[2:]), UNKNOWN, np.uint8)
        for k, path in enumerate(files):
            if found := label_file(path):
                labels[k] = read_labels(found, dn.shape[-2:])
        split = place.parent.name if place.parent.name in ("train", "val") else "train"
        record = SeriesRecord(dn, place.name, "cloudsen12", names, labels, level, 10.0, None, f"{split}/{place.name}")
        yield drop_repeats(record)


def drop_repeats(record: SeriesRecord) -> SeriesRecord:
    """Return the record without repeated dates: hidden dates must not be repeated.

    Of two dates whose common pixels differ by less than 15 counts (median), the one with fewer observed pixels is
    removed.
    """
    optical = [band not in RADAR_BANDS for band in record.bands]
    dn = record.dn[:, optical, ::4, ::4].astype(np.int32)
    seen = np.all(dn > 0, axis=1)
    keep = list(range(len(dn)))
    for i in range(len(dn)):
        for j in range(i + 1, len(dn)):
            both = seen[i] & seen[j]
            if i in keep and j in keep and both.sum() > 50 and np.median(np.abs(dn[i] - dn[j])[:, both]) < 15:
                keep.remove(j if seen[j].sum() <= seen[i].sum() else i)
    if len(keep) == len(dn):
        return record
    extra = {**record.extra, "repeats_dropped": sorted(set(range(len(dn))) - set(keep))}
    labels = None if record.labels is None else record.labels[keep]
    days = None if record.days is None else tuple(record.days[k] for k in keep)
    return replace(record, dn=record.dn[keep], labels=labels, days=days, extra=extra)


def read_dated(
    folder: str | Path,
    *,
    bands: Sequence[str] | None = BANDS_RGBN,
    level: str = "L2A",
    source: str = "rondonia",
    strip: int = VALIDATION_STRIP,
    gap: int = GAP,
) -> Iterator[SeriesRecord]:
    """Yield a west (training) and an east (validation) record of one co-registered stack with dates in file names.

    Pixels of value 0 are masked clouds or nodata. The rest of a date is labelled clear, unless much of the date is
    masked: such masks miss the edges of clouds (in Rondonia, white remnants would be labelled clear land), so the rest
    is labelled unknown. A scene narrower than four strips is one record, which `split_of` assigns by its name.
    """
    folder = Path(folder)
    dated = sorted((when, path) for path in folder.glob("*.tif") if (when := _date(path)))
    if not dated:
        raise DataError(f"no dated GeoTIFFs in {folder}; expected names such as S2_20LMR_2022-06-14.tif.")
    dn, names, metres = _stack([path for _, path in dated], bands)
    days = tuple(float((when - dated[0][0]).days) for when, _ in dated)
    seen = (dn > 0).all(1)
    trusted = seen.mean(axis=(1, 2), keepdims=True) > 1 - MOST_MASKED
    labels = np.where(seen & trusted, CLEAR, UNKNOWN).astype(np.uint8)
    extra: dict[str, object] = {"dates": [when.isoformat() for when, _ in dated]}
    whole = SeriesRecord(dn, folder.name, source, names, labels, level, metres, days, folder.name, extra)
    width = dn.shape[-1]
    if width < 4 * strip:
        yield whole
        return
    for side, columns in (("west", slice(0, width - strip - gap)), ("east", slice(width - strip, width))):
        yield replace(
            whole, name=f"{folder.name}_{side}", group=f"{folder.name}/{side}",
            dn=np.ascontiguousarray(dn[..., columns]), labels=np.ascontiguousarray(labels[..., columns]),
        )  # fmt: skip


def read_sen12mscr_pairs(folder: str | Path, *, bands: Sequence[str] | None = BANDS_RGBN) -> Iterator[SeriesRecord]:
    """Yield pairs `ROI..._clear.tif`, `ROI..._cloudy.tif` as series of two dates, the clear one first.

    The clear date is labelled clear, the cloudy one unknown. The group is the region: it stays on one side of a split.
    """
    folder = Path(folder)
    clear_files = sorted(path for path in files_under(folder) if path.match(_PAIRS))
    if not clear_files:
        raise DataError(f"no ROIs*_clear.tif under {folder}; expected pairs as in SEN12MS-CR.")
    for clear in clear_files:
        cloudy = clear.with_name(clear.name.replace("_clear", "_cloudy"))
        if not cloudy.exists():
            raise DataError(f"{clear.name} has no {cloudy.name} beside it. Copy the pair again or remove it.")
        dn, names, _ = _stack([clear, cloudy], bands)
        labels = np.full((2, *dn.shape[2:]), UNKNOWN, np.uint8)
        labels[0][(dn[0] > 0).all(0)] = CLEAR
        roi = re.sub(r"_s2_(\d+)_p\d+.*", r"_\1", clear.stem)
        yield SeriesRecord(dn, clear.stem.removesuffix("_clear"), "sen12mscr", names, labels, "L1C", 10.0, None, roi)


def read_eurosat_tar(
    path: str | Path, *, bands: Sequence[str] | None = BANDS_RGBN, side: int = 4, limit: int | None = None
) -> Iterator[SeriesRecord]:
    """Yield clear single-date mosaics of side x side EuroSAT JPEGs of one class, bands B04, B03, B02.

    The 64-pixel images are too small for a crop; neighbours in a mosaic have similar colours, and its seams resemble
    the borders of fields. Values are about reflectance / 0.28 * 255. `limit` keeps the first mosaics of each class.
    """
    from PIL import Image

    chosen = tuple(name for name in (bands or BANDS_13) if name in ("B04", "B03", "B02"))
    if not chosen:
        raise BandError(f"EuroSAT RGB has bands ('B04', 'B03', 'B02'); expected some of {tuple(bands or ())}.")
    order = [("B04", "B03", "B02").index(name) for name in chosen]
    classes: dict[str, list[np.ndarray]] = defaultdict(list)
    path = next(Path(path).glob("*.tar"), path)  # the tar in a folder
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile() and member.name.lower().endswith((".jpg", ".jpeg")):
                data = tar.extractfile(member)
                assert data is not None
                image = np.asarray(Image.open(io.BytesIO(data.read())).convert("RGB"))
                classes[Path(member.name).parent.name].append(image)
    if not classes:
        raise DataError(f"no JPEG in {path}; expected CLASS/NAME.jpg as in EuroSAT.")
    scale = EUROSAT_SCALE * 10000 / 255
    for label, images in sorted(classes.items()):
        images.sort(key=lambda image: float(image.mean()))
        full = len(images) // side**2
        count = full if limit is None else min(full, limit)
        for number in range(count):
            # With a limit, spread the mosaics over the class, whose images are sorted by brightness.
            start = (number * full // count) * side**2
            rows = [np.concatenate(images[start + side * r : start + side * (r + 1)], 1) for r in range(side)]
            mosaic = np.concatenate(rows, 0)[..., order].transpose(2, 0, 1)
            dn = np.maximum(np.rint(mosaic * scale), 1).astype(np.uint16)[None]
            name = f"{label}_{number:03d}"
            labels = np.zeros((1, *dn.shape[2:]), np.uint8)
            extra: dict[str, object] = {"tile": images[0].shape[0]}
            yield SeriesRecord(dn, name, "eurosat", chosen, labels, "L1C", 10.0, None, label, extra)


def is_eurosat_ms(folder: Path) -> bool:
    """Whether the folder has the layout of EuroSAT-MS: CLASS/CLASS_1.tif."""
    return any(path.stem.startswith(f"{path.parent.name}_") for path in folder.glob("*/*_1.tif"))


def read_eurosat_ms(folder: str | Path, *, bands: Sequence[str] | None = None) -> Iterator[SeriesRecord]:
    """Yield the clear images of EuroSAT-MS, CLASS/CLASS_NUMBER.tif of 64 x 64 pixels and 13 bands (`EUROSAT_BANDS`)."""
    paths = sorted(path for path in Path(folder).glob("*/*.tif") if path.stem.startswith(f"{path.parent.name}_"))
    if not paths:
        raise DataError(f"no CLASS/CLASS_1.tif in {folder}; expected the layout of EuroSAT-MS (13-band GeoTIFFs).")
    check_files(paths)
    check_order([read_counts(p, EUROSAT_BANDS)[0] for p in paths[:: len(paths) // 8 + 1]], EUROSAT_BANDS, Path(folder))
    chosen = tuple(name for name in (bands or BANDS_13) if name in EUROSAT_BANDS)
    order = [EUROSAT_BANDS.index(name) for name in chosen]
    for path in paths:
        counts, seen = read_counts(path, EUROSAT_BANDS)
        check_counts(path, counts, seen)
        dn = np.where(seen, np.clip(counts, 1, 65535), 0).astype(np.uint16)[None, order]
        labels = np.where(seen, CLEAR, UNKNOWN).astype(np.uint8)[None]
        yield SeriesRecord(dn, path.stem, "eurosat", chosen, labels, "L1C", 10.0, None, path.parent.name)


def read_folder(
    folder: str | Path,
    *,
    bands: Sequence[str] | None = BANDS_RGBN,
    level: str = "L2A",
    clear: bool = False,
    assume: Sequence[str] | None = None,
    offset: int = 0,
) -> Iterator[SeriesRecord]:
    """Yield a user's own archive: the GeoTIFFs of each subfolder are the dates of one series, in the order of names.

    `NAME_s1.tif` beside `NAME.tif` holds Sentinel-1 (VV, VH in dB) on the same grid; all dates of a series have one, or
    none. `NAME_label.tif` or the mask of another program (`labels.ENDINGS`) gives labels; otherwise `clear=True`
    declares every observed pixel clear and `clear=False` leaves them unknown (such series serve as inputs, never as
    truth). Large scenes are cut into windows.
    """
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    folder = Path(folder)
    groups: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(files_under(folder)):
        if path.suffix.lower() in (".tif", ".tiff") and not (is_label_file(path) or path.stem.endswith(RADAR_END)):
            groups[path.parent].append(path)
    if not groups:
        raise DataError(f"no GeoTIFF under {folder}; expected *.tif, one subfolder for each place.")
    for place, paths in sorted(groups.items()):
        name = "/".join(place.relative_to(folder).parts) or folder.name
        whens = [when for path in paths if (when := _date(path))]
        days = tuple(float((when - min(whens)).days) for when in whens) if len(whens) == len(paths) else None
        with opened_tiff(paths[0]) as file:
            height, width = file.height, file.width
        for top in range(0, height, WINDOW):
            for left in range(0, width, WINDOW):
                window = rasterio.windows.Window(left, top, min(WINDOW, width - left), min(WINDOW, height - top))
                whole = height <= WINDOW and width <= WINDOW
                options: dict[str, Any] = {"window": None if whole else window, "assume": assume, "offset": offset}
                dn, names, metres = _stack(paths, bands, **options)
                labels = np.full((len(paths), *dn.shape[2:]), UNKNOWN, np.uint8)
                observed = bool((dn > 0).any())
                for k, path in enumerate(paths):
                    if beside := label_file(path):
                        labels[k] = read_labels(beside, (height, width), window=options["window"])
                    elif clear:
                        labels[k][(dn[k] > 0).all(0)] = CLEAR
                if radar := [path.with_name(f"{path.stem}{RADAR_END}.tif") for path in paths if _has_radar(paths)]:
                    echoes = np.stack([read_radar(path, dn.shape[-2:], options["window"]) for path in radar])
                    dn, names = np.concatenate([dn, echoes], axis=1), (*names, *RADAR_BANDS)
                part = name if whole else f"{name}@{top},{left}"
                record = SeriesRecord(dn, part, "folder", names, labels, level, metres, days, name)
                if observed:
                    yield drop_repeats(record)


def _has_radar(paths: Sequence[Path]) -> bool:
    """Return whether the dates of a series have radar beside them; some with and some without are an error."""
    lost = [path for path in paths if not path.with_name(f"{path.stem}{RADAR_END}.tif").is_file()]
    if lost and len(lost) < len(paths):
        raise DataError(
            f"{lost[0]} has no {lost[0].stem}{RADAR_END}.tif beside it, but other dates have radar; expected it for "
            "all dates of a series or for none. Add the file or remove the others."
        )
    return not lost


def read_radar(path: Path, shape: tuple[int, ...], window: Any = None) -> np.ndarray:
    """Return Sentinel-1 in dB of a GeoTIFF (band 1 VV, band 2 VH) as counts (2, H, W) of a shard."""
    decibel = read_bands(path, (1, 2), window=window)
    found, wanted = decibel.shape[1:], tuple(shape)
    if found != wanted:
        raise DataError(f"{path} is {found} pixels; expected {wanted}, the grid of the scene. Warp it first.")
    check_decibel(decibel, path)
    return radar_counts(scale_sar(decibel))


READERS: dict[str, Callable[..., Iterator[SeriesRecord]]] = {
    "places": read_places,
    "dated": read_dated,
    "sen12mscr": read_sen12mscr_pairs,
    "eurosat": read_eurosat_tar,
    "eurosatms": read_eurosat_ms,
    "folder": read_folder,
}


def kind_of(path: Path) -> str:
    """Return the kind of reader for `path`, from its file names."""
    if path.is_file() and path.suffix in (".tar", ".gz", ".tgz"):
        return "eurosat"
    if not path.is_dir():
        raise DataError(f"{path} is neither a folder nor a tar. Give a folder of GeoTIFFs or a EuroSAT tar.")
    if path.name.startswith("place_") or any(file.match(_PLACES) for file in files_under(path)):
        return "places"
    if any(file.match(_PAIRS) for file in files_under(path)):
        return "sen12mscr"
    if next(path.glob("*.tar"), None):
        return "eurosat"
    if is_eurosat_ms(path):
        return "eurosatms"
    direct = list(path.glob("*.tif"))
    if len(direct) > 1 and all(map(_date, direct)):
        return "dated"
    return "folder"


@dataclass(frozen=True)
class PackedSplit:
    """Files and records that were written for one split."""

    files: tuple[Path, ...] = ()
    records: int = 0
    moved: str | None = None
    """Group that validates only because no other does."""
    truth: bool = True
    """Whether a series has labels of clear pixels, without which nothing can be scored."""

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    def joined(self, files: Sequence[Path], records: int) -> PackedSplit:
        """Return the split with more files."""
        return replace(self, files=(*self.files, *files), records=self.records + records)


def pack_sources(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    bands: Sequence[str] = BANDS_RGBN,
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
    """Write the series of `sources` as shards under `out`/train and `out`/val; return the written splits.

    A source is a path, or KIND:PATH with a kind of `READERS`. `split` "all" writes both, "train" or "val" one of them,
    "none" writes all records into `out` itself. `level` overrides the level of places, dated and folder sources.
    With "all", where no group with clear pixels falls to validation, the first one does, if others are left to train.
    """
    check_known("split", split, ("all", "train", "val", "none"))
    unknown = [name for name in bands if name not in BANDS_13]
    if unknown:
        raise BandError(f"unknown band {unknown[0]}{did_you_mean(unknown[0], BANDS_13)}")
    packed: dict[str, PackedSplit] = {}
    groups: set[tuple[int, str]] = set()
    spare: tuple[int, str] | None = None
    validates = False
    for number, source in enumerate(sources):
        kind, path = _parse(source)
        options: dict[str, Any] = {"bands": bands}
        if level is not None and kind in ("places", "dated", "folder"):
            options["level"] = level
        if kind == "folder":
            options |= {"clear": clear, "assume": assume, "offset": offset}
        if kind == "eurosat":
            options["limit"] = eurosat_limit
        writers: dict[str, ShardWriter] = {}
        for record in READERS[kind](path, **options):
            side = split_of(record)
            if split in ("train", "val") and side != split:
                continue
            where = "." if split == "none" else side
            group = number, record.group
            if split == "all" and side == "train" and spare is None and group not in groups and _has_truth(record):
                spare = group
            groups.add(group)
            validates = validates or (side == "val" and _has_truth(record))
            name = f"{number:02d}-{record.source}"
            if group == spare:
                where, name = SPARE, f"{name}-{SPARE}"
            if where not in writers:
                used = eurosat_step if kind == "eurosat" and eurosat_step else step
                writers[where] = ShardWriter(Path(out) / ("train" if where == SPARE else where), name, step=used)
            writers[where].add(record)
            if progress:
                progress(record)
        for where, writer in writers.items():
            writer.flush()
            packed[where] = packed.get(where, PackedSplit()).joined(writer.files, writer.records)
    if not packed:
        raise DataError(f"nothing of {', '.join(map(str, sources))} belongs to split {split}. Try --split none.")
    if spare is not None:
        _assign_spare(packed, Path(out), spare[1], validates)
    if "val" in packed and not validates:
        packed["val"] = replace(packed["val"], truth=packed["val"].moved is not None)
    return packed


def _has_truth(record: SeriesRecord) -> bool:
    return record.labels is not None and bool((record.labels == CLEAR).any())


def _assign_spare(packed: dict[str, PackedSplit], out: Path, group: str, validates: bool) -> None:
    """Count the shards of the spare group to training, or move them to validation where no other group validates."""
    spare = packed.pop(SPARE)
    if not validates and "train" in packed:
        files = tuple(out / "val" / file.name for file in spare.files)
        files[0].parent.mkdir(exist_ok=True)
        for old, new in zip(spare.files, files, strict=True):
            old.replace(new)
        packed["val"] = replace(packed.get("val", PackedSplit()).joined(files, spare.records), moved=group)
        return
    for file in spare.files:  # an earlier run with fewer places may have moved them
        (out / "val" / file.name).unlink(missing_ok=True)
    packed["train"] = packed.get("train", PackedSplit()).joined(spare.files, spare.records)


def pack_dataset(
    dataset: PublicDataset,
    out: str | Path,
    *,
    bands: Sequence[str] | None = None,
    step: int = DEFAULT_STEP,
    progress: Callable[[SeriesRecord], None] | None = None,
) -> dict[str, PackedSplit]:
    """Write one split of a public dataset as shards under `out`/SPLIT; return the written split.

    Each record is the dataset's own task: the target first and labelled clear, then the cloudy inputs. `bands`: bands
    to keep, None for all. Shards of an earlier run with the same name are replaced.
    """
    split = dataset.request.split
    writer = ShardWriter(Path(out) / split, dataset.request.name, step=step)
    for record in dataset.records(bands):
        writer.add(record)
        if progress:
            progress(record)
    writer.flush()
    for old in writer.folder.glob(f"{writer.name}-[0-9][0-9][0-9].shard"):
        if old not in writer.files:  # left by an earlier, longer run
            old.unlink()
    return {split: PackedSplit(tuple(writer.files), writer.records)}


def _parse(source: str | Path) -> tuple[str, Path]:
    kind, colon, rest = str(source).partition(":")
    if colon and kind.isalnum() and len(kind) > 1:
        check_known("kind of source", kind, READERS)
        return kind, Path(rest)
    return kind_of(Path(source)), Path(source)
