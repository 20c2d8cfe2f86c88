"""Jobs: a table in SQLite that survives a restart, and the thread that runs them one at a time in a worker process."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sader.errors import OutputError, SaderError
from sader.viewer.problems import NoSuchJobError, QueueFullError, WorkerError
from sader.viewer.scenes import SceneStore
from sader.viewer.security.folder import DataFolder
from sader.viewer.security.proxy import Proxy
from sader.viewer.settings import ServeSettings
from sader.viewer.worker.process import WorkerProcess

MOST_ATTEMPTS = 3
"""Starts of a job during which the server may be stopped before the job fails."""
RETRY_S = 1.0
"""Seconds until the next attempt after an error of the queue."""
SWEEP_S = 60.0
"""Seconds between deletions of expired results and uploads."""
_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, status TEXT NOT NULL, progress INTEGER NOT NULL, message TEXT NOT NULL,
    request TEXT NOT NULL, outcome TEXT, notices TEXT NOT NULL, attempts INTEGER NOT NULL,
    created REAL NOT NULL, started REAL, finished REAL, updated REAL NOT NULL
)"""
_COLUMNS = "id, status, progress, message, request, outcome, notices, attempts, created, started, finished, updated"


@dataclass(frozen=True)
class Job:
    """The state of one job."""

    id: str
    status: str
    progress: int
    message: str
    request: dict[str, Any]
    outcome: dict[str, Any] | None
    """{"report", "outputs"} of a successful job, {"error", "text"} of a failed one."""
    notices: list[str]
    attempts: int
    """Number of starts; more than one where the server was stopped in between."""
    created: float
    started: float | None
    finished: float | None
    updated: float

    @property
    def ended(self) -> bool:
        return self.status in ("successful", "failed", "dismissed")


