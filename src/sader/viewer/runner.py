"""Works off the queue: one job at a time in a child process, which may die; deletes what has expired."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sader.errors import SaderError
from sader.viewer.problems import GoneError, WorkerError
from sader.viewer.scenes import SceneStore
from sader.viewer.security.folder import DataFolder
from sader.viewer.security.proxy import Gate
from sader.viewer.settings import ServeSettings
from sader.viewer.store import Job, JobStore
from sader.viewer.worker.process import Child

MOST_ATTEMPTS = 3
SWEEP_S = 60.0


class Runner:
    """The queue and the thread that empties it."""

    def __init__(
        self, settings: ServeSettings, folder: DataFolder, store: JobStore, scenes: SceneStore, gate: Gate
    ) -> None:
        self.settings, self.folder, self.store, self.scenes = settings, folder, store, scenes
        self.worker = Child(settings, "worker", gate)
        self._changed = threading.Condition()
        self._stop = False
        self._current: str | None = None
        self._thread = threading.Thread(target=self._run, name="sader-jobs", daemon=True)

    def start(self) -> None:
        """Take up what an earlier server left, and begin."""
        self.store.restart(most_attempts=MOST_ATTEMPTS)
        self._thread.start()

    def stop(self) -> None:
        """End the worker; a running job is queued again when the server comes back."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self.worker.close()
        if self._thread.is_alive():
            self._thread.join(timeout=15)

    def submit(self, request: dict[str, Any]) -> Job:
        """Return the new job; raise `QueueFullError` where the queue is full."""
        job = self.store.add(request, most=self.settings.limits.queue)
        self._notify()
        return job

    def dismiss(self, name: str) -> Job:
        """Stop a job, or delete the results of one that has ended; return it as it is now."""
        with self._changed:
            before = self.store.dismiss(name)
            if before.status == "running" and self._current == name:
                self.worker.kill()
            elif before.status != "running":
                self._clean(name)
            self._changed.notify_all()
        return self.store.get(name)

    def wait(self, name: str, timeout_s: float) -> Job:
        """Return the job when it has ended, or as it is after `timeout_s`."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not (job := self.store.get(name)).ended and time.monotonic() < until and not self._stop:
                self._changed.wait(timeout=min(1.0, max(0.01, until - time.monotonic())))
        return job

    def folder_of(self, name: str) -> Path:
        """Return the folder of a job's results."""
        return self.folder.state / "jobs" / name

    def output(self, job: Job, name: str) -> Path | None:
        """Return the file of an output; None where the job has no such output."""
        if job.status == "dismissed":
            raise GoneError(f"job {job.id} was dismissed: its results are deleted.")
        outputs = (job.outcome or {}).get("outputs", {}) if job.status == "successful" else {}
        return self.folder.inside(self.folder_of(job.id) / outputs[name]) if name in outputs else None

    def sweep(self) -> None:
        """Delete results and uploads that are too old, and folders of jobs that nobody knows."""
        before = time.time() - self.settings.limits.keep_s
        for name in self.store.expire(before):
            self._clean(name)
        used = {job.request["scene"] for job in self.store.select() if "scene" in job.request}
        self.scenes.expire(before, keep=used)
        jobs = self.folder.state / "jobs"
        known = {job.id for job in self.store.select(limit=1_000_000)}
        if jobs.is_dir():
            for path in jobs.iterdir():
                if path.name not in known:
                    shutil.rmtree(path, ignore_errors=True)

    # ---------------------------------------------------------------- the thread

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        swept = 0.0
        while True:
            with self._changed:
                if self._stop:
                    return
                job = self.store.take()
                self._current = None if job is None else job.id
                if job is None:
                    self._changed.wait(timeout=1.0)
            if job is not None:
                self._work(job)
            if time.monotonic() - swept > SWEEP_S:
                swept = time.monotonic()
                with contextlib.suppress(OSError, SaderError):
                    self.sweep()

    def _work(self, job: Job) -> None:
        place = self.folder_of(job.id)
        try:
            place.mkdir(parents=True, exist_ok=True)
            arguments = {
                "inputs": job.request["inputs"],
                "reading": job.request["reading"],
                "options": job.request["options"],
                "target": self.folder.relative(place),
            }
            outcome, _ = self.worker.call("remove", arguments, on_event=lambda event: self._hear(job.id, event))
            self.store.end(job.id, "successful", "done", outcome)
        except Exception as error:
            # The server lives on whatever a job does; what nobody foresaw is said on the terminal.
            if not isinstance(error, SaderError):
                print(f"job {job.id}: {type(error).__name__}: {error}", file=sys.stderr)
                error = WorkerError("the job could not be run; the server's terminal says why.")
            if not self._stop:  # else it is queued again at the next start
                self.store.end(job.id, "failed", str(error), {"error": type(error).__name__, "text": str(error)})
        finally:
            with self._changed:
                self._current = None
                with contextlib.suppress(SaderError):
                    if self.store.get(job.id).status in ("dismissed", "failed"):
                        self._clean(job.id)
                self._changed.notify_all()

    def _hear(self, name: str, event: dict[str, Any]) -> None:
        if event["event"] == "notice":
            self.store.note(name, event["text"])
        else:
            self.store.advance(name, int(event["progress"]), event["text"])
        if self.store.get(name).status == "dismissed":  # between being taken and being begun
            self.worker.kill()
        self._notify()

    def _clean(self, name: str) -> None:
        shutil.rmtree(self.folder_of(name), ignore_errors=True)
