"""A large result on disk: rows written one after the other into a plain file, then turned into a COG.

A TIFF that is half written is lost when its program is killed: its directory comes last. A plain file of rows is not,
so that is what grows while a scene is worked on; GDAL makes the Cloud Optimized GeoTIFF from it, block by block.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from numpy.typing import NDArray

from sader.errors import OutputError, require
from sader.geo.stack import Grid, ValueCoding

GDAL_TYPES = {
    "uint8": "Byte", "int8": "Int8", "uint16": "UInt16", "int16": "Int16", "uint32": "UInt32", "int32": "Int32",
    "float32": "Float32", "float64": "Float64",
}  # fmt: skip
BLOCK = 512
NOWHERE = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""The transform of an image without one."""
LEVEL = 1
"""Of the compression: behind the predictor, higher levels take longer and save next to nothing."""
CACHE_BYTES = 256 * 2**20
"""Blocks kept while a file is made; overviews read what has just been written."""


@dataclass(frozen=True)
class Layer:
    """One image to be written: what it is called, how it is stored, what its bands mean."""

    name: str
    """"result", "uncertainty", "count" or "provenance"."""
    bands: tuple[str, ...]
    coding: ValueCoding
    categories: bool = False
    """Its numbers are classes: overviews take the nearest, not the mean."""

    def bytes_for(self, grid: Grid) -> int:
        """Return the size of all its pixels."""
        return grid.width * grid.height * len(self.bands) * np.dtype(self.coding.dtype).itemsize


class RowFile:
    """The rows of a layer in a plain file: row after row, in each row band after band."""

    def __init__(self, path: Path, layer: Layer, grid: Grid) -> None:
        self.path, self.layer, self.grid = path, layer, grid
        self.dtype = np.dtype(layer.coding.dtype)

    def create(self) -> None:
        """Make the file at its full size; its blocks are taken from the disk only when they are written."""
        with open(self.path, "wb") as file:
            file.truncate(self.layer.bytes_for(self.grid))

    def write(self, row: int, values: NDArray[Any]) -> None:
        """Write rows (C, n, W) from `row` on, and wait until they are on the disk."""
        lines = np.ascontiguousarray(np.moveaxis(values.astype(self.dtype, copy=False), 0, 1))
        with open(self.path, "r+b") as file:
            file.seek(row * self.grid.width * len(self.layer.bands) * self.dtype.itemsize)
            file.write(lines.data.cast("B"))
            file.flush()
            os.fsync(file.fileno())

    def as_vrt(self, tags: Mapping[str, str]) -> str:
        """Return the XML by which GDAL reads the file as an image with all that is known about it."""
        grid, layer, size = self.grid, self.layer, self.dtype.itemsize
        line = grid.width * len(layer.bands) * size
        lines = [f'<VRTDataset rasterXSize="{grid.width}" rasterYSize="{grid.height}">']
        if grid.crs:
            crs = require("rasterio.crs", extra="geo", purpose="writing GeoTIFF").CRS.from_user_input(grid.crs)
            lines.append(f'<SRS dataAxisToSRSAxisMapping="1,2">{escape(crs.to_wkt())}</SRS>')
        if grid.crs or grid.transform != NOWHERE:  # a place in pixels, or on a map that nobody named
            a, b, c, d, e, f = grid.transform
            lines.append(f"<GeoTransform>{', '.join(repr(float(v)) for v in (c, a, b, f, d, e))}</GeoTransform>")
        items = "".join(f"<MDI key={quoteattr(key)}>{escape(value)}</MDI>" for key, value in tags.items())
        lines.append(f"<Metadata>{items}</Metadata>")
        for number, band in enumerate(layer.bands):
            lines.append(
                f'<VRTRasterBand dataType="{GDAL_TYPES[self.dtype.name]}" band="{number + 1}" '
                'subClass="VRTRawRasterBand">'
                f"<Description>{escape(band)}</Description>"
                + ("" if layer.coding.nodata is None else f"<NoDataValue>{layer.coding.nodata!r}</NoDataValue>")
                + (
                    f"<Offset>{layer.coding.offset!r}</Offset><Scale>{layer.coding.scale!r}</Scale>"
                    if layer.coding.declared
                    else ""
                )
                + f'<SourceFilename relativeToVRT="1">{escape(self.path.name)}</SourceFilename>'
                f"<ImageOffset>{number * grid.width * size}</ImageOffset>"
                f"<PixelOffset>{size}</PixelOffset><LineOffset>{line}</LineOffset><ByteOrder>LSB</ByteOrder>"
                "</VRTRasterBand>"
            )
        lines.append("</VRTDataset>")
        return "\n".join(lines)


def make_cog(rows: RowFile, *, tags: Mapping[str, str]) -> Path:
    """Write the rows as a Cloud Optimized GeoTIFF beside them and return its path."""
    rasterio = require("rasterio", extra="geo", purpose="writing GeoTIFF")
    shutil = require("rasterio.shutil", extra="geo", purpose="writing GeoTIFF")
    vrt, target = rows.path.with_suffix(".vrt"), rows.path.with_suffix(".tif")
    with writing(target), rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True, GDAL_CACHEMAX=CACHE_BYTES):
        vrt.write_text(rows.as_vrt(tags), encoding="utf-8")
        way = "NEAREST" if rows.layer.categories else "AVERAGE"
        shutil.copy(
            str(vrt),
            str(target),
            driver="COG",
            compress="DEFLATE",
            level=LEVEL,
            predictor="YES",
            blocksize=BLOCK,
            overview_resampling=way,
            bigtiff="IF_SAFER",
            num_threads="ALL_CPUS",
        )
        with open(target, "rb") as file:
            os.fsync(file.fileno())
    return target


def overview_factors(grid: Grid) -> list[int]:
    """Return the reductions a COG of this size has: by two until it fits into one block."""
    factors: list[int] = []
    while max(grid.shape) / 2 ** len(factors) > BLOCK:
        factors.append(2 ** (len(factors) + 1))
    return factors


@contextmanager
def writing(target: Path | str) -> Iterator[None]:
    """Turn what goes wrong in writing into an `OutputError` that says what to do."""
    rasterio_errors = require("rasterio.errors", extra="geo", purpose="writing GeoTIFF")
    try:
        yield
    except OutputError:
        raise
    except (OSError, rasterio_errors.RasterioError, rasterio_errors.CRSError) as error:
        text = str(error.__cause__ or error)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text
        reason = "the disk is full" if full else (getattr(error, "strerror", None) or text).rstrip(".")
        advice = (
            "Free some space and run the same command again: it goes on from there."
            if full
            else "Choose a folder that can be written to and has room."
        )
        raise OutputError(f"cannot write {target}: {reason}. {advice}") from error


def check_names(bands: Sequence[str]) -> tuple[str, ...]:
    """Return band names without the control characters that XML refuses."""
    return tuple("".join(letter for letter in band if letter.isprintable()) for band in bands)
