"""The scenes of a list, a folder or a STAC catalogue, each with a name and its inputs.

- A text file holds one scene a line: the inputs as `sader remove` takes them, with quotes as in a shell, and before
  them a name and an equals sign where the default name is not wanted. Lines that start with # are comments.
- In a folder, each folder is a scene; .SAFE products are grouped by their tile.
- The items of a STAC catalogue are grouped by place: by the tile that they state, else by their own catalogue inside
  the given one, else by their bounding box.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sader.errors import DataError
from sader.geo.read.sentinel2 import is_safe
from sader.geo.stac.items import CATALOGS, VIRTUAL, absolute, is_stac, load_items

if TYPE_CHECKING:
    import pystac

_TILE = re.compile(r"_T(\d{2}[A-Z]{3})_")


@dataclass(frozen=True)
class SceneInputs:
    """One scene: its name in the output folder, and what it is made of."""

    name: str
    inputs: tuple[str, ...] = ()
    """Absolute paths, or addresses."""
    items: Mapping[str, Any] | None = None
    """Instead of inputs: a STAC item collection whose references are absolute."""

    @property
    def is_remote(self) -> bool:
        """Whether a part of it is read over the network."""
        features = () if self.items is None else self.items["features"]
        hrefs = [asset["href"] for item in features for asset in item["assets"].values()]
        return any(VIRTUAL.match(one) for one in (*self.inputs, *hrefs))


def find_scenes(where: str | Path) -> list[SceneInputs]:
    """Return the scenes of a list, a folder or a STAC catalogue, in its order."""
    path = Path(where)
    if path.is_dir():
        catalogs = [path / name for name in CATALOGS if (path / name).is_file()]
        found = _in_catalogue(catalogs[0]) if catalogs else _in_folder(path)
    elif is_stac(path):
        found = _in_catalogue(path)
    elif path.is_file():
        found = _in_list(path)
    else:
        raise DataError(f"there is no {path}; expected a list of scenes, a folder of folders or a STAC catalogue.")
    if not found:
        raise DataError(
            f"{path} holds no scene; expected a folder for each scene, a STAC catalogue with items, or a list with the "
            "inputs of one scene a line. For the dates of one scene: leave out --scenes."
        )
    found = [replace(one, name=re.sub(r"[^\w.-]+", "_", one.name).strip("._") or "scene") for one in found]
    twice = [name for name, count in Counter(one.name.lower() for one in found).items() if count > 1]
    if twice:
        raise DataError(
            f"{path} holds several scenes with the name {twice[0]}. Give them names in a list: NAME = inputs."
        )
    return found


def _in_folder(folder: Path) -> list[SceneInputs]:
    scenes: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            tile = _TILE.search(path.name) if is_safe(path) else None
            scenes.setdefault(path.name if tile is None else f"T{tile[1]}", []).append(os.path.abspath(path))
    return [SceneInputs(name, tuple(inputs)) for name, inputs in scenes.items()]


def _in_list(path: Path) -> list[SceneInputs]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}. Expected a text file with one scene a line.") from error
    found: list[tuple[str | None, tuple[str, ...]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line, posix=os.name == "posix")
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}. Expected paths with quotes as in a shell.") from error
        name = words[0] if words[1:2] == ["="] else None
        inputs = words if name is None else words[2:]
        if not inputs:
            raise DataError(f"{path}, line {number}: no input after {name} =; expected files, folders or addresses.")
        found.append((name, tuple(one if VIRTUAL.match(one) else os.path.abspath(one) for one in inputs)))
    names = Counter(_default_name(places[0], 1) for name, places in found if name is None)
    parts = {name: 2 if count > 1 else 1 for name, count in names.items()}
    return [
        SceneInputs(name or _default_name(places[0], parts[_default_name(places[0], 1)]), places)
        for name, places in found
    ]


def _default_name(place: str, parts: int) -> str:
    """Return the last parts of a path: 2022, or a_2022 where a/2022.tif and b/2022.tif are two scenes."""
    *above, last = place.rstrip("/").replace("\\", "/").split("/")[-parts:]
    return "_".join([*above, last if os.path.isdir(place) else last.rpartition(".")[0] or last])


def _in_catalogue(path: Path) -> list[SceneInputs]:
    scenes: dict[str, list[dict[str, Any]]] = {}
    for item, base in load_items(path):
        scenes.setdefault(_place(item), []).append(_as_json(item, base))
    return [SceneInputs(name, items={"type": "FeatureCollection", "features": items}) for name, items in scenes.items()]


def _place(item: pystac.Item) -> str:
    """Return the name of the place of an item."""
    facts = item.properties
    if tile := facts.get("grid:code") or facts.get("s2:mgrs_tile"):
        return str(tile).removeprefix("MGRS-")
    if "landsat:wrs_path" in facts and "landsat:wrs_row" in facts:
        return f"{facts['landsat:wrs_path']}_{facts['landsat:wrs_row']}"
    parent, root = item.get_parent(), item.get_root()
    if parent is not None and parent is not root:
        return str(parent.id)
    west, south, east, north = (item.bbox or [0.0] * 4)[:4]
    return f"{west:.3f}_{south:.3f}_{east:.3f}_{north:.3f}"


def _as_json(item: pystac.Item, base: str) -> dict[str, Any]:
    """Return an item without links, with absolute references."""
    content: dict[str, Any] = item.to_dict(include_self_link=False, transform_hrefs=False)
    content["links"] = []
    for asset in content["assets"].values():
        href = absolute(asset["href"], base)
        asset["href"] = href if VIRTUAL.match(href) else quote(href)
    return content
