"""The STAC item of a result: location, value coding, inputs.

STAC 1.1 with the extensions projection 2.0, raster 2.0, eo 2.0 and processing 1.2, and classification 2.0 for masks.
Facts about a raster are read from its file. References are relative and there is no self link, so result and item can
be moved together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sader._version import __version__
from sader.errors import require
from sader.files import write_atomically
from sader.geo.grid import Grid
from sader.geo.read.raster import grid_of, open_raster, reading, shown
from sader.geo.read.sentinel2 import BANDS
from sader.geo.stac.items import VIRTUAL
from sader.geo.stack import DateSource
from sader.inference.values import ValueCoding

if TYPE_CHECKING:
    import pystac

EXTENSIONS = [
    f"https://stac-extensions.github.io/{name}/schema.json"
    for name in ("projection/v2.0.0", "raster/v2.0.0", "eo/v2.0.0", "processing/v1.2.0")
]
CLASSIFICATION = "https://stac-extensions.github.io/classification/v2.0.0/schema.json"
COG = "image/tiff; application=geotiff; profile=cloud-optimized"
MEDIA = {".tif": COG, ".tiff": COG, ".png": "image/png", ".jpg": "image/jpeg", ".json": "application/json"}
TYPES = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}
EDGE_PARTS = 8
"""Segments of each edge of the footprint, which is curved in degrees."""


def write_item(
    result: str | Path,
    *,
    sources: Sequence[DateSource] = (),
    reference: DateSource | None = None,
    assets: Mapping[str, str | Path] | None = None,
    processing: Mapping[str, Any] | None = None,
    coding: ValueCoding | None = None,
    collection: Path | None = None,
) -> Path:
    """Write the item of `result` and return its path: `result` with the suffix .json.

    sources: the input dates, which become derived_from links. reference: the cleaned date, whose time is the item's;
    without it the item covers the time from the first date to the last.
    assets: name -> further files, such as uncertainty or preview. processing: further properties, such as
    "sader:model". coding: value coding of the result where its file does not state it.
    collection: the file of the collection that the item belongs to (`write_collection`).
    """
    result = Path(result)
    target = result.with_suffix(".json")
    with reading(str(result)), open_raster(result) as dataset:
        grid = grid_of(dataset)
        data = _data_asset(dataset, grid, coding)
    what = "a cloud-free image" if reference is None else f"clouds removed from {reference.name}"
    count = f"{len(sources)} date{'' if len(sources) == 1 else 's'}"
    lineage = {"processing:lineage": f"{what} with sader {__version__} from {count}", **(processing or {})}
    item, stac = _new_item(result, grid, sources, reference, lineage)
    roles = ["data", "reflectance"]
    item.add_asset("data", stac.Asset(_relative(result, target), "cloud-free reflectance", None, COG, roles, data))
    for name, file in (assets or {}).items():
        item.add_asset(name, _side_asset(name, Path(file), target, stac))
    return _write_linked(target, item, sources, collection, stac)


def write_class_item(
    classes: Path,
    probability: Path,
    legend: Sequence[tuple[str, tuple[int, ...]]],
    *,
    source: DateSource,
    collection: Path | None = None,
) -> Path:
    """Write the item of a class raster beside it and return its path. legend: name and colour of each class."""
    target = classes.with_suffix(".json")
    with reading(str(classes)), open_raster(classes) as dataset:
        grid, numbers = grid_of(dataset), _numbers(dataset)
    listed: list[dict[str, Any]] = [
        {
            "value": code,
            "name": name.replace(" ", "_"),
            "description": name,
            "color_hint": bytes(colour[:3]).hex().upper(),
        }
        for code, (name, colour) in enumerate(legend)
    ]
    listed.append({"value": numbers["nodata"], "name": "nodata", "description": "no data", "nodata": True})
    data = {**numbers, "bands": [{"name": "class"}], **_projection(grid), "classification:classes": listed}
    lineage = {"processing:lineage": f"classes of {source.name} with sader {__version__}"}
    item, stac = _new_item(classes, grid, (source,), source, lineage)
    item.stac_extensions.append(CLASSIFICATION)
    item.add_asset("data", stac.Asset(_relative(classes, target), "classes", None, COG, ["data"], data))
    item.add_asset("probability", _side_asset("probability", probability, target, stac))
    return _write_linked(target, item, (source,), collection, stac)


def _new_item(
    result: Path, grid: Grid, sources: Sequence[DateSource], reference: DateSource | None, processing: Mapping[str, Any]
) -> tuple[pystac.Item, Any]:
    """Return an item with place, time and lineage, and pystac."""
    stac = require("pystac", extra="geo", purpose="writing the STAC item")
    footprint, bbox = _footprint(grid)
    time, properties = _times(sources, reference, result)
    properties |= {
        **_projection(grid),
        "gsd": round(min(grid.resolution), 6) if grid.crs and not grid.in_degrees else None,
        "processing:software": {"sader": __version__},
        **processing,
    }
    known = {key: value for key, value in properties.items() if value is not None}
    return stac.Item(result.stem, footprint, bbox, time, known, stac_extensions=list(EXTENSIONS)), stac


def _write_linked(
    target: Path, item: pystac.Item, sources: Sequence[DateSource], collection: Path | None, stac: Any
) -> Path:
    """Write an item with the links to its inputs and its collection."""
    for title, href in (origin for source in sources for origin in source.origins):
        place = re.sub(r"^/vsi(s3|gs|az)/", r"\1://", shown(href or title))
        relative = place if VIRTUAL.match(place) else _relative(Path(place), target)
        item.add_link(stac.Link("derived_from", relative, title=title))
    if collection is not None:
        item.collection_id = collection.resolve().parent.name
        for rel in ("root", "parent", "collection"):
            item.add_link(stac.Link(rel, _relative(collection, target), "application/json"))
    return _write(target, item)


def write_collection(path: Path, items: Sequence[Path], text: str) -> Path:
    """Write the collection of items in its folder, with a description, and return its path; its links are relative.

    Extent and period are those of the items; the id is the name of the folder.
    """
    stac = require("pystac", extra="geo", purpose="writing the STAC collection")
    read = [stac.Item.from_dict(json.loads(one.read_text(encoding="utf-8"))) for one in items]
    name = path.resolve().parent.name
    boxes = [item.bbox for item in read if item.bbox is not None] or [[-180.0, -90.0, 180.0, 90.0]]
    wests, souths, easts, norths = zip(*boxes, strict=True)
    times = []
    for item in read:
        facts = item.common_metadata  # the time of an item is that of the cleaned date, its period that of all inputs
        times += [item.datetime] if item.datetime else [facts.start_datetime, facts.end_datetime]
    period = [min(times), max(times)] if times else [None, None]
    box = [min(wests), min(souths), max(easts), max(norths)]
    extent = stac.Extent(stac.SpatialExtent([box]), stac.TemporalExtent([period]))
    collection = stac.Collection(name, text, extent, license="other")
    collection.add_link(stac.Link("root", f"./{path.name}", "application/json"))
    for one, item in zip(items, read, strict=True):
        collection.add_link(stac.Link("item", _relative(one, path), "application/geo+json", item.id))
    return _write(path, collection)


def _write(target: Path, thing: pystac.Item | pystac.Collection) -> Path:
    content = thing.to_dict(include_self_link=False, transform_hrefs=False)
    write_atomically(target, (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
    return target


def _data_asset(dataset: Any, grid: Grid, coding: ValueCoding | None) -> dict[str, Any]:
    bands = []
    for number in range(dataset.count):
        name = dataset.descriptions[number] or f"band {number + 1}"
        band: dict[str, Any] = {"name": name}
        if name in BANDS:
            band["eo:common_name"] = BANDS[name].common_name
            band["eo:center_wavelength"] = round(BANDS[name].wavelength / 1000, 4)  # micrometres
            band["eo:full_width_half_max"] = round(BANDS[name].width / 1000, 4)
        # Files of counts often state no scale, for which GDAL returns 1.
        band["raster:scale"] = float(dataset.scales[number]) if coding is None else coding.scale
        band["raster:offset"] = float(dataset.offsets[number]) if coding is None else coding.offset
        bands.append(band)
    resolution = round(min(grid.resolution), 9)
    return {"bands": bands, **_numbers(dataset), **_projection(grid), "raster:spatial_resolution": resolution}


def _side_asset(name: str, file: Path, target: Path, stac: Any) -> pystac.Asset:
    suffix = file.suffix.lower()
    extra: dict[str, Any] = {}
    if suffix in (".tif", ".tiff") and file.exists():
        with reading(str(file)), open_raster(file) as dataset:
            names = enumerate(dataset.descriptions, start=1)
            extra = {**_numbers(dataset), "bands": [{"name": text or f"band {number}"} for number, text in names]}
    roles = ["overview", "visual"] if suffix in (".png", ".jpg") else ["data", "metadata"]
    media = MEDIA.get(suffix, "application/octet-stream")
    return stac.Asset(_relative(file, target), name, None, media, roles, extra)


def _numbers(dataset: Any) -> dict[str, Any]:
    kind, nodata = dataset.dtypes[0], dataset.nodata
    found: dict[str, Any] = {"data_type": kind if kind in TYPES else "other"}
    if nodata is not None:
        found["nodata"] = "nan" if nodata != nodata else int(nodata) if float(nodata).is_integer() else float(nodata)
    return found


def _relative(file: Path, target: Path) -> str:
    """Return the reference from the item to a file; the full path where they lie on different drives."""
    try:
        found = Path(os.path.relpath(file.resolve(), target.resolve().parent)).as_posix()
    except ValueError:
        return file.resolve().as_posix()
    return found if found.startswith("..") else f"./{found}"


def _projection(grid: Grid) -> dict[str, Any]:
    if not grid.crs:
        return {}
    coded = ":" in grid.crs and len(grid.crs) < 40
    return {
        "proj:code" if coded else "proj:wkt2": grid.crs,
        "proj:shape": [grid.height, grid.width],
        "proj:transform": list(grid.transform),
        "proj:bbox": list(grid.bounds),
    }


def _footprint(grid: Grid) -> tuple[dict[str, Any] | None, list[float] | None]:
    """Return the outline in degrees, counter-clockwise, and its bounding box; None without a CRS."""
    if not grid.crs:
        return None, None
    warp = require("rasterio.warp", extra="geo", purpose="computing the footprint").transform
    steps = [at / EDGE_PARTS for at in range(EDGE_PARTS)]
    left_and_bottom = [(0.0, s) for s in steps] + [(s, 1.0) for s in steps]
    ring = left_and_bottom + [(1 - u, 1 - v) for u, v in left_and_bottom]
    xs, ys = zip(*(grid.place(u * grid.width, v * grid.height) for u, v in ring), strict=True)
    lons, lats = (([round(value, 7) for value in values]) for values in warp(grid.crs, "EPSG:4326", xs, ys))
    points = [[lon, lat] for lon, lat in zip(lons, lats, strict=True)]
    box = [min(lons), min(lats), max(lons), max(lats)]
    return {"type": "Polygon", "coordinates": [[*points, points[0]]]}, box


def _times(
    sources: Sequence[DateSource], reference: DateSource | None, result: Path
) -> tuple[datetime | None, dict[str, Any]]:
    """Return the time of the item and the time properties."""

    def in_utc(time: datetime) -> datetime:
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)

    def text(time: datetime) -> str:
        return time.isoformat(timespec="seconds").replace("+00:00", "Z")

    now = text(datetime.now(UTC))
    dates = sorted(in_utc(source.date) for source in sources if source.date is not None)
    found: dict[str, Any] = {"created": now, "processing:datetime": now}
    if dates:
        found |= {"start_datetime": text(dates[0]), "end_datetime": text(dates[-1])}
    if reference is not None and reference.date is not None:
        return in_utc(reference.date).replace(microsecond=0), found
    if dates:
        return None, found
    # STAC needs a time; for images without one only that of the file is known.
    written = datetime.fromtimestamp(int(result.stat().st_mtime), UTC)
    return written, {**found, "description": "The dates of the inputs are unknown; the time is that of the file."}
