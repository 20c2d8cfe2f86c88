"""Nested config dataclasses to and from plain dictionaries; unknown keys raise an error that names them.

`option` declares a field that is also an option of the command line.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sader.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")


class NetworkConfig(Protocol):
    """What the config of every network states, SADER's and those of baselines.

    bands: input and output bands; aux_bands: input-only bands; multiple: height and width are padded to a multiple of
    this; states_error: the network estimates its own error; matches_dates: the dates are matched to a reference date;
    needs_all_bands: every band must be given.
    """

    @property
    def bands(self) -> tuple[str, ...]: ...
    @property
    def aux_bands(self) -> tuple[str, ...]: ...
    @property
    def multiple(self) -> int: ...
    @property
    def states_error(self) -> bool: ...
    @property
    def matches_dates(self) -> bool: ...
    @property
    def needs_all_bands(self) -> bool: ...


def to_dict(config: Any) -> dict[str, Any]:
    """Return the config as plain dictionaries and lists for JSON or YAML."""
    return typing.cast(dict[str, Any], dataclasses.asdict(config))


def plain(value: Any) -> Any:
    """Return nested values for JSON and YAML: lists for tuples, None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def option(
    help: str,
    panel: str | None = None,
    *names: str,
    default: Any = None,
    kind: Any = None,
    argument: bool = False,
    **limits: Any,
) -> Any:
    """Return a field that is an option of the command line, or a positional argument.

    names: where they are not that of the field. kind: its type there, where Python takes more; None = that of the
    field. limits: min and max.
    """
    facts = {"help": help, "panel": panel, "names": names, "kind": kind, "argument": argument, "limits": limits}
    return dataclasses.field(default=default, metadata=facts)


def check_limits(request: DataclassInstance) -> None:
    """Raise for a value below the `min` of its `option`."""
    for one in dataclasses.fields(request):
        value, least = getattr(request, one.name), one.metadata.get("limits", {}).get("min")
        if value is not None and least is not None and value < least:
            raise ConfigError(f"{one.name} is {value}; expected {least} or more.")


def from_dict(kind: type[D], values: dict[str, Any], *, where: str = "") -> D:
    """Return a `kind` from a plain dictionary; missing keys take their defaults, unknown ones are an error."""
    return merge(kind(), values, where=where)


def merge(config: D, changes: dict[str, Any], *, where: str = "") -> D:
    """Return `config` with the (possibly nested) changes; `where` is the key path for error messages."""
    if not isinstance(changes, dict):
        raise ConfigError(f"{where or 'config'} is {changes!r}; expected a mapping of keys to values.")
    kind = type(config)
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(config)]
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
    return dataclasses.replace(config, **new)


def parse_override(text: str) -> dict[str, Any]:
    """Return "a.b=value" as a nested dictionary; the value is parsed as YAML."""
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
    # bool is a subclass of int in Python; in a config it is a mistake.
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
