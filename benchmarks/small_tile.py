"""Time the default sampling of one 256x256 tile, T=3, with the preset `small` on the CPU with two threads.

Run: python benchmarks/small_tile.py   (the goal is at most 5 s on two cores; the weights do not matter for the time)
"""

from __future__ import annotations

import statistics
import time

import torch

from sader.data.synthetic.scene import make_series
from sader.inference.remover import CloudRemover

RUNS = 5


def main() -> None:
    torch.set_num_threads(2)
    scene = make_series(0, size=(256, 256), dates=3)
    remover = CloudRemover.from_preset("small", device="cpu")
    seconds = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        remover(scene.cloudy, reference=0, cloud_mask=scene.cloud_mask)
        seconds.append(time.perf_counter() - started)
    warm = seconds[1:]
    print(f"small, 256x256, T=3, {torch.get_num_threads()} threads: median {statistics.median(warm):.2f} s", end=" ")
    print(f"(first {seconds[0]:.2f}, best {min(warm):.2f}, worst {max(warm):.2f}, {RUNS} runs)")


if __name__ == "__main__":
    main()
