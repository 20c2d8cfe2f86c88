"""The images of a scene, and each on disk: rows appended to a plain file, then turned into a Cloud Optimized GeoTIFF.

A TIFF that is half written is lost when its process is killed, because its directory comes last. A plain file of rows
is not, so the result grows there. GDAL compresses it into the COG, with overviews that are computed here in threads
while rows are added.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from colorsys import hsv_to_rgb
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from numpy.typing import NDArray

from sader.errors import SaderError, require
from sader.files import replace, sync_folder, write_atomically, write_error
from sader.geo.grid import Grid, crs_of
from sader.geo.read.raster import open_raster
from sader.geo.scene.options import SceneOptions
from sader.geo.stack import DateSource
from sader.inference.scene import available_cores
from sader.inference.values import FILLED, NODATA, UNKNOWN, ValueCoding, fill_value

GDAL_TYPES = {
    "uint8": "Byte", "int8": "Int8", "uint16": "UInt16", "int16": "Int16", "uint32": "UInt32", "int32": "Int32",
    "float32": "Float32", "float64": "Float64",
}  # fmt: skip
BLOCK = 512
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""The transform of an image without georeference."""
LEVEL = 1
"""Of the compression: behind the predictor, higher levels take longer and save next to nothing."""
CACHE_BYTES = 256 * 2**20
"""Block cache of GDAL while a file is written."""
OVERVIEW_ROWS = 32
"""Rows of an overview computed at a time by one thread."""
CHECKERS = 8
"""Threads that compare an image with its rows, at most: each needs twice the memory of 512 rows."""
NEARLY_FULL = 2**20
"""Free bytes below which a failed write is put down to a full disk."""


@dataclass(frozen=True)
class Layer:
    """One image to be written: its name, its coding, the meaning of its bands."""

    name: str
    """"result", "uncertainty", "count", "masks", "provenance" or "source_date"."""
    bands: tuple[str, ...]
    coding: ValueCoding
    categories: bool = False
    """Its numbers are classes: overviews take the nearest pixel instead of the mean."""
    legend: tuple[tuple[str, tuple[int, int, int, int]], ...] = ()
    """Name and colour (red, green, blue, alpha) of each class from 0 on."""

    def bytes_for(self, grid: Grid) -> int:
        """Return the size of all its pixels."""
        return grid.width * grid.height * len(self.bands) * np.dtype(self.coding.dtype).itemsize


