"""The description of a model that `sader info` prints: bands, cost, sampling, training data and publication.

One description for SADER's presets, the baseline systems, shipped weights and checkpoint files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sader.baselines.baseline import Baseline, BaselineModelConfig, System
from sader.checkpoint import find_checkpoint, read_header, shipped
from sader.errors import ConfigError, did_you_mean
from sader.evaluation.costs import Cost, count_parameters, model_cost, network_on_meta
from sader.models import BASELINES, AnyModelConfig, baseline_config, get_system, model_from_dict
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

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, text) of every line to print."""
        cost, case, about = self.cost, f"T={self.dates}, {self.size}x{self.size}", self.publication
        notes = (
            []
            if self.parameters_condition is None
            else [f"{self.parameters_condition / cost.parameters:.0%} in the condition network"]
        )
        extra = self.parameters_training - cost.parameters
        forward = [case]
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
            rows.append(
                ("published", f"{about.published} ({about.year}); built from published facts, not from its code")
            )
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
        return rows + [(key.replace("_", " "), _text(value)) for key, value in self.card.items()]


def list_models(*, baselines: bool = False) -> list[ModelEntry]:
    """Return the shipped weights, the presets and, if wanted, the baseline systems of the paper's tables."""
    entries = [_entry(name, "weights", _config(path, read_header(path))) for name, path in shipped().items()]
    entries += [_entry(name, "preset", get_preset(name)) for name in PRESETS]
    return entries + [_entry(name, "baseline", baseline_config(name)) for name in BASELINES if baselines]


def describe(name: str, *, dates: int = 3, size: int = 256) -> ModelDescription:
    """Return the description of a preset, a baseline system, shipped weights, a checkpoint file or a hub repository.

    dates, size: the case that costs are counted for, 1 to about 12 dates and any number of pixels.
    """
    config, kind, card = _find(name)
    network = network_on_meta(config)
    system: System | None = None
    sampling: dict[str, Any] | None = None
    if isinstance(config, BaselineModelConfig):
        system, condition = get_system(config.system), None
    else:
        assert not isinstance(network, Baseline)
        condition = count_parameters(network.condition_net)
        diffusion = {key: getattr(config.diffusion, key) for key in ("steps", "sigma_max", "sigma_min")}
        sampling = {**diffusion, **asdict(config.sampling)}
    trained = kind == "weights"
    return ModelDescription(
        name=name if system is None else system.name,
        title=name if system is None else system.label,
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
        publication=None if system is None else _publication(system),
        card=card,
    )


def _find(name: str) -> tuple[AnyModelConfig, str, dict[str, Any]]:
    """Return (config, kind, card) of a model by name or file."""
    if name in BASELINES:
        return baseline_config(name), "baseline", {}
    if name in PRESETS:
        return get_preset(name), "preset", {}
    known = [*PRESETS, *BASELINES, *shipped()]
    if name not in known and not Path(name).suffix and "/" not in name and not Path(name).is_file():
        raise ConfigError(f"unknown model {name!r}{did_you_mean(name, known)}")
    path = find_checkpoint(name)
    header = read_header(path)
    return _config(path, header), "weights", dict(header.get("card", {}))


def _publication(system: System) -> Publication:
    return Publication(
        system.year, system.reference, system.assumed, system.paper_parameters, system.paper_gmacs, system.remarks
    )


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
    steps = f"{how['steps']}{resampling} step{'s' * (how['steps'] != 1)}"
    return f"{steps}, {how['solver']}{guide}, sigma {how['sigma_max']} to {how['sigma_min']}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
