"""Procedural places with known truth: farmland, forest, river, roads, towns and hills through the seasons, with clouds.

For tests, the tutorial and the figures of the documents (no data set needed). Every image depends on its seed alone.
No real place and no sensor geometry are modelled; sizes are in 10 m pixels, reflectance is surface-like with a little
haze.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sader.bands import BANDS_13
from sader.data.clouds import CloudSettings, apply_clouds, band_indices, cloud_fields
from sader.data.synthetic.landscape import CLASSES, Land, light_on, render
from sader.errors import ConfigError, ShapeError

__all__ = ["CLASSES", "Place", "SyntheticSeries", "demo_scene", "make_place", "make_series"]


@dataclass(frozen=True)
class Place:
    """One place without clouds."""

    surface: np.ndarray
    """(T, C, H, W) float32 reflectance of each date, with its sun, air and sensor noise, without clouds."""
    days: np.ndarray
    """(T,) float32, days since the first date."""
    classes: np.ndarray
    """(H, W) uint8, places in CLASSES."""
    bands: tuple[str, ...]
    """Names of the C bands."""
    sun_azimuth: np.ndarray
    """(T,) float32, degrees clockwise from north."""


@dataclass(frozen=True)
class SyntheticSeries:
    """A series of cloudy dates with known truth."""

    cloudy: np.ndarray
    """(T, C, H, W) float32 reflectance in [0, 1]; equal to the truth of the date outside `cloud_mask`."""
    clear: np.ndarray
    """(C, H, W) float32, truth of the reference date, or of the first date without a reference."""
    cloud_mask: np.ndarray
    """(T, H, W) bool, True = cloud or shadow."""
    days: np.ndarray
    """(T,) float32, days since the first date."""
    bands: tuple[str, ...]
    """Names of the C bands."""
    reference: int | None
    """The date to clean, or None."""


def make_place(
    seed: int,
    *,
    size: tuple[int, int] = (256, 256),
    bands: Sequence[str] = BANDS_13,
    dates: int = 3,
    days: Sequence[float] | None = None,
    start: float | None = None,
) -> Place:
    """Return a procedural place on `dates` days, without clouds.

    `size` is (H, W) in pixels, at least 16 each. `days` (T,) are days since the first date; None draws steps of 5 to
    20. `start` is the day of the year of the first date; None draws one between April and August.
    """
    index = band_indices(bands)
    height, width = size
    if height < 16 or width < 16:
        raise ShapeError(f"size is {height}x{width}; expected at least 16x16 pixels.")
    if dates < 1:
        raise ConfigError(f"dates is {dates}; expected at least 1.")
    if days is not None and len(days) != dates:
        raise ConfigError(f"days has {len(days)} entries for {dates} dates; expected one day per date.")
    rng = np.random.default_rng([seed, 1])
    first = float(rng.uniform(100, 230)) if start is None else start
    steps = 5.0 * np.random.default_rng([seed, 2]).integers(1, 5, size=dates)
    since = np.concatenate([[0.0], np.cumsum(steps)[:-1]]) if days is None else np.asarray(days, dtype=np.float64)

    land = Land(seed, height, width)
    lights = [light_on(first + day, seed, date) for date, day in enumerate(since)]
    surface = np.stack(
        [
            render(land, first + day, light, index, np.random.default_rng([seed, 4, date]))
            for date, (day, light) in enumerate(zip(since, lights, strict=True))
        ]
    )
    return Place(
        surface=surface,
        days=since.astype(np.float32),
        classes=land.classes,
        bands=tuple(bands),
        sun_azimuth=np.array([light.azimuth for light in lights], dtype=np.float32),
    )


def make_series(
    seed: int,
    *,
    size: tuple[int, int] = (256, 256),
    dates: int = 3,
    bands: Sequence[str] = ("B02", "B03", "B04", "B08"),
    coverage: Sequence[float] | float | None = None,
    reference: int | None = 0,
    days: Sequence[float] | None = None,
    start: float | None = None,
    settings: CloudSettings | None = None,
) -> SyntheticSeries:
    """Return a procedural place under clouds, with its truth.

    `coverage` is the part of each date under cloud, 0 to 1 (shadows not counted): one value per date, one for
    all, or None to draw it. Clouds of a date depend on the seed and the date's number alone.
    """
    if reference is not None and not 0 <= reference < dates:
        raise ConfigError(f"reference is {reference} with {dates} dates; expected 0 to {dates - 1}, or None.")
    wanted = [coverage] * dates if coverage is None or isinstance(coverage, int | float) else list(coverage)
    if len(wanted) != dates:
        raise ConfigError(
            f"coverage has {len(wanted)} values for {dates} dates; expected one per date, or one for all."
        )
    place = make_place(seed, size=size, bands=bands, dates=dates, days=days, start=start)
    sky = [(part, [seed, 3, date], settings or CloudSettings()) for date, part in enumerate(wanted)]
    return _series(place, sky, reference)


def demo_scene() -> SyntheticSeries:
    """Return the scene of the tutorial: three summer dates, 384x512 pixels, four bands, the first to be cleaned."""
    bands = ("B02", "B03", "B04", "B08")
    place = make_place(_DEMO_SEED, size=(384, 512), bands=bands, dates=3, days=(0, 10, 25), start=184)
    return _series(place, _DEMO_SKY, 0)


_DEMO_SEED = 7
_DEMO_LIGHT = CloudSettings(
    shadow_offset=(26.0, 40.0),
    brightness=(0.38, 0.44),
    texture=(1.1, 1.3),
    shadow_strength=(0.85, 0.95),
    thickness=(0.8, 1.0),
    thin_only_probability=0.0,
)
_DEMO_SKY = (  # coverage, key of the clouds, kinds; the keys were chosen for a clear picture
    (0.25, [4], replace(_DEMO_LIGHT, thick_kinds=(1, 0, 0), thin_kinds=(1, 0, 0))),
    (0.30, [6], replace(_DEMO_LIGHT, thick_kinds=(0, 0, 1), thin_kinds=(0, 1, 0))),
    (0.28, [2], replace(_DEMO_LIGHT, thick_kinds=(0, 0, 1), thin_kinds=(0, 1, 0))),
)


Sky = tuple[float | None, Sequence[int], CloudSettings]
"""Coverage, key and settings of the clouds of one date."""


def _series(place: Place, skies: Sequence[Sky], reference: int | None) -> SyntheticSeries:
    covered = [_under_clouds(place, date, *sky) for date, sky in enumerate(skies)]
    return SyntheticSeries(
        cloudy=np.stack([cloudy for cloudy, _ in covered]),
        clear=place.surface[reference or 0].copy(),
        cloud_mask=np.stack([mask for _, mask in covered]),
        days=place.days,
        bands=place.bands,
        reference=reference,
    )


def _under_clouds(
    place: Place, date: int, coverage: float | None, key: Sequence[int], settings: CloudSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Return (cloudy (C, H, W), mask (H, W)) of one date; the shadows follow its sun."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(list(key)).generate_state(1)[0]))
    azimuth = float(place.sun_azimuth[date])
    settings = replace(settings, sun_azimuth=(azimuth, azimuth))
    clear = torch.from_numpy(place.surface[date])[None]
    fields = cloud_fields(
        1,
        *clear.shape[2:],
        coverage=None if coverage is None else torch.tensor([float(coverage)]),
        generator=generator,
        device="cpu",
        settings=settings,
    )
    cloudy, cloud, shadow, _ = apply_clouds(clear, fields, bands=place.bands, generator=generator)
    return cloudy[0].numpy(), (cloud | shadow)[0].numpy()
