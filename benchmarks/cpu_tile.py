"""Time one 256x256 tile of the shipped model, T=3, default sampling, on the CPU: every way to run it, as ratios.

Run: python benchmarks/cpu_tile.py [--threads 2] [--profile]     (under 3 minutes; 1 of them for the ONNX graph)

Goals: at most 1.5 s on two cores, and 1.3 times faster than eager by the best way.

The ways take turns, so that a busy moment hits all alike. "CPU s" is what the process itself used, which other
programs on the machine move far less than the clock on the wall. `--profile` adds where the time of eager goes.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sader.checkpoint import Checkpoint
from sader.config import ModelConfig
from sader.data.synthetic.scene import make_series
from sader.inference.accelerate import FastOptions
from sader.inference.export import INPUTS, example_inputs, facts_of, load_any, make_graph, write_onnx
from sader.inference.onnx import open_session
from sader.inference.quicktiles import QuickTiles
from sader.inference.tile import TileGraph
from sader.method.diffusion import Denoiser
from sader.model.cpublocks import has_bfloat16

PARTS = ("cloud_head", "second_look", "condition_net", "composite_head", "error_head", "fusion", "attention")


Way = Callable[[], Sequence[Any]]


def ways(graph: TileGraph, checkpoint: Checkpoint, inputs: tuple[torch.Tensor, ...], args: Namespace) -> dict[str, Way]:
    """Return name -> one run of the tile."""
    last = copy.deepcopy(graph).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    made: dict[str, Way] = {"eager": lambda: graph(*inputs), "channels_last": lambda: last(*inputs)}
    for precision in ("float32", "bfloat16") if has_bfloat16() else ("float32",):
        options = FastOptions(precision=precision, channels_last=True, cpu_blocks=True, strict=True)
        made[f"quick, {precision}"] = _quick(graph, checkpoint, options, inputs)
    if not args.no_onnx:
        made["onnx"] = _onnx(graph, inputs)
    if args.compile:
        function = torch.compile(copy.deepcopy(graph))
        started = time.perf_counter()
        function(*inputs)
        print(f"torch.compile: {time.perf_counter() - started:.0f} s", flush=True)
        made["torch.compile"] = lambda: function(*inputs)
    return made


def _quick(graph: TileGraph, checkpoint: Checkpoint, options: FastOptions, inputs: tuple[torch.Tensor, ...]) -> Way:
    """Return the tile as `--backend quick` computes it."""
    model, config = checkpoint.model, checkpoint.config
    assert isinstance(model, Denoiser)
    assert isinstance(config, ModelConfig)
    tiles = QuickTiles(model, config, options, threshold=graph.threshold, growth=graph.growth)
    cloudy, valid, cloud, reference, noise, present = inputs

    def run() -> Sequence[Any]:
        return tiles(
            cloudy=cloudy, valid=valid, cloud=cloud, reference=reference, noises=[noise], band_present=present,
            change=None, steps=graph.steps,
        )[1]  # fmt: skip

    return run


def _onnx(graph: TileGraph, inputs: tuple[torch.Tensor, ...]) -> Way:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tile.onnx"
        write_onnx(graph, path, facts_of(graph, "bench"))
        written = time.perf_counter()
        session = open_session(path)
    ready = time.perf_counter()
    print(f"onnx: graph written in {written - started:.0f} s, session made in {ready - written:.0f} s", flush=True)
    names = [one.name for one in session.get_inputs()]
    feed = {name: value.numpy() for name, value in zip(INPUTS, inputs, strict=True) if name in names}
    return lambda: session.run(None, feed)


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


def series(graph: TileGraph, size: int) -> tuple[torch.Tensor, ...]:
    """Return the inputs for one made series of three dates, the first to be cleaned, no mask known."""
    bands = graph.config.network.bands
    cloudy = torch.from_numpy(make_series(0, size=(size, size), dates=3, bands=bands).cloudy)[None].float()
    valid, unknown = torch.ones_like(cloudy[:, :, 0], dtype=torch.bool), torch.full_like(cloudy[:, :, 0], torch.nan)
    _, _, _, reference, noise, present = example_inputs(graph, batch=1, dates=3, height=size, width=size)
    return cloudy, valid, unknown, reference, noise, present


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sader-s2-rgbn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--given", action="store_true", help="the masks of all dates are given")
    parser.add_argument("--no-onnx", action="store_true", help="leave out ONNX Runtime, whose graph takes a minute")
    parser.add_argument("--compile", action="store_true", help="also torch.compile, which takes minutes")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    checkpoint = load_any(given.model)
    graph = make_graph(checkpoint, estimate=not given.given)
    with torch.inference_mode():
        inputs = series(graph, given.size)
        if given.given:
            inputs = (*inputs[:2], (torch.rand_like(inputs[2]) > 0.7).float(), *inputs[3:])
        runs = ways(graph, checkpoint, inputs, given)
        wall: dict[str, list[float]] = {name: [] for name in runs}
        cpu: dict[str, list[float]] = {name: [] for name in runs}
        images: dict[str, torch.Tensor] = {}
        for number in range(given.runs + 1):
            for name, run in runs.items():
                clocks = time.perf_counter(), time.process_time()
                made = run()
                if number:  # the first one fills caches
                    wall[name].append(time.perf_counter() - clocks[0])
                    cpu[name].append(time.process_time() - clocks[1])
                images[name] = torch.as_tensor(made[0])
        masks = "all masks given" if given.given else "no mask given"
        print(f"{given.model}, {given.size}x{given.size}, T=3, {graph.steps} step, {masks}, {given.threads} threads")
        print("| way | wall s, median | best | CPU s, median | times faster than eager (wall, CPU) | RMSE to eager |")
        print("|---|---|---|---|---|---|")
        for name in runs:
            seconds, work = statistics.median(wall[name]), statistics.median(cpu[name])
            ratios = statistics.median(wall["eager"]) / seconds, statistics.median(cpu["eager"]) / work
            error = math.sqrt(float((images[name] - images["eager"]).square().mean()))
            print(
                f"| {name} | {seconds:.2f} | {min(wall[name]):.2f} | {work:.2f} "
                f"| {ratios[0]:.2f}, {ratios[1]:.2f} | {error:.1e} |"
            )
        if given.profile:
            profile(graph, inputs)


if __name__ == "__main__":
    main()
