"""The command `sader` as a child process: where it is, how it is started, what it prints. QGIS is not imported here.

The child has a Python of its own. Variables by which QGIS configures its Python, GDAL and PROJ are not handed to it.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "SADER_COMMAND"
"""Environment variable with the path of the command; the setting of the provider comes first."""
NOT_FOUND = (
    "The command sader was not found. Install it as described in docs/install.md of the project, then enter its path "
    "under Settings > Options > Processing > Providers > sader (in a virtual environment: ENV/bin/sader, on Windows "
    "ENV\\Scripts\\sader.exe)."
)
DROPPED = ("FORCE_COLOR", "PYTHONHOME", "PYTHONPATH", "GDAL_DATA", "GDAL_DRIVER_PATH", "PROJ_DATA", "PROJ_LIB")
"""Variables of QGIS that would break the packages of another Python, and one that would turn the log into a bar."""
PLACES = (
    "~/.local/bin/sader",
    "~/*conda*/bin/sader",
    "~/*conda*/envs/*/bin/sader",
    "~/*forge*/bin/sader",
    "~/*forge*/envs/*/bin/sader",
    "/opt/homebrew/bin/sader",
    "/usr/local/bin/sader",
    "~/AppData/Roaming/Python/Python3*/Scripts/sader.exe",
    "~/AppData/Local/Programs/Python/Python3*/Scripts/sader.exe",
    "~/*conda*/envs/*/Scripts/sader.exe",
    "~/*forge*/envs/*/Scripts/sader.exe",
)
"""Where pip, conda and pipx put commands; searched after PATH, which a desktop program often does not have."""
GRACE = 10.0
"""Seconds that a cancelled command has to finish by itself."""
POLL = 0.2
"""Seconds between two looks at the cancel button."""
TAIL = 20
"""Lines of an unknown failure that are shown."""
PROGRESS = re.compile(r"^(?!note)[a-z ]+: (\d+) of (\d+) tiles(?:,.*)?$")
ERROR = re.compile(r"^(?:\w+Error): (.*)$")
BOX = re.compile(r"^│ ?(.*?) *│$")


class CommandError(Exception):
    """The command is missing or has failed; the message is its own sentence."""


class Cancelled(Exception):
    """The command was stopped by the user."""


def find_command(
    setting: str = "", environment: Mapping[str, str] | None = None, places: Iterable[str] = PLACES
) -> str:
    """Return the path of the command: that of the setting, of SADER_COMMAND, on PATH, or in one of the usual places."""
    environment = os.environ if environment is None else environment
    for name, given in (("the setting of the provider", setting), (VARIABLE, environment.get(VARIABLE, ""))):
        if given:
            found = shutil.which(os.path.expanduser(given))
            if found is None:
                raise CommandError(f"{given} ({name}) is not a program. Enter the path of the command sader.")
            return found
    on_path = shutil.which("sader", path=environment.get("PATH", ""))
    if on_path is not None:
        return on_path
    for place in places:
        pattern = Path(os.path.expanduser(place))
        for path in sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))):
            if os.access(path, os.X_OK):
                return str(path)
    raise CommandError(NOT_FOUND)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the child: UTF-8, no colours, a line of progress every second."""
    kept = {name: value for name, value in environment.items() if name not in DROPPED}
    return {**kept, "PYTHONUTF8": "1", "NO_COLOR": "1", "SADER_LOG_SECONDS": "1"}


def progress_of(line: str) -> float | None:
    """Return the percentage that a line of progress states, None for other lines."""
    found = PROGRESS.match(line)
    return None if found is None else 100.0 * int(found[1]) / max(1, int(found[2]))


def error_of(lines: Sequence[str], status: int) -> str:
    """Return the message of a command that failed: its last error, or what it printed last."""
    for number in range(len(lines) - 1, -1, -1):
        found = ERROR.match(lines[number])
        if found is not None:
            return "\n".join([found[1], *lines[number + 1 :]]).strip()
    boxed = [found[1] for found in map(BOX.match, lines) if found is not None]
    text = "\n".join(boxed or lines[-TAIL:]).strip()
    return text or f"The command ended with status {status} and printed nothing."


def run_command(
    words: Sequence[str],
    on_line: Callable[[str], None],
    is_cancelled: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a command with --json and return its report; raise `CommandError` or `Cancelled`.

    on_line: called with every line of standard error. is_cancelled: asked several times a second; once it is true, the
    child and the processes that it started are stopped.
    """
    own_group: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        own_group = {"creationflags": subprocess.CREATE_NO_WINDOW}
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                env=child_environment(os.environ if environment is None else environment),
                **own_group,
            )
        except OSError as error:
            raise CommandError(f"{words[0]} cannot be started: {error.strerror}.") from error
        lines = _follow(child, on_line, is_cancelled)
        status = child.wait()
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if status != 0:
        raise CommandError(error_of(lines, status))
    try:
        report = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{words[0]} printed no report; is it the command of the package sader?") from error
    return dict(report)


def _follow(
    child: subprocess.Popen[bytes], on_line: Callable[[str], None], is_cancelled: Callable[[], bool]
) -> list[str]:
    """Hand on the lines of standard error until it ends, and return those that are not progress."""
    arrived: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        stream = child.stderr
        if stream is not None:
            for raw in stream:
                arrived.put(raw.decode("utf-8", "replace").rstrip())
            stream.close()
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    lines: list[str] = []
    while True:
        if is_cancelled():
            _stop(child)
            raise Cancelled
        try:
            line = arrived.get(timeout=POLL)
        except queue.Empty:
            continue
        if line is None:
            return lines
        if progress_of(line) is None:
            lines.append(line)
        on_line(line)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the child and its own children as Ctrl-C does; kill what is left after the grace period."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(child.pid)], check=False, capture_output=True)
        child.wait()
        return
    for sign in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(timeout=GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
