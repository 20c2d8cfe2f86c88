"""Scenes: uploaded files, files of the data folder, or the demo. Each has a folder with scene.json and its uploads.

Folders appear and disappear by one rename each, so that a request which races with a deletion finds the scene or gets
`NotFoundError`, and a crash leaves at most a hidden folder, which the next sweep deletes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from sader.errors import OutputError
from sader.viewer.problems import ConflictError, NotFoundError, RequestError, TooLargeError
from sader.viewer.security.folder import UPLOADS, DataFolder, upload_name
from sader.viewer.settings import MIB, Limits

_ID = re.compile(r"[a-f0-9]{24}")
CHECK_BYTES = 64 * MIB
"""Received bytes of one upload between two checks of the storage limit."""
SPARE_BYTES = 256 * MIB
"""Free space on the disk that uploads leave."""


@dataclass(frozen=True)
class Scene:
    """Dates of one place."""

    id: str
    kind: str
    """"upload", "folder" or "demo"."""
    title: str
    created: float
    paths: tuple[str, ...] = ()
    """Inputs in the data folder, relative to it; uploads are in the scene's own folder."""
    reading: dict[str, Any] = field(default_factory=dict)
    """bands, offset, scale, where the files do not state them."""


@dataclass(eq=False)
class Upload:
    """One file while it is received."""

    scene: str
    target: Path
    part: Path
    file: BinaryIO
    declared: int
    """Content-Length, 0 where unknown."""
    received: int = 0
    checked: int = 0


