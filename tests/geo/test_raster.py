"""The written file: what another program reads back."""

from __future__ import annotations

import numpy as np
import pytest

from sader.errors import OutputError, ShapeError
from sader.geo.read.raster import to_digital_numbers, write_geotiff

rasterio = pytest.importorskip("rasterio")
GRID = (10.0, 0.0, 600000.0, 0.0, -10.0, 5100000.0)


def test_a_reader_finds_values_names_scale_and_place(tmp_path):
    image = np.random.default_rng(0).uniform(0, 1, (3, 20, 31)).astype(np.float32)
    image[0, 0, 0], image[:, 5, 5] = 0.0, np.nan
    path = write_geotiff(
        tmp_path / "a b é.tif", image, bands=("B04", "B03", "B02"), crs="EPSG:32632", transform=GRID, tags={"NOTE": "x"}
    )
    with rasterio.open(path) as dataset:
        assert dataset.descriptions == ("B04", "B03", "B02")
        assert dataset.crs.to_epsg() == 32632
        assert tuple(dataset.transform)[:6] == GRID
        assert dataset.nodata == 0
        assert dataset.tags()["NOTE"] == "x"
        counts = dataset.read()
        assert counts.dtype == np.uint16
        assert (counts[:, 5, 5] == 0).all()
        assert counts[0, 0, 0] == 1, "a black pixel became nodata"
        valid = np.isfinite(image)
        np.testing.assert_allclose((counts * dataset.scales[0])[valid], image[valid], atol=1.01e-4)
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "a temporary file was left behind"


def test_counts_are_cut_not_wrapped():
    counts = to_digital_numbers(np.array([[[-0.2, 0.00004, 0.5, 9.0, np.inf]]]))
    assert counts.ravel().tolist() == [1, 1, 5000, 65535, 0]


def test_a_failed_write_leaves_nothing(tmp_path):
    image = np.zeros((1, 4, 4), np.float32)
    with pytest.raises(OutputError, match="cannot write"):
        write_geotiff(tmp_path / "no" / "a.tif", image, bands=("B02",), crs="EPSG:32632", transform=GRID)
    with pytest.raises(OutputError, match="cannot write"):
        write_geotiff(tmp_path / "a.tif", image, bands=("B02",), crs="EPSG:999999", transform=GRID)
    assert list(tmp_path.iterdir()) == []


def test_names_must_fit_the_bands(tmp_path):
    with pytest.raises(ShapeError, match=r"expected \(2, H, W\)"):
        write_geotiff(tmp_path / "a.tif", np.zeros((3, 4, 4)), bands=("B02", "B03"), crs="EPSG:32632", transform=GRID)
