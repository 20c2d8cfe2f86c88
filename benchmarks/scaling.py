"""How the cost of a tile grows: with dates, pixels, bands and tiles at a time; CPU seconds and a fitted exponent each.

Run: python benchmarks/scaling.py [--threads 1]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence

import torch

from sader.export import example_inputs, load_any, make_graph
from sader.tilegraph import TileGraph

WHY = {
    "dates": "encoder, cloud head and matching run per date, the backbone once: below 1, towards 1 with many dates",
    "pixels": "convolutions are linear; global attention at 1/8 of the resolution is quadratic and starts to show",
    "bands": "the first and last layers and matching (C^2 moments, C^3 solves per cell) see bands; the rest does not",
    "batch": "nothing is shared between tiles: 1 on a CPU",
}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log(seconds) over log(sizes) by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(one) for one in seconds]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def cost(graph: TileGraph, *, runs: int, batch: int = 1, dates: int = 3, edge: int = 128) -> float:
    """Return the CPU seconds of one run, the least of several."""
    inputs = example_inputs(graph, batch=batch, dates=dates, height=edge, width=edge)
    seconds = []
    for _ in range(runs + 1):
        started = time.process_time()
        graph(*inputs)
        seconds.append(time.process_time() - started)
    return min(seconds[1:])


def main() -> None:
    """Print one line per axis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rgbn, msi = (make_graph(load_any(name)) for name in ("sader-s2-rgbn", "sader-s2-msi"))
    with torch.inference_mode():
        axes = {
            "dates": {n: cost(rgbn, runs=given.runs, dates=n) for n in (1, 2, 3, 4, 6, 8)},
            "pixels": {n * n: cost(rgbn, runs=given.runs, edge=n) for n in (64, 128, 256, 512)},
            "bands": {4: cost(rgbn, runs=given.runs), 13: cost(msi, runs=given.runs)},
            "batch": {n: cost(rgbn, runs=given.runs, batch=n) for n in (1, 2, 4)},
        }
    print("| axis | CPU s at each | exponent | why |\n|---|---|---|---|")
    for name, found in axes.items():
        each = ", ".join(f"{size}: {seconds:.2f}" for size, seconds in found.items())
        print(f"| {name} | {each} | {exponent(list(found), list(found.values())):.2f} | {WHY[name]} |")


if __name__ == "__main__":
    main()