class RowFile:
    """The rows of a layer in a plain file: row after row, and in each row band after band."""

    def __init__(self, path: Path, layer: Layer, grid: Grid) -> None:
        self.path, self.layer, self.grid = path, layer, grid
        self.dtype = np.dtype(layer.coding.dtype).newbyteorder("<")
        self.line = grid.width * len(layer.bands) * self.dtype.itemsize
        """Bytes of one row."""
        self.ready = 0
        """Rows of an overview that are computed."""

    def create(self) -> None:
        """Create the file at its full size; the disk provides blocks only when they are written."""
        with open(self.path, "wb") as file:
            file.truncate(self.layer.bytes_for(self.grid))

    def write(self, row: int, lines: NDArray[Any], *, sync: bool = True) -> int:
        """Write rows (n, C, W) from `row` on and return their checksum. sync: wait until they are on the disk."""
        content = np.ascontiguousarray(lines, dtype=self.dtype).data.cast("B")
        with open(self.path, "r+b") as file:
            file.seek(row * self.line)
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        return zlib.crc32(content)

    def checksum(self, row: int, count: int) -> int | None:
        """Return the checksum of rows on the disk; None where the file is missing or has another size."""
        try:
            if self.path.stat().st_size != self.layer.bytes_for(self.grid):
                return None
            with open(self.path, "rb") as file:
                file.seek(row * self.line)
                return zlib.crc32(file.read(count * self.line))
        except OSError:
            return None

    def read(self, row: int, count: int) -> NDArray[Any]:
        """Return rows (n, C, W) from `row` on."""
        with open(self.path, "rb") as file:
            file.seek(row * self.line)
            content = file.read(count * self.line)
        return np.frombuffer(content, self.dtype).reshape(-1, len(self.layer.bands), self.grid.width)

    @cached_property
    def coarser(self) -> RowFile | None:
        """The image at half its size, at first empty; None where this one fits into one block."""
        if max(self.grid.shape) <= BLOCK:
            return None
        half = RowFile(self.path.with_name(f"{self.path.stem}-half.rows"), self.layer, self.grid.coarser(2))
        half.create()
        return half

    @property
    def overviews(self) -> list[RowFile]:
        """The image at half, a quarter ... of its size."""
        return [] if self.coarser is None else [self.coarser, *self.coarser.overviews]

    def extend_overviews(self, ready: int) -> None:
        """Compute the overviews as far as the first `ready` rows of the image suffice."""
        finer = self
        with ThreadPoolExecutor(available_cores(), "sader-cog") as pool:
            for coarser in self.overviews:

                def reduced(top: int, count: int, finer: RowFile = finer) -> NDArray[Any]:
                    return halved(finer.read(2 * top, 2 * count), finer.layer)

                ready = coarser.grid.height if ready == finer.grid.height else ready // 2
                tops = range(coarser.ready, ready, OVERVIEW_ROWS)
                counts = [min(OVERVIEW_ROWS, ready - top) for top in tops]
                for top, lines in zip(tops, pool.map(reduced, tops, counts), strict=True):
                    coarser.write(top, lines, sync=False)
                finer, coarser.ready = coarser, ready

    def as_vrt(self, tags: Mapping[str, str], overviews: Sequence[RowFile] = ()) -> str:
        """Return the XML by which GDAL reads the file as an image with its metadata."""
        grid, layer, size = self.grid, self.layer, self.dtype.itemsize
        lines = [f'<VRTDataset rasterXSize="{grid.width}" rasterYSize="{grid.height}">']
        if grid.crs:
            lines.append(f'<SRS dataAxisToSRSAxisMapping="1,2">{escape(crs_of(grid.crs).to_wkt())}</SRS>')
        if grid.crs or grid.transform != IDENTITY:
            a, b, c, d, e, f = grid.transform
            lines.append(f"<GeoTransform>{', '.join(repr(float(v)) for v in (c, a, b, f, d, e))}</GeoTransform>")
        items = "".join(f"<MDI key={quoteattr(key)}>{escape(value)}</MDI>" for key, value in tags.items())
        lines.append(f"<Metadata>{items}</Metadata>")
        coding = layer.coding
        for number, band in enumerate(layer.bands):
            lines.append(
                f'<VRTRasterBand dataType="{GDAL_TYPES[coding.dtype]}" band="{number + 1}" subClass="VRTRawRasterBand">'
                f"<Description>{escape(band)}</Description>"
                + ("" if coding.nodata is None else f"<NoDataValue>{coding.nodata!r}</NoDataValue>")
                + self._legend()
                + (f"<Offset>{coding.offset!r}</Offset><Scale>{coding.scale!r}</Scale>" if coding.declared else "")
                + f'<SourceFilename relativeToVRT="1">{escape(self.path.name)}</SourceFilename>'
                f"<ImageOffset>{number * grid.width * size}</ImageOffset>"
                f"<PixelOffset>{size}</PixelOffset><LineOffset>{self.line}</LineOffset><ByteOrder>LSB</ByteOrder>"
                + "".join(
                    f'<Overview><SourceFilename relativeToVRT="1">{escape(one.path.with_suffix(".vrt").name)}'
                    f"</SourceFilename><SourceBand>{number + 1}</SourceBand></Overview>"
                    for one in overviews
                )
                + "</VRTRasterBand>"
            )
        return "\n".join([*lines, "</VRTDataset>"])

    def _legend(self) -> str:
        """Return the colour table and the names of the classes; GDAL keeps the names in a file NAME.tif.aux.xml."""
        if not self.layer.legend:
            return ""
        colours = ((f'c{number}="{part}"' for number, part in enumerate(one, start=1)) for _, one in self.layer.legend)
        entries = "".join(f"<Entry {' '.join(colour)}/>" for colour in colours)
        names = "".join(f"<Category>{escape(name)}</Category>" for name, _ in self.layer.legend)
        table = f"<ColorInterp>Palette</ColorInterp><ColorTable>{entries}</ColorTable>"
        return f"{table}<CategoryNames>{names}</CategoryNames>"


