"""Stopped at any moment, the same call goes on; another job starts anew; what failed for good leaves nothing behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sader.errors import DataError, OutputError
from sader.geo.align import build_stack
from sader.geo.read.sources import open_sources
from sader.geo.scene.resume import differences
from sader.geo.scene.run import SceneOptions, clear_scene
from sader.inference.remover import CloudRemover

rasterio = pytest.importorskip("rasterio")
OPTIONS = SceneOptions(reference=0, seed=1, count=True)


def quiet(text: str) -> None:
    """Take a notice and do nothing with it."""


def stack_of(paths: list[Any], remover: CloudRemover) -> Any:
    return build_stack(open_sources(paths, notice=quiet), remover.config.network, notice=quiet)


def read(path: Any) -> np.ndarray:
    with rasterio.open(path) as dataset:
        return dataset.read()


def stop_after(number: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done == number:
            raise KeyboardInterrupt

    return progress


@pytest.fixture
def paths(tmp_path, write_date):
    return [write_date(tmp_path / "in" / f"S2_2022-0{number + 3}-10.tif", number) for number in range(2)]


@pytest.fixture
def predicted(monkeypatch) -> list[tuple[int, int]]:
    """Where the network has been, in order."""
    made: list[tuple[int, int]] = []
    work = CloudRemover.predict_tiles

    def counted(self: CloudRemover, tiles: Any, *, windows: Any, **given: Any) -> Any:
        made.extend((window.row, window.col) for window in windows)
        return work(self, tiles, windows=windows, **given)

    monkeypatch.setattr(CloudRemover, "predict_tiles", counted)
    return made


@pytest.mark.parametrize("number", [1, 4, 5, 11])
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, paths, tiny, predicted, number):
    """12 tiles in 3 rows of 4: stopped in the first row, at its end, after it, and in the last."""
    whole = tmp_path / "whole" / "c.tif"
    clear_scene(stack_of(paths, tiny), tiny, whole, OPTIONS, notice=quiet)
    everything = list(predicted)
    assert len(everything) == len(set(everything)) == 12
    out = tmp_path / "parts" / "c.tif"
    predicted.clear()
    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, progress=stop_after(number), notice=quiet)
    assert not out.exists(), "the output appears only when it is whole"
    before, texts = list(predicted), []
    predicted.clear()
    report = clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=texts.append)
    assert texts[0].startswith("going on with the work of an earlier run")
    assert before + predicted == everything, "finished tiles are not made again"
    np.testing.assert_array_equal(read(out), read(whole))
    np.testing.assert_array_equal(read(out.with_name("c_count.tif")), read(whole.with_name("c_count.tif")))
    assert sum(report.pixels.values()) == 70 * 90
    assert sorted(p.name for p in out.parent.iterdir()) == ["c.tif", "c_count.tif"]


def test_another_job_starts_anew_and_says_why(tmp_path, paths, tiny, predicted):
    out = tmp_path / "o" / "c.tif"
    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, progress=stop_after(3), notice=quiet)
    predicted.clear()
    texts: list[str] = []
    other = SceneOptions(reference=0, seed=2, count=True)
    clear_scene(stack_of(paths, tiny), tiny, out, other, notice=texts.append)
    assert "unfinished work of another job was found and is thrown away (seed was 1, is 2); starting anew" in texts[0]
    assert len(predicted) == 12


def test_a_changed_input_is_another_job(tmp_path, paths, tiny, predicted):
    out = tmp_path / "o" / "c.tif"
    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, progress=stop_after(3), notice=quiet)
    predicted.clear()
    os.utime(paths[1], (1, 1))
    texts: list[str] = []
    clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=texts.append)
    assert "inputs changed" in texts[0]
    assert len(predicted) == 12


def test_two_processes_do_not_write_one_output(tmp_path, paths, tiny):
    from sader.geo.scene.resume import WorkFolder

    out = tmp_path / "c.tif"
    with (
        WorkFolder(out, {}),
        pytest.raises(OutputError, match=r"another process is writing .*c.tif\. Wait for it"),
    ):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=quiet)


def test_a_full_disk_is_said_and_the_work_kept(tmp_path, paths, tiny, monkeypatch, predicted):
    from sader.geo.scene.cog import RowFile

    out, write = tmp_path / "o" / "c.tif", RowFile.write

    def full(self: RowFile, row: int, values: Any) -> None:
        if row > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, row, values)

    monkeypatch.setattr(RowFile, "write", full)
    with pytest.raises(OutputError, match=r"cannot write .*c.tif: the disk is full. Free some space and run the same"):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=quiet)
    assert not out.exists()
    monkeypatch.setattr(RowFile, "write", write)
    predicted.clear()
    clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=quiet)
    assert len(predicted) == 4, "two of three rows of tiles were kept"


def test_an_input_that_breaks_in_the_middle_leaves_nothing(tmp_path, tiny, write_date, land):
    good = write_date(tmp_path / "in" / "a.tif", land(0, size=(600, 90)))
    bad = write_date(tmp_path / "in" / "b.tif", land(1, size=(600, 90)))
    stack = stack_of([good, bad], tiny)
    from sader.geo.read.raster import close_files

    out = tmp_path / "o" / "c.tif"

    def spoil(done: int, total: int) -> None:
        if done == 1:
            with open(bad, "r+b") as file:
                file.truncate(bad.stat().st_size // 2)

    close_files()
    with pytest.raises(DataError, match=r"cannot read .*b.tif: .*damaged, half-written"):
        clear_scene(stack, tiny, out, OPTIONS, progress=spoil, notice=quiet)
    assert list(out.parent.iterdir()) == []


def test_what_differs_is_named():
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}) == ["b.c was 2, is 3"]
    assert differences({"a": [1]}, {"a": [2]}) == ["a changed"]
    assert differences({}, {"a": "x"}) == ["a was None, is x"]


@pytest.mark.parametrize("kills", [(3,), pytest.param((1, 4, 6, 9), marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path, paths, tiny, tiny_file, kills):
    """kill -9 on the real program after so many tiles, then once to the end: the result of an undisturbed run."""
    out = tmp_path / "o" / "c.tif"
    command = [sys.executable, "-m", "sader", "remove", *map(str, paths), "-o", str(out), "--no-item",
               "--model", str(tiny_file), "--tile", "32", "--overlap", "8", "--reference", "2022-03-10", "--steps", "3",
               "--device", "cpu"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    work = Path(tmp_path / "o" / ".c.tif.sader" / "tiles")
    for tiles in kills:
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline and len(list(work.glob("*.npy"))) < tiles:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists()
        assert work.exists(), "the process ended before it could be killed"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "going on with the work of an earlier run" in done.stderr
    undisturbed = tmp_path / "u" / "c.tif"
    options = SceneOptions(reference=0, tile=32, overlap=8, steps=3)
    clear_scene(stack_of(paths, tiny), tiny, undisturbed, options, notice=quiet)
    np.testing.assert_array_equal(read(out), read(undisturbed))
    assert [p.name for p in out.parent.iterdir()] == ["c.tif"]
