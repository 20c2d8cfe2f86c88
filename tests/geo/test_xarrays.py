"""xarray in, xarray out: what an array may look like, what is kept of it, and every refusal."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pytest

from sader.checkpoint import Checkpoint
from sader.errors import BandError, ConfigError, DataError, SaderError, ShapeError, ValueRangeError
from sader.geo.xarray.cube import cube_scene, mask_data, open_cube
from sader.geo.xarray.lazy import remove_xarray
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.inference.scene_match import Overview, find_reference
from sader.models import build_model, get_preset

xr = pytest.importorskip("xarray")

TINY = {"widths": (16, 32), "blocks": (1, 1), "fusion_width": 16, "key_width": 8, "emb_width": 16, "kernel": 3}
BANDS = ["B02", "B03", "B04", "B08"]
TIMES = np.array(["2022-03-10", "2022-05-13", "2022-10-20"], "datetime64[ns]")


@pytest.fixture(scope="module")
def remover() -> CloudRemover:
    import torch

    torch.manual_seed(0)
    config = get_preset("small").replace(name="tiny", network={**TINY, "cloud_widths": (8,), "refinement_widths": (8,)})
    checkpoint = Checkpoint(build_model(config).eval(), config, {})
    return CloudRemover(checkpoint, device="cpu", options=RemoverOptions(tile=32, overlap=8))


def cube(height: int = 24, width: int = 40, dates: int = 3, *, crs: bool = True, seed: int = 0, **attrs: Any) -> Any:
    values = np.random.default_rng(seed).uniform(0.02, 0.5, (dates, 4, height, width)).astype(np.float32)
    array = xr.DataArray(
        values,
        dims=("time", "band", "y", "x"),
        coords={
            "time": TIMES[:dates],
            "band": BANDS,
            "y": 5e6 - 10.0 * np.arange(height),
            "x": 4e5 + 10.0 * np.arange(width),
        },
        attrs=attrs,
    )
    if crs:
        array = array.assign_coords(spatial_ref=((), 0, {"crs_wkt": "EPSG:32632", "spatial_ref": "EPSG:32632"}))
    return array


# ------------------------------------------------------------------------------------------------ what comes out


def test_an_array_in_memory_gives_what_the_remover_gives_and_keeps_place_and_names(remover):
    array = cube()
    result = remove_xarray(remover, array, reference=1, seed=3)
    assert np.array_equal(result.values, remover(array.values, reference=1, seed=3))
    assert result.dims == ("band", "y", "x")
    assert list(result.band.values) == BANDS
    assert np.array_equal(result.y, array.y)
    assert np.array_equal(result.x, array.x)
    assert result.spatial_ref.attrs["crs_wkt"] == "EPSG:32632"
    assert "time" not in result.coords
    assert result.dtype == np.float32


def test_an_array_in_memory_needs_no_dask(remover, monkeypatch):
    monkeypatch.setitem(sys.modules, "dask", None)
    monkeypatch.setitem(sys.modules, "dask.array", None)
    assert remove_xarray(remover, cube(), reference=0).shape == (4, 24, 40)


def test_axes_are_found_by_name_in_any_order_and_under_other_names(remover):
    array = cube()
    wanted = remove_xarray(remover, array, reference=0)
    turned = array.transpose("x", "band", "time", "y")
    assert np.array_equal(remove_xarray(remover, turned, reference=0), wanted)
    named = array.rename(time="t", band="bands", y="latitude", x="longitude")
    result = remove_xarray(remover, named, reference=0)
    assert result.dims == ("bands", "latitude", "longitude")
    assert np.array_equal(result, wanted)


def test_bands_are_found_by_name_not_by_position(remover):
    array = cube()
    other = array.isel(band=[3, 0, 2, 1])
    result = remove_xarray(remover, other, reference=None)
    assert list(result.band.values) == ["B08", "B02", "B04", "B03"]
    wanted = remove_xarray(remover, array, reference=None)
    np.testing.assert_allclose(result.sel(band=BANDS), wanted, atol=1e-5)  # bands are summed in another order
    words = array.assign_coords(band=["blue", "green", "red", "nir"])
    assert list(remove_xarray(remover, words, reference=None).band.values) == ["blue", "green", "red", "nir"]


def test_fewer_bands_than_the_model_has_are_enough(remover):
    result = remove_xarray(remover, cube().sel(band=["B04", "B03"]), reference=0)
    assert list(result.band.values) == ["B04", "B03"]


def test_a_dataset_with_one_variable_per_band_is_stacked(remover):
    array = cube()
    dataset = array.to_dataset(dim="band")
    assert np.array_equal(remove_xarray(remover, dataset, reference=0), remove_xarray(remover, array, reference=0))


def test_integers_are_read_with_their_cf_attributes(remover):
    array = cube()
    counts = (array * 10000).round().astype("uint16") + 1000
    counts[1, :, :5, :7] = 0
    counts[2, 1, 20, 30] = 0  # one band is enough to make the date's pixel unknown
    counts.attrs = {"scale_factor": 1e-4, "add_offset": -0.1, "_FillValue": 0}
    found = open_cube(counts, remover)
    scene = cube_scene(found, found.data, None)
    values, valid = scene.cloudy, scene.valid
    assert not valid[1, :5, :7].any()
    assert not valid[2, 20, 30]
    assert valid.sum() == valid.size - 36
    assert np.abs(values - array.values).max(where=valid[:, None], initial=0) < 6e-5
    assert (values[np.broadcast_to(~valid[:, None], values.shape)] <= 0.5).all()
    result = remove_xarray(remover, counts, reference=0)
    assert np.isfinite(result).all()
    assert not {"scale_factor", "add_offset", "_FillValue"} & set(result.attrs)


@pytest.mark.parametrize("key", ["_FillValue", "missing_value", "nodata"])
def test_every_usual_name_of_nodata_is_understood(remover, key):
    counts = cube().copy(data=np.full((3, 4, 24, 40), 3000, "int16"))
    counts[0, :, 4, 4] = -999
    counts.attrs = {"scale_factor": 1e-4, key: [-999] if key == "nodata" else -999}
    found = open_cube(counts, remover)
    assert found.coding.nodata == -999
    assert cube_scene(found, found.data, None).valid.sum() == 3 * 24 * 40 - 1


def test_integers_without_a_scale_are_sentinel_counts_and_a_warning_says_so(remover):
    counts = (cube() * 10000).round().astype("uint16")
    with pytest.warns(UserWarning, match=r"uint16 without the attribute scale_factor.*number \* 0.0001.*add_offset"):
        found = open_cube(counts, remover)
    assert (found.coding.scale, found.coding.nodata) == (1e-4, 0)


def test_nan_is_missing_and_nodata_everywhere_is_nodata_in_the_result(remover):
    array = cube()
    array[:, :, :3, :4] = np.nan
    array[0, :, 10:, :] = np.nan
    result = remove_xarray(remover, array, reference=1)
    assert np.isnan(result.values[:, :3, :4]).all()
    assert np.isfinite(result.values).sum() == 4 * (24 * 40 - 12)


def test_days_come_from_the_time_coordinate(remover):
    assert open_cube(cube(), remover).days == (0.0, 64.0, 224.0)
    assert open_cube(cube().assign_coords(time=[7, 3, 5]), remover).days == (4.0, 0.0, 2.0)
    assert open_cube(cube().drop_vars("time"), remover).days is None


def test_the_reference_may_be_an_index_a_date_or_none(remover):
    names = open_cube(cube(), remover).names
    valid = np.ones((3, 1, 10), bool)
    cloud = (np.arange(10) >= np.array([1, 2, 9])[:, None, None]).astype(np.float32)  # clear: 0.1, 0.2, 0.9
    overview = Overview(np.zeros((3, 1, 1, 10), np.float32), valid, cloud)

    def found(wanted, names=names):
        return find_reference(wanted, names, overview)

    assert found(-1) == 2
    assert found("2022-05-13") == 1
    assert found("2022-10") == 2
    assert found(np.datetime64("2022-03-10")) == 0
    assert found("none") is None
    assert found("auto") == 2
    with pytest.raises(ConfigError, match=r"'2022', which fits 3 of the dates: 2022-03-10"):
        found("2022")
    with pytest.raises(ConfigError, match="reference is 3; there are 3 dates"):
        found(3)
    with pytest.raises(ConfigError, match="'2022-05-13', which fits none of the dates: 0, 1, 2"):
        found("2022-05-13", open_cube(cube().drop_vars("time"), remover).names)


def test_auto_takes_the_clearest_date(remover):
    array = cube()
    mask = xr.zeros_like(array.isel(band=0, drop=True), dtype=bool)
    mask[0, :20], mask[1, :, 2:] = True, True
    result = remove_xarray(remover, array, cloud_mask=mask)
    assert np.array_equal(result, array[2])
    array[2, :, 1:] = np.nan  # what is missing is not clear
    assert np.array_equal(
        remove_xarray(remover, array, cloud_mask=mask), remove_xarray(remover, array, cloud_mask=mask, reference=0)
    )


def test_the_mask_is_matched_by_name(remover):
    array = cube()
    mask = array.isel(band=0, drop=True) > 0.3
    found = open_cube(array, remover)
    assert np.array_equal(mask_data(mask.transpose("x", "time", "y"), found), mask.values)
    with pytest.raises(ShapeError, match="cloud_mask has time: 3, y: 24, x: 39; expected time: 3, y: 24, x: 40"):
        mask_data(mask.isel(x=slice(1, None)), found)
    with pytest.raises(ShapeError, match=r"other x coordinates than the array .*reindex_like"):
        mask_data(mask.assign_coords(x=mask.x + 10), found)
    with pytest.raises(ValueRangeError, match=r"float32; expected True = cloud.*> 0.5"):
        mask_data(array.isel(band=0, drop=True), found)
    with pytest.raises(ShapeError, match="cloud_mask is a ndarray"):
        mask_data(mask.values, found)


def test_without_a_crs_it_works_and_says_so(remover):
    with pytest.warns(UserWarning, match=r"names no CRS.*write_crs"):
        result = remove_xarray(remover, cube(crs=False), reference=0)
    assert np.isfinite(result).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_cube(cube(), remover)
        open_cube(cube(crs=False).assign_attrs(crs="EPSG:32632"), remover)


def test_rioxarray_finds_the_crs_of_the_result(remover):
    pytest.importorskip("rioxarray")
    array = cube(crs=False).rio.write_crs("EPSG:32720")
    result = remove_xarray(remover, array, reference=0)
    assert result.rio.crs.to_epsg() == 32720
    assert result.rio.transform() == array.rio.transform()


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a: a.isel(time=0), ShapeError, r"axes \(band, y, x\); expected \(time, band.*expand_dims\('time'\)"),
        (lambda a: a.isel(band=0), ShapeError, r"axes \(time, y, x\).*expand_dims\('band'\)"),
        (lambda a: a.rename(y="rows"), ShapeError, r"axes \(time, band, rows, x\).*rename\(\{...: 'y'\}\)"),
        (lambda a: a.expand_dims("level"), ShapeError, r"axes \(level, time, band, y, x\)"),
        (lambda a: a.drop_vars("band"), BandError, "no band coordinate; expected the names of its 4 bands"),
        (lambda a: a.assign_coords(band=[1, 2, 3, 4]), BandError, r"numbers as bands \(1, 2, 3, 4\)"),
        (lambda a: a.assign_coords(band=["VV", "VH", "HH", "HV"]), BandError, "VV, VH, HH, HV; this model knows B02"),
        (lambda a: a.assign_coords(band=["B02", "B03", "B11", "B08"]), BandError, r"sel\(band=\['B02', 'B03', 'B08"),
        (lambda a: a.assign_coords(band=["B02", "blue", "B04", "B08"]), BandError, "name a band twice"),
        (lambda a: a.isel(x=slice(0, 0)), ShapeError, r"array is empty \(time: 3, band: 4, y: 24, x: 0\)"),
        (lambda a: a.isel(time=slice(0, 0)), ShapeError, "array is empty"),
        (lambda a: a * np.nan, ValueRangeError, "no date has a valid pixel"),
        (lambda a: a * 10000, ValueRangeError, r"goes up to .*counts: set array.attrs\['scale_factor'\]"),
        (lambda a: a.astype(complex), DataError, "complex"),
        (lambda a: a.astype("uint8"), DataError, "uint8 values without a scale"),
        (lambda a: a.assign_attrs(scale_factor="a lot"), ValueRangeError, "scale_factor.*expected one number each"),
        (lambda a: a.assign_attrs(scale_factor=-1.0), DataError, "scale -1; expected a positive"),
        (lambda a: a.values, ShapeError, "ndarray; expected an xarray.DataArray"),
        (lambda a: a.to_dataset(dim="band").isel(time=0), ShapeError, "no variable with the axes time, y, x"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(remover, change, error, text):
    array = change(cube())
    with pytest.raises(error, match=text) as caught:
        remove_xarray(remover, array, reference=0)
    assert isinstance(caught.value, SaderError)


def test_variables_of_different_coding_are_not_mixed(remover):
    dataset = cube().to_dataset(dim="band")
    dataset["B02"].attrs["scale_factor"] = 1e-4
    with pytest.raises(ValueRangeError, match="different scale_factor"):
        remove_xarray(remover, dataset, reference=0)


def test_many_bands_are_not_all_listed(remover):
    array = xr.DataArray(
        np.zeros((1, 300, 4, 4), np.float32),
        dims=("time", "band", "y", "x"),
        coords={"band": [f"h{number}" for number in range(300)]},
    )
    with pytest.raises(BandError, match=r"h15, \.\.\. \(300 in all\)"):
        remove_xarray(remover, array)