class SceneStore:
    """The scenes below the server's own folder; thread-safe."""

    def __init__(self, folder: DataFolder, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self.home = folder.state / "scenes"
        self.home.mkdir(mode=0o700, exist_ok=True)
        self._lock = threading.Lock()
        self._uploads: list[Upload] = []

    def create(self, kind: str, title: str, *, paths: tuple[str, ...] = ()) -> Scene:
        """Return a new scene, with its folder."""
        with self._lock:
            if len(self.all()) >= self.limits.scenes:
                raise TooLargeError(
                    f"{self.limits.scenes} scenes are stored already, the limit of this server. Delete one, or wait "
                    "until the oldest expires."
                )
            scene = Scene(secrets.token_hex(12), kind, title, time.time(), paths)
            hidden = self.home / f".new-{scene.id}"
            (hidden / "files").mkdir(parents=True)
            _write(hidden, scene)
            hidden.rename(self._place(scene.id))
        return scene

    def get(self, name: str) -> Scene:
        """Return a scene by its id."""
        try:
            content = json.loads((self._place(name) / "scene.json").read_text(encoding="utf-8"))
            return Scene(**{**content, "paths": tuple(content["paths"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _missing(name) from error

    def all(self) -> list[Scene]:
        """Return all scenes, newest first."""
        found = []
        for path in self.home.iterdir():
            with contextlib.suppress(NotFoundError):
                found.append(self.get(path.name))
        return sorted(found, key=lambda scene: -scene.created)

    def set_reading(self, name: str, reading: dict[str, Any]) -> Scene:
        """Store how the files are to be read."""
        scene = replace(self.get(name), reading={key: value for key, value in reading.items() if value is not None})
        with _present(name):
            _write(self._place(name), scene)
        return scene

    def delete(self, name: str) -> None:
        """Delete a scene and its uploads; files of the data folder stay."""
        self.get(name)
        hidden = self.home / f".deleted-{secrets.token_hex(8)}"
        with _present(name):
            self._place(name).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def inputs(self, scene: Scene) -> list[str]:
        """Return the scene's inputs relative to the data folder: STAC items where there are any, else all rasters."""
        if scene.paths:
            return list(scene.paths)
        with _present(scene.id):
            files = sorted(path for path in self.files_folder(scene.id).iterdir() if path.suffix.lower() in UPLOADS)
        items = [path for path in files if path.suffix.lower() in (".json", ".geojson")]
        if not files:
            raise RequestError("the scene has no file yet; upload at least one GeoTIFF.")
        return [self.folder.relative(path) for path in items or files]

    def files_folder(self, name: str) -> Path:
        """Return the folder of a scene's uploads."""
        return self._place(name) / "files"

    def expire(self, before: float, *, keep: Collection[str]) -> None:
        """Delete scenes created before a time, except those that jobs use, and folders that are no scenes."""
        for scene in self.all():
            if scene.created < before and scene.id not in keep:
                with contextlib.suppress(NotFoundError):
                    self.delete(scene.id)
        with self._lock:  # while no scene is being created
            for path in self.home.iterdir():
                if not (path / "scene.json").is_file() or path.name.startswith("."):
                    shutil.rmtree(path, ignore_errors=True)

    # ---------------------------------------------------------------- uploads

    def begin_upload(self, name: str, file: str, declared: int | None) -> Upload:
        """Return a new upload; refuse its name, a file that exists, too many files, and too large a declared size."""
        scene = self.get(name)
        if scene.kind != "upload":
            raise ConflictError(f"scene {name} takes no uploads; create one without paths to upload files.")
        target = self.files_folder(name) / upload_name(file)
        if (declared or 0) > self.limits.upload_bytes:
            raise self._too_large(file)
        most = 20 * self.limits.files  # a date may have one file per band
        with self._lock, _present(name):
            if target.exists():
                raise _exists(file)
            if sum(1 for _ in target.parent.iterdir()) >= most:
                raise TooLargeError(f"the scene has {most} files, the limit of this server.")
            part = target.parent / f".{secrets.token_hex(8)}.part"
            upload = Upload(name, target, part, part.open("xb"), declared or 0)
            self._uploads.append(upload)
        try:
            self._check_storage()
        except TooLargeError:
            self.end_upload(upload)
            raise
        return upload

    def receive(self, upload: Upload, chunk: bytes) -> None:
        """Append to an upload; refuse it where it grows too large."""
        upload.received += len(chunk)
        if upload.received > self.limits.upload_bytes:
            raise self._too_large(upload.target.name)
        if upload.received - upload.checked > CHECK_BYTES:
            upload.checked = upload.received
            self._check_storage()
        with _enough_space():
            upload.file.write(chunk)

    def keep_upload(self, upload: Upload) -> None:
        """Give a complete upload its name."""
        with _enough_space():
            upload.file.close()
        try:
            with _present(upload.scene):
                os.link(upload.part, upload.target)  # atomic, and fails where the name exists
        except FileExistsError as error:
            raise _exists(upload.target.name) from error

    def end_upload(self, upload: Upload) -> None:
        """Remove the temporary file of an upload."""
        with contextlib.suppress(OSError):
            upload.file.close()
        upload.part.unlink(missing_ok=True)
        with self._lock:
            if upload in self._uploads:
                self._uploads.remove(upload)

    def _check_storage(self) -> None:
        """Refuse uploads above the storage limit or the free space, including what is still to be received."""
        with self._lock:
            expected = sum(max(0, upload.declared - upload.received) for upload in self._uploads)
        stored = _size_below(self.home)
        if stored + expected > self.limits.stored_bytes:
            raise TooLargeError(
                f"uploads take {stored} bytes; this server stores at most {self.limits.stored_bytes}. Delete a scene."
            )
        if shutil.disk_usage(self.home).free < expected + SPARE_BYTES:
            raise TooLargeError("the server's disk has too little free space for this upload. Delete a scene.")

    def _place(self, name: str) -> Path:
        if not _ID.fullmatch(name):
            raise NotFoundError(f"there is no scene {name[:60]!r}.")
        return self.home / name

    def _too_large(self, file: str) -> TooLargeError:
        return TooLargeError(f"{file} is larger than {self.limits.upload_bytes} bytes, this server's limit for a file.")


def _write(place: Path, scene: Scene) -> None:
    part = place / f".{secrets.token_hex(4)}.part"
    part.write_text(json.dumps(asdict(scene)), encoding="utf-8")
    part.replace(place / "scene.json")


def _missing(name: str) -> NotFoundError:
    return NotFoundError(f"there is no scene {name}; it may have been deleted or have expired.")


def _exists(file: str) -> ConflictError:
    return ConflictError(f"{file} exists already; uploads do not replace files. Delete the scene to start again.")


@contextmanager
def _present(name: str) -> Iterator[None]:
    """Raise `NotFoundError` where the folder of a scene disappears during an operation."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(name) from error


@contextmanager
def _enough_space() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot store the upload: {error.strerror or error}. Free space on the server.") from error


def _size_below(folder: Path) -> int:
    """Return the bytes of all files below a folder; files that disappear meanwhile count as 0."""
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(here, name), follow_symlinks=False).st_size
    return total
