"""What a method costs: parameters, multiply-accumulates of one forward and of one whole sample, peak memory.

Counted by `info.py` and `baselines.description` for 3 dates of 256x256 pixels; memory is measured on an item at hand.
Seconds per megapixel come from the scored rows. Classical methods have no parameters and no counted operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sader.baselines.baseline import BaselineModelConfig
from sader.config import ModelConfig
from sader.evaluation.complexity import count_parameters
from sader.evaluation.description import baseline_macs
from sader.evaluation.info import count_cost
from sader.evaluation.methods import RemoverMethod
from sader.evaluation.scoring import Method
from sader.inference.inputs import parse_steps
from sader.model.mtcdn import MTCDN
from sader.models import AnyModelConfig, build_baseline


@dataclass(frozen=True)
class MethodCost:
    """The price of one method; None where it cannot be said."""

    parameters: int | None = None
    """Of what predicts, guides of the resampling left out."""
    gmacs_forward: float | None = None
    """10^9 multiply-accumulates of one forward, T = 3, 256x256."""
    gmacs_sample: float | None = None
    """The same for the whole image: condition once, every evaluation, every call of the guide."""
    evaluations: int | None = None
    peak_memory_mb: float | None = None
    """Beyond what was there before the call: allocated on the GPU, else resident memory sampled every 2 ms."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def cost_of(method: Method, *, dates: int = 3, size: int = 256) -> MethodCost:
    """Return what can be counted of a method; everything None for one without a network."""
    if not isinstance(method, RemoverMethod):
        return MethodCost(parameters=0, gmacs_forward=0.0, gmacs_sample=0.0, evaluations=0)
    guide = method.remover.options.guide
    return model_cost(method.remover.config, steps=method.steps, guide=guide, dates=dates, size=size)


@lru_cache(maxsize=256)
def model_cost(
    config: AnyModelConfig, *, steps: int | str | None = None, guide: str | None = None, dates: int = 3, size: int = 256
) -> MethodCost:
    """Return the cost of a model at given sampling steps ("4+1"), its own where None."""
    if isinstance(config, BaselineModelConfig):
        with torch.device("meta"):
            baseline = build_baseline(config).eval()
        evaluations = baseline.evaluations
        forward, sample = baseline_macs(baseline, dates=dates, size=size)
        if steps is not None and config.network.steps is not None:
            wanted = parse_steps(steps, config)[0]
            sample = round(sample * wanted / max(evaluations, 1))
            evaluations = wanted
        return MethodCost(count_parameters(baseline.counted), forward / 1e9, sample / 1e9, evaluations)
    assert isinstance(config, ModelConfig)
    own = config if guide is None else config.replace(sampling={"guide": guide})
    wanted, again = parse_steps(steps, own)
    own = own.replace(diffusion={"steps": wanted}, sampling={"resample_steps": again})
    with torch.device("meta"):
        network = MTCDN(own.network).eval()
    cost = count_cost(own, network, dates=dates, size=size)
    return MethodCost(count_parameters(network), cost.gmacs_forward, cost.gmacs_sample, cost.evaluations)


def with_memory(cost: MethodCost, call: Callable[[], object]) -> MethodCost:
    """Return the cost with the peak memory of one `call`."""
    return replace(cost, peak_memory_mb=peak_memory(call))


def peak_memory(call: Callable[[], object]) -> float | None:
    """Return by how many MiB memory grew while `call` ran; None where it cannot be read."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - before
        if grown > 0:  # a classical method works on the CPU
            return grown / 2**20
        return _resident_growth(call)
    return _resident_growth(call)


def _resident_growth(call: Callable[[], object]) -> float | None:
    if not Path("/proc/self/statm").is_file():
        call()
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, AttributeError):  # what an earlier method left behind must not be reused unseen
        ctypes.CDLL(None).malloc_trim(0)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    before = peak = resident()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        call()
    finally:
        peak = max(peak, resident())
        over.set()
        watcher.join()
    return (peak - before) / 2**20
