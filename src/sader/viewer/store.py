"""Jobs in SQLite: they outlive the server. Only plain values; the work itself is in `sader.viewer.runner`."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sader.errors import OutputError
from sader.viewer.problems import NoSuchJobError, QueueFullError

STATES = ("accepted", "running", "successful", "failed", "dismissed")
_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, status TEXT NOT NULL, progress INTEGER NOT NULL, message TEXT NOT NULL,
    request TEXT NOT NULL, outcome TEXT, notices TEXT NOT NULL, attempts INTEGER NOT NULL,
    created REAL NOT NULL, started REAL, finished REAL, updated REAL NOT NULL
)"""
_COLUMNS = "id, status, progress, message, request, outcome, notices, attempts, created, started, finished, updated"


@dataclass(frozen=True)
class Job:
    """One job as it stands."""

    id: str
    status: str
    progress: int
    message: str
    request: dict[str, Any]
    outcome: dict[str, Any] | None
    """{"report", "outputs"} of a successful job, {"error", "text"} of a failed one."""
    notices: list[str]
    attempts: int
    """How often it was started; more than once when the server was stopped in between."""
    created: float
    started: float | None
    finished: float | None
    updated: float

    @property
    def ended(self) -> bool:
        return self.status in ("successful", "failed", "dismissed")


class JobStore:
    """The table of jobs; every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(_TABLE)
        except sqlite3.Error as error:
            raise OutputError(f"cannot use {path}: {error}. Move it away; a new one is made.") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, request: dict[str, Any], *, most: int) -> Job:
        """Return a new job that waits; refuse it when `most` jobs wait or run already."""
        now = time.time()
        name = str(uuid.uuid4())
        with self._lock:
            if self.open_count() >= most:
                raise QueueFullError(
                    f"{most} jobs wait or run already, which is all this server takes. Try again later."
                )
            self._db.execute(
                f"INSERT INTO jobs ({_COLUMNS}) "
                "VALUES (?, 'accepted', 0, 'waiting', ?, NULL, '[]', 0, ?, NULL, NULL, ?)",
                (name, json.dumps(request), now, now),
            )
            return self.get(name)

    def get(self, name: str) -> Job:
        with self._lock:
            row = self._db.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (name,)).fetchone()
        if row is None:
            raise NoSuchJobError(f"there is no job {name[:80]}; it never was, or its results have expired.")
        return _job(row)

    def select(self, *, status: str | None = None, limit: int = 1000, offset: int = 0) -> list[Job]:
        """Return the jobs, newest first."""
        where, values = ("WHERE status = ?", [status]) if status else ("", [])
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM jobs {where} ORDER BY created DESC, rowid DESC LIMIT ? OFFSET ?",
                (*values, limit, offset),
            ).fetchall()
        return [_job(row) for row in rows]

    def open_count(self) -> int:
        """Return how many jobs wait or run."""
        with self._lock:
            row = self._db.execute("SELECT count(*) FROM jobs WHERE status IN ('accepted', 'running')").fetchone()
        return int(row[0])

    def take(self) -> Job | None:
        """Return the job that has waited longest, now running; None where none waits."""
        now = time.time()
        with self._lock:
            row = self._db.execute(
                "UPDATE jobs SET status = 'running', attempts = attempts + 1, started = coalesce(started, ?), "
                "updated = ?, message = 'starting' WHERE id = (SELECT id FROM jobs WHERE status = 'accepted' "
                "ORDER BY created, rowid LIMIT 1) RETURNING id",
                (now, now),
            ).fetchone()
            return None if row is None else self.get(row[0])

    def advance(self, name: str, progress: int, message: str) -> None:
        """Note how far a running job is; progress never goes back."""
        with self._lock:
            self._db.execute(
                "UPDATE jobs SET progress = max(progress, ?), message = ?, updated = ? "
                "WHERE id = ? AND status = 'running'",
                (progress, message, time.time(), name),
            )

    def note(self, name: str, text: str) -> None:
        """Keep what the user should know."""
        with self._lock:
            job = self.get(name)
            if text not in job.notices:
                self._db.execute("UPDATE jobs SET notices = ? WHERE id = ?", (json.dumps([*job.notices, text]), name))

    def end(self, name: str, status: str, message: str, outcome: dict[str, Any] | None = None) -> bool:
        """End a job that has not ended; return whether this call did it."""
        now = time.time()
        with self._lock:
            done = self._db.execute(
                "UPDATE jobs SET status = ?, message = ?, outcome = ?, finished = ?, updated = ?, "
                "progress = CASE WHEN ? = 'successful' THEN 100 ELSE progress END "
                "WHERE id = ? AND status IN ('accepted', 'running')",
                (status, message, None if outcome is None else json.dumps(outcome), now, now, status, name),
            )
            return done.rowcount == 1

    def dismiss(self, name: str) -> Job:
        """Mark a job as dismissed, whatever it did; return it as it was before."""
        with self._lock:
            before = self.get(name)
            self._db.execute(
                "UPDATE jobs SET status = 'dismissed', message = 'dismissed', outcome = NULL, updated = ?, "
                "finished = coalesce(finished, ?) WHERE id = ?",
                (time.time(), time.time(), name),
            )
            return before

    def restart(self, *, most_attempts: int) -> None:
        """Queue again what ran when the server stopped; give up on what stopped it too often."""
        with self._lock:
            for job in self.select(status="running"):
                if job.attempts >= most_attempts:
                    text = f"the server stopped {job.attempts} times during this job; it is not tried again."
                    self.end(job.id, "failed", text, {"error": "WorkerError", "text": text})
            self._db.execute(
                "UPDATE jobs SET status = 'accepted', message = 'waiting again after a restart', updated = ? "
                "WHERE status = 'running'",
                (time.time(),),
            )

    def expire(self, before: float) -> list[str]:
        """Delete the jobs that ended before a time; return their names."""
        with self._lock:
            rows = self._db.execute(
                "DELETE FROM jobs WHERE finished IS NOT NULL AND finished < ? RETURNING id", (before,)
            ).fetchall()
        return [row[0] for row in rows]


def _job(row: tuple[Any, ...]) -> Job:
    name, status, progress, message, request, outcome, notices, *rest = row
    found = None if outcome is None else json.loads(outcome)
    return Job(name, status, progress, message, json.loads(request), found, json.loads(notices), *rest)
