"""What a STAC item says about its assets: which band is in which file, on which grid, stored how; no input or output.

STAC 1.0 (`eo:bands`, `raster:bands`, `proj:epsg`) and 1.1 (`bands`, `raster:offset`, `proj:code`) are both understood,
and the ways of Earth Search, the Planetary Computer and the Copernicus Data Space to name things.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlparse

from sader.bandnames import canonical
from sader.geo.stack import Affine6, Grid

PICTURES = ("visual", "tci", "overview", "preview", "thumbnail", "rendered_preview", "true_color")
"""Assets that show bands and do not measure them."""
RASTER_TYPES = ("image/tiff", "image/vnd.stac.geotiff", "image/jp2", "application/x-geotiff")
RASTER_SUFFIXES = (".tif", ".tiff", ".jp2", ".vrt")
CRS_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_]{1,15}:[A-Za-z0-9]{1,15}")
"""A reference system by its code; GDAL takes other names for an address or a file where it can, and goes there."""
_SIZE = re.compile(r"[_-](\d{1,3})m\b", re.IGNORECASE)


@dataclass(frozen=True)
class AssetBand:
    """One band of one asset."""

    band: str
    path: str
    """What GDAL opens."""
    index: int
    meters: float
    """Pixel size, infinite where nobody says."""
    scale: float | None
    offset: float | None
    nodata: float | None
    dtype: str | None
    grid: Grid | None
    """Where the item says it."""

    @property
    def rank(self) -> tuple[float, bool, bool]:
        """Less is better: fine before coarse, GeoTIFF before JPEG 2000, what is near before what needs an account."""
        return self.meters, self.path.lower().endswith(".jp2"), self.path.startswith(("/vsis3", "/vsigs"))


def bands_of(item: Mapping[str, Any], base: str) -> dict[str, AssetBand]:
    """Return band -> the best asset that holds it. base: the item's own file or address, for relative references."""
    best: dict[str, AssetBand] = {}
    for key, asset in _assets(item).items():
        if _is_picture(key, asset) or not _is_raster(asset) or is_classification(key):
            continue
        for entry in _bands_in(item, key, asset, base):
            if entry.band not in best or entry.rank < best[entry.band].rank:
                best[entry.band] = entry
    return best


def classification_of(item: Mapping[str, Any], base: str) -> AssetBand | None:
    """Return the scene classification (SCL) of an item, the finest one."""
    found = [
        _entry(item, asset, "SCL", 1, {}, base, key)
        for key, asset in _assets(item).items()
        if is_classification(key) and _is_raster(asset)
    ]
    return min(found, key=lambda entry: entry.rank, default=None)


def is_classification(key: str) -> bool:
    """Whether an asset's key means Sen2Cor's classes: scl, SCL, SCL_20m, scl-jp2."""
    return bool(re.match(r"scl(?:[_-]|$)", key, re.IGNORECASE))


def locate(href: str, base: str) -> str:
    """Return what GDAL opens for a reference, relative to the item's file or address."""
    if not urlparse(href).scheme or re.match(r"[A-Za-z]:[\\/]", href):
        if "://" in base:
            href = urljoin(base, href)
        else:
            return str((Path(base).parent / unquote(href)).resolve())
    scheme, _, rest = href.partition("://")
    if href.startswith("file:"):
        return unquote(urlparse(href).path)
    if scheme in ("http", "https"):
        # As part of the name, so that every process that gets the source reads it the same way: no listing of
        # folders, which takes seconds, and another try when the server is busy.
        return f"/vsicurl?empty_dir=yes&list_dir=no&max_retry=4&retry_delay=1&url={quote(href, safe='')}"
    folders = {"s3": "/vsis3/", "gs": "/vsigs/", "az": "/vsiaz/"}
    return folders[scheme] + rest if scheme in folders else href


def is_remote(path: str) -> bool:
    """Whether a path of `locate` needs the network."""
    return path.startswith(("/vsicurl", "/vsis3", "/vsigs", "/vsiaz"))


