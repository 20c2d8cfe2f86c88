"""Properties of procedural places: spectra, seasons, seeds, truth under the clouds."""

from __future__ import annotations

import numpy as np
import pytest

from sader.bands import BANDS_13
from sader.data.synthetic.landscape import CROPS, MATERIALS, SPECTRA, Land, crop_cover
from sader.data.synthetic.scene import CLASSES, Place, demo_scene, make_place, make_series
from sader.errors import BandError, ConfigError, ShapeError

RGBN = ("B02", "B03", "B04", "B08")


@pytest.fixture(scope="module")
def summer() -> Place:
    return make_place(1, size=(192, 224), dates=2, days=(0, 10), start=170)


def ndvi(surface: np.ndarray, bands: tuple[str, ...]) -> np.ndarray:
    red, nir = surface[..., bands.index("B04"), :, :], surface[..., bands.index("B08"), :, :]
    return (nir - red) / (nir + red)


def test_place_is_a_pure_function_of_its_seed() -> None:
    one, two, other = (make_place(seed, size=(48, 64), bands=RGBN, dates=2) for seed in (3, 3, 4))
    assert np.array_equal(one.surface, two.surface)
    assert np.array_equal(one.days, two.days)
    assert not np.array_equal(one.surface, other.surface)


def test_a_date_does_not_depend_on_how_many_follow() -> None:
    few, many = (make_place(3, size=(48, 64), bands=RGBN, dates=n, days=range(0, 10 * n, 10)) for n in (1, 3))
    assert np.array_equal(few.surface[0], many.surface[0])


def test_bands_are_picked_not_redrawn() -> None:
    # Noise is drawn per band asked for, so compare within its size.
    all_bands = make_place(5, size=(48, 48), dates=1).surface[0]
    nir = make_place(5, size=(48, 48), bands=("B08",), dates=1).surface[0, 0]
    assert np.abs(all_bands[BANDS_13.index("B08")] - nir).max() < 0.03


@pytest.mark.parametrize("size", [(16, 16), (40, 130), (97, 33)])
def test_surface_is_float32_in_range_for_any_size(size: tuple[int, int]) -> None:
    place = make_place(2, size=size, dates=2)
    assert place.surface.shape == (2, 13, *size)
    assert place.surface.dtype == np.float32
    assert place.surface.min() > 0
    assert place.surface.max() < 0.7
    assert place.classes.shape == size
    assert place.classes.max() < len(CLASSES)
    assert place.days[0] == 0
    assert (np.diff(place.days) > 0).all()


def test_land_has_the_spectra_it_should(summer: Place) -> None:
    index = ndvi(summer.surface[0], summer.bands)
    mean = {name: index[summer.classes == number].mean() for number, name in enumerate(CLASSES)}
    assert mean["forest"] > mean["bare"] > mean["water"]
    assert mean["forest"] > 0.7
    assert mean["water"] < 0.1
    assert mean["meadow"] > mean["town"]
    forest = dict(zip(summer.bands, summer.surface[0][:, summer.classes == 2].mean(axis=1), strict=True))
    assert forest["B04"] < forest["B05"] < forest["B06"] < forest["B07"]  # the red edge
    assert forest["B11"] < forest["B08"]
    assert forest["B10"] < 0.01


def test_every_kind_of_land_is_there(summer: Place) -> None:
    shares = np.bincount(summer.classes.ravel(), minlength=len(CLASSES)) / summer.classes.size
    assert shares[CLASSES.index("field")] > 0.1
    assert shares[CLASSES.index("forest")] > 0.05
    for name in ("water", "road", "town"):
        assert 0.002 < shares[CLASSES.index(name)] < 0.2, name


def test_season_changes_fields_smoothly_and_water_hardly() -> None:
    days = np.arange(0, 121, 5)
    place = make_place(6, size=(96, 128), bands=("B04", "B08"), dates=len(days), days=days, start=90)
    index = ndvi(place.surface, place.bands)
    field = index[:, place.classes == 0]
    assert np.abs(field[12] - field[0]).mean() > 0.15
    # Neighbouring dates differ less than distant ones, and the mean over the place never jumps.
    assert np.abs(field[1:] - field[:-1]).mean() < 0.3 * np.abs(field[12] - field[0]).mean()
    assert np.abs(np.diff(index.mean(axis=(1, 2)))).max() < 0.08
    water = place.surface[:, 1][:, place.classes == 3].mean(axis=1)
    assert np.ptp(water) < 0.03


