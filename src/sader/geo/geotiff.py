"""What a raster file says about itself -> a `GeoTiffSource`: bands by name, date, grid, scale, offset, nodata."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from sader.errors import BandError, DataError
from sader.geo.bandnames import PRESETS, names_of_file
from sader.geo.offset import decide_tags
from sader.geo.raster import BandFile, GeoTiffSource, grid_of, opened, reading
from sader.geo.values import coding_of

RASTERS = (".tif", ".tiff", ".jp2", ".vrt", ".img")
SAMPLE = 256
"""Edge of the look that tells counts from reflectance in a float file without a scale."""
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
    band_files: Mapping[str, str] | None = None,
) -> tuple[GeoTiffSource, list[str]]:
    """Return the acquisition in a file, and what the user should know about it.

    bands: names in the order of the file where it has none, or a selection of those it has.
    offset: "auto", "none" or counts such as -1000; scale: reflectance per count, None = what the file says.
    band_files: one file per band (then `path` is the one whose grid counts).
    """
    path = str(path)
    notices: list[str] = []
    with reading(path):
        dataset = opened(path)
        title = name or Path(path).name
        if dataset.count == 0:
            raise DataError(f"{path} holds no band but {len(dataset.subdatasets)} data sets; name one of them.")
        if band_files is None:
            # An alpha band says where there is data; the reader uses it, and it is no band of the image.
            places = [number for number, kind in enumerate(dataset.colorinterp, start=1) if kind.name != "alpha"]
            names = _names(dataset, title, bands, places)
            files = tuple(BandFile(path, number) for number in places)
            picked = [i for i, band in enumerate(names) if bands is None or band in bands]
        else:
            names = tuple(band_files)
            files = tuple(BandFile(file) for file in band_files.values())
            picked = list(range(len(names)))
        tags = dataset.tags()
        scales = {(dataset.scales[files[i].index - 1], dataset.offsets[files[i].index - 1]) for i in picked}
        if len(scales) > 1 and band_files is None:
            raise DataError(
                f"{title} stores its bands with different scales and offsets {sorted(scales)}; expected one pair. "
                "Choose bands with --bands, or write them with one scale."
            )
        file_scale, file_offset = next(iter(scales))
        dtype = dataset.dtypes[files[picked[0]].index - 1]
        decided = decide_tags(
            offset,
            scale=file_scale if scale is None else scale,
            offset=file_offset,
            integer=np.issubdtype(np.dtype(dtype), np.integer),
            baseline=tags.get("PROCESSING_BASELINE"),
            name=title,
        )
        if decided.doubt:
            notices.append(f"{title}: {decided.doubt}. Say --offset none or --offset -1000 to settle it.")
        tagged = scale is not None or file_scale != 1.0 or file_offset != 0.0
        highest = None if tagged or not dtype.startswith("float") else _highest(dataset)
        coding = coding_of(
            title,
            dtype=dtype,
            scale=decided.scale if tagged else None,
            offset=decided.offset,
            nodata=dataset.nodata,
            highest=highest,
            declared=tagged,
        )
        date = date_in(title) or date_in(tags.get("ACQUISITION_DATE", "") or tags.get("TIFFTAG_DATETIME", ""))
        source = GeoTiffSource(title, date, names, grid_of(dataset), coding, files)
    return source, notices


def _names(dataset: Any, title: str, bands: Sequence[str] | None, places: Sequence[int]) -> tuple[str, ...]:
    """Return the name of every band of the file; places: their numbers in it, from 1."""
    written = names_of_file([dataset.descriptions[place - 1] for place in places])
    if written is None:
        colours = [dataset.colorinterp[place - 1].name for place in places]
        if colours[:3] == ["red", "green", "blue"]:
            written = names_of_file([c if c in ("red", "green", "blue", "nir") else None for c in colours])
    if bands is not None and (written is None or not set(bands) <= set(written)):
        if len(bands) != len(places):
            has = "no names" if written is None else f"the names {_short(written)}"
            raise BandError(
                f"--bands gives {len(bands)} names ({_short(bands)}), but {title} has {len(places)} bands with "
                f"{has}. Give one name for each band of the file, or choose among its own names."
            )
        return tuple(bands)
    if written is None:
        raise BandError(
            f"the {len(places)} bands of {title} have no names, and bands are never guessed by position. Say which "
            f"they are, in the file's order: --bands B02,B03,B04,B08, or a preset: {', '.join(PRESETS)}."
        )
    return written


def _short(names: Sequence[str], most: int = 16) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _highest(dataset: Any) -> float | None:
    """Return a high percentile of a few rows of the first band, to tell counts from reflectance."""
    shape = (min(SAMPLE, dataset.height), min(SAMPLE, dataset.width))
    values = dataset.read(1, out_shape=shape)
    values = values[np.isfinite(values) & (values != (np.nan if dataset.nodata is None else dataset.nodata))]
    return float(np.percentile(values, 99)) if values.size else None
