"""Stored numbers (DN), reflectance and back. Every formula that changes a value is in this module.

    decode      reflectance = DN * scale + offset                 computed in float64, kept as float32
                valid       = DN finite, DN != nodata             (in every band of the pixel)
    to network  network     = 2 * clip(reflectance, -0.2, 3) - 1  (the clip affects glint and detector faults only)
    result      reflectance = max(result, 0)                      a reconstructed pixel is never below 0
    encode      DN          = round((reflectance - offset) / scale), clipped to the range of the type, never nodata
                DN          = the DN of the reference date, bit for bit, where its clear pixel is kept
                DN          = nodata where no date has data

`decode` and `encode` work on tensors of any device, so that a CPU and a GPU share one implementation.
The same account in prose is in docs/values.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sader.errors import DataError

LOWEST, HIGHEST = -0.2, 3.0
"""Range of possible reflectance: offsets give slightly negative values, sun glint on cloud up to about 2."""
SENTINEL_SCALE = 1e-4
"""Scale of integers that declare none: Sentinel-2 counts, reflectance * 10000."""
COUNTS_FROM = 50.0
"""Values above this cannot be reflectance: floats that hold counts."""
INTEGERS = ("uint16", "int16", "uint32", "int32")
FLOATS = ("float32", "float64")
NODATA, OBSERVED, RECONSTRUCTED = 0, 1, 2
"""Codes of the provenance layer."""
UNKNOWN = 255
"""In a mask and in a count of clear dates: nothing is known about the pixel, as outside the files."""
FILLED = 255
"""In the layer of source dates, whose dates count from 1: filled from the surroundings, from no date."""
MOST_SOURCES = FILLED - 1
"""Dates that the layer of source dates can name."""


@dataclass(frozen=True)
class ValueCoding:
    """How reflectance is stored: reflectance = DN * scale + offset."""

    dtype: str
    """NumPy's name: "uint16", "int16", "float32" ..."""
    scale: float
    offset: float
    nodata: float | None
    """The DN that means "no data"; None = every value counts. NaN and infinite values never count."""
    declared: bool = True
    """Whether the file declares scale and offset; if not, a result of the same kind does not declare them either."""

    @property
    def is_integer(self) -> bool:
        return np.issubdtype(np.dtype(self.dtype), np.integer)


REFLECTANCE = ValueCoding("float32", 1.0, 0.0, math.nan, declared=False)
"""Reflectance as it is; NaN = no data."""


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor, sharing its memory where possible."""
    array = np.asarray(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device. The copy to a GPU does not wait for the work that is queued there."""
    tensor = as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def decode(numbers: Tensor, codings: Sequence[ValueCoding]) -> tuple[Tensor, Tensor]:
    """Return reflectance (C, h, w) and valid (h, w) of stored numbers (C, h, w), one coding for each band.

    A pixel is valid where all its bands are. The reflectance is 0 where it is not.
    """
    valid = torch.ones(numbers.shape[1:], dtype=torch.bool, device=numbers.device)
    reflectance = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
    for band, coding in enumerate(codings):
        values = numbers[band].to(torch.float64)
        if numbers.dtype.is_floating_point:
            valid &= values.isfinite()
        if coding.nodata is not None and not math.isnan(coding.nodata):
            nodata = float(np.asarray(coding.nodata, coding.dtype))  # as the type of the file rounds it
            valid &= values != nodata
        reflectance[band] = values.mul(coding.scale).add_(coding.offset)
    return reflectance.masked_fill_(~valid, 0.0), valid


def decode_array(
    numbers: NDArray[Any], codings: Sequence[ValueCoding]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return `decode` of a NumPy array as NumPy arrays."""
    reflectance, valid = decode(as_tensor(numbers), codings)
    return reflectance.numpy(), valid.numpy()


def encode(reflectance: Tensor, valid: Tensor, coding: ValueCoding) -> Tensor:
    """Return the stored numbers for reflectance (C, h, w); nodata where `valid` (h, w) is False.

    A valid result never becomes nodata: it takes the adjacent number. Integers come as float64, exactly.
    """
    numbers = reflectance.to(torch.float64).sub(coding.offset).div_(coding.scale)
    if coding.is_integer:
        limits = np.iinfo(coding.dtype)
        numbers.round_().clamp_(limits.min, limits.max)
        if coding.nodata is not None:
            beside = coding.nodata + 1 if coding.nodata < limits.max else coding.nodata - 1
            numbers.masked_fill_(numbers == coding.nodata, beside)
    else:
        numbers = numbers.to(getattr(torch, coding.dtype))
        if coding.nodata is not None and not math.isnan(coding.nodata):
            kind = np.dtype(coding.dtype).type
            beside = float(np.nextafter(kind(coding.nodata), kind(np.inf)))
            numbers.masked_fill_(numbers == float(kind(coding.nodata)), beside)
    return numbers.masked_fill_(~valid, fill_value(coding))


def encode_array(reflectance: NDArray[Any], valid: NDArray[np.bool_], coding: ValueCoding) -> NDArray[Any]:
    """Return `encode` of NumPy arrays as an array of the type of the coding."""
    return encode(as_tensor(reflectance), as_tensor(valid), coding).numpy().astype(coding.dtype)


def fill_value(coding: ValueCoding) -> float | int:
    """Return the number that is written where there is no data."""
    if coding.nodata is None:
        return 0 if coding.is_integer else math.nan
    return int(coding.nodata) if coding.is_integer else coding.nodata


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

    scale, offset: as the file declares them, None = not declared. Integers without a scale are Sentinel-2 counts.
    nodata: as the file declares it. Integers without one have 0 = nodata, as in Sentinel-2 products; floats have NaN.
    highest: a high percentile of a float file without a scale; beyond 50 its values are counts, not reflectance.
    """
    if dtype.startswith("complex"):
        raise DataError(f"{name} holds {dtype} values; expected real reflectance. Radar needs its backscatter first.")
    if dtype not in INTEGERS + FLOATS and scale is None:
        raise DataError(
            f"{name} holds {dtype} values without a scale; expected reflectance as {', '.join(INTEGERS + FLOATS)}. "
            "Eight bits are a picture, not a measurement: take the original bands, or give --scale (reflectance per "
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
    if not math.isfinite(offset or 0.0):
        raise DataError(f"{name} has offset {offset}; expected a finite number such as -0.1. Set it with --offset.")
    if not floating and nodata is not None and not _fits(nodata, dtype):
        nodata = None  # such as NaN or -9999 on unsigned counts: no pixel can have it
    if nodata is None:
        nodata = math.nan if floating else 0.0
    return ValueCoding(
        dtype=dtype, scale=float(scale), offset=float(offset or 0.0), nodata=float(nodata), declared=declared
    )


def _fits(nodata: float, dtype: str) -> bool:
    limits = np.iinfo(dtype)
    return math.isfinite(nodata) and nodata == int(nodata) and limits.min <= nodata <= limits.max
