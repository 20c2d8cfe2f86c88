"""Runs `sader remove --scenes` on processes that are killed meanwhile and compares all files with an unbroken run.

    python benchmarks/batch.py                                     # 200 scenes, 2 processes, a kill every 4 scenes
    python benchmarks/batch.py --scenes 6 --every 3 --model tiny   # as in the tests

Three runs over the same scenes (three dates of 64 to 128 pixels each): unbroken; with a worker process killed every few
scenes; the second one again, which finds nothing to do. Any difference raises. Prints one line for each run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
from kills import tiny_remover

import sader
from sader.checkpoint import save_checkpoint
from sader.data.synthetic.scene import make_series
from sader.geo.batch.report import BatchReport
from sader.geo.read.raster import write_geotiff

DAYS = ("2022-03-10", "2022-05-13", "2022-10-20")


def write_scenes(folder: Path, count: int) -> None:
    """Write synthetic scenes, each into a folder of its own."""
    for number in range(count):
        size = random.Random(number).randrange(64, 129, 8)
        series = make_series(number, size=(size, size), coverage=0.3)
        place = (10.0, 0.0, 6e5 + 1e4 * number, 0.0, -10.0, 5.1e6)
        (folder / f"place_{number:03d}").mkdir(parents=True)
        for day, image in zip(DAYS, series.cloudy, strict=True):
            path = folder / f"place_{number:03d}" / f"S2_{day}.tif"
            write_geotiff(path, image, bands=series.bands, crs="EPSG:32632", transform=place)


class Killer:
    """Kills a worker process a random part of a second after every few scenes; its call is the progress of a run."""

    def __init__(self, every: int, seed: int = 0) -> None:
        self.every, self.chance, self.kills = every, random.Random(seed), 0

    def __call__(self, done: int, total: int) -> None:
        if done % self.every == 1 % self.every and done < total:
            threading.Timer(self.chance.uniform(0, 1), self.kill).start()

    def kill(self) -> None:
        """Kill one worker."""
        if workers := worker_processes():
            self.chance.choice(workers).kill()
            self.kills += 1


def worker_processes() -> list[psutil.Process]:
    """Return the processes that dask has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("spawn_main" in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found


def run(scenes: Path, out: Path, **options: Any) -> tuple[BatchReport, str]:
    """Run all scenes; return the report and its figures as text."""
    report = sader.remove_scenes(scenes, out, device="cpu", **options)
    values = report.as_dict()
    assert not values["failed"], report.as_text()
    attempts = sum(scene.attempts for scene in report.scenes)
    counts = f"{values['done']} done, {values['unchanged']} unchanged, {attempts} attempts"
    return report, f"{counts}, {report.seconds:.0f} s, {report.core_seconds:.0f} core seconds"


def main() -> None:
    """Parse the options, run the scenes three times, compare the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=4, help="scenes between two kills")
    parser.add_argument("--model", default="sader-s2-rgbn", help="or tiny: a network of a few thousand parameters")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_scenes(place / "scenes", options.scenes)
        if options.model == "tiny":
            remover = tiny_remover()
            save_checkpoint(place / "tiny.safetensors", remover.denoiser, remover.config)
            options.model = str(place / "tiny.safetensors")
        given = {"workers": options.workers, "model": options.model, "provenance": True, "tile": 64}
        _, text = run(place / "scenes", place / "wanted", **given)
        print(f"unbroken: {text}", flush=True)
        killer = Killer(options.every)
        _, text = run(place / "scenes", place / "killed", progress=killer, **given)
        print(f"with {killer.kills} kills: {text}", flush=True)
        assert killer.kills, "no worker was killed: use a smaller --every"
        names = sorted(path.name for path in (place / "wanted").iterdir())
        left = sorted(path.name for path in (place / "killed").iterdir())
        assert left == names, f"the files are {set(left) ^ set(names)} more or less"
        images = [name for name in names if name.endswith(".tif")]
        different = [n for n in images if (place / "wanted" / n).read_bytes() != (place / "killed" / n).read_bytes()]
        assert not different, f"{different} differ"
        _, text = run(place / "scenes", place / "killed", **given)
        print(f"again: {text}", flush=True)
        assert len(images) == 2 * options.scenes, images
        print(f"{len(images)} images equal in every byte, nothing lost", flush=True)


if __name__ == "__main__":
    main()
