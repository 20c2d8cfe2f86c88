"""RICE1 and RICE2: single 8-bit colour images under thin (RICE1) or thick (RICE2) cloud, with the clear image.

`RICE1/{cloud,label}/N.png` (500), `RICE2/{cloud,label,mask}/N.png` (450), 512 x 512. The archive has no
lists; those in use contain repeated images, which `leak_free` leaves out of the test. Values are value / 255.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from sader.data.public.dataset import Entry, PublicDataset, PublicSeries, Request, expect_files, without_twins
from sader.data.public.images import content_groups, files_in, natural_key, read_pictures
from sader.data.public.splits import SplitList, by_hash, chosen_list, folder_list
from sader.errors import DataError

BANDS = ("B04", "B03", "B02")
SPLITS = ("train", "val", "test", "all")
SAMPLERS = {
    "published": "every image of the list",
    "leak_free": "val and test without images equal to a training image or to one listed before; train as listed",
}


def open_rice(root: Path, request: Request) -> PublicDataset:
    """Return RICE1 or RICE2; lists: folder (default: SPLIT.txt or SPLIT_list.txt), hash (our own), or a path."""
    folder = request.name.upper()
    base = next((place for place in (root / folder, root) if (place / "cloud").is_dir()), None)
    if base is None or not (base / "label").is_dir():
        raise DataError(
            f"{root} has no {folder}/cloud and {folder}/label; expected the RICE layout. Give the folder that holds "
            f"{folder}."
        )
    masked = request.name == "rice2"
    kinds = ("cloud", "label", "mask") if masked else ("cloud", "label")
    if masked and not (base / "mask").is_dir():
        raise DataError(f"{base} has no folder mask; expected cloud, label and mask. Unpack RICE2 again.")
    there = {kind: set(files_in(base / kind, ".png")) for kind in kinds}
    names = [name[:-4] for name in files_in(base / "label", ".png")]
    for name in names:
        for kind in kinds:
            expect_files([base / kind / f"{name}.png"], there[kind], base / "label" / f"{name}.png", "a pair")

    def listed_entries(lists: SplitList) -> list[Entry]:
        entries = []
        for name in _known(lists, names, base):
            cloud, label, mask = (base / kind / f"{name}.png" for kind in ("cloud", "label", "mask"))
            entries.append(Entry(f"{folder}_{name}", folder, (cloud,), label, {"mask": (mask,)} if masked else {}))
        return entries

    lists = _lists(root, base, names, request, request.split)
    entries = listed_entries(lists)
    notes: dict[str, object] = {}
    if request.sampler == "leak_free" and request.split in ("val", "test"):
        training = listed_entries(_lists(root, base, names, request, "train"))
        entries, notes["left_out"] = without_twins(entries, training)
    read = partial(read_pair, bands=BANDS)
    return PublicDataset(request, root, tuple(entries), read, BANDS, lists, resolution=None, notes=notes)


def _known(lists: SplitList, names: list[str], base: Path) -> list[str]:
    """Return the listed names without suffix, or raise for one that is not on disk."""
    there = set(names)
    chosen = [Path(name).stem if name.lower().endswith(".png") else name for name in lists.names]
    unknown = [name for name in chosen if name not in there]
    if unknown:
        raise DataError(
            f"{base / 'label' / unknown[0]}.png does not exist, but {lists.origin} lists it "
            f"({len(unknown)} such names). Unpack the archive again or correct the list."
        )
    return chosen


def _lists(root: Path, base: Path, names: list[str], request: Request, split: str) -> SplitList:
    if split == "all":
        return SplitList(tuple(names), "every image of the folder")

    def by_content() -> SplitList:
        # Equal images are one group, so that they are in the same split.
        groups = content_groups(names, lambda name: base / "label" / f"{name}.png")
        part = by_hash(groups, split)
        members = (name for group in part.names for name in groups[group])
        return SplitList(tuple(sorted(members, key=natural_key)), part.origin)

    known = (f"{split}.txt", f"{split}_list.txt")
    place = base if any((base / name).is_file() for name in known) else root
    instead = (
        "RICE comes without lists: copy the one you compare with, or use lists='hash' (--lists hash), our own "
        "80/10/10 split without repeated images across its parts."
    )
    folder = partial(folder_list, place, split, file_names=known, instead=instead)
    return chosen_list(request.options.lists, "RICE", folder=folder, hash=by_content)


def read_pair(entry: Entry, *, bands: tuple[str, ...]) -> PublicSeries:
    """Return a series of one date from a pair of pictures, with infrared and mask if the entry has them."""
    images, others = read_pictures(entry.images, entry.files[len(entry.images) :])
    if "infrared" in entry.more:
        images = np.concatenate([images, np.stack(others[:2])], axis=1)
    mask = others[-1] > 0.5 if "mask" in entry.more else None
    return PublicSeries.of(entry, images, np.ones_like(images[:, 0], bool), bands, cloud_mask=mask)
