"""The program of a child process: `python -m sader.viewer.worker.child SETTINGS NAME`, driven by `process`."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from typing import Any, BinaryIO

from sader.errors import SaderError


def main() -> None:
    """Answer requests until the input ends; then end at once, even in the middle of one."""
    settings = json.loads(sys.argv[1])
    if sys.argv[2] != "reader" and hasattr(os, "nice"):
        os.nice(5)  # who works steps aside for who looks: the page answers while a job takes every core
    # Libraries print: what they print goes to the terminal, and the answers have a channel of their own.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    waiting: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(waiting,), daemon=True).start()
    from sader.viewer.security.sandbox import confine
    from sader.viewer.worker.work import SceneWork

    work = SceneWork(settings)
    confine(work.folder, work.allow_remote, work.limits)
    while True:
        _answer(work, json.loads(waiting.get()), out)


def _listen(waiting: queue.Queue[bytes]) -> None:
    """Hand on requests. The end of the input means that the server is gone: nobody wants the result any more."""
    for line in sys.stdin.buffer:
        waiting.put(line)
    os._exit(0)


def _answer(work: Any, request: dict[str, Any], out: BinaryIO) -> None:
    def say(message: dict[str, Any], blob: bytes = b"") -> None:
        out.write(json.dumps(message).encode() + b"\n" + blob)

    try:
        answer = getattr(work, request["operation"])(say, **request["arguments"])
    except SaderError as error:
        say({"error": type(error).__name__, "text": str(error)})
    except Exception as error:
        traceback.print_exc()
        say(
            {
                "error": "WorkerError",
                "text": f"the work failed with {type(error).__name__}; the server's terminal says where.",
            }
        )
    else:
        value, blob = answer if isinstance(answer, tuple) else (answer, b"")
        say({"answer": value, "bytes": len(blob)}, blob)


if __name__ == "__main__":
    main()
