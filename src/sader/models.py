"""Models by name: presets of SADER and the baseline systems.

A baseline system is one module of `sader.baselines.systems` that defines `SYSTEM`. It is imported when it is first
needed, so that SADER's own models load without any baseline.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, overload

from sader.config import from_dict, merge
from sader.errors import ConfigError, did_you_mean
from sader.method.diffusion import Denoiser
from sader.model.mtcdn import MTCDN
from sader.presets import PRESETS, ModelConfig, get_preset

if TYPE_CHECKING:
    from sader.baselines.baseline import Baseline, BaselineModelConfig, System

    AnyModelConfig = ModelConfig | BaselineModelConfig
    """Configs that a checkpoint can hold: SADER's own networks or a baseline."""
    AnyModel = Denoiser | Baseline
else:  # names for annotations only: importing baselines here would load them with every model
    AnyModelConfig = AnyModel = object

BASELINES = (
    "mcgan",
    "pix2pix",
    "ae",
    "cyclegan",
    "stgan",
    "ctgan",
    "pmaa",
    "crtsnet",
    "uncrtaints",
    "ddpmcr",
    "diffcr",
    "seqdms",
    "emrdm",
)
"""Names of the baseline systems, in the order of the paper's tables."""


def get_system(name: str) -> System:
    """Return the baseline system called `name`, or raise with the nearest known name."""
    if name not in BASELINES:
        raise ConfigError(f"unknown system {name!r}{did_you_mean(name, BASELINES)}")
    system: System = importlib.import_module(f"sader.baselines.systems.{name}").SYSTEM
    return system


def baseline_config(name: str) -> BaselineModelConfig:
    """Return the model config of a system at the sizes of the paper's table."""
    from sader.baselines.baseline import BaselineModelConfig

    return BaselineModelConfig(name, get_system(name).config())


def find_config(name: str) -> AnyModelConfig:
    """Return the preset or the baseline system called `name`, or raise with the nearest known name."""
    if name in BASELINES:
        return baseline_config(name)
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{did_you_mean(name, [*PRESETS, *BASELINES])}")
    return get_preset(name)


def model_from_dict(values: dict[str, Any], *, where: str = "") -> AnyModelConfig:
    """Return the model config from the dictionary of `config.to_dict`; only those of baselines have a `system`."""
    if "system" in values:
        return merge(baseline_config(str(values["system"])), values, where=where)
    return from_dict(ModelConfig, values, where=where)


@overload
def build_model(config: ModelConfig) -> Denoiser: ...
@overload
def build_model(config: BaselineModelConfig) -> Baseline: ...
@overload
def build_model(config: AnyModelConfig) -> AnyModel: ...
def build_model(config: AnyModelConfig) -> AnyModel:
    """Return the untrained model of a config: SADER's `Denoiser`, or a `Baseline`."""
    if isinstance(config, ModelConfig):
        return Denoiser(MTCDN(config.network), config.diffusion)
    return build_baseline(config)


def build_baseline(config: BaselineModelConfig) -> Baseline:
    """Return the untrained network of a baseline's config."""
    system = get_system(config.system)
    if not isinstance(config.network, system.config):
        raise ConfigError(
            f"{config.system} was given a {type(config.network).__name__}; expected {system.config.__name__}. "
            f"Start from baseline_config({config.system!r})."
        )
    baseline = system.network(config.network)
    baseline.capturable = system.capturable
    return baseline
