"""RICE1 and RICE2: single 8-bit colour images under thin (RICE1) or thick (RICE2) cloud, with the clear image.

`RICE1/{cloud,label}/N.png` (500), `RICE2/{cloud,label,mask}/N.png` (450), 512 x 512. The archive has no
lists; those in use contain repeated images, which `leak_free` leaves out of the test. Values are value / 255.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from sader.data.public.dataset import Entry, PublicDataset, PublicSeries, Request
from sader.data.public.images import content_groups, files_in, natural_key, read_picture, same_size, without_twins
from sader.data.public.splits import SplitList, by_hash, folder_list, list_hash, read_list
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
    there = {kind: [name[:-4] for name in files_in(base / kind, ".png")] for kind in kinds}
    names = there["label"]
    for name in names:
        for kind in kinds:
            if name not in there[kind]:
                raise DataError(
                    f"{base / kind / name}.png does not exist, but label/{name}.png does; expected a pair. "
                    "Unpack the archive again."
                )
    lists = _lists(root, base, names, request, request.split)
    chosen = _known(lists, names, base)
    notes: dict[str, object] = {}
    if request.sampler == "leak_free" and request.split in ("val", "test"):
        seen = list(_known(_lists(root, base, names, request, "train"), names, base))
        kept = without_twins(
            chosen, seen, lambda name: [base / "label" / f"{name}.png", base / "cloud" / f"{name}.png"]
        )
        notes["left_out"] = len(chosen) - len(kept)
        chosen = kept
    entries = [
        Entry(
            f"{folder}_{name}", folder, (base / "cloud" / f"{name}.png",), base / "label" / f"{name}.png",
            {"mask": (base / "mask" / f"{name}.png",)} if masked else {},
        )
        for name in chosen
    ]  # fmt: skip
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
    lists = request.options.lists
    if split == "all":
        return SplitList(tuple(names), "every image of the folder", list_hash(names))
    if lists == "hash":
        # Equal images are one group, so that they are in the same split.
        groups = content_groups(names, lambda name: base / "label" / f"{name}.png")
        part = by_hash(groups, split)
        members = tuple(name for group in part.names for name in groups[group])
        return SplitList(tuple(sorted(members, key=natural_key)), part.origin, list_hash(members))
    if lists in (None, "folder"):
        known = (f"{split}.txt", f"{split}_list.txt")
        place = base if any((base / name).is_file() for name in known) else root
        instead = (
            "RICE comes without lists: copy the one you compare with, or use lists='hash' (--lists hash), our own "
            "80/10/10 split without repeated images across its parts."
        )
        return folder_list(place, split, file_names=known, instead=instead)
    if lists == "frozen":
        raise DataError("RICE has no published list to ship; expected lists folder, hash or a path.")
    own = read_list(Path(str(lists)))
    return SplitList(own, Path(str(lists)).name, list_hash(own))


def read_pair(entry: Entry, *, bands: tuple[str, ...]) -> PublicSeries:
    """Return a series of one date from a pair of pictures, with infrared and mask if the entry has them."""
    assert entry.target is not None
    paths = [entry.target, *entry.inputs]
    clear, cloudy = (read_picture(path) for path in paths)
    same_size(paths, [clear, cloudy])
    if "infrared" in entry.more:
        extra = [read_picture(path, colours=1) for path in entry.more["infrared"]]
        same_size([*paths, *entry.more["infrared"]], [clear, cloudy, *extra])
        clear, cloudy = np.concatenate([clear, extra[0]]), np.concatenate([cloudy, extra[1]])
    mask = None
    if "mask" in entry.more:
        picture = read_picture(entry.more["mask"][0], colours=1)
        same_size([*paths, entry.more["mask"][0]], [clear, cloudy, picture])
        mask = picture > 0.5
    seen = np.ones((1, *clear.shape[1:]), bool)
    return PublicSeries(entry.name, entry.group, cloudy[None], clear, seen, seen[0], bands, cloud_mask=mask)
