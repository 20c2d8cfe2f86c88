"""What the routes call: scenes, pictures, jobs and results, without any HTTP."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

from sader.errors import ConfigError
from sader.viewer import ogc
from sader.viewer.problems import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    RequestError,
    ResultNotReadyError,
    TooLargeError,
    error_named,
)
from sader.viewer.runner import Runner
from sader.viewer.scenes import Scene, SceneStore
from sader.viewer.schema import Execute, RemoveInputs
from sader.viewer.security.folder import DataFolder, is_text
from sader.viewer.security.proxy import Gate
from sader.viewer.settings import ServeSettings
from sader.viewer.store import Job, JobStore
from sader.viewer.worker.process import Child

SEEN = (".tif", ".tiff", ".jp2", ".json", ".geojson")
MOST_LISTED = 500


class Service:
    """The server's state: its folder, its jobs, and three child processes: one reads, one finds clouds, one works."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.folder = DataFolder(settings.data)
        self.scenes = SceneStore(self.folder, settings.limits)
        self.gate = Gate(settings.allow_remote, os.environ)
        self.store = JobStore(self.folder.state / "jobs.sqlite")
        self.reader = Child(settings, "reader", self.gate)
        # Finding clouds takes seconds in a large scene: pictures and values must not wait for it.
        self.finder = Child(settings, "finder", self.gate)
        self.runner = Runner(settings, self.folder, self.store, self.scenes, self.gate)

    def start(self) -> None:
        self.gate.start()  # first: children are told its address
        self.runner.start()
        self.reader.start()
        self.finder.start()

    def stop(self) -> None:
        self.runner.stop()
        self.reader.close()
        self.finder.close()
        self.gate.close()
        self.store.close()

    # ---------------------------------------------------------------- scenes

    def entries(self, name: str) -> list[dict[str, Any]]:
        """Return what a folder of the data folder holds that can be opened or entered."""
        place = self.folder.root if not name else self.folder.find(name)
        if not place.is_dir():
            raise NotFoundError(f"{name} is no folder.")
        found = []
        for path in sorted(place.iterdir(), key=lambda path: path.name.lower()):
            real = path.resolve()
            if path.name.startswith(".") or not is_text(path.name) or not real.is_relative_to(self.folder.root):
                continue
            if real.is_relative_to(self.folder.state):
                continue
            kind = "folder" if path.is_dir() else "file"
            if kind == "file" and path.suffix.lower() not in SEEN:
                continue
            # By the name that leads here, not by where a link leads: that is how it will be asked for.
            shown = f"{name.rstrip('/')}/{path.name}" if name else path.name
            size = path.stat().st_size if kind == "file" else None
            found.append({"name": path.name, "path": shown, "kind": kind, "bytes": size})
            if len(found) >= MOST_LISTED:
                break
        return found

    def new_scene(self, paths: list[str] | None, demo: bool) -> Scene:
        """Return a new scene: uploads to come, files of the data folder, or the demo."""
        if demo and paths:
            raise RequestError("paths and demo were both given; give one of them.")
        if demo:
            scene = self.scenes.create("demo", "Demo scene")
            try:
                target = self.folder.relative(self.scenes.files_folder(scene.id))
                self.ask("demo", {"target": target})
            except Exception:
                self.scenes.delete(scene.id)
                raise
            return scene
        if not paths:
            return self.scenes.create("upload", "Uploaded scene")
        inputs = self.check_paths(paths)
        self.ask("inspect", {"inputs": inputs})
        title = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        return self.scenes.create("folder", title, paths=tuple(inputs))

    def delete_scene(self, name: str) -> None:
        """Forget a scene, unless a job still reads its files."""
        for status in ("accepted", "running"):
            for job in self.store.select(status=status):
                if job.request.get("scene") == name:
                    raise ConflictError(f"job {job.id} uses scene {name}; dismiss it first, or wait for it.")
        self.scenes.delete(name)

    def check_paths(self, paths: list[str]) -> list[str]:
        """Return paths of the data folder as the children take them."""
        return [self.folder.relative(self.folder.find(path)) for path in paths]

    def describe(self, scene: Scene) -> dict[str, Any]:
        """Return a scene with its dates."""
        found = self.ask("describe", self._of(scene))
        return {"id": scene.id, "kind": scene.kind, "title": scene.title, "reading": scene.reading, **found}

    def clouds(self, scene: Scene) -> list[float]:
        """Return the hidden part of each date."""
        shares: list[float] = self.finder.call("clouds", self._of(scene), timeout_s=self.settings.limits.read_s)[0]
        return shares

    def picture(self, scene: Scene, job: str | None, **wanted: Any) -> bytes:
        """Return a square of a layer as PNG."""
        arguments = {**self._of(scene), "job": self._job_place(job), **wanted}
        # A view is many squares; the value under the cursor does not wait for all of them.
        return self.reader.call("picture", arguments, timeout_s=self.settings.limits.read_s, patient=True)[1]

    def values(self, scene: Scene, job: str | None, column: int, row: int) -> dict[str, Any]:
        """Return the numbers at one pixel."""
        place = {"job": self._job_place(job), "column": column, "row": row}
        found: dict[str, Any] = self.ask("values", {**self._of(scene), **place})
        return found

    def mercator(self, scene: Scene) -> dict[str, Any]:
        """Return how a web map is laid under a scene."""
        found: dict[str, Any] = self.ask("mercator", self._of(scene))
        return found

    def inspect_upload(self, path: Path) -> None:
        """Refuse an upload by its header. A STAC item is looked at with the files it names, when all are there."""
        if path.suffix.lower() not in (".json", ".geojson"):
            self.ask("inspect", {"inputs": [self.folder.relative(path)]})

    def ask(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Return the reader's answer."""
        return self.reader.call(operation, arguments, timeout_s=self.settings.limits.read_s)[0]

    def _of(self, scene: Scene) -> dict[str, Any]:
        return {"inputs": self.scenes.inputs(scene), "reading": scene.reading}

    def _job_place(self, job: str | None) -> str | None:
        return None if job is None else self.folder.relative(self.runner.folder_of(self.store.get(job).id))

    # ---------------------------------------------------------------- jobs

    def submit(self, asked: Execute) -> Job:
        """Return the new job; what cannot work is refused now."""
        inputs = asked.inputs
        if (inputs.scene is None) == (inputs.paths is None):
            raise RequestError("expected one of the inputs scene and paths; give exactly one of them.")
        if inputs.model is not None:
            # A name of a file or of a hub would be read or fetched: only what is here already is taken.
            known = {*self.ask("models", {}), *([self.settings.model] if self.settings.model else [])}
            if inputs.model not in known:
                raise ConfigError(f"model is {inputs.model!r}; this server has {', '.join(sorted(known))}.")
        if inputs.mask == "omnicloudmask" and not self.settings.allow_remote:
            raise ForbiddenError(
                "the mask omnicloudmask fetches its weights from the network, which this server may not do. Use own or "
                "scl, or start the server with --allow-remote and the host of the weights."
            )
        reading = inputs.model_dump(include={"bands", "offset", "scale"}, exclude_none=True)
        if inputs.scene is not None:
            scene = self.scenes.get(inputs.scene)
            names, reading = self.scenes.inputs(scene), {**scene.reading, **reading}
        else:
            names = self.check_paths(inputs.paths or [])
        # The description opens every header: wrong bands, sizes and places are answered now, not by a failed job.
        self.ask("describe", {"inputs": names, "reading": reading})
        request = {
            "inputs": names,
            "reading": reading,
            "options": _options(inputs, set(asked.outputs or {})),
            "outputs": {key: value.transmissionMode for key, value in (asked.outputs or {}).items()},
        }
        if inputs.scene is not None:
            request["scene"] = inputs.scene
        return self.runner.submit(request)

    def finished(self, job: Job) -> Job:
        """Return a successful job; raise what stands between it and its results."""
        self.runner.output(job, "")  # a dismissed job has none
        if job.status == "failed":
            outcome = job.outcome or {"error": "WorkerError", "text": job.message}
            raise error_named(outcome["error"], outcome["text"])
        if job.status != "successful":
            raise ResultNotReadyError(f"job {job.id} is {job.status}, {job.progress} %; ask again later.")
        return job

    def file(self, job: Job, name: str) -> Path:
        """Return the file of one output."""
        found = self.runner.output(self.finished(job), name)
        if found is None:
            has = ", ".join((job.outcome or {}).get("outputs", {}))
            raise NotFoundError(f"job {job.id} has no output {name[:40]!r}; it has {has}.")
        return found

    def item(self, job: Job, base: str) -> dict[str, Any]:
        """Return the STAC Item of a job."""
        said = json.loads(self.file(job, "item").read_text(encoding="utf-8"))
        return ogc.public_item(said, job, base)

    def wanted(self, job: Job) -> dict[str, str | None]:
        """Return output -> transmission mode, for all outputs where none were named."""
        asked: dict[str, str | None] = job.request.get("outputs") or {}
        return asked or dict.fromkeys((job.outcome or {}).get("outputs", {}))

    def results(self, job: Job, base: str) -> dict[str, Any]:
        """Return the results document: images by reference, the item by value, unless asked for otherwise."""
        found: dict[str, Any] = {}
        for name, mode in self.wanted(self.finished(job)).items():
            media = ogc.MEDIA.get(name, ogc.COG)
            if name == "item" and mode != "reference":
                found[name] = {"value": self.item(job, base), "mediaType": media}
            elif mode == "value":
                path = self.file(job, name)
                if path.stat().st_size > self.settings.limits.value_bytes:
                    raise TooLargeError(
                        f"{name} has {path.stat().st_size} bytes, too many to send by value; ask by reference."
                    )
                text = base64.b64encode(path.read_bytes()).decode()
                found[name] = {"value": text, "mediaType": media, "encoding": "base64"}
            else:
                found[name] = ogc.link(f"{base}/jobs/{job.id}/results/{name}", "item", name, media)
        return found


def _options(inputs: RemoveInputs, outputs: set[str]) -> dict[str, Any]:
    """Return the options of a job; an output that is asked for is made."""
    options: dict[str, Any] = inputs.model_dump(
        include={
            "reference",
            "steps",
            "seed",
            "samples",
            "tile",
            "uncertainty",
            "provenance",
            "count",
            "model",
            "mask",
        },
        exclude_none=True,
    )
    return {**options, **{name: True for name in ("uncertainty", "provenance", "count") if name in outputs}}
