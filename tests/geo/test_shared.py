"""Blocks shared by threads: what is read is what `GeoStack.read` reads, to the bit, and a block is unpacked once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from sader.errors import DataError
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.scene import block_cache as shared
from sader.geo.scene import cog
from sader.geo.scene.block_cache import SharedBlocks, quick_change
from sader.geo.scene.warmup import WarmUp
from sader.geo.stack import GeoStack
from sader.inference.remover import CloudRemover
from sader.inference.scene_match import SceneMatch
from sader.inference.tiling import Window, plan_windows
from sader.model.matching import MOST_CHANGE

rasterio = pytest.importorskip("rasterio")
BANDS = ("B02", "B03", "B04", "B08")
HEIGHT, WIDTH = 230, 310


def write(path, number, *, left=300000, **options):
    counts = np.random.default_rng(number).integers(1, 9000, (4, HEIGHT, WIDTH)).astype(np.uint16)
    counts[:, 40:90, 20 * number : 60 + 20 * number] = 0
    counts[1, 100:110] = 0  # no data in one band alone
    profile = {"driver": "GTiff", "count": 4, "height": HEIGHT, "width": WIDTH, "dtype": "uint16", "nodata": 0,
               "crs": "EPSG:32632", "transform": rasterio.Affine(10, 0, left, 0, -10, 5200000)}  # fmt: skip
    with rasterio.open(path, "w", **{**profile, **options}) as dataset:
        dataset.descriptions = BANDS
        dataset.write(counts)
    return path


TILED = {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate"}


@pytest.fixture
def stack(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "EDGE", 64)
    monkeypatch.setattr(shared, "LINES", 32)
    paths = [
        write(tmp_path / "S2_2022-03-10.tif", 0, **TILED),
        write(tmp_path / "S2_2022-04-10.tif", 1, compress="deflate"),  # blocks are lines
        write(tmp_path / "S2_2022-05-10.tif", 2, left=300035, **TILED),  # on another grid
    ]
    sources = open_sources(paths, notice=lambda text: None)
    masked = with_masks(sources[:1], "own")
    return GeoStack((*masked, *sources[1:]), sources[0].grid, BANDS, sources[0].coding)


def same(one, two):
    return (
        np.array_equal(one.cloudy, two.cloudy)
        and np.array_equal(one.valid, two.valid)
        and all(a is b is None or np.array_equal(a, b) for a, b in zip(one.masks, two.masks, strict=True))
    )


@pytest.mark.parametrize("most_bytes", [2**30, 1])
def test_threads_read_what_a_stack_reads(stack, most_bytes):
    blocks = SharedBlocks(stack, most_bytes=most_bytes)
    assert [edges is None for edges in blocks._edges] == [False, False, True]
    windows = plan_windows(HEIGHT, WIDTH, tile=96, overlap=24)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(blocks.read, windows))
    assert all(same(read, stack.read(window)) for read, window in zip(found, windows, strict=True))
    if most_bytes > 1:
        edges = [one for one in blocks._edges if one is not None]
        assert edges[0] == (64, 64)
        assert edges[1][1] == WIDTH
        assert blocks.unpacked == sum(-(-HEIGHT // high) * -(-WIDTH // wide) for high, wide in edges)  # each once
    else:
        assert blocks._bytes <= 64 * 310 * 8  # one rectangle is always kept
    window = Window(30, 10, 77, 201)
    own, valid = blocks.read_for_finish(window, 0)
    wanted = stack.read(window)
    assert np.array_equal(own, wanted.cloudy[0])
    assert np.array_equal(valid, wanted.valid)
    numbers = blocks.read_digital(0, window)
    assert np.array_equal(numbers, stack.sources[0].read_digital(window, bands=BANDS, grid=stack.grid))
    assert blocks.read_digital(2, window) is None


def test_what_is_above_is_let_go_of(stack):
    blocks = SharedBlocks(stack)
    blocks.read(stack.grid.whole)
    before = blocks._bytes
    blocks.forget_above(128)
    assert 0 < blocks._bytes < before
    assert all((row + 1) * blocks._edges[date][0] > 128 for date, row, _ in blocks._kept)
    assert same(blocks.read(stack.grid.whole), stack.read(stack.grid.whole))
    blocks.close()
    assert blocks._bytes == 0


def test_a_block_that_cannot_be_read_fails_in_every_thread(stack, monkeypatch):
    blocks = SharedBlocks(replace(stack, sources=stack.sources[:1]))

    def broken(self, key):
        raise DataError("cannot read it")

    monkeypatch.setattr(SharedBlocks, "_read", broken)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(blocks.read, Window(0, 0, 64, 64)) for _ in range(8)]
    assert all(isinstance(one.exception(), DataError) for one in asked)
    assert not blocks._kept


def test_the_quick_change_is_the_change():
    generator = np.random.default_rng(0)
    coefficients = (0.1 * generator.standard_normal((3, 5, 4, 7, 9))).astype(np.float32)
    coefficients[1] = 0
    match = SceneMatch(coefficients, generator.random(4).astype(np.float32), 44)
    cloudy = generator.random((3, 4, 100, 70), dtype=np.float32)
    for window in (Window(0, 0, 100, 70), Window(133, 201, 100, 70), Window(290, 330, 100, 70)):
        wanted = match.change(window, cloudy)
        found = quick_change(match, window, cloudy)
        assert np.abs(found - wanted).max() < 1e-6
        assert 0 < np.abs(found).max() <= MOST_CHANGE / 2
        assert not found[1].any()


def test_a_cog_is_made_with_room_for_blocks(tmp_path, stack, monkeypatch):
    import rasterio.shutil

    seen = []
    copy = rasterio.shutil.copy

    def watched(*given, **options):
        seen.append(rasterio.env.getenv()["GDAL_CACHEMAX"])
        return copy(*given, **options)

    monkeypatch.setattr(rasterio.shutil, "copy", watched)
    rows = cog.RowFile(tmp_path / "result.rows", cog.Layer("result", BANDS, stack.coding), stack.grid)
    rows.create()
    cog.make_cog(rows, tags={})
    assert seen[0] >= 2**24  # bytes: GDAL_CACHEMAX=256 here is 256 bytes


def test_a_warm_up_computes_the_batch_that_will_come(stack, tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(
        CloudRemover, "compute", lambda self, inputs, windows, **given: asked.append((inputs, windows, given))
    )
    accelerated = tiny.with_options(backend="accelerated", batch_size=3)
    assert WarmUp(stack, accelerated, steps=None, samples=1).wait() is None
    assert not asked  # only on a GPU
    WarmUp(stack, accelerated, steps=2, samples=1, wanted=True).wait()
    inputs, windows, given = asked[0]
    assert inputs.cloudy.shape == inputs.change.shape == (3, 3, 4, 32, 32)
    assert inputs.valid.shape == inputs.cloud.shape == (3, 3, 32, 32)
    assert inputs.cloud.isnan().all()
    assert windows[0] == plan_windows(HEIGHT, WIDTH, tile=tiny.tile_size, overlap=tiny.options.overlap)[0]
    assert given["steps"] == 2


def test_a_warm_up_that_fails_stops_nothing(stack, tiny, monkeypatch, caplog):
    def broken(self, *given, **named):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(CloudRemover, "compute", broken)
    with caplog.at_level("INFO", logger="sader.geo.scene.warmup"):
        WarmUp(stack, tiny, steps=None, samples=1, wanted=True).wait()
    assert "warm-up failed (RuntimeError: no such kernel)" in caplog.text


def test_a_warm_up_computes(stack, tiny, caplog):
    with caplog.at_level("INFO", logger="sader.geo.scene.warmup"):
        WarmUp(stack, tiny.with_options(backend="accelerated"), steps=None, samples=1, wanted=True).wait()
    assert "warm-up:" in caplog.text
    assert "failed" not in caplog.text
