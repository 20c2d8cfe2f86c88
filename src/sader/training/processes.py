"""Processes of a run: one on each device, connected by `torch.distributed`. A single process needs no connection."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from sader.errors import SaderError, TrainingError


@dataclass(frozen=True)
class Process:
    """One process of a run and its device."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files; the others only compute."""
        return self.rank == 0

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in one transfer."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])

    def of_main(self, value: float) -> float:
        """Return the value that the main process has."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(shared, src=0)
        return float(shared)


def run_processes(function: Callable[..., None], arguments: tuple[Any, ...], *, device: str, count: int) -> None:
    """Call `function(process, *arguments)` in `count` connected processes and wait for all of them.

    With count=1 this process calls it. A `SaderError` of any process is raised here.
    """
    if count == 1:
        function(Process(torch.device(device)), *arguments)
        return
    reports = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="sader-") as folder:
        meeting = Path(folder) / "processes"
        try:
            torch.multiprocessing.spawn(_one_process, (function, arguments, device, count, meeting, reports), count)
        except ProcessException as error:
            if reports.empty():
                raise TrainingError(
                    f"a process of the run ended early ({str(error).strip().splitlines()[-1]}). Go on with --resume."
                ) from error
            raise reports.get() from None


def _one_process(
    rank: int,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    device: str,
    count: int,
    meeting: Path,
    reports: SimpleQueue[SaderError],
) -> None:
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
    try:
        function(Process(where, rank, count), *arguments)
    except SaderError as error:
        reports.put(error)
        raise
    finally:
        torch.distributed.destroy_process_group()
