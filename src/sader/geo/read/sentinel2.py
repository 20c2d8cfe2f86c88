"""Sentinel-2 products as ESA delivers them: the .SAFE folder, L1C and L2A, of old and new naming.

    S2A_MSIL2A_20220310T103749_N0400_R008_T32TMS_20220310T140453.SAFE
        MTD_MSIL2A.xml                                          baseline, offsets, scale, sensing time
        GRANULE/L2A_T32TMS_A035071_20220310T103950/
            MTD_TL.xml
            IMG_DATA/R10m/T32TMS_20220310T103749_B02_10m.jp2    L1C: IMG_DATA/T32TMS_20220310T103749_B02.jp2
            IMG_DATA/R20m/T32TMS_20220310T103749_SCL_20m.jp2    scene classification

Products before December 2016 have longer names (S2A_OPER_...) and several tiles in one folder. Reading is done by
`sader.geo.read.products`, the decision about the offset by `sader.geo.offset`.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from sader.bands import BANDS_13
from sader.errors import BandError, DataError
from sader.files import files_under
from sader.geo.offset import QUANTIFICATION, decide_product
from sader.geo.read.products import ProductSource, product_source
from sader.geo.read.raster import BandFile
from sader.inference.values import ValueCoding

LARGEST_XML = 100 * 2**20
"""Bytes; the largest real metadata file is below 1 MiB."""


@dataclass(frozen=True)
class Sentinel2Band:
    """One band of the MSI instrument."""

    name: str
    wavelength: float
    """Centre in nm, Sentinel-2A; B and C differ by a few nm."""
    width: float
    """Full width at half maximum in nm."""
    resolution: int
    """Native pixel in m."""
    common_name: str
    """STAC's word for it."""


BANDS: dict[str, Sentinel2Band] = {
    band.name: band
    for band in (
        Sentinel2Band("B01", 442.7, 20.0, 60, "coastal"),
        Sentinel2Band("B02", 492.7, 65.0, 10, "blue"),
        Sentinel2Band("B03", 559.8, 35.0, 10, "green"),
        Sentinel2Band("B04", 664.6, 30.0, 10, "red"),
        Sentinel2Band("B05", 704.1, 14.0, 20, "rededge071"),
        Sentinel2Band("B06", 740.5, 14.0, 20, "rededge075"),
        Sentinel2Band("B07", 782.8, 19.0, 20, "rededge078"),
        Sentinel2Band("B08", 832.8, 105.0, 10, "nir"),
        Sentinel2Band("B8A", 864.7, 21.0, 20, "nir08"),
        Sentinel2Band("B09", 945.1, 19.0, 60, "nir09"),
        Sentinel2Band("B10", 1373.5, 29.0, 60, "cirrus"),
        Sentinel2Band("B11", 1613.7, 90.0, 20, "swir16"),
        Sentinel2Band("B12", 2202.4, 174.0, 20, "swir22"),
    )
}
"""In the order of the metadata's band numbers 0 to 12 (SentiWiki's table of spectral bands)."""

_BAND_FILE = re.compile(r"_(B(?:0[1-9]|1[0-2]|8A))(?:_(10|20|60)m)?\.jp2$", re.IGNORECASE)
_CLASS_FILE = re.compile(r"(?:_SCL_(20|60)m|_SCL_L2A_.*_(20|60)m)\.jp2$", re.IGNORECASE)
_PRODUCT_FILE = re.compile(r"MTD_(?:MSI|SAF)(L\d\w{1,2})(?:_|\.)", re.IGNORECASE)
_TILE = re.compile(r"_(T\d{2}[A-Z]{3})(?:_|$)")


@dataclass(frozen=True)
class ProductInfo:
    """Content of the metadata file of a product."""

    level: str
    """"L1C" or "L2A"."""
    name: str
    date: datetime
    baseline: str | None
    quantification: float
    offsets: dict[str, float] = field(default_factory=dict)
    """Band -> BOA_ADD_OFFSET or RADIO_ADD_OFFSET in counts; empty before baseline 04.00."""
    files: tuple[str, ...] = ()
    """Names of the image files the product should have, without folder and suffix."""


