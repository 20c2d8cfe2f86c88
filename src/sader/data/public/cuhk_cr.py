"""CUHK-CR1 (thin cloud) and CUHK-CR2 (thick cloud): single 8-bit images with infrared, 512 x 512, 0.5 m.

`C-CUHK/CUHK-CR1/{train,test}/{cloud,label}/N.png` in colour and `nir/CUHK-CR1/...` in infrared; the folders
are the split. 36 test images of CUHK-CR1 are repeated, which `leak_free` leaves out. Values are value / 255.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sader.data.public.dataset import Entry, PublicDataset, Request, expect_files, without_twins
from sader.data.public.images import files_in
from sader.data.public.rice import read_pair
from sader.data.public.splits import SplitList
from sader.errors import DataError

BANDS = ("B04", "B03", "B02", "B08")
SPLITS = ("train", "test", "all")
SAMPLERS = {
    "published": "every image of the folder",
    "leak_free": "test without images equal to a training image or to an earlier test image; train as published",
}


def open_cuhk_cr(root: Path, request: Request) -> PublicDataset:
    """Return CUHK-CR1 or CUHK-CR2: red, green, blue, and near infrared if the folder nir exists."""
    if request.options.lists not in (None, "folder"):
        raise DataError(f"CUHK-CR is split by its folders; expected no lists, found {request.options.lists}.")
    subset = "CUHK-CR1" if request.name == "cuhk_cr1" else "CUHK-CR2"
    base = _find(root, subset, "C-CUHK")
    if base is None:
        raise DataError(
            f"{root} has no {subset}/train and {subset}/test; expected C-CUHK/{subset}/train/cloud and label. "
            "Give the folder that holds C-CUHK."
        )
    infrared = _find(root, subset, "nir")
    parts = ("train", "test") if request.split == "all" else (request.split,)
    entries = [entry for part in parts for entry in _entries(base / part, infrared, part, subset)]
    notes: dict[str, object] = {"infrared": infrared is not None}
    if request.sampler == "leak_free" and request.split == "test":
        entries, notes["left_out"] = without_twins(entries, _entries(base / "train", None, "train", subset))
    lists = SplitList(tuple(entry.name for entry in entries), "folders of the dataset")
    bands = BANDS if infrared is not None else BANDS[:3]
    read = partial(read_pair, bands=bands)
    return PublicDataset(request, root, tuple(entries), read, bands, lists, resolution=0.5, notes=notes)


def _find(root: Path, subset: str, kind: str) -> Path | None:
    """Return the folder of a subset, also below the archive's top folder, whose name is not ASCII."""
    places = [root / kind / subset, *([root / subset] if kind == "C-CUHK" else [])]
    # If C-CUHK itself is given, nir is beside it.
    places += [root.parent / kind / subset] if root.name in ("C-CUHK", "nir") else []
    places += sorted(path / kind / subset for path in root.iterdir() if path.is_dir())
    return next((place for place in places if place.is_dir()), None)


def _entries(folder: Path, infrared: Path | None, part: str, subset: str) -> list[Entry]:
    for kind in ("cloud", "label"):
        if not (folder / kind).is_dir():
            raise DataError(f"{folder / kind} does not exist; expected {part}/cloud and {part}/label. Unpack it again.")
    kinds: dict[str, Path] = {"label": folder / "label", "cloud": folder / "cloud"}
    if infrared is not None:
        kinds |= {f"nir {kind}": infrared / part / kind for kind in ("label", "cloud")}
    there = {kind: files_in(place, ".png") if place.is_dir() else [] for kind, place in kinds.items()}
    entries = []
    for name in there["label"]:
        for kind, place in kinds.items():
            expect_files([place / name], there[kind], folder / "label" / name, "both")
        more = {"infrared": (kinds["nir label"] / name, kinds["nir cloud"] / name)} if infrared is not None else {}
        pair = Entry(f"{subset}_{part}_{name[:-4]}", subset, (folder / "cloud" / name,), folder / "label" / name, more)
        entries.append(pair)
    if not entries:
        raise DataError(f"{folder / 'label'} holds no .png; expected the clear images. Unpack the archive again.")
    return entries