class JobStore:
    """The table of jobs; thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(_TABLE)
        except sqlite3.Error as error:
            raise OutputError(f"cannot use {path}: {error}. Move it away; a new file is created.") from error

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a statement."""
        try:
            with self._lock:
                return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise OutputError(f"cannot use the table of jobs: {error}. Free space on the server's disk.") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, request: dict[str, Any], *, most: int) -> Job:
        """Return a new waiting job; raise where `most` jobs wait or run already."""
        now = time.time()
        name = str(uuid.uuid4())
        with self._lock:
            if self.open_count() >= most:
                raise QueueFullError(f"{most} jobs wait or run already, the limit of this server. Try again later.")
            self._execute(
                f"INSERT INTO jobs ({_COLUMNS}) "
                "VALUES (?, 'accepted', 0, 'waiting', ?, NULL, '[]', 0, ?, NULL, NULL, ?)",
                (name, json.dumps(request), now, now),
            )
            return self.get(name)

    def get(self, name: str) -> Job:
        rows = self._execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (name,))
        if not rows:
            raise NoSuchJobError(f"there is no job {name[:80]}; it may have expired.")
        return _job(rows[0])

    def select(self, *, status: str | None = None, limit: int = 1000, offset: int = 0) -> list[Job]:
        """Return the jobs, newest first."""
        where, values = ("WHERE status = ?", [status]) if status else ("", [])
        order = "ORDER BY created DESC, rowid DESC LIMIT ? OFFSET ?"
        rows = self._execute(f"SELECT {_COLUMNS} FROM jobs {where} {order}", (*values, limit, offset))
        return [_job(row) for row in rows]

    def open_count(self) -> int:
        """Return the number of jobs that wait or run."""
        return int(self._execute("SELECT count(*) FROM jobs WHERE status IN ('accepted', 'running')")[0][0])

    def take(self) -> Job | None:
        """Mark the job that has waited longest as running and return it; None where none waits."""
        now = time.time()
        with self._lock:
            rows = self._execute(
                "UPDATE jobs SET status = 'running', attempts = attempts + 1, started = coalesce(started, ?), "
                "updated = ?, message = 'starting' WHERE id = (SELECT id FROM jobs WHERE status = 'accepted' "
                "ORDER BY created, rowid LIMIT 1) RETURNING id",
                (now, now),
            )
            return self.get(rows[0][0]) if rows else None

    def advance(self, name: str, progress: int, message: str) -> None:
        """Store the progress of a running job; it never decreases."""
        self._execute(
            "UPDATE jobs SET progress = max(progress, ?), message = ?, updated = ? WHERE id = ? AND status = 'running'",
            (progress, message, time.time(), name),
        )

    def note(self, name: str, text: str) -> None:
        """Store a notice for the user, each text once."""
        with self._lock:
            job = self.get(name)
            if text not in job.notices:
                self._execute("UPDATE jobs SET notices = ? WHERE id = ?", (json.dumps([*job.notices, text]), name))

    def end(self, name: str, status: str, message: str, outcome: dict[str, Any] | None = None) -> bool:
        """End a job that waits or runs; return whether it did."""
        now = time.time()
        ended = self._execute(
            "UPDATE jobs SET status = ?, message = ?, outcome = ?, finished = ?, updated = ?, "
            "progress = CASE WHEN ? = 'successful' THEN 100 ELSE progress END "
            "WHERE id = ? AND status IN ('accepted', 'running') RETURNING id",
            (status, message, None if outcome is None else json.dumps(outcome), now, now, status, name),
        )
        return bool(ended)

    def dismiss(self, name: str) -> Job:
        """Mark a job as dismissed; return its state before."""
        with self._lock:
            before = self.get(name)
            self._execute(
                "UPDATE jobs SET status = 'dismissed', message = 'dismissed', outcome = NULL, updated = ?, "
                "finished = coalesce(finished, ?) WHERE id = ?",
                (time.time(), time.time(), name),
            )
            return before

    def restart(self, *, most_attempts: int) -> None:
        """Queue the jobs again that ran when the server stopped; those of `most_attempts` starts fail."""
        with self._lock:
            for job in self.select(status="running"):
                if job.attempts >= most_attempts:
                    text = f"the server stopped {job.attempts} times during this job; it is not started again."
                    self.end(job.id, "failed", text, {"error": "WorkerError", "text": text})
            self._execute(
                "UPDATE jobs SET status = 'accepted', message = 'waiting again after a restart', updated = ? "
                "WHERE status = 'running'",
                (time.time(),),
            )

    def expire(self, before: float) -> list[str]:
        """Delete the jobs that ended before a time; return their ids."""
        expired = "DELETE FROM jobs WHERE finished IS NOT NULL AND finished < ? RETURNING id"
        return [row[0] for row in self._execute(expired, (before,))]


