"""The functions behind the routes: scenes, images, jobs and results, without HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from sader.errors import ConfigError, SaderError
from sader.viewer import ogc
from sader.viewer.jobs import Job, JobRunner, JobStore
from sader.viewer.problems import (
    ConflictError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    RequestError,
    ResultNotReadyError,
    TooLargeError,
    error_named,
)
from sader.viewer.scenes import Scene, SceneStore, Upload
from sader.viewer.schema import Execute, Reading, RemoveInputs, Square
from sader.viewer.security.folder import DataFolder, is_utf8
from sader.viewer.security.proxy import Proxy
from sader.viewer.settings import ServeSettings
from sader.viewer.worker.process import WorkerProcess

LISTED = (".tif", ".tiff", ".jp2", ".json", ".geojson")
MOST_LISTED = 500


class Service:
    """The state of the server: data folder, scenes, jobs, and three worker processes.

    reader: headers, images and values. finder: cloud shares, which take seconds in a large scene. runner.worker: jobs.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.folder = DataFolder(settings.data)
        self.scenes = SceneStore(self.folder, settings.limits)
        self.proxy = Proxy(settings.allow_remote, os.environ)
        self.store = JobStore(self.folder.state / "jobs.sqlite")
        self.reader = WorkerProcess(settings, "reader", self.proxy)
        self.finder = WorkerProcess(settings, "finder", self.proxy)
        self.runner = JobRunner(settings, self.folder, self.store, self.scenes, self.proxy)

    def start(self) -> None:
        self.proxy.start()  # first: the processes get its address
        self.runner.start()
        self.reader.start()
        self.finder.start()

    def stop(self) -> None:
        self.runner.stop()
        self.reader.close()
        self.finder.close()
        self.proxy.close()
        self.store.close()

    # ---------------------------------------------------------------- scenes

    def entries(self, name: str) -> list[dict[str, Any]]:
        """Return the folders and readable files in a folder of the data folder."""
        place = self.folder.root if not name else self.folder.find(name)
        if not place.is_dir():
            raise NotFoundError(f"{name} is not a folder.")
        found = []
        try:
            paths = sorted(place.iterdir(), key=lambda path: path.name.lower())
        except OSError as error:
            raise NotFoundError(f"{name or 'the data folder'} cannot be listed: {error.strerror}.") from error
        for path in paths:
            try:
                real, size = path.resolve(strict=True), path.stat().st_size
            except (OSError, RuntimeError):
                continue  # deleted meanwhile, or a broken link
            if path.name.startswith(".") or not is_utf8(path.name) or not real.is_relative_to(self.folder.root):
                continue
            if real.is_relative_to(self.folder.state):
                continue
            kind = "folder" if path.is_dir() else "file"
            if kind == "file" and path.suffix.lower() not in LISTED:
                continue
            # Links keep their own name: clients send it back to open them.
            shown = f"{name.rstrip('/')}/{path.name}" if name else path.name
            found.append({"name": path.name, "path": shown, "kind": kind, "bytes": size if kind == "file" else None})
            if len(found) >= MOST_LISTED:
                break
        return found

    def new_scene(self, paths: list[str] | None, demo: bool) -> Scene:
        """Return a new scene: empty for uploads, of files of the data folder, or the demo."""
        if demo and paths:
            raise RequestError("paths and demo are both given; expected at most one of them.")
        if demo:
            scene = self.scenes.create("demo", "Demo scene")
            try:
                self._read("demo", {"target": self.folder.relative(self.scenes.files_folder(scene.id))})
            except Exception:
                with contextlib.suppress(NotFoundError):
                    self.scenes.delete(scene.id)
                raise
            return scene
        if not paths:
            return self.scenes.create("upload", "Uploaded scene")
        inputs = self.check_paths(paths)
        self._read("inspect", {"inputs": inputs})
        title = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        return self.scenes.create("folder", title, paths=tuple(inputs))

    def delete_scene(self, name: str) -> None:
        """Delete a scene, unless a job waits or runs with its files."""
        for status in ("accepted", "running"):
            for job in self.store.select(status=status):
                if job.request.get("scene") == name:
                    raise ConflictError(f"job {job.id} uses scene {name}. Dismiss the job, or wait until it has ended.")
        self.scenes.delete(name)

    def check_paths(self, paths: list[str]) -> list[str]:
        """Return paths of the data folder, checked and relative to it."""
        return [self.folder.relative(self.folder.find(path)) for path in paths]

    def describe(self, scene: Scene) -> dict[str, Any]:
        """Return a scene with its dates."""
        found = self.ask("describe", scene.id)
        return {"id": scene.id, "kind": scene.kind, "title": scene.title, "reading": scene.reading, **found}

    def ask(self, operation: str, name: str, **arguments: Any) -> Any:
        """Return the answer to an operation of `worker.work` on a scene."""
        worker = self.finder if operation == "clouds" else self.reader
        return self._call(worker, operation, name, arguments)[0]

    def picture(self, name: str, layer: str, square: Square) -> bytes:
        """Return one square of a layer of a scene as PNG."""
        drawn = {"layer": layer, "job": square.job, "square": square.model_dump(exclude={"job"})}
        # Masks are drawn where they were estimated.
        worker = self.finder if layer.startswith("mask") else self.reader
        # Low priority: the value under the cursor does not wait for the many squares of a view.
        return self._call(worker, "picture", name, drawn, low_priority=True)[1]

    def finish_upload(self, upload: Upload) -> None:
        """Keep a complete upload whose header is accepted. STAC items are checked later, together with their files."""
        self.scenes.keep_upload(upload)
        if upload.target.suffix.lower() in (".json", ".geojson"):
            return
        try:
            self._read("inspect", {"inputs": [self.folder.relative(upload.target)]})
        except SaderError:
            upload.target.unlink(missing_ok=True)
            raise

    def _read(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Return the answer of the reader process."""
        return self.reader.call(operation, arguments, timeout_s=self.settings.limits.read_s)[0]

    def _call(
        self, worker: WorkerProcess, operation: str, name: str, arguments: dict[str, Any], *, low_priority: bool = False
    ) -> tuple[Any, bytes]:
        """Return the answer about a scene and the bytes that follow it; a job is given to the process as its folder."""
        scene = self.scenes.get(name)
        asked = {"inputs": self.scenes.inputs(scene), "reading": scene.reading, **arguments}
        if asked.get("job") is not None:
            asked["job"] = self.folder.relative(self.runner.folder_of(self.store.get(asked["job"]).id))
        return worker.call(operation, asked, timeout_s=self.settings.limits.read_s, low_priority=low_priority)

    # ---------------------------------------------------------------- jobs

    def submit(self, request: Execute) -> Job:
        """Return a new job; raise for inputs that cannot be processed."""
        inputs = request.inputs
        if (inputs.scene is None) == (inputs.paths is None):
            raise RequestError("expected exactly one of the inputs scene and paths.")
        if inputs.model is not None:
            # Only shipped weights: a file name would be read, a name on a hub downloaded.
            known = {*self._read("models", {}), *([self.settings.model] if self.settings.model else [])}
            if inputs.model not in known:
                raise ConfigError(f"model is {inputs.model!r}; this server has {', '.join(sorted(known))}.")
        if inputs.mask == "omnicloudmask" and not self.settings.allow_remote:
            raise ForbiddenError(
                "the mask omnicloudmask downloads its weights, which this server does not allow. Use own or scl, or "
                "let the administrator of this server allow the host of the weights (allow-remote)."
            )
        reading = inputs.model_dump(include=set(Reading.model_fields), exclude_none=True)
        if inputs.scene is not None:
            scene = self.scenes.get(inputs.scene)
            names, reading = self.scenes.inputs(scene), {**scene.reading, **reading}
        else:
            names = self.check_paths(inputs.paths or [])
        # Opens every header, so that wrong bands, sizes and locations are refused here and not by a failed job.
        self._read("describe", {"inputs": names, "reading": reading})
        stored = {
            "inputs": names,
            "reading": reading,
            "options": _options(inputs, set(request.outputs or {})),
            "outputs": {key: value.transmissionMode for key, value in (request.outputs or {}).items()},
        }
        if inputs.scene is not None:
            stored["scene"] = inputs.scene
        return self.runner.submit(stored)

    def finished(self, job: Job) -> Job:
        """Return a successful job; raise the reason where it has no results."""
        if job.status == "dismissed":
            raise GoneError(f"job {job.id} was dismissed; its results are deleted.")
        if job.status == "failed":
            outcome = job.outcome or {"error": "WorkerError", "text": job.message}
            raise error_named(outcome["error"], outcome["text"])
        if job.status != "successful":
            raise ResultNotReadyError(f"job {job.id} is {job.status}, {job.progress} %. Try again later.")
        return job

    def file(self, job: Job, name: str) -> Path:
        """Return the file of one output."""
        outputs = (self.finished(job).outcome or {}).get("outputs", {})
        if name not in outputs:
            raise NotFoundError(f"job {job.id} has no output {name[:40]!r}; it has {', '.join(outputs)}.")
        return self.folder.inside(self.runner.folder_of(job.id) / outputs[name])

    def item(self, job: Job, base: str) -> dict[str, Any]:
        """Return the STAC Item of a job."""
        return ogc.public_item(json.loads(self.file(job, "item").read_text(encoding="utf-8")), job, base)

    def wanted(self, job: Job) -> dict[str, str | None]:
        """Return output -> transmission mode; all outputs where the request named none."""
        named: dict[str, str | None] = job.request.get("outputs") or {}
        return named or dict.fromkeys((job.outcome or {}).get("outputs", {}))

    def results(self, job: Job, base: str) -> dict[str, Any]:
        """Return the results document: by default images by reference and the item by value."""
        found: dict[str, Any] = {}
        for name, mode in self.wanted(self.finished(job)).items():
            media = ogc.MEDIA.get(name, ogc.COG)
            if name == "item" and mode != "reference":
                found[name] = {"value": self.item(job, base), "mediaType": media}
            elif mode == "value":
                path = self.file(job, name)
                if path.stat().st_size > self.settings.limits.value_bytes:
                    raise TooLargeError(
                        f"{name} has {path.stat().st_size} bytes, too many to send by value. Request it by reference."
                    )
                text = base64.b64encode(path.read_bytes()).decode()
                found[name] = {"value": text, "mediaType": media, "encoding": "base64"}
            else:
                found[name] = ogc.link(f"{base}/jobs/{job.id}/results/{name}", "item", name, media)
        return found


def _options(inputs: RemoveInputs, outputs: set[str]) -> dict[str, Any]:
    """Return the options of a job, including those of the requested outputs."""
    options: dict[str, Any] = inputs.model_dump(exclude={"scene", "paths", *Reading.model_fields}, exclude_none=True)
    return {**options, **{name: True for name in ("uncertainty", "provenance", "count", "report") if name in outputs}}
