"""A child process that does what may crash: opening rasters, running the network. The server talks to it by lines.

One request at a time goes down its standard input as a line of JSON; events and the answer come back the same way, the
answer with bytes (a picture) behind it where it says so. If the child dies, the caller gets a `WorkerError` and the
next call starts another one. If the server dies, the child sees the end of its input and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from sader.viewer.problems import WorkerError, error_named
from sader.viewer.security.proxy import Gate
from sader.viewer.security.sandbox import child_environment
from sader.viewer.settings import ServeSettings

Event = Callable[[dict[str, Any]], None]


class Child:
    """One child process, started when it is first needed and again after it died."""

    def __init__(self, settings: ServeSettings, name: str, gate: Gate) -> None:
        self.settings, self.name, self.gate = settings, name, gate
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = threading.Lock()
        self._line = threading.Lock()
        """For those who may wait: one of them at a time asks for the child, so that others pass the rest of them."""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process, where one runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Start the process now, so that the first call need not wait for its imports."""
        with self._busy:
            self._ready()

    def call(
        self,
        operation: str,
        arguments: dict[str, Any],
        *,
        on_event: Event | None = None,
        timeout_s: float | None = None,
        patient: bool = False,
    ) -> tuple[Any, bytes]:
        """Return the answer to a request and the bytes that came with it; errors of the child are raised here.

        patient: one of many; a request that is not goes before all of them but the one in work.
        """
        with self._line if patient else contextlib.nullcontext(), self._busy:
            process = self._ready()
            late = threading.Event()
            timer = None
            if timeout_s is not None:

                def stop() -> None:
                    late.set()
                    _kill(process)

                timer = threading.Timer(timeout_s, stop)
                timer.daemon = True
                timer.start()
            try:
                return self._exchange(process, operation, arguments, on_event)
            except (BrokenPipeError, EOFError) as error:
                code = _end(process)
                self._process = None
                if late.is_set():
                    raise WorkerError(f"the work took more than {timeout_s:g} s and was stopped.") from error
                raise WorkerError(
                    f"the worker process ended unexpectedly ({_means(code)}); it was not the server. Memory may have "
                    "run out: try fewer dates or a smaller scene."
                ) from error
            finally:
                if timer is not None:
                    timer.cancel()

    def kill(self) -> None:
        """End the process at once, whatever it does; the call in progress raises."""
        process = self._process
        if process is not None:
            _kill(process)

    def close(self) -> None:
        """End the process for good."""
        self._closed = True
        self.kill()
        if self._process is not None:
            _end(self._process)

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise WorkerError("the server is shutting down.")
        if self._process is None or self._process.poll() is not None:
            settings = json.dumps(self.settings.for_child())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sader.viewer.worker.child", settings, self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(os.environ, self.settings.allow_remote, self.gate.address),
                # Ctrl-C in the terminal is for the server, which then ends its children in order.
                start_new_session=True,
            )
        return self._process

    @staticmethod
    def _exchange(
        process: subprocess.Popen[bytes], operation: str, arguments: dict[str, Any], on_event: Event | None
    ) -> tuple[Any, bytes]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"operation": operation, "arguments": arguments}).encode() + b"\n")
        process.stdin.flush()
        while True:
            line = process.stdout.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            message = json.loads(line)
            if "event" in message:
                if on_event is not None:
                    on_event(message)
                continue
            if "error" in message:
                raise error_named(message["error"], message["text"])
            size = int(message.get("bytes", 0))
            blob = process.stdout.read(size) if size else b""
            if len(blob) != size:
                raise EOFError
            return message["answer"], blob


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _end(process: subprocess.Popen[bytes]) -> int:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError, ValueError):
            if pipe is not None:
                pipe.close()
    try:
        return process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.wait()


def _means(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
