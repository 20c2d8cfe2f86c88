"""The errors of user mistakes, and `require` for optional packages.

Each message states what was found, what was expected and what to do, in that order. The command line prints the
message and exits with status 2; it never shows a traceback for a `SaderError`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType


def printable(text: str) -> str:
    """Return text for a terminal: control characters and bytes that are not UTF-8 are shown as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class SaderError(Exception):
    """Base of all errors that name a mistake in the input, not in the program."""


class ShapeError(SaderError, ValueError):
    """An array has the wrong number of axes or the wrong size along one."""


class ValueRangeError(SaderError, ValueError):
    """An array holds values that cannot be what they claim (NaN, negative reflectance, no valid pixel)."""


class BandError(SaderError, ValueError):
    """Bands asked for and bands at hand do not fit."""


class ConfigError(SaderError, ValueError):
    """An unknown key, preset or option, or a value outside its range."""


class CheckpointError(SaderError, RuntimeError):
    """A weights file is missing, damaged or of another kind."""


class DataError(SaderError, RuntimeError):
    """A dataset, shard or scene cannot be read or used."""


class ClusterError(DataError):
    """A dask cluster is lost; the same command can continue on another one."""


class OutputError(SaderError, OSError):
    """A result cannot be written where it should go."""


class TrainingError(SaderError, RuntimeError):
    """Training cannot start or go on."""


class MissingDependencyError(SaderError, ImportError):
    """An optional package is needed and not installed."""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Return the imported optional `module`, or raise with the exact install command.

    `purpose` is the start of the sentence: "reading GeoTIFF" gives "reading GeoTIFF needs rasterio. Run: ...".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        raise MissingDependencyError(f'{purpose} needs {name}. Run: pip install "sader[{extra}]"') from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest known word, or a list of what is known."""
    options = sorted(known)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(options)}"


def listed(names: Sequence[str], *, most: int = 16) -> str:
    """Return names with commas between them, and how many are left out."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise a `ConfigError` unless `name` is one of the known ones; what: what it names, such as "metric"."""
    if name not in known:
        raise ConfigError(f"unknown {what} {name!r}{did_you_mean(name, known)}")
