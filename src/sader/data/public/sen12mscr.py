"""SEN12MS-CR: one cloudy and one clear Sentinel-2 image of a patch, with Sentinel-1.

`ROIs1158_spring_s2_cloudy/s2_cloudy_N/ROIs1158_spring_s2_cloudy_N_pK.tif` and likewise s2 and s1, 13 bands
L1C, 256 x 256; the lists are those of the UnCRtainTS loader (175 regions). A folder per season works too.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from sader.bands import BANDS_13
from sader.data.public.dataset import Entry, PublicDataset, PublicSeries, Request, expect_files, missing_places
from sader.data.public.images import files_in, natural_key, read_reflectance, read_sar
from sader.data.public.splits import chosen_list, frozen_list, joined
from sader.errors import DataError

SPLITS = ("train", "val", "test", "all")
SAMPLERS = {
    "published": "regions whose path contains a listed name: 's1_1' of the training list also takes s1_106, s1_123 "
    "and s1_140 of the test list, so that training includes test regions",
    "leak_free": "exactly the listed regions",
}
SEASONS = ("ROIs1158_spring", "ROIs1868_summer", "ROIs1970_fall", "ROIs2017_winter")


def open_sen12mscr(root: Path, request: Request) -> PublicDataset:
    """Return SEN12MS-CR; regions missing on disk are an error unless partial, because they change the score."""
    regions = {f"{season}/{number}": folder for season in SEASONS for number, folder in _regions(root, season).items()}
    if not regions:
        raise DataError(
            f"{root} holds no SEN12MS-CR region; expected ROIs1158_spring_s2_cloudy/s2_cloudy_1 and the like. "
            "Give the folder that holds the ROIs*_s1, ROIs*_s2 and ROIs*_s2_cloudy folders."
        )
    parts = ("train", "val", "test") if request.split == "all" else (request.split,)
    frozen = partial(joined, [frozen_list("sen12mscr", part) for part in parts])
    lists = chosen_list(request.options.lists, "SEN12MS-CR", frozen=frozen)
    chosen = [region for region in sorted(regions, key=natural_key) if _belongs(region, lists.names, request.sampler)]
    missing = sorted(set(lists.names) - set(regions), key=natural_key)
    notes = missing_places(missing, lists, request, root, "regions")
    entries = [entry for region in chosen for entry in _entries(region, *regions[region], request)]
    read = partial(_read, sar=request.options.sar)
    return PublicDataset(request, root, tuple(entries), read, BANDS_13, lists, level="L1C", notes=notes)


def _belongs(region: str, names: tuple[str, ...], sampler: str) -> bool:
    if sampler == "leak_free":
        return region in names
    return any(region.startswith(name) for name in names)


def _regions(root: Path, season: str) -> dict[str, tuple[Path, str]]:
    """Return number -> (folder of the cloudy images, layout) of the regions of one season."""
    for layout in (f"{season}_s2_cloudy", season):
        place = root / layout
        if place.is_dir():
            found = {}
            for name in os.listdir(place):
                match = re.fullmatch(r"s2_cloudy_(\d+)", name)
                if match and (place / name).is_dir():
                    found[match.group(1)] = (place / name, layout)
            return found
    return {}


def _entries(region: str, cloudy: Path, layout: str, request: Request) -> list[Entry]:
    season, number = region.split("/")

    def sibling(kind: str) -> Path:
        return cloudy.parent.parent / layout.replace("_s2_cloudy", f"_{kind}") / f"{kind}_{number}"

    clear, radar = sibling("s2"), sibling("s1")
    wanted = {clear: "s2"} | ({radar: "s1"} if request.options.sar else {})
    there = {}
    for folder in wanted:
        if not folder.is_dir():
            raise DataError(f"{folder} does not exist, but {cloudy} does; expected both. Unpack the region again.")
        there[folder] = set(os.listdir(folder))
    entries = []
    for name in files_in(cloudy, ".tif"):
        files = {folder: name.replace("_s2_cloudy_", f"_{kind}_") for folder, kind in wanted.items()}
        for folder, file in files.items():
            expect_files([folder / file], there[folder], cloudy / name, "a pair")
        more = {"s1": (radar / files[radar],)} if request.options.sar else {}
        patch = name[:-4].replace("_s2_cloudy_", "_")
        entries.append(Entry(patch, f"{season}_{number}", (cloudy / name,), clear / files[clear], more))
    if not entries:
        raise DataError(f"{cloudy} holds no .tif; expected the patches of the region. Unpack it again.")
    return entries


def _read(entry: Entry, *, sar: str | None) -> PublicSeries:
    images, seen = read_reflectance(entry.images, BANDS_13)
    radar = read_sar(entry.more.get("s1", ()), sar, entry.images[0], images[0])
    return PublicSeries.of(entry, images, seen, BANDS_13, **radar)
