"""What files say about themselves, and how paths become dates."""

from __future__ import annotations

import pickle
from datetime import datetime

import numpy as np
import pytest

from sader.errors import BandError, DataError, ShapeError
from sader.geo.grid import Grid
from sader.geo.read.arrays import ArraySource, source_from
from sader.geo.read.geotiff import date_in, open_geotiff
from sader.geo.read.sources import open_sources
from sader.geo.stack import DateSource
from sader.inference.tiling import Window
from sader.inference.values import ValueCoding

rasterio = pytest.importorskip("rasterio")
WHOLE = Window(0, 0, 70, 90)


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("S2_20LMR_2022-03-10.tif", datetime(2022, 3, 10)),
        ("S2A_MSIL2A_20220310T101021_N0400", datetime(2022, 3, 10, 10, 10, 21)),
        ("scene_2022_12_31_v2", datetime(2022, 12, 31)),
        ("T32TMS_20220230_20220301", datetime(2022, 3, 1)),
        ("L1C_99999999_a", None),
        ("12022031099", None),
        ("clear", None),
    ],
)
def test_dates_in_names(text, date):
    assert date_in(text) == date


def test_a_source_can_be_sent_to_another_process(tmp_path, write_date, land):
    source, _ = open_geotiff(write_date(tmp_path / "a_2022-03-10.tif", 0))
    first, _ = source.read(WHOLE, bands=("B04",), grid=source.grid)
    again = pickle.loads(pickle.dumps(source))
    assert isinstance(again, DateSource)
    np.testing.assert_array_equal(again.read(WHOLE, bands=("B04",), grid=source.grid)[0], first)
    np.testing.assert_allclose(first[0], land(0)[2] * 1e-4, atol=1e-7)


def test_names_choose_and_positions_need_names(tmp_path, write_date):
    named = write_date(tmp_path / "named.tif", 0)
    plain = write_date(tmp_path / "plain.tif", 0, bands=None)
    chosen, _ = open_geotiff(named, bands=("B08", "B02"))
    assert chosen.bands == ("B02", "B03", "B04", "B08"), "the file's own names stand"
    given, _ = open_geotiff(plain, bands=("B08", "B04", "B03", "B02"))
    numbers = given.read_numbers(WHOLE, bands=("B02", "B08"), grid=given.grid)
    with rasterio.open(plain) as dataset:
        np.testing.assert_array_equal(numbers, dataset.read([4, 1]))
    with pytest.raises(BandError, match=r"named.tif has no band B11; it has B02, B03, B04, B08\."):
        chosen.read(WHOLE, bands=("B11",), grid=chosen.grid)


def test_the_colours_of_a_file_are_names(tmp_path, write_date, land):
    path = write_date(tmp_path / "a.tif", land(0)[:3], bands=None, photometric="RGB")
    source, _ = open_geotiff(path)
    assert source.bands == ("B04", "B03", "B02")


def test_an_alpha_band_says_where_data_is(tmp_path, write_date, land):
    array = land(0)
    alpha = np.full((1, 70, 90), 65535, np.uint16)
    alpha[0, :10] = 0
    path = write_date(tmp_path / "a.tif", np.concatenate([array, alpha]), bands=None, nodata=None, alpha="yes")
    source, _ = open_geotiff(path, bands=("B02", "B03", "B04", "B08"))
    _, valid = source.read(WHOLE, bands=source.bands, grid=source.grid)
    assert not valid[:10].any()
    assert valid[10:].all()


def test_scales_and_offsets_of_the_file_the_user_and_the_tag(tmp_path, write_date):
    tagged = write_date(tmp_path / "tagged.tif", 0, scale=2e-4, offset=-0.2)
    assert open_geotiff(tagged)[0].coding == ValueCoding("uint16", 2e-4, -0.2, 0.0, True)
    assert open_geotiff(tagged, offset="none")[0].coding.offset == 0.0
    plain = write_date(tmp_path / "plain.tif", 0)
    assert open_geotiff(plain)[0].coding == ValueCoding("uint16", 1e-4, 0.0, 0.0, False)
    assert open_geotiff(plain, offset="-1000")[0].coding.offset == pytest.approx(-0.1)
    assert open_geotiff(plain, scale=5e-5)[0].coding.scale == 5e-5
    baseline = write_date(tmp_path / "new.tif", 0, tags={"PROCESSING_BASELINE": "04.00"})
    assert open_geotiff(baseline)[0].coding.offset == pytest.approx(-0.1)


