"""How the cost of a tile grows: with dates, pixels, bands and tiles at a time; CPU seconds and a fitted exponent each.

Run: python benchmarks/scaling.py [--threads 1]      (about two minutes; every row is printed when it is known)

Untrained weights: cost does not depend on them, and only so can the bands be counted up one network at a time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from sader.bands import BANDS_13
from sader.checkpoint import Checkpoint, load_any
from sader.inference.onnx import TileGraph, example_inputs, make_graph
from sader.models import build_model, get_preset

WHY = {
    "dates": "encoder, cloud head and matching run per date; backbone, decoder, joint fit and blend once",
    "pixels": "convolutions, matching and filling are linear; attention over an eighth of the edge "
    "(all pairs of its pixels) and the blur of cell statistics (edge cubed) are not, but small",
    "bands": "first and last layers grow with C, statistics and maps of the fits with C^2, the joint solve with "
    "C^3; the rest, most of it, not at all",
    "batch": "nothing is shared between tiles, and a CPU is full with one",
}
EDGE = 128


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log(seconds) over log(sizes) by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(one) for one in seconds]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def cost(graph: TileGraph, *, runs: int, batch: int = 1, dates: int = 3, edge: int = EDGE) -> float:
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
    four = make_graph(load_any("small"))
    axes: dict[str, list[tuple[float, Callable[[], float]]]] = {
        "dates": [(n, partial(cost, four, runs=given.runs, dates=n)) for n in (1, 2, 3, 4, 6, 8)],
        "pixels": [(n * n, partial(cost, four, runs=given.runs, edge=n)) for n in (64, 128, 256, 512)],
        "bands": [(n, partial(cost, with_bands(n), runs=given.runs)) for n in (2, 4, 8, 13)],
        "batch": [(n, partial(cost, four, runs=given.runs, batch=n)) for n in (1, 2, 4)],
    }
    print(f"`small`, {given.threads} thread, otherwise T=3, {EDGE}x{EDGE}, 4 bands, batch 1, no mask for one date")
    print(
        "| axis | CPU s at each | exponent over all | between the last two | why |\n|---|---|---|---|---|", flush=True
    )
    with torch.inference_mode():
        for name, points in axes.items():
            sizes = [size for size, _ in points]
            seconds = [measured() for _, measured in points]
            each = ", ".join(f"{size}: {one:.2f}" for size, one in zip(sizes, seconds, strict=True))
            whole, end = exponent(sizes, seconds), exponent(sizes[-2:], seconds[-2:])
            print(f"| {name} | {each} | {whole:.2f} | {end:.2f} | {WHY[name]} |", flush=True)


def with_bands(count: int) -> TileGraph:
    """Return the graph of `small` with so many bands."""
    config = get_preset("small").replace(network={"bands": BANDS_13[:count]})
    return make_graph(Checkpoint(build_model(config).eval(), config, {}))


if __name__ == "__main__":
    main()
