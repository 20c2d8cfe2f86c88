"""The baseline systems by name: one explicit dictionary. A system is one file with a `SYSTEM` in it."""

from __future__ import annotations

from typing import Any

from sader.baselines.baseline import Baseline, BaselineModelConfig, System
from sader.baselines.systems import (
    ae,
    crtsnet,
    ctgan,
    cyclegan,
    ddpmcr,
    diffcr,
    emrdm,
    mcgan,
    pix2pix,
    pmaa,
    seqdms,
    stgan,
    uncrtaints,
)
from sader.config import ModelConfig, from_dict, merge
from sader.errors import ConfigError, did_you_mean
from sader.presets import PRESETS, get_preset

AnyModelConfig = ModelConfig | BaselineModelConfig
"""What a checkpoint may hold: SADER's own networks or a baseline."""

BASELINES: dict[str, System] = {
    system.name: system
    for system in (
        mcgan.SYSTEM,
        pix2pix.SYSTEM,
        ae.SYSTEM,
        cyclegan.SYSTEM,
        stgan.SYSTEM,
        ctgan.SYSTEM,
        pmaa.SYSTEM,
        crtsnet.SYSTEM,
        uncrtaints.SYSTEM,
        ddpmcr.SYSTEM,
        diffcr.SYSTEM,
        seqdms.SYSTEM,
        emrdm.SYSTEM,
    )
}  # fmt: skip
"""In the order of the paper's tables."""


def get_system(name: str) -> System:
    """Return the system called `name`, or raise with the nearest known name."""
    if name not in BASELINES:
        raise ConfigError(f"unknown system {name!r}{did_you_mean(name, BASELINES)}")
    return BASELINES[name]


def baseline_config(name: str) -> BaselineModelConfig:
    """Return the model config of a system at the sizes of the paper's table."""
    return BaselineModelConfig(name, get_system(name).config())


def find_config(name: str) -> AnyModelConfig:
    """Return the preset or the baseline system called `name`, or raise with the nearest known name."""
    if name in BASELINES:
        return baseline_config(name)
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{did_you_mean(name, [*PRESETS, *BASELINES])}")
    return get_preset(name)


def model_from_dict(values: dict[str, Any], *, where: str = "") -> AnyModelConfig:
    """Return the model config that `config.to_dict` wrote: a baseline's names its `system`, SADER's does not."""
    if "system" in values:
        return merge(baseline_config(str(values["system"])), values, where=where)
    return from_dict(ModelConfig, values, where=where)


def build_baseline(config: BaselineModelConfig) -> Baseline:
    """Return the untrained network that `config` describes."""
    system = get_system(config.system)
    if not isinstance(config.network, system.config):
        raise ConfigError(
            f"{config.system} was given a {type(config.network).__name__}; expected {system.config.__name__}. "
            f"Start from baseline_config({config.system!r})."
        )
    baseline = system.network(config.network)
    baseline.recordable = system.recordable
    return baseline
