"""The places of the benchmark: one reader for each source folder, and the part (train, val, test) of each place.

A place belongs to one part only; Rondonia is split by its rows and columns, the Belgian field by its dates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from sader.bands import BANDS_13
from sader.bands import BANDS_RGBN as RGBN
from sader.data.batch import CLEAR, SHADOW, THICK, THIN, UNKNOWN
from sader.data.pack import read_dated, read_dn, read_folder, read_places, read_sen12mscr_pairs
from sader.data.public.images import read_bands
from sader.data.shards import HELD_OUT_ROIS, SeriesRecord, observed
from sader.errors import BandError, DataError, did_you_mean

BELGIAN_TRAINING_DATES = 51
SMOKE = 120
"""Counts of B02 - B04 / 2 by which a pixel must rise from the date before a fire to that after it to be smoke: dry
ground rises more in red than in blue."""
HAZE = 1.4
_RONDONIA_ROWS = {"val": ((0, 368),), "test": ((400, 784), (816, 1200))}
_VAL = {
    *("cloudsen12/place_16", "oscd/montpellier", "california_fires/1-7_20200817"),
    *("bark_beetle/268164", "bark_beetle/358521", "sen12mscr/ROIs1868_summer_101"),
    *(f"bigearthnet/p{number}" for number in range(100, 110)),
}
_TEST = {
    *("cloudsen12/place_17", "cloudsen12/place_18", "cloudsen12/place_19"),
    *("oscd/bordeaux", "oscd/mumbai", "oscd/lasvegas"),
    *("california_fires/DOVE_20241019", "california_fires/CLEAR_20240626"),
    *("bark_beetle/361044", "bark_beetle/361058", "bark_beetle/363850", "bark_beetle/366090"),
    *("biomassters/000aa810", *(f"sen12mscr/{roi}" for roi in HELD_OUT_ROIS if "1868" not in roi)),
    *(f"bigearthnet/p{number}" for number in range(110, 120)),
}


def part_of(group: str) -> str:
    """Return the part of a place, called SOURCE/PLACE; places that are not listed are for training."""
    return "val" if group in _VAL else "test" if group in _TEST else "train"


def _cloudsen12(folder: Path, bands: Sequence[str]) -> Iterator[SeriesRecord]:
    for record in read_places(folder, bands=bands):
        yield replace(record, group=f"cloudsen12/{record.name}")


def _rondonia(folder: Path, bands: Sequence[str]) -> Iterator[SeriesRecord]:
    for record in read_dated(folder, bands=bands):
        if not record.group.endswith("/east"):
            yield replace(record, group="rondonia_20LMR/west", extra={"part": "train"})
            continue
        for part, pieces in _RONDONIA_ROWS.items():
            for top, bottom in pieces:
                name = f"east_rows{top}"
                dn, labels = record.dn[:, :, top:bottom], record.labels
                labels = None if labels is None else labels[:, top:bottom]
                yield replace(
                    record, dn=dn, labels=labels, name=name, group=f"rondonia_20LMR/{name}", extra={"part": part}
                )


def _sen12mscr(folder: Path, bands: Sequence[str]) -> Iterator[SeriesRecord]:
    for record in read_sen12mscr_pairs(folder, bands=bands):
        yield replace(record, group=f"sen12mscr/{record.group}")


def _clear_folders(folder: Path, bands: Sequence[str]) -> Iterator[SeriesRecord]:
    """Yield folders of dates without clouds; OSCD's second date of Paris has some."""
    for record in read_folder(folder, bands=bands, clear=True):
        labels = record.labels
        if record.name == "paris" and labels is not None:
            labels = labels.copy()
            labels[1] = UNKNOWN
        yield replace(record, labels=labels, source=folder.name, group=f"{folder.name}/{record.name}", days=None)


def _california(folder: Path, bands: Sequence[str]) -> Iterator[SeriesRecord]:
    """Yield the dates before and after a fire; after it, smoke is labelled thin cloud."""
    for record in read_folder(folder, bands=bands, clear=True):
        blue, red = (record.dn[:, record.bands.index(name)].astype(np.int32) for name in ("B02", "B04"))
        labels, haze = np.zeros(blue.shape, np.uint8), 2 * blue - red
        labels[0][haze[0] - haze[-1] >= 2 * SMOKE] = THIN  # post.tif comes before pre.tif
        labels[~observed(record.dn, record.bands)] = UNKNOWN
        yield replace(record, labels=labels, source=folder.name, group=f"{folder.name}/{record.name}")