def make_cog(rows: RowFile, *, tags: Mapping[str, str]) -> Path:
    """Write the rows as a Cloud Optimized GeoTIFF beside them and return its path."""
    rasterio = require("rasterio", extra="geo", purpose="writing GeoTIFF")
    copy = require("rasterio.shutil", extra="geo", purpose="writing GeoTIFF").copy
    vrt, target = rows.path.with_suffix(".vrt"), rows.path.with_suffix(".tif")
    settings = {"GDAL_TIFF_INTERNAL_MASK": True, "GDAL_CACHEMAX": CACHE_BYTES, "GDAL_NUM_THREADS": "ALL_CPUS"}
    with writing(target), rasterio.Env(**settings):
        rows.extend_overviews(rows.grid.height)
        overviews = rows.overviews
        for one in overviews:
            write_atomically(one.path.with_suffix(".vrt"), one.as_vrt({}).encode())
        write_atomically(vrt, rows.as_vrt(tags, overviews).encode())
        copy(
            str(vrt),
            str(target),
            driver="COG",
            compress="DEFLATE",
            level=LEVEL,
            predictor="YES",
            blocksize=BLOCK,
            bigtiff="IF_SAFER",
        )
        with open(target, "rb") as file, ThreadPoolExecutor(1, "sader-sync") as pool:
            synced = pool.submit(os.fsync, file.fileno())
            _check_written(rows, target)
            synced.result()
        sync_folder(target.parent)
        for one in overviews:
            one.path.unlink()
    return target


def publish_cog(made: Path, target: Path) -> None:
    """Move a COG to its name, after the names of its classes, which GDAL keeps beside it; a moved one is left out."""
    for suffix in (".aux.xml", ""):
        part = made.with_name(made.name + suffix)
        if part.exists():
            replace(part, target.with_name(target.name + suffix))


def _check_written(rows: RowFile, target: Path) -> None:
    """Compare the image with its rows: on a full disk GDAL may write a damaged file and report no error."""

    bits = f"<u{rows.dtype.itemsize}"  # NaN does not equal itself

    def equal(top: int) -> bool:
        wanted = rows.read(top, BLOCK).swapaxes(0, 1)
        with open_raster(target) as dataset:
            found = dataset.read(window=((top, top + wanted.shape[1]), (0, rows.grid.width)))
        return all(np.array_equal(a.view(bits), b.view(bits)) for a, b in zip(found, wanted, strict=True))

    with ThreadPoolExecutor(min(CHECKERS, available_cores()), "sader-cog") as pool:
        if not all(pool.map(equal, range(0, rows.grid.height, BLOCK))):
            raise OSError("the image differs from its rows")


def halved(lines: NDArray[Any], layer: Layer) -> NDArray[Any]:
    """Return rows (n, C, W) at half their size: means of the pixels with data, or every second pixel of classes."""
    if layer.categories:
        return lines[::2, :, ::2]
    padded = np.pad(lines, ((0, len(lines) % 2), (0, 0), (0, lines.shape[2] % 2)), mode="edge")
    nodata = layer.coding.nodata
    cells = [padded[row::2, :, col::2] for row in (0, 1) for col in (0, 1)]
    count, mean = np.zeros(cells[0].shape, np.uint8), np.zeros(cells[0].shape)
    for cell in cells:
        seen = np.isfinite(cell) if nodata is None or np.isnan(nodata) else cell != nodata
        count += seen
        mean += np.where(seen, cell, cell.dtype.type(0))
    mean /= np.maximum(count, 1)
    if layer.coding.is_integer:
        np.floor(mean + 0.5, out=mean)
        if nodata is not None:
            mean[mean == nodata] += 1  # a mean that happens to be the nodata value
    return np.where(count > 0, mean, fill_value(layer.coding)).astype(lines.dtype)


