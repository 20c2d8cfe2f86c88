"""Configuration of a training run: model, data, objective and training settings, read from and written to YAML."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from sader.baselines.baseline import AS_PUBLISHED, BaselineModelConfig
from sader.config import merge, parse_override, plain, to_dict
from sader.data.plan import MakerSettings
from sader.data.shards import count_records
from sader.errors import ConfigError, TrainingError
from sader.models import ModelConfig, find_config, get_system, model_from_dict
from sader.training.objective import ObjectiveConfig

AnyModelConfig = ModelConfig | BaselineModelConfig
Schedule = Literal["cosine", "linear", "exponential", "constant"]


@dataclass(frozen=True)
class TrainConfig:
    """How a network is trained. A step is one optimiser step on batch_size * accumulate series."""

    seed: int = 0
    """Seed of the first weights, the batches and the noise; all random numbers follow from (seed, step)."""
    steps: int = 50_000
    """Optimiser steps of the whole run."""
    epochs: float | None = None
    """Length of the run in passes over the training series, instead of `steps`, which follows from the shards."""
    schedule_steps: int | None = None
    """Steps over which the schedule of the rate runs; None: the whole run."""
    max_seconds: float | None = None
    """Limit in seconds, at which the schedule ends as well; resumed runs continue the count. None: no limit."""
    pause_seconds: float | None = None
    """Time after which training stops with a checkpoint, to be resumed later; the schedule does not depend on it."""
    batch_size: int = 16
    """Series per micro-batch."""
    accumulate: int = 1
    """Micro-batches per step, divided among the processes: 1 process and 2 processes give the same result."""
    dates: int = 4
    """Dates T of a batch; some series have fewer and leave slots empty."""
    crop: int = 128
    """Pixels along a side of a crop."""
    optimizer: Literal["muon", "adam", "adamw"] = "muon"
    """"muon": Muon for hidden matrices, AdamW for the rest (SADER); "adam", "adamw" for everything (baselines)."""
    muon_lr: float = 1e-3
    """Peak rate of hidden matrices; 1e-3 Sen2_MTC_New, 1e-4 SEN12MS-CR-TS."""
    adam_lr: float = 3e-4
    """Peak rate of all other parameters."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of Adam's running means; pix2pix and its descendants use (0.5, 0.999)."""
    weight_decay: float = 0.0
    """Weight decay per unit of learning rate; with Muon for hidden matrices only."""
    schedule: Schedule = "cosine"
    """After the warm-up: cosine to 1 %, constant for half of the run and then linear to 0, exponential (times 0.95 in
    each hundredth of the run), or constant."""
    warmup: float = 0.02
    """Share of the run in which the rate rises linearly; 0.01 is the paper's 500 of 50,000 steps."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 = no clipping (paper)."""
    ema_decay: float = 0.999
    """Decay of the averaged weights, which are exported; the paper's .9999 suits runs above 30,000 steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" uses a GPU if there is one."""
    devices: int = 1
    """Processes of a distributed run; must divide `accumulate`."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """"auto": bf16 autocast on a GPU, fp32 on a CPU. "bf16" also speeds up a CPU with bfloat16 instructions."""
    compile: bool = False
    """torch.compile: about 1.5 times faster (benchmarks/RESULTS.md) after three minutes of compiling."""
    cuda_graph: bool = True
    """On one GPU, capture the step as a CUDA graph and replay it (`graph.py`): launching limits small networks."""
    init: str | None = None
    """Weights to start from: a shipped name or a file. None: random."""
    init_anew: bool = False
    """Start from weights of another network: tensors of equal name and shape are copied, the rest is random."""
    half: bool = True
    """Export model.safetensors in float16."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; the last two are kept."""
    checkpoint_seconds: float = 0.0
    """Minimum time between checkpoints: steps of `checkpoint_every` before it has passed write none."""
    log_every: int = 50
    """Steps between lines of the log; the host waits for the device only then."""
    validate_every: int = 1000
    """Steps between validations and image panels; 0 = never."""
    validate_batches: int = 4
    """Batches of a validation."""
    panels: int = 3
    """Series shown in a panel; 0 = no pictures."""

    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "accumulate", "dates", "crop", "devices", "checkpoint_every", "log_every")
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; expected 1 or more.")
        if self.accumulate % self.devices:
            raise ConfigError(
                f"train.accumulate is {self.accumulate} and train.devices {self.devices}; every process takes the same "
                f"number of micro-batches, so use a multiple of {self.devices}."
            )
        if not 0 <= self.warmup < 1 or not 0 <= self.ema_decay < 1:
            raise ConfigError(f"train.warmup {self.warmup} and train.ema_decay {self.ema_decay} must lie in [0, 1).")
        if self.epochs is not None and self.epochs <= 0:
            raise ConfigError(f"train.epochs is {self.epochs}; expected more than 0, or null to count steps.")
        if self.schedule_steps is not None and self.schedule_steps < 1:
            raise ConfigError(f"train.schedule_steps is {self.schedule_steps}; expected 1 or more, or null.")
        for name in ("max_seconds", "pause_seconds"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; expected more than 0, or null for no limit.")


@dataclass(frozen=True)
class DataConfig:
    """Sources of the series and settings of the batches."""

    shards: tuple[str, ...] = ()
    """Shard files or folders of them (sader data pack)."""
    validation: tuple[str, ...] = ()
    """Shards of other places, scored every train.validate_every steps; if empty, panels show training places."""
    draws: int = 1
    """Series of each place in the shards (sader data pack --draws); an epoch takes one of them."""
    maker: MakerSettings = field(default_factory=MakerSettings)
    """Tasks, sources and clouds of the batches."""


@dataclass(frozen=True)
class RunConfig:
    """A whole training run."""

    model: AnyModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)


