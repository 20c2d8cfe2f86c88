"""SEN12MS-CR-TS: 30 dates of a patch in 2018, Sentinel-2 L1C and Sentinel-1; T inputs and a target are chosen.

`ROIsXXXX/N/{S1,S2}/<0..29>/*_patch_K.tif`, the sixth part of a name is the date. `sen12mscrts` is
all regions, `sen12mscrts_ea` East Asia with all three test regions, `sen12mscrts_ea_published` the same with
ROIs1868/73 alone as test, as in the published East Asia figures. Samplers: `splits.SAMPLERS`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np

from sader.bands import BANDS_13
from sader.data.public.dataset import Entry, PublicDataset, PublicSeries, Request, missing_places
from sader.data.public.images import read_mask, read_reflectance, read_sar
from sader.data.public.splits import RANDOM, SAMPLERS, SplitList, choose_dates, chosen_list, frozen_list, joined
from sader.errors import ConfigError, DataError, require
from sader.files import write_atomically

__all__ = ["REGIONS", "SAMPLERS", "SPLITS", "coverage_table", "open_sen12mscrts"]

DATES = 30
SPLITS = ("train", "val", "test", "all")
REGIONS = {
    "sen12mscrts": "all", "sen12mscrts_africa": "africa", "sen12mscrts_america": "america",
    "sen12mscrts_ea": "asiaEast", "sen12mscrts_ea_published": "asiaEast", "sen12mscrts_asia_west": "asiaWest",
    "sen12mscrts_europa": "europa",
}  # fmt: skip
"""Dataset name -> region of the published lists."""
COVERAGES = ("auto", "masks", "s2cloudless", "rules")
"""Sources of the cloud cover beside a table."""
_PATCH = re.compile(r"_patch_(\d+)\.tif$", re.IGNORECASE)


def open_sen12mscrts(root: Path, request: Request) -> PublicDataset:
    """Return SEN12MS-CR-TS or one region of it; regions absent from disk are an error unless partial."""
    lists = _lists(request)
    if not any(root.glob("ROIs*/*/S2")):
        raise DataError(
            f"{root} holds no ROIs*/NUMBER/S2; expected the SEN12MS-CR-TS layout ROIs1868/73/S2/0/*.tif. "
            "Give the folder that holds ROIs1158, ROIs1868, ROIs1970, ROIs2017."
        )
    missing = [roi for roi in lists.names if not (root / roi / "S2").is_dir()]
    lost = missing_places(missing, lists, request, root, "regions")
    table = _table(request.options.coverage)
    entries = [entry for roi in lists.names if roi not in missing for entry in _entries(root, roi, request)]
    draws = request.options.draws if request.sampler == RANDOM else 1
    entries = [
        entry if draw == 0 else replace(entry, name=f"{entry.name}_draw_{draw}")
        for draw in range(draws)
        for entry in entries
    ]
    source = "table" if table is not None else str(request.options.coverage)
    if source == "auto":
        # One detector for the whole split: a mixture would choose dates by two measures.
        source = "masks" if all(entry.facts["masks"] for entry in entries) else "rules"
    notes = {"coverage": source, **lost}
    if table is not None:
        notes["coverage_sha256"] = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    read = partial(
        _read, sampler=request.sampler, inputs=request.options.inputs, sar=request.options.sar, coverage=source,
        table=table,
    )  # fmt: skip
    return PublicDataset(request, root, tuple(entries), read, BANDS_13, lists, level="L1C", notes=notes)


def coverage_table(dataset: PublicDataset, out: Path) -> Path:
    """Write the cloud cover of every date of every patch as JSON to `out`, which `ReadOptions.coverage` takes."""
    source = str(dataset.notes.get("coverage", "none"))
    if source == "none":
        raise ConfigError(f"{dataset.request.name} has no choice of dates; expected sen12mscrts or a region of it.")
    if source == "table":
        raise ConfigError("the dataset already uses a coverage table. Open it with coverage='auto' to make another.")
    table = {entry.name: [float(value) for value in _cover(entry, source)[0]] for entry in dataset.entries}
    write_atomically(out, json.dumps({"source": source, "coverage": table}).encode())
    return out


def _lists(request: Request) -> SplitList:
    parts = ("train", "val", "test") if request.split == "all" else (request.split,)
    published = request.name.endswith("_published")
    chosen = [f"{REGIONS[request.name]}/{part}{'_published' * (published and part == 'test')}" for part in parts]
    frozen = partial(joined, [frozen_list("sen12mscrts", part) for part in chosen])
    return chosen_list(request.options.lists, "SEN12MS-CR-TS", frozen=frozen)


def _table(coverage: str | Path) -> dict[str, list[float]] | None:
    if coverage == "s2cloudless":
        require("s2cloudless", extra="s2cloudless", purpose="the cloud cover by s2cloudless")
    if coverage in COVERAGES:
        return None
    path = Path(coverage)
    if path.suffix != ".json":
        raise DataError(
            f"{path} is no JSON table; expected {', '.join(COVERAGES)} or a table (the published generic_*.npy tables "
            "are pickled and not read: nothing is unpickled here). Make one with: sader data cover."
        )
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["coverage"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read the coverage table {path}: {error}. Make it again.") from error
    return table


def _entries(root: Path, roi: str, request: Request) -> list[Entry]:
    """Return the patches of one region; every date must hold the same ones."""
    kinds = ("S2", "S1") if request.options.sar else ("S2",)
    files: dict[str, list[dict[int, Path]]] = {}
    unmasked: set[int] = set()
    for kind in kinds:
        files[kind] = []
        for number in range(DATES):
            folder = root / roi / kind / str(number)
            if not folder.is_dir():
                raise DataError(f"{folder} does not exist; expected dates 0 to {DATES - 1}. Unpack the region again.")
            names = {name for name in os.listdir(folder) if not name.startswith(".")}
            found = {int(match.group(1)): folder / name for name in names if (match := _PATCH.search(name))}
            if kind == "S2":
                unmasked |= {patch for patch, path in found.items() if f"{path.stem}_mask.npy" not in names}
            files[kind].append(found)
    patches = sorted(files["S2"][0])
    if not patches:
        raise DataError(f"{root / roi}/S2/0 holds no *_patch_K.tif; expected the patches. Unpack the region again.")
    for kind in kinds:
        for number, found in enumerate(files[kind]):
            lost = sorted(set(patches) - set(found))
            if lost:
                raise DataError(
                    f"{root / roi / kind / str(number)} has no patch {lost[0]}; expected the patches of date 0 on "
                    "every date. Unpack the region again."
                )
    return [
        Entry(
            f"{roi.replace('/', '_')}_patch_{patch}", roi, tuple(found[patch] for found in files["S2"]), None,
            {"S1": tuple(found[patch] for found in files["S1"])} if request.options.sar else {},
            {"masks": patch not in unmasked},
        )
        for patch in patches
    ]  # fmt: skip


def acquisition_day(path: Path) -> float:
    """Return the day number of the date that is the sixth part of a file name."""
    parts = path.name.split("_")
    try:
        return float(date.fromisoformat(parts[5]).toordinal())
    except (IndexError, ValueError) as error:
        raise DataError(
            f"{path} has no date as sixth part of its name; expected such as "
            "s2_ROIs1868_73_ImgNo_0_2018-01-03_patch_0.tif. Use the names as published."
        ) from error


def _cover(entry: Entry, source: str) -> tuple[np.ndarray, list[np.ndarray] | None]:
    """Return the cloud cover (30,) of the dates, and their masks; None for those by rules."""
    stored = [path.with_name(f"{path.stem}_mask.npy") for path in entry.inputs]
    if source == "masks":
        lost = next((path for path in stored if not path.is_file()), None)
        if lost is not None:
            raise DataError(
                f"{lost} does not exist; expected a mask beside every image with coverage='masks'. "
                "Use coverage='rules' or a table."
            )
        masks = [read_mask(path) for path in stored]
        return np.array([mask.mean() for mask in masks]), masks
    from sader.data.cloud_rules import S2CLOUDLESS_BANDS, detect_s2cloudless, estimate_cloud_mask

    values, seen = read_reflectance(entry.inputs, BANDS_13, check=False)
    if source == "s2cloudless":
        values = values[:, [BANDS_13.index(band) for band in S2CLOUDLESS_BANDS]]
        cloud = np.stack([detect_s2cloudless(each) for each in values])
    else:
        cloud = estimate_cloud_mask(values, BANDS_13, valid=seen)
    # Pixels without data count as cloud, so that a blank date is never the target.
    return (cloud | ~seen).mean((1, 2)), list(cloud) if source == "s2cloudless" else None


def _read(
    entry: Entry, *, sampler: str, inputs: int, sar: str | None, coverage: str, table: dict[str, list[float]] | None
) -> PublicSeries:
    days = [acquisition_day(path) for path in entry.inputs]
    masks = None
    if table is not None:
        patch = entry.name.partition("_draw_")[0]
        if len(table.get(patch, ())) != len(entry.inputs):
            raise DataError(
                f"the coverage table has {len(table.get(patch, ()))} values for {patch}; expected {len(entry.inputs)}. "
                "Make it again with: sader data cover."
            )
        cover = np.array(table[patch])
    else:
        cover, masks = _cover(entry, coverage)
    chosen = choose_dates(sampler, cover, inputs=inputs, days=days, number=entry.number)
    paths = [entry.inputs[number] for number in (chosen.target, *chosen.inputs)]
    images, seen = read_reflectance(paths, BANDS_13, check=False)
    files = [entry.more["S1"][number] for number in chosen.inputs] if sar is not None else []
    used = [days[number] for number in chosen.inputs]
    start = min(*used, days[chosen.target])
    return PublicSeries.of(
        entry, images, seen, BANDS_13,
        cloud_mask=None if masks is None else np.stack([masks[number] for number in chosen.inputs]),
        days=tuple(day - start for day in used), target_day=days[chosen.target] - start,
        **read_sar(files, sar, paths[0], images[0]),
        facts={
            "inputs": chosen.inputs, "target": chosen.target, "target_is_input": chosen.leaks,
            "target_cover": float(cover[chosen.target]),
        },
    )  # fmt: skip
