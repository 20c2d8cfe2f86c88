"""Clouds and pseudo-dates whose bits are the same on every machine, so that items can have checksums.

Random numbers are raw draws of Philox, whose stream NumPy guarantees. Images are float64 counts and are only added,
subtracted, multiplied, divided, rooted, compared and sorted element by element: these operations are rounded exactly by
IEEE 754. Exponentials, Fourier transforms, matrix products and sums of floats differ in the last bit between machines
and are not used; sums are sums of integers. `clouds.py` and `pseudo_dates.py` serve training, where this is not needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from sader.data.batch import CLEAR, SHADOW, THICK, THIN

FULL = 10000
"""Counts of reflectance 1."""
CLOUD_COLOUR = (1.00, 0.99, 1.05, 1.10)
"""Thick cloud relative to its blue band, for B02, B03, B04, B08 (as in `clouds.py`)."""
SHADOW_DEPTH = (0.36, 0.51, 0.65, 0.72)
"""Share of the radiance that a full shadow removes."""
AIR_COLOUR = (1.0, 0.6, 0.36, 0.22)
MARGIN = 64
"""Pixels around an image from which clouds cast shadows into it."""
VISIBLE = 0.02
"""Opacity and darkening below this are zero."""
_LATTICE = 64
_TURNS = ((1.0, 0.0), (0.6, 0.8), (0.8, 0.6), (5 / 13, 12 / 13), (8 / 17, 15 / 17))
"""Cosine and sine of the directions of the lattices of noise."""
T = TypeVar("T")


class Draw:
    """Random numbers that depend on a text alone."""

    def __init__(self, key: str) -> None:
        self._bits = np.random.Philox(key=int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little"))

    def array(self, *shape: int) -> np.ndarray:
        """Return uniform float64 numbers in [0, 1)."""
        raw = np.asarray(self._bits.random_raw(int(np.prod(shape))), np.uint64)
        return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * float(self.array(1)[0])

    def below(self, count: int) -> int:
        """Return one of 0 to count - 1."""
        return int(self.uniform() * count)

    def shuffled(self, values: Sequence[T]) -> list[T]:
        keys = self.array(len(values)) if len(values) else ()
        return [value for _, value in sorted(zip(keys, values, strict=True), key=lambda pair: pair[0])]


def noise(draw: Draw, height: int, width: int, coarse: float, octaves: int) -> np.ndarray:
    """Return (H, W) smooth noise, about -1 to 1, of structures from `coarse` pixels downwards, halved each octave."""
    total, weight = np.zeros((height, width)), 1.0
    rows, columns = np.arange(height, dtype=np.float64)[:, None], np.arange(width, dtype=np.float64)[None]
    for _ in range(octaves):
        lattice = 2 * draw.array(_LATTICE, _LATTICE) - 1
        cosine, sine = _TURNS[draw.below(len(_TURNS))]
        start = 1000 + 1000 * draw.array(2)  # positions stay positive
        y = (rows * cosine + columns * sine) / coarse + start[0]
        x = (columns * cosine - rows * sine) / coarse + start[1]
        total = total + weight * _spline(lattice, y, x)
        coarse, weight = coarse / 2, weight * 0.55
    return total


def _spline(lattice: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the periodic lattice interpolated by cubic B-splines."""
    row, column = y.astype(np.int64), x.astype(np.int64)
    total = np.zeros(np.broadcast_shapes(y.shape, x.shape))
    across = _weights(x - column)
    for i, down in enumerate(_weights(y - row)):
        for j, right in enumerate(across):
            total = total + down * right * lattice[(row + i) % _LATTICE, (column + j) % _LATTICE]
    return total


def _weights(part: np.ndarray) -> tuple[np.ndarray, ...]:
    rest = 1 - part
    return (
        rest * rest * rest / 6,
        (4 - 6 * part * part + 3 * part * part * part) / 6,
        (4 - 6 * rest * rest + 3 * rest * rest * rest) / 6,
        part * part * part / 6,
    )


def box(values: np.ndarray, radius: int) -> np.ndarray:
    """Return sums of integers (H, W) over squares of `radius`; the border is extended."""
    for _ in range(2):
        total = np.pad(values.astype(np.int64), ((radius + 1, radius), (0, 0)), "edge").cumsum(axis=0)
        values = (total[2 * radius + 1 :] - total[: -2 * radius - 1]).T
    return values


