"""Errors of the service and the HTTP status of each.

Responses follow RFC 9457 (application/problem+json) with the types defined by OGC API - Processes.
"""

from __future__ import annotations

import re
from typing import Any

from sader import errors
from sader.errors import SaderError


class RequestError(SaderError, ValueError):
    """A request that is incomplete or contradictory."""


class NotFoundError(SaderError, LookupError):
    """There is no such scene, file or output."""


class NoSuchProcessError(NotFoundError):
    """There is no such process."""


class NoSuchJobError(NotFoundError):
    """There is no such job, or it has expired."""


class ResultNotReadyError(NotFoundError):
    """The job has not ended yet."""


class GoneError(SaderError, LookupError):
    """The job was dismissed and its results are deleted."""


class ForbiddenError(SaderError, RuntimeError):
    """A path, address or format that the service does not open (not an OSError: readers would wrap it)."""


class ConflictError(SaderError, RuntimeError):
    """The resource exists already, or is in use."""


class TooLargeError(SaderError, ValueError):
    """More bytes, pixels, bands or files than the server accepts."""


class QueueFullError(SaderError, RuntimeError):
    """The queue of jobs is full."""


class WorkerError(SaderError, RuntimeError):
    """A worker process ended without an answer."""


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
    errors.ClusterError: 503,
    errors.CheckpointError: 500,
    errors.TrainingError: 500,
    errors.OutputError: 507,
    errors.MissingDependencyError: 501,
    SaderError: 400,
}
"""Error class -> HTTP status; the nearest base class applies."""

_OGC = "http://www.opengis.net/def/exceptions/ogcapi-processes-1/1.0/"
TYPES: dict[type[Exception], str] = {
    NoSuchProcessError: _OGC + "no-such-process",
    NoSuchJobError: _OGC + "no-such-job",
    ResultNotReadyError: _OGC + "result-not-ready",
}


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error; 500 for unexpected ones."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def problem(error: Exception) -> dict[str, Any]:
    """Return the body of an error response."""
    known = isinstance(error, SaderError)
    return {
        "type": next((TYPES[base] for base in type(error).__mro__ if base in TYPES), "about:blank"),
        "title": type(error).__name__ if known else "InternalError",
        "status": status_of(error),
        # The message of an unexpected error may contain paths of the server: it is printed on its terminal only.
        "detail": str(error) if known else "unexpected error; details are in the server's terminal.",
    }


def error_named(name: str, text: str) -> Exception:
    """Return the error of a worker process by its class name; `WorkerError` for an unexpected class."""
    known = {kind.__name__: kind for kind in (*STATUS, *TYPES)}
    return known.get(name, WorkerError)(text)


REWORDED = (
    (r"rio edit-info --nodata VALUE FILE sets a missing one", "set one where it is missing"),
    (r"mark them: rio edit-info --nodata 0 FILE", "set the nodata value of the file to 0"),
    (r" \(rio edit-info --transform\)", ""),
    (r"run the same command again: it continues from there", "start the job again"),
    (r" --min-count 1 writes nodata instead, --count shows where\.", ""),
    (r"from the same command and inputs", "from the same settings and inputs"),
    (r"(?<![\w-])--(?=[a-z])", ""),
)
"""Words of the command line -> words for clients of the API and the page, where an option is an input of that name."""


def for_clients(text: str) -> str:
    """Return a message of the command line for clients of the API."""
    for words, instead in REWORDED:
        text = re.sub(words, instead, text)
    return text
