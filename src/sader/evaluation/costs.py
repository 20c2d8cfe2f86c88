"""What a model costs: parameters, multiply-accumulates of one forward and of one whole image, peak memory.

Operations are counted by PyTorch's operator counter on the meta device, where nothing is computed: convolutions, linear
layers, matrix products and attention. Pointwise work (norms, activations, gates) is not counted, as in the paper's
complexity table. The paper counts one forward; an image takes several, with the condition computed once, so both are
given. Seconds are measured by `scoring`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sader.baselines.baseline import Baseline, BaselineInputs, BaselineModelConfig
from sader.checkpoint import shipped_guide
from sader.inference.inputs import parse_steps
from sader.inference.remover import RemoverOptions
from sader.method.guides import LearnedGuide, make_guide
from sader.model.mtcdn import MTCDN, Condition
from sader.models import AnyModelConfig, build_baseline
from sader.presets import ModelConfig

KINDS: Mapping[str, str] = {
    "convolution": "convolution",
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
}
"""Operator -> kind; every fused attention operator is "attention", all others keep their own name."""


@dataclass(frozen=True)
class Cost:
    """The cost of one image; all zero for a method without a network."""

    parameters: int = 0
    """Of the network that predicts; discriminators and guides are not counted."""
    gmacs_forward: float = 0.0
    """10^9 multiply-accumulates of one forward, as the paper counts them: condition and one evaluation."""
    gmacs_sample: float = 0.0
    """The whole image: condition once, every evaluation, every call of the guide."""
    evaluations: int = 0
    """Evaluations of the network for one image."""
    gmacs_condition: float | None = None
    """The part computed once per image: condition network, cloud head, matching. None for a baseline."""
    gmacs_evaluation: float | None = None
    """One evaluation of the denoiser. None for a baseline."""
    gmacs_guide: float | None = None
    """One call of the guide; None where the sampling has no resampling."""
    peak_memory_mb: float | None = None
    """Growth of memory during one prediction (`peak_memory`); None where it was not measured."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def count_parameters(module: nn.Module) -> int:
    """Return the number of weights of `module`, trained or frozen, shared ones once. Buffers do not count."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_macs(call: Callable[..., Any], *inputs: Any, **keywords: Any) -> dict[str, int]:
    """Return the multiply-accumulates of `call(*inputs, **keywords)`: "total" and one entry per kind of operator.

    call: a module or any function of tensors. The count is the same on every device; on the `meta` device a network of
    any size is counted in milliseconds.
    """
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops}
    counter = FlopCounterMode(display=False, custom_mapping=fused)
    with counter, torch.no_grad():
        call(*inputs, **keywords)
    counts: dict[str, int] = {}
    for operator, flops in counter.get_flop_counts().get("Global", {}).items():
        name = str(operator).removeprefix("aten.").split(".")[0]
        kind = "attention" if "dot_product" in name else KINDS.get(name, name)
        counts[kind] = counts.get(kind, 0) + int(flops) // 2
    return {"total": sum(counts.values()), **dict(sorted(counts.items()))}


def _cpu_attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """Return the operations of fused attention on a CPU, which PyTorch's counter lacks: q k^T, then times v."""
    batch, heads, tokens, width = query
    return 2 * batch * heads * tokens * key[-2] * (width + value[-1])


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of this shape without values, for `count_macs`."""
    return torch.empty(shape, dtype=dtype, device="meta")


def network_on_meta(config: AnyModelConfig) -> MTCDN | Baseline:
    """Return the network of `config` on the meta device: shapes without values."""
    with torch.device("meta"):
        return (
            build_baseline(config).eval() if isinstance(config, BaselineModelConfig) else MTCDN(config.network).eval()
        )


@lru_cache(maxsize=256)
def model_cost(
    config: AnyModelConfig,
    *,
    steps: int | str | None = None,
    options: RemoverOptions | None = None,
    dates: int = 3,
    size: int = 256,
) -> Cost:
    """Return the cost of one image (dates, C, size, size).

    steps: sampling such as "4+1"; None = the model's own. options: those of the remover; the resampling and the guide
    that it would use are counted.
    """
    network = network_on_meta(config)
    if isinstance(config, BaselineModelConfig):
        assert isinstance(network, Baseline)
        forward, sample = _baseline_macs(network, dates=dates, size=size)
        evaluations = network.evaluations
        if steps is not None and config.network.steps is not None:
            wanted = parse_steps(steps, config.default_steps)[0]
            sample, evaluations = round(sample * wanted / max(evaluations, 1)), wanted
        return Cost(count_parameters(network.counted), forward / 1e9, sample / 1e9, evaluations)
    assert isinstance(config, ModelConfig)
    assert isinstance(network, MTCDN)
    once, each = _denoiser_macs(config, network, dates=dates, size=size)
    count, resamplings = parse_steps(steps, config.default_steps)
    options = options or RemoverOptions()
    resampler = config.sampling.resampler(options.resampling)
    guide_calls = replace(resampler, steps=resamplings).evaluations(count) if resamplings else 0
    evaluations = (2 * count - 1 if config.sampling.solver == "heun" else count) + guide_calls
    guided = None
    if guide_calls:
        name = options.guide or config.sampling.guide
        guided = _guide_macs(name, config.network.bands, size, weights=options.guide_weights)
    return Cost(
        parameters=count_parameters(network),
        gmacs_forward=(once + each) / 1e9,
        gmacs_sample=(once + evaluations * each + guide_calls * (guided or 0)) / 1e9,
        evaluations=evaluations,
        gmacs_condition=once / 1e9,
        gmacs_evaluation=each / 1e9,
        gmacs_guide=None if guided is None else guided / 1e9,
    )


def _denoiser_macs(config: ModelConfig, network: MTCDN, *, dates: int, size: int) -> tuple[int, int]:
    """Return the multiply-accumulates of (the condition, one evaluation)."""
    bands, aux_bands = len(config.network.bands), len(config.network.aux_bands)
    conditions: list[Condition] = []

    def condition() -> None:
        aux = on_meta(1, dates, aux_bands, size, size) if aux_bands else None
        conditions.append(network.condition(on_meta(1, dates, bands, size, size), aux=aux))

    once = count_macs(condition)["total"]
    frames = conditions[0].mean.shape[1]
    return once, count_macs(network, on_meta(1, frames, bands, size, size), on_meta(1), conditions[0])["total"]


def _guide_macs(name: str, bands: Sequence[str], size: int, *, weights: str | None) -> int:
    """Return the multiply-accumulates of one call of a guide, read from its weights where it has some."""
    count, missing = len(bands), on_meta(1, 1, size, size, dtype=torch.bool)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # an untrained guide warns; only its size matters here
        guide = make_guide(name, bands=count, weights=weights or shipped_guide(name, bands))
    if guide is None:
        return 0
    image = on_meta(1, count, size, size)
    if isinstance(guide, LearnedGuide):  # its own call uses autocast, which the meta device does not have
        return count_macs(guide.network.eval().to("meta"), image, missing)["total"]
    return count_macs(guide, image, missing, mean=on_meta(1, count, size, size))["total"]


def _baseline_macs(baseline: Baseline, *, dates: int, size: int) -> tuple[int, int]:
    """Return the multiply-accumulates of (one evaluation, one whole prediction)."""
    config = baseline.config
    height, width = baseline.padded_size(size, size)

    def inputs(rows: int, columns: int) -> BaselineInputs:
        return BaselineInputs(
            cloudy=on_meta(1, dates, config.channels, rows, columns),
            aux=on_meta(1, dates, len(config.aux_bands), rows, columns) if config.aux_bands else None,
            observed=on_meta(1, dates, rows, columns, dtype=torch.bool),
            cloud=on_meta(1, dates, rows, columns),
            present=on_meta(1, dates, dtype=torch.bool),
            reference=on_meta(1, dtype=torch.long),
            days=on_meta(1, dates),
        )

    fixed = config.fixed_size or 0
    once = count_macs(baseline, inputs(fixed or height, fixed or width))["total"]

    def sampling(steps: int | None) -> int:
        def noise(draw: int, channels: int) -> Tensor:
            return on_meta(1, channels, size, size)

        return count_macs(baseline.predict, inputs(size, size), noise, steps=steps)["total"]

    if config.steps is None or config.steps <= 3:
        return once, sampling(None)
    # Every step costs the same: two short samplings give the cost of a long one.
    few, more = sampling(2), sampling(3)
    return once, few + (config.steps - 2) * (more - few)


def peak_memory(call: Callable[[], object]) -> float | None:
    """Return by how many MiB memory grows while `call` runs; None where it cannot be read.

    Allocated memory on a GPU; where `call` allocates none there, resident memory sampled every 2 ms.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - before
        if grown > 0:
            return grown / 2**20
    return _resident_growth(call)


def _resident_growth(call: Callable[[], object]) -> float | None:
    if not Path("/proc/self/statm").is_file():
        call()
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, AttributeError):  # free memory of earlier calls would hide the growth
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
