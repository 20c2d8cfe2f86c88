"""`sader remove --scenes` and `sader series --scenes`: many scenes on a dask cluster, one task each.

A scene that fails does not stop the others. Errors that may pass are tried again, mistakes in the input are not. The
same call continues an interrupted run: complete scenes are recognised by the checksum of their job, unfinished ones
by their work folder (`sader.geo.scene.resume`).
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from sader._version import __version__
from sader.errors import ClusterError, ConfigError, OutputError, require
from sader.files import write_atomically
from sader.geo.batch.catalogue import find_scenes
from sader.geo.batch.report import DONE, FAILED, UNCHANGED, BatchReport, SceneOutcome, write_report
from sader.geo.batch.task import STORAGE, SceneTask, run_task
from sader.geo.scene.options import BatchSettings, RemoveRequest
from sader.geo.scene.run import check_folder
from sader.geo.xarray.cluster import POLL_SECONDS, check_workers, connect, fetch
from sader.inference.scene import available_cores
from sader.inference.tiling import Notice, Progress

RETRY_SECONDS = 2.0
"""Wait before the second attempt; as much longer before each further one."""
NO_WORKER_SECONDS = 900.0
"""Longest wait for a worker: clusters that grow and shrink may have none for some minutes."""
AHEAD = 2
"""Scenes handed to the cluster for each of its threads."""


def remove_scenes(
    scenes: str | Path,
    out: str | Path,
    *,
    series: bool = False,
    workers: int | None = None,
    dask: Any = None,
    retries: int = 2,
    price: float | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> BatchReport:
    """Remove the clouds of many scenes, one task each on a dask cluster, and return the report of the run.

    scenes: a list with the inputs of one scene a line, a folder of folders, or a STAC catalogue; see docs/scale.md.
    out: a folder, or an address such as s3://bucket/clear; it receives NAME.tif, for a series NAME/, of each scene.
    series: clean every date of each scene. workers: processes on this machine. dask: instead of
    them the address of a scheduler, or a `distributed.Client`.
    retries: further attempts after an error that may pass. price: of one core hour, for the cost in the report.
    progress: called with (scenes done, scenes in all).
    options: those of `sader remove` by their names: model, bands, mask, uncertainty, seed ... and nearest, summary.
    A scene that fails is in the report: `report.with_status("failed")`.

    >>> report = sader.remove_scenes("scenes/", "clear/", workers=4)      # doctest: +SKIP
    >>> print(report.as_text())                                           # doctest: +SKIP
    """
    own = {"nearest": options.pop("nearest", None), "summary": options.pop("summary", None)}
    settings = BatchSettings(str(scenes), workers, retries, price, series=series, **own)
    address = dask if dask is None or isinstance(dask, str) else "client"
    request = RemoveRequest.of({**options, "out": out, "dask": address})
    return run_batch(request, settings, client=None if address is dask else dask, progress=progress)


def run_batch(
    request: RemoveRequest,
    settings: BatchSettings,
    *,
    client: Any = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> BatchReport:
    """Run all scenes, write the report and return it; a lost cluster raises after the report is written.

    client: of a dask cluster, instead of the address in the request.
    """
    _check(request, settings)
    if settings.workers is not None or request.dask is None:
        cores = max(1, available_cores() // (settings.workers or 1))
        request = replace(request, options=replace(request.options, threads=request.options.threads or cores))
    request = _with_absolute_paths(request)
    tasks = [SceneTask(scene, request, settings.series, settings.nearest) for scene in find_scenes(settings.scenes)]
    folder = Path(request.out.rstrip("/").rpartition("/")[2]) if STORAGE.match(request.out) else Path(request.out)
    summary = Path(settings.summary or folder / "run.json")
    check_folder(summary)
    processes = 0 if request.dask else settings.workers or 1
    batch = _Batch(
        tasks, settings.retries, processes, progress or (lambda done, total: None), notice or (lambda text: None)
    )
    started, begun = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    try:
        with connect(client or request.dask or processes) as connected:
            batch.run(connected)
    finally:
        scenes = tuple(batch.outcomes[task.scene.name] for task in tasks)
        report = BatchReport(request.out, scenes, started, time.monotonic() - begun, settings.price)
        files = [*_write_items(report, folder, settings), *write_report(report, summary)]
    return replace(report, files=tuple(files))


def _check(request: RemoveRequest, settings: BatchSettings) -> None:
    if settings.workers is not None and request.dask is not None:
        raise ConfigError("--workers starts processes on this machine, --dask names a cluster; expected one of them.")
    if request.inputs or request.stac is not None:
        raise ConfigError("--scenes names all inputs; expected no other input and no --stac.")
    if request.preview is not None or request.report is not None:
        raise ConfigError("--preview and --report name one file for one scene; they cannot be used with --scenes.")
    suffix = Path(request.out).suffix.lower()
    if suffix in (".tif", ".tiff", ".zarr", ".json") or Path(request.out).is_file():
        raise OutputError(
            f"the output is {request.out}; --scenes needs a folder or an address such as s3://bucket/name."
        )
    if "://" in request.out and not STORAGE.match(request.out):
        raise OutputError(f"the output is {request.out}; expected a folder, or an address with s3://, gs:// or az://.")


def _with_absolute_paths(request: RemoveRequest) -> RemoveRequest:
    """Return the request with paths that do not depend on the folder a worker was started in."""

    def absolute(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(absolute, value))
        return os.path.abspath(value) if value is not None and os.path.exists(value) else value

    found: dict[str, Any] = {name: absolute(getattr(request, name)) for name in ("model", "grid", "aoi", "mask", "aux")}
    out = request.out if STORAGE.match(request.out) else os.path.abspath(request.out)
    return replace(request, out=out, **found)


@dataclass
class _Batch:
    """The scenes of a run: those that wait, those under way, and how the others ended."""

    tasks: Sequence[SceneTask]
    retries: int
    processes: int
    """Those of this machine; 0 on another cluster."""
    progress: Progress
    notice: Notice
    outcomes: dict[str, SceneOutcome] = field(init=False)
    events: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self.outcomes = {task.scene.name: SceneOutcome(task.scene.name, output=task.output) for task in self.tasks}

    def run(self, client: Any) -> None:
        """Compute all scenes on a cluster."""
        waiting = deque((0.0, task) for task in self.tasks)
        running: dict[str, tuple[SceneTask, Any]] = {}
        done, lost = 0, None
        self.progress(0, len(self.tasks))
        while waiting or running:
            most = max(1, AHEAD * sum(client.nthreads().values()))
            for _ in range(len(waiting)):
                after, task = waiting.popleft()
                if len(running) < most and after <= time.monotonic():
                    future = client.submit(run_task, task, pure=False)
                    running[future.key] = task, future
                    future.add_done_callback(self.events.put)
                else:
                    waiting.append((after, task))
            try:
                future = self.events.get(timeout=POLL_SECONDS)
            except Empty:
                lost = check_workers(client, lost, patience=NO_WORKER_SECONDS)
                if self.processes:
                    client.cluster.scale(self.processes)  # starts again what was killed while it started
                continue
            task, _ = running.pop(future.key)
            outcome = self._record(task, future)
            if outcome.status == FAILED and outcome.may_pass and outcome.attempts <= self.retries:
                waiting.append((time.monotonic() + RETRY_SECONDS * outcome.attempts, task))
                continue
            done += 1
            if outcome.status == FAILED:
                self.notice(f"{outcome.name} failed: {outcome.reason}")
            self.progress(done, len(self.tasks))

    def _record(self, task: SceneTask, future: Any) -> SceneOutcome:
        """Return how an attempt ended, with the time of the earlier ones."""
        errors = require("distributed", extra="cluster", purpose="working on a dask cluster")
        before = self.outcomes[task.scene.name]
        failed = SceneOutcome(before.name, FAILED, before.output, attempts=1)
        try:
            found = fetch(future.client, future, patience=NO_WORKER_SECONDS)
        except errors.KilledWorker:
            reason = "several workers ended one after the other while they computed this scene, most likely for lack "
            reason += "of memory. Use fewer --workers, a smaller --tile, or machines with more memory."
            found = replace(failed, reason=reason, may_pass=True)
        except ClusterError:
            raise
        except Exception as error:  # a worker that has another version of sader or no sader at all
            found = replace(failed, reason=f"on a worker: {error!r}")
        found = replace(found, attempts=before.attempts + found.attempts, seconds=before.seconds + found.seconds)
        self.outcomes[task.scene.name] = found
        return found


def _write_items(report: BatchReport, folder: Path, settings: BatchSettings) -> list[str]:
    """Write the STAC items of results on object storage, and the collection of all items; return its path."""
    items = []
    for scene in (*report.with_status(DONE), *report.with_status(UNCHANGED)):
        for name, content in scene.items.items():
            write_atomically(folder / name, json.dumps(content, indent=2).encode())
        items.append(folder / f"{scene.name}.json")
    items = sorted(path for path in items if path.is_file())
    if settings.series or not items:
        return []
    from sader.geo.stac.write import write_collection

    text = f"{len(items)} scenes without clouds, written by sader {__version__}"
    return [str(write_collection(folder / "collection.json", items, text))]
