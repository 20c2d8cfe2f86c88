"""What is done to values, all of it in this one place: stored number (DN) -> reflectance -> network -> DN.

    decode      reflectance = DN * scale + offset                 computed in float64, kept as float32
                valid       = DN finite, DN != nodata             (in every band of the pixel)
    to network  network     = 2 * clip(reflectance, -0.2, 3) - 1  (the clip touches glint and detector faults only)
    result      reflectance = max(result, 0)                      a made pixel is never below 0
    encode      DN          = round((reflectance - offset) / scale), cut to the type's range, never nodata
                DN          = the reference date's own DN, bit for bit, where its clear pixel was kept
                DN          = nodata where no date has data

The same account in prose is in docs/values.md.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sader.errors import DataError
from sader.geo.stack import ValueCoding
from sader.inference.inputs import HIGHEST, LOWEST

SENTINEL_SCALE = 1e-4
"""Scale of integers that carry no scale of their own: Sentinel-2 counts, reflectance * 10000."""
COUNTS_FROM = 50.0
"""Values above this cannot be reflectance: floats that hold counts."""
INTEGERS = ("uint16", "int16", "uint32", "int32")
FLOATS = ("float32", "float64")


def decode(digital: NDArray[np.generic], coding: ValueCoding) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return reflectance and where it is valid, both of the shape of `digital`; 0 where it is not valid."""
    valid = is_data(digital, coding)
    reflectance = digital.astype(np.float64) * coding.scale + coding.offset
    return np.where(valid, reflectance, 0.0).astype(np.float32), valid


def is_data(digital: NDArray[np.generic], coding: ValueCoding) -> NDArray[np.bool_]:
    """Return where numbers on disk mean something: finite and not the nodata value."""
    whole = not np.issubdtype(digital.dtype, np.floating)
    valid = np.ones(digital.shape, dtype=bool) if whole else np.isfinite(digital)
    if coding.nodata is not None and not math.isnan(coding.nodata):
        valid &= digital != coding.nodata
    return valid


def encode(reflectance: NDArray[np.floating], valid: NDArray[np.bool_], coding: ValueCoding) -> NDArray[np.generic]:
    """Return the numbers on disk for reflectance (C, h, w); nodata where `valid` (h, w) is False.

    A valid result never becomes nodata: it takes the next number beside it.
    """
    kind = np.dtype(coding.dtype)
    with np.errstate(invalid="ignore"):
        numbers = np.subtract(reflectance, coding.offset, dtype=np.float64)
        numbers /= coding.scale
    if np.issubdtype(kind, np.integer):
        limits = np.iinfo(kind)
        np.rint(np.nan_to_num(numbers, copy=False), out=numbers)
        digital = np.clip(numbers, limits.min, limits.max, out=numbers).astype(kind)
        if coding.nodata is not None:
            beside = coding.nodata + 1 if coding.nodata < limits.max else coding.nodata - 1
            digital[digital == coding.nodata] = beside
    else:
        digital = numbers.astype(kind)
        if coding.nodata is not None and not math.isnan(coding.nodata):
            digital[digital == kind.type(coding.nodata)] = np.nextafter(kind.type(coding.nodata), kind.type(np.inf))
    return np.where(valid, digital, fill_value(coding)).astype(kind)


def fill_value(coding: ValueCoding) -> float | int:
    """Return the number written where there is no data."""
    if coding.nodata is None:
        return 0 if np.issubdtype(np.dtype(coding.dtype), np.integer) else math.nan
    return int(coding.nodata) if np.issubdtype(np.dtype(coding.dtype), np.integer) else coding.nodata


def for_network(reflectance: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return reflectance cut to what can be: sun glint and faulty detectors must not stop a whole scene."""
    return reflectance.clip(LOWEST, HIGHEST)


def _fits(nodata: float, dtype: str) -> bool:
    limits = np.iinfo(dtype)
    return math.isfinite(nodata) and nodata == int(nodata) and limits.min <= nodata <= limits.max


def coding_of(
    name: str,
    *,
    dtype: str,
    scale: float | None,
    offset: float | None,
    nodata: float | None,
    highest: float | None = None,
    declared: bool = True,
) -> ValueCoding:
    """Return how a file stores reflectance; refuse types that cannot hold it.

    scale, offset: what the file says; None = nothing. Integers without a scale are Sentinel-2 counts (0.0001).
    nodata: what the file says. Integers without it have 0 = nodata, as in Sentinel-2 products; floats have NaN.
    highest: a high percentile of a float file without a scale; beyond 50 its values are counts, not reflectance.
    """
    if dtype.startswith("complex"):
        raise DataError(f"{name} holds {dtype} values; expected real reflectance. Radar needs its backscatter first.")
    if dtype not in INTEGERS + FLOATS and scale is None:
        raise DataError(
            f"{name} holds {dtype} values without a scale; expected reflectance as {', '.join(INTEGERS + FLOATS)}. "
            "Eight bits are a picture, not a measurement: take the original bands, or say --scale (reflectance per "
            "count)."
        )
    if dtype not in (*INTEGERS, *FLOATS, "uint8", "int8"):
        raise DataError(f"{name} holds {dtype} values; expected {', '.join(INTEGERS + FLOATS)}. Convert it first.")
    floating = dtype in FLOATS
    if scale is None:
        counts = not floating or (highest is not None and highest > COUNTS_FROM)
        scale = SENTINEL_SCALE if counts else 1.0
    if scale <= 0 or not math.isfinite(scale):
        raise DataError(f"{name} has scale {scale:g}; expected a positive number such as 0.0001. Set it with --scale.")
    if not floating and nodata is not None and not _fits(nodata, dtype):
        nodata = None  # such as NaN or -9999 on unsigned counts: no pixel can have it
    if nodata is None:
        nodata = math.nan if floating else 0.0
    return ValueCoding(
        dtype=dtype, scale=float(scale), offset=float(offset or 0.0), nodata=float(nodata), declared=declared
    )
