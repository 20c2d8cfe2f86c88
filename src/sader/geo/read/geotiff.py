"""Metadata of a raster file -> a `GeoTiffSource`: bands by name, date, grid, scale, offset, nodata."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from sader.bands import BAND_LISTS, canonical, names_of_file, planetscope_names
from sader.errors import BandError, DataError, listed, require
from sader.geo.offset import decide_tags, sample_windows
from sader.geo.read.raster import BandFile, GeoTiffSource, alpha_band, grid_of, has_mask, opened, reading
from sader.inference.values import coding_of

RASTERS = (".tif", ".tiff", ".jp2", ".vrt", ".img")
SAMPLE = 256
"""Edge of the sample that separates counts from reflectance in a float file without a scale."""
EMPTY_SHARE = 1e-3
"""Part of a sample that is exactly 0 in every band from which on zeros are a border, no chance."""
_DATE = re.compile(
    r"(?<!\d)((?:19|20)\d{2})[-_.]?(0[1-9]|1[0-2])[-_.]?(0[1-9]|[12]\d|3[01])(?:T(\d{2})(\d{2})(\d{2}))?"
)


def date_in(text: str) -> datetime | None:
    """Return the first date in a name: 2022-03-10, 20220310, 2022_03_10, 20220310T143751."""
    for found in _DATE.finditer(text):
        try:
            return datetime(*(int(part) for part in found.groups() if part is not None))  # type: ignore[arg-type]
        except ValueError:
            continue
    return None


def open_geotiff(
    path: str | Path,
    *,
    bands: Sequence[str] | None = None,
    offset: str | float | None = "auto",
    scale: float | None = None,
    name: str | None = None,
) -> tuple[GeoTiffSource, list[str]]:
    """Return the acquisition in a file, and what the user should know about it.

    bands: names in the order of the file where it has none, or a selection of those it has.
    offset: "auto", "none" or counts such as -1000; scale: reflectance per count, None = that of the file.
    """
    path = str(path)
    notices: list[str] = []
    with reading(path):
        dataset = opened(path)
        title = name or Path(path).name
        if dataset.count == 0:
            raise DataError(
                f"{path} holds no band but {len(dataset.subdatasets)} data sets; expected one raster with all bands. "
                "Write them as one file (gdalbuildvrt -separate), or open a cube with xarray and give it to "
                "sader.remove_xarray."
            )
        # An alpha band marks valid pixels and is no band of the image, unless the user names all bands of the file.
        alpha = None if bands is not None and len(bands) == dataset.count else alpha_band(dataset)
        places = [number for number in range(1, dataset.count + 1) if number != alpha]
        names = _names(dataset, title, bands, places)
        if bands is not None and (own := [band for band in names if band in bands]) != list(bands):
            notices.append(
                f"{title} names its bands itself ({listed(own)}): --bands selects some, its order is not used."
            )
        files = tuple(BandFile(path, number) for number in places)
        picked = [i for i, band in enumerate(names) if bands is None or band in bands]
        tags = dataset.tags()
        scales = {(dataset.scales[files[i].index - 1], dataset.offsets[files[i].index - 1]) for i in picked}
        if len(scales) > 1:
            raise DataError(
                f"{title} stores its bands with different scales and offsets {sorted(scales)}; expected one pair. "
                "Choose bands with --bands, or write them with one scale."
            )
        file_scale, file_offset = next(iter(scales))
        # Other bands of the file (classes, masks) may be stored in another way.
        measured = [files[i].index - 1 for i in picked if canonical(names[i]) == names[i]] or [
            files[picked[0]].index - 1
        ]
        kinds = {f"{dataset.dtypes[i]}, nodata {dataset.nodatavals[i]}" for i in measured}
        if len(kinds) > 1:
            raise DataError(
                f"{title} stores its bands differently ({'; '.join(sorted(kinds))}); expected one type and one nodata "
                "value. Write them alike (gdal_translate -ot, -a_nodata)."
            )
        dtype, nodata = dataset.dtypes[measured[0]], dataset.nodatavals[measured[0]]
        decided = decide_tags(
            offset,
            scale=file_scale if scale is None else scale,
            offset=file_offset,
            integer=np.issubdtype(np.dtype(dtype), np.integer),
            baseline=tags.get("PROCESSING_BASELINE"),
            name=title,
        )
        if decided.doubt:
            notices.append(f"{title}: {decided.doubt}. Give --offset none or --offset -1000 to settle it.")
        tagged = scale is not None or file_scale != 1.0 or file_offset != 0.0
        if not dataset.crs and (dataset.gcps[0] or dataset.rpcs):
            notices.append(
                f"{title} has ground control points or RPCs instead of a place on the map, and they are not used. Warp "
                "it first (gdalwarp) for a result with a place."
            )
        if _zeros_stand_out(dataset, [i + 1 for i in measured]):
            if nodata is None:
                nodata = 0.0
                notices.append(f"{title} names no nodata value: its pixels of 0 in every band are taken as missing.")
            else:
                notices.append(
                    f"{title} has pixels of 0 in every band, which count as data: its nodata value is {nodata:g}. If "
                    "they are missing, mark them: rio edit-info --nodata 0 FILE."
                )
        highest = None if tagged or not dtype.startswith("float") else _highest(dataset, measured[0] + 1)
        coding = coding_of(
            title,
            dtype=dtype,
            scale=decided.scale if tagged else None,
            offset=decided.offset,
            nodata=nodata,
            highest=highest,
            declared=tagged,
        )
        date = date_in(title) or date_in(tags.get("ACQUISITION_DATE", "") or tags.get("TIFFTAG_DATETIME", ""))
        source = GeoTiffSource(title, date, names, grid_of(dataset), coding, files)
    return source, notices


def _names(dataset: Any, title: str, bands: Sequence[str] | None, places: Sequence[int]) -> tuple[str, ...]:
    """Return the name of every band of the file; places: their numbers in it, from 1."""
    written = names_of_file([dataset.descriptions[place - 1] for place in places])
    written = written or planetscope_names(title, len(places))
    if written is None:
        colours = [dataset.colorinterp[place - 1].name for place in places]
        if colours[:3] == ["red", "green", "blue"]:
            written = names_of_file([c if c in ("red", "green", "blue", "nir") else None for c in colours])
    if bands is not None and (written is None or not set(bands) <= set(written)):
        if len(bands) != len(places):
            has = "no names" if written is None else f"the names {listed(written)}"
            raise BandError(
                f"--bands gives {len(bands)} names ({listed(bands)}), but {title} has {len(places)} bands with "
                f"{has}. Give one name for each band of the file, or choose among its own names."
            )
        return tuple(bands)
    if written is None:
        first = dataset.descriptions[places[0] - 1]
        numbers = f" but their numbers ({first} ...)" if first else ""
        raise BandError(
            f"the {len(places)} bands of {title} have no names{numbers}, and bands are never guessed by position. Name "
            f"them in the file's order: --bands B02,B03,B04,B08, or a preset: {', '.join(BAND_LISTS)}."
        )
    return written


def _zeros_stand_out(dataset: Any, places: Sequence[int]) -> bool:
    """Whether a file in which 0 would be data has a border of zeros: pixels of 0 in all bands, hardly any in some only.

    Values cut off at 0 are 0 in some bands of dark water; a border is 0 in all.
    """
    whole = not np.issubdtype(np.dtype(dataset.dtypes[places[0] - 1]), np.floating)
    nodata = dataset.nodatavals[places[0] - 1]
    if len(places) < 2 or nodata == 0 or (whole and nodata is None):
        return False
    if alpha_band(dataset) or has_mask(dataset, places[0]):
        return False
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    every, some, count = 0, 0, 0
    for part in sample_windows(dataset.height, dataset.width):
        place = rasterio.windows.Window(part.col, part.row, part.width, part.height)
        zero = dataset.read(list(places), window=place) == 0
        every, some = every + int(zero.all(axis=0).sum()), some + int(zero.any(axis=0).sum())
        count += part.height * part.width
    return every > EMPTY_SHARE * count and some <= 1.1 * every


def _highest(dataset: Any, place: int) -> float | None:
    """Return a high percentile of a sample of one band, to separate counts from reflectance."""
    shape = (min(SAMPLE, dataset.height), min(SAMPLE, dataset.width))
    values, nodata = dataset.read(place, out_shape=shape), dataset.nodatavals[place - 1]
    values = values[np.isfinite(values) & (values != (np.nan if nodata is None else nodata))]
    return float(np.percentile(values, 99)) if values.size else None