_PAPER = TrainConfig(
    batch_size=8,
    accumulate=2,
    dates=3,
    crop=256,
    epochs=200.0,
    schedule_steps=50_000,
    warmup=0.01,
    clip=0.0,
    ema_decay=0.9999,
    precision="fp32",
    checkpoint_every=100,
    checkpoint_seconds=600.0,
)
PAPER_TRAINING = {
    "sen2_mtc_new": _PAPER,
    "sen12mscrts_ea": dataclasses.replace(_PAPER, muon_lr=1e-4, batch_size=1, accumulate=1, epochs=500.0),
}
"""Training settings of the paper's presets: Muon 1e-3 or 1e-4, Adam 3e-4, rates rising over 500 steps and falling along
a cosine to 1 % at step 50,000, fp32, no clipping."""

FREE_KEYS = frozenset(
    f"train.{key}"
    for key in (
        *("checkpoint_every", "checkpoint_seconds", "log_every", "validate_every", "validate_batches", "panels"),
        *("devices", "half", "cuda_graph", "pause_seconds"),
    )
)
"""Keys that may differ when a run is resumed: none of them changes the weights."""


def resolve(base: str | Path | AnyModelConfig, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the run config of a preset or baseline system, or of a YAML file with `base:`, with overrides on top.

    A YAML file holds `base: NAME` (optional) and any of model, train, objective, data with the changed keys. Overrides
    are written "a.b=value".
    """
    changes: dict[str, Any] = {}
    if isinstance(base, ModelConfig | BaselineModelConfig):
        model = base
    elif str(base).endswith((".yaml", ".yml")):
        changes = read_yaml(Path(base))
        model = find_config(changes.pop("base")) if "base" in changes else ModelConfig()
    else:
        model = find_config(str(base))
    for text in overrides:
        changes = _joined(changes, parse_override(text))
    train = changes.get("train")
    if isinstance(train, dict) and "steps" in train:
        changes = _joined({"train": {"epochs": None}}, changes)
    return merge(recipe(model), changes)


def recipe(model: AnyModelConfig) -> RunConfig:
    """Return the default run of a model: the published settings of a baseline or of one of the paper's presets."""
    if isinstance(model, BaselineModelConfig):
        return RunConfig(model=model, train=TrainConfig(**{**AS_PUBLISHED, **get_system(model.system).train}))
    if model.name not in PAPER_TRAINING:
        return RunConfig(model=model)
    # Sen2_MTC_New is augmented by flips and rotations, SEN12MS-CR-TS is not.
    maker = MakerSettings.paper(symmetries=model.name == "sen2_mtc_new")
    return RunConfig(model, PAPER_TRAINING[model.name], data=DataConfig(maker=maker))


def in_steps(train: TrainConfig, series: float) -> TrainConfig:
    """Return the settings with the steps that follow from `epochs`, where given, and the number of series."""
    if train.epochs is None:
        return train
    steps = max(1, round(train.epochs * math.ceil(series / (train.batch_size * train.accumulate))))
    return dataclasses.replace(train, steps=steps)


def with_steps(config: RunConfig) -> RunConfig:
    """Return the config with the steps that follow from train.epochs and the number of series in the shards."""
    if config.train.epochs is None:
        return config
    series = count_records(config.data.shards) / config.data.draws
    return dataclasses.replace(config, train=in_steps(config.train, series))


def load_run_config(path: Path) -> RunConfig:
    """Return the config a run folder was started with."""
    values = read_yaml(path)
    model = values.get("model")
    if isinstance(model, dict) and "system" in model:
        return merge(RunConfig(model=model_from_dict(model, where="model")), values)
    return merge(RunConfig(), values)


def save_run_config(config: Any) -> bytes:
    """Return the resolved config as YAML."""
    return yaml.safe_dump(plain(to_dict(config)), sort_keys=False).encode()


def differing_keys(first: Any, second: Any) -> list[str]:
    """Return "key: a -> b" for every value in which the configs differ, except `FREE_KEYS`."""
    a, b = flat(plain(to_dict(first))), flat(plain(to_dict(second)))
    keys = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key) and key not in FREE_KEYS)
    return [f"{key}: {a.get(key)} -> {b.get(key)}" for key in keys]


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping a YAML file holds."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror}. Give a preset or a file that exists.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; expected a mapping such as train: {{steps: 1000}}.")
    return values


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `first` updated with `second`, mapping by mapping."""
    result = {key: _joined({}, value) if isinstance(value, dict) else value for key, value in first.items()}
    for key, value in second.items():
        if isinstance(value, dict):
            under = result.get(key)
            result[key] = _joined(under if isinstance(under, dict) else {}, value)
        else:
            result[key] = value
    return result


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their keys in the notation of --set, such as train.steps."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
