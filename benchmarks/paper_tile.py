"""Time the paper's network at its own 4+1 sampling, T=3, 256x256: the public code's way against `sader.fast`.

On a GPU: python benchmarks/paper_tile.py --out FOLDER [--weights FILE] [--data SHARDS] [--seconds 140] [--compile]
Anywhere in seconds: python benchmarks/paper_tile.py --tiny

A ladder: each row adds one short cut to the row before. Prints ms a tile, the ratio to the naive mode and the RMSE in
reflectance to the naive mode in true float32, with the same noise; and the PSNR where --data brings known scenes.
Rows are printed, and written to FOLDER/paper_tile.json, as they come: what is stopped by --seconds loses nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sader.checkpoint import build_model, find_checkpoint, load_checkpoint
from sader.config import ModelConfig
from sader.data.synthetic import make_series
from sader.diffusion import Denoiser
from sader.fast import FastOptions, FastSampler, naive_sample
from sader.model.fused import can_fuse
from sader.model.fusion import attend_over_dates, masked_mean
from sader.model.guide import make_guide
from sader.presets import get_preset
from sader.sampling import generator_noise

BANDS = ("B02", "B03", "B04", "B08")
VALIDATION_SEED = 20_000_003
"""That of `sader.training.validation`, which needs Lightning."""
SAFE = "float16, recorded, not fused"
PROFILED = ("+ joined", "+ recorded", SAFE)


class Row(NamedTuple):
    """One line of the table."""

    mode: str
    milliseconds: float
    """A tile."""
    rmse: float
    """Reflectance, to the naive mode in float32."""
    psnr: float | None = None
    """dB, where the truth is known."""
    gib: float | None = None
    """Peak GPU memory."""


@dataclass
class Inputs:
    """A batch in the model's range."""

    cloudy: Tensor
    aux: Tensor | None
    noise: Callable[[int], Tensor]
    clear: Tensor | None = None
    """Reflectance."""
    scored: Tensor | None = None
    """bool (B, H, W): where it is known."""


@dataclass
class Report:
    """What is written beside the table."""

    title: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    profiles: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class TimeOver(Exception):
    """The row took longer than there was time."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeOver` in this thread when so much time has passed."""

    def over(*_: object) -> None:
        raise TimeOver(f"more than {seconds:.0f} s")

    if seconds <= 0:
        raise TimeOver("no time left")
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def load(weights: str | None, *, tiny: bool) -> tuple[Denoiser, ModelConfig]:
    """Return the paper's network; random weights in every layer unless a file is given."""
    if weights is not None:
        checkpoint = load_checkpoint(find_checkpoint(weights))
        assert isinstance(checkpoint.model, Denoiser)
        assert isinstance(checkpoint.config, ModelConfig)
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