class JobRunner:
    """The queue and the thread that runs its jobs."""

    def __init__(
        self, settings: ServeSettings, folder: DataFolder, store: JobStore, scenes: SceneStore, proxy: Proxy
    ) -> None:
        self.settings, self.folder, self.store, self.scenes = settings, folder, store, scenes
        self.worker = WorkerProcess(settings, "worker", proxy)
        self._changed = threading.Condition()
        self._stop = False
        self._current: str | None = None
        self._thread = threading.Thread(target=self._run, name="sader-jobs", daemon=True)

    def start(self) -> None:
        """Queue the unfinished jobs of an earlier run and start the thread."""
        self.store.restart(most_attempts=MOST_ATTEMPTS)
        self._thread.start()

    def stop(self) -> None:
        """End the worker process; a running job is queued again at the next start."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self.worker.close()
        if self._thread.is_alive():
            self._thread.join(timeout=15)

    def submit(self, request: dict[str, Any]) -> Job:
        """Return a new job; raise `QueueFullError` where the queue is full."""
        job = self.store.add(request, most=self.settings.limits.queue)
        self._notify()
        return job

    def dismiss(self, name: str) -> Job:
        """Stop a job, or delete the results of one that has ended; return its new state."""
        with self._changed:
            before = self.store.dismiss(name)
            if before.status == "running" and self._current == name:
                self.worker.kill()
            elif before.status != "running":
                self._clean(name)
            self._changed.notify_all()
        return self.store.get(name)

    def wait(self, name: str, timeout_s: float) -> Job:
        """Return the job once it has ended, or its state after `timeout_s`."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not (job := self.store.get(name)).ended and time.monotonic() < until and not self._stop:
                self._changed.wait(timeout=min(1.0, max(0.01, until - time.monotonic())))
        return job

    def folder_of(self, name: str) -> Path:
        """Return the folder of a job's results."""
        return self.folder.state / "jobs" / name

    def sweep(self) -> None:
        """Delete expired results and uploads, and folders that belong to no job or scene."""
        before = time.time() - self.settings.limits.keep_s
        for name in self.store.expire(before):
            self._clean(name)
        jobs = self.store.select(limit=-1)
        self.scenes.expire(before, keep={job.request["scene"] for job in jobs if "scene" in job.request})
        folder, known = self.folder.state / "jobs", {job.id for job in jobs}
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    # ---------------------------------------------------------------- the thread

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        swept = 0.0
        while not self._stop:
            try:
                with self._changed:
                    job = self.store.take()
                    self._current = None if job is None else job.id
                    if job is None:
                        self._changed.wait(timeout=1.0)
                if job is not None:
                    self._work(job)
                if time.monotonic() - swept > SWEEP_S:
                    swept = time.monotonic()
                    self.sweep()
            except Exception as error:  # a full disk, for example; jobs that wait are tried again
                print(f"queue: {type(error).__name__}: {error}", file=sys.stderr)
                time.sleep(RETRY_S)

    def _work(self, job: Job) -> None:
        place = self.folder_of(job.id)
        try:
            place.mkdir(parents=True, exist_ok=True)
            arguments = {key: job.request[key] for key in ("inputs", "reading", "options")}
            arguments["target"] = self.folder.relative(place)
            outcome, _ = self.worker.call("remove", arguments, on_event=lambda event: self._on_event(job.id, event))
            self._end(job.id, "successful", "done", outcome)
        except Exception as error:
            # No error of a job may end this thread; unexpected ones are printed on the terminal.
            if not isinstance(error, SaderError):
                print(f"job {job.id}: {type(error).__name__}: {error}", file=sys.stderr)
                error = WorkerError("the job could not be run; details are in the server's terminal.")
            if not self._stop:  # otherwise the job is queued again at the next start
                self._end(job.id, "failed", str(error), {"error": type(error).__name__, "text": str(error)})
        finally:
            with self._changed:
                self._current = None
                with contextlib.suppress(SaderError):
                    if self.store.get(job.id).status in ("dismissed", "failed"):
                        self._clean(job.id)
                self._changed.notify_all()

    def _end(self, name: str, status: str, message: str, outcome: dict[str, Any]) -> None:
        """Store the end of a job, again and again where the disk is full: otherwise it would seem to run for ever."""
        while not self._stop:
            try:
                self.store.end(name, status, message, outcome)
                return
            except OutputError as error:
                print(f"job {name}: {error}", file=sys.stderr)
                time.sleep(RETRY_S)

    def _on_event(self, name: str, event: dict[str, Any]) -> None:
        with contextlib.suppress(OutputError):  # a full disk; progress can be missing
            if event["event"] == "notice":
                self.store.note(name, event["text"])
            else:
                self.store.advance(name, int(event["progress"]), event["text"])
        if self.store.get(name).status == "dismissed":  # after it was taken, before the process had it
            self.worker.kill()
        self._notify()

    def _clean(self, name: str) -> None:
        shutil.rmtree(self.folder_of(name), ignore_errors=True)


def _job(row: tuple[Any, ...]) -> Job:
    name, status, progress, message, request, outcome, notices, *rest = row
    found = None if outcome is None else json.loads(outcome)
    return Job(name, status, progress, message, json.loads(request), found, json.loads(notices), *rest)
