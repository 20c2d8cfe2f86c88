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
    "overview": ("sader.geo.scene.run", "read_overview"),
    "masks of the overview": ("sader.geo.scene.source", "overview_of"),
    "reading tiles (threads)": ("sader.geo.scene.source", "StackScene", "read"),
    "tiles with reading and waiting (threads)": ("sader.inference.scene", "predict_windows"),
    "preparing tiles (threads)": ("sader.inference.remover", "CloudRemover", "prepare"),
    "waiting for tiles (threads)": ("sader.inference.remover", "CloudRemover", "raw_tiles"),
    "finishing and writing rows": ("sader.inference.scene", "_end_rows"),
    "writing rows": ("sader.geo.scene.cog", "RowFile", "write"),
    "overviews of the COG": ("sader.geo.scene.cog", "make_overviews"),
    "COG with its overviews": ("sader.geo.scene.run", "make_cog"),
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


@contextlib.contextmanager
def timed_stages() -> Iterator[dict[str, float]]:
    """Yield the seconds of each stage, summed over threads, while its functions are replaced by timed ones."""
    spent: dict[str, float] = {}
    lock = threading.Lock()
    before: list[tuple[Any, str, Any]] = []

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                with lock:
                    spent[name] = round(spent.get(name, 0.0) + time.perf_counter() - started, 3)

        return wrapped

    for name, (module, *path) in STAGES.items():
        owner: Any = importlib.import_module(module)
        for part in path[:-1]:
            owner = getattr(owner, part)
        before.append((owner, path[-1], getattr(owner, path[-1])))
        setattr(owner, path[-1], timed(name, getattr(owner, path[-1])))
    try:
        yield spent
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
        "stages": dict(sorted(stages.items(), key=lambda pair: -pair[1])),
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
    text = json.dumps(measured, indent=2)
    print(text, flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "whole_scene.json").write_text(text)
    verdict = "below" if measured["peak_gib"] < LIMIT_GIB else "ABOVE"
    print(f"peak memory {measured['peak_gib']} GiB is {verdict} {LIMIT_GIB:g} GiB")


if __name__ == "__main__":
    main()
