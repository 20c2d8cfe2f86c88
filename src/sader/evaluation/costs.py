"""What a model is and costs: parameters, multiply-accumulates of one forward and of one whole image, peak memory.

Operations are counted by PyTorch's operator counter on the meta device, where nothing is computed: convolutions, linear
layers, matrix products and attention. Pointwise work (norms, activations, gates) is not counted, as in the paper's
complexity table. The paper counts one forward; an image takes several, with the condition computed once, so both are
given. Seconds are measured by `scoring`. `describe` is the description that `sader info` prints, the same for presets,
baseline systems, shipped weights and checkpoint files.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sader.baselines.baseline import Baseline, BaselineInputs, BaselineModelConfig
from sader.checkpoint import WEIGHTS_DIR, find_checkpoint, read_header, shipped, shipped_guide, verified
from sader.errors import check_known
from sader.files import file_digest
from sader.inference.inputs import parse_steps
from sader.inference.masks import MASK_WEIGHTS, mask_network
from sader.inference.remover import RemoverOptions
from sader.method.guides import LearnedGuide, load_guide, make_guide
from sader.model.heads import MASK_BANDS
from sader.model.mtcdn import MTCDN, Condition
from sader.models import BASELINES, PRESETS, AnyModelConfig, build_baseline, find_config, get_system, model_from_dict

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operators of kind "matmul"; fused attention operators are of kind "attention", all others keep their own name."""


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
        kind = "attention" if "dot_product" in name else "matmul" if name in MATRIX_PRODUCTS else name
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
        if isinstance(config, BaselineModelConfig):
            return build_baseline(config).eval()
        return MTCDN(config.network).eval()


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
    assert isinstance(network, MTCDN)
    once, each = _denoiser_macs(network, dates=dates, size=size)
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


def _denoiser_macs(network: MTCDN, *, dates: int, size: int) -> tuple[int, int]:
    """Return the multiply-accumulates of (the condition, one evaluation)."""
    bands, aux_bands = len(network.config.bands), len(network.config.aux_bands)
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

    Allocated memory on a GPU; where `call` allocates none there, the highest resident memory that Linux records.
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
    with contextlib.suppress(OSError, AttributeError):  # free memory of earlier calls would hide the growth
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the highest resident memory to the present one
    except OSError:
        call()
        return None
    before = _highest_resident()
    call()
    return _highest_resident() - before


def _highest_resident() -> float:
    """Return the highest resident memory of this process since the last reset, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


LICENCE = "Apache-2.0"


@dataclass(frozen=True)
class ModelEntry:
    """One line of the list of models."""

    name: str
    kind: str
    """"preset", "baseline" or "weights"."""
    trained: bool
    bands: tuple[str, ...]
    aux_bands: tuple[str, ...]
    parameters: int

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Publication:
    """Where a baseline system was published and what the paper's complexity table gives for it."""

    year: int
    published: str
    sizes_assumed: bool
    """Whether published facts do not fix the sizes of the network."""
    paper_parameters: float | None
    """Millions."""
    paper_gmacs: float | None
    """One forward."""
    note: str = ""