def open_safe(
    path: Path | str,
    offset: str | float | None = "auto",
    *,
    bands: Sequence[str] | None = None,
    notice: Callable[[str], None] | None = None,
) -> ProductSource:
    """Return the acquisition in a .SAFE folder (or in one tile of it: its GRANULE/... folder, or its MTD_MSI*.xml).

    offset: auto, none or counts such as -1000; auto takes what the metadata list.
    bands: those wanted, where the folder does not hold all that its metadata list.
    notice: called with messages for the user; default: a warning.
    """
    root, tile = _find_root(Path(path))
    info = read_product_info(_find_metadata(root))
    granule = _find_granule(root, tile)
    found, classes = _find_images(granule)
    wanted = _wanted_bands(root, info, granule, found, bands)
    ways = {
        band: decide_product(
            offset,
            listed=info.offsets.get(band),
            baseline=info.baseline or info.name,
            quantification=info.quantification,
            where=f"the metadata of {info.name}",
        )
        for band in wanted
    }
    for doubt in sorted({way.doubt for way in ways.values() if way.doubt}):
        (notice or warnings.warn)(f"{root.name}: {doubt}. Give --offset none or --offset -1000 to settle it.")
    return product_source(
        info.name,
        info.date,
        wanted,
        [BandFile(str(found[band])) for band in wanted],
        [ValueCoding("uint16", ways[band].scale, ways[band].offset, 0.0) for band in wanted],
        classes=BandFile(str(classes)) if classes else None,
        reason=ways[wanted[0]].reason,
        href=str(root),
    )


def is_safe(path: Path | str) -> bool:
    """Whether a path looks like a Sentinel-2 product, so that its errors should be those of `open_safe`."""
    path = Path(path)
    if re.search(r"\.SAFE(\.zip)?$", path.name, re.IGNORECASE) or re.match(r"S2[A-D]_MSIL\d\w+_.*\.zip$", path.name):
        return True
    if path.is_file():
        return bool(path.suffix.lower() == ".xml" and _PRODUCT_FILE.search(path.name))
    return path.is_dir() and (any(_metadata_files(path)) or path.parent.name == "GRANULE")


def read_product_info(path: Path) -> ProductInfo:
    """Return the content of MTD_MSIL1C.xml or MTD_MSIL2A.xml; refuse other levels."""
    root = parse_xml(path)
    level = _text(root, "PROCESSING_LEVEL") or root.tag
    short = re.search(r"Level-?(\d\w)", level)
    kind = f"L{short[1].upper()}" if short else level
    if kind not in ("L1C", "L2A"):
        raise DataError(
            f"{path.parent.name} is a {kind} product; expected L1C or L2A. Download that level of the scene."
        )
    uri = _text(root, "PRODUCT_URI_2A") or _text(root, "PRODUCT_URI") or ""
    name = uri.removesuffix(".SAFE") if uri.startswith("S2") else path.parent.name.removesuffix(".SAFE")
    scale = _text(root, "BOA_QUANTIFICATION_VALUE" if kind == "L2A" else "QUANTIFICATION_VALUE")
    quantification = _number(scale, path, "the quantification value") if scale else QUANTIFICATION
    if quantification <= 0:
        raise DataError(f"{path} has quantification value {quantification:g}; expected a positive one such as 10000.")
    return ProductInfo(
        level=kind,
        name=name,
        date=_sensing_time(root, name, path),
        baseline=_text(root, "PROCESSING_BASELINE"),
        quantification=quantification,
        offsets=_offsets(root, path, "BOA_ADD_OFFSET" if kind == "L2A" else "RADIO_ADD_OFFSET"),
        files=tuple(
            (element.text or "").strip().split("/")[-1]
            for element in root.iter()
            if re.fullmatch(r"IMAGE_(?:FILE|ID)(?:_2A)?", element.tag) and element.text
        ),
    )


