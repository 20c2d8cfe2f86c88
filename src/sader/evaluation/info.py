"""`sader info`: what a model costs, sees and was trained on.

Cost is counted without computing anything (`complexity.py`, the paper's complexity table, METHOD 2.8). The paper counts
one forward; a sample takes several, with the condition made once, so both are given. Nothing here measures time.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sader.baselines.baseline import BaselineModelConfig
from sader.checkpoint import find_checkpoint, read_header, shipped
from sader.config import ModelConfig
from sader.errors import ConfigError, did_you_mean
from sader.evaluation.complexity import count_macs, count_parameters, on_meta
from sader.evaluation.description import BaselineInfo, count_baseline, describe_baseline
from sader.method.guides import LearnedGuide, make_guide
from sader.model.mtcdn import MTCDN, Condition
from sader.models import BASELINES, AnyModelConfig, baseline_config, model_from_dict
from sader.presets import PRESETS, get_preset

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
class Cost:
    """Multiply-accumulates of one image, in units of 10^9."""

    gmacs_condition: float
    """What is done once per scene: condition network, cloud head, matching."""
    gmacs_evaluation: float
    """One evaluation of the denoiser."""
    gmacs_forward: float
    """One full forward as the paper counts it: condition and one evaluation."""
    gmacs_sample: float
    """The whole default sampling: condition once, every evaluation, every call of the guide."""
    evaluations: int
    """Evaluations of the denoiser in that sampling."""


@dataclass(frozen=True)
class ModelInfo:
    """Everything `sader info MODEL` prints."""

    name: str
    kind: str
    trained: bool
    bands: tuple[str, ...]
    aux_bands: tuple[str, ...]
    parameters: int
    parameters_condition: int
    dates: int
    size: int
    cost: Cost
    sampling: dict[str, Any]
    training_data: str
    licence: str
    card: dict[str, Any] = field(default_factory=dict)
    """The rest of what the checkpoint says about itself."""

    def as_dict(self) -> dict[str, Any]:
        """Return the description as plain values for JSON, the cost beside the rest."""
        values = asdict(self)
        return {**values.pop("cost"), **values}

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, text) for people to read."""
        cost, case = self.cost, f"T={self.dates}, {self.size}x{self.size}"
        how = self.sampling
        resampling = f" + {how['resample_steps']}" if how["resample_steps"] else ""
        guide = f", guide {how['guide']}" if how["resample_steps"] else ""
        share = self.parameters_condition / self.parameters
        times = f"{cost.evaluations} evaluation{'s' * (cost.evaluations != 1)}"
        steps = f"{how['steps']}{resampling} step{'s' * (how['steps'] != 1)}"
        rows = [
            ("model", f"{self.name} ({self.kind}{'' if self.trained else ', untrained'})"),
            ("bands", " ".join(self.bands)),
            ("auxiliary bands", " ".join(self.aux_bands) or "none"),
            ("parameters", f"{self.parameters / 1e6:.2f} M ({share:.0%} in the condition network)"),
            ("GMAC per forward", f"{cost.gmacs_forward:.1f} ({case}; of which condition {cost.gmacs_condition:.1f})"),
            ("GMAC per sample", f"{cost.gmacs_sample:.1f} (condition once, {times} of {cost.gmacs_evaluation:.1f})"),
            ("sampling", f"{steps}, {how['solver']}{guide}, sigma {how['sigma_max']} to {how['sigma_min']}"),
            ("training data", self.training_data),
            ("licence", self.licence),
        ]
        return rows + [(key.replace("_", " "), _plain(value)) for key, value in self.card.items()]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def list_models(*, baselines: bool = False) -> list[ModelEntry]:
    """Return the shipped weights, the presets and, if wanted, the baseline systems of the paper's tables."""
    entries = [_entry(name, "weights", _config(path, read_header(path))) for name, path in shipped().items()]
    entries += [_entry(name, "preset", get_preset(name)) for name in PRESETS]
    return entries + [_entry(name, "baseline", baseline_config(name)) for name in BASELINES if baselines]


