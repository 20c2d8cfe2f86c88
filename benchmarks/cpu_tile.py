"""Time one 256x256 tile of the shipped model, T=3, default sampling, on the CPU: every way to run it, as ratios.

Run: python benchmarks/cpu_tile.py [--threads 2] [--compile]     (the goal: at most 1.5 s on two cores)

The ways take turns, so that a busy moment hits all alike. "CPU s" is what the process itself used, which other
programs on the machine move far less than the clock on the wall. `--profile` adds where the time of eager goes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sader.backends import open_session
from sader.export import INPUTS, example_inputs, facts_of, load_any, make_graph, write_onnx
from sader.tilegraph import TileGraph

PARTS = ("cloud_head", "second_look", "condition_net", "composite_head", "error_head", "fusion", "attention")


def ways(graph: TileGraph, inputs: tuple[torch.Tensor, ...], *, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Return name -> one run of the tile."""
    last = copy.deepcopy(graph).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    made: dict[str, Callable[[], Any]] = {"eager": lambda: graph(*inputs), "channels_last": lambda: last(*inputs)}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tile.onnx"
        write_onnx(graph, path, facts_of(graph, "bench"))
        session = open_session(path)
    print(f"onnx: graph and session made in {time.perf_counter() - started:.0f} s", flush=True)
    names = [one.name for one in session.get_inputs()]
    feed = {name: value.numpy() for name, value in zip(INPUTS, inputs, strict=True) if name in names}
    made["onnx"] = lambda: session.run(None, feed)
    if compiled:
        function = torch.compile(copy.deepcopy(graph))
        started = time.perf_counter()
        function(*inputs)
        print(f"torch.compile: {time.perf_counter() - started:.0f} s", flush=True)
        made["torch.compile"] = lambda: function(*inputs)
    return made


def profile(graph: TileGraph, inputs: tuple[torch.Tensor, ...]) -> None:
    """Print the share of each part of the network, by hooks on its modules; the rest is matching and filling."""
    spent: dict[str, float] = {}
    network = graph.network
    for name in PARTS:
        module = getattr(network, name)
        if module is None:
            continue

        def before(*_: Any, name: str = name) -> None:
            spent[name] = spent.get(name, 0.0) - time.process_time()

        def after(*_: Any, name: str = name) -> None:
            spent[name] += time.process_time()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    started = time.process_time()
    graph(*inputs)
    total = time.process_time() - started
    rest = total - sum(spent.values())
    print("| part | CPU ms | share |\n|---|---|---|")
    rows = [*spent.items(), ("backbone, matching, filling, masks", rest)]
    for name, seconds in sorted(rows, key=lambda row: -row[1]):
        print(f"| {name} | {1000 * seconds:.0f} | {seconds / total:.0%} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sader-s2-rgbn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--given", action="store_true", help="the masks of all dates are given")
    parser.add_argument("--compile", action="store_true", help="also torch.compile, which takes minutes")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    graph = make_graph(load_any(given.model), estimate=not given.given)
    inputs = example_inputs(graph, batch=1, dates=3, height=given.size, width=given.size)
    with torch.inference_mode():
        runs = ways(graph, inputs, compiled=given.compile)
        wall: dict[str, list[float]] = {name: [] for name in runs}
        cpu: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(given.runs + 1):
            for name, run in runs.items():
                clocks = time.perf_counter(), time.process_time()
                run()
                if number:  # the first one fills caches
                    wall[name].append(time.perf_counter() - clocks[0])
                    cpu[name].append(time.process_time() - clocks[1])
        masks = "all masks given" if given.given else "one mask unknown"
        print(f"{given.model}, {given.size}x{given.size}, T=3, {graph.steps} step, {masks}, {given.threads} threads")
        print("| way | wall s, median | best | CPU s, median | times faster than eager (wall, CPU) |")
        print("|---|---|---|---|---|")
        for name in runs:
            seconds, work = statistics.median(wall[name]), statistics.median(cpu[name])
            ratios = statistics.median(wall["eager"]) / seconds, statistics.median(cpu["eager"]) / work
            print(f"| {name} | {seconds:.2f} | {min(wall[name]):.2f} | {work:.2f} | {ratios[0]:.2f}, {ratios[1]:.2f} |")
        if given.profile:
            profile(graph, inputs)


if __name__ == "__main__":
    main()
