"""A worker process and the protocol between it and the server.

`WorkerProcess` is the server's side; `python -m sader.viewer.worker.process SETTINGS NAME` is the process. One request
at a time is written to its standard input as a line of JSON. Back come an acknowledgement, events and the answer, one
line of JSON each; bytes (an image) may follow the answer. A process that dies during a request raises `WorkerError`,
and the next request starts a new one. The process ends when its input ends, that is when the server ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from sader.errors import SaderError
from sader.viewer.problems import WorkerError, error_named, for_clients
from sader.viewer.security.proxy import Proxy
from sader.viewer.security.sandbox import child_environment
from sader.viewer.settings import ServeSettings

Event = Callable[[dict[str, Any]], None]
PRIORITY = 5
"""Niceness of the processes that compute, so that the page stays responsive during a job."""


class _NotTaken(EOFError):
    """The process ended before it acknowledged the request."""


class WorkerProcess:
    """One worker process, started on demand and again after it died."""

    def __init__(self, settings: ServeSettings, name: str, proxy: Proxy) -> None:
        self.settings, self.name, self.proxy = settings, name, proxy
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = threading.Lock()
        self._low_priority = threading.Lock()
        """Held by the one low-priority request that may compete for `_busy`."""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id, None where no process runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Start the process now, so that the first request does not wait for its imports."""
        with self._busy:
            self._running()

    def call(
        self,
        operation: str,
        arguments: dict[str, Any],
        *,
        on_event: Event | None = None,
        timeout_s: float | None = None,
        low_priority: bool = False,
    ) -> tuple[Any, bytes]:
        """Return the answer to a request and the bytes that follow it; raise the errors of the process.

        low_priority: at most one such request waits for the process directly, so others overtake the rest of them.
        """
        request = json.dumps({"operation": operation, "arguments": arguments}).encode() + b"\n"
        with self._low_priority if low_priority else contextlib.nullcontext(), self._busy:
            try:
                return self._attempt(request, on_event, timeout_s)
            except _NotTaken:
                # The process died while it was idle: the request was not begun, so a new process can take it.
                with contextlib.suppress(_NotTaken):
                    return self._attempt(request, on_event, timeout_s)
                raise WorkerError(
                    "the worker process does not start; the server's terminal shows the reason."
                ) from None

    def kill(self) -> None:
        """End the process at once; a request in progress raises `WorkerError`."""
        process = self._process
        if process is not None:
            _kill(process)

    def close(self) -> None:
        """End the process and refuse further requests."""
        self._closed = True
        self.kill()
        if self._process is not None:
            _wait(self._process)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise WorkerError("the server is shutting down.")
        if self._process is None or self._process.poll() is not None:
            settings = json.dumps(self.settings.for_child())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sader.viewer.worker.process", settings, self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(os.environ, self.settings.allow_remote, self.proxy.address),
                # Ctrl-C in the terminal reaches the server only, which then ends its processes in order.
                start_new_session=True,
            )
        return self._process

    def _attempt(self, request: bytes, on_event: Event | None, timeout_s: float | None) -> tuple[Any, bytes]:
        process = self._running()
        late = threading.Event()

        def stop() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(timeout_s or 0.0, stop)
        timer.daemon = True
        if timeout_s is not None:
            timer.start()
        try:
            return _exchange(process, request, on_event)
        except (BrokenPipeError, EOFError) as error:
            code = _wait(process)
            self._process = None
            if late.is_set():
                raise WorkerError(f"the work took more than {timeout_s:g} s and was stopped.") from error
            if self._closed or (isinstance(error, EOFError) and not isinstance(error, _NotTaken)):
                raise WorkerError(
                    f"the worker process ended unexpectedly ({_exit_name(code)}). It may have run out of memory: try "
                    "fewer dates or a smaller scene."
                ) from error
            raise _NotTaken from error
        finally:
            timer.cancel()


def _exchange(process: subprocess.Popen[bytes], request: bytes, on_event: Event | None) -> tuple[Any, bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request)
    process.stdin.flush()
    taken = False
    while True:
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError if taken else _NotTaken
        message = json.loads(line)
        if "event" in message:
            taken = True
            if on_event is not None and message["event"] != "taken":
                try:
                    on_event(message)
                except BaseException:
                    _kill(process)  # the rest of this request must not be read as the answer to the next one
                    raise
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


def _wait(process: subprocess.Popen[bytes]) -> int:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError, ValueError):
            if pipe is not None:
                pipe.close()
    try:
        return process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.wait()


def _exit_name(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


# ---------------------------------------------------------------- the process itself


def main() -> None:
    """Answer requests until the input ends; then exit at once, even during a request."""
    settings, name = json.loads(sys.argv[1]), sys.argv[2]
    if name != "reader" and hasattr(os, "nice"):
        os.nice(PRIORITY)
    # Libraries may print to standard output: that goes to the terminal, and answers use a descriptor of their own.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def send(message: dict[str, Any], blob: bytes = b"") -> None:
        out.write(json.dumps(message).encode() + b"\n" + blob)

    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    from sader.viewer.security.sandbox import install_sandbox
    from sader.viewer.worker.work import SceneWork

    work = SceneWork(settings, send)
    install_sandbox(work.folder, work.allow_remote, work.limits)
    while True:
        request = json.loads(requests.get())
        send({"event": "taken"})
        try:
            answer = work.operations[request["operation"]](**request["arguments"])
        except SaderError as error:
            send({"error": type(error).__name__, "text": for_clients(str(error))})
        except Exception as error:
            traceback.print_exc()
            text = f"the work failed with {type(error).__name__}; details are in the server's terminal."
            send({"error": "WorkerError", "text": text})
        else:
            value, blob = answer if isinstance(answer, tuple) else (answer, b"")
            send({"answer": value, "bytes": len(blob)}, blob)


def _receive(requests: queue.Queue[bytes]) -> None:
    """Pass requests to the main thread. The end of the input means that the server has ended."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