@dataclass(frozen=True)
class ModelDescription:
    """Everything `sader info MODEL` prints."""

    name: str
    title: str
    """The name as tables print it."""
    kind: str
    """"preset", "baseline" or "weights"."""
    bands: tuple[str, ...]
    aux_bands: tuple[str, ...]
    dates: int
    size: int
    cost: Cost
    """For `dates` images of `size` x `size` pixels."""
    parameters_training: int
    """All trained parameters: with discriminators and the like."""
    parameters_condition: int | None
    """Of the condition network; None for a baseline."""
    sampling: dict[str, Any] | None
    """Steps, solver, guide and noise range; None for a baseline."""
    training_data: str
    licence: str
    publication: Publication | None = None
    card: dict[str, Any] = field(default_factory=dict)
    """Everything else in the card of the checkpoint."""

    @property
    def trained(self) -> bool:
        """Whether there are weights."""
        return self.kind == "weights"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; the cost and the publication are merged into the rest."""
        values = asdict(self)
        return {**values.pop("cost"), **(values.pop("publication") or {}), **values, "trained": self.trained}

    def rows(self, *, every: bool = False) -> list[tuple[str, str]]:
        """Return (label, text) of the lines to print; every: with all settings of the training."""
        cost, case, about = self.cost, f"T={self.dates}, {self.size}x{self.size}", self.publication
        notes, forward = [], [case]
        if self.parameters_condition is not None:
            notes.append(f"{self.parameters_condition / cost.parameters:.0%} in the condition network")
        extra = self.parameters_training - cost.parameters
        sample = [f"{cost.evaluations} evaluation{'s' * (cost.evaluations != 1)}"]
        if about is not None:
            notes.append(_paper(about.paper_parameters, " M"))
            forward.append(_paper(about.paper_gmacs))
        if cost.gmacs_condition is not None:
            forward.append(f"of which condition {cost.gmacs_condition:.2f}")
            sample = ["condition once", f"{sample[0]} of {cost.gmacs_evaluation:.2f}"]
        if cost.gmacs_guide is not None:
            sample.append(f"guide {cost.gmacs_guide:.2f} a call")
        notes += [f"{extra / 1e6:.2f} M more in training"] if extra else []
        rows = [("model", f"{self.title} ({self.kind}{'' if self.trained else ', untrained'})")]
        if about is not None:
            text = f"{about.published} ({about.year}); built from published facts, not from its code"
            rows.append(("published", text))
        rows += [
            ("bands", " ".join(self.bands)),
            ("auxiliary bands", " ".join(self.aux_bands) or "none"),
            ("parameters", f"{cost.parameters / 1e6:.2f} M" + (f" ({'; '.join(notes)})" if notes else "")),
            ("GMAC per forward", f"{cost.gmacs_forward:.2f} ({'; '.join(forward)})"),
            ("GMAC per sample", f"{cost.gmacs_sample:.2f} ({', '.join(sample)})"),
        ]
        rows += [] if self.sampling is None else [("sampling", _sampling_text(self.sampling))]
        rows += [("training data", self.training_data), ("licence", self.licence)]
        rows += [("note", about.note)] if about is not None and about.note else []
        shown = self.card if every else ("attribution", "date", "hardware")
        return rows + [(key.replace("_", " "), _text(self.card[key])) for key in shown if key in self.card]


@dataclass(frozen=True)
class PartDescription:
    """What `sader info NAME` prints about shipped weights that are no model of their own but used by models."""

    name: str
    kind: str
    bands: tuple[str, ...]
    parameters: int
    file_bytes: int
    sha256: str
    training_data: str
    licence: str = LICENCE

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def rows(self, *, every: bool = False) -> list[tuple[str, str]]:
        """Return (label, text) of the lines to print."""
        size, bands = f"{self.file_bytes / 2**20:.1f} MiB", " ".join(self.bands)
        shown = asdict(self) | {"bands": bands, "parameters": f"{self.parameters / 1e6:.2f} M", "file_bytes": size}
        return [(key.removesuffix("_bytes").replace("_", " "), value) for key, value in shown.items()]


def list_parts() -> dict[str, Path]:
    """Return the shipped weights that models use, name -> file."""
    return {path.stem: path for path in sorted(WEIGHTS_DIR.glob("*/*.safetensors"))}


def describe_part(name: str) -> PartDescription | None:
    """Return the description of shipped weights that models use; None for another name."""
    if (path := list_parts().get(name)) is None:
        return None
    with safe_open(verified(path), "pt") as file:
        card = json.loads(file.metadata().get("card", "{}"))
    is_mask = path == MASK_WEIGHTS
    return PartDescription(
        name=name,
        kind="masks of all models where none are given, and of sader mask" if is_mask else "guide of the resampling",
        bands=MASK_BANDS if is_mask else tuple(card["bands"]),
        parameters=count_parameters(mask_network(torch.device("cpu")) if is_mask else load_guide(path).network),
        file_bytes=path.stat().st_size,
        sha256=file_digest(path),
        training_data=_text(card.get("data", "not stated in the file; see the model card in MODELS.md")),
    )


def list_models(*, baselines: bool = False) -> list[ModelEntry]:
    """Return the shipped weights, the presets and, if wanted, the baseline systems of the paper's tables."""
    entries = [_entry(name, "weights", _config(path, read_header(path))) for name, path in shipped().items()]
    entries += [_entry(name, "preset", find_config(name)) for name in PRESETS]
    return entries + [_entry(name, "baseline", find_config(name)) for name in BASELINES if baselines]


