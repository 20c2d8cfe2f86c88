"""Frozen run configs: nested dataclasses to and from plain dictionaries, with unknown keys refused by name."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sader.errors import ConfigError, did_you_mean
from sader.method.diffusion import DiffusionConfig
from sader.model.mtcdn import MTCDNConfig

D = TypeVar("D")


@dataclass(frozen=True)
class SamplingConfig:
    """How a checkpoint is sampled unless the caller says otherwise."""

    solver: str = "euler"
    """"euler" (paper) or "heun"."""
    resample_steps: int = 0
    """Resamplings per step: 1 is the paper's "+1", 0 none."""
    resample_threshold: float = 0.2
    """Normalised disagreement above which a pixel is a candidate: 0.2 Sen2_MTC_New, 0.5 SEN12MS-CR-TS."""
    guide: str = "lowpass"
    """Guide of the resampling: mae, conv, mean, lowpass or none."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything needed to rebuild a model; stored inside its checkpoint."""

    name: str = "sen2_mtc_new"
    network: MTCDNConfig = field(default_factory=MTCDNConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def default_steps(self) -> tuple[int, int]:
        """Sampling steps and resamplings per step."""
        return self.diffusion.steps, self.sampling.resample_steps

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy; a dictionary given for a nested config changes only its keys."""
        full = {}
        for key, value in changes.items():
            if key not in {f.name for f in dataclasses.fields(self)}:
                raise ConfigError(f"unknown key {key}{did_you_mean(key, (f.name for f in dataclasses.fields(self)))}")
            current = getattr(self, key)
            full[key] = merge(current, value, where=key) if isinstance(value, dict) else value
        return dataclasses.replace(self, **full)


def to_dict(config: Any) -> dict[str, Any]:
    """Return the config as plain dictionaries and lists, ready for JSON or YAML."""
    return typing.cast(dict[str, Any], dataclasses.asdict(config))


def from_dict(kind: type[D], values: dict[str, Any], *, where: str = "") -> D:
    """Return a `kind` from a plain dictionary; missing keys take their defaults, unknown ones are an error."""
    return merge(kind(), values, where=where)


def merge(config: D, changes: dict[str, Any], *, where: str = "") -> D:
    """Return `config` with the (possibly nested) changes; `where` names the place in error messages."""
    if not isinstance(changes, dict):
        raise ConfigError(f"{where or 'config'} is {changes!r}; expected a mapping of keys to values.")
    kind = type(config)
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(config)]  # type: ignore[arg-type]
    new: dict[str, Any] = {}
    for key, value in changes.items():
        path = f"{where}.{key}" if where else key
        if key not in names:
            raise ConfigError(f"unknown key {path}{did_you_mean(key, names)}")
        current = getattr(config, key)
        if dataclasses.is_dataclass(current) and not isinstance(current, type):
            new[key] = merge(current, value, where=path)
        else:
            new[key] = _coerce(value, hints[key], path)
    return dataclasses.replace(config, **new)  # type: ignore[type-var]


def parse_override(text: str) -> dict[str, Any]:
    """Return the nested dictionary that "a.b=value" stands for; the value is read as YAML."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override; expected key=value, such as train.lr=2e-4.")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {text!r} is not YAML; expected such as 4, 2e-4, [1, 2] or a word.") from error
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return typing.cast(dict[str, Any], parsed)


def _coerce(value: Any, hint: Any, path: str) -> Any:
    """Return `value` as the annotated type, or raise: YAML gives lists for tuples and "2e-4" for a number."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _coerce(value, next(o for o in options if o is not type(None)), path)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f"{path} is {value!r}; expected one of {', '.join(map(repr, typing.get_args(hint)))}.")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} is {value!r}; expected a list.")
        return _coerce_items(value, typing.get_args(hint), path)
    if hint is Any or not isinstance(hint, type):
        return value
    # For Python True is an int; in a config it is a mistake.
    if isinstance(value, bool) and hint is not bool:
        raise ConfigError(f"{path} is {value!r}; expected {hint.__name__}.")
    if hint is float and isinstance(value, int | str):
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, hint):
        return value
    raise ConfigError(f"{path} is {value!r}; expected {hint.__name__}.")


def _coerce_items(values: list[Any] | tuple[Any, ...], hints: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """Return the items of a tuple as annotated: tuple[A, ...] of any length, tuple[A, B] of exactly that one."""
    if hints[1:] == (...,):
        return tuple(_coerce(value, hints[0], path) for value in values)
    if len(values) != len(hints):
        wanted = ", ".join("list" if typing.get_origin(h) is tuple else getattr(h, "__name__", str(h)) for h in hints)
        raise ConfigError(f"{path} is {values!r}; expected {len(hints)} items ({wanted}).")
    return tuple(_coerce(value, hint, path) for value, hint in zip(values, hints, strict=True))
