"""Scenes: what a user dropped, picked from the data folder, or the demo; each a small JSON file and its uploads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sader.viewer.problems import ConflictError, NotFoundError, RequestError, TooLargeError
from sader.viewer.security.folder import UPLOADS, DataFolder, upload_name
from sader.viewer.settings import Limits

_ID = re.compile(r"[a-f0-9]{24}")


@dataclass(frozen=True)
class Scene:
    """Dates of one place."""

    id: str
    kind: str
    """"upload", "folder" or "demo"."""
    title: str
    created: float
    paths: tuple[str, ...] = ()
    """Chosen from the data folder, relative to it; uploads are in the scene's own folder."""
    reading: dict[str, Any] = field(default_factory=dict)
    """bands, offset, scale: what the files do not say themselves."""


class SceneStore:
    """The scenes below the server's own folder."""

    def __init__(self, folder: DataFolder, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self.home = folder.state / "scenes"
        self.home.mkdir(mode=0o700, exist_ok=True)
        self._lock = threading.Lock()
        self._incoming: dict[str, int] = {}
        """Bytes of uploads that are still coming, so that several at a time cannot pass the limit together."""

    def create(self, kind: str, title: str, *, paths: tuple[str, ...] = ()) -> Scene:
        """Return a new scene; its folder is there."""
        with self._lock:
            if sum(1 for _ in self.home.iterdir()) >= self.limits.scenes:
                raise TooLargeError(
                    f"{self.limits.scenes} scenes are kept already, which is all this server takes. Delete one, or "
                    "wait until the oldest expires."
                )
            scene = Scene(secrets.token_hex(12), kind, title, time.time(), paths)
            (self._place(scene.id) / "files").mkdir(parents=True)
        self._save(scene)
        return scene

    def get(self, name: str) -> Scene:
        """Return a scene by its name."""
        path = self._place(name) / "scene.json"
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NotFoundError(f"there is no scene {name}; it never was, or it has expired.") from error
        return Scene(**{**said, "paths": tuple(said["paths"])})

    def all(self) -> list[Scene]:
        """Return all scenes, newest first."""
        found = []
        for path in self.home.iterdir():
            with contextlib.suppress(NotFoundError):
                found.append(self.get(path.name))
        return sorted(found, key=lambda scene: -scene.created)

    def set_reading(self, name: str, reading: dict[str, Any]) -> Scene:
        """Keep how the files are to be read."""
        scene = replace(self.get(name), reading={key: value for key, value in reading.items() if value is not None})
        self._save(scene)
        return scene

    def delete(self, name: str) -> None:
        """Forget a scene and its uploads; files of the data folder stay."""
        self.get(name)
        shutil.rmtree(self._place(name), ignore_errors=True)

    def inputs(self, scene: Scene) -> list[str]:
        """Return the scene's inputs relative to the data folder. STAC items speak for the files they name."""
        if scene.paths:
            return list(scene.paths)
        place = self._place(scene.id) / "files"
        files = sorted(path for path in place.iterdir() if path.suffix.lower() in UPLOADS)
        items = [path for path in files if path.suffix.lower() in (".json", ".geojson")]
        if not files:
            raise RequestError("the scene has no file yet; upload at least one GeoTIFF.")
        return [self.folder.relative(path) for path in items or files]

    def files_folder(self, name: str) -> Path:
        """Return the folder of a scene's uploads."""
        return self._place(name) / "files"

    def begin_upload(self, name: str, file: str, declared: int | None) -> tuple[Path, Path]:
        """Return (part, target) for an upload; refuse a name, a count or a declared size that is not accepted."""
        scene = self.get(name)
        if scene.kind != "upload":
            raise ConflictError(f"scene {name} is no upload; create one without paths to upload files.")
        target = self.files_folder(name) / upload_name(file)
        with self._lock:
            there = [path for path in target.parent.iterdir() if not path.name.startswith(".")]
            if target.exists():
                raise ConflictError(f"{file} is there already; files are not replaced. Delete the scene to start anew.")
            coming = sum(1 for key in self._incoming if key.startswith(f"{name}/"))
            most = 20 * self.limits.files  # a date may be one file per band
            if len(there) + coming >= most:
                raise TooLargeError(f"the scene has {most} files, which is all this server takes.")
            part = target.parent / f".{secrets.token_hex(8)}.part"
            self._incoming[f"{name}/{part.name}"] = 0
        if declared is not None and declared > self.limits.upload_bytes:
            self.end_upload(name, part)
            raise TooLargeError(self._too_large(file))
        return part, target

    def count_upload(self, name: str, file: str, part: Path, size: int) -> None:
        """Note how much of an upload has come; refuse it where it is too much."""
        if size > self.limits.upload_bytes:
            raise TooLargeError(self._too_large(file))
        with self._lock:
            self._incoming[f"{name}/{part.name}"] = size

    def check_room(self, wanted: int) -> None:
        """Refuse more uploads than the server keeps, or than the disk has room for."""
        with self._lock:
            stored = sum(path.stat().st_size for path in self.home.rglob("*") if path.is_file())
        if stored + wanted > self.limits.stored_bytes:
            raise TooLargeError(
                f"the uploads take {stored} bytes; the server keeps at most {self.limits.stored_bytes}. Delete a scene."
            )
        if shutil.disk_usage(self.home).free < wanted + 256 * 2**20:
            raise TooLargeError("the server's disk has no room for this upload. Free some space.")

    def end_upload(self, name: str, part: Path, target: Path | None = None) -> None:
        """Move a whole upload to its name, or drop it."""
        try:
            if target is not None:
                os.link(part, target)  # fails where the name is taken: two uploads of one name do not mix
        except FileExistsError as error:
            raise ConflictError(f"{target.name if target else ''} is there already.") from error
        finally:
            part.unlink(missing_ok=True)
            with self._lock:
                self._incoming.pop(f"{name}/{part.name}", None)

    def expire(self, before: float, *, keep: Collection[str]) -> None:
        """Delete scenes made before a time, except those that jobs still use."""
        for scene in self.all():
            if scene.created < before and scene.id not in keep:
                with contextlib.suppress(NotFoundError):
                    self.delete(scene.id)

    def _place(self, name: str) -> Path:
        if not _ID.fullmatch(name):
            raise NotFoundError(f"there is no scene {name[:60]!r}.")
        return self.home / name

    def _save(self, scene: Scene) -> None:
        place = self._place(scene.id)
        part = place / ".scene.part"
        part.write_text(json.dumps(asdict(scene)), encoding="utf-8")
        part.replace(place / "scene.json")

    def _too_large(self, file: str) -> str:
        return f"{file} is larger than the {self.limits.upload_bytes} bytes that this server takes for one file."
