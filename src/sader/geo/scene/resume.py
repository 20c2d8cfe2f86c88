"""The work folder beside an output: what is finished of a job, so that a killed program goes on where it was.

`.clear.tif.sader/` holds `state.json` (the exact job and how many strips of rows are finished), one file of rows per
layer, and the tiles that unfinished strips still need. Each is written under another name first, so that a file that
is there is whole. Another job with the same output starts anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import OutputError
from sader.geo.scene.cog import writing
from sader.inference.tiling import Window

FORMAT = 1


class WorkFolder:
    """The folder of one output; use it as a context manager, which holds its lock."""

    def __init__(self, output: Path, job: Mapping[str, Any]) -> None:
        self.output = output
        self.path = output.with_name(f".{output.name}.sader")
        self.job = json.loads(json.dumps(job, sort_keys=True, default=str))
        self.strips = 0
        """Strips of rows that are finished."""
        self.counts: dict[str, int] = {}
        """Pixels so far by what became of them."""
        self.note: str | None = None
        """Why earlier work was thrown away or taken up, for the user."""
        self._lock: Any = None

    def __enter__(self) -> WorkFolder:
        with writing(self.output):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._load()
            (self.path / "tiles").mkdir(exist_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def fresh(self) -> bool:
        """Whether there is nothing to go on from."""
        return not (self.path / "state.json").exists()

    def file(self, name: str) -> Path:
        return self.path / name

    def save(self, *, strips: int, counts: Mapping[str, int]) -> None:
        """Record that the first `strips` strips are on the disk."""
        self.strips, self.counts = strips, dict(counts)
        state = {"format": FORMAT, "job": self.job, "strips": strips, "counts": self.counts}
        self._replace("state.json", json.dumps(state, indent=1).encode())

    def has_tile(self, window: Window) -> bool:
        return self._tile(window).exists()

    def save_tile(self, window: Window, values: NDArray[np.float32]) -> None:
        """Keep the raw values (channels, h, w) of one tile."""
        with writing(self.output):
            part = self._tile(window).with_suffix(".part")
            with open(part, "wb") as file:
                np.save(file, values)
            os.replace(part, self._tile(window))

    def load_tile(self, window: Window) -> NDArray[np.float32]:
        return np.load(self._tile(window))

    def drop_tile(self, window: Window) -> None:
        self._tile(window).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder: the job is done, or cannot be gone on with."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _tile(self, window: Window) -> Path:
        return self.path / "tiles" / f"{window.row}_{window.col}.npy"

    def _replace(self, name: str, content: bytes) -> None:
        with writing(self.output):
            part = self.path / f"{name}.part"
            with open(part, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path / name)

    def _take_lock(self) -> None:
        """Refuse to work where another process works; the lock dies with its process."""
        self._lock = open(self.path / "lock", "w", encoding="utf-8")  # noqa: SIM115 - held until __exit__
        try:
            import fcntl
        except ImportError:  # not on this system: two programs at once are then the user's to avoid
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            self._lock = None
            raise OutputError(
                f"another process is writing {self.output}. Wait for it, or choose another output name."
            ) from error

    def _load(self) -> None:
        state_file = self.path / "state.json"
        if not state_file.exists():
            self._clear()
            return
        try:
            state = json.loads(state_file.read_text(encoding="utf-8"))
            known = state["format"] == FORMAT
            before, strips, counts = state["job"], int(state["strips"]), dict(state["counts"])
        except (OSError, ValueError, KeyError, TypeError):
            known, before = False, {}
        if known and before == self.job:
            self.strips, self.counts = strips, counts
            self.note = "going on with the work of an earlier run"
            return
        why = ", ".join(differences(before, self.job)[:3]) if known else "it is of another version"
        self.note = f"unfinished work of another job was found and is thrown away ({why}); starting anew"
        self._clear()

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.name == "lock":
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Return what differs between two jobs, as "seed was 0, is 1"."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in sorted(before.keys() | now.keys()):
            found += differences(before.get(key), now.get(key), f"{where}.{key}".strip("."))
        return found
    if before == now:
        return []
    if isinstance(before, dict | list) or isinstance(now, dict | list):
        return [f"{where} changed"]
    return [f"{where} was {before}, is {now}"]


def describe_source(source: Any) -> dict[str, Any]:
    """Return what binds a job to a source: its name and the size and time of every file it holds.

    A source without files (an array) is bound by its content.
    """
    files = {}
    for path in sorted(set(_files_in(source))):
        with contextlib.suppress(OSError):
            facts = os.stat(path)
            files[str(path)] = [facts.st_size, facts.st_mtime_ns]
    said: dict[str, Any] = {"name": source.name, "coding": str(source.coding), "bands": list(source.bands)}
    if files:
        return {**said, "files": files}
    with contextlib.suppress(Exception):
        said["content"] = hashlib.sha256(pickle.dumps(source)).hexdigest()
    return said


def _files_in(thing: Any, depth: int = 6) -> Iterator[str]:
    """Yield the existing files named anywhere inside a source."""
    if depth == 0:
        return
    if isinstance(thing, Path | str):
        text = str(thing)
        if 0 < len(text) < 4096 and os.path.isfile(text):
            yield os.path.abspath(text)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            if field.name == "name":  # for messages; it may happen to be a file of the current folder
                continue
            yield from _files_in(getattr(thing, field.name), depth - 1)
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _files_in(value, depth - 1)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from _files_in(value, depth - 1)
