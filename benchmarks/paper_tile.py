"""Time the paper's network at its own 4+1 sampling, T=3, 256x256: the public code's way against `sader.fast`.

Run on a GPU: python benchmarks/paper_tile.py            (table: ms a tile, ratio, RMSE to the float32 naive mode)
With trained weights: --model FILE       (then the rows also say what leaving out sigma = 0.001 and bfloat16 cost)
Anywhere in seconds: python benchmarks/paper_tile.py --tiny
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sader.checkpoint import build_model, find_checkpoint, load_checkpoint
from sader.config import ModelConfig
from sader.data.synthetic import make_series
from sader.diffusion import Denoiser
from sader.fast import FastOptions, FastSampler, naive_sample
from sader.model.guide import make_guide
from sader.presets import get_preset
from sader.sampling import generator_noise


def load(model: str | None, *, tiny: bool) -> tuple[Denoiser, ModelConfig]:
    """Return the paper's network; random weights in every layer unless a file is given."""
    if model is not None:
        checkpoint = load_checkpoint(find_checkpoint(model))
        assert isinstance(checkpoint.model, Denoiser)
        return checkpoint.model.eval(), checkpoint.config
    config = get_preset("sen2_mtc_new")
    if tiny:
        small = {"widths": (16, 16, 32), "blocks": (1, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 32}
        config = config.replace(network=small)
    torch.manual_seed(0)
    network = build_model(config).eval()
    with torch.no_grad():  # layers that start at zero would hide what precision costs
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return network, config


def timed(call: Callable[[], Tensor], *, tiles: int, runs: int, device: torch.device) -> tuple[float, Tensor]:
    """Return (median milliseconds a tile, the result)."""
    result = call()
    seconds = []
    for _ in range(runs):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds) / tiles, result


def main(arguments: list[str] | None = None) -> list[tuple[str, float, float]]:
    """Print the table and return its rows: (mode, ms a tile, RMSE in reflectance to the first)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batches", default="8,16,32", help="tiles at a time of the optimised modes")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resamplings", type=int, default=1)
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # tf32, as the public code runs
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = device.type == "cuda"
    size, base, runs = (32, 2, 1) if given.tiny else (256, 8, given.runs)
    batches = [2] if given.tiny else [int(number) for number in given.batches.split(",")]
    model, config = load(given.model, tiny=given.tiny)
    model = model.to(device)
    guide = make_guide(config.sampling.guide, bands=len(config.network.bands), weights=None)

    def inputs(batch: int) -> tuple[Tensor, Tensor | None, Callable[[int], Tensor]]:
        scenes = [make_series(number, size=(size, size), dates=3).cloudy for number in range(batch)]
        four = 2 * torch.from_numpy(np.stack(scenes)).float().to(device) - 1  # B02 B03 B04 B08
        order = [("B02", "B03", "B04", "B08").index(band) for band in config.network.bands]
        cloudy, aux = four[:, :, order].contiguous(), four[:, :, 3:].contiguous()
        shape = tuple(cloudy.shape[1:])
        fixed = generator_noise(shape, list(range(batch)), device=device)
        draws: dict[int, Tensor] = {}  # noise is made on the CPU: it must not be part of the time

        def noise(number: int) -> Tensor:
            if number not in draws:
                draws[number] = fixed(number)
            return draws[number]

        return cloudy, aux if config.network.aux_bands else None, noise

    cloudy, aux, noise = inputs(base)
    evaluations: list[None] = []

    def naive() -> Tensor:
        evaluations.clear()
        return naive_sample(
            model, config, cloudy, noise, aux=aux, steps=given.steps, resamplings=given.resamplings, guide=guide,
            counted=evaluations,
        )  # fmt: skip

    # What everything is compared to: the same in true float32.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    exact = naive()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    rows: list[tuple[str, float, float]] = []

    def add(name: str, milliseconds: float, result: Tensor) -> None:
        count = min(len(result), len(exact))
        rmse = float((result[:count].float() - exact[:count]).square().mean().sqrt()) / 2
        rows.append((name, milliseconds, rmse))
        ratio = rows[0][1] / milliseconds
        print(f"| {name} | {milliseconds:.2f} | {ratio:.2f} | {rmse:.2e} |", flush=True)

    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{config.name} {given.steps}+{given.resamplings}, T=3, {size}x{size}, {where}")
    print("| mode | ms a tile | times faster | RMSE to float32 naive (reflectance) |\n|---|---|---|---|")
    add(f"naive, tf32 eager, batch {base}", *timed(naive, tiles=base, runs=runs, device=device))
    rows[0] = (f"{rows[0][0]}, {len(evaluations)} evaluations", *rows[0][1:])
    modes = {
        "dates seen once": FastOptions(),
        "+ channels last": FastOptions(channels_last=True),
        "+ sigma = 0.001 left out": FastOptions(channels_last=True, skip_below=2e-3),
        "+ bfloat16": FastOptions(channels_last=True, skip_below=2e-3, bfloat16=True),
    }
    if device.type == "cuda":
        modes["+ recorded"] = replace(modes["+ bfloat16"], record=True)
    for name, options in modes.items():
        sampler = FastSampler(model, config, options, guide=guide)
        for batch in batches if name == list(modes)[-1] else [base]:
            cloudy, aux, noise = inputs(batch)

            run = partial(sampler, cloudy, noise, aux=aux, steps=given.steps, resamplings=given.resamplings)
            add(f"{name}, batch {batch}", *timed(run, tiles=batch, runs=runs, device=device))
    return rows


if __name__ == "__main__":
    main()
