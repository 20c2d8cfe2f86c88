"""Stopped at any moment, the same call goes on; another job starts anew; what failed for good leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sader.errors import DataError, OutputError, SaderError
from sader.geo.align import build_stack
from sader.geo.read.sources import open_sources
from sader.geo.scene import run
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.resume import differences
from sader.geo.scene.run import clear_scene
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory, write_date, tiny) -> Any:
    """The same dates, unchanged, with the result of a whole run and the work folder of one stopped in its last row."""
    folder = tmp_path_factory.mktemp("shared")
    files = [write_date(folder / "in" / f"S2_2022-0{number + 3}-10.tif", number) for number in range(2)]
    report = clear_scene(stack_of(files, tiny), tiny, folder / "whole" / "c.tif", OPTIONS, notice=quiet)
    target = folder / "stopped" / "c.tif"
    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack_of(files, tiny), tiny, target, OPTIONS, progress=stop_after(9), notice=quiet)
    return SimpleNamespace(paths=files, report=report, whole=folder / "whole", stopped=folder / "stopped")


@pytest.fixture
def predicted(monkeypatch) -> list[tuple[int, int]]:
    """Where the network has been, in order."""
    made: list[tuple[int, int]] = []
    work = CloudRemover.prepare

    def counted(self: CloudRemover, inputs: Any, windows: Any, **given: Any) -> Any:
        made.extend((window.row, window.col) for window in windows)
        return work(self, inputs, windows, **given)

    monkeypatch.setattr(CloudRemover, "prepare", counted)
    return made


@pytest.mark.parametrize("number", [1, 4, 5, 11])
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, shared, tiny, predicted, number):
    """12 tiles in 3 rows of 4: stopped in the first row, at its end, after it, and in the last."""
    whole, paths = shared.whole / "c.tif", shared.paths
    everything = [(row, col) for row in (0, 24, 38) for col in (0, 24, 48, 58)]
    out = tmp_path / "parts" / "c.tif"
    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, progress=stop_after(number), notice=quiet)
    assert not out.exists(), "the output appears only when it is whole"
    predicted.clear()
    texts: list[str] = []
    other_threads = replace(OPTIONS, threads=3)
    report = clear_scene(stack_of(paths, tiny), tiny, out, other_threads, notice=texts.append)
    assert texts[0] == "resuming a previous run"
    assert sorted(predicted) == sorted(everything)[number // 4 * 4 :], "finished rows of tiles are not computed again"
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
    assert "discarding the unfinished work of a different job (seed was 1, is 2)" in texts[0]
    assert len(predicted) == 12


@pytest.mark.parametrize("change", ["time", "content"])
def test_a_changed_input_is_another_job(tmp_path, paths, tiny, predicted, change):
    """Another time stamp, or other content with the same size and time stamp."""
    out = tmp_path / "o" / "c.tif"
    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, progress=stop_after(5), notice=quiet)
    predicted.clear()
    if change == "time":
        os.utime(paths[1], (1, 1))
    else:
        before = os.stat(paths[1])
        content = bytearray(paths[1].read_bytes())
        content[len(content) // 2] ^= 1
        paths[1].write_bytes(content)
        os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    texts: list[str] = []
    with contextlib.suppress(DataError):  # the flipped bit may make the file unreadable
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=texts.append)
    assert "inputs changed" in texts[0]
    assert change == "content" or len(predicted) == 12


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

    def full(self: RowFile, row: int, lines: Any, *, sync: bool = True) -> int:
        if row > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, row, lines, sync=sync)

    monkeypatch.setattr(RowFile, "write", full)
    with pytest.raises(OutputError, match=r"cannot write .*c.tif: the disk is full. Free some space and run the same"):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=quiet)
    assert not out.exists()
    monkeypatch.setattr(RowFile, "write", write)
    predicted.clear()
    clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=quiet)
    assert len(predicted) == 8, "the first of three rows of tiles was kept"


def test_an_input_that_breaks_in_the_middle_leaves_nothing(tmp_path, tiny, write_date, land, monkeypatch):
    good = write_date(tmp_path / "in" / "a.tif", land(0, size=(600, 90)))
    bad = write_date(tmp_path / "in" / "b.tif", land(1, size=(600, 90)))
    stack = stack_of([good, bad], tiny)
    from sader.geo.read.raster import close_files

    out = tmp_path / "o" / "c.tif"
    monkeypatch.setattr("sader.geo.scene.source.CACHE_LIMIT", 1)

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


# ------------------------------------------------------------------------------------------------ damaged work files


def stopped(tmp_path: Any, shared: Any) -> tuple[Any, Any]:
    """Return the output and the work folder of a run that was stopped in its last row of tiles."""
    shutil.copytree(shared.stopped, tmp_path / "o", dirs_exist_ok=True)
    return tmp_path / "o" / "c.tif", tmp_path / "o" / ".c.tif.sader"


@pytest.mark.slow
def test_overviews_of_a_stopped_run_are_those_of_a_whole_one(tmp_path, write_date, land, tiny):
    files = [write_date(tmp_path / f"S2_2022-0{n + 3}-10.tif", land(n, size=(600, 40))) for n in range(2)]
    stack, options = stack_of(files, tiny), SceneOptions(reference=0, tile=96)
    clear_scene(stack, tiny, tmp_path / "whole.tif", options, notice=quiet)
    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack, tiny, tmp_path / "c.tif", options, progress=stop_after(5), notice=quiet)
    assert list((tmp_path / ".c.tif.sader").glob("result-half.rows"))
    clear_scene(stack, tiny, tmp_path / "c.tif", options, notice=quiet)
    with rasterio.open(tmp_path / "whole.tif") as dataset:
        assert dataset.overviews(1) == [2]
    assert (tmp_path / "c.tif").read_bytes() == (tmp_path / "whole.tif").read_bytes()


def flip(path: Any, at: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 255
    path.write_bytes(content)


def state_with(work: Any, **changes: Any) -> None:
    path = work / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES = {
    "rows flipped": lambda work: flip(work / "result.rows"),
    "rows of the second row of tiles": lambda work: flip(work / "count.rows", 90 * 30),
    "rows cut": lambda work: os.truncate(work / "result.rows", 1000),
    "rows deleted": lambda work: (work / "count.rows").unlink(),
    "rows deleted before any was finished": lambda work: (
        state_with(work, strips=0, sums={}, counts=[]),
        (work / "result.rows").unlink(),
    ),
    "blend empty": lambda work: os.truncate(work / "blend-2.npz", 0),
    "blend flipped": lambda work: flip(work / "blend-2.npz"),
    "blend deleted": lambda work: (work / "blend-2.npz").unlink(),
    "blend a pickle": lambda work: (work / "blend-2.npz").write_bytes(b"\x80\x04N."),
    "state cut": lambda work: os.truncate(work / "state.json", 50),
    "state a list": lambda work: (work / "state.json").write_text("[]"),
    "too many strips": lambda work: state_with(work, strips=99),
    "negative strips": lambda work: state_with(work, strips=-1),
    "no checksums": lambda work: state_with(work, sums={}),
}


OTHERS = ("rows cut", "blend empty", "blend a pickle", "state a list", "negative strips")
"""Damages that are found by the same checks as one before them."""


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=pytest.mark.slow if name in OTHERS else ()) for name in DAMAGES]
)
def test_damaged_work_files_are_made_again(tmp_path, shared, tiny, damage):
    out, work = stopped(tmp_path, shared)
    DAMAGES[damage](work)
    done = clear_scene(stack_of(shared.paths, tiny), tiny, out, OPTIONS, notice=quiet)
    for name in ("c.tif", "c_count.tif"):
        assert (out.parent / name).read_bytes() == (shared.whole / name).read_bytes()
    assert done.pixels == shared.report.pixels
    assert sorted(p.name for p in out.parent.iterdir()) == ["c.tif", "c_count.tif"]


# ------------------------------------------------------------------------------------------------ folders of others


@pytest.mark.parametrize("kind", ["link", "folder", "link inside", "file"])
def test_a_work_folder_that_is_not_ours_is_left_alone(tmp_path, shared, tiny, kind):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("text")
    out = tmp_path / "o" / "c.tif"
    out.parent.mkdir()
    work = out.with_name(".c.tif.sader")
    if kind == "link":
        work.symlink_to(mine)
    elif kind == "folder":
        mine.rename(work)
        mine = work
    elif kind == "file":
        work.write_text("text")
    else:
        _, work = stopped(tmp_path, shared)
        (work / "more").symlink_to(mine)
    with pytest.raises(OutputError, match=r"\.c\.tif\.sader (is a link or a file|holds ).*It is left as it is"):
        clear_scene(stack_of(shared.paths, tiny), tiny, out, SceneOptions(reference=0, seed=7), notice=quiet)
    assert kind == "file" or (mine / "thesis.txt").read_text() == "text"
    assert not out.exists()


def test_an_output_that_appears_during_the_run_is_not_replaced(tmp_path, paths, tiny, monkeypatch):
    """Another run ends between the first check and the lock."""
    out = tmp_path / "c.tif"
    job = run.Scene.job

    def slow(self: Any) -> Any:
        out.write_text("of another run")
        return job(self)

    monkeypatch.setattr(run.Scene, "job", slow)
    with pytest.raises(OutputError, match=r"c\.tif exists\. Use --overwrite"):
        clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=quiet)
    assert out.read_text() == "of another run"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_complete_output_of_the_same_job_is_recognised(tmp_path, paths, tiny, predicted):
    out = tmp_path / "o" / "c.tif"
    first = clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=quiet)
    before = out.stat().st_mtime_ns
    predicted.clear()
    texts: list[str] = []
    again = clear_scene(stack_of(paths, tiny), tiny, out, OPTIONS, notice=texts.append)
    assert "exists already, from the same command and inputs" in texts[0]
    assert not predicted
    assert out.stat().st_mtime_ns == before
    for name in ("pixels", "reference", "clear_share", "files", "model", "steps"):
        assert getattr(again, name) == getattr(first, name)
    with pytest.raises(OutputError, match=r"c\.tif exists"):
        clear_scene(stack_of(paths, tiny), tiny, out, SceneOptions(reference=1), notice=quiet)


def test_values_that_are_not_finite_are_never_written(tmp_path, paths, tiny):
    damaged = pickle.loads(pickle.dumps(tiny.with_options(mask_growth=3)))
    with torch.no_grad():
        for parameter in damaged.model.parameters():
            parameter.fill_(float("nan"))
    out = tmp_path / "o" / "c.tif"
    with pytest.raises(SaderError, match="NaN or infinite"):
        clear_scene(stack_of(paths, tiny), damaged, out, SceneOptions(reference=None), notice=quiet)
    assert not out.exists()
