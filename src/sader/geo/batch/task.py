"""One scene of many, computed by a worker: `sader remove` or `sader series`, with the output on object storage too.

Results for object storage are written to a temporary folder of the worker and copied by GDAL. A scene is complete
where all its images carry the checksum of the job.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from sader.errors import ClusterError, DataError, OutputError, SaderError, require
from sader.geo.batch.catalogue import SceneInputs
from sader.geo.batch.report import DONE, FAILED, UNCHANGED, SceneOutcome
from sader.geo.read.raster import open_raster
from sader.geo.remove import RemoveRequest, load_remover, open_request, run_remove
from sader.geo.scene.cog import writing
from sader.geo.scene.resume import job_digest
from sader.geo.scene.run import Scene, SceneReport, job_of, prepared, scene_remover
from sader.geo.series import Series, run_series
from sader.geo.stac.items import absolute, locate
from sader.geo.stack import GeoStack
from sader.inference.remover import CloudRemover
from sader.inference.scene import available_cores

STORAGE = re.compile(r"(s3|gs|az)://|/vsi(s3|gs|az)/")
"""Start of the addresses of object storage that GDAL writes to."""
load_once = lru_cache(maxsize=2)(load_remover)
"""One model for all scenes of a worker."""


@dataclass(frozen=True)
class SceneTask:
    """A scene and how it is computed."""

    scene: SceneInputs
    request: RemoveRequest
    """`out` is the folder or address of all scenes."""
    series: bool = False
    nearest: int | None = None

    @property
    def output(self) -> str:
        """Path or address of the result: an image, or for a series a folder."""
        return f"{self.request.out.rstrip('/')}/{self.scene.name}{'' if self.series else '.tif'}"


def run_task(task: SceneTask) -> SceneOutcome:
    """Compute a scene; an error is a failed outcome."""
    started = time.perf_counter()
    try:
        outcome = _run(task)
    except Exception as error:
        known = isinstance(error, SaderError)
        outcome = SceneOutcome(
            task.scene.name,
            FAILED,
            output=task.output,
            reason=f"{type(error).__name__}: {error}",
            details="" if known else traceback.format_exc(),
            may_pass=may_pass(error, task.scene),
            cores=cores_of(task.request),
        )
    return replace(outcome, attempts=1, seconds=time.perf_counter() - started)


def may_pass(error: Exception, scene: SceneInputs) -> bool:
    """Whether a scene may succeed when it is tried again: after errors of the system, the network or the disk.

    Mistakes in the input, and outputs that exist from other inputs, stay as they are.
    """
    if isinstance(error, ClusterError) or not isinstance(error, SaderError):
        return True
    if isinstance(error, OutputError):
        return error.__cause__ is not None  # the error of the system
    return isinstance(error, DataError) and scene.is_remote


def cores_of(request: RemoveRequest) -> int:
    """Return the processor cores of one scene: those that were asked for, else the worker's share of the machine."""
    if request.options.threads is not None:
        return request.options.threads
    worker = require("distributed", extra="cluster", purpose="working on a dask cluster").worker
    try:
        threads = worker.get_worker().state.nthreads
    except ValueError:  # this process is no worker
        threads = 1
    return max(1, available_cores() // threads)


def _run(task: SceneTask) -> SceneOutcome:
    messages: dict[str, None] = {}
    cores = cores_of(task.request)
    with _local_request(task, cores) as request:
        stack, remover, options = open_request(request, load_once, lambda text: None)
        size = sum(stored_bytes(path) for source in stack.sources for path in source.paths)
        outcome = SceneOutcome(
            task.scene.name, DONE, output=task.output, cores=cores if remover.device.type == "cpu" else 0, bytes_in=size
        )
        scenes = _scenes(task, replace(request, options=options), stack, remover)
        stored = STORAGE.match(task.output) is not None
        if stored and not options.overwrite and all(_is_published(scene, task) for scene in scenes):
            return replace(outcome, status=UNCHANGED)
        if task.series:
            series = run_series(
                request, nearest=task.nearest, notice=lambda text: messages.setdefault(text), load=load_once
            )
            reports, extra = series.scenes, series.files
        else:
            reports = (run_remove(request, notice=lambda text: messages.setdefault(text), load=load_once),)
            extra = ()
        outcome = replace(outcome, **_written(reports, extra), notices=tuple(messages))
        return _publish(outcome, task, Path(request.out)) if stored else outcome


def _written(reports: tuple[SceneReport, ...], extra: tuple[str, ...]) -> dict[str, Any]:
    files = (*(file for report in reports for file in report.files), *extra)
    fresh = any(report.tiles for report in reports)
    size = sum(os.stat(file).st_size for file in files) if fresh else 0
    return {"status": DONE if fresh else UNCHANGED, "files": files, "bytes_out": size}


@contextmanager
def _local_request(task: SceneTask, cores: int) -> Iterator[RemoveRequest]:
    """Yield the request of one scene, whose output is a local path."""
    options = replace(task.request.options, threads=cores)
    request = replace(task.request, inputs=task.scene.inputs, out=task.output, options=options, dask=None)
    with tempfile.TemporaryDirectory(prefix="sader-") as folder:
        if task.scene.items is not None:
            file = Path(folder) / "items.json"
            file.write_text(json.dumps(task.scene.items), encoding="utf-8")
            request = replace(request, inputs=(str(file),))
        if STORAGE.match(task.output):
            request = replace(request, out=str(Path(folder) / task.output.rpartition("/")[2]))
        yield request


def _scenes(task: SceneTask, request: RemoveRequest, stack: GeoStack, remover: CloudRemover) -> list[Scene]:
    """Return the images of a task, before any pixel is read."""
    if not task.series:
        return [prepared(stack, remover, request.options, Path(request.out))]
    own = scene_remover(remover, request.options)
    return [scene for scene, _ in Series(stack, own, request.options, Path(request.out), task.nearest).jobs()]


# ------------------------------------------------------------------------------------------------ object storage


def stored_bytes(path: str) -> int:
    """Return the size of a file; for a remote GeoTIFF that of its blocks, and 0 where that is unknown."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        pass
    with open_raster(path) as dataset:
        height, width = dataset.block_shapes[0]
        bands = dataset.indexes[:1] if str(dataset.interleaving).endswith("pixel") else dataset.indexes
        names = [
            f"BLOCK_SIZE_{col}_{row}"
            for row in range(-(-dataset.height // height))
            for col in range(-(-dataset.width // width))
        ]
        return sum(int(dataset.get_tag_item(name, "TIFF", bidx=band) or 0) for band in bands for name in names)


def _address(path: Path, task: SceneTask, out: Path) -> str:
    """Return the path for GDAL of a local file on object storage. out: the local output of the task."""
    beside = path.relative_to(out if task.series else out.parent).as_posix()
    base = task.output if task.series else task.output.rpartition("/")[0]
    return locate(f"{base}/{beside}", "") if "://" in base else f"{base}/{beside}"


def _is_published(scene: Scene, task: SceneTask) -> bool:
    digest = job_digest(scene.job())
    out = scene.target.parent if task.series else scene.target
    return all(job_of(_address(path, task, out)) == digest for path in scene.outputs.values())


def _publish(outcome: SceneOutcome, task: SceneTask, out: Path) -> SceneOutcome:
    """Copy the images to object storage; the main process writes the items."""
    copyfiles = require("rasterio.shutil", extra="geo", purpose="writing GeoTIFF").copyfiles
    items = {}
    images = [Path(file) for file in outcome.files if not file.endswith(".json")]
    for path in reversed(images):
        target = _address(path, task, out)
        with writing(target):
            copyfiles(str(path), target)
            if job_of(target) != job_of(path):
                raise OSError("the copy differs from the image")
    for file in outcome.files:
        if file.endswith(".json"):
            path = Path(file).relative_to(out.parent)
            items[path.as_posix()] = _with_addresses(json.loads(Path(file).read_text(encoding="utf-8")), file, task)
    files = tuple(_address(path, task, out) for path in images)
    return replace(outcome, files=files, items=items)


def _with_addresses(item: dict[str, Any], file: str, task: SceneTask) -> dict[str, Any]:
    """Return a STAC document whose assets are addresses and whose inputs are full paths, not files beside it."""
    base = task.output if task.series else task.output.rpartition("/")[0]
    for asset in item.get("assets", {}).values():
        asset["href"] = f"{base}/{asset['href'].removeprefix('./')}"
    for link in item["links"]:
        if link["rel"] == "derived_from":
            link["href"] = absolute(link["href"], file)
    return item
