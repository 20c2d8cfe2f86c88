"""Sen2_MTC_New (CTGAN) and Sen2_MTC_Old (STGAN): three cloudy dates and one clear image each.

New: `ROOT/{train,val,test}.txt` name tiles, `ROOT/Sen2_MTC/TILE/cloudless/NAME.tif` and
`.../cloud/NAME_{0,1,2}.tif`, 256 x 256, R G B NIR, reflectance x 10000. Old: `multipleImage/clear/ID.jpg` and
`multipleImage/cloudy/ID_{0,1,2}.jpg` with `ID_{0,1,2}_ir.jpg`, 8 bit; no official split. Neither gives dates or SAR.
"""

from __future__ import annotations

import os
import re
import warnings
from functools import partial
from pathlib import Path

import numpy as np

from sader.data.public.dataset import Entry, PublicDataset, PublicSeries, Request, expect_files, missing_places
from sader.data.public.images import files_in, read_pictures, read_reflectance
from sader.data.public.splits import SplitList, by_hash, chosen_list, folder_list, frozen_list, joined
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
    missing = [tile for tile in lists.names if not (tiles_root / tile).is_dir()]
    entries = [entry for tile in lists.names if tile not in missing for entry in _tile_entries(tiles_root / tile)]
    published = joined([frozen_list("sen2_mtc_new", part) for part in parts])
    notes = {"published_lists": lists.sha256 == published.sha256}
    notes |= missing_places(missing, lists, request, tiles_root, "tiles")
    return PublicDataset(request, root, tuple(entries), _read_new, BANDS, lists, level="L2A", notes=notes)


def _new_list(root: Path, part: str, request: Request) -> SplitList:
    instead = "Copy it from CTGAN.zip, or use the list shipped with sader: lists='frozen' (--lists frozen)."
    folder, frozen = partial(folder_list, root, part, instead=instead), partial(frozen_list, "sen2_mtc_new", part)
    return chosen_list(request.options.lists, "Sen2_MTC_New", folder=folder, frozen=frozen)


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
    if orphans := {name.rpartition("_")[0] for name in there if name[-4:] == ".tif" and name[0] != "."} - set(names):
        text = f"{len(orphans)} series in {cloudy} have no clear image and are left out: {min(orphans)}"
        warnings.warn(f"{text}. If {clear / min(orphans)}.tif was published, unpack the tile again.", stacklevel=2)
    entries = []
    for name in names:
        dates, target = tuple(cloudy / f"{name}_{date}.tif" for date in range(DATES)), clear / f"{name}.tif"
        expect_files(dates, there, target, f"{DATES} cloudy dates of each clear image")
        series = name if name.startswith(tile.name) else f"{tile.name}/{name}"
        entries.append(Entry(series, tile.name, dates, target))
    return entries


def _read_new(entry: Entry) -> PublicSeries:
    return PublicSeries.of(entry, *read_reflectance(entry.images, BANDS), BANDS)


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
    wanted = set(lists.names)
    chosen = [name for name in ids if name in wanted or tile_of(name) in wanted]
    unknown = sorted(wanted - set(ids) - {tile_of(name) for name in ids})
    notes = missing_places(unknown, lists, request, base / "clear", "names")
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
    split = request.split
    if split == "all":
        return SplitList(tuple(ids), "every image of the folder")
    instead = (
        "The dataset has no official split: write tiles or IDs into it, one per line, or use lists='hash' "
        "(--lists hash), our own split by tile."
    )
    place = base if (base / f"{split}.txt").is_file() else root
    folder = partial(folder_list, place, split, instead=instead)
    by_tile = partial(by_hash, [tile_of(name) for name in ids], split)
    return chosen_list(request.options.lists, "Sen2_MTC_Old", folder=folder, hash=by_tile)


def _old_entry(base: Path, name: str, there: set[str]) -> Entry:
    target = base / "clear" / f"{name}.jpg"
    colour = tuple(base / "cloudy" / f"{name}_{date}.jpg" for date in range(DATES))
    infrared = tuple(base / "cloudy" / f"{name}_{date}_ir.jpg" for date in range(DATES))
    expect_files((*colour, *infrared), there, target, f"{DATES} cloudy dates with infrared")
    return Entry(name, tile_of(name), colour, target, {"infrared": infrared})


def _read_old(entry: Entry) -> PublicSeries:
    images, infrared = read_pictures(entry.images, entry.more["infrared"])
    # JPEG has no nodata: every pixel counts as observed.
    seen = np.ones_like(images[:, 0], bool)
    return PublicSeries.of(entry, images, seen, BANDS[:3], aux=np.stack(infrared), aux_bands=BANDS[3:])
