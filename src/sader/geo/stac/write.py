"""The STAC Item beside a result: where it is, how its values are stored, what it was made from.

STAC 1.1 with the extensions projection 2.0, raster 2.0, eo 2.0 and processing 1.2, written as plain JSON: no package is
needed, and everything about the raster is read back from the file itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sader._version import __version__
from sader.errors import require
from sader.files import write_atomically
from sader.geo.read.raster import grid_of, open_raster, reading
from sader.geo.read.sentinel2 import BANDS
from sader.geo.stack import DateSource, Grid, ValueCoding

EXTENSIONS = (
    "https://stac-extensions.github.io/projection/v2.0.0/schema.json",
    "https://stac-extensions.github.io/raster/v2.0.0/schema.json",
    "https://stac-extensions.github.io/eo/v2.0.0/schema.json",
    "https://stac-extensions.github.io/processing/v1.2.0/schema.json",
)
COG = "image/tiff; application=geotiff; profile=cloud-optimized"
MEDIA = {".tif": COG, ".tiff": COG, ".png": "image/png", ".jpg": "image/jpeg", ".json": "application/json"}
TYPES = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}


def write_item(
    result: str | Path,
    *,
    sources: Sequence[DateSource] = (),
    reference: DateSource | None = None,
    assets: Mapping[str, str | Path] | None = None,
    processing: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
    coding: ValueCoding | None = None,
) -> Path:
    """Write the item of `result` and return its path: `result` with the ending .json unless `path` is given.

    sources: the dates it was made from; they become derived_from links. reference: the date that was cleaned, whose
    time is the item's; without one the item covers the time from the first date to the last.
    assets: name -> further files, such as uncertainty or preview. processing: more properties, such as the model's name
    under "sader:model". coding: how the values were written, which a file need not say itself; None = what it says.
    """
    result = Path(result)
    target = result.with_suffix(".json") if path is None else Path(path)
    item = build_item(
        result, sources=sources, reference=reference, assets=assets, processing=processing, at=target, coding=coding
    )
    text = json.dumps(item, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(target, text.encode())
    return target


def build_item(
    result: Path,
    *,
    sources: Sequence[DateSource],
    reference: DateSource | None,
    assets: Mapping[str, str | Path] | None,
    processing: Mapping[str, Any] | None,
    at: Path,
    coding: ValueCoding | None = None,
) -> dict[str, Any]:
    """Return the item as plain values; `at` is where it will lie, to which references are relative."""
    data, grid = _data_asset(result, at, coding)
    geometry, bbox = _footprint(grid)
    item: dict[str, Any] = {
        "type": "Feature",
        "stac_version": "1.1.0",
        "stac_extensions": list(EXTENSIONS),
        "id": result.stem,
        "geometry": geometry,
        "properties": {
            **_times(sources, reference, result),
            **_projection(grid),
            "gsd": round(min(grid.resolution), 6) if grid.crs and not _in_degrees(grid) else None,
            "processing:software": {"sader": __version__},
            "processing:lineage": _lineage(sources, reference),
            **(processing or {}),
        },
        "links": [{"rel": "self", "href": str(at.resolve()), "type": "application/geo+json"}, *_derived(sources, at)],
        "assets": {"data": data},
    }
    item["properties"] = {
        key: value for key, value in item["properties"].items() if value is not None or key == "datetime"
    }
    if bbox is not None:
        item["bbox"] = bbox
    for name, file in (assets or {}).items():
        item["assets"][name] = _side_asset(name, Path(file), at)
    return item


def _data_asset(result: Path, at: Path, coding: ValueCoding | None) -> tuple[dict[str, Any], Grid]:
    with reading(str(result)), open_raster(result) as dataset:
        grid = grid_of(dataset)
        bands = []
        for number in range(dataset.count):
            name = dataset.descriptions[number] or f"band {number + 1}"
            band: dict[str, Any] = {"name": name, **_spectral(name)}
            # A file of counts often says no scale, and GDAL then answers 1: readers of the item would take 1234 for
            # the reflectance.
            band["raster:scale"] = float(dataset.scales[number]) if coding is None else coding.scale
            band["raster:offset"] = float(dataset.offsets[number]) if coding is None else coding.offset
            bands.append(band)
        asset: dict[str, Any] = {
            "href": _relative(result, at),
            "type": COG,
            "title": "cloud-free reflectance",
            "roles": ["data", "reflectance"],
            "bands": bands,
            **_numbers(dataset),
            **_projection(grid),
        }
        asset["raster:spatial_resolution"] = round(min(grid.resolution), 9)
    return asset, grid


def _numbers(dataset: Any) -> dict[str, Any]:
    kind = dataset.dtypes[0]
    found: dict[str, Any] = {"data_type": kind if kind in TYPES else "other"}
    if dataset.nodata is not None:
        nodata = float(dataset.nodata)
        found["nodata"] = "nan" if nodata != nodata else int(nodata) if nodata.is_integer() else nodata
    return found


def _spectral(name: str) -> dict[str, Any]:
    band = BANDS.get(name)
    if band is None:
        return {}
    return {
        "eo:common_name": band.common_name,
        "eo:center_wavelength": round(band.wavelength / 1000, 4),  # in micrometres, as STAC wants it
        "eo:full_width_half_max": round(band.width / 1000, 4),
    }


def _side_asset(name: str, file: Path, at: Path) -> dict[str, Any]:
    asset: dict[str, Any] = {"href": _relative(file, at), "title": name}
    asset["type"] = MEDIA.get(file.suffix.lower(), "application/octet-stream")
    asset["roles"] = ["overview", "visual"] if file.suffix.lower() in (".png", ".jpg") else ["data", "metadata"]
    if file.suffix.lower() in (".tif", ".tiff") and file.exists():
        with reading(str(file)), open_raster(file) as dataset:
            asset.update(_numbers(dataset))
            asset["bands"] = [{"name": text or f"band {at_}"} for at_, text in enumerate(dataset.descriptions, start=1)]
    return asset


def _relative(file: Path, at: Path) -> str:
    """Return a reference from the item to a file; a full path where they share no folder tree."""
    try:
        return "./" + file.resolve().relative_to(at.resolve().parent).as_posix()
    except ValueError:
        return file.resolve().as_posix()


def _in_degrees(grid: Grid) -> bool:
    crs = require("rasterio.crs", extra="geo", purpose="describing the result").CRS
    return bool(crs.from_user_input(grid.crs).is_geographic)


def _projection(grid: Grid) -> dict[str, Any]:
    if not grid.crs:
        return {}
    coded = ":" in grid.crs and len(grid.crs) < 40
    return {
        "proj:code": grid.crs if coded else None,
        **({} if coded else {"proj:wkt2": grid.crs}),
        "proj:shape": [grid.height, grid.width],
        "proj:transform": list(grid.transform),
        "proj:bbox": list(grid.bounds),
    }


def _footprint(grid: Grid) -> tuple[dict[str, Any] | None, list[float] | None]:
    """Return the outline in degrees and its box; nothing for an image without a place."""
    if not grid.crs:
        return None, None
    warp = require("rasterio.warp", extra="geo", purpose="placing the footprint").transform
    a, b, c, d, e, f = grid.transform
    steps = [at / 8 for at in range(8)]
    # Edges are curved in degrees, so each is given in eight parts; counter-clockwise, as GeoJSON wants it.
    ring = (
        [(0.0, s) for s in steps]
        + [(s, 1.0) for s in steps]
        + [(1.0, 1 - s) for s in steps]
        + [(1 - s, 0.0) for s in steps]
    )
    xs = [a * u * grid.width + b * v * grid.height + c for u, v in ring]
    ys = [d * u * grid.width + e * v * grid.height + f for u, v in ring]
    lons, lats = warp(grid.crs, "EPSG:4326", xs, ys)
    points = [[round(lon, 7), round(lat, 7)] for lon, lat in zip(lons, lats, strict=True)]
    box = [min(p[0] for p in points), min(p[1] for p in points), max(p[0] for p in points), max(p[1] for p in points)]
    return {"type": "Polygon", "coordinates": [[*points, points[0]]]}, box


def _times(sources: Sequence[DateSource], reference: DateSource | None, result: Path) -> dict[str, Any]:
    def text(time: datetime) -> str:
        aware = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        return aware.isoformat(timespec="seconds").replace("+00:00", "Z")

    now = text(datetime.now(UTC))
    known = sorted(text(source.date) for source in sources if source.date is not None)
    found: dict[str, Any] = {"created": now, "processing:datetime": now}
    if known:
        found |= {"start_datetime": known[0], "end_datetime": known[-1]}
    if reference is not None and reference.date is not None:
        return {"datetime": text(reference.date), **found}
    if known:
        return {"datetime": None, **found}
    # STAC wants a time; of images without one only the file's own is known.
    written = text(datetime.fromtimestamp(result.stat().st_mtime, UTC))
    return {"datetime": written, **found, "description": "The dates of the inputs are unknown; the time is the file's."}


def _lineage(sources: Sequence[DateSource], reference: DateSource | None) -> str:
    what = f"clouds removed from {reference.name}" if reference is not None else "a cloud-free image"
    count = len(sources)
    return f"{what} with sader {__version__} from {count} date{'' if count == 1 else 's'}"


def _derived(sources: Sequence[DateSource], at: Path) -> list[dict[str, Any]]:
    links = []
    for source in sources:
        titles = [part.name for part in getattr(source, "sources", ())] or [source.name]
        hrefs = list(getattr(source, "hrefs", ())) or [getattr(source, "href", "") or _first_path(source)]
        for title, href in zip(titles, hrefs, strict=True):
            link = {"rel": "derived_from", "href": href if "://" in href else _relative(Path(href), at), "title": title}
            links.append(link)
    return links


def _first_path(source: DateSource) -> str:
    paths = getattr(source, "paths", ())
    return str(paths[0]) if paths else source.name