def describe(name: str, *, dates: int = 3, size: int = 256) -> ModelInfo | BaselineInfo:
    """Return the description of a preset, a baseline system, shipped weights, a checkpoint file or a hub repository.

    dates, size: the case the cost is counted for, 1 to about 12 dates and any number of pixels.
    """
    card: dict[str, Any] = {}
    config: AnyModelConfig
    if name in BASELINES:
        return describe_baseline(baseline_config(name), dates=dates, size=size)
    if name in PRESETS:
        config, kind = get_preset(name), "preset"
    else:
        known = [*PRESETS, *BASELINES, *shipped()]
        if name not in known and not Path(name).suffix and "/" not in name and not Path(name).is_file():
            raise ConfigError(f"unknown model {name!r}{did_you_mean(name, known)}")
        path = find_checkpoint(name)
        header = read_header(path)
        config, kind, card = _config(path, header), "weights", dict(header.get("card", {}))
    if isinstance(config, BaselineModelConfig):
        return describe_baseline(config, dates=dates, size=size, card=card)
    network = _without_values(config)
    how = {"steps": config.diffusion.steps, **asdict(config.sampling)}
    how |= {"sigma_max": config.diffusion.sigma_max, "sigma_min": config.diffusion.sigma_min}
    untrained = "none: a preset is an untrained network"
    return ModelInfo(
        name=name,
        kind=kind,
        trained=kind == "weights",
        bands=config.network.bands,
        aux_bands=config.network.aux_bands,
        parameters=count_parameters(network),
        parameters_condition=count_parameters(network.condition_net),
        dates=dates,
        size=size,
        cost=count_cost(config, network, dates=dates, size=size),
        sampling=how,
        training_data=_plain(card.pop("training_data", untrained if kind == "preset" else "not stated")),
        licence=_plain(card.pop("licence", LICENCE if kind == "preset" else "not stated")),
        card=card,
    )


def count_cost(config: ModelConfig, network: MTCDN, *, dates: int, size: int) -> Cost:
    """Return the cost of one image (dates, C, size, size); `network` lives on the meta device."""
    bands, aux_bands = len(config.network.bands), len(config.network.aux_bands)
    made: list[Condition] = []

    def condition() -> None:
        aux = on_meta(1, dates, aux_bands, size, size) if aux_bands else None
        made.append(network.condition(on_meta(1, dates, bands, size, size), aux=aux))

    once = count_macs(condition)["total"]
    frames = made[0].mean.shape[1]
    each = count_macs(network, on_meta(1, frames, bands, size, size), on_meta(1), made[0])["total"]
    steps, again = config.diffusion.steps, config.sampling.resample_steps
    evaluations = 2 * steps - 1 if config.sampling.solver == "heun" else steps
    guide_calls = again * (steps - 1)  # the first step is not resampled
    evaluations += guide_calls
    guided = _guide_macs(config, bands, size) if guide_calls else 0
    return Cost(
        gmacs_condition=once / 1e9,
        gmacs_evaluation=each / 1e9,
        gmacs_forward=(once + each) / 1e9,
        gmacs_sample=(once + evaluations * each + guide_calls * guided) / 1e9,
        evaluations=evaluations,
    )


def _guide_macs(config: ModelConfig, bands: int, size: int) -> int:
    """Return the multiply-accumulates of one call of the default guide."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # an untrained guide warns; only its size matters here
        guide = make_guide(config.sampling.guide, bands=bands)
        if guide is None:
            return 0
        missing = on_meta(1, 1, size, size, dtype=torch.bool)
        if isinstance(guide, LearnedGuide):  # it asks for autocast, which the meta device does not know
            return count_macs(guide.network.eval(), on_meta(1, bands, size, size), missing)["total"]
        return count_macs(guide, on_meta(1, bands, size, size), missing, mean=on_meta(1, bands, size, size))["total"]


def _without_values(config: ModelConfig) -> MTCDN:
    """Return the network on the meta device: shapes only, in no time."""
    with torch.device("meta"):
        return MTCDN(config.network).eval()


def _entry(name: str, kind: str, config: AnyModelConfig) -> ModelEntry:
    return ModelEntry(
        name=name,
        kind=kind,
        trained=kind == "weights",
        bands=config.network.bands,
        aux_bands=config.network.aux_bands,
        parameters=(
            count_baseline(config)
            if isinstance(config, BaselineModelConfig)
            else count_parameters(_without_values(config))
        ),
    )


def _config(path: Path, header: dict[str, Any]) -> AnyModelConfig:
    return model_from_dict(header["config"], where=f"{path.name}: config")