def _biomassters(folder: Path, bands: Sequence[str]) -> Iterator[SeriesRecord]:
    """Yield series of months; cloud probability up to 20 % is clear, from 70 % thick cloud, between them thin."""
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(place.glob("month_??.tif"))
        months = [read_dn(path, bands) for path in files]
        dn, names = np.stack([month for month, _, _ in months]), months[0][1]
        percent = np.stack([read_bands(path.with_name(f"{path.stem}_cloudprob.tif"), (1,))[0] for path in files])
        labels = np.where(percent <= 20, CLEAR, np.where(percent < 70, THIN, THICK))
        labels = np.where((percent <= 100) & observed(dn, names), labels, UNKNOWN).astype(np.uint8)
        days = tuple(30.0 * (int(path.stem[-2:]) - int(files[0].stem[-2:])) for path in files)
        yield SeriesRecord(dn, place.name, folder.name, names, labels, "L2A", 10.0, days, f"{folder.name}/{place.name}")


def _bigearthnet(folder: Path, bands: Sequence[str]) -> Iterator[SeriesRecord]:
    for path in sorted(folder.glob("p*.tif")):
        image, names, _ = read_dn(path, bands)
        dn = image[None]
        labels = np.where(observed(dn, names), CLEAR, UNKNOWN).astype(np.uint8)
        yield SeriesRecord(dn, path.stem, folder.name, names, labels, "L2A", 10.0, None, f"{folder.name}/{path.stem}")


def _belgium(folder: Path, bands: Sequence[str]) -> Iterator[SeriesRecord]:
    """Yield the first dates of the field (training) and the last ones (test), labelled by their scene classes.

    The field has the four bands only. Three corrections, seen in the images: class 11 (snow) is thick cloud, 7
    (unclassified) thin cloud, 2 (dark) shadow; and a date whose clear pixels are brighter in blue than those of the
    usual date by `HAZE` is hazy, thus thin cloud.
    """
    for path in sorted(folder.glob("belgium_*.npz")):
        with np.load(path, allow_pickle=False) as stored:
            dn, classes, texts = stored["img"], stored["scl"], stored["date"]
        labels = np.full(classes.shape, UNKNOWN, np.uint8)
        for value, numbers in ((CLEAR, (4, 5, 6)), (THICK, (8, 9, 11)), (THIN, (7, 10)), (SHADOW, (2, 3))):
            labels[np.isin(classes, numbers)] = value
        blue = [
            int(np.median(image[0][label == CLEAR])) if (label == CLEAR).any() else 0
            for image, label in zip(dn, labels, strict=True)
        ]
        usual = int(np.median([value for value in blue if value]))
        for label, value in zip(labels, blue, strict=True):
            label[(label == CLEAR) & (value > HAZE * usual)] = THIN
        labels[(dn == 0).any(1)] = UNKNOWN
        whens = [date.fromisoformat(str(text)) for text in texts]
        days = [float((when - whens[0]).days) for when in whens]
        first = BELGIAN_TRAINING_DATES
        for part, chosen in (("train", slice(0, first)), ("test", slice(first, None))):
            name = f"field_{part}"
            series = SeriesRecord(dn[chosen], name, folder.name, RGBN, labels[chosen], "L2A", days=tuple(days[chosen]))
            yield replace(series, group=f"{folder.name}/{name}", extra={"part": part})


SOURCES: dict[str, tuple[Callable[[Path, Sequence[str]], Iterator[SeriesRecord]], int]] = {
    "cloudsen12": (_cloudsen12, 16),
    "rondonia_20LMR": (_rondonia, 12),
    "sen12mscr": (_sen12mscr, 4),
    "oscd": (_clear_folders, 12),
    "california_fires": (_california, 6),
    "bark_beetle": (_clear_folders, 4),
    "biomassters": (_biomassters, 12),
    "bigearthnet": (_bigearthnet, 2),
    "belgium": (_belgium, 6),
}
"""Source folder -> its reader, and the items of 128 pixels that each record (a patch of SEN12MS-CR, else a place) gives
to the paper's task."""


def read_benchmark_places(
    folder: str | Path, part: str, *, partial: bool = False, bands: Sequence[str] = RGBN
) -> Iterator[SeriesRecord]:
    """Return the places of one part, with those of `bands` that each has; `extra["items"]` is its number of items.

    Every place has B02, B03, B04 and B08, the bands of the items. A missing source folder is an error unless `partial`.
    """
    folder = Path(folder)
    if unknown := [name for name in bands if name not in BANDS_13]:
        raise BandError(f"unknown band {unknown[0]}{did_you_mean(unknown[0], BANDS_13)}")
    if lost := [name for name in RGBN if name not in bands]:
        raise BandError(
            f"bands are {', '.join(bands)} without {', '.join(lost)}; expected {', '.join(RGBN)} and any others."
        )
    missing = [name for name in SOURCES if not (folder / name).is_dir()]
    if missing and not (partial and len(missing) < len(SOURCES)):
        raise DataError(
            f"{folder} lacks {', '.join(missing)}; expected the source folders {', '.join(SOURCES)}. "
            "Use --partial to build the items of the folders present."
        )
    return (
        replace(record, source=name, extra={"items": items})
        for name, (read, items) in SOURCES.items()
        for record in (read(folder / name, bands) if name not in missing else ())
        if record.extra.get("part", part_of(record.group)) == part and {*RGBN} <= {*record.bands}
    )
