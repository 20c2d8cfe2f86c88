"""Procedural land (parcels, forest, river, roads, towns, hills): its layout, its materials, its reflectance on a day.

Land is a mixture of materials per pixel, so that edges are mixed pixels as in real images. Clouds are added in
`scene.py`. All values depend on the seed and the size alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# ---------------------------------------------------------------- materials and crops

# Typical values of Sentinel-2 surface reflectance, rounded: enough for tests, not a spectral library.
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
    return {"crop": leafy * (1 - flowers), "blossom": leafy * flowers, "meadow": leaves * get["grass"], "straw": straw}


# ---------------------------------------------------------------- land cover

CLASSES = ("field", "meadow", "forest", "water", "road", "town", "bare")
"""Names of the values of a class map."""

_MEADOW = next(i for i, crop in enumerate(CROPS) if crop.grass == 1.0 and crop.cover > 0.5)
_FALLOW = len(CROPS) - 1


class Land:
    """Land cover on a grid of height x width pixels of 10 m, independent of the date."""

    def __init__(self, seed: int, height: int, width: int) -> None:
        self.seed, self.height, self.width = seed, height, width
        self.rng = np.random.default_rng([seed, 10])
        rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
        self.y, self.x = rows, columns
        self.fine = self.noise(1.0, 4.0)
        self.patchy = self.noise(1.7, 40.0)
        self.rough = self.noise(1.6, 90.0)
        self._hills()
        self._river()
        self._towns_and_roads()
        self._parcels()
        self._forest()
        self.streets = self._streets()
        self.classes = self._class_map()

    def noise(self, slope: float, scale: float) -> np.ndarray:
        """Return (H, W) smooth noise of zero mean and unit deviation, flat above `scale` pixels."""
        rows, columns = self.height + 64, self.width + 64  # cut from a larger grid, so that it does not wrap
        ky = np.fft.fftfreq(rows)[:, None]
        kx = np.fft.rfftfreq(columns)[None, :]
        amplitude = (ky**2 + kx**2 + scale**-2) ** (-slope / 2)
        amplitude[0, 0] = 0
        white = self.rng.standard_normal((2, rows, kx.shape[1]))
        field = np.fft.irfft2((white[0] + 1j * white[1]) * amplitude, s=(rows, columns))
        field = field[: self.height, : self.width]
        return ((field - field.mean()) / (field.std() + 1e-12)).astype(np.float32)

    def _hills(self) -> None:
        """Height in pixels; one side of the place is hilly, the other nearly flat."""
        angle = self.rng.uniform(0, 2 * np.pi)
        across = (self.x / self.width - 0.5) * np.cos(angle) + (self.y / self.height - 0.5) * np.sin(angle)
        self.hilly = step(across + 0.10 * self.rough, self.rng.uniform(0.05, 0.25), 0.25).astype(np.float32)
        ridged = 1 - 1.2 * np.abs(self.noise(2.0, 120.0))
        self.elevation = (ridged * (0.4 + 9.5 * self.hilly)).astype(np.float32)

    def _curve(self, through: tuple[float, float], angle: float, waves: list[tuple[float, float]]) -> np.ndarray:
        """Return signed distance (H, W) in pixels from a line through a point that swings in `waves` (size, length)."""
        dx, dy = self.x - through[1], self.y - through[0]
        along = dx * np.cos(angle) + dy * np.sin(angle)
        side = -dx * np.sin(angle) + dy * np.cos(angle)
        bend = np.zeros_like(along)
        slope = np.zeros_like(along)
        for size, length in waves:
            phase, k = self.rng.uniform(0, 2 * np.pi), 2 * np.pi / length
            bend += size * (np.sin(k * along + phase) - np.sin(phase))  # passes through the point at any phase
            slope += size * k * np.cos(k * along + phase)
        return (side - bend) / np.sqrt(1 + slope**2)

    def _river(self) -> None:
        rng = self.rng
        low = np.unravel_index(np.argmin(self.hilly + 0.2 * rng.uniform(size=self.hilly.shape)), self.hilly.shape)
        middle = (0.7 * self.height / 2 + 0.3 * low[0], 0.7 * self.width / 2 + 0.3 * low[1])
        # Along the foot of the hills, like a river.
        gy, gx = np.gradient(_smooth(self.hilly, 12))
        angle = np.arctan2(float(gy.mean()), float(gx.mean())) + np.pi / 2 + rng.uniform(-0.3, 0.3)
        waves = [(rng.uniform(18, 34), rng.uniform(210, 330)), (rng.uniform(7, 14), rng.uniform(80, 130))]
        distance = self._curve(middle, angle, waves) + 2.5 * self.patchy
        self.river_distance = np.abs(distance)
        half = rng.uniform(2.6, 4.6) * (1 + 0.18 * self.patchy)
        self.water = np.clip(half - self.river_distance + 0.5, 0, 1)
        # Gravel banks on the inside of bends.
        bank = np.clip(half + 2.0 * np.clip(self.rough - 0.2, -1, 1.2) - np.abs(distance - 1.2) + 0.5, 0, 1)
        self.sand = bank * (1 - self.water) * (self.patchy > -0.2)
        self.plain = np.exp(-((self.river_distance / 38) ** 2))

    def _towns_and_roads(self) -> None:
        rng = self.rng
        flat = 1 - self.hilly
        count = max(1, round(self.height * self.width / 45000))
        candidates = rng.uniform(
            [0.12 * self.height, 0.12 * self.width], [0.88 * self.height, 0.88 * self.width], (60, 2)
        )
        spots = candidates.astype(int)
        worth = flat[spots[:, 0], spots[:, 1]] + np.minimum(self.river_distance[spots[:, 0], spots[:, 1]], 40) / 60
        spots = spots[np.argsort(-worth)]
        chosen = [spots[0]]
        for spot in spots[1:]:
            if len(chosen) < count and min(np.hypot(*(spot - other)) for other in chosen) > 75:
                chosen.append(spot)
        self.town = np.zeros_like(self.x)
        nearest = np.full_like(self.x, np.inf)
        self.town_angle = np.zeros_like(self.x)
        ragged = self.noise(1.6, 30.0)
        for number, spot in enumerate(chosen):
            radius = rng.uniform(26, 36) if number == 0 else rng.uniform(8, 16)
            distance = np.hypot((self.x - spot[1]) * rng.uniform(0.8, 1.1), (self.y - spot[0]) * rng.uniform(0.8, 1.1))
            self.town = np.maximum(self.town, step(radius + 0.28 * radius * ragged - distance, 0.0, 0.14 * radius))
            closer = distance < nearest
            nearest = np.where(closer, distance, nearest)
            self.town_angle = np.where(closer, rng.uniform(0, np.pi), self.town_angle)
        self.town = (self.town * (self.river_distance > 10)).astype(np.float32)

        main = rng.uniform(0, np.pi)
        gentle = [(rng.uniform(8, 22), rng.uniform(320, 520))]
        roads = [np.clip(1.2 - np.abs(self._curve(tuple(chosen[0]), main, gentle)), 0, 1)]
        roads.extend(self._lane(a, b) for a, b in pairwise(chosen))
        roads.append(np.clip(1.0 - np.abs(self._curve(tuple(chosen[0]), main + rng.uniform(1.0, 2.1), gentle)), 0, 1))
        self.road = np.max(roads, axis=0).astype(np.float32)
        self.motorway = roads[0]

    def _lane(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the cover (H, W) of a narrow road from a to b."""
        way = (b - a).astype(np.float32)
        length = float(np.hypot(*way)) + 1e-6
        along = ((self.x - a[1]) * way[1] + (self.y - a[0]) * way[0]) / length
        side = ((self.x - a[1]) * way[0] - (self.y - a[0]) * way[1]) / length
        swing = np.sin(np.pi * along / length) * length * 0.06 + 2.0 * np.sin(3 * np.pi * along / length)
        return np.where((along > -2) & (along < length + 2), np.clip(1.0 - np.abs(side - swing), 0, 1), 0)

    def _parcels(self) -> None:
        """Blocks of land (cells of a jittered grid), each cut into parcels along its own direction."""
        rng = self.rng
        wx, wy = 9 * self.noise(2.2, 80.0), 9 * self.noise(2.2, 80.0)
        spacing = rng.uniform(78, 105)
        block, gap = _cells((self.y + wy) / spacing, (self.x + wx) / spacing, self.seed)
        gap = gap * spacing
        lie = np.pi * _hash(block, 1) * 0.5 + rng.uniform(0, np.pi)
        u = self.x * np.cos(lie) + self.y * np.sin(lie) + 0.25 * wx
        v = -self.x * np.sin(lie) + self.y * np.cos(lie) + 0.25 * wy
        narrow = (11 + 22 * _hash(block, 2) ** 1.4).astype(np.float32)
        long = narrow * (1.2 + 2.4 * _hash(block, 3))
        strip, edge_u = _cuts(u / narrow, block)
        piece, edge_v = _cuts(v / long, _mix(block, strip))
        self.parcel = _mix(_mix(block, strip), piece)
        self.rows_across = u
        edge = np.minimum(np.minimum(edge_u * narrow, edge_v * long), gap)
        h = _hash(self.parcel, 4)
        shares = np.cumsum([c.share for c in CROPS])
        crop = np.searchsorted(shares / shares[-1], h).clip(0, len(CROPS) - 1)
        wet = self.plain + 0.25 * self.patchy + 0.35 * _hash(self.parcel, 5)
        crop = np.where((wet > 0.95) | (self.hilly + 0.5 * _hash(self.parcel, 6) > 0.95), _MEADOW, crop)
        self.crop = crop.astype(np.int64)
        self.shift = 34 * (_hash(self.parcel, 7) - 0.5) + 1.5 * self.patchy
        self.vigour = 0.62 + 0.48 * _hash(self.parcel, 8) + 0.03 * self.rough + 0.04 * self.patchy + 0.02 * self.fine
        self.soil_dark = np.clip(
            0.40 + 0.15 * self.rough + 1.0 * (_hash(self.parcel, 9) - 0.5) + 0.08 * self.patchy, 0, 1
        )
        self.tone = 1 + 0.26 * (_hash(self.parcel, 10) - 0.5)
        # Tracks between blocks, grassy margins between parcels; many neighbours have none.
        self.track = np.clip(1.1 - gap, 0, 1) * (_hash(block, 11) < 0.75) * 0.7
        self.margin = np.clip(0.9 - edge, 0, 1) * np.where(_hash(self.parcel, 12) < 0.5, 0.55, 0.15)
        self.hedge = np.clip(1.8 - gap, 0, 1) * (_hash(block, 13) < 0.35) * (self.noise(1.4, 12.0) > 0.2)

    def _forest(self) -> None:
        wooded = self.noise(1.8, 110.0) + 2.4 * self.hilly - 1.35 - 1.0 * self.plain + 0.10 * self.fine
        wooded = wooded + 1.6 * (_hash(self.parcel, 14) - 0.5) * (self.hilly < 0.5)
        forest = np.clip(4 * wooded + 0.5, 0, 1)
        grove = (_hash(self.parcel, 15) < 0.05) * np.clip(1 - self.margin, 0, 1)
        banks = np.clip(1.6 - np.abs(self.river_distance - 7.0) / 2.2, 0, 1) * (self.noise(1.5, 25.0) > -0.25)
        forest = np.maximum.reduce([forest, grove, banks * 0.9, self.hedge * 0.8])
        forest = forest * (1 - self.town) * (1 - np.clip(2 * self.road, 0, 1)) * (1 - self.sand)
        self.forest = forest.astype(np.float32)
        stand = self.noise(1.7, 60.0) + 1.2 * self.hilly - 0.9
        self.conifer = np.clip(2.5 * stand + 0.5, 0, 1) * (1 - banks)
        self.crowns = self.noise(0.6, 3.0)
        self.leaf_shift = 8 * self.rough + 5 * self.noise(1.2, 15.0)

    def _class_map(self) -> np.ndarray:
        classes = np.where(self.crop == _MEADOW, 1, np.where(self.crop == _FALLOW, 6, 0))
        classes = np.where(self.forest > 0.5, 2, classes)
        classes = np.where(self.town > 0.5, 5, classes)
        classes = np.where(self.sand > 0.5, 6, classes)
        classes = np.where(self.water > 0.5, 3, classes)
        return np.where(self.road > 0.5, 4, classes).astype(np.uint8)

    def _streets(self) -> dict[str, np.ndarray]:
        """Return the parts (H, W) of town ground under each material: streets, roofs, yards, gardens."""
        c, s = np.cos(self.town_angle), np.sin(self.town_angle)
        u, v = self.x * c + self.y * s + 1.5 * self.patchy, -self.x * s + self.y * c + 1.5 * self.rough
        quarter, edge_u = _cuts(u / 11.0, np.zeros_like(self.crop))
        terrace, edge_v = _cuts(v / 8.0, quarter)
        street = np.clip(1.15 - np.minimum(edge_u * 11.0, edge_v * 8.0), 0, 1) * 0.85
        lot = _mix(np.floor(u / 2.7).astype(np.int64), np.floor(v / 2.9).astype(np.int64))
        yard = _mix(quarter, terrace)
        busy = np.clip(self.town, 0, 1)
        built = (0.25 + 0.45 * busy) * (0.25 + 0.95 * _hash(lot, 20)) * (_hash(lot, 24) < 0.85)
        works = (_hash(yard, 21) < 0.05) & (np.minimum(edge_u * 11.0, edge_v * 8.0) > 1.6)
        built = np.where(works, 0.95, built) * (1 - street)
        kind = np.where(works, 0.7 + 0.3 * _hash(yard, 22), _hash(lot, 23) * 0.95)
        green = (1 - street - built) * np.where(_hash(yard, 25) < 0.1, 1.0, 0.75)
        return {
            "asphalt": street * 0.8 + (1 - street - built - green),
            "concrete": street * 0.2 + built * ((kind > 0.66) & (kind < 0.88)),
            "tiles": built * (kind <= 0.52),
            "dark_soil": built * ((kind > 0.52) & (kind <= 0.66)),
            "metal": built * (kind >= 0.88) * 0.8,
            "meadow": green * 0.55,
            "deciduous": green * 0.45,
        }