def test_different_scales_in_one_file_are_refused(tmp_path, write_date):
    path = write_date(tmp_path / "a.tif", 0)
    with rasterio.open(path, "r+") as dataset:
        dataset.scales = (1e-4, 1e-4, 1e-4, 1.0)
    with pytest.raises(DataError, match="different scales and offsets"):
        open_geotiff(path)


def test_floats_are_reflectance_or_counts(tmp_path, write_date, land):
    small = write_date(tmp_path / "small.tif", (land(0) * 1e-4).astype(np.float32), nodata=-9999.0)
    large = write_date(tmp_path / "large.tif", land(0).astype(np.float32), nodata=None)
    for path in (small, large):
        source, _ = open_geotiff(path)
        values, valid = source.read(WHOLE, bands=("B02",), grid=source.grid)
        assert valid.all()
        np.testing.assert_allclose(values[0], land(0)[0] * 1e-4, atol=1e-6)


def test_bands_of_several_resolutions_in_a_folder(tmp_path, write_date, land):
    """The 20 m band of a date comes onto the grid of its 10 m bands."""
    fine, coarse = land(0), land(0)[:, ::2, ::2]
    for number, band in enumerate(("B02", "B04")):
        write_date(tmp_path / "in" / f"S2_20220310_{band}_10m.tif", fine[number : number + 1], bands=None)
    write_date(
        tmp_path / "in" / "S2_20220310_B11_20m.tif", coarse[2:3], bands=None,
        transform=(20.0, 0.0, 600000.0, 0.0, -20.0, 5100000.0),
    )  # fmt: skip
    (source,) = open_sources([tmp_path / "in"])
    assert set(source.bands) == {"B02", "B04", "B11"}
    assert source.grid.shape == (70, 90)
    assert source.date == datetime(2022, 3, 10)
    values, valid = source.read(WHOLE, bands=("B11",), grid=source.grid)
    assert valid.mean() > 0.95
    assert np.corrcoef(values[0].ravel(), land(0)[2].ravel())[0, 1] > 0.9


def test_files_that_store_their_bands_differently_are_refused(tmp_path, write_date, land):
    write_date(tmp_path / "in" / "a_B02.tif", land(0)[:1], bands=None)
    write_date(tmp_path / "in" / "a_B03.tif", land(0)[:1], bands=None, scale=1e-3)
    with pytest.raises(BandError, match="the files of a store their values differently"):
        open_sources([tmp_path / "in"])


def test_arrays_and_loading_functions(land):
    profile = {"crs": "EPSG:32632", "transform": (10, 0, 0, 0, -10, 0), "nodata": 0, "descriptions": ("blue", "nir")}
    source = source_from("x.npy", lambda path: (land(0)[[0, 3]], profile))
    assert source.bands == ("B02", "B08")
    values, valid = source.read(Window(5, 6, 7, 8), bands=("B08",), grid=source.grid)
    np.testing.assert_allclose(values[0], land(0)[3, 5:12, 6:14] * 1e-4, atol=1e-7)
    assert valid.all()
    far = source.grid.coarser(4)
    assert source.read(far.whole, bands=("B02",), grid=far)[0].shape == (1, 18, 23)
    with pytest.raises(BandError, match="4 bands and 2 names"):
        source_from("x.npy", lambda path: (land(0), profile))
    with pytest.raises(ShapeError, match=r"returned shape \(70, 90\)"):
        source_from("x.npy", lambda path: (land(0)[0], profile))
    grid = Grid("", (1.0, 0.0, 0.0, 0.0, 1.0, 0.0), 90, 70)
    with pytest.raises(ShapeError, match=r"expected \(C, H, W\) = \(1, 70, 90\)"):
        ArraySource("a", None, ("B02",), grid, ValueCoding("uint16", 1e-4, 0.0, 0.0), land(0))
    with pytest.raises(DataError, match="arrays are not warped"):
        source.read(WHOLE, bands=("B02",), grid=grid)


