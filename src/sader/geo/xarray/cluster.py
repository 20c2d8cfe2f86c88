"""Tiles computed by the workers of a dask cluster; blending and writing stay with the scene loop.

A worker opens the files itself, so that all machines must see them under the same paths, and returns raw tiles. The
bits are those of a local run. The tiles of a lost worker are computed again by the others; when the whole cluster is
lost, the work folder keeps the finished rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sader.errors import ClusterError, ConfigError, DataError, SaderError, require
from sader.inference.scene import Executor, RawTile, ScenePlan, SceneSource, as_arrays, available_cores, predict_windows
from sader.inference.scene_match import intra_op_threads
from sader.inference.tiling import Window

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover

CONNECT_SECONDS = 10.0
"""Longest wait for an answer of a scheduler."""
WORKER_SECONDS = 60.0
"""Longest wait for the first worker: the queue of a cluster takes time."""
LOST_SECONDS = 8.0
"""Longest wait for a worker once there was one."""
POLL_SECONDS = 1.0
TILES_PER_THREAD = 2
"""Tiles under way for each thread of the cluster."""
_ADDRESS = re.compile(r"(tcp|tls|ucx|ws|wss)://(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5})/?")


@contextlib.contextmanager
def connect(address: Any) -> Iterator[Any]:
    """Yield a client of the scheduler at `address`, a scheduler file (.json), "local", or a number of processes.

    "local" runs the workers as threads of this process and opens no ports. A number starts as many processes with one
    thread each on this machine; one that is killed is started again. A client is yielded as it is.
    """
    distributed = require("distributed", extra="cluster", purpose="working on a dask cluster")
    if isinstance(address, distributed.Client):
        yield address
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet_logs())
        target: Any
        if isinstance(address, int):
            target = stack.enter_context(_process_cluster(distributed, address))
        elif address.strip().lower() == "local":
            target = stack.enter_context(_private_cluster(distributed))
        else:
            target = _checked(address.strip())
        try:
            client = distributed.Client(target, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise _no_scheduler(str(address), error) from error
        stack.callback(_close, client)
        try:
            client.wait_for_workers(1, timeout=WORKER_SECONDS)
        except TimeoutError as error:
            raise ConfigError(
                f"the dask scheduler at {address} has no workers. Start some with: dask worker {address}"
            ) from error
        yield client


def _process_cluster(distributed: Any, count: int) -> Any:
    """Return a cluster of processes of this machine. Its ports need a certificate that no other user has."""
    require("cryptography", extra="cluster", purpose="starting processes")
    try:
        return distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            security=True,
            dashboard_address="127.0.0.1:0",
            memory_limit=0,  # the system decides; dask would end a process that uses more than its share
            silence_logs=logging.CRITICAL,
        )
    except (OSError, RuntimeError) as error:
        raise ClusterError(f"cannot start {count} processes: {error}. Free some memory, or use fewer.") from error


def _private_cluster(distributed: Any) -> Any:
    """Return a cluster of threads of this process; a LocalCluster would open ports that any local user can reach."""

    class Private:
        def start_http_server(self, *args: Any, **kwargs: Any) -> None:
            self.http_server = SimpleNamespace(port=0, stop=lambda: None)

    def private(kind: type, **options: Any) -> dict[str, Any]:
        return {"cls": type(kind.__name__, (Private, kind), {}), "options": {"protocol": "inproc://", **options}}

    scheduler = private(distributed.Scheduler, dashboard=False, port=0)
    worker = private(distributed.Worker, nthreads=available_cores())
    return distributed.SpecCluster(scheduler=scheduler, workers={0: worker}, silence_logs="ERROR")


def _checked(address: str) -> str:
    """Return the address of a scheduler that accepts connections; refuse others within seconds."""
    if address.endswith(".json"):
        try:
            with open(address, encoding="utf-8") as file:
                address = str(json.load(file)["address"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _no_scheduler(address, error) from error
    if address.startswith("inproc://"):
        return address
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise _no_scheduler(address, "that is no address")
    try:
        socket.create_connection((found[2].strip("[]"), int(found[3])), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_scheduler(address, error) from error
    return address


def _no_scheduler(address: str, reason: object) -> ConfigError:
    first = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
    return ConfigError(
        f"no dask scheduler answers at {address} ({first}); expected an address such as tcp://HOST:8786, a scheduler "
        "file, or local. Start one with: dask scheduler"
    )


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Keep the tracebacks that distributed logs about lost connections off the terminal: they are raised as errors."""
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado", "asyncio")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _close(client: Any) -> None:
    with contextlib.suppress(Exception):  # the cluster may be lost
        client.close(timeout=2)