@dataclass(frozen=True)
class Light:
    """Sun, air and sensor on one date."""

    zenith: float
    """Angle of the sun from the vertical, degrees."""
    azimuth: float
    """Direction of the sun, degrees clockwise from north."""
    air: float
    """Share of HAZE_SPECTRUM added by the date, 0 to 1."""
    gain: float
    """Calibration and view, about 0.97 to 1.03."""


def light_on(day: float, seed: int, date: int) -> Light:
    """Return sun and air of a morning overpass at about 45 degrees north."""
    rng = np.random.default_rng([seed, 20, date])
    season = np.cos(2 * np.pi * (day - 172) / 365)
    return Light(
        zenith=43.0 - 19.0 * float(season),
        azimuth=152.0 - 12.0 * float(season),
        air=float(rng.uniform(0.0, 0.35)),
        gain=float(rng.uniform(0.97, 1.03)),
    )


def render(land: Land, day: float, light: Light, bands: list[int], rng: np.random.Generator) -> np.ndarray:
    """Return (C, H, W) float32 reflectance of `land` on a day of the year, for `bands` (places in the 13 bands)."""
    parts = _materials(land, day)
    mix = np.stack([parts.get(name, np.zeros_like(land.x)) for name in MATERIALS]).astype(np.float32)
    spectra = SPECTRA[:, bands]
    image = np.einsum("khw,kc->chw", mix, spectra, optimize=True)
    image *= _relief(land, light) * light.gain
    image = np.stack([_smooth(band, BLUR[b]) for band, b in zip(image, bands, strict=True)])
    air = HAZE_SPECTRUM[bands][:, None, None]
    image = image * (1 - 1.5 * light.air * air) + light.air * air
    image += (0.0006 + 0.006 * image) * rng.standard_normal(image.shape, dtype=np.float32)
    return np.clip(image, 0.0001, 1).astype(np.float32)