def test_nothing_given():
    with pytest.raises(DataError, match="no input given"):
        open_sources([])


def test_a_file_written_anew_is_read_anew(tmp_path, write_date, land):
    path = write_date(tmp_path / "a.tif", land(0))
    source, _ = open_geotiff(path)
    before = source.read_numbers(WHOLE, bands=("B02",), grid=source.grid)
    write_date(path, land(3))
    after = source.read_numbers(WHOLE, bands=("B02",), grid=source.grid)
    np.testing.assert_array_equal(before[0], land(0)[0])
    np.testing.assert_array_equal(after[0], land(3)[0])


def test_results_in_the_folder_are_no_dates_and_the_finest_file_of_a_band_is_taken(tmp_path, write_date, land):
    folder = tmp_path / "in"
    write_date(folder / "S2_2022-03-10.tif", 0)
    write_date(folder / "clear.tif", 1, tags={"SADER_VERSION": "0.1.0"})
    texts: list[str] = []
    assert [source.name for source in open_sources([folder], notice=texts.append)] == ["S2_2022-03-10.tif"]
    assert "clear.tif" in texts[0]
    bands = tmp_path / "bands"
    write_date(bands / "S2_20220310_B02_10m.tif", land(0)[:1], bands=None)
    half = (20.0, 0.0, 600000.0, 0.0, -20.0, 5100000.0)
    write_date(bands / "S2_20220310_B02_20m.tif", land(0)[:1, ::2, ::2], bands=None, transform=half)
    (source,) = open_sources([bands])
    assert source.bands == ("B02",)
    assert source.grid.shape == (70, 90)


def test_an_item_in_its_own_file_and_in_a_collection_counts_once(tmp_path, make_item):
    import json

    folder = tmp_path / "items"
    paths = [make_item(day, folder=folder) for day in ("20220310", "20220520")]
    features = [json.loads(path.read_text()) for path in paths]
    (folder / "search.json").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    assert [source.date.month for source in open_sources([folder])] == [3, 5]
    assert len(open_sources([*paths, folder / "search.json"])) == 2
    made = {"type": "Feature", "stac_version": "1.1.0", "id": "clear", "assets": {}}
    made["properties"] = {"processing:software": {"sader": "1"}}
    (folder / "clear.json").write_text(json.dumps(made))
    assert len(open_sources([folder])) == 2, "a result is no date of the next run"


def test_bands_choose_among_those_of_items_and_products(make_item, make_safe):
    for path in (make_item(), make_safe()):
        assert open_sources([path], bands="B04,B03")[0].bands == ("B04", "B03")


def test_signatures_are_not_shown():
    from urllib.parse import quote

    from sader.geo.read.raster import shown

    name = f"/vsicurl?max_retry=4&url={quote('https://host/a b.tif?sig=secret', safe='')}"
    assert shown(name) == "https://host/a b.tif"
    assert shown(f"'{name}' does not exist") == "'https://host/a b.tif' does not exist"
    assert shown("/vsicurl/https://host/a.tif?sig=secret") == "https://host/a.tif"
    assert shown("folder/a?b.tif") == "folder/a?b.tif"


def test_the_model_is_chosen_by_the_bands(tmp_path, write_date, land):
    from sader.geo.remove import choose_model

    said: list[str] = []
    four, five = ("B02", "B03", "B04", "B08"), ("B02", "B03", "B04", "B08", "B11")
    small = open_sources([write_date(tmp_path / "a.tif", land(0), bands=four)])
    large = open_sources([write_date(tmp_path / "b.tif", np.concatenate([land(0), land(1)[:1]]), bands=five)])
    assert choose_model(small, None, said.append) == "sader-s2-rgbn"
    assert choose_model([*large, *small], None, said.append) == "sader-s2-rgbn", "not in every date"
    assert choose_model(large, four, said.append) == "sader-s2-rgbn", "not asked for"
    assert said == []
    assert choose_model(large, None, said.append) == "sader-s2-msi"
    assert "sader-s2-msi, because the files have B11 too" in said[0]
