"""Landsat Collection 2, HLS v2 and PlanetScope: names, dates, scales and quality bands, in the layouts as delivered."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pytest

import sader
from sader.errors import BandError, DataError
from sader.geo.offset import check_source
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources

rasterio = pytest.importorskip("rasterio")
DAYS = ("20220310", "20220326")


@pytest.fixture
def landsat(tmp_path, write_date, land):
    """A maker of Landsat folders; rows 0 to 9 are flagged as cloud."""

    def make(level: str = "L2SP", sensor: str = "LC08", numbers=(2, 3, 4, 5), day: str = DAYS[0], quality: bool = True):
        name = f"{sensor}_{level}_193027_{day}_20220415_02_T1"
        for number in numbers:
            part = f"SR_B{number}" if level == "L2SP" else f"B{number}"
            reflectance = land(number)[:1] / 1e4
            counts = np.rint((reflectance + 0.2) / 0.0000275 if level == "L2SP" else (reflectance + 0.1) / 2e-5)
            path = tmp_path / "landsat" / f"{name}_{part}.TIF"
            write_date(path, counts.astype(np.uint16), bands=None)
        if quality:
            flags = np.full((1, 70, 90), 21824, np.uint16)
            flags[:, :10] = 22280
            write_date(tmp_path / "landsat" / f"{name}_QA_PIXEL.TIF", flags, bands=None, nodata=1)
            write_date(tmp_path / "landsat" / f"{name}_ST_B10.TIF", flags, bands=None)
        return tmp_path / "landsat"

    return make


def reflectance(source, band):
    return source.read(source.grid.whole, bands=(band,), grid=source.grid)[0][0]


@pytest.mark.parametrize(
    ("sensor", "numbers", "bands"),
    [
        ("LC08", (1, 2, 3, 4, 5, 6, 7), ("B01", "B02", "B03", "B04", "B08", "B11", "B12")),
        ("LC09", (2, 3, 4, 5), ("B02", "B03", "B04", "B08")),
        ("LE07", (1, 2, 3, 4, 5, 7), ("B02", "B03", "B04", "B08", "B11", "B12")),
    ],
)
def test_level_2(landsat, land, sensor, numbers, bands):
    (source,) = open_sources([landsat(sensor=sensor, numbers=numbers)])
    assert source.bands == bands
    assert source.date == datetime(2022, 3, 10)
    for number, band in zip(numbers, bands, strict=True):
        np.testing.assert_allclose(reflectance(source, band), land(number)[0] / 1e4, atol=2e-5)
    assert check_source(source) is None
    mask = source.read_mask(source.grid.whole, grid=source.grid)
    assert mask[:10].all()
    assert not mask[10:].any()


def test_level_1_needs_its_metadata(landsat, land):
    folder = landsat(level="L1TP")
    with pytest.raises(DataError, match=r"is level 1, whose reflectance needs LC08_L1TP.*_MTL\.txt beside the bands"):
        open_sources([folder])
    lines = [
        f"    REFLECTANCE_{key}_BAND_{n} = {v}"
        for n in range(2, 6)
        for key, v in (("MULT", "2.0E-05"), ("ADD", "-0.1"))
    ]
    text = "\n".join([*lines, "    SUN_ELEVATION = 30.0", '    ORIGIN = "made"'])
    (folder / f"LC08_L1TP_193027_{DAYS[0]}_20220415_02_T1_MTL.txt").write_text(text)
    (source,) = open_sources([folder])
    np.testing.assert_allclose(reflectance(source, "B04"), 2 * land(4)[0] / 1e4, atol=5e-5)


def test_two_dates_become_one_map(landsat, tiny, tmp_path):
    landsat(day=DAYS[0])
    folder = landsat(day=DAYS[1])
    report = sader.remove_files(tiny, [folder], tmp_path / "c.tif", reference="2022-03-26", provenance=True)
    assert report.dates == tuple(f"LC08_L2SP_193027_{day}_20220415_02_T1" for day in DAYS)
    with rasterio.open(tmp_path / "c.tif") as made:
        assert made.descriptions == ("B02", "B03", "B04", "B08")
        assert (made.scales[0], made.offsets[0], made.nodata) == (pytest.approx(2.75e-5), pytest.approx(-0.2), 0)
        numbers = made.read()
    with rasterio.open(folder / f"LC08_L2SP_193027_{DAYS[1]}_20220415_02_T1_SR_B4.TIF") as given:
        np.testing.assert_array_equal(numbers[2, 10:], given.read(1)[10:])


def test_options_that_are_not_used_are_pointed_out(landsat):
    heard: list[str] = []
    open_sources([landsat(quality=False)], scale=0.0001, notice=heard.append)
    name = f"LC08_L2SP_193027_{DAYS[0]}_20220415_02_T1"
    assert heard[0] == f"{name} has no QA_PIXEL file: the model estimates its clouds."
    assert heard[1].startswith("--scale and --offset are not used for")
    with pytest.raises(BandError, match="has B02, B03, B04, B08; wanted: B12"):
        open_sources([landsat()], bands=("B12",))


@pytest.mark.parametrize(("sensor", "nir", "swir"), [("L30", "B05", "B06"), ("S30", "B08", "B11")])
def test_hls(tmp_path, write_date, land, sensor, nir, swir):
    name = f"HLS.{sensor}.T32TMS.2022069T103749.v2.0"
    for number, part in enumerate(("B02", "B03", "B04", nir, swir)):
        counts = land(number)[:1].astype(np.int16)
        counts[:, :, :5] = -9999
        write_date(tmp_path / "hls" / f"{name}.{part}.tif", counts, bands=None, nodata=-9999)
    flags = np.full((1, 70, 90), 64, np.uint8)
    flags[:, 20:30] |= 1 << 3
    write_date(tmp_path / "hls" / f"{name}.Fmask.tif", flags, bands=None, nodata=255)
    (source,) = open_sources([tmp_path / "hls"])
    assert source.date == datetime(2022, 3, 10, 10, 37, 49)
    assert source.bands == ("B02", "B03", "B04", "B08", "B11")
    values, valid = source.read(source.grid.whole, bands=("B08",), grid=source.grid)
    assert not valid[:, :5].any()
    np.testing.assert_allclose(values[0, :, 5:], land(3)[0, :, 5:] / 1e4, atol=1e-6)
    mask = source.read_mask(source.grid.whole, grid=source.grid)
    assert mask[20:30].all()
    assert not mask[30:].any()
    (chosen,) = with_masks([source], "fmask:1")
    assert not chosen.read_mask(source.grid.whole, grid=source.grid).any()


def test_planetscope(tmp_path, write_date, land):
    path = write_date(tmp_path / "20220310_101112_10_2465_3B_AnalyticMS_SR_clip.tif", land(0), bands=None)
    clear = np.ones((8, 70, 90), np.uint8)
    clear[0, :30] = 0
    write_date(tmp_path / "20220310_101112_10_2465_3B_udm2_clip.tif", clear, bands=None, nodata=None)
    (source,) = open_sources([tmp_path])
    assert source.bands == ("B02", "B03", "B04", "B08")
    (masked,) = with_masks([source], tmp_path)
    mask = masked.read_mask(source.grid.whole, grid=source.grid)
    assert mask[:30].all()
    assert not mask[30:].any()
    radiance = path.rename(tmp_path / "20220310_101112_10_2465_3B_AnalyticMS.tif")
    with pytest.raises(BandError, match="holds radiance at the sensor"):
        open_sources([radiance])
