"""STAC items of files, folders, catalogues and parsed JSON, and the bands of an item.

STAC 1.0 (`eo:bands`, `raster:bands`, `proj:epsg`) and 1.1 (`bands`, `raster:offset`, `proj:code`) are supported, and
the asset names of Earth Search, the Planetary Computer and the Copernicus Data Space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urljoin, urlparse

from sader.bands import canonical
from sader.errors import DataError, require
from sader.files import files_under
from sader.geo.grid import Affine6, Grid

if TYPE_CHECKING:
    import pystac

Located = tuple["pystac.Item", str]
"""An item, and the file or URL to which its relative references refer."""
SUFFIXES = (".json", ".geojson")
CATALOGS = ("catalog.json", "collection.json")
PICTURES = ("visual", "tci", "overview", "preview", "thumbnail", "rendered_preview", "true_color")
"""Keys of assets that are rendered images."""
PICTURE_ROLES = {"thumbnail", "overview", "visual", "metadata"}
RASTER_TYPES = ("image/tiff", "image/vnd.stac.geotiff", "image/jp2", "application/x-geotiff")
RASTER_SUFFIXES = (".tif", ".tiff", ".jp2", ".vrt")
CRS_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_]{1,15}:[A-Za-z0-9]{1,15}")
"""A reference system by its code. GDAL opens other names as a file or an address where it can."""
VIRTUAL = re.compile(r"/vsi[a-z0-9_]+[/?]|[a-z][a-z0-9+.-]+://", re.IGNORECASE)
"""What GDAL opens without a file of that name: /vsizip/all.zip/a.tif, https://host/a.tif, s3://bucket/a.tif."""
_SIZE = re.compile(r"[_-](\d{1,3})m\b", re.IGNORECASE)


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
    files = sorted(file for file in files_under(folder) if is_stac(file))
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


# ---------------------------------------------------------------- bands of an item


@dataclass(frozen=True)
class AssetBand:
    """One band of one asset."""

    band: str
    path: str
    """Path for GDAL."""
    index: int
    meters: float
    """Pixel size, infinite where it is not stated."""
    scale: float | None
    offset: float | None
    nodata: float | None
    dtype: str | None
    grid: Grid | None
    """Where the item states it."""

    @property
    def rank(self) -> tuple[float, bool, bool]:
        """Lower is preferred: fine before coarse, GeoTIFF before JPEG 2000, public files before those of an account."""
        return self.meters, self.path.lower().endswith(".jp2"), self.path.startswith(("/vsis3", "/vsigs"))


def bands_of(item: pystac.Item, base: str) -> dict[str, AssetBand]:
    """Return band -> the preferred asset that holds it. base: file or URL to which references are relative."""
    best: dict[str, AssetBand] = {}
    for key, asset in item.assets.items():
        bare = re.sub(r"[_-](?:\d+m|jp2)$", "", key.lower())
        roles = {str(role).lower() for role in asset.roles or ()}
        if roles & PICTURE_ROLES or bare in PICTURES or is_classification(key) or not _is_raster(asset):
            continue
        for entry in _bands_in(item, key, asset, base):
            if entry.band not in best or entry.rank < best[entry.band].rank:
                best[entry.band] = entry
    return best


def classification_of(item: pystac.Item, base: str) -> AssetBand | None:
    """Return the finest scene classification (SCL) of an item."""
    found = [
        _entry(item, key, asset, base, band="SCL", index=1, coding={})
        for key, asset in item.assets.items()
        if is_classification(key) and _is_raster(asset)
    ]
    return min(found, key=lambda entry: entry.rank, default=None)


def is_classification(key: str) -> bool:
    """Whether an asset's key names the classes of Sen2Cor: scl, SCL, SCL_20m, scl-jp2."""
    return bool(re.match(r"scl(?:[_-]|$)", key, re.IGNORECASE))


def absolute(href: str, base: str) -> str:
    """Return the URL or local path of a reference, relative to the item's file or URL."""
    if urlparse(href).scheme and not re.match(r"[A-Za-z]:[\\/]", href):
        return href
    return urljoin(base, href) if "://" in base else str((Path(base).parent / unquote(href)).resolve())


