"""Blocks of files shared by threads: what is read is what the sources read, each block unpacked once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from sader.errors import DataError
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.scene import source as block_cache
from sader.geo.scene.source import BlockCache
from sader.geo.stack import GeoStack
from sader.inference.tiling import Window, plan_windows

rasterio = pytest.importorskip("rasterio")
BANDS = ("B02", "B03", "B04", "B08")
HEIGHT, WIDTH = 230, 310


def write(path, number, *, left=300000, **options):
    counts = np.random.default_rng(number).integers(1, 9000, (4, HEIGHT, WIDTH)).astype(np.uint16)
    profile = {"driver": "GTiff", "count": 4, "height": HEIGHT, "width": WIDTH, "dtype": "uint16", "nodata": 0,
               "crs": "EPSG:32632", "transform": rasterio.Affine(10, 0, left, 0, -10, 5200000)}  # fmt: skip
    with rasterio.open(path, "w", **{**profile, **options}) as dataset:
        dataset.descriptions = BANDS
        dataset.write(counts)
    return path


TILED = {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate"}


@pytest.fixture
def stack(tmp_path, monkeypatch):
    monkeypatch.setattr(block_cache, "EDGE", 64)
    monkeypatch.setattr(block_cache, "LINES", 32)
    paths = [
        write(tmp_path / "S2_2022-03-10.tif", 0, **TILED),
        write(tmp_path / "S2_2022-04-10.tif", 1, compress="deflate"),  # blocks are lines
        write(tmp_path / "S2_2022-05-10.tif", 2, left=300035, **TILED),  # on another grid
    ]
    sources = open_sources(paths, notice=lambda text: None)
    masked = with_masks(sources[:1], "own")
    return GeoStack((*masked, *sources[1:]), sources[0].grid, BANDS, sources[0].coding)


@pytest.mark.parametrize("limit", [2**30, 1])
def test_threads_read_what_the_sources_read(stack, limit):
    blocks = BlockCache(stack, limit=limit)
    assert [edges is None for edges in blocks.edges] == [False, False, True]
    windows = plan_windows(HEIGHT, WIDTH, tile=96, overlap=24)
    pairs = [(date, window) for window in windows for date in range(3)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda pair: blocks.read(*pair), pairs))
    for (date, window), numbers in zip(pairs, found, strict=True):
        wanted = stack.sources[date].read_numbers(window, bands=BANDS, grid=stack.grid)
        np.testing.assert_array_equal(numbers, wanted)
        assert numbers.dtype == wanted.dtype
    edges = [one for one in blocks.edges if one is not None]
    assert edges[0] == (64, 64)
    assert edges[1][1] == WIDTH
    once = sum(-(-HEIGHT // high) * -(-WIDTH // wide) for high, wide in edges)
    assert blocks.unpacked == once if limit > 1 else blocks.unpacked > once


def test_a_block_that_cannot_be_read_fails_in_every_thread(stack, monkeypatch):
    blocks = BlockCache(replace(stack, sources=stack.sources[:1]))

    def broken(self, date, window):
        raise DataError("cannot read it")

    monkeypatch.setattr(BlockCache, "_from_file", broken)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(blocks.read, 0, Window(0, 0, 64, 64)) for _ in range(8)]
    assert all(isinstance(one.exception(), DataError) for one in asked)
