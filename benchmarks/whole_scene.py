"""A whole Sentinel-2 tile on a small machine: peak memory and time of `sader remove`, measured on part of it.

    python benchmarks/whole_scene.py                       # 10980 x 10980, 3 dates, 2 rows of tiles
    python benchmarks/whole_scene.py --size 4000 --rows 1

Makes a scene of four bands on disk (blocks of a procedural place, repeated with another light), clears the first rows
of tiles with the shipped weights, and prints the measured peak memory of the process and the time extrapolated to the
whole scene. The scene is made in a process of its own, so that its memory does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

BANDS = ("B02", "B03", "B04", "B08")
PATCH = 1024
LIMIT_GIB = 4.0


def make_scene(folder: Path, size: int, dates: int) -> list[Path]:
    """Write the dates as GeoTIFFs (uint16, deflate, blocks of 512) and return their paths."""
    import rasterio

    from sader.data.synthetic import make_series

    series = make_series(5, size=(PATCH, PATCH), dates=dates, bands=BANDS, coverage=0.3, reference=0)
    counts = np.clip(np.rint(series.cloudy * 10000), 1, 65535).astype(np.uint16)
    paths = []
    for date in range(dates):
        path = folder / f"S2_2022-0{date + 3}-10.tif"
        profile = {"driver": "GTiff", "count": 4, "height": size, "width": size, "dtype": "uint16", "nodata": 0,
                   "crs": "EPSG:32632", "tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate",
                   "bigtiff": "if_safer", "transform": rasterio.Affine(10, 0, 300000, 0, -10, 5200000)}  # fmt: skip
        with rasterio.open(path, "w", **profile) as dataset:
            dataset.descriptions = BANDS
            for top in range(0, size, PATCH):
                for left in range(0, size, PATCH):
                    high, wide = min(PATCH, size - top), min(PATCH, size - left)
                    # Flipped copies fit together without an edge.
                    block = counts[date][:, :: -1 if top // PATCH % 2 else 1, :: -1 if left // PATCH % 2 else 1]
                    dataset.write(block[:, :high, :wide], window=rasterio.windows.Window(left, top, wide, high))
        paths.append(path)
    return paths


class Stopped(Exception):
    """Enough tiles were made."""


def clear_part(paths: list[Path], rows: int, tile: int, seconds: float, model: str) -> dict[str, float]:
    """Clear the first rows of tiles and return what was measured."""
    import torch

    from sader.geo.assemble import build_stack
    from sader.geo.scene import SceneOptions, clear_scene
    from sader.geo.sources import open_sources
    from sader.pipeline import CloudRemover
    from sader.tiling import plan_windows

    remover = CloudRemover.from_pretrained(model, device="cpu")
    stack = build_stack(open_sources(paths), remover.config.network)
    overlap = remover.options.overlap
    windows = plan_windows(*stack.grid.shape, tile=tile, overlap=overlap)
    across = len({window.col for window in windows})
    wanted = min(rows * across, len(windows))
    started = time.perf_counter()
    marks: list[float] = []
    steady = Watch()

    def progress(done: int, total: int) -> None:
        marks.append(time.perf_counter())
        late = seconds and marks[-1] - started > seconds
        # One tile more than whole rows: then the last row has been blended, finished and written.
        if done > wanted or (late and done > across):
            raise Stopped

    out = paths[0].parent / "clear.tif"
    options = SceneOptions(reference=0, tile=tile)
    with steady, contextlib.suppress(Stopped):
        clear_scene(stack, remover, out, options, progress=progress, notice=lambda text: None)
    taken = marks[-1] - started
    first = marks[0] - started
    each = (marks[-1] - marks[0]) / max(1, len(marks) - 1)
    return {
        "tiles_in_all": len(windows),
        "tiles_done": len(marks),
        "seconds": round(taken, 1),
        "seconds_before_the_first_tile": round(first - each, 1),
        "seconds_per_tile": round(each, 2),
        "hours_for_all": round((first + each * (len(windows) - 1)) / 3600, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "gib_after_the_first_row": round(steady.after(marks[min(across, len(marks)) - 1]), 2),
        "threads": torch.get_num_threads(),
    }


class Watch:
    """Samples the memory of this process, to show that it does not grow."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._stop = threading.Event()

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._stop.wait(0.25):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            self.samples.append((time.perf_counter(), resident / 2**30))

    def after(self, moment: float) -> float:
        """Return the largest size in GiB from a moment on."""
        return max((size for at, size in self.samples if at >= moment), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=10980, help="edge of the scene in pixels")
    parser.add_argument("--dates", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2, help="rows of tiles to work through")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long (one row at least); 0 = never")
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--model", default="sader-s2-rgbn", help="shipped weights or a checkpoint file")
    parser.add_argument("--folder", type=Path, help="where the scene is made; default: a temporary folder")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make_scene(arguments.folder, arguments.size, arguments.dates)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        subprocess.run(
            [sys.executable, __file__, "--make", "--folder", folder, "--size", str(arguments.size), "--dates",
             str(arguments.dates)],
            check=True,
        )  # fmt: skip
        paths = sorted(Path(folder).glob("S2_*.tif"))
        size = sum(path.stat().st_size for path in paths)
        print(f"scene: {arguments.size} x {arguments.size}, 4 bands, {len(paths)} dates, {size / 1e9:.2f} GB on disk")
        measured = clear_part(paths, arguments.rows, arguments.tile, arguments.seconds, arguments.model)
    print(json.dumps(measured, indent=2))
    verdict = "below" if measured["peak_gib"] < LIMIT_GIB else "ABOVE"
    print(f"peak memory {measured['peak_gib']} GiB is {verdict} {LIMIT_GIB:g} GiB")


if __name__ == "__main__":
    main()
