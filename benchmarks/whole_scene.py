"""A whole Sentinel-2 tile, files in, Cloud Optimized GeoTIFF out: time and memory of each stage.

    python benchmarks/whole_scene.py                              # 10980 x 10980, 3 dates, 2 rows of tiles, on the CPU
    python benchmarks/whole_scene.py --size 4000 --rows 1 --threads 1
    python benchmarks/whole_scene.py --device cuda --out FOLDER   # the whole scene, as `sader remove` computes it

Writes a scene of four bands to disk (a procedural place, repeated and mirrored) in a process of its own, so that its
memory does not count, and clears it with the shipped weights. On the CPU only the first rows of tiles are computed, and
the time is extrapolated to the whole scene. The measurements are printed and written to FOLDER/whole_scene.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
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
from typing import Any

import numpy as np

BANDS = ("B02", "B03", "B04", "B08")
PATCH = 1024
LIMIT_GIB = 4.0
STAGES = {
    "checksums of inputs and weights": ("sader.geo.scene.run", "Scene", "job"),
    "overview": ("sader.geo.scene.run", "read_overview"),
    "masks of the overview, first of a constant image": ("sader.inference.scene_match", "Overview", "of"),
    "warm-up of tiles": ("sader.inference.scene", "compute_blank_tiles"),
    "capture of the CUDA graph": ("sader.inference.accelerate", "CapturedCall", "__init__"),
    "order of bands": ("sader.geo.scene.run", "check_order"),
    "match of dates": ("sader.inference.scene_match", "SceneMatch", "fit"),
    "files of rows": ("sader.geo.scene.resume", "RowFiles", "prepare"),
    "tiles with reading and waiting (threads)": ("sader.inference.scene", "predict_windows"),
    "reading tiles (threads)": ("sader.geo.scene.source", "StackScene", "read"),
    "preparing tiles (threads)": ("sader.inference.remover", "CloudRemover", "prepare"),
    "waiting for tiles (threads)": ("sader.inference.remover", "CloudRemover", "raw_tiles"),
    "finishing and writing rows": ("sader.inference.scene", "_end_rows"),
    "writing rows": ("sader.geo.scene.cog", "RowFile", "write"),
    "overviews of rows": ("sader.geo.scene.cog", "RowFile", "extend_overviews"),
    "COG": ("sader.geo.scene.run", "make_cog"),
    "copy into the COG": ("rasterio.shutil", "copy"),
    "comparison of the COG with its rows": ("sader.geo.scene.cog", "_check_written"),
    "moving files to their names": ("sader.geo.scene.run", "_publish"),
    "removing work files": ("sader.geo.scene.resume", "WorkFolder", "remove"),
}
"""Name -> module, class if any, and function whose calls are timed."""


def make_scene(folder: Path, size: int, dates: int) -> None:
    """Write the dates as GeoTIFFs (uint16, deflate, blocks of 512)."""
    from sader.data.synthetic.scene import make_series

    series = make_series(5, size=(PATCH, PATCH), dates=dates, bands=BANDS, coverage=0.3, reference=0)
    counts = np.clip(np.rint(series.cloudy * 10000), 1, 65535).astype(np.uint16)
    paths = [folder / f"S2_2022-0{date + 3}-10.tif" for date in range(dates)]
    with ProcessPoolExecutor(min(dates, os.cpu_count() or 1)) as pool:
        list(pool.map(partial(write_date, size=size), paths, counts))


def write_date(path: Path, counts: np.ndarray, *, size: int) -> None:
    """Write one date: `counts` (C, patch, patch) repeated over the scene, mirrored copies fit without an edge."""
    import rasterio

    profile = {
        "driver": "GTiff", "count": 4, "height": size, "width": size, "dtype": "uint16", "nodata": 0, "tiled": True,
        "crs": "EPSG:32632", "blockxsize": 512, "blockysize": 512, "compress": "deflate", "bigtiff": "if_safer",
        "num_threads": "ALL_CPUS", "transform": rasterio.Affine(10, 0, 300000, 0, -10, 5200000),
    }  # fmt: skip
    with rasterio.open(path, "w", **profile) as dataset:
        dataset.descriptions = BANDS
        for top in range(0, size, PATCH):
            for left in range(0, size, PATCH):
                high, wide = min(PATCH, size - top), min(PATCH, size - left)
                block = counts[:, :: -1 if top // PATCH % 2 else 1, :: -1 if left // PATCH % 2 else 1]
                dataset.write(block[:, :high, :wide], window=rasterio.windows.Window(left, top, wide, high))


class Stopped(Exception):
    """Enough tiles were computed."""


class Stage:
    """The calls of one stage: their number, their seconds summed over threads, first start and last end."""

    def __init__(self) -> None:
        self.calls, self.seconds, self.start, self.end = 0, 0.0, float("inf"), 0.0
        self._lock = threading.Lock()

    def timed(self, call: Callable[..., Any], started: float) -> Callable[..., Any]:
        """Return the function with its calls added here."""

        def wrapped(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter() - started
            try:
                return call(*arguments, **named)
            finally:
                end = time.perf_counter() - started
                with self._lock:
                    self.calls, self.seconds = self.calls + 1, self.seconds + end - start
                    self.start, self.end = min(self.start, start), max(self.end, end)

        return wrapped

    def as_dict(self) -> dict[str, float]:
        """Return rounded values for JSON."""
        return {key: round(value, 2) for key, value in vars(self).items() if not key.startswith("_")}


@contextlib.contextmanager
def timed_stages() -> Iterator[dict[str, Stage]]:
    """Yield the stages while their functions are replaced by timed ones."""
    started = time.perf_counter()
    stages = {name: Stage() for name in STAGES}
    before: list[tuple[Any, str, Any]] = []
    for name, (module, *path) in STAGES.items():
        owner: Any = importlib.import_module(module)
        for part in path[:-1]:
            owner = getattr(owner, part)
        before.append((owner, path[-1], vars(owner)[path[-1]]))
        timed = stages[name].timed(getattr(owner, path[-1]), started)
        is_bound = isinstance(vars(owner)[path[-1]], classmethod)
        setattr(owner, path[-1], staticmethod(timed) if is_bound else timed)
    try:
        yield stages
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


def clear(paths: list[Path], rows: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Clear the first rows of tiles, 0 = the whole scene, and return the measurements."""
    import torch

    from sader.geo.align import build_stack
    from sader.geo.read.sources import open_sources
    from sader.geo.scene.options import SceneOptions
    from sader.geo.scene.run import clear_scene
    from sader.inference.remover import CloudRemover

    remover = CloudRemover.from_pretrained(arguments.model, device=arguments.device)
    stack = build_stack(open_sources(paths), remover.config.network)
    options = SceneOptions(
        reference=0,
        tile=arguments.tile,
        batch_size=arguments.batch,
        backend=arguments.backend,
        threads=arguments.threads,
    )
    marks: list[float] = []
    peaks: list[int] = []
    numbers: list[int] = []
    begun, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()

    def progress(done: int, total: int) -> None:
        marks.append(time.perf_counter())
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        numbers.append(total)
        across = round(total**0.5)
        if done % (4 * across) == 1:
            print(f"  {done} of {total} tiles after {marks[-1] - started:.1f} s", flush=True)
        if rows and done >= rows * across:
            raise Stopped

    out = paths[0].parent / "clear.tif"
    finished = False
    with timed_stages() as stages, contextlib.suppress(Stopped):
        clear_scene(stack, remover, out, options, progress=progress, notice=lambda text: print(text, flush=True))
        finished = True
    ended, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    each = (marks[-1] - marks[0]) / max(1, len(marks) - 1)
    on_gpu = arguments.device.startswith("cuda")
    measured: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "tiles_in_all": numbers[0],
        "tiles_done": len(marks),
        "whole": finished,
        "seconds": round(ended - started, 1),
        "seconds_before_the_first_tile": round(marks[0] - started - each, 1),
        "seconds_of_tiles": round(marks[-1] - marks[0], 1),
        "seconds_after_the_last_tile": round(ended - marks[-1], 1),
        "seconds_per_tile": round(each, 4),
        "cpu_seconds": round(used.ru_utime - begun.ru_utime, 1),
        "system_seconds": round(used.ru_stime - begun.ru_stime, 1),
        "peak_gib": round(used.ru_maxrss / 2**20, 2),
        "peak_gib_at_the_start_and_after_the_first_and_last_tile": [
            round(one / 2**20, 2) for one in (begun.ru_maxrss, peaks[0], peaks[-1])
        ],
        "stages": {name: stage.as_dict() for name, stage in stages.items() if stage.calls},
    }
    if finished:
        measured["output_gb"] = round(out.stat().st_size / 1e9, 2)
    else:
        measured["hours_for_all"] = round((marks[0] - started + each * (numbers[0] - 1)) / 3600, 2)
    if on_gpu:
        measured["gpu_peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=10980, help="edge of the scene in pixels")
    parser.add_argument("--dates", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="rows of tiles to compute, 0 = all; default 2, all on a GPU")
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--batch", type=int, help="tiles at a time on a GPU")
    parser.add_argument("--threads", type=int, help="cores used on a CPU")
    parser.add_argument("--backend", help="torch, accelerated or onnx; default: accelerated on a GPU, else torch")
    parser.add_argument("--model", default="sader-s2-rgbn", help="shipped weights or a checkpoint file")
    parser.add_argument("--folder", type=Path, help="where the scene is written; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="folder for whole_scene.json")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make_scene(arguments.folder, arguments.size, arguments.dates)
        return
    on_gpu = arguments.device.startswith("cuda")
    rows = arguments.rows if arguments.rows is not None else 0 if on_gpu else 2
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        started = time.perf_counter()
        make = [sys.executable, __file__, "--make", "--folder", folder, "--size", str(arguments.size)]
        subprocess.run([*make, "--dates", str(arguments.dates)], check=True)
        paths = sorted(Path(folder).glob("S2_*.tif"))
        size = sum(path.stat().st_size for path in paths)
        text = f"scene: {arguments.size} x {arguments.size}, 4 bands, {len(paths)} dates, {size / 1e9:.2f} GB on disk"
        print(f"{text}, written in {time.perf_counter() - started:.1f} s", flush=True)
        measured = clear(paths, rows, arguments)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "whole_scene.json").write_text(json.dumps(measured, indent=2))
    print("\n  start     end      sum  calls  stage (s)")
    for name, one in sorted(measured.pop("stages").items(), key=lambda pair: pair[1]["start"]):
        print(f"{one['start']:7.2f} {one['end']:7.2f} {one['seconds']:8.2f} {one['calls']:6}  {name}")
    print(json.dumps(measured, indent=2), flush=True)
    verdict = "below" if measured["peak_gib"] < LIMIT_GIB else "ABOVE"
    print(f"peak memory {measured['peak_gib']} GiB is {verdict} {LIMIT_GIB:g} GiB")


if __name__ == "__main__":
    main()
