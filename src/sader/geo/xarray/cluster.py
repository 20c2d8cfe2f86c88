"""The tiles of a scene made by the workers of a dask cluster; blending and writing stay with `clear_scene`.

Not from the paper. A worker opens the files itself (all machines must see them under the same paths) and sends back one
raw tile; tiles are taken in the order of `plan_windows`, so the file has the bits of a local run. A dead worker's
tiles are made again by the others; should the whole cluster go, the work folder keeps what is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import ConfigError, DataError, SaderError, require
from sader.geo.scene.run import Notice, SceneJob, SceneOptions, SceneReport, clear_scene
from sader.geo.stack import GeoStack
from sader.geo.xarray.shipment import Shipment
from sader.geo.xarray.tasks import hand_over
from sader.inference.scene_match import SceneMatch
from sader.inference.tiling import Progress, Window

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover

CONNECT_SECONDS = 10.0
"""How long an address may be silent before it counts as wrong."""
WORKER_SECONDS = 60.0
"""How long a scheduler may be without workers: queues of a cluster take their time."""
TILES_PER_THREAD = 2
"""Tiles that are asked for ahead, for each thread of the cluster."""


@dataclass(frozen=True)
class Assignment:
    """What a worker must know of a scene, besides the model."""

    stack: GeoStack
    options: SceneOptions
    reference: int | None
    match: SceneMatch | None


def clear_stack_on_dask(
    stack: GeoStack,
    remover: CloudRemover,
    out: str | Path,
    options: SceneOptions | None = None,
    *,
    address: str,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> SceneReport:
    """Remove the clouds of a scene on a dask cluster and write it to `out`: `clear_scene`, by many machines.

    address: that of the scheduler, such as "tcp://10.0.0.5:8786", a scheduler file (.json), or "local" for processes of
        this machine.
    """
    with connect(address) as client:
        try:
            return clear_scene(
                stack, remover, out, options, progress=progress, notice=notice, maker=TilesOnDask(client)
            )
        except ConnectionError as error:
            raise DataError(
                f"the dask cluster at {address} is gone ({error}). What is done is kept: when the cluster is back, the "
                "same command goes on from there."
            ) from error


@contextlib.contextmanager
def connect(address: str) -> Iterator[Any]:
    """Yield a client of the scheduler at `address`; say within seconds when there is none."""
    distributed = require("distributed", extra="cluster", purpose="working on a dask cluster")
    with contextlib.ExitStack() as stack:
        target: Any = address
        if address.strip().lower() == "local":
            target = stack.enter_context(
                distributed.LocalCluster(
                    n_workers=os.cpu_count(), threads_per_worker=1, dashboard_address=None, silence_logs="ERROR"
                )
            )
        try:
            if address.endswith(".json"):
                with open(address, encoding="utf-8") as file:  # the client would wait for it to appear, for ever
                    target = json.load(file)["address"]
            client = stack.enter_context(distributed.Client(target, timeout=CONNECT_SECONDS, set_as_default=False))
        except (OSError, ValueError, TypeError, KeyError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"no dask scheduler answers at {address} ({first}); expected an address such as tcp://HOST:8786, a "
                "scheduler file, or local. Start one with: dask scheduler"
            ) from error
        try:
            client.wait_for_workers(1, timeout=WORKER_SECONDS)
        except TimeoutError as error:
            raise ConfigError(
                f"the dask scheduler at {address} has no workers. Start some with: dask worker {address}"
            ) from error
        yield client


class TilesOnDask:
    """Makes the tiles of a `SceneJob` on a cluster."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __call__(
        self, job: SceneJob, windows: Sequence[Window], say: Notice
    ) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield (window, planes or None) in the order of `windows`."""
        from distributed import CancelledError, KilledWorker
        from distributed.comm import CommClosedError

        shipment = Shipment(job.remover)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sending large graph")  # that is the model, once
            model = self.client.submit(hand_over, shipment, key=f"sader-model-{shipment.checksum[:32]}")
        work = self.client.submit(hand_over, Assignment(job.stack, job.options, job.reference, job.match), pure=False)
        waiting: deque[tuple[Window, Any]] = deque()
        left = deque(windows)
        try:
            while left or waiting:
                ahead = TILES_PER_THREAD * max(1, sum(self.client.nthreads().values()))
                while left and len(waiting) < ahead:
                    window = left.popleft()
                    waiting.append((window, self.client.submit(make_tile, model, work, window, pure=False)))
                window, future = waiting.popleft()
                yield window, future.result()
        except KilledWorker as error:
            raise DataError(
                f"a tile of {job.windows[0].height} pixels killed several workers one after the other, most likely for "
                "want of memory. Use a smaller --tile, or workers with more memory."
            ) from error
        except (CancelledError, CommClosedError) as error:
            raise ConnectionError("the connection to its scheduler is lost") from error
        finally:
            with contextlib.suppress(Exception):  # of a cluster that is gone nothing can be called back
                self.client.cancel([future for _, future in waiting])


def make_tile(model: Shipment, work: Assignment, window: Window) -> NDArray[np.float32] | None:
    """Return the planes of one window, on a worker; None where no date has data."""
    try:
        with model.turn():
            job = SceneJob(work.stack, model.remover(), work.options, work.reference, Path("nowhere"), match=work.match)
            return job.tile(window, warnings.warn)
    except SaderError as error:
        place = " (On a dask worker: all machines must see the inputs under the same paths.)"
        plain = type(error)(f"{error}{place if isinstance(error, DataError) else ''}")
    # Outside of the handler, so that it is sent without what caused it: GDAL's errors cannot be pickled, and the user
    # would get a bare Exception.
    raise plain
