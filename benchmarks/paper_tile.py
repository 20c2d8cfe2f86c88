"""Time the paper's network at its own 4+1 sampling, T=3, 256x256: the public code's way against `inference.accelerate`.

On a GPU: python benchmarks/paper_tile.py --out FOLDER [--weights FILE] [--data SHARDS] [--seconds 140] [--compile]
Anywhere in seconds: python benchmarks/paper_tile.py --tiny

A ladder: each row adds one short cut to the row before. Prints ms a tile, the ratio to the naive mode and the RMSE in
reflectance to the naive mode in true float32, with the same noise; and the PSNR where --data brings known scenes.
Rows are printed, and written to FOLDER/paper_tile.json, as they come: what is stopped by --seconds loses nothing. On a
GPU the last rung, which the goal is about, comes first, at all batch sizes and with its profile; then the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import sys
import threading
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
from torch import Tensor

from sader.checkpoint import build_model, find_checkpoint, load_checkpoint
from sader.config import ModelConfig
from sader.data.synthetic.scene import make_series
from sader.inference.accelerate import FastOptions, FastSampler, naive_sample
from sader.method.diffusion import Denoiser
from sader.method.guides import make_guide
from sader.method.sampling import generator_noise
from sader.model.fused import can_fuse
from sader.model.kernelchecks import GOOD, double_errors, fold_errors, join_errors, kernel_errors
from sader.presets import get_preset

BANDS = ("B02", "B03", "B04", "B08")
VALIDATION_SEED = 20_000_003
"""That of `sader.training.validation`, which needs Lightning."""
SAFE = "float16, recorded, not fused"
KINDS = {"fused": kernel_errors, "joined": join_errors, "folded": fold_errors, "doubled": double_errors}
"""Kernels in the order in which modes come to need them, with what says how far off they are."""
SCENES = 8
"""Different places; larger batches repeat them, and quality is measured on these."""


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


def ladder(device: torch.device, *, good: set[str]) -> dict[str, FastOptions]:
    """Return the modes, each with one short cut more than the one before; good: those of `KINDS` that may be used."""
    on_gpu = device.type == "cuda"
    modes = {
        "dates seen once": FastOptions(strict=True),
        "+ channels last": FastOptions(strict=True, channels_last=True),
        "+ sigma = 0.001 left out": FastOptions(strict=True, channels_last=True, skip_below=2e-3),
        "+ bfloat16": FastOptions(strict=True, channels_last=True, skip_below=2e-3, precision="bfloat16"),
        "float16 instead": FastOptions(strict=True, channels_last=True, skip_below=2e-3, precision="float16"),
    }
    half = modes["float16 instead"]
    if on_gpu and "fused" in good:
        modes["+ fused"] = FastOptions(**{**asdict(half), "fused": True})
    if on_gpu:
        modes["+ recorded"] = FastOptions(**{**asdict(half), "fused": "+ fused" in modes, "record": True})
    if "+ fused" in modes and "joined" in good:
        modes["+ joined"] = FastOptions(**{**asdict(modes["+ recorded"]), "joined": True})
    if "+ joined" in modes and "folded" in good:
        modes["+ folded"] = FastOptions(**{**asdict(modes["+ joined"]), "folded": True})
    if "+ folded" in modes and "doubled" in good:
        modes["+ doubled"] = FastOptions(**{**asdict(modes["+ folded"]), "doubled": True})
    return modes


def is_lost(text: str) -> bool:
    """Whether an error is one after which a process can do nothing more on the device."""
    return any(word in text for word in ("illegal", "misaligned", "unspecified launch", "device-side assert"))


class Bench:
    """The table being made."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.started = given, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() and not given.cpu else "cpu")
        self.size: int = 32 if given.tiny else given.size
        self.base = 2 if given.tiny else 8
        self.runs: int = 1 if given.tiny else given.runs
        self.batches = [2] if given.tiny else [int(number) for number in given.batches.split(",")]
        model, self.config = load(given.weights, tiny=given.tiny)
        self.model = model.to(self.device)
        self.guide = make_guide(self.config.sampling.guide, bands=len(self.config.network.bands), weights=None)
        self.rows: list[Row] = []
        self.report = Report()
        self.good: set[str] = set()
        self.scenes = self._scenes(max(self.base, min(SCENES, *self.batches)))
        self.evaluations: list[None] = []

    def left(self) -> float:
        """Return the seconds that remain."""
        return self.given.seconds - (time.perf_counter() - self.started)

    def _scenes(self, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        network = self.config.network
        bands = (*network.bands, *network.aux_bands)
        if self.given.data:
            started = time.perf_counter()
            found = known_scenes(self.given.data, bands, count, self.size)
            self.report.seconds["scenes"] = round(time.perf_counter() - started, 1)
            return found
        made = [make_series(number, size=(self.size, self.size), dates=3) for number in range(min(count, 8))]
        order = [BANDS.index(band) for band in bands]
        cloudy = torch.from_numpy(np.stack([one.cloudy[:, order] for one in made])).float()
        return torch.cat([cloudy] * -(-count // len(cloudy)))[:count], None, None

    def inputs(self, batch: int) -> Inputs:
        """Return the first `batch` scenes, again from the first where there are fewer."""
        bands = len(self.config.network.bands)
        which = torch.arange(batch) % len(self.scenes[0])
        cloudy, clear, scored = (None if one is None else one[which].to(self.device) for one in self.scenes)
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

    def mode(self, name: str, options: FastOptions, batch: int, *, profiled: int = 0) -> None:
        """Measure one mode; a failure is a line of its own, not the end. profiled: kernels to name in its profile."""
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
                if profiled and self.device.type == "cuda":
                    self.report.profiles[label] = profile(run, top=profiled)
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
        """Start anew in a fresh process with fewer kernels; what was measured stays in a file of its own."""
        self.save()
        if self.given.out is not None:
            (self.given.out / "paper_tile.json").rename(self.given.out / "paper_tile_before.json")
        if not self.given.kinds:
            raise SystemExit("the device fails without the fused kernels as well")
        kinds = ",".join(self.given.kinds.split(",")[:-1])
        print(f"starting again with the kernels {kinds or 'of PyTorch'}", flush=True)
        kept = [word for word in sys.argv[1:] if not word.startswith(("--seconds=", "--kinds="))]
        os.execv(sys.executable, [sys.executable, __file__, *kept, f"--kinds={kinds}", f"--seconds={self.left():.0f}"])

    def check_kernels(self) -> None:
        """Find how far each kernel is from PyTorch in float32; those that are wrong, and what needs them, are left out.

        Runs beside the naive mode: Triton compiles meanwhile.
        """
        started = time.perf_counter()
        for kind in [kind for kind in KINDS if kind in self.given.kinds.split(",")]:
            try:
                errors = KINDS[kind](self.device)
            except Exception as error:
                self.report.failed[kind] = f"{type(error).__name__}: {error}"[:3000]
                break
            self.report.kernels |= errors
            if not all(value < GOOD for value in errors.values()):
                self.report.failed[kind] = f"errors of {GOOD} or more"
                break
            self.good.add(kind)
        self.report.seconds["kernels"] = round(time.perf_counter() - started, 1)

    def checked(self, thread: threading.Thread) -> None:
        """Wait for the kernels' errors and print them."""
        thread.join()
        errors = {name: f"{value:.1e}" for name, value in self.report.kernels.items()}
        print(f"kernels in use: {sorted(self.good)}; relative errors: {errors}", flush=True)
        for kind in KINDS:
            if kind in self.report.failed:
                print(f"{kind} kernels FAILED: {self.report.failed[kind][:600]}", flush=True)
                if is_lost(self.report.failed[kind]):
                    self.given.kinds = ",".join([*(good for good in KINDS if good in self.good), kind])
                    self.start_again()
        self.save()

    def goal_first(self, modes: dict[str, FastOptions]) -> None:
        """Measure the modes on a GPU: first those the goal is about, for time may run out, with their profiles.

        Doubling pays only where cuDNN is as good at kernels of 2x2 as at 3x3: the better of both is tried with more
        tiles at a time.
        """
        wanted = [name for name in modes if re.search(self.given.only, name)]
        rungs = [name for name in wanted if name in ("+ folded", "+ doubled")]
        rungs = rungs or [name for name in wanted if name != SAFE][-1:]
        for name in rungs:
            self.mode(name, modes[name], self.base, profiled=60)
        seen = {row.mode: row.milliseconds for row in self.rows}
        goal = min(rungs, key=lambda name: seen.get(f"{name}, batch {self.base}", math.inf), default=None)
        for batch in self.batches:
            if goal is not None and batch != self.base:
                self.mode(goal, modes[goal], batch, profiled=60 if batch == 32 else 0)
        self.report.ceilings = ceilings(self.device)
        print(f"ceilings: {self.report.ceilings}", flush=True)
        for name in reversed(wanted):
            if name not in rungs:
                self.mode(name, modes[name], self.base, profiled=24 if name in ("+ joined", "+ recorded") else 0)

    def run(self) -> list[Row]:
        """Make the table."""
        device = self.device
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        weights = "random weights" if self.given.weights is None else Path(self.given.weights).name
        steps = f"{self.given.steps}+{self.given.resamplings}"
        self.report.title = f"{self.config.name} {steps}, T=3, {self.size}x{self.size}, {weights}, {where}"
        print(self.report.title, flush=True)
        given = self.inputs(self.base)
        checking = threading.Thread(target=self.check_kernels, daemon=True)
        if device.type == "cuda" and can_fuse(device):
            checking.start()
        # What everything is compared to: the same in true float32.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        try:
            self.exact = self.naive(given)
        except RuntimeError as error:
            if checking.ident is None or not is_lost(str(error)):
                raise
            checking.join()  # a kernel that was tried beside it has taken the device down
            bad = next((kind for kind in KINDS if kind not in self.good), list(KINDS)[-1])
            self.given.kinds = ",".join([*(kind for kind in KINDS if kind in self.good), bad])
            self.start_again()
        if checking.ident is not None:
            self.checked(checking)
        self.report.seconds["before the naive row"] = round(time.perf_counter() - self.started, 1)
        torch.set_float32_matmul_precision("high")  # tf32, as the public code runs
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = device.type == "cuda"
        more = (" PSNR dB |" if self.scenes[1] is not None else "") + (" GiB |" if device.type == "cuda" else "")
        print(f"| mode | ms a tile | times faster | RMSE to float32 naive (reflectance) |{more}")
        print("|---|---|---|---|" + "---|" * more.count("|"), flush=True)
        naive = partial(self.naive, given)
        name = f"naive, tf32 eager, batch {self.base}, {len(self.evaluations)} evaluations"
        self.add(name, *timed(naive, tiles=self.base, runs=min(3, self.runs), device=device), given)
        self.report.seconds["after the naive row"] = round(time.perf_counter() - self.started, 1)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        modes = ladder(device, good=self.good)
        if device.type == "cuda":
            modes[SAFE] = FastOptions(**{**asdict(modes["float16 instead"]), "record": True})
            self.goal_first(modes)
        else:
            for name, options in modes.items():
                self.mode(name, options, self.base)
        if self.given.compile and device.type == "cuda":
            torch._dynamo.config.recompile_limit = 64
            compiled = FastOptions(**{**asdict(modes[SAFE]), "compiled": True})
            self.mode("float16, blocks compiled, recorded", compiled, self.base)
        if self.given.profile_naive and device.type == "cuda":
            self.report.profiles["naive"] = profile(naive)
        self.save()
        for label, found in self.report.profiles.items():
            print(f"profile of {label}: {found['total_ms']} ms in {found['launches']} kernels")
            for kernel, count, milliseconds in found["kernels"][:24]:
                print(f"  {milliseconds:9.3f} ms {count:5d} x {kernel}")
        print(f"{time.perf_counter() - self.started:.0f} s", flush=True)
        return self.rows


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a checkpoint of the paper's network; random weights without it")
    parser.add_argument("--data", type=Path, nargs="+", help="shards, for the PSNR on real places")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batches", default="8,16,32,64", help="tiles at a time of the last mode")
    parser.add_argument("--only", default="", help="only modes whose name matches this regular expression")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resamplings", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="Triton kernels that may be used; empty = none")
    parser.add_argument("--profile-naive", action="store_true", help="at the end, the naive mode's kernels")
    parser.add_argument("--seconds", type=float, default=900.0, help="start nothing after so long")
    parser.add_argument("--compile", action="store_true", help="a last row with torch.compile")
    parser.add_argument("--out", type=Path, help="folder for paper_tile.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print the table and return its rows."""
    given = parsed(arguments)
    warnings.simplefilter("ignore")
    return Bench(given).run()


if __name__ == "__main__":
    main()
