"""Sen2_MTC_New (CTGAN) and Sen2_MTC_Old (STGAN): three cloudy dates and one clear image each.

New: `ROOT/{train,val,test}.txt` name tiles, `ROOT/Sen2_MTC/TILE/cloudless/NAME.tif` and
`.../cloud/NAME_{0,1,2}.tif`, 256 x 256, R G B NIR, reflectance x 10000. Old: `multipleImage/clear/ID.jpg` and
`multipleImage/cloudy/ID_{0,1,2}.jpg` with `ID_{0,1,2}_ir.jpg`, 8 bit; no official split. Neither gives dates or SAR.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from sader.data.public.dataset import Entry, PublicDataset, PublicSeries, Request, reflectance_of_counts
from sader.data.public.images import check_counts, files_in, read_counts, read_picture, same_size
from sader.data.public.splits import SplitList, by_hash, folder_list, frozen_list, joined, list_hash, read_list
from sader.errors import DataError

BANDS = ("B04", "B03", "B02", "B08")
"""Red, green, blue, near infrared: the order of the files."""
DATES = 3
NEW_SPLITS = OLD_SPLITS = ("train", "val", "test", "all")
NEW_SAMPLERS = {
    "published": "the three dates that the dataset gives",
    "leak_free": "the same: the dates are given and the tiles of the lists are disjoint",
}
OLD_SAMPLERS = {
    "published": "the three dates that the dataset gives",
    "leak_free": "the same dates; train leaves out the test tiles of Sen2_MTC_New, for models trained on both",
}


def open_new(root: Path, request: Request) -> PublicDataset:
    """Return Sen2_MTC_New; lists: folder (default, the text files of the root), frozen, or the path of one."""
    tiles_root = root / "Sen2_MTC"
    if not tiles_root.is_dir():
        raise DataError(
            f"{root} has no folder Sen2_MTC; expected ROOT/Sen2_MTC/TILE/cloud and cloudless, as in CTGAN.zip. "
            "Give the folder that holds Sen2_MTC and train.txt, val.txt, test.txt."
        )
    parts = ("train", "val", "test") if request.split == "all" else (request.split,)
    lists = joined([_new_list(root, part, request) for part in parts])
    entries: list[Entry] = []
    missing: list[str] = []
    for tile in lists.names:
        if (tiles_root / tile).is_dir():
            entries += _tile_entries(tiles_root / tile)
        else:
            missing.append(tile)
    if missing and not request.options.partial:
        raise DataError(
            f"{len(missing)} of {len(lists.names)} tiles of {lists.origin} are not in {tiles_root}: "
            f"{', '.join(missing[:5])}. Download them, or use the files on disk with partial=True (--partial)."
        )
    published = joined([frozen_list("sen2_mtc_new", part) for part in parts])
    notes: dict[str, object] = {"published_lists": lists.sha256 == published.sha256}
    if missing:
        notes["missing_places"] = missing
    return PublicDataset(request, root, tuple(entries), _read_new, BANDS, lists, level="L2A", notes=notes)


def _new_list(root: Path, part: str, request: Request) -> SplitList:
    lists = request.options.lists or "folder"
    if lists == "frozen":
        return frozen_list("sen2_mtc_new", part)
    if lists == "folder":
        instead = "Copy it from CTGAN.zip, or use the list shipped with sader: lists='frozen' (--lists frozen)."
        return folder_list(root, part, instead=instead)
    return _own_list(lists)


def _own_list(path: str | Path) -> SplitList:
    names = read_list(Path(path))
    return SplitList(names, Path(path).name, list_hash(names))


def _tile_entries(tile: Path) -> list[Entry]:
    """Return the series of one tile, in natural order; raise for the first file that is missing."""
    clear, cloudy = tile / "cloudless", tile / "cloud"
    for folder in (clear, cloudy):
        if not folder.is_dir():
            raise DataError(f"{tile} has no folder {folder.name}; expected cloud and cloudless. Unpack the tile again.")
    there = set(os.listdir(cloudy))
    names = [name[:-4] for name in files_in(clear, ".tif")]
    if not names:
        raise DataError(f"{clear} holds no .tif; expected the clear images of the tile. Unpack the tile again.")
    entries = []
    for name in names:
        dates = [f"{name}_{date}.tif" for date in range(DATES)]
        for date in dates:
            if date not in there:
                raise DataError(
                    f"{cloudy / date} does not exist, but {clear / name}.tif does; expected {DATES} cloudy dates of "
                    "each clear image. Unpack the tile again."
                )
        series = name if name.startswith(tile.name) else f"{tile.name}/{name}"
        entries.append(Entry(series, tile.name, tuple(cloudy / date for date in dates), clear / f"{name}.tif"))
    return entries


def _read_new(entry: Entry) -> PublicSeries:
    assert entry.target is not None
    paths = [entry.target, *entry.inputs]
    images = [read_counts(path, BANDS) for path in paths]
    same_size(paths, [counts for counts, _ in images])
    for path, (counts, seen) in zip(paths, images, strict=True):
        check_counts(path, counts, seen)
    values = np.stack([reflectance_of_counts(counts) for counts, _ in images])
    seen = np.stack([seen for _, seen in images])
    return PublicSeries(entry.name, entry.group, values[1:], values[0], seen[1:], seen[0], BANDS)


# ---------------------------------------------------------------- Sen2_MTC_Old


def open_old(root: Path, request: Request) -> PublicDataset:
    """Return Sen2_MTC_Old; lists: folder (default: SPLIT.txt with tiles or IDs), hash (our own, by tile), or a path.

    The infrared of the clear image is not published, so the bands are red, green, blue; that of the inputs is `aux`.
    """
    base = next((place for place in (root, root / "multipleImage") if (place / "clear").is_dir()), None)
    if base is None or not (base / "cloudy").is_dir():
        raise DataError(
            f"{root} has no folders clear and cloudy; expected multipleImage/clear and multipleImage/cloudy, as in "
            "STGAN's archive. Give multipleImage or the folder above it."
        )
    ids = [name[:-4] for name in files_in(base / "clear", ".jpg")]
    if not ids:
        raise DataError(f"{base / 'clear'} holds no .jpg; expected one clear image for each series.")
    lists = _old_list(root, base, ids, request)
    listed = set(lists.names)
    chosen = [name for name in ids if name in listed or tile_of(name) in listed]
    unknown = sorted(listed - set(ids) - {tile_of(name) for name in ids})
    if unknown and not request.options.partial:
        raise DataError(
            f"{len(unknown)} of {len(listed)} names of {lists.origin} are not in {base / 'clear'}: "
            f"{', '.join(unknown[:5])}. Download them, or use the files on disk with partial=True (--partial)."
        )
    notes: dict[str, object] = {"missing_places": unknown} if unknown else {}
    if request.sampler == "leak_free" and request.split == "train":
        tested = {tile_of(tile.removeprefix("T")) for tile in frozen_list("sen2_mtc_new", "test").names}
        notes["left_out"] = sum(tile_of(name) in tested for name in chosen)
        chosen = [name for name in chosen if tile_of(name) not in tested]
    there = set(os.listdir(base / "cloudy"))
    entries = [_old_entry(base, name, there) for name in chosen]
    return PublicDataset(request, root, tuple(entries), _read_old, BANDS[:3], lists, level="L1C", notes=notes)


def tile_of(name: str) -> str:
    """Return the MGRS tile at the start of an ID such as 15RTN_70002000, without the T of product names."""
    found = re.match(r"T?(\d{2}[A-Z]{3})", name)
    return found.group(1) if found else name.split("_")[0]


def _old_list(root: Path, base: Path, ids: list[str], request: Request) -> SplitList:
    lists, split = request.options.lists, request.split
    if split == "all":
        return SplitList(tuple(ids), "every image of the folder", list_hash(ids))
    if lists == "hash":
        return by_hash([tile_of(name) for name in ids], split)
    if lists in (None, "folder"):
        instead = (
            "The dataset has no official split: write tiles or IDs into it, one per line, or use lists='hash' "
            "(--lists hash), our own split by tile."
        )
        return folder_list(base if (base / f"{split}.txt").is_file() else root, split, instead=instead)
    if lists == "frozen":
        raise DataError("Sen2_MTC_Old has no published list to ship; expected lists folder, hash or a path.")
    assert lists is not None
    return _own_list(lists)


def _old_entry(base: Path, name: str, there: set[str]) -> Entry:
    colour = [f"{name}_{date}.jpg" for date in range(DATES)]
    infrared = [f"{name}_{date}_ir.jpg" for date in range(DATES)]
    for file in (*colour, *infrared):
        if file not in there:
            raise DataError(
                f"{base / 'cloudy' / file} does not exist, but clear/{name}.jpg does; expected {DATES} cloudy dates "
                "with infrared. Unpack the archive again."
            )
    return Entry(
        name,
        tile_of(name),
        tuple(base / "cloudy" / file for file in colour),
        base / "clear" / f"{name}.jpg",
        {"infrared": tuple(base / "cloudy" / file for file in infrared)},
    )


def _read_old(entry: Entry) -> PublicSeries:
    assert entry.target is not None
    paths = [entry.target, *entry.inputs, *entry.more["infrared"]]
    colours = [read_picture(path) for path in paths[: 1 + DATES]]
    infrared = [read_picture(path, colours=1) for path in paths[1 + DATES :]]
    same_size(paths, [*colours, *infrared])
    # JPEG has no nodata: every pixel counts as observed.
    seen = np.ones((1 + DATES, *colours[0].shape[1:]), bool)
    return PublicSeries(
        entry.name, entry.group, np.stack(colours[1:]), colours[0], seen[1:], seen[0], BANDS[:3],
        aux=np.stack(infrared), aux_bands=BANDS[3:],
    )  # fmt: skip