def test_crop_calendar_is_smooth_and_covers_at_most_the_ground() -> None:
    crops = np.arange(len(CROPS))
    ones = np.ones(len(CROPS), dtype=np.float32)
    year = [crop_cover(crops, day, shift=0 * ones, vigour=1.1 * ones) for day in np.arange(1.0, 366.0)]
    total = np.array([sum(day.values()) for day in year])
    assert total.min() >= 0
    assert total.max() <= 1 + 1e-6
    for name in year[0]:
        course = np.array([day[name] for day in year])
        assert np.abs(np.diff(course, axis=0)).max() < 0.12, name
    assert (np.array([day["crop"] for day in year])[:, 0].argmax() + 1) < 188  # cereal is green before its harvest


def test_materials_are_reflectances() -> None:
    assert SPECTRA.shape == (len(MATERIALS), len(BANDS_13))
    assert SPECTRA.min() > 0
    assert SPECTRA.max() < 0.6


def test_series_keeps_the_truth_outside_its_masks() -> None:
    series = make_series(8, size=(56, 72), dates=3, coverage=(0.3, 0.0, 0.6), reference=2)
    place = make_place(8, size=(56, 72), bands=series.bands, dates=3)
    assert series.cloudy.shape == (3, 4, 56, 72)
    assert series.cloudy.dtype == np.float32
    assert series.cloud_mask.dtype == bool
    assert np.array_equal(series.clear, place.surface[2])
    for date in range(3):
        seen = ~series.cloud_mask[date]
        assert np.array_equal(series.cloudy[date][:, seen], place.surface[date][:, seen])
    assert (series.cloudy != place.surface).any(axis=1)[series.cloud_mask].all()
    assert series.cloud_mask[0].mean() >= 0.29
    assert not series.cloud_mask[1].any()
    assert series.cloud_mask[2].mean() >= 0.59


def test_series_without_reference_aims_at_the_first_date_and_one_coverage_serves_all() -> None:
    series = make_series(8, size=(32, 48), dates=2, coverage=0.5, reference=None)
    assert series.reference is None
    assert np.array_equal(series.clear, make_place(8, size=(32, 48), bands=series.bands, dates=2).surface[0])
    assert (series.cloud_mask.mean(axis=(1, 2)) >= 0.48).all()
    assert not np.array_equal(series.cloud_mask[0], series.cloud_mask[1])


def test_hill_sides_towards_the_sun_are_brighter(summer: Place) -> None:
    land = Land(1, 192, 224)
    assert np.array_equal(land.classes, summer.classes)
    azimuth = np.deg2rad(summer.sun_azimuth[0])
    assert 100 < summer.sun_azimuth[0] < 180  # a morning pass: the sun stands in the south-east
    down, right = np.gradient(land.elevation)
    towards = -(down * -np.cos(azimuth) + right * np.sin(azimuth))  # falls towards the sun
    forest = (land.forest > 0.9) & (land.hilly > 0.5)
    nir = summer.surface[0, BANDS_13.index("B08")]
    assert np.corrcoef(nir[forest], towards[forest])[0, 1] > 0.3


def test_demo_scene_is_what_the_tutorial_says() -> None:
    demo = demo_scene()
    assert demo.cloudy.shape == (3, 4, 384, 512)
    assert demo.bands == RGBN
    assert demo.reference == 0
    cover = demo.cloud_mask.mean(axis=(1, 2))
    assert 0.35 < cover[0] < 0.45
    assert (cover[1:] < 0.45).all()
    assert 0.01 < demo.cloud_mask.all(axis=0).mean() < 0.10  # something is seen on no date
    assert np.array_equal(demo.cloudy[0][:, ~demo.cloud_mask[0]], demo.clear[:, ~demo.cloud_mask[0]])


def test_mistakes_are_named() -> None:
    with pytest.raises(BandError, match="unknown band 'B13'; did you mean B1"):
        make_place(0, size=(32, 32), bands=("B02", "B13"))
    with pytest.raises(ShapeError, match="at least 16x16"):
        make_place(0, size=(8, 64))
    with pytest.raises(ConfigError, match="expected at least 1"):
        make_place(0, size=(32, 32), dates=0)
    with pytest.raises(ConfigError, match="one day per date"):
        make_place(0, size=(32, 32), dates=3, days=(0, 5))
    with pytest.raises(ConfigError, match="expected 0 to 1, or None"):
        make_series(0, size=(32, 32), dates=2, reference=2)
    with pytest.raises(ConfigError, match="2 values for 3 dates"):
        make_series(0, size=(32, 32), dates=3, coverage=(0.1, 0.2))
