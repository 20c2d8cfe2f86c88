"""The dask side: lazy, the bits of one process whatever the chunks and the scheduler, one model per worker, kill -9.

The cluster is a real one: two processes with a scheduler, started once for the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sader.checkpoint import Checkpoint
from sader.errors import ConfigError, DataError, OutputError, ValueRangeError
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.models import ModelConfig, build_model, get_preset

xr = pytest.importorskip("xarray")
dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

from sader.geo.align import build_stack  # noqa: E402
from sader.geo.read.sources import open_sources  # noqa: E402
from sader.geo.remove import remove_files  # noqa: E402
from sader.geo.scene.options import SceneOptions  # noqa: E402
from sader.geo.scene.run import clear_scene  # noqa: E402
from sader.geo.scene.source import StackScene  # noqa: E402
from sader.geo.xarray import lazy as cluster  # noqa: E402
from sader.geo.xarray.cluster import cluster_executor, connect, fetch  # noqa: E402
from sader.geo.xarray.lazy import remove_xarray  # noqa: E402
from sader.geo.xarray.zarr import clear_zarr  # noqa: E402
from sader.inference.scene import ScenePlan, run_rows  # noqa: E402
from sader.inference.values import NODATA, OBSERVED  # noqa: E402

TINY = {"widths": (16, 32), "blocks": (1, 1), "fusion_width": 16, "key_width": 8, "emb_width": 16, "kernel": 3}
BANDS = ["B02", "B03", "B04", "B08"]
HEIGHT, WIDTH = 75, 99


def tiny(config: ModelConfig, **options: Any) -> CloudRemover:
    torch.manual_seed(0)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return CloudRemover(Checkpoint(model.eval(), config, {}), device="cpu", options=RemoverOptions(**options))


@pytest.fixture(scope="module")
def remover() -> CloudRemover:
    config = get_preset("small").replace(name="tiny", network={**TINY, "cloud_widths": (8,), "refinement_widths": (8,)})
    return tiny(config, tile=32, overlap=8)


@pytest.fixture(scope="module")
def values() -> NDArray[np.float32]:
    """Three dates; some missing, one tile's worth missing in all of them."""
    array = np.random.default_rng(0).uniform(0.02, 0.5, (3, 4, HEIGHT, WIDTH)).astype(np.float32)
    array[0, :, :30, :50] = np.nan
    array[:, :, 40:, :35] = np.nan
    return array


def as_xarray(values: Any) -> Any:
    place = ((), 0, {"crs_wkt": "EPSG:32632"})
    return xr.DataArray(
        values,
        dims=("time", "band", "y", "x"),
        coords={
            "time": np.arange(values.shape[0]),
            "band": BANDS,
            "y": np.arange(values.shape[2]) * -10.0,
            "x": np.arange(values.shape[3]) * 10.0,
            "spatial_ref": place,
        },
    )


def lazy(values: NDArray[np.float32], chunks: Any) -> Any:
    return as_xarray(da.from_array(values, chunks=chunks))


