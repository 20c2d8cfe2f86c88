"""Sentinel-1 as an auxiliary input: names of its bands, and decibels scaled to [0, 1].

Radar is stored in shards as bands of each date, beside the optical ones. It never decides whether a pixel was
observed, is not changed by clouds or colour augmentation, and is no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sader.errors import ConfigError, ValueRangeError, check_known

RADAR_BANDS = ("VV", "VH")
SAR_SCALINGS: dict[str, str] = {
    "default": "VV and VH: (clip(dB, -25, 0) + 25) / 25, in [0, 1] (SEN12MS-CR-TS, UnCRtainTS, EMRDM)",
    "resnet": "VV: 2 (clip(dB, -25, 0) + 25) / 25; VH: 2 (clip(dB, -32.5, 0) + 32.5) / 32.5, in [0, 2] (CR-TS Net)",
    "allclear": "VV: (clip(dB, -25, 0) + 25) / 25; VH: (clip(dB, -32.5, 0) + 32.5) / 32.5, in [0, 1] (AllClear)",
}
"""Named ways to scale Sentinel-1 decibels, with their formulas."""


def scale_sar(decibel: np.ndarray, *, scaling: str = "default") -> np.ndarray:
    """Return Sentinel-1 (..., 2, H, W) VV, VH in dB under a name of `SAR_SCALINGS`; not finite values: the floor."""
    check_known("SAR scaling", scaling, SAR_SCALINGS)
    floors = (-25.0, -25.0) if scaling == "default" else (-25.0, -32.5)
    top = 2.0 if scaling == "resnet" else 1.0
    floor = np.array(floors, np.float32)[:, None, None]
    clean = np.where(np.isfinite(decibel), decibel, floor)
    return (top * (np.clip(clean, floor, 0) - floor) / -floor).astype(np.float32)


def check_decibel(values: np.ndarray, path: str | Path) -> None:
    """Raise unless the finite values can be decibels: backscatter of land is about -30 to 5 dB."""
    some = values[np.isfinite(values)]
    if not some.size:
        return
    low, middle, high = (float(value) for value in np.percentile(some, (1, 50, 99)))
    if middle > 5 or low < -80 or high > 40 or (low >= 0 and high > 0):
        hint = "Convert linear power with 10 * log10(value)." if low >= 0 else "Check the bands and their scale."
        raise ValueRangeError(
            f"{path} holds values from {low:.3g} to {high:.3g}; expected Sentinel-1 VV and VH in dB, about -30 to 5. "
            f"{hint}"
        )


def radar_counts(scaled: np.ndarray) -> np.ndarray:
    """Return radar in [0, 1] as it is stored in shards: uint16 counts, 1 to 10000."""
    return np.clip(np.rint(scaled.astype(np.float64) * 10000), 1, 10000).astype(np.uint16)


def optical_count(bands: Sequence[str]) -> int:
    """Return the number of optical bands; radar must follow them."""
    count = sum(band not in RADAR_BANDS for band in bands)
    if any(band in RADAR_BANDS for band in bands[:count]):
        raise ConfigError(
            f"bands are {', '.join(bands)}; radar cannot be predicted. Name it last, in network.aux_bands: [VV, VH]."
        )
    return count