def _assets(item: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    assets = item.get("assets")
    if not isinstance(assets, Mapping):
        return {}
    return {str(key): asset for key, asset in assets.items() if isinstance(asset, Mapping) and asset.get("href")}


def _is_picture(key: str, asset: Mapping[str, Any]) -> bool:
    roles = {str(role).lower() for role in asset.get("roles") or ()}
    bare = re.sub(r"[_-](?:\d+m|jp2)$", "", key.lower())
    return bool(roles & {"thumbnail", "overview", "visual", "metadata"}) or bare in PICTURES


def _is_raster(asset: Mapping[str, Any]) -> bool:
    kind = str(asset.get("type") or "").lower()
    if kind:
        return kind.startswith(RASTER_TYPES)
    return urlparse(str(asset["href"])).path.lower().endswith(RASTER_SUFFIXES)


def _bands_in(item: Mapping[str, Any], key: str, asset: Mapping[str, Any], base: str) -> list[AssetBand]:
    numbered = _is_sentinel2(item)
    named = asset.get("bands") or asset.get("eo:bands") or []
    rasters = asset.get("raster:bands") or []
    count = max(len(named), len(rasters), 1)
    found = []
    for at in range(count):
        words = named[at] if at < len(named) and isinstance(named[at], Mapping) else {}
        common = [words.get("eo:common_name"), words.get("common_name")]
        # The key speaks for the band where the asset holds just one: "B02", "blue", "B02_10m".
        own = [words.get("name"), *([key] if count == 1 else [])]
        # B05 of Landsat is no B05 of Sentinel-2: the numbers of other sensors mean nothing here.
        names = [own[0], *common, *own[1:]] if numbered else [name for name in (*common, *own) if not _has_number(name)]
        band = next((known for name in names if name and (known := canonical(str(name)))), None)
        if band is None:
            continue
        coding = {**words, **(rasters[at] if at < len(rasters) and isinstance(rasters[at], Mapping) else {})}
        found.append(_entry(item, asset, band, at + 1, coding, base, key))
    return found


def _is_sentinel2(item: Mapping[str, Any]) -> bool:
    """Whether band numbers are those of Sentinel-2: the item says so, or names no other satellite."""
    properties = item.get("properties") or {}
    told = [properties.get("platform"), properties.get("constellation")]
    words = [str(word).lower() for word in told if word]
    return not words or any("sentinel-2" in word or word.startswith("s2") for word in words)


def _has_number(name: Any) -> bool:
    return bool(re.search(r"\bB?0?\d", str(name or ""), re.IGNORECASE))


def _entry(
    item: Mapping[str, Any],
    asset: Mapping[str, Any],
    band: str,
    index: int,
    coding: Mapping[str, Any],
    base: str,
    key: str,
) -> AssetBand:
    def say(*names: str) -> Any:
        """The first of the names found in the band, else in the asset: 1.1 lets bands inherit."""
        for place in (coding, asset):
            for name in names:
                if place.get(name) is not None:
                    return place[name]
        return None

    grid = _grid(item, asset)
    size = say("raster:spatial_resolution", "spatial_resolution", "gsd")
    written = _SIZE.search(key)
    if size is None and written:
        size = float(written[1])
    if size is None and grid is not None:
        size = min(grid.resolution)
    return AssetBand(
        band=band,
        path=locate(str(asset["href"]), base),
        index=index,
        meters=_number(size) or float("inf"),
        scale=_number(say("raster:scale", "scale")),
        offset=_number(say("raster:offset", "offset")),
        nodata=_number(say("nodata", "raster:nodata")),
        dtype=say("data_type", "raster:data_type"),
        grid=grid,
    )


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _grid(item: Mapping[str, Any], asset: Mapping[str, Any]) -> Grid | None:
    """Return the grid that the projection extension describes, if it does so fully for this asset."""
    properties = item.get("properties") or {}
    code = asset.get("proj:code") or properties.get("proj:code")
    epsg = asset.get("proj:epsg") or properties.get("proj:epsg")
    crs = str(code) if code else f"EPSG:{int(epsg)}" if epsg else ""
    if not CRS_CODE.fullmatch(crs):
        return None  # the file itself says where it lies
    # The transform and shape of the properties may be those of another asset: only the asset's own are sure.
    transform, shape = asset.get("proj:transform"), asset.get("proj:shape")
    if not transform or not shape or len(transform) < 6 or len(shape) != 2:
        return None
    a, b, c, d, e, f = (float(value) for value in transform[:6])
    affine: Affine6 = (a, b, c, d, e, f)
    return Grid(crs, affine, int(shape[1]), int(shape[0]))
