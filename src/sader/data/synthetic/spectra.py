"""Reflectance of the materials of procedural land, and the course of crops and trees over a year.

Typical values of Sentinel-2 surface reflectance, rounded; enough for tests, not a spectral library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Order of bands: B01 B02 B03 B04 B05 B06 B07 B08 B8A B09 B10 B11 B12.
_MATERIALS = {
    "crop": (0.020, 0.028, 0.064, 0.032, 0.085, 0.300, 0.400, 0.420, 0.440, 0.410, 0.002, 0.200, 0.090),
    "blossom": (0.030, 0.045, 0.135, 0.110, 0.170, 0.300, 0.360, 0.380, 0.400, 0.380, 0.002, 0.220, 0.110),
    "meadow": (0.025, 0.034, 0.072, 0.052, 0.105, 0.250, 0.310, 0.330, 0.350, 0.340, 0.002, 0.230, 0.120),
    "straw": (0.072, 0.094, 0.150, 0.188, 0.215, 0.250, 0.280, 0.310, 0.330, 0.330, 0.003, 0.380, 0.270),
    "soil": (0.050, 0.064, 0.094, 0.134, 0.155, 0.175, 0.195, 0.212, 0.230, 0.240, 0.003, 0.320, 0.270),
    "dark_soil": (0.034, 0.042, 0.060, 0.080, 0.092, 0.105, 0.118, 0.130, 0.140, 0.150, 0.003, 0.210, 0.180),
    "sand": (0.110, 0.142, 0.190, 0.235, 0.255, 0.270, 0.285, 0.300, 0.310, 0.310, 0.004, 0.390, 0.350),
    "deciduous": (0.016, 0.021, 0.042, 0.024, 0.062, 0.230, 0.310, 0.325, 0.345, 0.330, 0.002, 0.155, 0.065),
    "conifer": (0.013, 0.016, 0.029, 0.020, 0.040, 0.135, 0.175, 0.185, 0.200, 0.195, 0.002, 0.090, 0.040),
    "twigs": (0.032, 0.040, 0.056, 0.068, 0.085, 0.115, 0.135, 0.150, 0.165, 0.170, 0.002, 0.190, 0.120),
    "water": (0.032, 0.040, 0.050, 0.030, 0.022, 0.013, 0.012, 0.010, 0.009, 0.008, 0.001, 0.005, 0.004),
    "silt": (0.055, 0.072, 0.105, 0.098, 0.080, 0.042, 0.040, 0.030, 0.026, 0.018, 0.001, 0.010, 0.008),
    "asphalt": (0.068, 0.080, 0.094, 0.104, 0.110, 0.116, 0.122, 0.128, 0.132, 0.130, 0.002, 0.150, 0.140),
    "tiles": (0.062, 0.074, 0.104, 0.168, 0.195, 0.212, 0.226, 0.240, 0.252, 0.250, 0.003, 0.290, 0.260),
    "concrete": (0.140, 0.165, 0.190, 0.206, 0.214, 0.222, 0.232, 0.242, 0.250, 0.245, 0.003, 0.280, 0.260),
    "metal": (0.280, 0.325, 0.355, 0.370, 0.378, 0.386, 0.394, 0.402, 0.406, 0.390, 0.005, 0.370, 0.330),
}
MATERIALS: tuple[str, ...] = tuple(_MATERIALS)
SPECTRA: np.ndarray = np.array(list(_MATERIALS.values()), dtype=np.float32)
"""(K, 13) reflectance of each of `MATERIALS`."""

HAZE_SPECTRUM: np.ndarray = np.array(
    [0.080, 0.058, 0.033, 0.017, 0.014, 0.011, 0.009, 0.008, 0.007, 0.004, 0.0, 0.002, 0.001], dtype=np.float32
)
"""Path radiance of a slightly hazy atmosphere, as reflectance; a date adds a part of it."""

BLUR: np.ndarray = np.array([2.2, 0.5, 0.5, 0.5, 0.9, 0.9, 0.9, 0.5, 0.9, 2.2, 2.2, 0.9, 0.9], dtype=np.float32)
"""Standard deviation of the sensor's blur in 10 m pixels: 10 m, 20 m and 60 m bands."""


@dataclass(frozen=True)
class Crop:
    """Course of one crop over the year; days are days of the year on the northern half of the Earth."""

    share: float
    """Weight among the parcels."""
    rise: float
    """Day on which half of the leaves are out."""
    fall: float
    """Day on which half are gone: ripe, mown or frozen."""
    pace: float
    """Days that the rise takes from a quarter to three quarters."""
    cover: float
    """Part of the ground under leaves at the best time, 0 to 1."""
    straw: float
    """Part of the ground under stubble after the fall, 0 to 1."""
    grass: float
    """Share of the leaves with the spectrum of meadow instead of crop, 0 to 1."""
    blossom: float = 0.0
    """Strength of yellow flowers some weeks after the rise, 0 to 1."""


CROPS: tuple[Crop, ...] = (
    Crop(share=0.27, rise=92, fall=188, pace=9, cover=0.92, straw=0.85, grass=0.0),  # winter cereal
    Crop(share=0.20, rise=172, fall=272, pace=8, cover=0.95, straw=0.40, grass=0.0),  # maize, sunflower
    Crop(share=0.07, rise=86, fall=178, pace=9, cover=0.90, straw=0.70, grass=0.0, blossom=0.9),  # rape
    Crop(share=0.12, rise=150, fall=262, pace=9, cover=0.88, straw=0.05, grass=0.1),  # beet, potato
    Crop(share=0.20, rise=82, fall=312, pace=14, cover=0.86, straw=0.45, grass=1.0),  # meadow
    Crop(share=0.06, rise=112, fall=285, pace=14, cover=0.45, straw=0.15, grass=0.6),  # vines, orchard
    Crop(share=0.08, rise=140, fall=300, pace=25, cover=0.16, straw=0.15, grass=1.0),  # fallow
)


def step(day: np.ndarray | float, middle: np.ndarray | float, pace: np.ndarray | float) -> np.ndarray:
    """Return a smooth rise from 0 to 1 around `middle`; `pace` days from a quarter to three quarters."""
    z = np.clip((np.asarray(day) - middle) / (np.asarray(pace) / 2.2), -30, 30)
    return 1 / (1 + np.exp(-z))


def crop_cover(crop: np.ndarray, day: float, *, shift: np.ndarray, vigour: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parts of the ground under crop, blossom, meadow and straw on a day of the year; the rest is soil.

    `crop` int (...) indexes CROPS, `shift` (...) moves the calendar in days, `vigour` (...) scales the leaves,
    about 0.6 to 1.1.
    """
    names = ("rise", "fall", "pace", "cover", "straw", "grass", "blossom")
    get = {name: np.array([getattr(c, name) for c in CROPS], dtype=np.float32)[crop] for name in names}
    now = day - shift
    fallen = step(now, get["fall"], 6.0)
    leaves = np.clip(get["cover"] * vigour, 0, 1) * step(now, get["rise"], get["pace"]) * (1 - fallen)
    # Stubble is ploughed in over the weeks after the harvest.
    straw = np.minimum(get["straw"] * fallen * np.exp(-np.clip(now - get["fall"], 0, 200) / 70), 1 - leaves)
    flowers = get["blossom"] * np.exp(-0.5 * ((now - get["rise"] - 40) / 9) ** 2)
    leafy = leaves * (1 - get["grass"])
    return {
        "crop": leafy * (1 - flowers),
        "blossom": leafy * flowers,
        "meadow": leaves * get["grass"],
        "straw": straw,
    }
