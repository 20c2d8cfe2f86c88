"""Work that overlaps (a look read in strips, tiles of a GPU prepared in threads) changes no bit and loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sader.errors import OutputError
from sader.geo.align import build_stack
from sader.geo.read.sources import open_sources
from sader.geo.scene import ahead
from sader.geo.scene import overview as looks
from sader.geo.scene import tiles as jobs
from sader.geo.scene.cog import RowFile
from sader.geo.scene.resume import WorkFolder
from sader.geo.scene.run import SceneOptions, clear_scene
from sader.inference.remover import CloudRemover

rasterio = pytest.importorskip("rasterio")
OPTIONS = SceneOptions(reference=0, seed=1, count=True, provenance=True)


def quiet(text: str) -> None:
    """Take a notice and do nothing with it."""


@pytest.fixture
def stack(tmp_path, write_date, tiny):
    paths = [write_date(tmp_path / "in" / f"S2_2022-0{number + 3}-10.tif", number) for number in range(3)]
    return build_stack(open_sources(paths, notice=quiet), tiny.config.network, notice=quiet)


def read(path: Any) -> np.ndarray:
    with rasterio.open(path) as dataset:
        return dataset.read()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Jobs do as they do on a GPU, in batches of one, so that the CPU's numbers can be compared to the bit."""
    start = jobs.SceneJob.__init__

    def begin(self: jobs.SceneJob, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        self.on_gpu, self.readers = True, 3

    monkeypatch.setattr(jobs.SceneJob, "__init__", begin)


def test_a_look_in_strips_is_the_look(stack, tiny, monkeypatch):
    monkeypatch.setattr(looks, "look_factor", lambda height, width: 2)
    monkeypatch.setattr(looks, "STRIP", 10_000)
    whole = looks.take_look(stack, tiny)
    monkeypatch.setattr(looks, "STRIP", 7)
    strips = looks.take_look(stack, tiny)
    assert whole.cloudy.shape == strips.cloudy.shape
    assert np.array_equal(whole.cloudy, strips.cloudy)
    assert np.array_equal(whole.valid, strips.valid)
    assert np.array_equal(whole.cloud, strips.cloud)


def test_overlapped_tiles_are_the_tiles(stack, tiny, tmp_path, monkeypatch, request):
    plain = clear_scene(stack, tiny, tmp_path / "plain.tif", OPTIONS, notice=quiet)
    request.getfixturevalue("as_on_a_gpu")
    seen: list[int] = []
    other = clear_scene(
        stack, tiny, tmp_path / "other.tif", OPTIONS, notice=quiet, progress=lambda done, total: seen.append(done)
    )
    assert seen == list(range(1, plain.tiles + 1))
    assert plain.pixels == other.pixels
    for one, two in zip(plain.files, other.files, strict=True):
        assert np.array_equal(read(one), read(two))


def test_overlapped_work_goes_on_where_it_was_stopped(stack, tiny, tmp_path, monkeypatch, as_on_a_gpu):
    whole = clear_scene(stack, tiny, tmp_path / "whole.tif", OPTIONS, notice=quiet)
    made: list[int] = []
    work = CloudRemover.predict_tiles

    def counted(self: CloudRemover, tiles: Any, **given: Any) -> Any:
        made.append(len(tiles))
        return work(self, tiles, **given)

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(CloudRemover, "predict_tiles", counted)
    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack, tiny, tmp_path / "again.tif", OPTIONS, notice=quiet, progress=stop)
    first = sum(made)
    assert first >= 3
    assert list((tmp_path / ".again.tif.sader" / "tiles").glob("*.npy"))  # what was made before its turn is kept
    made.clear()
    said: list[str] = []
    again = clear_scene(stack, tiny, tmp_path / "again.tif", OPTIONS, notice=said.append)
    assert any("going on" in text for text in said)
    assert sum(made) + first <= whole.tiles + ahead.WORKERS
    assert np.array_equal(read(whole.output), read(again.output))


def test_a_failure_in_a_thread_reaches_the_caller(stack, tiny, tmp_path, monkeypatch, as_on_a_gpu):
    def full(self: WorkFolder, window: Any, values: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WorkFolder, "save_tile", full)
    with pytest.raises(OSError, match="No space"):
        clear_scene(stack, tiny, tmp_path / "out.tif", OPTIONS, notice=quiet)
    assert not Path(tmp_path / "out.tif").exists()


def test_a_failure_in_finishing_reaches_the_caller(stack, tiny, tmp_path, monkeypatch, as_on_a_gpu):
    def full(self: RowFile, row: int, values: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RowFile, "write", full)
    with pytest.raises(OutputError, match="the disk is full"):
        clear_scene(stack, tiny, tmp_path / "out.tif", OPTIONS, notice=quiet)
    assert not Path(tmp_path / "out.tif").exists()