def known_scenes(data: list[Path], bands: tuple[str, ...], count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cloudy (N, 3, C, H, W), clear (N, C, H, W) and scored (N, H, W) of places of shards, reflectance.

    The paper's task on real dates, as in validation (`sader.data.bank`): the truth is another date of the place.
    """
    from sader.data.bank import SeriesBank, SeriesMaker
    from sader.data.plan import MakerSettings

    bank = SeriesBank.load(data, bands=bands, device="cpu")
    settings = MakerSettings(tasks=(0.0, 1.0, 0.0), fewer_dates=0.0, rescale=0.0, jitter=0.0, band_dropout=())
    batch = SeriesMaker(bank, settings, VALIDATION_SEED).batch(VALIDATION_SEED, count, 3, size)
    return batch.cloudy, batch.clear, batch.scored


def profile(call: Callable[[], Tensor], *, top: int = 12) -> dict[str, Any]:
    """Return the kernels that take most of the GPU's time, in ms, and their sum."""
    from torch.profiler import ProfilerActivity

    try:
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
    except RuntimeError as error:  # no right to read the counters
        return {"total_ms": 0.0, "launches": 0, "kernels": [], "why": str(error)[:300]}
    events = [event for event in found.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "total_ms": round(sum(event.self_device_time_total for event in events) / 1000, 2),
        "launches": sum(event.count for event in events),
        "kernels": [
            [event.key[:90], event.count, round(event.self_device_time_total / 1000, 3)] for event in events[:top]
        ],
    }


def ceilings(device: torch.device) -> dict[str, float]:
    """Return what the card does at best: copy in TB/s, float16 matrix product in TFLOP/s."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.float16)
    big, other = (torch.empty(2**28, device=device, dtype=torch.float32) for _ in range(2))
    big.normal_()
    found = {}
    for name, call, work in (
        ("copy_tb_s", lambda: other.copy_(big), 2 * big.numel() * 4 / 1e12),
        ("matmul_tflop_s", lambda: a @ a, 2 * 8192**3 / 1e12),
    ):
        milliseconds, _ = timed(call, tiles=1, runs=5, device=device)
        found[name] = round(work / milliseconds * 1000, 2)
    return found


def kernel_errors(device: torch.device) -> dict[str, float]:
    """Return the relative error of each fused kernel in float16 against PyTorch in float32, at sizes of the network."""
    from sader.model import kernels

    torch.manual_seed(0)
    errors = {}

    def map_of(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).half().contiguous(memory_format=torch.channels_last)

    def note(name: str, got: Tensor, wanted: Tensor) -> None:
        errors[name] = max(errors.get(name, 0.0), float((got.float() - wanted).norm() / wanted.norm()))

    for channels, groups in ((64, 16), (192, 16), (48, 16), (7, 1)):
        x, skip = 3 * map_of(2, channels, 40, 72) + 1, map_of(2, channels, 40, 72)
        weight, bias, before = torch.randn(3, channels, device=device)
        gain = 0.1 * torch.randn(2, channels, device=device)
        scale, shift = kernels.norm_coefficients(x, groups, weight, bias, 1e-5, gain=gain, before=before)
        normed = F.group_norm(x.float() + before[:, None, None], groups, weight, bias) * (1 + gain)[:, :, None, None]
        for mode, resample in (
            ("none", lambda v: v),
            ("down", lambda v: F.avg_pool2d(v, 2)),
            ("up", lambda v: F.interpolate(v, scale_factor=2)),
        ):
            made = kernels.apply_norm(x, scale, shift, activation="gelu", resample=mode)
            note(f"norm, gelu, {mode}", made, resample(F.gelu(normed)))
            added = kernels.add_skip(made, bias, skip, resample=mode)
            note(f"add, {mode}", added, made.float() + bias[:, None, None] + resample(skip.float()))
        matrix, offsets = (
            0.1 * torch.randn(2 * channels, channels, device=device),
            torch.randn(2 * channels, device=device),
        )
        a, b = F.conv2d(normed, matrix[:, :, None, None], offsets).chunk(2, dim=1)
        made = kernels.gate(x, scale, shift, matrix.t().contiguous().half(), offsets)
        note("gate", made, F.gelu(normed) + a * F.gelu(b))
    pairs, values = map_of(6, 128, 40, 72).unflatten(0, (2, 3)), map_of(6, 64, 40, 72).unflatten(0, (2, 3))
    there = torch.rand(2, 3, 40, 72, device=device) > 0.3
    there[:, 0] = True
    queries, keys = pairs.chunk(2, dim=2)
    wanted = attend_over_dates(masked_mean(queries.float(), there), keys.float(), values.float(), there)
    note("dates", kernels.attend(queries, keys, values, there), wanted)
    return errors


def join_errors(device: torch.device, sizes: tuple[tuple[int, int], ...] = ((64, 16), (48, 16))) -> dict[str, float]:
    """Return the same for the kernels between the blocks (`model.joinkernels`); sizes: (channels, groups)."""
    from sader.model import joinkernels, kernels

    torch.manual_seed(0)
    errors: dict[str, float] = {}

    def map_of(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).half().contiguous(memory_format=torch.channels_last)

    def note(name: str, got: Tensor, wanted: Tensor) -> None:
        errors[name] = max(errors.get(name, 0.0), float((got.float() - wanted).norm() / wanted.norm()))

    for channels, groups in sizes:
        x, more, bias = map_of(2, channels, 40, 72), map_of(2, channels, 40, 72), torch.randn(channels, device=device)
        for mode, size, resample in (
            ("none", (40, 72), lambda v: v),
            ("down", (80, 144), lambda v: F.avg_pool2d(v, 2)),
            ("up", (20, 36), lambda v: F.interpolate(v, scale_factor=2)),
        ):
            skip = map_of(2, channels, *size)
            beside = torch.zeros(2, 2 * channels, 40, 72, device=device, dtype=x.dtype)
            beside = beside.contiguous(memory_format=torch.channels_last)
            alone = x.float() + bias[:, None, None] + resample(skip.float())
            for added, out in ((None, None), (more, None), (more, beside[:, channels:]), (None, beside[:, :channels])):
                sums = joinkernels.empty_sums(*x.shape, x)
                made = joinkernels.join(x, bias, skip, sums, resample=mode, more=added, out=out)
                wanted = alone if added is None else alone + added.float()
                note(f"join, {mode}", made, wanted)
                if out is not None:
                    note("join, kept", out, alone)
                scale, shift = kernels.norm_coefficients(made, groups, None, None, 1e-5, sums=sums)
                normed = made.float() * scale[:, :, None, None] + shift[:, :, None, None]
                note("join, norm", normed, F.group_norm(made.float(), groups))
        both = map_of(2, 2 * channels, 40, 72)
        a, b = both.float().chunk(2, dim=1)
        note("product", joinkernels.product_gelu(both), a * F.gelu(b))
    return errors


def ladder(device: torch.device, *, fused: bool, joined: bool = True) -> dict[str, FastOptions]:
    """Return the modes, each with one short cut more than the one before."""
    on_gpu = device.type == "cuda"
    modes = {
        "dates seen once": FastOptions(strict=True),
        "+ channels last": FastOptions(strict=True, channels_last=True),
        "+ sigma = 0.001 left out": FastOptions(strict=True, channels_last=True, skip_below=2e-3),
        "+ bfloat16": FastOptions(strict=True, channels_last=True, skip_below=2e-3, precision="bfloat16"),
        "float16 instead": FastOptions(strict=True, channels_last=True, skip_below=2e-3, precision="float16"),
    }
    half = modes["float16 instead"]
    if on_gpu and fused and can_fuse(device):
        modes["+ fused"] = FastOptions(**{**asdict(half), "fused": True})
    if on_gpu:
        modes["+ recorded"] = FastOptions(**{**asdict(half), "fused": "+ fused" in modes, "record": True})
    if "+ fused" in modes and joined:
        modes["+ joined"] = FastOptions(**{**asdict(modes["+ recorded"]), "joined": True})
    return modes


def is_lost(text: str) -> bool:
    """Whether an error is one after which a process can do nothing more on the device."""
    return any(word in text for word in ("illegal", "misaligned", "unspecified launch", "device-side assert"))


class Bench:
    """The table being made."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.started = given, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() and not given.cpu else "cpu")
        self.size, self.base, self.runs = (32, 2, 1) if given.tiny else (given.size, 8, given.runs)
        self.batches = [2] if given.tiny else [int(number) for number in given.batches.split(",")]
        model, self.config = load(given.weights, tiny=given.tiny)
        self.model = model.to(self.device)
        self.guide = make_guide(self.config.sampling.guide, bands=len(self.config.network.bands), weights=None)
        self.rows: list[Row] = []
        self.report = Report()
        self.joined = False
        self.scenes = self._scenes(max([self.base, *self.batches]))
        self.evaluations: list[None] = []

    def left(self) -> float:
        """Return the seconds that remain."""
        return self.given.seconds - (time.perf_counter() - self.started)

    def _scenes(self, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        network = self.config.network
        bands = (*network.bands, *network.aux_bands)
        if self.given.data:
            return known_scenes(self.given.data, bands, count, self.size)
        made = [make_series(number, size=(self.size, self.size), dates=3) for number in range(min(count, 8))]
        order = [BANDS.index(band) for band in bands]
        cloudy = torch.from_numpy(np.stack([one.cloudy[:, order] for one in made])).float()
        return torch.cat([cloudy] * -(-count // len(cloudy)))[:count], None, None

    def inputs(self, batch: int) -> Inputs:
        """Return the first `batch` scenes."""
        bands = len(self.config.network.bands)
        cloudy, clear, scored = (None if one is None else one[:batch].to(self.device) for one in self.scenes)
        assert cloudy is not None
        own, aux = (2 * cloudy - 1).split([bands, cloudy.shape[2] - bands], dim=2)
        fixed = generator_noise(tuple(own.shape[1:]), list(range(batch)), device=self.device)
        draws: dict[int, Tensor] = {}  # noise is made on the CPU: it must not be part of the time

        def noise(number: int) -> Tensor:
            if number not in draws:
                draws[number] = fixed(number)
            return draws[number]

        truth = None if clear is None else clear[:, :bands]
        return Inputs(own.contiguous(), aux.contiguous() if aux.shape[2] else None, noise, truth, scored)

    def naive(self, given: Inputs) -> Tensor:
        """Return the naive mode's images."""
        self.evaluations.clear()
        return naive_sample(
            self.model, self.config, given.cloudy, given.noise, aux=given.aux, steps=self.given.steps,
            resamplings=self.given.resamplings, guide=self.guide, counted=self.evaluations,
        )  # fmt: skip

    def add(self, name: str, milliseconds: float, result: Tensor, given: Inputs) -> None:
        """Print one row and keep it."""
        count = min(len(result), len(self.exact))
        rmse = float((result[:count].float() - self.exact[:count]).square().mean().sqrt()) / 2
        psnr = None
        if given.clear is not None:
            error = (((result[:count].float() + 1) / 2).clamp(0, 1) - given.clear[:count]).square().mean(dim=1)
            weight = torch.ones_like(error) if given.scored is None else given.scored[:count].float()
            psnr = -10 * math.log10(max(float((error * weight).sum() / weight.sum().clamp(min=1)), 1e-12))
        gib = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        row = Row(name, milliseconds, rmse, psnr, gib)
        self.rows.append(row)
        self.report.rows.append(row._asdict())
        quality = "" if psnr is None else f" {psnr:.3f} |"
        memory = "" if gib is None else f" {gib:.1f} |"
        ratio = self.rows[0].milliseconds / milliseconds
        print(f"| {name} | {milliseconds:.2f} | {ratio:.2f} | {rmse:.2e} |{quality}{memory}", flush=True)
        self.save()

    def save(self) -> None:
        """Write what there is so far."""
        self.report.seconds["so far"] = round(time.perf_counter() - self.started, 1)
        if self.given.out is not None:
            self.given.out.mkdir(parents=True, exist_ok=True)
            (self.given.out / "paper_tile.json").write_text(json.dumps(asdict(self.report), indent=1))

    def mode(self, name: str, options: FastOptions, batch: int) -> None:
        """Measure one mode; a failure is a line of its own, not the end."""
        given = self.inputs(batch)
        sampler = FastSampler(self.model, self.config, options, guide=self.guide)
        run = partial(
            sampler, given.cloudy, given.noise, aux=given.aux, steps=self.given.steps,
            resamplings=self.given.resamplings,
        )  # fmt: skip
        label = f"{name}, batch {batch}"
        started = time.perf_counter()
        try:
            with at_most(self.left()):
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                self.add(label, *timed(run, tiles=batch, runs=self.runs, device=self.device), given)
                if self.device.type == "cuda" and batch == self.base and name in PROFILED and self.left() > 20:
                    self.report.profiles[label] = profile(run)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.report.failed[label] = text[:1500]
            print(f"| {label} | FAILED: {text.splitlines()[0][:150]} |", flush=True)
            if is_lost(text):
                self.start_again()
        finally:
            del sampler, run, given
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.report.seconds[label] = round(time.perf_counter() - started, 1)
            self.save()

    def start_again(self) -> None:
        """Start anew in a fresh process without the fused kernels; what was measured stays in a file of its own."""
        self.save()
        if self.given.out is not None:
            (self.given.out / "paper_tile.json").rename(self.given.out / "paper_tile_before.json")
        if not self.given.fused:
            raise SystemExit("the device fails without the fused kernels as well")
        print("starting again without the fused kernels", flush=True)
        kept = [word for word in sys.argv[1:] if not word.startswith("--seconds=")]
        os.execv(sys.executable, [sys.executable, __file__, *kept, "--no-fused", f"--seconds={self.left():.0f}"])

    def check_kernels(self) -> None:
        """Print how far each fused kernel is from PyTorch in float32; a kernel that is wrong stops the fused rows."""
        try:
            errors = kernel_errors(self.device)
        except Exception as error:
            errors = {"did not run": math.inf}
            self.report.failed["kernels"] = f"{type(error).__name__}: {error}"[:3000]
            print(f"fused kernels FAILED: {type(error).__name__}: {str(error)[:600]}", flush=True)
            if is_lost(str(error)):
                self.start_again()
        self.report.kernels = errors
        print("fused kernels, relative error:", {name: f"{value:.1e}" for name, value in errors.items()}, flush=True)
        if not all(value < 3e-3 for value in errors.values()):
            print("the fused kernels are not used", flush=True)
            self.given.fused = False
        self.joined = self.given.fused and self._joins()
        self.save()

    def _joins(self) -> bool:
        """Print the same for the kernels between blocks, and return whether they may be used."""
        try:
            errors = join_errors(self.device)
        except Exception as error:
            self.report.failed["joined"] = f"{type(error).__name__}: {error}"[:3000]
            print(f"joining kernels FAILED: {type(error).__name__}: {str(error)[:600]}", flush=True)
            if is_lost(str(error)):
                self.start_again()
            return False
        self.report.kernels |= errors
        print("joining kernels, relative error:", {name: f"{value:.1e}" for name, value in errors.items()}, flush=True)
        return all(value < 3e-3 for value in errors.values())

    def run(self) -> list[Row]:
        """Make the table."""
        device = self.device
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        weights = "random weights" if self.given.weights is None else Path(self.given.weights).name
        steps = f"{self.given.steps}+{self.given.resamplings}"
        self.report.title = f"{self.config.name} {steps}, T=3, {self.size}x{self.size}, {weights}, {where}"
        print(self.report.title, flush=True)
        given = self.inputs(self.base)
        # What everything is compared to: the same in true float32.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        self.exact = self.naive(given)
        torch.set_float32_matmul_precision("high")  # tf32, as the public code runs
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = device.type == "cuda"
        more = (" PSNR dB |" if self.scenes[1] is not None else "") + (" GiB |" if device.type == "cuda" else "")
        print(f"| mode | ms a tile | times faster | RMSE to float32 naive (reflectance) |{more}")
        print("|---|---|---|---|" + "---|" * more.count("|"), flush=True)
        naive = partial(self.naive, given)
        name = f"naive, tf32 eager, batch {self.base}, {len(self.evaluations)} evaluations"
        self.add(name, *timed(naive, tiles=self.base, runs=min(3, self.runs), device=device), given)
        if device.type == "cuda":
            self.report.profiles["naive"] = profile(naive)
            self.report.ceilings = ceilings(device)
            print(f"ceilings: {self.report.ceilings}", flush=True)
            self.check_kernels()
        modes = ladder(device, fused=self.given.fused, joined=self.joined)
        order = [(name, self.base) for name in modes]
        if device.type == "cuda":
            # What the goal is about comes first, for time may run out; before it what cannot fail.
            last = order.pop()[0]
            order = [(SAFE, self.base), *((last, batch) for batch in self.batches), *order]
            modes[SAFE] = FastOptions(**{**asdict(modes[last]), "fused": False})
        for name, batch in order:
            self.mode(name, modes[name], batch)
        if self.given.compile and device.type == "cuda":
            torch._dynamo.config.recompile_limit = 64
            compiled = FastOptions(**{**asdict(modes[SAFE]), "compiled": True})
            self.mode("float16, blocks compiled, recorded", compiled, self.base)
        self.save()
        for label, found in self.report.profiles.items():
            print(f"profile of {label}: {found['total_ms']} ms in {found['launches']} kernels")
            for kernel, count, milliseconds in found["kernels"]:
                print(f"  {milliseconds:9.3f} ms {count:5d} x {kernel}")
        print(f"{time.perf_counter() - self.started:.0f} s", flush=True)
        return self.rows


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print the table and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a checkpoint of the paper's network; random weights without it")
    parser.add_argument("--data", type=Path, nargs="+", help="shards, for the PSNR on real places")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batches", default="8,16,32", help="tiles at a time of the last mode")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resamplings", type=int, default=1)
    parser.add_argument("--no-fused", dest="fused", action="store_false", help="without Triton kernels")
    parser.add_argument("--seconds", type=float, default=900.0, help="start nothing after so long")
    parser.add_argument("--compile", action="store_true", help="a last row with torch.compile")
    parser.add_argument("--out", type=Path, help="folder for paper_tile.json")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    return Bench(given).run()


if __name__ == "__main__":
    main()
