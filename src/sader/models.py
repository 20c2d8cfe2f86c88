"""The rival systems by name: one explicit dictionary. A system is one file with a `SYSTEM` in it."""

from __future__ import annotations

from typing import Any

from sader.baselines.baseline import Rival, RivalModelConfig, System
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

AnyModelConfig = ModelConfig | RivalModelConfig
"""What a checkpoint may hold: SADER's own networks or a rival."""

RIVALS: dict[str, System] = {
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
    if name not in RIVALS:
        raise ConfigError(f"unknown system {name!r}{did_you_mean(name, RIVALS)}")
    return RIVALS[name]


def rival_config(name: str) -> RivalModelConfig:
    """Return the model config of a system at the sizes of the paper's table."""
    return RivalModelConfig(name, get_system(name).config())


def find_config(name: str) -> AnyModelConfig:
    """Return the preset or the rival system called `name`, or raise with the nearest known name."""
    if name in RIVALS:
        return rival_config(name)
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{did_you_mean(name, [*PRESETS, *RIVALS])}")
    return get_preset(name)


def model_from_dict(values: dict[str, Any], *, where: str = "") -> AnyModelConfig:
    """Return the model config that `config.to_dict` wrote: a rival's names its `system`, SADER's does not."""
    if "system" in values:
        return merge(rival_config(str(values["system"])), values, where=where)
    return from_dict(ModelConfig, values, where=where)


def build_rival(config: RivalModelConfig) -> Rival:
    """Return the untrained network that `config` describes."""
    system = get_system(config.system)
    if not isinstance(config.network, system.config):
        raise ConfigError(
            f"{config.system} was given a {type(config.network).__name__}; expected {system.config.__name__}. "
            f"Start from rival_config({config.system!r})."
        )
    rival = system.network(config.network)
    rival.recordable = system.recordable
    return rival
