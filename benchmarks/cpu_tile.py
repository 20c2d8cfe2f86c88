"""Time one tile of the shipped model, T=3, default sampling, on the CPU with each backend.

Run: python benchmarks/cpu_tile.py [--size 512] [--threads 2] [--workers 1] [--onnx]

Freed memory is kept as in the commands of `sader`. The backends take turns, so that a busy moment affects all of them.
"CPU s" is the processor time of this process, which other programs influence less than the wall time. workers: threads
that compute one tile each with `--threads` intra-op threads; the wall time per tile is the throughput.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from sader.cli.main import keep_freed_memory
from sader.data.synthetic.scene import make_series
from sader.inference.accelerate import has_bfloat16
from sader.inference.remover import CloudRemover


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sader-s2-rgbn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--given", action="store_true", help="give the masks of all dates")
    parser.add_argument("--onnx", action="store_true", help="also ONNX Runtime, whose graph takes a minute")
    parser.add_argument("--returned", action="store_true", help="return freed memory, as outside the command line")
    args = parser.parse_args()
    if not args.returned:
        keep_freed_memory()
    torch.set_num_threads(args.threads)
    plain = CloudRemover.from_pretrained(args.model, device="cpu").with_options(tile=args.size)
    series = make_series(0, size=(args.size, args.size), dates=3, bands=plain.bands)
    masks = series.cloud_mask if args.given else None
    removers = {name: plain.with_options(backend=name) for name in ("torch", "accelerated")}
    if args.onnx:
        removers["onnx"] = plain.with_options(backend="onnx")
    wall: dict[str, list[float]] = {name: [] for name in removers}
    cpu: dict[str, list[float]] = {name: [] for name in removers}
    images: dict[str, np.ndarray] = {}
    with ThreadPoolExecutor(args.workers, initializer=torch.set_num_threads, initargs=(args.threads,)) as pool:
        for number in range(args.runs + 1):
            for name, remover in removers.items():
                clocks = time.perf_counter(), time.process_time()
                tiles = [
                    pool.submit(remover.predict, series.cloudy, reference=0, cloud_mask=masks)
                    for _ in range(args.workers)
                ]
                images[name], *_ = (tile.result().clear for tile in tiles)
                if number:  # the first run fills caches
                    wall[name].append((time.perf_counter() - clocks[0]) / args.workers)
                    cpu[name].append((time.process_time() - clocks[1]) / args.workers)
    print(
        f"{args.model}, {args.size}x{args.size}, T=3, masks {'given' if args.given else 'estimated'}, {args.workers} "
        f"workers of {args.threads} threads, bfloat16 {'available' if has_bfloat16() else 'not available'}"
    )
    print("| backend | wall s per tile, median | best | CPU s, median | RMSE to torch |\n|---|---|---|---|---|")
    for name in removers:
        error = math.sqrt(float(np.mean((images[name] - images["torch"]) ** 2)))
        print(
            f"| {name} | {statistics.median(wall[name]):.2f} | {min(wall[name]):.2f} | "
            f"{statistics.median(cpu[name]):.2f} | {error:.1e} |"
        )


if __name__ == "__main__":
    main()
