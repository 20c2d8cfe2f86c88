"""GeoTIFF and its like: one acquisition read by window and warped where needed; a whole image written.

Not from the paper. Files are opened when they are first read, once per thread, and a source holds paths only, so that
it can be sent to another process. Writing a large result by window and as COG is in `sader.geo.scene.cog`.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from sader.bands import canonical
from sader.errors import DataError, ShapeError, require
from sader.files import write_atomically, write_error
from sader.geo.grid import Affine6, Grid, bounds_in
from sader.geo.read.quality import LAYOUTS, kind_in
from sader.geo.stack import DateSource
from sader.inference.tiling import Window
from sader.inference.values import ValueCoding

OPEN_FILES = 64
"""Files kept open per thread."""
COARSE = 1.5
"""Pixels of the target this many times the source's are means of them; else they are interpolated."""
SURE_CODE = 90
"""Confidence, of 100, from which on PROJ's guess of a reference system's code is taken for it."""
_local = threading.local()


@dataclass(frozen=True)
class BandFile:
    """One band: a file and the band's number in it, from 1."""

    path: str
    index: int = 1


@dataclass(frozen=True)
class GeoTiffSource(DateSource):
    """One acquisition in one file, or in one file per band, in any format that GDAL reads."""

    name: str
    date: datetime | None
    bands: tuple[str, ...]
    grid: Grid
    coding: ValueCoding
    files: tuple[BandFile, ...]
    """In the order of `bands`."""

    def read_numbers(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        """Return the stored numbers (C, h, w), each band in its own coding; warped where `grid` is another one."""
        chosen = [self.files[self.position(band)] for band in bands]
        codings = self.codings(bands)
        if len({(file.path, coding) for file, coding in zip(chosen, codings, strict=True)}) == 1:
            # In one call: in pixel-interleaved files each band would be unpacked once for every other.
            indexes = [file.index for file in chosen]
            return read_bands(chosen[0].path, indexes, window, grid=grid, coding=codings[0])
        pairs = zip(chosen, codings, strict=True)
        return np.stack([read_band(file, window, grid=grid, coding=coding) for file, coding in pairs])

    def read_classes(self, window: Window, *, grid: Grid, kind: str = "scl") -> NDArray[Any] | None:
        """Return the band (h, w) that has the name of a kind, such as SCL or QA60; None where the file has none."""
        found = [file for band, file in zip(self.bands, self.files, strict=True) if kind_in(band) == kind]
        if not found:
            return None
        return read_band(found[0], window, grid=grid, coding=LAYOUTS[kind].coding, categories=True)

    def block_shape(self, bands: Sequence[str], grid: Grid) -> tuple[int, int] | None:
        return largest_block([self.files[self.position(band)] for band in bands], grid)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file.path for file in self.files))


def largest_block(files: Sequence[BandFile], grid: Grid) -> tuple[int, int] | None:
    """Return (height, width) that holds one block of each file; None where one of them does not lie on `grid`."""
    found = set()
    for path in {file.path for file in files}:
        with reading(path):
            dataset = opened(path)
            if not grid_of(dataset).same_as(grid):
                return None
            found.add(dataset.block_shapes[0])
    height, width = (max(edge) for edge in zip(*found, strict=True))
    return height, width


def read_band(
    file: BandFile, window: Window, *, grid: Grid, coding: ValueCoding, categories: bool = False
) -> NDArray[Any]:
    """Return the numbers (h, w) of one band in a window of `grid`; see `read_bands`."""
    return read_bands(file.path, [file.index], window, grid=grid, coding=coding, categories=categories)[0]


def read_bands(
    path: str, indexes: Sequence[int], window: Window, *, grid: Grid, coding: ValueCoding, categories: bool = False
) -> NDArray[Any]:
    """Return the numbers (C, h, w) of some bands of a file in a window of `grid`.

    categories: they are classes (a mask), so the nearest pixel is taken instead of a mean.
    """
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    wanted = list(indexes)
    with reading(path):
        dataset = opened(path)
        place = rasterio.windows.Window(window.col, window.row, window.width, window.height)
        if grid_of(dataset).same_as(grid):
            numbers = dataset.read(wanted, window=place)
            outside = _outside(dataset, wanted, place)
            return numbers if outside is None else np.where(outside, _nothing(coding), numbers).astype(numbers.dtype)
        with _warped(dataset, grid, coding, categories) as warped:
            numbers = warped.read(wanted, window=place)
            if coding.nodata is not None:
                return numbers  # what lies outside the file, its mask or its alpha band has been given that value
            # Without a nodata value only the mask of the warped image marks what lies outside.
            outside = warped.read_masks(wanted, window=place) == 0
        if np.issubdtype(numbers.dtype, np.floating):
            outside &= np.isfinite(numbers)
        return np.where(outside, _nothing(coding), numbers).astype(numbers.dtype)


