"""Kills `sader remove`, `series` and `train`, runs the same command again and compares every file with an unbroken run.

    python benchmarks/kills.py --kills 200            # random and chosen moments, shared among the jobs
    python benchmarks/kills.py --job remove --every 1 # at each of its file operations, as in the tests

Chosen moments: the process ends before its k-th file operation. Random ones: SIGKILL after a random part of the time of
an unbroken run, up to three times in a row. The jobs are tiny. Each run is a fork of one process that has imported the
package, so that 200 kills take minutes. Prints one line for each job; any difference raises.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sader.checkpoint import Checkpoint, load_checkpoint
from sader.data.shards import SeriesRecord, write_shard
from sader.geo.remove import RemoveRequest, run_remove
from sader.geo.scene.options import SceneOptions
from sader.geo.series import run_series
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.models import build_model, get_preset
from sader.training.record import read_log
from sader.training.run import run_training

OPERATIONS = ("replace", "rename", "fsync", "unlink", "rmdir", "mkdir", "truncate")
KILLED, SECONDS = 9, 300
COUNT = mmap.mmap(-1, 8)
"""File operations of the last run, in memory that its process shares with this one."""
BANDS = ("B02", "B03", "B04", "B08")
TINY = {
    "widths": (8, 16), "blocks": (1, 1), "fusion_width": 8, "key_width": 8, "emb_width": 16, "kernel": 3,
    "cloud_widths": (8,), "refinement_widths": (8,),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A command that is killed."""

    run: Callable[[Path], object]
    """Runs it with its output in a folder; the same call resumes it."""
    differs: Callable[[Path, Path, str], bool]
    """Whether a file differs between (folder, folder of the unbroken run, name of the file)."""


# ------------------------------------------------------------------------------------------------ jobs


