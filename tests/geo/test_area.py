"""An area of interest: pixels are cut from the files unchanged, on every kind of input."""

from __future__ import annotations

import json

import numpy as np
import pytest

import sader
from sader.cli.main import main
from sader.errors import ConfigError, DataError
from sader.geo.align import cropped
from sader.geo.grid import area_window, parse_area
from sader.geo.read.sources import open_sources
from sader.inference.tiling import Window

rasterio = pytest.importorskip("rasterio")
warp = pytest.importorskip("rasterio.warp")


def degrees(left: float, bottom: float, right: float, top: float) -> tuple[float, ...]:
    """A box inside the given rectangle of EPSG:32632, in degrees."""
    xs, ys = warp.transform("EPSG:32632", "EPSG:4326", [left, left, right, right], [bottom, top, bottom, top])
    return max(xs[:2]), max(ys[0], ys[2]), min(xs[2:]), min(ys[1], ys[3])


BOX = degrees(600200, 5099500, 600600, 5099800)
"""Rows 20 to 50 and columns 20 to 60 of the files, less the lean of the grid against the meridians."""


def read(path):
    with rasterio.open(path) as dataset:
        return dataset.read(), dataset.transform


@pytest.fixture
def dates(tmp_path, write_date, land):
    paths = []
    for number in range(2):
        counts = land(number)
        counts[:, 30:40, 30:40] = np.where(number == 0, 9000, counts[:, 30:40, 30:40])
        paths.append(write_date(tmp_path / f"S2_2022-0{number + 3}-10.tif", counts))
    return paths


def test_the_box_is_cut_from_the_file(tmp_path, dates, tiny, write_date):
    cloud = (read(dates[0])[0][:1] == 9000).astype(np.uint8)
    masks = [write_date(tmp_path / f"mask{n}.tif", cloud * (n == 0), bands=None, nodata=None) for n in range(2)]
    out = tmp_path / "part.tif"
    report = sader.remove_files(tiny, dates, out, reference=0, area=BOX, mask=masks, provenance=True)
    numbers, transform = read(tmp_path / "part.tif")
    col, row = round((transform.c - 600000) / 10), round((5100000 - transform.f) / 10)
    assert (20 <= col < 25, 20 <= row < 25) == (True, True)
    assert numbers.shape[1] < 31
    assert report.size == numbers.shape[1:]
    original, _ = read(dates[0])
    kept = read(tmp_path / "part_provenance.tif")[0][0] == 1
    assert 0.5 < kept.mean() < 1
    window = original[:, row : row + numbers.shape[1], col : col + numbers.shape[2]]
    np.testing.assert_array_equal(numbers[:, kept], window[:, kept])


def test_a_part_reads_as_its_source(dates):
    (source,) = open_sources(dates[:1])
    (part,) = cropped([source], BOX, print)
    window = area_window(source.grid, BOX)
    assert part.grid == source.grid.part(window)
    inside = Window(3, 4, 8, 9)
    found = part.read_numbers(inside, bands=("B03", "B08"), grid=part.grid)
    moved = Window(3 + window.row, 4 + window.col, 8, 9)
    np.testing.assert_array_equal(found, source.read_numbers(moved, bands=("B03", "B08"), grid=source.grid))
    np.testing.assert_array_equal(
        part.read_numbers(moved, bands=("B03",), grid=source.grid),
        source.read_numbers(moved, bands=("B03",), grid=source.grid),
    )
    assert part.block_shape(("B03",), part.grid) == (64, 64)


def test_masks_of_products_are_cut_too(make_safe, tiny):
    path = make_safe("L2A", cloud_rows=60)
    (source,) = open_sources([path])
    left, _, _, top = source.grid.bounds
    (part,) = cropped([source], degrees(left + 200, top - 1000, left + 800, top - 300), print)
    row, col = part.window.row, part.window.col
    whole = source.read_mask(source.grid.whole, grid=source.grid)
    mask = part.read_mask(part.grid.whole, grid=part.grid)
    np.testing.assert_array_equal(mask, whole[row : row + mask.shape[0], col : col + mask.shape[1]])
    assert mask.any()
    assert not mask.all()


def test_command_line_with_a_shape(tmp_path, dates, tiny_file, capsys):
    west, south, east, north = BOX
    ring = [[west, south], [east, south], [east, north], [west, south]]
    shape = {"type": "FeatureCollection", "features": [{"geometry": {"type": "Polygon", "coordinates": [ring]}}]}
    (tmp_path / "field.geojson").write_text(json.dumps(shape))

    def run(name, *more):
        given = ["remove", *map(str, dates), "--model", str(tiny_file), "--device", "cpu", "--no-item"]
        with pytest.raises(SystemExit) as ended:
            main([*given, "-o", str(tmp_path / name), *more])
        return ended.value.code

    box = ",".join(map(str, BOX))
    assert run("shape.tif", "--aoi", str(tmp_path / "field.geojson")) == 0
    assert run("box.tif", "--bbox", box) == 0
    np.testing.assert_array_equal(read(tmp_path / "shape.tif")[0], read(tmp_path / "box.tif")[0])
    assert run("twenty.tif", "--bbox", box, "--grid", "EPSG:32632/20") == 0
    assert read(tmp_path / "twenty.tif")[0].shape[1] == pytest.approx(read(tmp_path / "box.tif")[0].shape[1] / 2, abs=1)
    assert run("far.tif", "--bbox", "0,0,1,1") == 2
    err = capsys.readouterr().err
    assert "no date touches the area 0,0,1,1" in err
    assert "covers 10." in err, "in degrees, as the area is given"


def test_shapes_in_other_systems(tmp_path):
    polygon = {"type": "Polygon", "coordinates": [[[600200, 5099500], [600600, 5099500], [600600, 5099800]]]}
    path = tmp_path / "old.geojson"
    path.write_text(json.dumps({**polygon, "crs": {"properties": {"name": "urn:ogc:def:crs:EPSG::32632"}}}))
    assert parse_area(path) == pytest.approx(BOX, abs=1e-4)
    path.write_text(json.dumps(polygon))
    with pytest.raises(ConfigError, match="is not in degrees, as GeoJSON is"):
        parse_area(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("{}", "holds no coordinates"), ('{"coordinates": [7, 46]}', "has no extent")],
)
def test_files_that_are_no_area(tmp_path, content, message):
    (tmp_path / "a.geojson").write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse_area(tmp_path / "a.geojson")


def test_an_area_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the area"):
        parse_area(tmp_path / "none.geojson")


def test_dates_outside_the_area_are_left_out(dates, write_date, tmp_path):
    write_date(tmp_path / "far.tif", 0, transform=(10.0, 0.0, 700000.0, 0.0, -10.0, 5100000.0))
    heard: list[str] = []
    found = cropped(open_sources([*dates, tmp_path / "far.tif"]), BOX, heard.append)
    assert [source.name for source in found] == [path.name for path in dates]
    assert heard == ["far.tif does not touch the area and is left out."]
    with pytest.raises(DataError, match="no date touches the area"):
        cropped(found, (0, 0, 1, 1), heard.append)
