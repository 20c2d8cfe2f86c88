"""AllClear: a JSON of series (inputs, target) over `roiN/YEAR_MONTH/SENSOR/roiN_SENSOR_YEAR_MONTH_DAY_median.tif`.

The lists are the dataset's own `metadata/datasets/{split}_{tx3|tx12}_..._{pct}.json`; their paths are those of the
authors' machine and are resolved below the given folder from `roiN/...` on. Images are larger than 256 with empty edges
and cut to the middle 256; `cld_shdw` holds cloud in band 2 and shadow in band 5. L1C, 13 bands. Licence: CC BY-NC 4.0.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sader.bands import BANDS_13
from sader.data.public.dataset import Entry, PublicDataset, PublicSeries, Request
from sader.data.public.images import read_bands, read_reflectance, same_size
from sader.data.public.splits import SplitList
from sader.errors import DataError
from sader.files import file_digest

SIDE = 256
SPLITS = ("train", "val", "test")
CLOUD_BAND, SHADOW_BAND = 2, 5
"""Numbers of the bands of cld_shdw, from 1."""
SAMPLERS = {
    "published": "inputs and target as the dataset's JSON lists them",
    "leak_free": "the same without inputs of the target's day",
}


def open_allclear(root: Path, request: Request) -> PublicDataset:
    """Return AllClear; lists: the path of a dataset JSON, default the only one of the split under metadata/datasets."""
    path = _list_file(root, request)
    listed = _load(path)
    # roiN may be in the root or in a folder directly below it.
    homes = [root, *sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("roi"))]
    entries, missing = [], []
    for name, sample in listed.items():
        try:
            entry = _entry(str(name), sample, homes, request.sampler)
        except KeyError as error:
            raise DataError(
                f"series {name} of {path} has no {error.args[0]}; expected roi, s2_toa and target. Use a list of the "
                "seq2point task, or download it again."
            ) from error
        lost = next((file for file in entry.images if not file.is_file()), None)
        if lost is None:
            entries.append(entry)
        else:
            missing.append((entry.name, lost))
    if missing and not request.options.partial:
        raise DataError(
            f"{missing[0][1]} does not exist, but {path.name} lists it ({len(missing)} of {len(listed)} series lack a "
            "file). Download their regions, or use the files on disk with partial=True (--partial)."
        )
    lists = SplitList(tuple(map(str, listed)), path.name)
    notes: dict[str, object] = {"list_file_sha256": file_digest(path)}
    if missing:
        notes["missing_series"] = len(missing)
    return PublicDataset(request, root, tuple(entries), _read, BANDS_13, lists, level="L1C", notes=notes)


def _list_file(root: Path, request: Request) -> Path:
    lists = request.options.lists
    if lists in ("frozen", "hash"):
        raise DataError(f"AllClear has no lists of kind {lists}; expected folder or the path of a dataset JSON.")
    if lists not in (None, "folder"):
        path = Path(str(lists))
        if not path.is_file():
            raise DataError(f"{path} does not exist; expected a dataset JSON of AllClear. Check --lists.")
        return path
    places = [place for place in (root / "metadata" / "datasets", root / "datasets", root) if place.is_dir()]
    found = sorted({path for place in places for path in place.glob(f"{request.split}_*.json")})
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(
            f"no {request.split}_*.json in {root}/metadata/datasets; expected a list such as "
            f"{request.split}_tx3_s2-s1_100pct_1proi.json. Download AllClear's metadata, or give lists=PATH (--lists)."
        )
    raise DataError(
        f"{len(found)} lists of split {request.split} in {found[0].parent}: {', '.join(p.name for p in found[:5])}; "
        "expected one. Choose with lists=PATH (--lists)."
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the list {path}: {error}. Download it again.") from error
    if not isinstance(content, dict) or not content:
        raise DataError(f"{path} holds no series; expected a JSON object of them. Download it again.")
    return content


def _entry(name: str, sample: dict[str, Any], homes: list[Path], sampler: str) -> Entry:
    roi = str(sample["roi"][0])
    inputs = sorted((_when(when), _place(file, roi, homes)) for when, file in sample["s2_toa"])
    target_when, target = _when(sample["target"][0][0]), _place(sample["target"][0][1], roi, homes)
    if sampler == "leak_free":
        inputs = [(when, file) for when, file in inputs if when.date() != target_when.date() and file != target]
    if not inputs:
        raise DataError(f"series {name} has no input of another day than its target; use sampler='published'.")
    start = min(target_when, *(when for when, _ in inputs))
    facts = {
        "days": tuple(float((when - start).days) for when, _ in inputs),
        "target_day": float((target_when - start).days),
    }
    return Entry(f"{roi}_{name}", roi, tuple(file for _, file in inputs), target, facts=facts)


def _when(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError) as error:
        raise DataError(f"a list has the time {text!r}; expected such as 2022-01-03 10:11:12.") from error


def _place(file: str, roi: str, homes: list[Path]) -> Path:
    """Return the local path of a file of the lists: the part from the region's folder on, below a home."""
    parts = PurePosixPath(str(file).replace("\\", "/")).parts
    if roi not in parts:
        raise DataError(f"the list names {file}, which is not in a folder {roi}; expected .../{roi}/YEAR_MONTH/...")
    relative = Path(*parts[parts.index(roi) :])
    return next((home / relative for home in homes if (home / relative).is_file()), homes[0] / relative)


def _read(entry: Entry) -> PublicSeries:
    images, seen = read_reflectance(entry.images, BANDS_13, centre=SIDE)
    masks = [_mask(path) for path in entry.images]
    same_size([*entry.images, *entry.images], [*images, *masks])
    seen[0] &= ~masks[0]
    return PublicSeries.of(entry, images, seen, BANDS_13, cloud_mask=np.stack(masks[1:]), **entry.facts)


def _mask(path: Path) -> np.ndarray:
    """Return bool (H, W), cloud or shadow, of the image at `path`; pixels unknown to the mask count as cloud."""
    file = path.parent.parent / "cld_shdw" / path.name.replace("_s2_toa_", "_cld_shdw_")
    if not file.is_file():
        raise DataError(f"{file} does not exist, but {path} does; expected the mask of each image. Download it again.")
    cloud, shadow = read_bands(file, (CLOUD_BAND, SHADOW_BAND), centre=SIDE)
    return (np.nan_to_num(cloud, nan=1.0) > 0) | (np.nan_to_num(shadow, nan=1.0) > 0)
