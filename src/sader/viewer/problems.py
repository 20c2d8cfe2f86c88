"""What can go wrong in the service, and the HTTP status of each: one table, from class to status.

Answers follow RFC 9457 (application/problem+json) with the types that OGC API - Processes names.
"""

from __future__ import annotations

from typing import Any

from sader import errors
from sader.errors import SaderError


class RequestError(SaderError, ValueError):
    """A request that does not say what it must."""


class NotFoundError(SaderError, LookupError):
    """There is no such scene, file or output."""


class NoSuchProcessError(NotFoundError):
    """There is no such process."""


class NoSuchJobError(NotFoundError):
    """There is no such job (any more)."""


class ResultNotReadyError(NotFoundError):
    """The job has not ended yet."""


class GoneError(SaderError, LookupError):
    """The job was dismissed: its results are deleted."""


class ForbiddenError(SaderError, RuntimeError):
    """A path, address or format that the service never opens (no OSError: readers would reword it)."""


class ConflictError(SaderError, RuntimeError):
    """It is there already, or in use."""


class TooLargeError(SaderError, ValueError):
    """More bytes, pixels, bands or files than the server takes."""


class QueueFullError(SaderError, RuntimeError):
    """As many jobs wait as the server takes."""


class WorkerError(SaderError, RuntimeError):
    """The process that did the work ended without an answer."""


STATUS: dict[type[Exception], int] = {
    RequestError: 400,
    NotFoundError: 404,
    GoneError: 410,
    ForbiddenError: 403,
    ConflictError: 409,
    TooLargeError: 413,
    QueueFullError: 429,
    WorkerError: 500,
    errors.ConfigError: 400,
    errors.ShapeError: 422,
    errors.ValueRangeError: 422,
    errors.BandError: 422,
    errors.DataError: 422,
    errors.CheckpointError: 500,
    errors.TrainingError: 500,
    errors.OutputError: 507,
    errors.MissingDependencyError: 501,
    SaderError: 400,
}
"""Class -> status; the nearest base of an error decides."""

_OGC = "http://www.opengis.net/def/exceptions/ogcapi-processes-1/1.0/"
TYPES: dict[type[Exception], str] = {
    NoSuchProcessError: _OGC + "no-such-process",
    NoSuchJobError: _OGC + "no-such-job",
    ResultNotReadyError: _OGC + "result-not-ready",
}


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error; 500 for what is no user's mistake."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def problem(error: Exception) -> dict[str, Any]:
    """Return the body of the answer: what was found, what was wanted, what to do."""
    kind = next((TYPES[base] for base in type(error).__mro__ if base in TYPES), "about:blank")
    known = isinstance(error, SaderError)
    return {
        "type": kind,
        "title": type(error).__name__ if known else "InternalError",
        "status": status_of(error),
        # The words of an unforeseen error may name paths of the server: they go to its terminal, not out.
        "detail": str(error) if known else "the server met an error it did not foresee; its terminal shows it.",
    }


def error_named(name: str, text: str) -> Exception:
    """Return the error of a child process by the name of its class; `WorkerError` for one that nobody foresaw."""
    known = {kind.__name__: kind for kind in (*STATUS, *TYPES)}
    kind = known.get(name, WorkerError)
    return kind(text)
