"""STAC on disk: items, item collections, catalogues with links and folders of them -> (item, where it is) pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sader.errors import DataError

Located = tuple[Mapping[str, Any], str]
"""An item as parsed JSON, and its file or address, to which its references are relative."""


def is_stac(path: Path | str) -> bool:
    """Whether a path is a JSON file that holds a STAC item, item collection or catalogue."""
    path = Path(path)
    if path.suffix.lower() not in (".json", ".geojson") or not path.is_file():
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and ("stac_version" in content or content.get("type") == "FeatureCollection")


def load_items(items: Any) -> list[Located]:
    """Return (item, its file or address) of whatever was given."""
    if isinstance(items, Mapping):
        return _from_json(items, str(self_href(items) or "."), 0)
    if not isinstance(items, (str, Path)):
        return [pair for item in items for pair in load_items(_as_json(item))]
    path = Path(items)
    if path.is_dir():
        roots = [path / name for name in ("catalog.json", "collection.json") if (path / name).is_file()]
        files = roots[:1] or items_in(path)
        if not files:
            raise DataError(f"{path} holds no STAC item; expected .json files with a stac_version.")
        return [pair for file in files for pair in load_items(file)]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}. Expected the JSON of a STAC item or item collection.") from error
    return _from_json(content, str(path.resolve()), 0)


def items_in(folder: Path) -> list[Path]:
    """Return the STAC files in a folder and below, by name; without what `sader remove` wrote: a result is no date."""
    files = sorted(file for kind in ("json", "geojson") for file in folder.rglob(f"*.{kind}") if is_stac(file))
    return [file for file in files if not _is_result(json.loads(file.read_text(encoding="utf-8")))]


def _is_result(content: Mapping[str, Any]) -> bool:
    return "sader" in ((content.get("properties") or {}).get("processing:software") or {})


def _as_json(item: Any) -> Any:
    return item.to_dict() if hasattr(item, "to_dict") else item  # a pystac.Item


def _from_json(content: Any, base: str, depth: int) -> list[Located]:
    kind = content.get("type") if isinstance(content, Mapping) else None
    if kind == "FeatureCollection":
        features = content.get("features") or []
        # Items of a search keep the address they came from; those written to disk are relative to the file.
        return [(item, _item_base(item, base)) for item in features]
    if kind == "Feature" and "assets" in content:
        return [(content, base)]
    if kind in ("Catalog", "Collection") and depth < 8 and "://" not in base:
        links = [link for link in content.get("links") or [] if link.get("rel") in ("item", "child")]
        found = []
        for link in links:
            path = (Path(base).parent / str(link.get("href"))).resolve()
            found += _from_json(_read_linked(path, base), str(path), depth + 1)
        return found
    what = f"a {kind}" if kind else f"a {type(content).__name__} without a type"
    raise DataError(f"{base} holds {what}; expected a STAC item (Feature with assets) or a FeatureCollection of them.")


def _read_linked(path: Path, base: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{base} links to {path}, which cannot be read: {error}.") from error


def _item_base(item: Mapping[str, Any], base: str) -> str:
    hrefs = [str(asset.get("href", "")) for asset in (item.get("assets") or {}).values()]
    relative = any("://" not in href for href in hrefs)
    on_disk = relative and "://" not in base and base != "."
    return base if on_disk else str(self_href(item) or base)


def self_href(item: Mapping[str, Any]) -> str | None:
    """Return the address an item says it has."""
    return next((str(link["href"]) for link in item.get("links") or [] if link.get("rel") == "self"), None)