def alpha_band(dataset: Any) -> int | None:
    """Return the number, from 1, of the band that marks valid pixels; None without one.

    Many programs mark the fourth band of any file as alpha, or the second: one with a band's name is what its name
    says.
    """
    for number, kind in enumerate(dataset.colorinterp, start=1):
        if kind.name == "alpha" and canonical(dataset.descriptions[number - 1] or "") is None:
            return number
    return None


def has_mask(dataset: Any, index: int = 1) -> bool:
    """Whether a mask in the file or beside it marks valid pixels (rather than a nodata value, or nothing)."""
    return not {flag.name for flag in dataset.mask_flag_enums[index - 1]} & {"all_valid", "nodata", "alpha"}


def _outside(dataset: Any, wanted: Sequence[int], place: Any) -> NDArray[np.bool_] | None:
    """Return the pixels (1 or C, h, w) that an alpha band or a mask marks as nodata; None without either."""
    alpha = alpha_band(dataset)
    if alpha is not None and alpha not in wanted:
        # Not left to GDAL's masks: those know an alpha band in files of two or four bands only.
        return np.asarray(dataset.read([alpha], window=place) == 0)
    if not has_mask(dataset, wanted[0]):
        return None
    return np.asarray(dataset.read_masks(list(wanted), window=place) == 0)


def _nothing(coding: ValueCoding) -> float:
    return 0.0 if coding.nodata is None else coding.nodata


@contextmanager
def _warped(dataset: Any, grid: Grid, coding: ValueCoding, categories: bool) -> Iterator[Any]:
    rasterio = require("rasterio", extra="geo", purpose="warping")
    vrt = require("rasterio.vrt", extra="geo", purpose="warping")
    ways = require("rasterio.enums", extra="geo", purpose="warping").Resampling
    own = grid_of(dataset)
    if bool(own.crs) != bool(grid.crs):
        raise DataError(
            f"{dataset.name} has {'a' if own.crs else 'no'} reference system and the target grid has "
            f"{'one' if grid.crs else 'none'}; they cannot be laid over each other. Georeference both or neither."
        )
    way = ways.nearest if categories else ways.average if _much_finer(own, grid) else ways.bilinear
    crs = grid.crs or "EPSG:3857"  # images without a place share a plane; the warper only wants a name for it
    with vrt.WarpedVRT(
        dataset,
        src_crs=own.crs or crs,
        crs=crs,
        transform=rasterio.Affine(*grid.transform),
        width=grid.width,
        height=grid.height,
        resampling=way,
        src_nodata=coding.nodata,
        nodata=coding.nodata,
    ) as warped:
        yield warped


def _much_finer(own: Grid, grid: Grid) -> bool:
    """Whether the target's pixels are clearly larger than the file's, both measured on the target's map."""
    if own.crs == grid.crs:
        return min(grid.resolution) > COARSE * max(own.resolution)
    left, bottom, right, top = bounds_in(own.crs, grid.crs, own.bounds)
    return min(grid.resolution) > COARSE * max((right - left) / own.width, (top - bottom) / own.height)


def grid_of(dataset: Any) -> Grid:
    """Return the grid of an open rasterio dataset."""
    a, b, c, d, e, f = tuple(dataset.transform)[:6]
    return Grid(crs_text(dataset.crs), (a, b, c, d, e, f), dataset.width, dataset.height)


def crs_text(crs: Any) -> str:
    """Return "EPSG:32632" where there is a code, else WKT; "" for none."""
    return _crs_name(str(crs.to_wkt())) if crs else ""


@lru_cache(maxsize=256)  # a search through all codes takes 35 ms and is needed for every window
def _crs_name(wkt: str) -> str:
    """Return the code that means exactly this reference system, else the WKT itself.

    A likely code is not enough: UTM on the international ellipsoid need not be ED50, which lies 100 m beside others.
    """
    kind = require("rasterio.crs", extra="geo", purpose="reading GeoTIFF").CRS
    crs = kind.from_wkt(wkt)
    authority = crs.to_authority(confidence_threshold=SURE_CODE)
    if authority is None:
        likely = crs.to_authority()
        authority = likely if likely and kind.from_authority(*likely) == crs else None
    return ":".join(authority) if authority else wkt


def open_raster(path: str | Path) -> Any:
    """Return the dataset of `path`, which the caller closes."""
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    check_regular(path)
    with warnings.catch_warnings():
        # Images without georeference are allowed; `build_stack` notifies the user.
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        return rasterio.open(path)


