"""Band names, orders and sets: bands are always found by name, never by position."""

from __future__ import annotations

from collections.abc import Sequence

from sader.errors import BandError

BANDS_13 = ("B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B10", "B11", "B12")
"""Sentinel-2 L1C, in the order of SEN12MS-CR-TS and of METHOD 3."""
BANDS_12 = tuple(band for band in BANDS_13 if band != "B10")
"""Sentinel-2 L2A: no cirrus band."""
BANDS_10 = tuple(band for band in BANDS_13 if band not in ("B01", "B09", "B10"))
"""Without the 60 m bands."""
BANDS_RGBN = ("B02", "B03", "B04", "B08")
BANDS_RGB = ("B02", "B03", "B04")
BANDS_LISS4 = ("B03", "B04", "B08")
"""Green, red, near infrared: LISS-IV."""
RGB = ("B04", "B03", "B02")
"""Red, green, blue, as a picture wants them."""


def rgb_indices(bands: Sequence[str]) -> tuple[int, int, int]:
    """Return the positions of red, green and blue among `bands`; false colour where one of them is missing."""
    if all(band in bands for band in RGB):
        red, green, blue = (list(bands).index(band) for band in RGB)
        return red, green, blue
    if all(band in bands for band in BANDS_LISS4):
        nir, red, green = (list(bands).index(band) for band in ("B08", "B04", "B03"))
        return nir, red, green
    if not bands:
        raise BandError("no bands given; a picture needs at least one.")
    last = len(bands) - 1
    return min(2, last), min(1, last), 0
