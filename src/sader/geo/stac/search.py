"""STAC in: items and item collections on disk, or a search on a STAC API, as dates on one grid. STAC out: `write_item`.

Each item becomes a `ProductSource` that reads windows of its files directly; neighbouring tiles of one overpass become
one date. Only the search needs pystac-client; `load_xarray` goes through odc-stac.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sader.bands import BANDS_13
from sader.errors import BandError, DataError, require
from sader.geo.grid import crop_grid, parse_bbox, parse_dates, union_grid
from sader.geo.offset import Radiometry, decide_stac, parse_baseline
from sader.geo.read.products import MosaicSource, ProductSource, product_source
from sader.geo.read.raster import BandFile
from sader.geo.stac.assets import AssetBand, bands_of, classification_of
from sader.geo.stac.items import is_stac, load_items, self_href
from sader.geo.stac.write import write_item
from sader.geo.stack import DateSource, ValueCoding

__all__ = ["crop_grid", "is_stac", "load_xarray", "open_items", "search", "search_items", "write_item"]

Notice = Callable[[str], None]
COLLECTION = "sentinel-2-l2a"
"""What is searched unless the user names another; Earth Search, Planetary Computer and Copernicus all have it."""
MOST_DATES = 10
SAME_TIME = timedelta(minutes=2)
"""Two versions of one tile may differ by seconds in the time they give."""
OVERPASS = timedelta(minutes=10)
"""Tiles of one satellite within this time were taken together."""


def open_items(
    items: str | Path | Mapping[str, Any] | Iterable[str | Path | Mapping[str, Any]],
    *,
    offset: str | float | None = "auto",
    bands: Sequence[str] | None = None,
    bbox: Sequence[float] | None = None,
    notice: Notice | None = None,
) -> list[DateSource]:
    """Return one source for each date in STAC items, sorted by date.

    items: a JSON file (item, item collection, or catalogue with links), a folder of such files, parsed JSON, or several
    of these.
    offset: auto, none or counts such as -1000. bands: those wanted; all that the item has by default.
    bbox: (west, south, east, north) in degrees, to which the grid is cut. notice: told what the user should know.
    """
    said = notice or _warn
    found = [_open_item(item, base, offset, bands, said) for item, base in load_items(items)]
    if not found:
        raise DataError("no STAC item given; expected at least one.")
    newest = _newest(found, said)
    return _by_overpass(newest, None if bbox is None else parse_bbox(bbox))


def search(
    url: str,
    bbox: str | Sequence[float],
    dates: str | Sequence[str | datetime],
    *,
    collection: str | None = None,
    bands: Sequence[str] | None = None,
    offset: str | float | None = "auto",
    max_cloud: float | None = None,
    most_dates: int | None = MOST_DATES,
    notice: Notice | None = None,
) -> list[DateSource]:
    """Return the dates that a STAC API has of a place, each on the grid of the bbox, sorted by date.

    url: of the API, such as https://earth-search.aws.element84.com/v1. bbox: west, south, east, north in degrees.
    dates: "2022-03-01/2022-05-31" or the two days. max_cloud: percent of the tile, as the item says.
    most_dates: where there are more, the clearest are taken.
    """
    said = notice or _warn
    area = parse_bbox(bbox)
    items = search_items(url, area, dates, collection=collection, max_cloud=max_cloud)
    dated = open_items(items, offset=offset, bands=bands, bbox=area, notice=said)
    if most_dates is not None and len(dated) > most_dates:
        cover = {str(item.get("id")): _cloud_cover(item) for item in items}
        clearest = sorted(dated, key=lambda source: _worst_cover(source, cover))[:most_dates]
        said(f"{len(dated)} dates found; the {most_dates} clearest are taken.")
        dated = [source for source in dated if source in clearest]
    return dated


def search_items(
    url: str,
    bbox: str | Sequence[float],
    dates: str | Sequence[str | datetime],
    *,
    collection: str | None = None,
    max_cloud: float | None = None,
) -> list[dict[str, Any]]:
    """Return the items (parsed JSON) that a STAC API has of a place and time."""
    client_package = require("pystac_client", extra="stac", purpose="searching a STAC API")
    area, period = parse_bbox(bbox), parse_dates(dates)
    modifier = None
    if "planetarycomputer.microsoft.com" in url:
        # Its files are read with short-lived signatures, which this package adds.
        package = require("planetary_computer", extra="stac", purpose="reading from the Planetary Computer")
        modifier = package.sign_inplace
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the API does not claim to do
            client = client_package.Client.open(url, modifier=modifier)
            name = collection or COLLECTION
            query = client.search(collections=[name], bbox=list(area), datetime=period, limit=100)
            items = [dict(item) for item in query.items_as_dicts()]
    except Exception as error:  # pystac-client lets those of requests, urllib3 and json through
        reason = str(error).strip().rstrip(".")[:300] or type(error).__name__
        raise DataError(
            f"the search on {url} failed: {reason}. Expected a STAC API such as "
            "https://earth-search.aws.element84.com/v1; check the address, the collection and the network."
        ) from error
    kept = [item for item in items if max_cloud is None or (_cloud_cover(item) or 0.0) <= max_cloud]
    if not kept:
        less = f" with at most {max_cloud:g} % cloud ({len(items)} have more)" if items else ""
        raise DataError(
            f"{url} has no item of {name} in {', '.join(f'{value:g}' for value in area)} during {period}{less}. Widen "
            "the area or the dates, or name another collection."
        )
    return kept


def load_xarray(
    items: Sequence[Mapping[str, Any]],
    *,
    bands: Sequence[str],
    bbox: str | Sequence[float] | None = None,
    offset: str | float | None = "auto",
    chunks: Mapping[str, int] | None = None,
) -> Any:
    """Return an `xarray.DataArray` (time, band, y, x) of stored counts, lazy where `chunks` is given, through odc-stac.

    For dask clusters and Zarr (`sader.geo.xarray.lazy.clear`). scale_factor, add_offset and _FillValue are in its
    attributes, so all items must agree on them; where they do not, use `open_items`, which decodes each by itself. The
    grid is the finest one of the first item, cut to `bbox`.
    """
    odc = require("odc.stac", extra="stac", purpose="loading STAC items into xarray")
    pystac = require("pystac", extra="stac", purpose="loading STAC items into xarray")
    tables = [bands_of(item, str(self_href(item) or ".")) for item in items]
    # The first item's pixels, as everywhere in `sader`; odc-stac alone would need the projection extension.
    _, first = _open_item(items[0], str(self_href(items[0]) or "."), offset, bands, _warn)
    for item, table in zip(items, tables, strict=True):
        _check_bands(str(item.get("id")), table, bands)
    ways = {
        (way.scale, way.offset)
        for item, table in zip(items, tables, strict=True)
        for way in (_radiometry(item, table[band], offset) for band in bands)
    }
    if len(ways) != 1:
        raise DataError(
            f"the items store reflectance in {len(ways)} ways (scale, offset): {sorted(ways)}; expected one. Use "
            "open_items, which decodes each item by itself."
        )
    scale, add = ways.pop()
    area = crop_grid(first.grid, parse_bbox(bbox)) if bbox is not None else first.grid
    box = require("odc.geo.geobox", extra="stac", purpose="loading STAC items into xarray").GeoBox
    affine = require("rasterio", extra="geo", purpose="loading STAC items into xarray").Affine
    keys = [_asset_key(items[0], tables[0][band]) for band in bands]
    cube = odc.load(
        [pystac.Item.from_dict(dict(item)) for item in items],
        bands=keys,
        geobox=box(area.shape, affine(*area.transform), area.crs),
        chunks=None if chunks is None else dict(chunks),
        groupby="solar_day",
        nodata=0,
    )
    array = cube.to_dataarray(dim="band").transpose("time", "band", ...).assign_coords(band=list(bands))
    array.attrs.update(scale_factor=scale, add_offset=add, _FillValue=0)
    array.name = "counts"
    return array


def _open_item(
    item: Mapping[str, Any], base: str, offset: str | float | None, bands: Sequence[str] | None, said: Notice
) -> tuple[Mapping[str, Any], ProductSource]:
    name = str(item.get("id") or Path(base).stem)
    table = bands_of(item, base)
    _check_bands(name, table, bands)
    order = list(bands) if bands else [band for band in BANDS_13 if band in table] or list(table)
    ways = {band: _radiometry(item, table[band], offset) for band in order}
    for doubt in sorted({way.doubt for way in ways.values() if way.doubt}):
        said(f"{name}: {doubt}. Say --offset none or --offset -1000 to settle it.")
    classes = classification_of(item, base)
    source = product_source(
        name,
        _item_time(item),
        order,
        [BandFile(table[band].path, table[band].index) for band in order],
        [_coding(table[band], ways[band]) for band in order],
        classes=BandFile(classes.path) if classes else None,
        reason=ways[order[0]].reason,
        href=self_href(item) or base,
        grids=[table[band].grid for band in order],
    )
    return item, source


def _check_bands(name: str, table: Mapping[str, AssetBand], bands: Sequence[str] | None) -> None:
    missing = [band for band in bands or () if band not in table]
    if missing or not table:
        has = ", ".join(table) or "no asset with a known band"
        wanted = ", ".join(missing) if missing else "bands such as B02, B03, B04, B08"
        raise BandError(
            f"item {name} has {has}; expected {wanted}. Bands are found by eo:bands, bands or the asset's key."
        )


def _radiometry(item: Mapping[str, Any], entry: AssetBand, offset: str | float | None) -> Radiometry:
    return decide_stac(
        offset,
        properties=item.get("properties") or {},
        scale=entry.scale,
        offset=entry.offset,
        item=str(item.get("id") or ""),
        integer=not str(entry.dtype or "uint16").startswith("float"),
    )


def _coding(entry: AssetBand, way: Radiometry) -> ValueCoding:
    dtype = str(entry.dtype or "uint16")
    nodata = entry.nodata
    if nodata is None:
        nodata = float("nan") if dtype.startswith("float") else 0.0
    return ValueCoding(dtype, way.scale, way.offset, nodata)


def _item_time(item: Mapping[str, Any]) -> datetime | None:
    properties = item.get("properties") or {}
    text = properties.get("datetime") or properties.get("start_datetime")
    try:
        time = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def _cloud_cover(item: Mapping[str, Any]) -> float | None:
    value = (item.get("properties") or {}).get("eo:cloud_cover")
    return float(value) if isinstance(value, (int, float)) else None


def _worst_cover(source: DateSource, cover: Mapping[str, float | None]) -> float:
    parts = source.sources if isinstance(source, MosaicSource) else (source,)
    return max((cover.get(part.name) or 0.0) for part in parts)


def _tile(item: Mapping[str, Any]) -> str:
    properties = item.get("properties") or {}
    for key in ("grid:code", "s2:mgrs_tile", "s2:tile_id"):
        if properties.get(key):
            return re.sub(r"^(MGRS-|T)", "", str(properties[key]))
    found = re.search(r"(?:^|_)T?(\d{2}[A-Z]{3})(?:_|$)", str(item.get("id", "")))
    return found[1] if found else str(item.get("bbox"))


def _newest(
    found: Sequence[tuple[Mapping[str, Any], ProductSource]], said: Notice
) -> list[tuple[Mapping[str, Any], ProductSource]]:
    """Return the items without older versions of the same acquisition: archives keep several baselines.

    Two items of one tile, time and baseline but of different names are the two halves of a tile that lies across two
    data strips; both are kept, and `_by_overpass` joins them.
    """
    kept: list[tuple[Mapping[str, Any], ProductSource]] = []
    for item, source in found:
        twin = next((at for at, other in enumerate(kept) if _same_acquisition(other, (item, source))), None)
        if twin is None:
            kept.append((item, source))
            continue
        older, newer = sorted((kept[twin], (item, source)), key=lambda pair: _version(pair[0]))
        kept[twin] = newer
        if older[1].name != newer[1].name:  # else one item, found in a file of its own and in a collection
            said(f"{older[1].name} and {newer[1].name} are the same acquisition; {newer[1].name} is taken.")
    return kept


def _same_acquisition(
    one: tuple[Mapping[str, Any], ProductSource], other: tuple[Mapping[str, Any], ProductSource]
) -> bool:
    (first, source), (second, baseline) = one, other
    if source.date is None or baseline.date is None or abs(source.date - baseline.date) > SAME_TIME:
        return False
    platforms = {(item.get("properties") or {}).get("platform") for item in (first, second)}
    if len(platforms) > 1 or _tile(first) != _tile(second):
        return False
    return source.name == baseline.name or _version(first)[0] != _version(second)[0]


def _version(item: Mapping[str, Any]) -> tuple[tuple[int, int], str]:
    properties = item.get("properties") or {}
    baseline = parse_baseline(properties.get("s2:processing_baseline") or properties.get("processing:version"))
    return baseline or parse_baseline(item.get("id")) or (0, 0), str(properties.get("created") or item.get("id"))


def _by_overpass(
    found: Sequence[tuple[Mapping[str, Any], ProductSource]], bbox: tuple[float, float, float, float] | None
) -> list[DateSource]:
    """Return one source per overpass, sorted by date; tiles of one overpass are laid side by side."""
    undated = [source for _, source in found if source.date is None]
    dated = [(source.date, item, source) for item, source in found if source.date is not None]
    dated.sort(key=lambda entry: (entry[0], entry[2].name))
    groups: list[list[tuple[datetime, str, ProductSource]]] = []
    for time, item, source in dated:
        platform = str((item.get("properties") or {}).get("platform"))
        last = groups[-1][0] if groups else None
        together = last is not None and time - last[0] <= OVERPASS and platform == last[1]
        if together and source.name not in [member[2].name for member in groups[-1]]:
            groups[-1].append((time, platform, source))
        else:
            groups.append([(time, platform, source)])
    out: list[DateSource] = []
    # One lattice for all dates: with a bbox every grid is cut from that of the first tile.
    first = found[0][1].grid
    area = None if bbox is None else crop_grid(first, bbox)
    for group in groups:
        sources = tuple(member[2] for member in group)
        if len(sources) > 1:
            out.append(MosaicSource(sources, area or union_grid([source.grid for source in sources])))
        else:
            out.append(sources[0] if area is None else replace(sources[0], grid=area))
    return out + [source if area is None else replace(source, grid=area) for source in undated]


def _asset_key(item: Mapping[str, Any], entry: AssetBand) -> str:
    for key in item.get("assets") or {}:
        part = {**item, "assets": {key: item["assets"][key]}}
        if any(other.path == entry.path for other in bands_of(part, str(self_href(item) or ".")).values()):
            return str(key)
    raise DataError(f"item {item.get('id')} has no asset for {entry.band}.")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
