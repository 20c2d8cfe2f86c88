"""Landsat Collection 2 (levels 1 and 2) and HLS v2 products: one file per band and a quality band, in one folder.

    LC08_L2SP_090085_20180103_20200902_02_T1_SR_B4.TIF    ..._QA_PIXEL.TIF    reflectance = DN * 0.0000275 - 0.2
    LC08_L1TP_090085_20180103_20200902_02_T1_B4.TIF       ..._MTL.txt         coefficients and sun elevation of the MTL
    HLS.L30.T55HFA.2018003T235103.v2.0.B04.tif            ....Fmask.tif       reflectance = DN * 0.0001

Bands get the name of the Sentinel-2 band that shows about the same wavelengths. Near infrared of Landsat becomes B08,
although it is as narrow as B8A, because all models have B08. Panchromatic and thermal bands are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from sader.errors import BandError, DataError
from sader.geo.read.products import ProductSource, product_source
from sader.geo.read.raster import BandFile
from sader.inference.tiling import Notice
from sader.inference.values import ValueCoding

LANDSAT = re.compile(r"(L[COTE]0([4-9])_(L[12])[A-Z]{2}_\d{6}_(\d{8})_\d{8}_\d{2}_(?:T1|T2|RT))_(\w+)", re.IGNORECASE)
HLS = re.compile(r"(HLS\.([LS]30)\.T\w{5}\.(\d{7}T\d{6})\.v\d+\.\d+)\.(\w+)", re.IGNORECASE)
OLI = {"B1": "B01", "B2": "B02", "B3": "B03", "B4": "B04", "B5": "B08", "B6": "B11", "B7": "B12", "B9": "B10"}
"""Landsat 8 and 9, and HLS L30."""
TM = {"B1": "B02", "B2": "B03", "B3": "B04", "B4": "B08", "B5": "B11", "B7": "B12"}
"""Landsat 4, 5 and 7."""
FIRST_OLI = 8
LEVEL2 = ValueCoding("uint16", 0.0000275, -0.2, 0.0)
HLS_CODING = ValueCoding("int16", 0.0001, 0.0, -9999.0)

Parts = Mapping[str, Path]
"""Last part of the name, in upper case (SR_B4, QA_PIXEL, B04, FMASK, MTL) -> file."""


def products_in(files: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """Return product -> its parts, for the files that belong to products of Landsat or HLS."""
    found: dict[str, dict[str, Path]] = {}
    for path in files:
        name = LANDSAT.fullmatch(path.stem) or HLS.fullmatch(path.stem)
        if name is not None:
            found.setdefault(name[1], {})[name[name.lastindex or 1].upper()] = path
    return found


def open_product(name: str, parts: Parts, *, bands: Sequence[str] | None, notice: Notice) -> ProductSource:
    """Return the acquisition of a product. bands: those that are wanted; None = all that a model may use."""
    landsat = LANDSAT.fullmatch(f"{name}_X")
    if landsat is not None:
        codings = _landsat_bands(
            name, parts, level=landsat[3].upper(), table=OLI if int(landsat[2]) >= FIRST_OLI else TM
        )
        date, quality, kind = datetime.strptime(landsat[4], "%Y%m%d"), parts.get("QA_PIXEL"), "qa_pixel"
    else:
        hls = HLS.fullmatch(f"{name}.X")
        assert hls is not None
        codings = _hls_bands(parts, hls[2].upper())
        date, quality, kind = datetime.strptime(hls[3], "%Y%jT%H%M%S"), parts.get("FMASK"), "fmask"
    chosen = {band: value for band, value in codings.items() if bands is None or band in bands}
    if not chosen:
        raise BandError(
            f"{name} has {', '.join(codings) or 'no band of reflectance'}; wanted: {', '.join(bands or ('B02',))}. "
            "Copy the missing band files into the folder."
        )
    if quality is None:
        notice(f"{name} has no {kind.upper()} file: the model estimates its clouds.")
    return product_source(
        name,
        date,
        list(chosen),
        [BandFile(str(path)) for path, _ in chosen.values()],
        [coding for _, coding in chosen.values()],
        classes=None if quality is None else BandFile(str(quality)),
        kind=kind,
        reason="the product's scale and offset",
        href=str(next(iter(chosen.values()))[0].parent),
    )


def _hls_bands(parts: Parts, sensor: str) -> dict[str, tuple[Path, ValueCoding]]:
    found = {}
    for part, path in parts.items():
        number = re.fullmatch(r"B(\d{2}|8A)", part)
        if number is None:
            continue
        band = part if sensor == "S30" else OLI.get(f"B{part[1:].lstrip('0')}")
        if band is not None:
            found[band] = path, HLS_CODING
    return dict(sorted(found.items()))


def _landsat_bands(
    name: str, parts: Parts, *, level: str, table: Mapping[str, str]
) -> dict[str, tuple[Path, ValueCoding]]:
    bands = {part.removeprefix("SR_"): path for part, path in parts.items() if part.removeprefix("SR_") in table}
    if level == "L2":
        return {table[part]: (path, LEVEL2) for part, path in sorted(bands.items())}
    if not bands:
        return {}
    values = _metadata(name, parts, next(iter(bands.values())).parent)
    found = {}
    for part, path in sorted(bands.items()):
        scale, offset = (values.get(f"REFLECTANCE_{key}_BAND_{part[1:]}") for key in ("MULT", "ADD"))
        elevation = values.get("SUN_ELEVATION", 0.0)
        if scale is None or offset is None or elevation <= 0:
            raise DataError(
                f"{name}_MTL.txt names no REFLECTANCE_MULT_BAND_{part[1:]}, REFLECTANCE_ADD_BAND_{part[1:]} or "
                "SUN_ELEVATION above 0; expected the file as delivered."
            )
        sine = math.sin(math.radians(elevation))
        found[table[part]] = path, ValueCoding("uint16", scale / sine, offset / sine, 0.0)
    return found


def _metadata(name: str, parts: Parts, folder: Path) -> dict[str, float]:
    """Return the numbers of the MTL file."""
    path = parts.get("MTL", folder / f"{name}_MTL.txt")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"{name} is level 1, whose reflectance needs {path.name} beside the bands; it cannot be read "
            f"({error.strerror}). Copy it there, or take level 2 (L2SP)."
        ) from error
    return {key: float(value) for key, value in re.findall(r"(\w+)\s*=\s*(-?\d[\d.E+-]*)\s*$", text, re.MULTILINE)}