def locate(href: str, base: str) -> str:
    """Return the path for GDAL of a reference, relative to the item's file or URL."""
    href = absolute(href, base)
    scheme, _, rest = href.partition("://")
    if href.startswith("file:"):
        return unquote(urlparse(href).path)
    if scheme in ("http", "https"):
        # Options in the path reach every process that opens it: no listing of remote folders, and retries.
        return f"/vsicurl?empty_dir=yes&list_dir=no&max_retry=4&retry_delay=1&url={quote(href, safe='')}"
    folders = {"s3": "/vsis3/", "gs": "/vsigs/", "az": "/vsiaz/"}
    return folders[scheme] + rest if scheme in folders else href


def _is_raster(asset: pystac.Asset) -> bool:
    kind = str(asset.media_type or "").lower()
    return kind.startswith(RASTER_TYPES) if kind else urlparse(asset.href).path.lower().endswith(RASTER_SUFFIXES)


def _bands_in(item: pystac.Item, key: str, asset: pystac.Asset, base: str) -> Iterator[AssetBand]:
    # Band numbers of other satellites name other bands: B05 of Landsat is near infrared.
    satellites = [str(item.properties.get(name) or "").lower() for name in ("platform", "constellation")]
    numbered = not any(satellites) or any("sentinel-2" in name or name.startswith("s2") for name in satellites)
    named = asset.extra_fields.get("bands") or asset.extra_fields.get("eo:bands") or []
    rasters = asset.extra_fields.get("raster:bands") or []
    count = max(len(named), len(rasters), 1)
    for at in range(count):
        words, raster = _at(named, at), _at(rasters, at)
        common = [words.get("eo:common_name"), words.get("common_name")]
        # The key of an asset with a single band names that band: "B02", "blue", "B02_10m".
        own = [words.get("name"), *([key] if count == 1 else [])]
        if numbered:
            names = [own[0], *common, *own[1:]]
        else:
            names = [name for name in (*common, *own) if not re.search(r"\bB?0?\d", str(name or ""), re.IGNORECASE)]
        band = next((known for name in names if name and (known := canonical(str(name)))), None)
        if band is not None:
            yield _entry(item, key, asset, base, band=band, index=at + 1, coding={**words, **raster})


def _at(entries: Sequence[Any], at: int) -> Mapping[str, Any]:
    return entries[at] if at < len(entries) and isinstance(entries[at], Mapping) else {}


def _entry(
    item: pystac.Item, key: str, asset: pystac.Asset, base: str, *, band: str, index: int, coding: Mapping[str, Any]
) -> AssetBand:
    def stated(*names: str) -> Any:
        """The first of the names in the band, else in the asset: in STAC 1.1 bands inherit."""
        values = (place.get(name) for place in (coding, asset.extra_fields) for name in names)
        return next((value for value in values if value is not None), None)

    grid = _grid(item, asset)
    size = stated("raster:spatial_resolution", "spatial_resolution", "gsd")
    if size is None and (written := _SIZE.search(key)):
        size = written[1]
    if size is None and grid is not None:
        size = min(grid.resolution)
    return AssetBand(
        band=band,
        path=locate(asset.href, base),
        index=index,
        meters=_number(size) or float("inf"),
        scale=_number(stated("raster:scale", "scale")),
        offset=_number(stated("raster:offset", "offset")),
        nodata=_number(stated("nodata", "raster:nodata")),
        dtype=stated("data_type", "raster:data_type"),
        grid=grid,
    )


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _grid(item: pystac.Item, asset: pystac.Asset) -> Grid | None:
    """Return the grid of an asset where the projection extension states all of it for this asset."""

    def stated(name: str) -> Any:
        return asset.extra_fields.get(name) or item.properties.get(name)

    crs = str(stated("proj:code") or (f"EPSG:{int(stated('proj:epsg'))}" if stated("proj:epsg") else ""))
    # Transform and shape of the item's properties may be those of another asset.
    transform, shape = asset.extra_fields.get("proj:transform"), asset.extra_fields.get("proj:shape")
    if not CRS_CODE.fullmatch(crs) or not transform or not shape or len(transform) < 6 or len(shape) != 2:
        return None  # the grid is read from the file
    a, b, c, d, e, f = (float(value) for value in transform[:6])
    affine: Affine6 = (a, b, c, d, e, f)
    return Grid(crs, affine, int(shape[1]), int(shape[0]))
