"""Training throughput: samples per second of the optimised loop against the plain fp32 eager loop, in one run.

    python benchmarks/training_throughput.py              # the paper's network, batch 8 to 32, T = 3, 256 x 256; GPU
    python benchmarks/training_throughput.py --systems mcgan emrdm sen12mscrts_ea   # or all: their own settings
    python benchmarks/training_throughput.py --tiny       # seconds on a CPU, to see that it works

"plain" is the loop of the public code: fp32 without TF32, batches composed in the same stream just before they are
used, Muon one matrix at a time, a loss read back at every step. "optimised" is the `Trainer` of `sader train`. Waiting
for data is measured on the device: the time between the end of one step's work and the start of the next one's.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.batch import SeriesBatch
from sader.data.plan import MakerSettings
from sader.data.shards import SeriesRecord, write_shard
from sader.evaluation.reproduce.setting import tiny_overrides
from sader.models import BASELINES, ModelConfig, build_model, get_preset
from sader.training.config import TrainConfig, resolve
from sader.training.objective import Objective
from sader.training.optim import Muon, make_optimizers
from sader.training.processes import Process
from sader.training.run import run_training
from sader.training.trainer import Trainer


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    loop: str
    batch_size: int
    samples_per_second: float
    milliseconds: float
    waiting: float
    """Share of device time without work of the training stream, 0 to 1; NaN on a CPU."""
    memory: float
    """Peak GiB."""


def make_records(bands: tuple[str, ...], *, size: int) -> list[SeriesRecord]:
    """Return series of random ground with labelled clouds; the values do not matter for the speed."""
    records = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        dn = np.clip(rng.normal(1500, 250, (5, len(bands), size, size)), 200, 4000).astype(np.uint16)
        labels = np.zeros((5, size, size), np.uint8)
        for k in range(1, 5):
            top = int(rng.integers(0, size // 2))
            labels[k, top : top + size // 3] = 1 + k % 3
            dn[k][:, labels[k] > 0] = 7000
        records.append(SeriesRecord(dn, f"place_{seed}", "cloudsen12", bands, labels))
    return records


class Clock:
    """Marks starts and ends of steps on the device and gives seconds per step and the share between steps."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, []

    def mark(self) -> None:
        """Mark the present time in the stream of the device."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def read(self) -> tuple[float, float]:
        """Return (seconds per step, waiting share) of marks start, end, start, end, ..."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            times = [self.marks[0].elapsed_time(mark) / 1000 for mark in self.marks]
        else:
            times = list(self.marks)
        starts, ends = times[0::2], times[1::2]
        total = ends[-1] - starts[0]
        between = sum(start - end for start, end in zip(starts[1:], ends[:-1], strict=True))
        return total / len(starts), between / total