def clear(array: Any, remover: CloudRemover, **options: Any) -> Any:
    """The clear image alone, not computed."""
    return cluster.clear_dataset(array, remover, extras=False, **options)["clear"]


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as made,
        distributed.Client(made) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def inside() -> Iterator[Any]:
    """A cluster in threads of this process, reached by TCP: processes of their own import everything again."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=None, silence_logs=50
        ) as made,
        distributed.Client(made) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected(remover, values) -> Any:
    """One process, one array, without dask."""
    valid = np.isfinite(values).all(axis=1)
    return remover.predict(np.nan_to_num(values), valid=valid, reference=1, seed=5, samples=2)


# ------------------------------------------------------------------------------------------------ bits


@pytest.mark.parametrize("chunks", [(3, 4, HEIGHT, WIDTH), (1, 4, 32, 32), (2, 1, 17, 99), (3, 3, 75, 10)])
def test_the_bits_are_those_of_one_process_whatever_the_chunks(remover, values, expected, chunks):
    result = clear(lazy(values, chunks), remover, reference=1, seed=5, samples=2)
    assert np.array_equal(result.compute(scheduler="threads").values, expected.clear, equal_nan=True)


@pytest.mark.parametrize("chunks", [1000, 40, 13, None])
def test_chunks_of_the_result_change_nothing(remover, values, expected, chunks):
    result = clear(as_xarray(values), remover, reference=1, seed=5, samples=2, chunks=chunks)
    assert result.data.chunksize[1:] == tuple(min(chunks or 24, size) for size in (HEIGHT, WIDTH))
    assert np.array_equal(result.compute(scheduler="sync").values, expected.clear, equal_nan=True)


def test_the_bits_are_those_of_one_process_on_a_cluster(local, remover, values, expected):
    result = cluster.clear_dataset(lazy(values, (1, 4, 40, 40)), remover, reference=1, seed=5, samples=2).compute()
    observed = np.isfinite(values).all(axis=1).any(axis=0)
    assert np.array_equal(result.clear.values, expected.clear, equal_nan=True)
    assert np.array_equal(result.uncertainty.values[:, observed], expected.spread[:, observed])
    assert np.isnan(result.uncertainty.values[:, ~observed]).all()


def test_tile_and_overlap_are_those_asked_for(remover, values):
    with_tiles = tiny(remover.config, tile=48, overlap=16)
    valid = np.isfinite(values).all(axis=1)
    wanted = with_tiles(np.nan_to_num(values), valid=valid, reference=0)
    result = clear(lazy(values, 50), remover, reference=0, tile=48, overlap=16)
    assert np.array_equal(result.values, wanted, equal_nan=True)


def test_a_network_of_the_paper_gives_its_bits_too(values):
    config = get_preset("sen12mscrts_ea").replace(name="tiny-paper", network={**TINY, "bands": tuple(BANDS)})
    paper = tiny(config, tile=32, overlap=8)
    whole = np.nan_to_num(values, nan=0.1)[..., :40, :48]
    mask = np.random.default_rng(1).random(whole[:, 0].shape) < 0.3
    masks = xr.DataArray(da.from_array(mask, chunks=30), dims=("time", "y", "x"))
    for reference in (None, 1):
        wanted = paper(whole, reference=reference, cloud_mask=mask, days=[0, 1, 2], steps="1+1")
        made = clear(lazy(whole, 40), paper, reference=reference, cloud_mask=masks, steps="1+1")
        assert np.array_equal(made.values, wanted)
    made = clear(lazy(whole, 40), paper, reference=1)
    assert np.array_equal(made.values, paper(whole, reference=1, days=[0, 1, 2]))


def test_counts_and_provenance(remover, values):
    mask = np.zeros(values[:, 0].shape, dtype=bool)
    mask[1, :, 60:] = True
    array = lazy(values, 32)
    masks = xr.DataArray(mask, dims=("time", "y", "x"))
    result = cluster.clear_dataset(array, remover, reference=1, cloud_mask=masks).compute()
    valid = np.isfinite(values).all(axis=1)
    seen = valid.any(axis=0)
    assert np.array_equal(result.clear_count, np.where(seen, (valid & ~mask).sum(axis=0), 255))
    kept = valid[1] & ~mask[1]
    assert np.array_equal(result.clear.values[:, kept], values[1][:, kept])
    assert np.array_equal(result.provenance == OBSERVED, kept)
    assert np.array_equal(result.provenance == NODATA, ~seen)
    assert ("source_date" in result) == remover.states_source
    if remover.states_source:
        expected = remover.predict(np.where(valid[:, None], values, 0), reference=1, cloud_mask=mask, valid=valid)
        assert np.array_equal(result.source_date, expected.source_date)
    assert ("uncertainty" in result) == remover.states_error
    assert result.clear_count.dims == ("y", "x")


# ------------------------------------------------------------------------------------------------ lazy


def test_nothing_is_computed_until_asked(remover):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a chunk was computed")

    data = da.map_blocks(refuse, chunks=((3,), (4,), (40, 40), (40, 40)), dtype="float32", meta=np.empty((0,) * 4))
    result = clear(as_xarray(data), remover)
    assert result.shape == (4, 80, 80)
    assert result.spatial_ref.attrs["crs_wkt"] == "EPSG:32632"
    assert list(result.band.values) == BANDS
    with pytest.raises(AssertionError, match="a chunk was computed"):
        result.compute(scheduler="sync")


def test_a_corner_of_the_result_reads_a_corner_of_the_dates(remover):
    read: list[Any] = []

    def load(block_info: Any = None) -> NDArray[np.float32]:
        read.append(block_info[None]["chunk-location"][2:])
        return np.full((3, 4, 32, 32), 0.2, np.float32)

    data = da.map_blocks(load, chunks=((3,), (4,), (32,) * 8, (32,) * 8), dtype="float32", meta=np.empty((0,) * 4))
    result = clear(as_xarray(data), remover, reference=0, scene_match=False)
    assert result[:, :20, :20].compute(scheduler="sync").shape == (4, 20, 20)
    assert set(read) == {(0, 0)}


def test_auto_is_decided_lazily_and_like_in_memory(inside, remover, values):
    array = as_xarray(np.nan_to_num(values, nan=0.1))
    mask = xr.DataArray(np.ones(values[:, 0].shape, dtype=bool), dims=("time", "y", "x"))
    mask[2, ::2] = False
    wanted = remove_xarray(remover, array, cloud_mask=mask)
    assert np.array_equal(wanted, remove_xarray(remover, array, cloud_mask=mask, reference=2))
    result = remove_xarray(remover, array.chunk(y=30, x=50), cloud_mask=mask.chunk(x=20))
    assert np.array_equal(result.compute(scheduler="sync"), wanted)
    assert np.array_equal(result.compute(), wanted)
    own = remove_xarray(remover, array.chunk(y=30))  # the model's own estimate
    assert np.array_equal(own.compute(scheduler="threads"), remove_xarray(remover, array))


def test_a_persisted_array_works_too(inside, remover, values, expected):
    array = lazy(values, (3, 4, 40, 40)).persist()
    result = clear(array, remover, reference=1, seed=5, samples=2)
    assert np.array_equal(result.values, expected.clear, equal_nan=True)
    assert np.isfinite(clear(array, remover).values).any()


def test_all_nan_is_nan_and_an_error_of_a_tile_reaches_the_user(remover, values):
    nothing = clear(lazy(np.full_like(values, np.nan), 40), remover)
    assert np.isnan(nothing.compute(scheduler="sync")).all()
    wrong = clear(lazy(np.nan_to_num(values) * 10000, 40), remover, reference=0)
    with pytest.raises(ValueRangeError, match=r"goes up to .*scale_factor"):
        wrong.compute(scheduler="sync")
    with pytest.raises(ConfigError, match="chunks is 0"):
        clear(lazy(values, 40), remover, chunks=0)
    with pytest.raises(ConfigError, match="samples is 0"):
        clear(lazy(values, 40), remover, samples=0)


# ------------------------------------------------------------------------------------------------ workers


def test_a_sent_remover_has_the_same_bits_and_is_built_once(remover):
    other = pickle.loads(pickle.dumps(remover))
    assert other is not remover
    assert pickle.loads(pickle.dumps(remover)) is other
    for name, value in remover.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name])
    assert tiny(remover.config, tile=48, overlap=8).checksum != remover.checksum


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(local, remover):
    array = np.random.default_rng(2).uniform(0.02, 0.5, (3, 4, 104, 104)).astype(np.float32)
    wanted = tiny(remover.config, tile=32, overlap=8)(array, reference=0, steps=8)
    result = clear(lazy(array, 52), remover, reference=0, steps=8)
    job = local.compute(result)
    tasks = local.cluster.scheduler.tasks
    victim = next(iter(local.scheduler_info()["workers"]))
    process = local.run(os.getpid, workers=[victim])[victim]

    def finished() -> int:
        return sum("sader-tile" in key and task.state == "memory" for key, task in list(tasks.items()))

    def at_work() -> bool:
        there = local.cluster.scheduler.workers[victim]
        return any("sader-tile" in task.key for task in there.processing) and there.nbytes > 0

    deadline = time.monotonic() + 60
    while not (finished() >= 4 and at_work()):
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    assert job.status == "pending"
    assert np.array_equal(job.result(timeout=60).values, wanted)


# ------------------------------------------------------------------------------------------------ Zarr


def counts_of(array: Any) -> Any:
    """The array as Sentinel-2 counts with the offset of baseline 04.00."""
    numbers = np.rint((np.nan_to_num(array.values, nan=-0.1) + 0.1) * 10000).astype("uint16")
    stored = array.copy(data=numbers)
    stored.attrs = {"scale_factor": 1e-4, "add_offset": -0.1, "_FillValue": np.uint16(0)}
    return stored


@pytest.fixture
def store(tmp_path, values) -> Any:
    dataset = counts_of(as_xarray(values)).chunk(time=1, y=40, x=50).to_dataset(name="reflectance")
    dataset["cloudy"] = xr.DataArray(values[:, 0] > 0.4, dims=("time", "y", "x"))
    path = tmp_path / "ein Würfel.zarr"
    dataset.to_zarr(path, consolidated=False)
    return path


@pytest.mark.filterwarnings("ignore:.*Zarr")
def test_zarr_in_zarr_out_is_stored_like_the_input(store, tmp_path, remover, values, monkeypatch):
    out, ticks = tmp_path / "clear.zarr", []
    monkeypatch.delattr("sader.geo.scene.cog.RowFile.extend_overviews")  # a store has no overviews
    named = remover.states_source
    options = SceneOptions(reference=1, seed=5, count=True, provenance=True, source_date=named, min_count=1)
    with dask.config.set(scheduler="synchronous"):
        report = clear_zarr(store, out, remover, options, mask="cloudy", progress=lambda *tick: ticks.append(tick))
    raw = xr.open_zarr(out, mask_and_scale=False, consolidated=False)
    assert raw.clear.dtype == np.uint16
    assert raw.clear.attrs["add_offset"] == -0.1
    own = xr.open_zarr(store, mask_and_scale=False, consolidated=False)
    array = own.reflectance.compute()
    made = cluster.clear_dataset(array, remover, reference=1, seed=5, cloud_mask=own.cloudy, min_count=1)
    wanted = made.clear.compute(scheduler="sync")
    found = xr.open_zarr(out, consolidated=False)
    assert np.array_equal(np.isnan(found.clear), np.isnan(wanted))
    assert np.nanmax(np.abs(found.clear - wanted)) <= 0.51e-4
    assert not named or np.array_equal(raw.source_date, made.source_date.compute(scheduler="sync"))
    kept = found.provenance.values == OBSERVED
    assert kept.any()
    assert np.array_equal(raw.clear.values[:, kept], array.values[1][:, kept])  # the very numbers of the input
    assert found.spatial_ref.attrs["crs_wkt"] == "EPSG:32632"
    assert list(found.band.values) == BANDS
    assert ticks[-1] == (report.tiles, report.tiles)
    assert report.pixels["observed"] == kept.sum()
    assert sum(report.pixels.values()) == HEIGHT * WIDTH
    assert report.reference == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clear.zarr", "ein Würfel.zarr"]


@pytest.mark.filterwarnings("ignore:.*Zarr")
def test_zarr_bands_as_variables_and_the_clearest_date(tmp_path, remover, values):
    path, out = tmp_path / "cube.zarr", tmp_path / "clear.zarr"
    array = as_xarray(np.nan_to_num(values, nan=0.1)[..., :40, :40]).chunk(y=20)
    array.to_dataset(dim="band").to_zarr(path, consolidated=False)
    report = clear_zarr(path, out, remover)
    wanted = remove_xarray(remover, array.compute())
    assert np.array_equal(xr.open_zarr(out, consolidated=False).clear, wanted)
    assert report.clear_share[report.reference_index] == max(report.clear_share)
    assert report.bands == tuple(BANDS)


@pytest.mark.filterwarnings("ignore:.*Zarr")
def test_zarr_refusals_leave_nothing_behind(store, tmp_path, remover, values):
    (tmp_path / "notes.zarr").mkdir()
    (tmp_path / "notes.zarr" / "text").touch()
    kept = clear_zarr(store, tmp_path / "there.zarr", remover, SceneOptions(reference=0)).pixels
    empty = tmp_path / "empty.zarr"
    as_xarray(np.full_like(values, np.nan)).to_dataset(name="nothing").to_zarr(empty, consolidated=False)
    before = sorted(path.name for path in tmp_path.iterdir())
    for source, out, changes, error, text in [
        (store, "there.zarr", {}, OutputError, "exists. Use --overwrite"),
        (store, "notes.zarr", {"options": SceneOptions(overwrite=True)}, OutputError, "is no Zarr store"),
        (store, "clear.tif", {}, OutputError, r"ends in \.zarr"),
        (tmp_path / "none.zarr", "a.zarr", {}, DataError, "no Zarr store at"),
        (tmp_path / "notes.zarr", "a.zarr", {}, DataError, "cannot be read as a Zarr store"),
        (store, "a.zarr", {"variable": "red"}, DataError, "no variable 'red'; it has cloudy, reflectance"),
        (store, "a.zarr", {"mask": "clouds"}, DataError, "no variable 'clouds'"),
        (empty, "a.zarr", {}, ValueRangeError, "no date of .*empty.zarr has a valid pixel"),
    ]:
        with pytest.raises(error, match=text):
            clear_zarr(source, tmp_path / out, remover, **changes)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    again = clear_zarr(store, tmp_path / "there.zarr", remover, SceneOptions(reference=0, overwrite=True))
    assert again.pixels == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.filterwarnings("ignore")
def test_zarr_from_the_command_line(store, tmp_path):
    from typer.testing import CliRunner

    from sader.cli.main import app

    out = tmp_path / "clear.zarr"
    done = CliRunner().invoke(
        app, ["remove", str(store), "-o", str(out), "--mask", "cloudy", "--json", "--model", "small"]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["files"] == [str(out)]
    assert xr.open_zarr(out, consolidated=False).clear.shape == (4, HEIGHT, WIDTH)


# ------------------------------------------------------------------------------------------------ files on a cluster


@pytest.fixture
def scenes(tmp_path) -> list[Any]:
    rasterio = pytest.importorskip("rasterio")
    generator, files = np.random.default_rng(3), []
    for month in (3, 5, 10):
        path = tmp_path / f"S2_2022-{month:02d}-10.tif"
        with rasterio.open(
            path, "w", driver="GTiff", count=4, height=80, width=100, dtype="uint16", crs="EPSG:32632", nodata=0,
            transform=rasterio.Affine(10, 0, 4e5, 0, -10, 5e6), tiled=True, blockxsize=32, blockysize=32,
        ) as file:  # fmt: skip
            file.write(generator.integers(200, 5000, (4, 80, 100)).astype("uint16"))
            file.descriptions = BANDS
            file.scales = (1e-4,) * 4
        files.append(path)
    return files


def stack_of(scenes: list[Any], remover: CloudRemover) -> Any:
    return build_stack(open_sources(scenes), remover.config.network)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["inside", pytest.param("local", marks=pytest.mark.slow)])
def test_files_on_a_cluster_give_the_file_of_a_local_run(where, request, scenes, tmp_path, remover):
    local, ticks = request.getfixturevalue(where), []
    options = SceneOptions(reference=1, seed=2, count=True, provenance=True)
    stack = stack_of(scenes, remover)
    here = clear_scene(stack, remover, tmp_path / "here.tif", options)
    address = local.scheduler.address
    there = clear_scene(
        stack,
        remover,
        tmp_path / "there.tif",
        options,
        executor=partial(cluster_executor, address),
        progress=lambda *tick: ticks.append(tick),
    )
    assert there.pixels == here.pixels
    assert ticks[-1] == (here.tiles, here.tiles)
    for ours, theirs in zip(here.files, there.files, strict=True):
        assert Path(ours).read_bytes() == Path(theirs).read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.filterwarnings("ignore")
def test_tiles_may_take_longer_to_arrive_than_the_cluster_is_watched(inside, scenes, tmp_path, remover, monkeypatch):
    monkeypatch.setattr("sader.geo.xarray.cluster.POLL_SECONDS", 1e-4)
    stack = stack_of(scenes, remover)
    here = clear_scene(stack, remover, tmp_path / "here.tif")
    executor = partial(cluster_executor, inside.scheduler.address)
    there = clear_scene(stack, remover, tmp_path / "there.tif", executor=executor)
    assert Path(here.output).read_bytes() == Path(there.output).read_bytes()


def run_out_of_time() -> None:
    raise TimeoutError("of the task")


def test_a_timeout_in_a_task_is_raised(inside):
    with pytest.raises(TimeoutError, match="of the task"):
        fetch(inside, inside.submit(run_out_of_time))


@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_cannot_find_the_files_says_so(inside, scenes, tmp_path, remover):
    scene = StackScene(stack_of(scenes, remover))
    scenes[2].rename(tmp_path / "moved.tif")
    plan = ScenePlan((80, 100), scene.stack.bands, scene.stack.codings, None, 0, None, tile=32, overlap=8)
    address = inside.scheduler.address
    with (
        pytest.raises(DataError, match=r"S2_2022-10-10.*On a dask worker: all machines must see"),
        cluster_executor(address, plan, remover, scene) as executor,
    ):
        run_rows(plan, executor, None, options=RemoverOptions())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("victims", [("worker", "scheduler")])
def test_the_only_worker_dies_and_the_scheduler_after_it(scenes, tmp_path, remover, monkeypatch, victims):
    """Both are reported within seconds, with one message; a later run on a new cluster continues."""
    monkeypatch.setattr("sader.geo.xarray.cluster.LOST_SECONDS", 1.0)
    stack, out = stack_of(scenes, remover), tmp_path / "out.tif"
    wanted = clear_scene(stack, remover, tmp_path / "here.tif", SceneOptions(reference=0))

    def run(stop: Any) -> None:
        def progress(done: int, total: int) -> None:
            if done == 5:
                stop()

        options = SceneOptions(reference=0)
        clear_scene(stack, remover, out, options, executor=partial(cluster_executor, address), progress=progress)

    for victim in victims:
        processes = [
            subprocess.Popen([sys.executable, "-c", SCHEDULER], stdout=subprocess.PIPE, text=True),
        ]
        address = processes[0].stdout.readline().strip()
        processes.append(subprocess.Popen([sys.executable, "-c", WORKER, address]))
        try:
            started: list[float] = []

            def kill(process: Any = processes[0 if victim == "scheduler" else 1], started: Any = started) -> None:
                started.append(time.monotonic())
                process.kill()

            with pytest.raises(DataError, match=r"the dask cluster is gone .*Finished rows are kept"):
                run(kill)
            assert time.monotonic() - started[0] < 20
        finally:
            for process in processes:
                process.kill()
                process.wait()
    texts: list[str] = []
    done = clear_scene(stack, remover, out, SceneOptions(reference=0), notice=texts.append)
    assert "resuming a previous run" in texts
    assert Path(done.output).read_bytes() == Path(wanted.output).read_bytes()


SCHEDULER = """
import asyncio, distributed
async def main():
    async with distributed.Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        print(scheduler.address, flush=True)
        await scheduler.finished()