def parse_xml(path: Path) -> Element:
    """Return the root of an XML file with plain tag names (no namespace, no L2A_ prefix).

    Document types and entities are refused: no Sentinel-2 file has any, and expanding them is how XML attacks work.
    """
    builder = TreeBuilder()
    parser = expat.ParserCreate(namespace_separator="}")

    def refuse(*_: object) -> NoReturn:
        raise DataError(f"{path} declares a document type; Sentinel-2 metadata have none. Download the file again.")

    def plain(tag: str) -> str:
        return tag.rsplit("}", 1)[-1].removeprefix("L2A_")

    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.ExternalEntityRefHandler = refuse
    parser.StartElementHandler = lambda tag, attributes: builder.start(plain(tag), attributes)
    parser.EndElementHandler = lambda tag: builder.end(plain(tag))
    parser.CharacterDataHandler = builder.data
    try:
        if path.stat().st_size > LARGEST_XML:
            raise DataError(f"{path} has {path.stat().st_size / 2**20:.0f} MiB; expected metadata below 100 MiB.")
        parser.Parse(path.read_bytes(), True)
        return builder.close()
    except (expat.ExpatError, OSError) as error:
        raise DataError(
            f"cannot read {path}: {error}. The metadata are damaged or cut short; download the product again."
        ) from error


def _find_root(path: Path) -> tuple[Path, str | None]:
    """Return the .SAFE folder and the tile folder's name where the path points at one tile."""
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a .SAFE folder.")
    if path.is_file():
        if zipfile.is_zipfile(path):
            raise DataError(
                f"{path} is a zip archive; expected the .SAFE folder inside it. Unpack it first: unzip {path.name}"
            )
        if path.suffix.lower() != ".xml":
            raise DataError(f"{path} is a file; expected a .SAFE folder.")
        path = path.parent
    path = path.resolve()
    if path.parent.name == "GRANULE":
        return path.parent.parent, path.name
    return path, None


def _metadata_files(root: Path) -> list[Path]:
    return sorted(file for file in root.glob("*.xml") if _PRODUCT_FILE.search(file.name))


def _find_metadata(root: Path) -> Path:
    files = _metadata_files(root)
    usable = [file for file in files if (_PRODUCT_FILE.search(file.name) or [""])[1].upper() in ("L1C", "L2A")]
    if usable:
        return usable[-1]  # both levels in one folder: L2A, the later name
    if files:
        raise DataError(f"{root} holds {files[0].name}; expected L1C or L2A. Download that level of the scene.")
    inside = ", ".join(sorted(child.name for child in root.iterdir())[:8]) or "nothing"
    nested = next((child for child in root.glob("*.SAFE") if child.is_dir()), None)
    what = (
        f"Did you mean {nested}?" if nested else "Download the whole product: the offset and the date are in that file."
    )
    raise DataError(f"{root} has no MTD_MSIL1C.xml or MTD_MSIL2A.xml (it holds {inside}). {what}")


def _find_granule(root: Path, tile: str | None) -> Path:
    folder = root / "GRANULE"
    granules = sorted(child for child in folder.iterdir() if child.is_dir()) if folder.is_dir() else []
    if tile is not None:
        granules = [granule for granule in granules if granule.name == tile]
    if not granules:
        raise DataError(
            f"{root} has no tile folder under GRANULE; expected one with IMG_DATA. Download the product again."
        )
    if len(granules) > 1:
        tiles = ", ".join((_TILE.search(granule.name) or ["", granule.name])[1] for granule in granules)
        raise DataError(
            f"{root.name} holds {len(granules)} tiles ({tiles}); expected one. Name the one you want: {granules[0]}"
        )
    return granules[0]


