"""STAC items of files, folders, catalogues and parsed JSON, as `pystac.Item` objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sader.errors import DataError, require

if TYPE_CHECKING:
    import pystac

Located = tuple["pystac.Item", str]
"""An item, and the file or URL to which its relative references refer."""
SUFFIXES = (".json", ".geojson")
CATALOGS = ("catalog.json", "collection.json")


def is_stac(path: Path | str) -> bool:
    """Whether a path is a JSON file that holds a STAC item, item collection or catalogue."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return False
    try:
        content = read_json(path)
    except DataError:
        return False
    return isinstance(content, dict) and ("stac_version" in content or content.get("type") == "FeatureCollection")


def load_items(items: Any) -> list[Located]:
    """Return the items of a file, a folder, parsed JSON, `pystac.Item` objects, or several of these."""
    if isinstance(items, Mapping):
        return _from_json(items, "")
    if not isinstance(items, (str, Path)):
        item_class = require("pystac", extra="geo", purpose="reading STAC items").Item
        if isinstance(items, item_class):
            return [(items, items.get_self_href() or "")]
        return [located for one in items for located in load_items(one)]
    path = Path(items)
    if path.is_dir():
        files = [path / name for name in CATALOGS if (path / name).is_file()][:1] or items_in(path)
        if not files:
            raise DataError(f"{path} holds no STAC item; expected .json files with a stac_version.")
        return [located for file in files for located in load_items(file)]
    return _from_json(read_json(path), str(path.resolve()))


def items_in(folder: Path) -> list[Path]:
    """Return the STAC files in a folder and below, by name, without the items that `sader remove` wrote."""
    files = sorted(file for suffix in SUFFIXES for file in folder.rglob(f"*{suffix}") if is_stac(file))
    return [file for file in files if not _is_result(read_json(file))]


def _is_result(content: Mapping[str, Any]) -> bool:
    return "sader" in ((content.get("properties") or {}).get("processing:software") or {})


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise DataError(f"cannot read {path}: it is nested too deeply. Expected the JSON of a STAC item.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}. Expected the JSON of a STAC item or item collection.") from error


def _from_json(content: Any, path: str) -> list[Located]:
    pystac = require("pystac", extra="geo", purpose="reading STAC items")
    kind = content.get("type") if isinstance(content, Mapping) else None
    shown = path or "the STAC item"
    try:
        if kind == "FeatureCollection":
            return [_located(one, path) for one in content.get("features") or []]
        if kind == "Feature" and "assets" in content:
            item, base = _located(content, path)
            return [(item, path or base)]
        if kind in ("Catalog", "Collection") and path:
            catalog = pystac.read_file(path)
            return [(item, item.get_self_href()) for item in catalog.get_items(recursive=True)]
    except Exception as error:  # pystac raises KeyError, TypeError and others for documents that are not STAC
        text = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise DataError(f"{shown} is not valid STAC: {text[:300]}. Expected STAC 1.0 or 1.1.") from error
    what = f"a {kind}" if kind else f"a {type(content).__name__} without a type"
    raise DataError(f"{shown} holds {what}; expected a STAC item (Feature with assets) or a FeatureCollection of them.")


def _located(content: Mapping[str, Any], path: str) -> Located:
    """Return an item; its references are relative to the file that holds it, or else to its own URL."""
    pystac = require("pystac", extra="geo", purpose="reading STAC items")
    item = pystac.Item.from_dict({"stac_version": "1.0.0", **content})
    relative = any("://" not in str(asset.href) for asset in item.assets.values())
    base = path if path and relative else item.get_self_href() or path
    return item, base