def _materials(land: Land, day: float) -> dict[str, np.ndarray]:
    """Return the part (H, W) of each pixel under each material; they sum to 1."""
    day = (day - 1) % 365 + 1
    parts = crop_cover(land.crop, day, shift=land.shift, vigour=land.vigour)
    bare = 1 - sum(parts.values())
    parts["soil"] = bare * (1 - land.soil_dark)
    parts["dark_soil"] = bare * land.soil_dark
    # Furrows on bare ground; a period near the pixel size leaves the faint stripes of satellite images.
    furrows = np.sin(2 * np.pi * land.rows_across / 2.9) * (_hash(land.parcel, 30) < 0.4)
    tone = land.tone * (1 + 0.035 * bare * furrows + 0.025 * land.fine + 0.02 * land.patchy)
    parts = {name: part * tone for name, part in parts.items()}

    def cover(amount: np.ndarray, by: Mapping[str, np.ndarray | float]) -> None:
        for name in parts:
            parts[name] = parts[name] * (1 - amount)
        for name, share in by.items():
            parts[name] = parts.get(name, 0.0) + amount * share

    summer = float(step(day, 85, 25) * (1 - step(day, 315, 25)))
    cover(land.margin, {"meadow": 0.35 + 0.45 * summer, "dark_soil": 0.65 - 0.45 * summer})
    cover(land.track, {"soil": 0.5, "sand": 0.1, "meadow": 0.4})
    leaves = step(day, 108 + land.leaf_shift, 12) * (1 - step(day, 292 + land.leaf_shift, 16))
    crowns = np.clip(1 + 0.09 * land.crowns + 0.05 * land.fine, 0.5, 1.5)
    broad = (1 - land.conifer) * crowns
    cover(land.forest, {"conifer": land.conifer * crowns, "deciduous": broad * leaves, "twigs": broad * (1 - leaves)})
    cover(np.clip(1.4 * land.town, 0, 1), land.streets)
    cover(land.sand, {"sand": 0.7, "soil": 0.3})
    cover(land.water, {"water": 0.7, "silt": 0.3})
    cover(land.road * 0.85, {"asphalt": 0.7, "concrete": 0.3})
    return parts