def check_regular(path: str | Path) -> None:
    """Refuse a local path that is neither a file nor a folder: reading a pipe would wait for ever."""
    try:
        str(path).encode("utf-8")
        mode = os.stat(path).st_mode
    except UnicodeEncodeError as error:
        raise DataError(f"the name {path} is not valid UTF-8, which GDAL needs. Rename the file.") from error
    except (OSError, ValueError):
        return  # an address or a path inside an archive
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(f"{path} is a pipe, socket or device; expected a raster file. Write its content to a file.")


def opened(path: str) -> Any:
    """Return the dataset of `path`, opened once per thread and process; the longest unused one is closed."""
    if getattr(_local, "process", None) != os.getpid():  # handles do not survive a fork
        _local.process, _local.files = os.getpid(), OrderedDict()
    files: OrderedDict[tuple[str, int, int], Any] = _local.files
    key = (path, *_version(path))
    if key not in files:
        files[key] = open_raster(path)
    files.move_to_end(key)
    while len(files) > OPEN_FILES:
        files.popitem(last=False)[1].close()
    return files[key]


def _version(path: str) -> tuple[int, int]:
    """Return size and time of a local file, so that a file that was replaced is opened again; 0 for remote files."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return 0, 0
    return facts.st_size, facts.st_mtime_ns


def close_files() -> None:
    """Close the files this thread has open."""
    files: OrderedDict[Any, Any] = getattr(_local, "files", None) or OrderedDict()
    while files:
        files.popitem()[1].close()


def shown(text: str) -> str:
    """Return a path, or words of GDAL about one, as a person would write it: addresses without /vsicurl and signature.

    What follows the question mark of an address may be a key to the archive; messages end up in logs.
    """
    return re.sub(
        r"/vsicurl[?/](?:[^\s'\"]*?url=)?([^\s'\"]+)", lambda found: unquote(found[1]).partition("?")[0], text
    )


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn the errors of GDAL about an unreadable file into a `DataError`."""
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    try:
        yield
    except (rasterio.errors.RasterioError, rasterio.errors.CRSError, OSError) as error:
        reason = shown(str(error.__cause__ or error).strip().rstrip("."))
        raise DataError(
            f"cannot read {shown(name)}: {reason}. The file is missing, damaged, half-written or of another kind; "
            "copy or download it again."
        ) from error


SCALE = 1e-4
NODATA = 0


def to_digital_numbers(image: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Return reflectance (C, H, W) as uint16 counts: round(reflectance * 10000), NaN -> 0 = nodata.

    A valid pixel is at least 1, so that a black one never turns into nodata; above 6.5535 it is cut.
    """
    counts = np.clip(np.rint(np.asarray(image, np.float64) / SCALE), NODATA + 1, np.iinfo(np.uint16).max)
    return np.where(np.isfinite(image), counts, NODATA).astype(np.uint16)


def write_geotiff(
    path: Path | str,
    image: NDArray[np.floating],
    *,
    bands: Sequence[str],
    crs: str,
    transform: Affine6,
    tags: Mapping[str, str] | None = None,
) -> Path:
    """Write reflectance (C, H, W) to `path` and return it; the file appears under its name only when it is whole.

    crs: for example "EPSG:32632".
    transform: the affine (a, b, c, d, e, f) with x = a col + b row + c and y = d col + e row + f, in CRS units.
    tags: free text kept in the file.
    """
    rasterio = require("rasterio", extra="geo", purpose="writing GeoTIFF")
    if image.ndim != 3 or image.shape[0] != len(bands):
        raise ShapeError(f"image has shape {image.shape} for {len(bands)} band names; expected ({len(bands)}, H, W).")
    target = Path(path)
    try:
        target.parent.stat()  # a folder that is missing is not created
        with rasterio.MemoryFile() as memory:
            with memory.open(
                driver="GTiff",
                count=image.shape[0],
                height=image.shape[1],
                width=image.shape[2],
                dtype="uint16",
                crs=crs,
                transform=rasterio.Affine(*transform),
                nodata=NODATA,
                tiled=True,
                blockxsize=256,
                blockysize=256,
                compress="deflate",
                predictor=2,
            ) as dataset:
                dataset.write(to_digital_numbers(image))
                dataset.descriptions = tuple(bands)
                dataset.scales = (SCALE,) * len(bands)
                dataset.offsets = (0.0,) * len(bands)
                dataset.update_tags(**(tags or {}))
            write_atomically(target, memory.read())
    except (FileNotFoundError, rasterio.errors.RasterioError, rasterio.errors.CRSError) as error:
        raise write_error(target, error) from error
    return target