def _find_images(granule: Path) -> tuple[dict[str, Path], Path | None]:
    """Return the finest file of each band and the finest scene classification of a tile folder."""
    # R10m before R20m before R60m; the files of L1C are the only ones of their band.
    files = sorted(files_under(granule / "IMG_DATA"), key=lambda file: (file.parent.name, file))
    bands: dict[str, Path] = {}
    for file in files:
        if found := _BAND_FILE.search(file.name):
            bands.setdefault(found[1].upper(), file)
    classes = next((file for file in files if _CLASS_FILE.search(file.name)), None)
    return {band: bands[band] for band in BANDS_13 if band in bands}, classes


def _wanted_bands(
    root: Path, info: ProductInfo, granule: Path, found: dict[str, Path], bands: Sequence[str] | None
) -> list[str]:
    """Return the bands to open; a file that the metadata list and the folder lacks is an error that names it."""
    listed: dict[str, str] = {}
    for name in info.files:
        match = _BAND_FILE.search(f"{name}.jp2")
        if match and (_TILE.search(granule.name) is None or (_TILE.search(granule.name) or [""])[0].strip("_") in name):
            listed.setdefault(match[1].upper(), f"{name}.jp2")
    unknown = [band for band in bands or () if band not in found and band not in listed]
    if unknown:
        raise BandError(
            f"{root.name} ({info.level}) has no {', '.join(unknown)}; it has {', '.join(found) or 'no band file'}."
        )
    wanted = list(bands) if bands else [band for band in BANDS_13 if band in found or band in listed]
    missing = [band for band in wanted if band not in found]
    if missing:
        names = ", ".join(listed[band] for band in missing[:4])
        rest = ",".join(band for band in wanted if band in found)
        what = f", or name those you have: --bands {rest}" if rest and not bands else ""
        raise DataError(
            f"{root.name} lacks {len(missing)} of the {len(wanted)} band files its metadata list ({names}). Download "
            f"the product again{what}."
        )
    if not wanted:
        raise DataError(f"{granule} holds no band files; expected .jp2 under IMG_DATA. Download the product again.")
    empty = [found[band].name for band in wanted if found[band].stat().st_size == 0]
    if empty:
        raise DataError(f"{root.name}: {', '.join(empty)} is empty (0 bytes). Download the product again.")
    return wanted


def _text(root: Element, tag: str) -> str | None:
    for element in root.iter(tag):
        if element.text and element.text.strip():
            return element.text.strip()
    return None


def _number(text: str | None, path: Path, what: str) -> float:
    try:
        return float(text or "")
    except ValueError as error:
        raise DataError(f"{path} has {text!r} as {what}; expected a number. Download the product again.") from error


def _offsets(root: Element, path: Path, tag: str) -> dict[str, float]:
    """Return band -> offset; a table in the metadata assigns numbers to bands."""
    numbers = {str(number): band for number, band in enumerate(BANDS)}
    for element in root.iter("Spectral_Information"):
        physical = re.fullmatch(r"B(\d{1,2}|8A)", element.get("physicalBand", ""))
        if physical and element.get("bandId"):
            numbers[element.get("bandId", "")] = "B8A" if physical[1] == "8A" else f"B{int(physical[1]):02d}"
    found = {}
    for element in root.iter(tag):
        band = numbers.get(element.get("band_id", ""))
        if band is not None:
            found[band] = _number(element.text, path, f"{tag} of {band}")
    return found


def _sensing_time(root: Element, name: str, path: Path) -> datetime:
    for tag in ("DATATAKE_SENSING_START", "PRODUCT_START_TIME"):
        text = _text(root, tag)
        if text:
            try:
                return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)
            except ValueError:
                continue
    found = re.search(r"_(\d{8}T\d{6})(?:_|$)", name)
    if found:
        return datetime.strptime(found[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    raise DataError(f"{path} has no sensing time; expected DATATAKE_SENSING_START. Download the product again.")