@contextlib.contextmanager
def cluster_executor(address: str, plan: ScenePlan, remover: CloudRemover, source: SceneSource) -> Iterator[Executor]:
    """Yield an executor that computes tiles on a dask cluster; see `connect` for the address."""
    with connect(address) as client:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sending large graph")  # that is the model, once
            model = client.submit(same, remover, key=f"sader-model-{remover.checksum[:32]}")
        work = client.submit(same, (plan, source), pure=False)

        def submit(windows: Sequence[Window]) -> _Tiles:
            return _Tiles(client.submit(compute_windows, model, work, list(windows), pure=False), client, plan)

        threads = max(1, sum(client.nthreads().values()))
        yield Executor(submit, ahead=TILES_PER_THREAD * threads)


@dataclass(frozen=True)
class _Tiles:
    """Tiles that a worker computes."""

    future: Any
    client: Any
    plan: ScenePlan

    def result(self) -> list[RawTile | None]:
        """Wait for the tiles; raise within seconds when the cluster has no worker left."""
        from distributed import KilledWorker

        try:
            return [None if one is None else RawTile.of(one) for one in fetch(self.client, self.future)]
        except KilledWorker as error:
            raise ClusterError(
                f"a tile of {self.plan.windows[0].height} pixels killed several workers one after the other, most "
                "likely for lack of memory. Use a smaller --tile, or workers with more memory."
            ) from error


def fetch(client: Any, future: Any, *, patience: float | None = None) -> Any:
    """Return the result of a task; raise when the cluster is gone or has had no worker for `patience` seconds.

    One request waits for as long as it takes: `Future.result` with a timeout starts the transfer of a result again
    after each timeout, and a transfer that ended so may be waited for by the next one.
    """
    from distributed import CancelledError
    from distributed.comm import CommClosedError

    lost: float | None = None
    waiting = asyncio.run_coroutine_threadsafe(client.gather(future, asynchronous=True), client.loop.asyncio_loop)
    try:
        while True:
            try:
                return waiting.result(timeout=POLL_SECONDS)
            except TimeoutError:
                if waiting.done():  # it is the task's own
                    raise
                lost = check_workers(client, lost, patience=patience)
    except (CancelledError, CommClosedError, ConnectionError) as error:
        raise lost_cluster("the connection to its scheduler is lost") from error
    finally:
        waiting.cancel()


def check_workers(client: Any, lost: float | None, *, patience: float | None = None) -> float | None:
    """Return since when the cluster has had no worker, None where it has one; raise after `patience` seconds."""
    try:
        workers = client.scheduler_info()["workers"]
        running = client.status == "running"
    except Exception as error:  # of any kind: the scheduler is gone
        raise lost_cluster("its scheduler does not answer") from error
    if not running:
        raise lost_cluster("the connection to its scheduler is lost")
    if workers:
        return None
    now = time.monotonic()
    if lost is not None and now - lost > (LOST_SECONDS if patience is None else patience):
        raise lost_cluster("it has no worker left")
    return now if lost is None else lost


def lost_cluster(why: str) -> ClusterError:
    return ClusterError(
        f"the dask cluster is gone ({why}). Finished rows are kept: when the cluster is back, the same command "
        "continues from there."
    )


def same(value: Any) -> Any:
    """Return the value: the task that the tiles depend on, so that dask sends it to each worker once."""
    return value


def compute_windows(
    remover: CloudRemover, work: tuple[ScenePlan, SceneSource], windows: Sequence[Window]
) -> list[tuple[Any, ...] | None]:
    """Return raw tiles as arrays, on a worker; None where no date has data."""
    plan, source = work
    try:
        with intra_op_threads(1):
            tiles = predict_windows(plan, remover, lambda windows: [source.read(one) for one in windows], windows)
        return [None if tile is None else as_arrays(tile) for tile in tiles]
    except SaderError as error:
        place = " (On a dask worker: all machines must see the inputs under the same paths.)"
        plain = type(error)(f"{error}{place if isinstance(error, DataError) else ''}")
    # Outside of the handler, so that it is sent without its cause: the errors of GDAL cannot be pickled.
    raise plain