def describe(name: str, *, dates: int = 3, size: int = 256) -> ModelDescription:
    """Return the description of a preset, a baseline system, shipped weights, a checkpoint file or a hub repository.

    dates, size: the case that costs are counted for, 1 to about 12 dates and any number of pixels.
    """
    config, kind, card = _find(name)
    network = network_on_meta(config)
    title, trained = name, kind == "weights"
    condition: int | None = None
    sampling: dict[str, Any] | None = None
    about: Publication | None = None
    if isinstance(config, BaselineModelConfig):
        s = get_system(config.system)
        name, title = s.name, s.label
        about = Publication(s.year, s.reference, s.assumed, *s.printed, s.remarks)
    else:
        assert not isinstance(network, Baseline)
        condition = count_parameters(network.condition_net)
        diffusion = {key: getattr(config.diffusion, key) for key in ("steps", "sigma_max", "sigma_min", "start")}
        sampling = {**diffusion, **asdict(config.sampling)}
    return ModelDescription(
        name=name,
        title=title,
        kind=kind,
        bands=config.network.bands,
        aux_bands=config.network.aux_bands,
        dates=dates,
        size=size,
        cost=model_cost(config, dates=dates, size=size),
        parameters_training=count_parameters(network),
        parameters_condition=condition,
        sampling=sampling,
        training_data=_text(card.pop("training_data", "not stated" if trained else "none: the network is untrained")),
        licence=_text(card.pop("licence", "not stated" if trained else LICENCE)),
        publication=about,
        card=card,
    )


def _find(name: str) -> tuple[AnyModelConfig, str, dict[str, Any]]:
    """Return (config, kind, card) of a model by name or file."""
    if name in BASELINES or name in PRESETS:
        return find_config(name), "baseline" if name in BASELINES else "preset", {}
    known = [*PRESETS, *BASELINES, *shipped(), *list_parts()]
    if not Path(name).suffix and "/" not in name and not Path(name).is_file():
        check_known("model", name, known)
    path = find_checkpoint(name)
    header = read_header(path)
    return _config(path, header), "weights", dict(header.get("card", {}))


def _entry(name: str, kind: str, config: AnyModelConfig) -> ModelEntry:
    network = network_on_meta(config)
    counted = network.counted if isinstance(network, Baseline) else network
    parameters = count_parameters(counted)
    return ModelEntry(name, kind, kind == "weights", config.network.bands, config.network.aux_bands, parameters)


def _config(path: Path, header: dict[str, Any]) -> AnyModelConfig:
    return model_from_dict(header["config"], where=f"{path.name}: config")


def _paper(value: float | None, unit: str = "") -> str:
    return "not in the paper's table" if value is None else f"paper {value:.2f}{unit}"


def _sampling_text(how: dict[str, Any]) -> str:
    resampling = guide = ""
    if how["resample_steps"]:
        resampling, guide = f" + {how['resample_steps']}", f", resampling {how['resampling']}, guide {how['guide']}"
    start = ", from the median of the dates" if how["start"] == "median" else ""
    steps = f"{how['steps']}{resampling} step{'s' * (how['steps'] != 1)}"
    return f"{steps}, {how['solver']}{guide}, sigma {how['sigma_max']} to {how['sigma_min']}{start}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
