"""The formulas between values on disk and values in memory, each with its published name, in one place.

METHOD 6. Readers give reflectance in [0, 1]; the model's [-1, 1] is `series.to_model_range`, the published
(x / 10000 - 0.5) / 0.5. How a result is scored is another question: see `metrics.PROTOCOLS` for `reflectance` and
`mtc_stretch`.
"""

from __future__ import annotations

import numpy as np

from sader.errors import ConfigError, did_you_mean

SAR_SCALINGS: dict[str, str] = {
    "default": "VV and VH: (clip(dB, -25, 0) + 25) / 25, in [0, 1] (SEN12MS-CR-TS, UnCRtainTS, EMRDM)",
    "resnet": "VV: 2 (clip(dB, -25, 0) + 25) / 25; VH: 2 (clip(dB, -32.5, 0) + 32.5) / 32.5, in [0, 2] (CR-TS Net)",
    "allclear": "VV: (clip(dB, -25, 0) + 25) / 25; VH: (clip(dB, -32.5, 0) + 32.5) / 32.5, in [0, 1] (AllClear)",
}
"""Named ways to scale Sentinel-1 decibels, with their formulas."""


def reflectance_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return clip(counts, 0, 10000) / 10000 as float32: SEN12MS-CR(-TS) and AllClear "default".

    Sen2_MTC_New is published without the clip; only clouds brighter than reflectance 1 differ.
    """
    return (np.clip(counts, 0, 10000) / 10000).astype(np.float32)


def resnet_of_reflectance(reflectance: np.ndarray) -> np.ndarray:
    """Return counts / 2000, in [0, 5]: the "resnet" scaling of SEN12MS-CR-TS, for systems trained that way."""
    return (reflectance * 5).astype(np.float32)


def counts_of_reflectance(reflectance: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return uint16 counts (..., C, H, W), 0 exactly where not `seen` (..., H, W): a black pixel becomes 1."""
    counts = np.clip(np.rint(reflectance.astype(np.float64) * 10000), 1, 65535)
    return np.where(seen[..., None, :, :], counts, 0).astype(np.uint16)


def scale_sar(decibel: np.ndarray, *, scaling: str = "default") -> np.ndarray:
    """Return Sentinel-1 (2, H, W) VV, VH in dB under a name of `SAR_SCALINGS`; what is not finite becomes the floor."""
    if scaling not in SAR_SCALINGS:
        raise ConfigError(f"unknown SAR scaling {scaling!r}{did_you_mean(scaling, SAR_SCALINGS)}")
    floors = (-25.0, -25.0) if scaling == "default" else (-25.0, -32.5)
    top = 2.0 if scaling == "resnet" else 1.0
    floor = np.array(floors, np.float32)[:, None, None]
    clean = np.where(np.isfinite(decibel), decibel, floor)
    return (top * (np.clip(clean, floor, 0) - floor) / -floor).astype(np.float32)