def landscape(date: int, height: int = 50, width: int = 40) -> np.ndarray:
    """Return counts (4, height, width) of one date; a corner of the first is cloud."""
    ground = np.random.default_rng(7).uniform(400, 1600, (4, height // 5 + 1, width // 5 + 1)).repeat(5, 1).repeat(5, 2)
    image = ground[:, :height, :width] + np.random.default_rng(date).normal(0, 20, (4, height, width))
    if date == 0:
        image[:, :20, :20] = 9000
    return np.rint(image).clip(1, 12000).astype(np.uint16)


def tiny_remover() -> CloudRemover:
    """Return a remover whose network has a few thousand parameters."""
    torch.manual_seed(0)
    config = get_preset("small").replace(name="tiny", network=TINY)
    checkpoint = Checkpoint(build_model(config).eval(), config, {})
    return CloudRemover(checkpoint, device="cpu", options=RemoverOptions(tile=32, overlap=8))


def series_job(folder: Path) -> Job:
    """Return `sader series` of two dates with an animation."""
    remover, inputs = tiny_remover(), [write_date(folder, date) for date in range(2)]

    def run(out: Path) -> None:
        request = RemoveRequest(tuple(map(str, inputs)), str(out / "dates"), SceneOptions(provenance=True))
        run_series(request, animation=str(out / "all.gif"), load=lambda model, device: (remover, "tiny"))

    return Job(run, lambda out, wanted, name: not name.endswith(".json") and differ(out, wanted, name))


def remove_job(folder: Path, *, zarr: bool) -> Job:
    """Return `sader remove` with all layers, a preview and a page; zarr: of a Zarr store into another."""
    remover = tiny_remover()
    inputs = write_store(folder / "in.zarr") if zarr else [write_date(folder, date) for date in range(2)]

    def run(out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        extras = {} if zarr else {"preview": str(out / "look.png"), "report": str(out / "page.html")}
        options = SceneOptions(reference=0, count=True, uncertainty=True, provenance=True, samples=1)
        name = str(out / ("c.zarr" if zarr else "c.tif"))
        request = RemoveRequest(inputs=tuple(map(str, inputs)), out=name, options=options, **extras)
        run_remove(request, load=lambda model, device: (remover, "tiny"))

    def differs(out: Path, wanted: Path, name: str) -> bool:
        own = name.endswith(".html") or name in ("c.json", "c.zarr/zarr.json")  # with paths and times in them
        return not own and differ(out, wanted, name)

    return Job(run, differs)


def differ(out: Path, wanted: Path, name: str) -> bool:
    """Whether the bytes of a file differ between two folders."""
    return (out / name).read_bytes() != (wanted / name).read_bytes()


def write_date(folder: Path, date: int) -> Path:
    """Write one date as a GeoTIFF."""
    import rasterio

    path, image = folder / f"S2_2022-0{date + 3}-10.tif", landscape(date)
    with rasterio.open(
        path, "w", driver="GTiff", count=4, height=image.shape[1], width=image.shape[2], dtype="uint16", nodata=0,
        crs="EPSG:32632", transform=rasterio.Affine(10, 0, 6e5, 0, -10, 5.1e6),
    ) as dataset:  # fmt: skip
        dataset.write(image)
        dataset.descriptions = BANDS
    return path


def write_store(path: Path) -> list[Path]:
    """Write two dates as a Zarr store, in a process of its own: Zarr starts threads, which a fork would not copy."""
    import dask.array  # noqa: F401  (imported once, not by every fork)
    import xarray
    import zarr  # noqa: F401

    def write() -> None:
        attributes = {"scale_factor": 1e-4, "add_offset": 0.0, "_FillValue": np.uint16(0)}
        numbers = np.stack([landscape(date) for date in range(2)])
        dims = ("time", "band", "y", "x")
        cube = xarray.DataArray(numbers, dims=dims, coords={"band": list(BANDS)}, attrs=attributes)
        cube.to_dataset(name="reflectance").to_zarr(path, consolidated=False)

    assert forked(write) == 0
    return [path]


def train_job(folder: Path) -> Job:
    """Return `sader train` of three steps with a checkpoint after each."""
    records = []
    for place in range(2):
        labels = np.zeros((4, 50, 40), np.uint8)
        labels[0, :20, :20] = 1
        numbers = np.stack([landscape(date) for date in range(4)])
        records.append(SeriesRecord(numbers, f"place_{place}", "cloudsen12", BANDS, labels, group=f"train/{place}"))
    write_shard(folder / "shards" / "train-000.shard", records)
    settings = {
        **{f"model.network.{key}": list(value) if isinstance(value, tuple) else value for key, value in TINY.items()},
        "train.device": "cpu", "train.batch_size": 2, "train.dates": 2, "train.crop": 8, "train.steps": 3,
        "train.log_every": 1, "train.checkpoint_every": 1, "train.validate_every": 0, "train.half": "false",
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()]
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # its files are named by the time

    def run(out: Path) -> None:
        resume = (out / "config.yaml").is_file()
        run_training(
            "small", out, data=[folder / "shards"], overrides=overrides, resume=resume, progress=False,
        )  # fmt: skip

    def differs(out: Path, wanted: Path, name: str) -> bool:
        if name == "metrics.csv":
            logs = ([row for row in read_log(place / name) if row[1] != "seconds"] for place in (out, wanted))
            return next(logs) != next(logs)
        if name == "model.safetensors":
            first, second = (load_checkpoint(place / name).model.state_dict() for place in (out, wanted))
            return not all(torch.equal(value, second[key]) for key, value in first.items())
        return name == "config.yaml" and differ(out, wanted, name)

    return Job(run, differs)


JOBS: dict[str, Callable[[Path], Job]] = {
    "remove": lambda folder: remove_job(folder, zarr=False),
    "remove-zarr": lambda folder: remove_job(folder, zarr=True),
    "series": series_job,
    "train": train_job,
}


# ------------------------------------------------------------------------------------------------ kills


def count_operations(last: int | None) -> None:
    """Count the file operations of this process in `COUNT`, and end it before number `last`."""
    count = 0

    def counted(call: Any, writes: Any = lambda *given, **named: True) -> Any:
        def wrapped(*given: Any, **named: Any) -> Any:
            nonlocal count
            if writes(*given, **named):
                count += 1
                COUNT[:8] = count.to_bytes(8)
                if count == last:
                    os._exit(KILLED)
            return call(*given, **named)

        return wrapped

    def opens_for_writing(file: Any, mode: str = "r", *given: Any, **named: Any) -> bool:
        return isinstance(mode, str) and any(letter in mode for letter in "wax+")

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    opened = counted(builtins.open, opens_for_writing)
    builtins.open = io.open = opened  # type: ignore[assignment]


def forked(run: Callable[[], object], *, operation: int | None = None, seconds: float | None = None) -> int:
    """Return the exit status of a run in a process of its own, which ends at an operation or is killed after a time."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            count_operations(operation)
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    begun = time.monotonic()
    while time.monotonic() - begun < SECONDS:
        if seconds is not None and time.monotonic() - begun >= seconds:
            os.kill(child, signal.SIGKILL)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return KILLED if code == -signal.SIGKILL else code
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    raise TimeoutError(f"a run did not end within {SECONDS} s (operation {operation}, seconds {seconds})")


def files_of(folder: Path) -> list[str]:
    """Return all files below a folder, and empty folders."""
    found = [path for path in folder.rglob("*") if path.is_file() or not any(path.iterdir())]
    return sorted(str(path.relative_to(folder)) for path in found)


@contextlib.contextmanager
def attempt(job: Job, folder: Path, wanted: Path, moment: str) -> Iterator[None]:
    """Run the block, which kills the job; then run the job to its end and compare."""
    yield
    status = forked(lambda: job.run(folder))
    assert status == 0, f"killed at {moment}: the same command fails (status {status})"
    found, names = files_of(folder), files_of(wanted)
    assert found == names, f"killed at {moment}: the files are {found}; expected {names}"
    for name in names:
        assert not job.differs(folder, wanted, name), f"killed at {moment}: {name} differs"
    shutil.rmtree(folder)


def kill_at_operations(job: Job, place: Path, numbers: Sequence[int]) -> int:
    """End a job at each of some file operations; return the kills."""
    kills = 0
    for number in numbers:
        folder = place / f"operation-{number}"
        with attempt(job, folder, place / "wanted", f"operation {number}"):
            status = forked(lambda folder=folder: job.run(folder), operation=number)  # type: ignore[misc]
            assert status in (0, KILLED), f"operation {number}: status {status}"
            kills += status == KILLED
    return kills


def kill_at_random(job: Job, place: Path, *, kills: int, duration: float, seed: int) -> int:
    """Kill a job at random moments, one to three times before it may finish; return the kills."""
    chance, done = random.Random(seed), 0
    while done < kills:
        folder = place / f"random-{done}"
        moments = [chance.uniform(0, duration) for _ in range(min(chance.randint(1, 3), kills - done))]
        with attempt(job, folder, place / "wanted", f"seconds {moments}"):
            for seconds in moments:
                status = forked(lambda folder=folder: job.run(folder), seconds=seconds)  # type: ignore[misc]
                assert status in (0, KILLED), f"killed after {seconds} s: status {status}"
                done += status == KILLED
    return done


def main() -> None:
    """Parse the options, kill the jobs, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=list(JOBS), action="append", help="default: all")
    parser.add_argument("--kills", type=int, default=200, help="in all; half of them at random moments")
    parser.add_argument("--every", type=int, help="instead: end at every N-th file operation of each job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.job or list(JOBS)
    for number, name in enumerate(names):
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            job = JOBS[name](place)
            begun = time.monotonic()
            assert forked(lambda job=job, place=place: job.run(place / "wanted")) == 0  # type: ignore[misc]
            duration, operations = time.monotonic() - begun, int.from_bytes(COUNT[:8])
            if options.every:
                first = max(1, min(options.every, operations) // 2)
                kills = kill_at_operations(job, place, range(first, operations + 1, options.every))
                print(f"{name}: {kills} kills, {operations} operations, nothing lost", flush=True)
                continue
            share = options.kills * (number + 1) // len(names) - options.kills * number // len(names)
            at_random = kill_at_random(job, place, kills=share // 2, duration=duration, seed=options.seed)
            chosen = np.linspace(1, operations, share - at_random).round().astype(int).tolist()
            kills = kill_at_operations(job, place, chosen)
            print(f"{name}: {kills} kills at file operations, {at_random} at random, nothing lost", flush=True)


if __name__ == "__main__":
    main()
