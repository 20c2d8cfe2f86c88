"""Rows of a plan in several processes on one device: so many trainings at once, beside them processes that only score.

A process lives for many tasks (starting one costs half a minute) and is told each by a line of JSON. One that dies
takes its own task along and is replaced. Whatever is left at the deadline is stopped: results are whole files, so the
next call goes on with the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from sader.errors import OutputError

Say = Callable[[str], None]
ALLOWANCE = 45.0
"""Seconds that a training needs besides its own: a process that starts, data to the device, weights to the disk."""
STOPPED = "stopped at the deadline"
NO_MEMORY = "OutOfMemoryError"
"""How the error of a device that is full begins, in PyTorch."""
LOGS = "logs"


@dataclass(frozen=True)
class Task:
    """One thing a process does."""

    kind: Literal["train", "guide", "score"]
    label: str
    """Of the setting."""
    row: str
    """The row to score, or the one whose run or guide is trained."""
    makes: str = ""
    """The run that is trained."""
    needs: tuple[str, ...] = ()
    """Runs that must be done before."""
    seconds: float = 0.0
    """How long the training lasts; 0 where that is not known."""

    @property
    def title(self) -> str:
        return f"{self.label} {self.makes or self.row}"


@dataclass
class Plan:
    """Which task may start next; every method is called with the lock held."""

    waiting: list[Task]
    deadline: float | None = None
    """On `time.monotonic`."""
    running: list[Task] = field(default_factory=list)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    """(label, run) -> why it could not be trained."""
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    """(label, row) -> why it could not be scored."""
    left: list[Task] = field(default_factory=list)
    """What was not started or not finished by the deadline."""
    again: set[Task] = field(default_factory=set)
    """What ran out of memory once beside others: it is tried a second time, last."""

    def next(self, *, trains: bool) -> Task | None:
        """Return what a process should do now, None where there is nothing at the moment; trainings go first."""
        self._settle()
        for task in self.waiting:
            if task.kind == "score" or not trains:
                continue
            return self._start(task)
        for task in self.waiting:
            if task.kind == "score" and not self._open(task):
                return self._start(task)
        return None

    def over(self, *, trains: bool) -> bool:
        """Return whether a process of this kind will never be needed again."""
        self._settle()
        return not [task for task in self.waiting if trains or task.kind == "score"]

    def done(self, task: Task, error: str | None) -> None:
        """Note how a task ended."""
        self.running.remove(task)
        if error == STOPPED:
            self.left.append(task)
        elif error is not None and error.startswith(NO_MEMORY) and task not in self.again:
            self.again.add(task)
            self.waiting.append(task)
        elif error is not None:
            (self.errors if task.kind == "score" else self.failed)[task.label, task.makes or task.row] = error

    def _start(self, task: Task) -> Task:
        self.waiting.remove(task)
        self.running.append(task)
        return task

    def _open(self, task: Task) -> bool:
        """Return whether a run the task needs is still to come."""
        coming = {(each.label, each.makes) for each in (*self.waiting, *self.running) if each.makes}
        return any((task.label, name) in coming for name in task.needs)

    def _settle(self) -> None:
        """Take out of the queue what can no longer be done in time, and what needs a run that failed or was left."""
        if self.deadline is not None:
            rest = self.deadline - time.monotonic()
            late = [t for t in self.waiting if rest <= 0 or (t.kind != "score" and rest < t.seconds + ALLOWANCE)]
            self.left += late
            self.waiting = [task for task in self.waiting if task not in late]
        left = {(task.label, task.makes) for task in self.left if task.makes}
        for task in list(self.waiting):
            for name in task.needs:
                if (task.label, name) in self.failed:
                    self.errors[task.label, task.row] = self.failed[task.label, name]
                elif (task.label, name) not in left:
                    continue
                else:
                    self.left.append(task)
                self.waiting.remove(task)
                break


def run_tasks(
    tasks: Iterable[Task],
    command: Sequence[str],
    *,
    out: Path,
    workers: int,
    scorers: int,
    deadline: float | None,
    say: Say,
) -> Plan:
    """Do all tasks with `workers` processes that train and score and `scorers` that only score; return how it went.

    command: starts one process that answers tasks (`serve`). deadline: on `time.monotonic`; then all are stopped.
    """
    plan = Plan(list(tasks), deadline)
    total = len(plan.waiting)
    changed = threading.Condition()
    lanes = [_Lane(f"worker-{k}", command, out / LOGS) for k in range(workers + scorers)]

    def work(lane: _Lane, trains: bool) -> None:
        while True:
            with changed:
                while (task := plan.next(trains=trains)) is None:
                    if plan.over(trains=trains):
                        changed.notify_all()
                        return
                    changed.wait(1.0)
                say(f"[{total - len(plan.waiting)}/{total}] {task.kind} {task.title}")
            started = time.monotonic()
            error = lane.do(task)
            with changed:
                plan.done(task, error)
                end = "done" if error is None else error
                say(f"    {task.kind} {task.title}: {end} after {time.monotonic() - started:.0f} s")
                changed.notify_all()

    threads = [
        threading.Thread(target=work, args=(lane, k < workers), daemon=True) for k, lane in enumerate(lanes)
    ]  # fmt: skip
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                if deadline is not None and time.monotonic() >= deadline:
                    for lane in lanes:
                        lane.stop()
    finally:
        for lane in lanes:
            lane.stop()
    return plan


class _Lane:
    """One process at a time, started when there is a first task and again after one that died."""

    def __init__(self, name: str, command: Sequence[str], logs: Path) -> None:
        self.name, self.command, self.log = name, list(command), logs / f"{name}.log"
        self.process: subprocess.Popen[str] | None = None
        self.stopped = False

    def do(self, task: Task) -> str | None:
        """Return None when the task is done, else what went wrong."""
        if self.stopped:
            return STOPPED
        try:
            process = self._alive()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"kind": task.kind, "label": task.label, "row": task.row}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            answer = ""
        except OutputError as error:
            return str(error)
        if answer.endswith("\n"):
            content: dict[str, Any] = json.loads(answer)
            if content["last"]:
                process.wait()
            return None if content["error"] is None else str(content["error"])
        if self.stopped:
            return STOPPED
        assert self.process is not None
        status, self.process = self.process.wait(), None
        return f"its process ended with status {status}: {_last_line(self.log)}"

    def stop(self) -> None:
        """End the process, whatever it does; nothing is started any more."""
        self.stopped = True
        process = self.process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def _alive(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            try:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("a") as log:
                    self.process = subprocess.Popen(
                        self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                    )
            except OSError as error:
                raise OutputError(
                    f"cannot write {self.log}: {error.strerror or error}. Choose another --out."
                ) from error
        return self.process


def serve(do: Callable[[dict[str, str]], None], *, threads: int) -> None:
    """Answer tasks from standard input until it ends: {"error": null} or the reason. Prints go to standard error.

    An error that is not the user's ends the process after the answer: the state of a device may be broken by it.
    """
    import gc

    import torch

    from sader.errors import SaderError

    answers: IO[str] = sys.stdout
    sys.stdout = sys.stderr
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    for line in sys.stdin:
        answer: dict[str, Any] = {"error": None, "last": False}
        try:
            do(json.loads(line))
        except SaderError as error:
            answer["error"] = str(error)
        except Exception as error:
            import traceback

            traceback.print_exc()
            text = str(error).strip().splitlines() or ["no message"]
            answer = {"error": f"{type(error).__name__}: {text[0][:500]}", "last": True}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer["last"]:
            return
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1][:500] if lines else "no message"