def plain_loop(model: ModelConfig, train: TrainConfig, maker: SeriesMaker, device: torch.device, steps: int) -> Clock:
    """Run the fp32 eager loop and return its clock; the first steps are not counted."""
    torch.manual_seed(0)
    denoiser = build_model(model).to(device).train()
    objective = Objective()
    muon, adam = make_optimizers(denoiser, train)
    one_by_one = [Muon([parameter], 1e-3) for group in muon.param_groups for parameter in group["params"]]
    clock, warm = Clock(device), max(2, steps // 5)
    for step in range(steps + warm):
        batch = maker.batch(step, train.batch_size, train.dates, train.crop)
        if step >= warm:
            clock.mark()
        loss, _ = objective(denoiser, batch, torch.Generator(device).manual_seed(step))
        loss.backward()
        for optimizer in (*one_by_one, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()
        if step >= warm:
            clock.mark()
    return clock


class TimedTrainer(Trainer):
    """The trainer with marks around the work of the counted steps: from the batch at hand to the update."""

    clock: Clock
    warm = 0

    def step(self) -> None:
        counted, take = self.steps_done >= self.warm, self.feed.take

        def timed(number: int) -> SeriesBatch:
            batch = take(number)
            self.clock.mark()
            return batch

        if counted:
            self.feed.take = timed  # type: ignore[method-assign]
        super().step()
        self.feed.take = take  # type: ignore[method-assign]

    def _tick(self) -> None:
        if self.steps_done > self.warm:
            self.clock.mark()
        super()._tick()


def optimised_loop(
    model: ModelConfig, train: TrainConfig, maker: SeriesMaker, device: torch.device, steps: int
) -> Clock:
    """Run the trainer of `sader train` and return its clock; the first steps are not counted."""
    warm = max(2, steps // 5)
    config = replace(train, steps=steps + warm, log_every=max(1, steps // 2))
    torch.manual_seed(0)
    denoiser = build_model(model).train()
    if train.compile:
        denoiser.network.compile()
    trainer = TimedTrainer(denoiser, Objective(), config, maker, Process(device))
    trainer.clock, trainer.warm = Clock(device), warm
    while not trainer.over:
        trainer.step()
        if trainer.steps_done % config.log_every == 0:
            trainer.collect()
    return trainer.clock


def fast_math(on: bool) -> None:
    """Turn TF32 and the search for the fastest convolutions on or off."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on
    torch.backends.cudnn.benchmark = on


def measure(
    loop: str, model: ModelConfig, train: TrainConfig, maker: SeriesMaker, device: torch.device, steps: int
) -> Result:
    """Return one line; the loop is "plain" or "optimised"."""
    fast_math(loop == "optimised")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = optimised_loop if loop == "optimised" else plain_loop
    seconds, waiting = run(model, train, maker, device, steps).read()
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return Result(loop, train.batch_size, train.batch_size / seconds, seconds * 1000, waiting, memory)


def measure_systems(names: list[str], *, steps: int, tiny: bool) -> None:
    """Print samples per second of `sader train NAME` with the settings of NAME, at 256 x 256 and three dates.

    The clock starts after the first `steps`, which choose algorithms and capture the step, and counts twice as many.
    """
    for name in names:
        changes = tiny_overrides(name) if tiny else ("train.crop=256", "train.dates=3")
        config = resolve(name, changes)
        bands = (*config.model.network.bands, *config.model.network.aux_bands)
        more = [*changes, f"train.steps={3 * steps}", f"train.log_every={steps}", "train.validate_every=0"]
        with tempfile.TemporaryDirectory() as folder:
            write_shard(Path(folder) / "random.shard", make_records(bands, size=64 if tiny else 512))
            run_training(name, Path(folder) / "run", data=[folder + "/random.shard"], overrides=more, progress=False)
            with (Path(folder) / "run" / "metrics.csv").open() as file:
                rows = csv.DictReader(file)
                seconds = {int(row["step"]): float(row["value"]) for row in rows if row["name"] == "seconds"}
        batch = config.train.batch_size * config.train.accumulate
        speed = 2 * steps * batch / (seconds[3 * steps] - seconds[steps])
        print(f"{name:14s} batch {batch:3d}: {speed:8.1f} samples/s, {1000 / speed:7.1f} s per 1,000", flush=True)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="sen2_mtc_new")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--dates", type=int, default=3)
    parser.add_argument("--crop", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loop", choices=("plain", "optimised"), nargs="+", default=("plain", "optimised"))
    parser.add_argument("--compile", action="store_true", help="torch.compile in the optimised loop")
    parser.add_argument("--systems", nargs="+", help="measure these systems with their own settings, or all")
    parser.add_argument("--tiny", action="store_true", help="a tiny network on the CPU")
    given = parser.parse_args()
    if not given.tiny and not torch.cuda.is_available():
        print("no GPU here: running --tiny instead; its figures say nothing about a GPU")
        given.tiny = True
    if given.systems:
        names = [*BASELINES, "sen2_mtc_new", "sen12mscrts_ea"] if given.systems == ["all"] else given.systems
        measure_systems(names, steps=2 if given.tiny else given.steps, tiny=given.tiny)
        return
    device = torch.device("cpu" if given.tiny else "cuda")
    model = get_preset(given.preset)
    if given.tiny:
        given.batch, given.crop, given.steps = [2], 16, 3
        model = model.replace(
            network={"widths": [8, 16], "blocks": [1, 1], "fusion_width": 8, "key_width": 8, "head_width": 8}
        )
    bands = (*model.network.bands, *model.network.aux_bands)
    bank = SeriesBank(make_records(bands, size=48 if given.tiny else 512), bands=bands, device=device)
    maker = SeriesMaker(bank, MakerSettings(), seed=0)
    results = []
    for batch_size in given.batch:
        train = TrainConfig(batch_size=batch_size, dates=given.dates, crop=given.crop, compile=given.compile)
        for loop in given.loop:
            try:
                results.append(measure(loop, model, train, maker, device, given.steps))
            except torch.OutOfMemoryError:
                print(f"{loop} at batch {batch_size}: out of memory")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, tiny network"
    print(f"{given.preset}, T={given.dates}, {given.crop}x{given.crop}, {name}, torch {torch.__version__}")
    print(
        f"{'loop':10s} {'batch':>5s} {'samples/s':>10s} {'ms/step':>9s} {'waiting':>8s} {'peak GiB':>9s} {'gain':>6s}"
    )
    plain = {result.batch_size: result for result in results if result.loop == "plain"}
    for result in results:
        base = plain.get(result.batch_size)
        gain = "" if base is None else f"{result.samples_per_second / base.samples_per_second:5.2f}x"
        print(
            f"{result.loop:10s} {result.batch_size:5d} {result.samples_per_second:10.1f} {result.milliseconds:9.1f} "
            f"{result.waiting:8.1%} {result.memory:9.2f} {gain:>6s}"
        )


if __name__ == "__main__":
    main()
