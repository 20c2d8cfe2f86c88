"""`sader series`: every date without clouds, equal to `sader remove`, resumable, with its collection and curves."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sader
from sader.cli.main import main
from sader.errors import ConfigError, OutputError
from sader.geo.remove import RemoveRequest
from sader.geo.scene.options import SceneOptions
from sader.geo.series import run_series

rasterio = pytest.importorskip("rasterio")
warp = pytest.importorskip("rasterio.warp")
DAYS = ("2022-03-10", "2022-04-10", "2022-05-10")


@pytest.fixture
def folder(tmp_path, write_date, land) -> Path:
    """Three dates; each has a bright cloud at a place of its own."""
    for number, day in enumerate(DAYS):
        counts = land(number, size=(50, 60))
        counts[:, 10:25, 15 * number : 15 * number + 12] = 9000
        write_date(tmp_path / "in" / f"S2_{day}.tif", counts)
        hidden = (counts[:1] == 9000).astype(np.uint8)
        write_date(tmp_path / "masks" / f"S2_{day}_mask.tif", hidden, bands=None, nodata=None)
    return tmp_path / "in"


@pytest.fixture
def command(tiny_file, capsys):
    """Run a command with the tiny model; return (exit status, standard output, standard error)."""

    def run(name: str, *arguments: Any) -> tuple[int, str, str]:
        status = 0
        try:
            main([name, "--model", str(tiny_file), "--device", "cpu", "--tile", "32", *map(str, arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        return status, out, " ".join(err.split())

    return run


def read(path: Any) -> np.ndarray:
    with rasterio.open(path) as dataset:
        return dataset.read()


@pytest.mark.parametrize("masks", [pytest.param(True, marks=pytest.mark.slow), False])
def test_each_date_equals_remove(tmp_path, folder, command, masks):
    more = ("--uncertainty", *(("--mask", tmp_path / "masks") if masks else ()))
    status, printed, err = command("series", folder, "-o", tmp_path / "out", *more, "--json")
    assert status == 0, err
    report = json.loads(printed)
    assert [Path(scene["output"]).name for scene in report["scenes"]] == [f"{day}.tif" for day in DAYS]
    for day in DAYS:
        alone = tmp_path / f"{day}.tif"
        status, _, err = command("remove", folder, "-o", alone, "--reference", day, *more, "--no-item")
        assert status == 0, err
        for ending in ("", "_uncertainty"):
            made = tmp_path / "out" / f"{day}{ending}.tif"
            np.testing.assert_array_equal(read(made), read(tmp_path / f"{day}{ending}.tif"))
    assert not list((tmp_path / "out").glob(".*"))


def test_the_files_are_read_once(tmp_path, folder, tiny, monkeypatch):
    from sader.geo.read.raster import GeoTiffSource

    reads = []
    original = GeoTiffSource.read_numbers

    def counted(self, window, **named):
        reads.append((self.name, window))
        return original(self, window, **named)

    monkeypatch.setattr(GeoTiffSource, "read_numbers", counted)
    sader.remove_files(tiny, [folder], tmp_path / "one.tif")
    once = len(reads)
    sader.clean_series(tiny, [folder], tmp_path / "out")
    assert len(reads) == 2 * once  # as often for three dates as for one


def test_a_long_series_is_told_about_nearest(tmp_path, folder, command, monkeypatch):
    monkeypatch.setattr("sader.geo.series.MANY_DATES", 2)
    masks = ("--mask", tmp_path / "masks")
    status, _, err = command("series", folder, "-o", tmp_path / "all", *masks)
    assert status == 0, err
    assert "--nearest 6" in err
    status, _, err = command("series", folder, "-o", tmp_path / "near", "--nearest", 1, *masks)
    assert "--nearest" not in err


def test_dates_select_files_by_their_day(tmp_path, folder, command):
    masks = tmp_path / "masks"
    period = f"{min(DAYS)}/{sorted(DAYS)[1]}"
    status, _, err = command("series", folder, "-o", tmp_path / "out", "--mask", masks, "--dates", period)
    assert status == 0, err
    assert sorted(path.stem for path in (tmp_path / "out").glob("*.tif")) == sorted(DAYS)[:2]
    status, _, err = command("remove", folder, "-o", tmp_path / "c.tif", "--dates", "1999-01-01/1999-12-31")
    assert status == 2
    assert f"they go from {min(DAYS)} to {max(DAYS)}" in err


def test_nearest_takes_the_dates_next_in_time(tmp_path, folder, command):
    status, _, err = command("series", folder, "-o", tmp_path / "out", "--nearest", 1)
    assert status == 0, err
    files = [folder / f"S2_{day}.tif" for day in DAYS[:2]]
    status, _, err = command("remove", *files, "-o", tmp_path / "c.tif", "--reference", DAYS[0], "--no-item")
    assert status == 0, err
    np.testing.assert_array_equal(read(tmp_path / "out" / f"{DAYS[0]}.tif"), read(tmp_path / "c.tif"))
    item = json.loads((tmp_path / "out" / f"{DAYS[2]}.json").read_text())
    assert [link["title"] for link in item["links"] if link["rel"] == "derived_from"] == [
        f"S2_{DAYS[1]}.tif",
        f"S2_{DAYS[2]}.tif",
    ]


def test_collection_has_relative_links(tmp_path, folder, tiny):
    pystac = pytest.importorskip("pystac")
    sader.clean_series(tiny, [folder], tmp_path / "out")
    content = json.loads((tmp_path / "out" / "collection.json").read_text())
    assert content["extent"]["temporal"]["interval"] == [["2022-03-10T00:00:00Z", "2022-05-10T00:00:00Z"]]
    assert [link["href"] for link in content["links"] if link["rel"] == "item"] == [f"./{day}.json" for day in DAYS]
    (tmp_path / "out").rename(tmp_path / "moved")
    collection = pystac.Collection.from_file(str(tmp_path / "moved" / "collection.json"))
    items = list(collection.get_items())
    assert [item.id for item in items] == list(DAYS)
    assert items[0].get_collection().id == "out"
    assert all(Path(asset.get_absolute_href()).is_file() for item in items for asset in item.assets.values())


def test_a_second_run_computes_nothing(tmp_path, folder, command):
    arguments = ("series", folder, "-o", tmp_path / "out", "--mask", tmp_path / "masks")
    assert command(*arguments)[0] == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tif")}
    (tmp_path / "out" / f"{DAYS[1]}.json").unlink()
    status, _, err = command(*arguments)
    assert status == 0
    assert "3 of 3 dates are complete from an earlier run" in err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tif")} == before
    assert (tmp_path / "out" / f"{DAYS[1]}.json").exists()


def test_results_of_other_options_are_refused_before_the_work(tmp_path, folder, command):
    arguments = ("series", folder, "-o", tmp_path / "out", "--mask", tmp_path / "masks")
    assert command(*arguments)[0] == 0
    status, _, err = command(*arguments, "--seed", 1)
    assert status == 2
    assert "exists, from other inputs or options. Use --overwrite" in err
    before = read(tmp_path / "out" / f"{DAYS[0]}.tif")
    assert command(*arguments, "--seed", 1, "--overwrite")[0] == 0
    assert (read(tmp_path / "out" / f"{DAYS[0]}.tif") != before).any()


def test_an_animation_replaces_no_file_of_others(tmp_path, folder, command):
    taken = tmp_path / "all.gif"
    taken.write_text("mine")
    status, _, err = command("series", folder, "-o", tmp_path / "out", "--animation", taken)
    assert status == 2
    assert f"{taken} exists. Use --overwrite to replace it" in err
    assert taken.read_text() == "mine"
    assert not (tmp_path / "out" / f"{DAYS[0]}.tif").exists()


def test_animation_and_points(tmp_path, folder, command):
    x, y = warp.transform("EPSG:32632", "EPSG:4326", [600000 + 10 * 20.5], [5100000 - 10 * 15.5])
    inside = f"{x[0]},{y[0]}"
    status, _, err = command(
        "series", folder, "-o", tmp_path / "out", "--animation", tmp_path / "all.gif", "--point", inside,
        "--mask", tmp_path / "masks",
    )  # fmt: skip
    assert status == 0, err
    with Image.open(tmp_path / "all.gif") as image:
        assert image.n_frames == 3
        assert np.asarray(image.convert("RGB")).std() > 5
    with open(tmp_path / "out" / "points.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["date"] for row in rows] == list(DAYS)
    assert [row["before"] for row in rows] == ["clear", "hidden", "clear"]
    for row in rows:
        red, nir = (float(read(tmp_path / "out" / f"{row['date']}.tif")[band, 15, 20]) for band in (2, 3))
        assert float(row["ndvi_after"]) == pytest.approx((nir - red) / (nir + red), abs=1e-4)
        code = read(tmp_path / "out" / f"{row['date']}_provenance.tif")[0, 15, 20]
        assert row["after"] == {1: "observed", 2: "reconstructed"}[int(code)]
        if row["before"] == "clear":
            assert row["ndvi_before"] == row["ndvi_after"]
    with Image.open(tmp_path / "out" / "points.png") as image:
        assert image.size[0] > 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--point", "1"], "expected longitude,latitude in degrees"),
        (["--point", "400500,6699000"], "expected longitude,latitude in degrees"),
        (["--point", "nan,46"], "expected longitude,latitude in degrees"),
        (["--point", "0,0"], "the point 0,0 lies outside the scene"),
        (["--animation", "a.mp4"], "expected a name that ends in .gif"),
    ],
)
def test_wrong_options(tmp_path, folder, command, arguments, message):
    status, _, err = command("series", folder, "-o", tmp_path / "out", *arguments)
    assert status == 2
    assert message in err
    assert not (tmp_path / "out").exists()


def test_wrong_outputs(tmp_path, folder, tiny):
    with pytest.raises(OutputError, match="a series needs a folder"):
        sader.clean_series(tiny, [folder], tmp_path / "c.tif")
    with pytest.raises(ConfigError, match="cleans every date in turn"):
        sader.clean_series(tiny, [folder], tmp_path / "c", reference="auto")
    with pytest.raises(ConfigError, match="sader series reads files"):
        run_series(RemoveRequest(("cube.zarr",), str(tmp_path / "c"), SceneOptions()))


def test_a_date_without_data_is_left_out(tmp_path, folder, write_date, command):
    write_date(folder / "S2_2022-06-10.tif", np.zeros((4, 50, 60), np.uint16))
    status, _, err = command("series", folder, "-o", tmp_path / "out")
    assert status == 0, err
    assert "S2_2022-06-10.tif has no valid pixel on the output grid; it is left out of the series" in err
    assert not (tmp_path / "out" / "2022-06-10.tif").exists()


def test_a_zarr_store_holds_all_dates(tmp_path, folder, command):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    options = ("--provenance", "--source-date", "--mask", tmp_path / "masks")
    status, _, err = command("series", folder, "-o", tmp_path / "out.zarr", *options)
    assert status == 0, err
    assert command("series", folder, "-o", tmp_path / "out", *options)[0] == 0
    store = xarray.open_zarr(tmp_path / "out.zarr", mask_and_scale=False, consolidated=False)
    assert [str(time)[:10] for time in store.time.values] == list(DAYS)
    assert list(store.band.values) == ["B02", "B03", "B04", "B08"]
    for number, day in enumerate(DAYS):
        np.testing.assert_array_equal(store.clear[number], read(tmp_path / "out" / f"{day}.tif"))
        for layer in ("provenance", "source_date"):
            np.testing.assert_array_equal(store[layer][number], read(tmp_path / "out" / f"{day}_{layer}.tif")[0])
    assert len(store.source_date.attrs["flag_meanings"].split()) == len(DAYS) + 2
    assert store.clear.attrs["scale_factor"] == pytest.approx(1e-4)
    assert float(store.x[0]) == 600005.0
    assert "UTM zone 32N" in store.spatial_ref.attrs["crs_wkt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "masks", "out", "out.zarr"]
    before = (tmp_path / "out.zarr" / "zarr.json").stat().st_mtime_ns
    status, _, err = command("series", folder, "-o", tmp_path / "out.zarr", *options)
    assert status == 0, err
    assert "exists already, from the same command and inputs" in err
    assert (tmp_path / "out.zarr" / "zarr.json").stat().st_mtime_ns == before
    assert command("series", folder, "-o", tmp_path / "out.zarr")[0] == 2


@pytest.mark.parametrize("lazy", [False, True])
def test_xarray_cleans_each_date(tiny, lazy):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("dask.array")
    values = np.random.default_rng(0).uniform(0.05, 0.3, (3, 4, 40, 40)).astype(np.float32)
    times = np.array(DAYS, "datetime64[ns]")
    cube = xarray.DataArray(
        values, dims=("time", "band", "y", "x"), coords={"time": times, "band": ["B02", "B03", "B04", "B08"]}
    )
    if lazy:
        cube = cube.chunk({"y": 20, "x": 20})
    with pytest.warns(UserWarning, match="names no CRS"):
        made = sader.remove_xarray(tiny, cube, reference="each")
    assert made.dims == ("time", "band", "y", "x")
    np.testing.assert_array_equal(made.time, times)
    for date in range(3):
        np.testing.assert_array_equal(made[date], tiny(values, reference=date))


@pytest.mark.parametrize("lazy", [False, True])
def test_xarray_returns_the_layers(tiny, lazy):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("dask.array")
    values = np.random.default_rng(0).uniform(0.05, 0.3, (3, 4, 40, 40)).astype(np.float32)
    values[:, :, :3] = np.nan
    hidden = np.zeros((3, 40, 40), bool)
    hidden[1, 10:20] = True
    coords = {"time": np.array(DAYS, "datetime64[ns]"), "band": ["B02", "B03", "B04", "B08"]}
    cube = xarray.DataArray(values, dims=("time", "band", "y", "x"), coords=coords)
    mask = xarray.DataArray(hidden, dims=("time", "y", "x"))
    if lazy:
        cube, mask = cube.chunk({"y": 20}), mask.chunk({"y": 20})
    with pytest.warns(UserWarning, match="names no CRS"):
        made = sader.remove_xarray(tiny, cube, reference=1, cloud_mask=mask, layers=True).compute()
    assert set(made) == {"clear", "uncertainty", "clear_count", "provenance", "source_date"}
    np.testing.assert_array_equal(made.provenance[[0, 5, 15], 0], [0, 1, 2])
    np.testing.assert_array_equal(made.clear_count[[0, 5, 15], 0], [255, 3, 2])
    np.testing.assert_array_equal(made.source_date[[0, 5], 0], [0, 2])
    assert bool(made.source_date[10:20].isin([1, 3, 255]).all())
    np.testing.assert_array_equal(made.source_date.attrs["flag_values"], [0, 1, 2, 3, 255])
    assert made.source_date.attrs["flag_meanings"].split()[0] == "no_data"
    with pytest.warns(UserWarning, match="names no CRS"):
        few = sader.remove_xarray(tiny, cube, reference=1, cloud_mask=mask, min_count=3)
    np.testing.assert_array_equal(np.isnan(few).any("band"), made.provenance != 1)
    assert bool((made.uncertainty[:, 10:20] > 0).all())
    assert bool((made.uncertainty[:, 20:] == 0).all())
