"""A whole Sentinel-2 tile, files in, Cloud Optimized GeoTIFF out: time, memory and how busy the GPU is.

    python benchmarks/whole_scene.py                              # 10980 x 10980, 3 dates, 2 rows of tiles, on the CPU
    python benchmarks/whole_scene.py --size 4000 --rows 1
    python benchmarks/whole_scene.py --device cuda --out FOLDER   # all of it, with `sader remove`'s own path

Makes a scene of four bands on disk (blocks of a procedural place, repeated with another light) in a process of its own,
so that its memory does not count, and clears it with the shipped weights. On the CPU only the first rows of tiles are
worked through, and the time is extrapolated to the whole scene. What is measured is printed as it comes and written to
FOLDER/whole_scene.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

BANDS = ("B02", "B03", "B04", "B08")
PATCH = 1024
LIMIT_GIB = 4.0


def make_scene(folder: Path, size: int, dates: int, patch: int) -> list[Path]:
    """Write the dates as GeoTIFFs (uint16, deflate, blocks of 512) and return their paths."""
    from sader.data.synthetic.scene import make_series

    series = make_series(5, size=(patch, patch), dates=dates, bands=BANDS, coverage=0.3, reference=0)
    counts = np.clip(np.rint(series.cloudy * 10000), 1, 65535).astype(np.uint16)
    paths = [folder / f"S2_2022-0{date + 3}-10.tif" for date in range(dates)]
    with ProcessPoolExecutor(min(dates, os.cpu_count() or 1)) as pool:
        list(pool.map(partial(write_date, size=size), paths, counts))
    return paths


def write_date(path: Path, counts: np.ndarray, *, size: int) -> None:
    """Write one date: `counts` (C, patch, patch) repeated over the scene."""
    import rasterio

    patch = counts.shape[-1]

    profile = {"driver": "GTiff", "count": 4, "height": size, "width": size, "dtype": "uint16", "nodata": 0,
               "crs": "EPSG:32632", "tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate",
               "bigtiff": "if_safer", "num_threads": "ALL_CPUS",
               "transform": rasterio.Affine(10, 0, 300000, 0, -10, 5200000)}  # fmt: skip
    with rasterio.open(path, "w", **profile) as dataset:
        dataset.descriptions = BANDS
        for top in range(0, size, patch):
            for left in range(0, size, patch):
                high, wide = min(patch, size - top), min(patch, size - left)
                # Flipped copies fit together without an edge.
                block = counts[:, :: -1 if top // patch % 2 else 1, :: -1 if left // patch % 2 else 1]
                dataset.write(block[:, :high, :wide], window=rasterio.windows.Window(left, top, wide, high))


class Stopped(Exception):
    """Enough tiles were made."""


def clear_part(
    paths: list[Path],
    rows: int,
    tile: int,
    seconds: float,
    model: str,
    device: str,
    batch: int | None,
    backend: str | None,
) -> dict[str, Any]:
    """Clear the first rows of tiles (0 = the whole scene, to the end) and return what was measured."""
    import torch

    from sader.geo.align import build_stack
    from sader.geo.read.sources import open_sources
    from sader.geo.scene.run import SceneOptions, clear_scene
    from sader.inference.remover import CloudRemover
    from sader.inference.tiling import plan_windows

    remover = CloudRemover.from_pretrained(model, device=device)
    stack = build_stack(open_sources(paths), remover.config.network)
    overlap = min(remover.options.overlap, tile // 4)  # as `clear_scene` takes it
    windows = plan_windows(*stack.grid.shape, tile=tile, overlap=overlap)
    across = len({window.col for window in windows})
    wanted = min(rows * across, len(windows)) if rows else len(windows) + 1
    stages = Stages()
    watch = Watch(gpu=device.startswith("cuda"))
    marks: list[float] = []
    begun = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()

    def progress(done: int, total: int) -> None:
        marks.append(time.perf_counter())
        if done % (4 * across) == 1:
            print(f"  {done} of {total} tiles after {marks[-1] - started:.1f} s", flush=True)
        late = seconds and marks[-1] - started > seconds
        # One tile more than whole rows: then the last row has been blended, finished and written.
        if done > wanted or (late and done > across):
            raise Stopped

    out = paths[0].parent / "clear.tif"
    options = SceneOptions(reference=0, tile=tile, batch_size=batch, backend=backend)
    finished = False
    with watch, stages.watched(), contextlib.suppress(Stopped):
        clear_scene(stack, remover, out, options, progress=progress, notice=lambda text: print(text, flush=True))
        finished = True
    ended = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF)
    first, each = marks[0] - started, (marks[-1] - marks[0]) / max(1, len(marks) - 1)
    measured: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "cores": os.cpu_count(),
        "tiles_in_all": len(windows),
        "tiles_done": len(marks),
        "whole": finished,
        "seconds": round(ended - started, 1),
        "seconds_before_the_first_tile": round(first - each, 1),
        "seconds_of_tiles": round(marks[-1] - marks[0], 1),
        "seconds_after_the_last_tile": round(ended - marks[-1], 1),
        "seconds_per_tile": round(each, 4),
        "cpu_seconds": round(used.ru_utime - begun.ru_utime, 1),
        "system_seconds": round(used.ru_stime - begun.ru_stime, 1),
        "thousand_page_faults": (used.ru_minflt - begun.ru_minflt) // 1000,
        "peak_gib": round(used.ru_maxrss / 2**20, 2),
        "gib_at_the_start": round(watch.samples[0][1], 2) if watch.samples else None,
        "gib_before_the_first_tile": round(max((g for at, g in watch.samples if at < marks[0]), default=0.0), 2),
        "gib_after_the_first_row": round(watch.after(marks[min(across, len(marks)) - 1]), 2),
        "threads": torch.get_num_threads(),
        "stages": stages.seconds(),
    }
    if not finished:
        measured["hours_for_all"] = round((first + each * (len(windows) - 1)) / 3600, 2)
    else:
        measured["output_gb"] = round(out.stat().st_size / 1e9, 2)
    if device.startswith("cuda"):
        busy = stages.gpu_seconds()
        measured["gpu"] = {
            "computing_s": round(busy, 2),
            "busy_share_of_all": round(busy / (ended - started), 3),
            "busy_share_while_tiles_are_made": round(busy / max(1e-9, marks[-1] - started - first + each), 3),
            "nvidia_smi_mean_percent_of_all": watch.gpu_percent(started, ended),
            "nvidia_smi_mean_percent_while_tiles_are_made": watch.gpu_percent(marks[0], marks[-1]),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
    return measured


class Stages:
    """Seconds spent in the parts of the work, summed over threads; on a GPU also the time of its batches."""

    NAMED: ClassVar = {
        "look at the whole scene": ("sader.geo.scene.run", "take_look"),
        "match of the whole scene": ("sader.geo.scene.run", "scene_match"),
        "COG": ("sader.geo.scene.publish", "make_cog"),
    }
    METHODS: ClassVar = {
        "warm-up, beside the look": ("sader.geo.scene.warmup", "WarmUp", "_run"),
        "waiting for the warm-up": ("sader.geo.scene.warmup", "WarmUp", "wait"),
        "reading tiles (threads)": ("sader.geo.scene.digital", "DigitalTiles", "fill"),
        "reading tiles as reflectance (threads)": ("sader.geo.scene.tiles", "SceneJob", "_read"),
        "noise, launched (threads)": ("sader.inference.noise", "NoiseField", "windows"),
        "batches, all (threads)": ("sader.geo.scene.digital", "DigitalTiles", "predict"),
        "batches of reflectance, all (threads)": ("sader.inference.remover", "CloudRemover", "predict_tiles"),
        "blending": ("sader.geo.scene.rows", "RowBlend", "add"),
        "finishing rows": ("sader.geo.scene.rows", "Finisher", "rows"),
        "writing rows": ("sader.geo.scene.cog", "RowFile", "write"),
        "keeping tiles (threads)": ("sader.geo.scene.resume", "WorkFolder", "save_tile"),
        "computing and waiting for the turn (threads)": ("sader.inference.accelerate", "AcceleratedTile", "__call__"),
    }

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._events: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                with self._lock:
                    self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - started

        return wrapped

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Measure while inside."""
        import importlib

        import torch

        before: list[tuple[Any, str, Any]] = []
        for name, (module, attribute) in self.NAMED.items():
            owner: Any = importlib.import_module(module)
            before.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, self._timed(name, getattr(owner, attribute)))
        for name, (module, kind, attribute) in self.METHODS.items():
            owner = getattr(importlib.import_module(module), kind)
            before.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, self._timed(name, getattr(owner, attribute)))
        quick = importlib.import_module("sader.inference.accelerate").AcceleratedTile
        run = quick._computed
        before.append((quick, "_computed", run))

        def between_events(*arguments: Any) -> Any:
            if not torch.cuda.is_available():
                return run(*arguments)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            result = run(*arguments)
            last.record()
            self._events.append((first, last))
            return result

        quick._computed = between_events
        try:
            yield
        finally:
            for owner, attribute, value in before:
                setattr(owner, attribute, value)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part."""
        return {name: round(spent, 2) for name, spent in sorted(self._spent.items(), key=lambda pair: -pair[1])}

    def gpu_seconds(self) -> float:
        """Return the GPU's time for all batches but the first, in which kernels are compiled and recorded."""
        import torch

        torch.cuda.synchronize()
        return sum(first.elapsed_time(last) for first, last in self._events[1:]) / 1000


