"""Time the paper's network at its own sampling, 4+1 steps, T=3, 256x256: the public code's way and the accelerated one.

Run: python benchmarks/paper_tile.py --out rows.json [--weights FILE] [--no-compile]
It takes about 10 minutes on an H200, most of it compilation.

All ways run in one process on the same inputs and noise. "naive" evaluates the whole network, condition included, in
float32 (TF32 allowed) at every step, as the public code does. Agreement is measured against it in reflectance.
Needs torch, numpy, einops and safetensors only. `--tiny --cpu` checks the script in seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sader.checkpoint import find_checkpoint, load_checkpoint
from sader.inference.accelerate import NEGLIGIBLE, AcceleratedTile, Acceleration
from sader.inference.noise import NoiseField, NoiseOf
from sader.inference.tile import SaderTile, TileInputs, TileSettings
from sader.inference.tiling import Window
from sader.method.diffusion import Denoiser
from sader.method.guides import make_guide
from sader.model.mtcdn import MTCDN
from sader.models import ModelConfig, build_model, get_preset

STEPS, RESAMPLINGS, DATES = 4, 1, 3
TINY = {"widths": (16, 16, 32), "blocks": (1, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 32}
GOALS = {8: 10.0, 1: 18.0}
"""Batch size -> milliseconds per tile on an H200."""


@dataclass(frozen=True)
class Row:
    """One timed way."""

    way: str
    batch: int
    milliseconds: float
    """Per tile, the median."""
    first_seconds: float
    """The first call: compilation, capture, algorithm search."""
    rmse: float
    """Against naive, in reflectance."""
    psnr: float
    """Against naive, in dB; peak 1."""


def paper_model(weights: str | None, *, tiny: bool) -> tuple[Denoiser, ModelConfig]:
    """Return the network: trained weights, or random ones with every zero-initialised layer active."""
    if weights is not None:
        checkpoint = load_checkpoint(find_checkpoint(weights))
        assert isinstance(checkpoint.model, Denoiser)
        assert isinstance(checkpoint.config, ModelConfig)
        return checkpoint.model, checkpoint.config
    config = get_preset("sen2_mtc_new").replace(network=TINY if tiny else {})
    torch.manual_seed(0)
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model, config


def example(config: ModelConfig, batch: int, size: int, device: torch.device) -> tuple[TileInputs, NoiseOf]:
    """Return random inputs and their noise, which is drawn before the timing."""
    generator = torch.Generator().manual_seed(1)
    bands, aux = len(config.network.bands), len(config.network.aux_bands)
    inputs = TileInputs(
        cloudy=0.4 * torch.rand(batch, DATES, bands, size, size, generator=generator),
        aux=0.4 * torch.rand(batch, DATES, aux, size, size, generator=generator),
        valid=torch.ones(batch, DATES, size, size, dtype=torch.bool),
        cloud=torch.zeros(batch, DATES, size, size),
        reference=torch.full((batch,), -1),
        band_present=torch.ones(batch, bands, dtype=torch.bool),
    )
    field = NoiseField(0).of([Window(0, size * number, size, size) for number in range(batch)], device)
    drawn: dict[tuple[int, int], Tensor] = {}

    def noise(draw: int, channels: int) -> Tensor:
        if (draw, channels) not in drawn:
            drawn[draw, channels] = field(draw, channels)
        return drawn[draw, channels]

    return inputs.to(device), noise


class NaiveDenoiser(Denoiser):
    """Evaluates the condition again at every step."""

    given: TileInputs

    def forward(self, noised: Tensor, sigma: Tensor, condition: object) -> Tensor:
        network = self.network
        assert isinstance(network, MTCDN)
        given = self.given
        assert given.aux is not None
        again = network.condition(
            2 * given.cloudy - 1, aux=2 * given.aux - 1, valid=given.valid, band_present=given.band_present
        )
        return super().forward(noised, sigma, again)


def timed(call: Callable[[], Tensor], device: torch.device, runs: int) -> tuple[Tensor, float, float]:
    """Return (result, seconds of the first call, median seconds of the others)."""
    seconds = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return result, seconds[0], statistics.median(seconds[1:])


@torch.inference_mode()
def measure(args: argparse.Namespace, device: torch.device) -> list[Row]:
    """Return the rows of all ways and batch sizes, printed as they are known."""
    model, config = paper_model(args.weights, tiny=args.tiny)
    model = model.to(device)
    guide = make_guide("lowpass", bands=len(config.network.bands))
    settings = TileSettings(resampling=lambda: config.sampling.resampler("default"), guide=lambda: guide)
    plain = SaderTile(model, settings).eval()
    half = Acceleration(torch.float16 if device.type == "cuda" else torch.float32, capture=True)
    short = replace(half, negligible=NEGLIGIBLE)
    rows: list[Row] = []
    for batch in args.batches:
        inputs, noise = example(config, batch, args.size, device)
        naive = NaiveDenoiser(model.network, config.diffusion).eval()
        naive.given = inputs
        ways: dict[str, Callable[..., object]] = {
            "naive": SaderTile(naive, settings).eval(),
            "dates seen once": plain,
            "half precision, CUDA graph": AcceleratedTile(plain, half),
        }
        # One accelerated tile for each batch size: a captured graph fills smaller batches up.
        if not args.no_compile:
            ways["half precision, compiled, CUDA graph"] = AcceleratedTile(plain, replace(half, compile=True))
            ways["the same, sigma = 0.001 left out"] = AcceleratedTile(plain, replace(short, compile=True))
        else:
            ways["half precision, CUDA graph, sigma = 0.001 left out"] = AcceleratedTile(plain, short)
        wanted: Tensor | None = None
        for way, tile in ways.items():
            result, first, seconds = timed(
                lambda tile=tile, inputs=inputs, noise=noise: (
                    tile(  # type: ignore[misc]
                        inputs, [noise], steps=STEPS, resamplings=RESAMPLINGS
                    ).images
                ),
                device,
                args.runs,
            )
            wanted = result if wanted is None else wanted
            error = math.sqrt(float((result - wanted).double().square().mean()))
            psnr = -20 * math.log10(error) if error else math.inf
            rows.append(Row(way, batch, 1000 * seconds / batch, first, error, psnr))
            goal = f" (goal {GOALS[batch]:g})" if batch in GOALS and not args.tiny else ""
            print(
                f"batch {batch}, {way}: {rows[-1].milliseconds:.2f} ms a tile{goal}, first call {first:.1f} s, "
                f"RMSE {error:.1e}, PSNR {psnr:.1f} dB",
                flush=True,
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", help="a checkpoint of the paper's network; default: random weights")
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], default=[8, 1])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small network and image, without compilation")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.size, args.batches, args.runs, args.no_compile = 32, [2], 1, True
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, {STEPS}+{RESAMPLINGS} steps, T={DATES}, {args.size}x{args.size}",
        flush=True,
    )
    rows = measure(args, device)
    if args.out is not None:
        facts = {"device": name, "torch": torch.__version__, "size": args.size, "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