def _relief(land: Land, light: Light) -> np.ndarray:
    """Return the brightness (H, W) of slopes relative to flat ground; diffuse radiation fills half of the shade."""
    gy, gx = np.gradient(_smooth(land.elevation, 1.2))
    zenith, azimuth = np.deg2rad(light.zenith), np.deg2rad(light.azimuth)
    # Sun vector in (rows down, columns right, up); the surface normal is (-gy, -gx, 1).
    sun_y, sun_x, sun_z = -np.cos(azimuth) * np.sin(zenith), np.sin(azimuth) * np.sin(zenith), np.cos(zenith)
    facing = (-gy * sun_y - gx * sun_x + sun_z) / np.sqrt(1 + gy**2 + gx**2)
    return np.clip(0.3 + 0.7 * np.clip(facing, 0, None) / sun_z, 0.3, 1.5).astype(np.float32)


def _cells(y: np.ndarray, x: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (cell id, distance to the border in grid units) of Voronoi cells, one random point per grid square."""
    row, column = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
    first = np.full(y.shape, np.inf, dtype=np.float32)
    second = first.copy()
    cell = np.zeros(y.shape, dtype=np.int64)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            here = _mix(row + dy, column + dx + 7919 * (seed % 100003))
            py, px = row + dy + 0.15 + 0.7 * _hash(here, 31), column + dx + 0.15 + 0.7 * _hash(here, 32)
            distance = np.hypot(y - py, x - px).astype(np.float32)
            nearer = distance < first
            second = np.where(nearer, first, np.minimum(second, distance))
            first = np.where(nearer, distance, first)
            cell = np.where(nearer, here, cell)
    return cell, (second - first) / 2


def _cuts(t: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (interval number, distance to its nearer end) of `t` on a line cut at uneven steps of about 1."""
    number = np.floor(t).astype(np.int64)

    def cut(i: np.ndarray) -> np.ndarray:
        return i + 0.76 * (_hash(_mix(key, i), 33) - 0.5)

    number = np.where(t < cut(number), number - 1, np.where(t >= cut(number + 1), number + 1, number))
    return number, np.minimum(t - cut(number), cut(number + 1) - t)


def _mix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return one well-spread int64 per pair of integers."""
    z = a.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + b.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).astype(np.int64)


def _hash(ids: np.ndarray, salt: int) -> np.ndarray:
    """Return float32 in [0, 1) pseudo-random, depending on `ids` and `salt` alone."""
    mixed = _mix(ids, np.full((), salt, dtype=np.int64))
    return ((mixed.astype(np.uint64) >> np.uint64(40)).astype(np.float32)) / np.float32(2**24)


def _smooth(image: np.ndarray, deviation: float) -> np.ndarray:
    """Return `image` (H, W) under a Gaussian of `deviation` pixels, borders continued."""
    radius = max(1, int(np.ceil(2.5 * deviation)))
    taps = np.exp(-0.5 * (np.arange(-radius, radius + 1) / deviation) ** 2).astype(np.float32)
    taps /= taps.sum()
    for axis in (0, 1):
        pad = [(radius, radius) if a == axis else (0, 0) for a in (0, 1)]
        padded = np.pad(image, pad, mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, len(taps), axis=axis)
        image = windows @ taps
    return image.astype(np.float32, copy=False)
