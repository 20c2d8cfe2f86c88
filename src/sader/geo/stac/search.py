"""Dates from STAC: items and item collections on disk, or a search on a STAC API, as sources on one grid.

Each item becomes a `ProductSource` that reads windows of its files; neighbouring tiles of one overpass become one
date. Searching needs pystac-client.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sader.bands import BANDS_13
from sader.errors import BandError, DataError, require
from sader.geo.grid import crop_grid, parse_bbox, parse_dates, union_grid
from sader.geo.offset import Radiometry, decide_stac, parse_baseline
from sader.geo.read.products import MosaicSource, ProductSource, product_source
from sader.geo.read.raster import BandFile
from sader.geo.stac.items import AssetBand, bands_of, classification_of, load_items
from sader.geo.stack import DateSource
from sader.inference.tiling import Notice
from sader.inference.values import ValueCoding

if TYPE_CHECKING:
    import pystac

Opened = tuple["pystac.Item", ProductSource]
COLLECTION = "sentinel-2-l2a"
"""Collection of a search by default; Earth Search, Planetary Computer and Copernicus have it."""
MOST_DATES = 10
SAME_TIME = timedelta(minutes=2)
"""Largest difference between the stated times of two versions of one acquisition."""
OVERPASS = timedelta(minutes=10)
"""Tiles of one satellite within this time belong to one overpass."""


def open_items(
    items: str | Path | Mapping[str, Any] | Iterable[Any],
    *,
    offset: str | float | None = "auto",
    bands: Sequence[str] | None = None,
    bbox: Sequence[float] | None = None,
    notice: Notice | None = None,
) -> list[DateSource]:
    """Return one source for each date in STAC items, sorted by date.

    items: a JSON file (item, item collection, or catalogue with links), a folder of such files, parsed JSON,
    `pystac.Item` objects, or several of these.
    offset: auto, none or counts such as -1000. bands: default all bands of the item.
    bbox: (west, south, east, north) in degrees, to which the grid is cropped. notice: called with messages to the user.
    """
    notify = notice or warnings.warn
    found = [_open_item(item, base, offset, bands, notify) for item, base in load_items(items)]
    if not found:
        raise DataError("no STAC item given; expected at least one.")
    return _by_overpass(_newest(found, notify), None if bbox is None else parse_bbox(bbox))


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
    """Return the dates of a place in a STAC API, each on the grid of the bbox, sorted by date.

    url: of the API, such as https://earth-search.aws.element84.com/v1. bbox: west, south, east, north in degrees.
    dates: "2022-03-01/2022-05-31" or the two days. max_cloud: percent of the tile, as stated by the item.
    most_dates: of more dates only the clearest are used.
    """
    notify = notice or warnings.warn
    area = parse_bbox(bbox)
    items = search_items(url, area, dates, collection=collection, max_cloud=max_cloud)
    found = open_items(items, offset=offset, bands=bands, bbox=area, notice=notify)
    if most_dates is not None and len(found) > most_dates:
        cover = {item.id: _cloud_cover(item) for item in items}

        def cloudiness(source: DateSource) -> float:
            parts = source.sources if isinstance(source, MosaicSource) else (source,)
            return max(cover.get(part.name, 0.0) for part in parts)

        clearest = sorted(found, key=cloudiness)[:most_dates]
        notify(f"{len(found)} dates found; the {most_dates} clearest are used.")
        found = [source for source in found if source in clearest]
    return found


def search_items(
    url: str,
    bbox: str | Sequence[float],
    dates: str | Sequence[str | datetime],
    *,
    collection: str | None = None,
    max_cloud: float | None = None,
) -> list[pystac.Item]:
    """Return the items of a place and time in a STAC API."""
    client = require("pystac_client", extra="stac", purpose="searching a STAC API").Client
    area, period, name = parse_bbox(bbox), parse_dates(dates), collection or COLLECTION
    sign = None
    if "planetarycomputer.microsoft.com" in url:
        # Its files need short-lived signatures.
        sign = require("planetary_computer", extra="stac", purpose="reading from the Planetary Computer").sign_inplace
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # conformance classes that the API does not state
            query = client.open(url, modifier=sign).search(
                collections=[name], bbox=list(area), datetime=period, limit=100
            )
            items = list(query.items())
    except Exception as error:  # pystac-client passes on errors of requests, urllib3 and json
        reason = str(error).strip().rstrip(".")[:300] or type(error).__name__
        raise DataError(
            f"the search on {url} failed: {reason}. Expected a STAC API such as "
            "https://earth-search.aws.element84.com/v1; check the address, the collection and the network."
        ) from error
    kept = [item for item in items if max_cloud is None or _cloud_cover(item) <= max_cloud]
    if not kept:
        less = f" with at most {max_cloud:g} % cloud ({len(items)} have more)" if items else ""
        raise DataError(
            f"{url} has no item of {name} in {', '.join(f'{value:g}' for value in area)} during {period}{less}. Widen "
            "the area or the dates, or name another collection."
        )
    return kept


def _open_item(
    item: pystac.Item, base: str, offset: str | float | None, bands: Sequence[str] | None, notify: Notice
) -> Opened:
    name = str(item.id or Path(base).stem)
    table = bands_of(item, base)
    missing = [band for band in bands or () if band not in table]
    if missing or not table:
        has = ", ".join(table) or "no asset with a known band"
        wanted = ", ".join(missing) if missing else "bands such as B02, B03, B04, B08"
        raise BandError(f"item {name} has {has}; expected {wanted}. Bands come from bands, eo:bands or the asset keys.")
    order = list(bands) if bands else [band for band in BANDS_13 if band in table] or list(table)
    ways = [_radiometry(item, table[band], offset) for band in order]
    for doubt in sorted({way.doubt for way in ways if way.doubt}):
        notify(f"{name}: {doubt}. Set --offset none or --offset -1000 to decide it.")
    classes = classification_of(item, base)
    source = product_source(
        name,
        _time(item),
        order,
        [BandFile(table[band].path, table[band].index) for band in order],
        [_coding(table[band], way) for band, way in zip(order, ways, strict=True)],
        classes=BandFile(classes.path) if classes else None,
        reason=ways[0].reason,
        href=item.get_self_href() or base,
        grids=[table[band].grid for band in order],
    )
    return item, source


def _radiometry(item: pystac.Item, entry: AssetBand, offset: str | float | None) -> Radiometry:
    name, whole = str(item.id or ""), not _is_float(entry)
    return decide_stac(
        offset, properties=item.properties, scale=entry.scale, offset=entry.offset, item=name, integer=whole
    )


def _coding(entry: AssetBand, way: Radiometry) -> ValueCoding:
    nodata = entry.nodata if entry.nodata is not None else float("nan") if _is_float(entry) else 0.0
    return ValueCoding(str(entry.dtype or "uint16"), way.scale, way.offset, nodata)


def _is_float(entry: AssetBand) -> bool:
    return str(entry.dtype).startswith("float")


def _time(item: pystac.Item) -> datetime:
    """Return the time of an item, or the start of its interval: pystac accepts no item without both."""
    time = item.datetime or item.common_metadata.start_datetime
    assert time is not None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def _cloud_cover(item: pystac.Item) -> float:
    value = item.properties.get("eo:cloud_cover")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _tile(item: pystac.Item) -> str:
    for key in ("grid:code", "s2:mgrs_tile", "s2:tile_id"):
        if item.properties.get(key):
            return re.sub(r"^(MGRS-|T)", "", str(item.properties[key]))
    found = re.search(r"(?:^|_)T?(\d{2}[A-Z]{3})(?:_|$)", str(item.id))
    return found[1] if found else str(item.bbox)


def _version(item: pystac.Item) -> tuple[tuple[int, int], str]:
    stated = item.properties.get("s2:processing_baseline") or item.properties.get("processing:version")
    return parse_baseline(stated) or parse_baseline(item.id) or (0, 0), str(item.properties.get("created") or item.id)


def _newest(found: Sequence[Opened], notify: Notice) -> list[Opened]:
    """Return the items without older versions of the same acquisition: archives keep several processing baselines.

    Two items of one tile, time and baseline but of different names are the two halves of a tile across two data strips;
    both are kept, and `_by_overpass` joins them.
    """
    kept: list[Opened] = []
    for one in found:
        at = next((at for at, other in enumerate(kept) if _same_acquisition(other, one)), None)
        if at is None:
            kept.append(one)
            continue
        (_, older), newer = sorted((kept[at], one), key=lambda pair: _version(pair[0]))
        kept[at] = newer
        if older.name != newer[1].name:  # equal names: one item, in a file of its own and in a collection
            notify(f"{older.name} and {newer[1].name} are the same acquisition; {newer[1].name} is used.")
    return kept


def _same_acquisition(one: Opened, other: Opened) -> bool:
    if abs(_time(one[0]) - _time(other[0])) > SAME_TIME or _tile(one[0]) != _tile(other[0]):
        return False
    if one[0].properties.get("platform") != other[0].properties.get("platform"):
        return False
    return one[1].name == other[1].name or _version(one[0])[0] != _version(other[0])[0]


def _by_overpass(found: Sequence[Opened], bbox: tuple[float, float, float, float] | None) -> list[DateSource]:
    """Return one source per overpass, sorted by date; tiles of one overpass become a mosaic."""
    groups: list[list[Opened]] = []
    for item, source in sorted(found, key=lambda pair: (_time(pair[0]), pair[1].name)):
        first = groups[-1][0][0] if groups else None
        together = (
            first is not None
            and _time(item) - _time(first) <= OVERPASS
            and item.properties.get("platform") == first.properties.get("platform")
            and source.name not in [member.name for _, member in groups[-1]]
        )
        if together:
            groups[-1].append((item, source))
        else:
            groups.append([(item, source)])
    # One lattice for all dates: with a bbox every grid is cropped from that of the first item.
    area = None if bbox is None else crop_grid(found[0][1].grid, bbox)
    out: list[DateSource] = []
    for group in groups:
        sources = tuple(source for _, source in group)
        if len(sources) > 1:
            out.append(MosaicSource(sources, area or union_grid([source.grid for source in sources])))
        else:
            out.append(sources[0] if area is None else replace(sources[0], grid=area))
    return out
