"""Look at inputs before they are used, by their headers only: kind, size, place. Runs in a child process.

Nothing is decoded here: a file of a few kilobytes may say that it is a million pixels wide, and must be refused then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sader.errors import DataError, require
from sader.viewer.problems import ForbiddenError, TooLargeError
from sader.viewer.security.folder import DataFolder
from sader.viewer.security.sandbox import check_domains, check_place, check_size, driver_of, remote_host, wrong_kind
from sader.viewer.settings import Limits

RASTERS = (".tif", ".tiff", ".jp2")
INDIRECT = (".vrt", ".img", ".zarr", ".nc", ".h5", ".gpkg", ".zip")
JSONS = (".json", ".geojson")
MOST_JSON = 16 * 2**20
MOST_ITEMS = 500


def inspect_inputs(inputs: Sequence[Path], folder: DataFolder, limits: Limits, allow_remote: Sequence[str]) -> None:
    """Refuse inputs that the service must not open: wrong kind, too large, elsewhere."""
    rasters: dict[str, None] = {}
    for path in inputs:
        for raster in _rasters_of(path, folder, allow_remote):
            rasters[raster] = None
    for raster in rasters:
        check_place(raster, folder, allow_remote)
        if remote_host(raster) is None:
            check_raster(Path(raster), limits)


def _rasters_of(path: Path, folder: DataFolder, allow_remote: Sequence[str]) -> Iterator[str]:
    if path.is_dir():
        # The reader takes what lies directly in a folder, and products in it as a whole; all of it stays inside.
        for file in folder.files_below(path):
            kind = file.suffix.lower()
            direct = file.parent == path
            if kind in RASTERS:
                yield str(file)
            elif kind in JSONS and direct:
                yield from _rasters_of_json(file, folder, allow_remote)
            elif kind in INDIRECT and direct:
                raise ForbiddenError(wrong_kind(file.name))
        return
    kind = path.suffix.lower()
    if kind in JSONS:
        yield from _rasters_of_json(path, folder, allow_remote)
    elif kind in RASTERS:
        yield str(path)
    else:
        raise ForbiddenError(wrong_kind(path.name))


def _rasters_of_json(path: Path, folder: DataFolder, allow_remote: Sequence[str]) -> Iterator[str]:
    """Yield what the assets of STAC items mean. Catalogues are refused: their links may lead anywhere."""
    from sader.geo.stac.assets import bands_of, classification_of
    from sader.geo.stac.items import load_items

    if path.stat().st_size > MOST_JSON:
        raise TooLargeError(f"{path.name} has {path.stat().st_size} bytes; a STAC item has at most {MOST_JSON}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path.name} is no JSON: {str(error)[:200]}. Expected a STAC item.") from error
    kind = content.get("type") if isinstance(content, dict) else None
    if kind not in ("Feature", "FeatureCollection"):
        raise ForbiddenError(
            f"{path.name} holds {f'a {kind}' if kind else 'no STAC item'}; the service takes a STAC item (Feature) or "
            "a FeatureCollection of them, and follows no links of catalogues."
        )
    for one in content.get("features") or [] if kind == "FeatureCollection" else [content]:
        _check_item(one, path.name)
    items = load_items(path)
    if len(items) > MOST_ITEMS:
        raise TooLargeError(f"{path.name} holds {len(items)} items; the service takes at most {MOST_ITEMS}.")
    for item, base in items:
        try:
            entries = [*bands_of(item, base).values()]
            classes = classification_of(item, base)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise DataError(f"{path.name} holds no plain STAC item: {type(error).__name__} in its assets.") from error
        for entry in [*entries, *([classes] if classes else [])]:
            check_place(entry.path, folder, allow_remote)
            if remote_host(entry.path) is None and Path(entry.path).suffix.lower() not in RASTERS:
                raise ForbiddenError(wrong_kind(Path(entry.path).name))
            yield entry.path


def _check_item(item: Any, name: str) -> None:
    """Refuse what is no item in its plain shape: readers of items take that for granted."""
    wanted = {"assets": dict, "properties": dict, "links": list}
    for key, kind in wanted.items():
        value = item.get(key) if isinstance(item, dict) else None
        if not isinstance(item, dict) or not (value is None or isinstance(value, kind)):
            raise DataError(f"{name} holds no STAC item: {key} must be a {kind.__name__} of one.")
    entries = [*(item.get("assets") or {}).values(), *(item.get("links") or [])]
    if not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{name} holds no STAC item: its assets and links must be objects.")
    from sader.geo.stac.assets import CRS_CODE

    # GDAL takes a reference system's name for an address or a file where it can be one, and goes there.
    for place in ((item.get("properties") or {}), *(item.get("assets") or {}).values()):
        code, number = place.get("proj:code"), place.get("proj:epsg")
        if not (code is None or (isinstance(code, str) and CRS_CODE.fullmatch(code))):
            raise ForbiddenError(f"{name} has proj:code {str(code)[:80]!r}; expected a code such as EPSG:32632.")
        if not (number is None or (isinstance(number, int) and 0 < number < 10**7)):
            raise ForbiddenError(f"{name} has proj:epsg {str(number)[:80]!r}; expected a number such as 32632.")


def check_raster(path: Path, limits: Limits) -> None:
    """Refuse a file that is no TIFF or JPEG 2000, or whose header says it is too large."""
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    driver = driver_of(str(path))
    import warnings

    from sader.geo.read.raster import reading

    with reading(path.name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about images without a place
        with rasterio.open(path, driver=driver) as dataset:
            check_domains(dataset)
            check_size(dataset, limits)
