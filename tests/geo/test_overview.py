"""Overviews: of the scene (means of valid pixels) and of the result (levels of the COG)."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from sader.geo.align import build_stack
from sader.geo.grid import Grid
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.scene import cog
from sader.geo.scene import source as overview
from sader.inference.values import ValueCoding

rasterio = pytest.importorskip("rasterio")
COUNTS = ValueCoding("uint16", 1e-4, 0.0, 0.0)


def test_cells_are_means_of_their_valid_pixels():
    values = torch.arange(24, dtype=torch.float32).view(1, 4, 6)
    valid = torch.ones((4, 6), dtype=torch.bool)
    valid[:2, :4] = False
    valid[0, 0] = True
    means, some = overview.cell_means(values.masked_fill(~valid, 0.0), valid, 2, 4)
    assert some.tolist() == [[True, True], [True, True]]
    wanted = [[0.0, (4 + 5 + 10 + 11) / 4], [sum([12, 13, 14, 15, 18, 19, 20, 21]) / 8, (16 + 17 + 22 + 23) / 4]]
    np.testing.assert_allclose(means[0].numpy(), wanted)


@pytest.mark.parametrize("edges", [(16, 96), (16, 16), None])
def test_parts_change_nothing(tmp_path, write_date, tiny, monkeypatch, edges):
    """edges: rectangles of the block cache, as wide as the scene, smaller, or none."""
    paths = [write_date(tmp_path / f"S2_2022-0{number + 3}-10.tif", number) for number in range(2)]
    stack = build_stack(open_sources(paths), tiny.config.network)
    monkeypatch.setattr(overview, "overview_factor", lambda height, width: 3)
    whole = overview.read_overview(stack, tiny)
    monkeypatch.setattr(overview, "PART_PIXELS", 900)
    monkeypatch.setattr(overview, "PART_WIDTH", 25)
    monkeypatch.setattr("sader.geo.scene.source._edges", lambda block, stack: edges)
    parts = overview.read_overview(stack, tiny)
    assert whole.cloudy.shape == (2, 4, 24, 30)
    for name in ("cloudy", "valid", "cloud"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


def test_a_gpu_estimates_masks_of_a_constant_image_while_files_are_read(tmp_path, write_date, tiny):
    paths = [write_date(tmp_path / f"S2_2022-0{number + 3}-10.tif", number) for number in range(2)]
    stack = build_stack(open_sources(paths), tiny.config.network)
    seen, turns = [], []

    class OnGpu:
        device, matches_dates = torch.device("cuda"), True

        @property
        def turn(self):
            turns.append(len(seen))
            return nullcontext()

        def estimate_cloud(self, cloudy, **given):
            seen.append(cloudy)
            if len(seen) == 2:
                raise torch.OutOfMemoryError("beside the tiles")
            return tiny.estimate_cloud(cloudy, **given)

    found, wanted = overview.read_overview(stack, OnGpu()), overview.read_overview(stack, tiny)
    assert np.ptp(seen[0]) == 0
    assert turns == [2]  # waits for the tiles only where the memory does not suffice for both
    for name in ("cloudy", "valid", "cloud"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("shape", [(1, 1200), (1200, 1), (2, 1100), (700, 3)])
def test_rasters_of_a_few_rows_or_columns_have_one(tmp_path, write_date, tiny, shape):
    counts = np.random.default_rng(0).integers(500, 3000, (4, *shape)).astype(np.uint16)
    paths = [write_date(tmp_path / f"S2_2022-0{n + 3}-10.tif", counts, tiled=False) for n in range(2)]
    mask = write_date(tmp_path / "m" / "m.tif", np.zeros((2, *shape), np.uint8), bands=None, nodata=None, tiled=False)
    stack = build_stack(with_masks(open_sources(paths), mask), tiny.config.network)
    found = overview.read_overview(stack, tiny)
    assert found.valid.all()
    assert (found.cloud == 0).all()
    np.testing.assert_allclose(found.cloudy[0].mean(), counts.mean() * 1e-4, rtol=0.02)


@pytest.mark.parametrize("categories", [False, True])
@pytest.mark.parametrize("size", [(1500, 1034), (514, 40)])
def test_a_cog_has_the_overviews_of_gdal(tmp_path, size, categories):
    height, width = size
    grid = Grid("EPSG:32632", (10.0, 0.0, 600000.0, 0.0, -10.0, 5100000.0), width, height)
    layer = cog.Layer("result", ("B02", "B03"), COUNTS, categories=categories)
    numbers = np.random.default_rng(0).integers(1, 9000, (height, 2, width)).astype(np.uint16)
    numbers[:40, :, :30] = 0
    rows = cog.RowFile(tmp_path / "result.rows", layer, grid)
    rows.create()
    for top in range(0, height, 333):  # overviews grow with the rows
        rows.write(top, numbers[top : top + 333])
        rows.extend_overviews(min(top + 333, height))
    path = cog.make_cog(rows, tags={"A": "b <&> c"})
    with rasterio.open(path) as dataset:
        assert dataset.tags()["A"] == "b <&> c"
        np.testing.assert_array_equal(dataset.read(), numbers.swapaxes(0, 1))
        levels = dataset.overviews(1)
    assert levels == [2, 4][: len(levels)]
    assert levels
    plain = tmp_path / "plain.tif"
    with rasterio.open(
        plain, "w", driver="GTiff", count=2, height=height, width=width, dtype="uint16", nodata=0
    ) as dataset:
        dataset.write(numbers.swapaxes(0, 1))
        dataset.build_overviews(
            [2], rasterio.enums.Resampling.nearest if categories else rasterio.enums.Resampling.average
        )
    with rasterio.open(path, overview_level=0) as ours, rasterio.open(plain, overview_level=0) as theirs:
        np.testing.assert_array_equal(ours.read(), theirs.read())
    assert not list(tmp_path.glob("*-half.rows"))