def simulate_clouds(ground: np.ndarray, coverage: float, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Return counts (C, H, W) of `ground` under simulated clouds and shadows, and labels (H, W).

    `coverage` is the share of the image under cloud. One in four skies is thin cloud alone.
    """
    height, width = ground.shape[1:]
    rows, columns = height + 2 * MARGIN, width + 2 * MARGIN
    inside = (slice(MARGIN, MARGIN + height), slice(MARGIN, MARGIN + width))
    field = noise(draw, rows, columns, (32.0, 64.0, 128.0)[draw.below(3)], 6)
    ranked = np.sort(field[inside], axis=None)
    cut = ranked[min(int((1 - coverage) * len(ranked)), len(ranked) - 1)] if coverage < 1 else ranked[0] - 0.3
    spread = ranked[len(ranked) * 84 // 100] - ranked[len(ranked) // 2]
    rise = np.maximum(field - cut, 0) / max(float(spread), 1e-6)
    depth = draw.uniform(0.6, 4.0) * rise * np.sqrt(rise)
    opacity = 1 - 1 / ((1 + depth) * (1 + depth))
    thin = draw.uniform() < 0.25
    brightness = draw.uniform(0.34, 0.88) * FULL
    fine = noise(draw, height, width, 12.0, 3)
    if thin:
        opacity, brightness = opacity * draw.uniform(0.15, 0.55), draw.uniform(0.5, 0.7) * FULL
    shift = (round(draw.uniform(-25, 25)), round(draw.uniform(-40, -5)))  # morning orbits: the sun is in the east
    blocked = np.roll((opacity * 1000).astype(np.int64), shift, axis=(0, 1))
    shadow = box(blocked, 2)[inside] / 25000 * draw.uniform(0.65, 1.0)
    opacity = opacity[inside]
    opacity = np.where(opacity >= VISIBLE, opacity, 0)
    shadow = np.where((shadow >= 3 * VISIBLE) & (not thin), shadow, 0)
    texture = 1 - 0.25 * (1 - opacity) + 0.05 * fine
    image = np.empty(ground.shape)
    for band in range(len(ground)):
        dark = ground[band] * (1 - shadow * SHADOW_DEPTH[band])
        colour = 1.0 if thin else CLOUD_COLOUR[band]
        image[band] = dark + opacity * (brightness * colour * texture - dark)
    labels = np.where(shadow * (1 - opacity) > 0, SHADOW, CLEAR)
    labels = np.where(opacity > 0, np.where(opacity > 0.5, THICK, THIN), labels)
    return np.where(labels == CLEAR, ground, image), labels.astype(np.uint8)


def paste_clouds(ground: np.ndarray, donor: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return counts (C, H, W) of `ground` under the labelled clouds and shadows of `donor`, and labels (H, W).

    Thick cloud is copied. A shadow is the donor's ratio to its clear ground. Of a thin cloud, the smoothed difference
    from the clear ground is added to 0.6 of the new ground, so that the donor's ground does not show. Edges are blended
    inside the cloud: one pixel of thick cloud and shadow, four pixels of thin cloud.
    """
    cloud, thin = (labels >= THICK) & (labels <= SHADOW), labels == THIN
    weight = np.maximum(2 * box(cloud, 1) - 9, 0) / 9 * cloud
    weight = np.where(thin, np.maximum(2 * box(cloud, 4) - 81, 0) / 81, weight)
    near = np.maximum(box(thin, 4), 1)
    known, dark = labels == CLEAR, labels == SHADOW
    enough = int(known.sum()) * 200 > known.size
    clear = [
        max(_mean(donor[b], known) if enough else _mean(ground[b], ground[b] > 0), 10.0) for b in range(len(donor))
    ]
    usual = 0.0 if dark.any() else 1.0
    for b in range(len(donor) if dark.any() else 0):  # not sum(), whose rounding depends on the version of Python
        usual += _mean(donor[b], dark) / clear[b] / len(donor)
    image = np.empty(ground.shape)
    for band in range(len(ground)):
        ratio = donor[band] / clear[band] * (0.65 / max(usual, 0.65))
        shaded = ground[band] * np.minimum(np.maximum(ratio, 0.12), 1)
        air = box(np.where(thin, donor[band], 0), 4) / near - 0.6 * clear[band]
        hazy = 0.6 * ground[band] + np.minimum(np.maximum(air, 0.4 * ground[band]), 0.5 * FULL)
        cover = np.where(dark, shaded, np.where(thin, hazy, donor[band]))
        image[band] = ground[band] + weight * (cover - ground[band])
    taken = weight > 0
    return np.where(taken, image, ground), np.where(taken, labels, CLEAR).astype(np.uint8)


def _mean(counts: np.ndarray, where: np.ndarray) -> float:
    """Return the mean of whole counts over some pixels; 0 without any."""
    chosen = counts[where].astype(np.int64)
    return int(chosen.sum()) / len(chosen) if len(chosen) else 0.0


def pseudo_date(image: np.ndarray, draw: Draw) -> np.ndarray:
    """Return counts (C, H, W) of the same ground on another date: season, sun, air, a small shift, sensor noise."""
    height, width = image.shape[1:]
    bands = range(len(image))
    seen = image.min(0) > 0
    centre = [_mean(image[b], seen) for b in bands]
    gain = np.full((height, width), 1 + draw.uniform(-0.12, 0.12))
    gain = gain + 0.06 * noise(draw, height, width, max(height, width) / 3, 1)
    size = (0.02, 0.04, 0.08, 0.16)[draw.below(4)]
    result, changes = np.empty(image.shape), np.zeros(image.shape)
    for _ in range(2):  # two surface classes, soft parts of the colour space, change on their own
        direction = 2 * draw.array(len(image)) - 1
        along = np.zeros((height, width))
        for b in bands:
            along = along + direction[b] * (image[b] - centre[b])
        along = along / max(_mean(np.abs(along).astype(np.int64), seen), 1.0) - draw.uniform(-1, 1)
        surface = 0.5 + along / (1 + np.abs(along)) / 2
        common, own = draw.uniform(-1.5, 1.5), 2 * draw.array(len(image)) - 1
        for b in bands:
            changes[b] = changes[b] + size * (common + 0.6 * own[b]) * surface
    band_gain, air = 1 + 0.05 * (2 * draw.array(len(image)) - 1), draw.uniform(0, 0.012) * FULL
    level = draw.uniform(0.0004, 0.0025) * FULL
    for b in bands:
        grain = draw.array(4, height, width)
        grain = (grain[0] + grain[1] + grain[2] + grain[3] - 2) * 1.7320508075688772
        changed = image[b] * gain * band_gain[b] * np.maximum(1 + changes[b], 0.2)
        result[b] = changed + air * AIR_COLOUR[b] + level * grain
    if draw.uniform() < 0.5:
        result = _moved(result, draw.uniform(-0.6, 0.6), draw.uniform(-0.6, 0.6))
    return np.where(seen, np.maximum(result, 1), 0)


def _moved(image: np.ndarray, down: float, right: float) -> np.ndarray:
    """Return (C, H, W) moved by a fraction of a pixel, cubic; the border is repeated."""
    for axis, shift in ((1, down), (2, right)):
        count = image.shape[axis]
        start = -1 if shift < 0 else 0
        part = shift - start
        taps = (  # Catmull-Rom
            part * (part * (2 - part) - 1) / 2,
            (part * part * (3 * part - 5) + 2) / 2,
            part * (part * (4 - 3 * part) + 1) / 2,
            part * part * (part - 1) / 2,
        )
        total = np.zeros(image.shape)
        for k, tap in enumerate(taps):
            place = np.clip(np.arange(count) + start + k - 1, 0, count - 1)
            total = total + tap * np.take(image, place, axis)
        image = total
    return image


def whole_counts(image: np.ndarray, step: int) -> np.ndarray:
    """Return float64 counts as uint16 multiples of `step` up to `FULL`; 0 stays 0 and no other value becomes 0."""
    units = (np.minimum(image, FULL) / step + 0.5).astype(np.int64)
    return (np.where(image <= 0, 0, np.maximum(units, 1)) * step).astype(np.uint16)