@contextmanager
def writing(target: Path | str) -> Iterator[None]:
    """Turn errors of writing into an `OutputError` with advice."""
    try:
        yield
    except SaderError:
        raise
    except Exception as error:  # GDAL raises types of its own
        module = type(error).__module__
        if not isinstance(error, OSError) and not module.startswith("rasterio"):
            raise
        full = "No space left" in str(error.__cause__ or error)
        if not full and Path(target).parent.is_dir():
            full = shutil.disk_usage(Path(target).parent).free < NEARLY_FULL
        raise write_error(target, error, full=full) from error


def check_names(bands: Sequence[str]) -> tuple[str, ...]:
    """Return band names without control characters, which XML refuses."""
    return tuple("".join(letter for letter in band if letter.isprintable()) for band in bands)


# ------------------------------------------------------------------------------------------------ the images of a scene

GOLDEN = 0.618
"""Step of the hue from one date to the next: any number of hues stay apart."""
CODES = ValueCoding("uint8", 1.0, 0.0, float(NODATA), declared=False)
"""Provenance and source dates."""
MASKS = ValueCoding("uint8", 1.0, 0.0, float(UNKNOWN), declared=False)
"""Masks and counts of clear dates."""
SPREAD = ValueCoding("float32", 1.0, 0.0, float("nan"), declared=False)

PROVENANCE_LEGEND = (
    ("nodata", (128, 128, 128, 0)),
    ("observed", (28, 46, 84, 255)),
    ("reconstructed", (245, 245, 245, 255)),
)
"""Name and colour of `NODATA`, `OBSERVED` and `RECONSTRUCTED`."""


def side_file(target: Path, name: str) -> Path:
    """Return the path of a layer beside the output: clear.tif -> clear_count.tif."""
    return target.with_name(f"{target.stem}_{name}{target.suffix}")


def layers_of(
    bands: Sequence[str], coding: ValueCoding, options: SceneOptions, sources: Sequence[DateSource] = ()
) -> tuple[Layer, ...]:
    """Return the images to write. coding: of the result; sources: the dates, by which masks and codes are named."""
    bands = check_names(bands)
    layers = [Layer("result", bands, coding)]
    if options.uncertainty:
        layers.append(Layer("uncertainty", tuple(f"{band} standard deviation" for band in bands), SPREAD))
    if options.count:
        layers.append(Layer("count", ("clear observations",), MASKS, categories=True))
    if options.save_masks:
        layers.append(Layer("masks", check_names([one.name for one in sources]), MASKS, categories=True))
    if options.provenance:
        meaning = ("provenance: 0 nodata, 1 observed, 2 reconstructed",)
        layers.append(Layer("provenance", meaning, CODES, categories=True, legend=PROVENANCE_LEGEND))
    if options.source_date:
        meaning = ("date that contributes most",)
        layers.append(Layer("source_date", meaning, CODES, categories=True, legend=source_legend(sources)))
    return tuple(layers)


def source_legend(sources: Sequence[DateSource]) -> tuple[tuple[str, tuple[int, int, int, int]], ...]:
    """Return name and colour of each code of the layer of source dates."""
    dates = []
    for number, source in enumerate(sources):
        red, green, blue = (round(255 * part) for part in hsv_to_rgb(0.6 + GOLDEN * number, 0.6, 0.9))
        dates.append((check_names([source.day or source.name])[0], (red, green, blue, 255)))
    unused = [("", (0, 0, 0, 0))] * (FILLED - 1 - len(dates))
    return PROVENANCE_LEGEND[NODATA], *dates, *unused, ("no date", (40, 40, 40, 255))