class Watch:
    """Samples the memory of this process, to show that it does not grow, and how busy nvidia-smi says the GPU is."""

    def __init__(self, *, gpu: bool = False) -> None:
        self.samples: list[tuple[float, float]] = []
        self.busy: list[tuple[float, float]] = []
        self._gpu = gpu
        self._stop = threading.Event()

    def __enter__(self) -> Watch:
        self._threads = [threading.Thread(target=self._memory, daemon=True)]
        self._smi: subprocess.Popen[str] | None = None
        if self._gpu:
            with contextlib.suppress(OSError):
                command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "250"]
                self._smi = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                self._threads.append(threading.Thread(target=self._load, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._smi is not None:
            self._smi.terminate()
        for thread in self._threads:
            thread.join(timeout=5)

    def _memory(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._stop.wait(0.25):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            self.samples.append((time.perf_counter(), resident / 2**30))

    def _load(self) -> None:
        assert self._smi is not None
        assert self._smi.stdout is not None
        for line in self._smi.stdout:
            with contextlib.suppress(ValueError):
                self.busy.append((time.perf_counter(), float(line)))

    def after(self, moment: float) -> float:
        """Return the largest size in GiB from a moment on."""
        return max((size for at, size in self.samples if at >= moment), default=0.0)

    def gpu_percent(self, start: float, end: float) -> float | None:
        """Return the mean of what nvidia-smi said between two moments."""
        found = [value for at, value in self.busy if start <= at <= end]
        return round(sum(found) / len(found), 1) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=10980, help="edge of the scene in pixels")
    parser.add_argument("--dates", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="rows of tiles to work through, 0 = all; default 2, all on a GPU")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long (one row at least); 0 = never")
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--batch", type=int, help="tiles at a time on a GPU")
    parser.add_argument("--backend", help="torch, accelerated, onnx; default: accelerated on a GPU, else torch")
    parser.add_argument("--model", default="sader-s2-rgbn", help="shipped weights or a checkpoint file")
    parser.add_argument("--folder", type=Path, help="where the scene is made; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="folder for whole_scene.json")
    parser.add_argument("--patch", type=int, default=PATCH, help="edge of the place that is repeated")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make_scene(arguments.folder, arguments.size, arguments.dates, arguments.patch)
        return
    logging.basicConfig(format="  %(relativeCreated)d ms %(name)s: %(message)s")
    logging.getLogger("sader").setLevel(logging.INFO)  # what the first batch spends its time on
    on_gpu = arguments.device.startswith("cuda")
    rows = arguments.rows if arguments.rows is not None else 0 if on_gpu else 2
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, __file__, "--make", "--folder", folder, "--size", str(arguments.size), "--dates",
             str(arguments.dates), "--patch", str(arguments.patch)],
            check=True,
        )  # fmt: skip
        paths = sorted(Path(folder).glob("S2_*.tif"))
        size = sum(path.stat().st_size for path in paths)
        print(
            f"scene: {arguments.size} x {arguments.size}, 4 bands, {len(paths)} dates, {size / 1e9:.2f} GB on disk, "
            f"made in {time.perf_counter() - started:.1f} s",
            flush=True,
        )
        measured = clear_part(
            paths, rows, arguments.tile, arguments.seconds, arguments.model, arguments.device, arguments.batch,
            arguments.backend,
        )  # fmt: skip
    text = json.dumps(measured, indent=2)
    print(text, flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "whole_scene.json").write_text(text)
    verdict = "below" if measured["peak_gib"] < LIMIT_GIB else "ABOVE"
    print(f"peak memory {measured['peak_gib']} GiB is {verdict} {LIMIT_GIB:g} GiB")


if __name__ == "__main__":
    main()