asyncio.run(main())
"""
WORKER = """
import asyncio, distributed, sys
async def main():
    async with distributed.Worker(sys.argv[1], nthreads=1, dashboard=False) as worker:
        await worker.finished()
asyncio.run(main())
"""


def test_a_local_cluster_opens_no_ports():
    def listening() -> set[str]:
        tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        own = set()
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(os.readlink(entry))
        lines = [line.split() for table in tables for line in table]
        return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}

    before = listening()
    with connect("local") as client:
        assert client.submit(sum, [1, 2]).result() == 3
        assert listening() <= before


def test_an_address_without_scheduler_is_told_within_seconds(scenes, tmp_path, remover, monkeypatch):
    monkeypatch.setattr("sader.geo.xarray.cluster.CONNECT_SECONDS", 0.2)
    started = time.monotonic()
    for address in ("tcp://127.0.0.1:9", "nonsense", "no-such-file.json"):
        with (
            pytest.raises(ConfigError, match=f"no dask scheduler answers at {address}.*dask scheduler"),
            connect(address),
        ):
            pass
    assert time.monotonic() - started < 5


def test_a_scheduler_without_workers_is_told(monkeypatch):
    monkeypatch.setattr("sader.geo.xarray.cluster.WORKER_SECONDS", 0.2)
    with distributed.LocalCluster(n_workers=0, dashboard_address=None, processes=False, silence_logs=50) as empty:
        address = empty.scheduler_address
        with pytest.raises(ConfigError, match=r"has no workers\. Start some with: dask worker"), connect(address):
            pass


@pytest.mark.filterwarnings("ignore")
def test_remove_files_in_three_lines(scenes, tmp_path, remover):
    rasterio = pytest.importorskip("rasterio")
    report = remove_files(remover, scenes, tmp_path / "clear.tif", reference="2022-05-10")
    with rasterio.open(report.output) as made:
        assert made.descriptions == tuple(BANDS)
        assert made.crs.to_epsg() == 32632
    assert report.reference == "S2_2022-05-10.tif"

    def load(path: Any) -> Any:
        with rasterio.open(path) as file:
            return file.read(), {**file.profile, "descriptions": file.descriptions, "scales": file.scales}

    other = remove_files(remover, scenes, tmp_path / "loaded.tif", reference=1, load=load)
    with rasterio.open(report.output) as one, rasterio.open(other.output) as two:
        assert np.array_equal(one.read(), two.read())
    with pytest.raises(ConfigError, match="unknown option refrence; did you mean reference"):
        remove_files(remover, scenes, tmp_path / "b.tif", refrence=1)
    with pytest.raises(DataError, match="files is one path"):
        remove_files(remover, str(scenes[0]), tmp_path / "b.tif")
