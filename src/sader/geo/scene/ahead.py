"""Tiles for a GPU, made by threads: many are read at a time, and while one batch is computed others are prepared."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from sader.inference.tiling import Window

Place = TypeVar("Place")
Read = TypeVar("Read")
Made = TypeVar("Made")

WORKERS = 3
"""Batches in hand at a time on a GPU: one is computed, one prepared, one taken back."""
BATCHES_AHEAD = 3
"""Batches that may be read before their turn on a GPU; each takes memory."""


def made_ahead(
    windows: Sequence[Window],
    batch: int,
    *,
    readers: int,
    device: torch.device,
    read: Callable[[Place | None, int, Window], Read],
    work: Callable[[Place | None, list[Read]], list[Made]],
    room: Callable[[], Place] | None = None,
) -> Iterator[Made]:
    """Yield what `work` makes of batches of windows, in order; several are read and worked on at a time.

    read: called with a place, the number of the window in its batch and the window, in one of `readers` threads.
    work: called with the place and what was read, in a stream of its own.
    room: makes a place for a batch, used again for a later one when what was made in it has been taken: what is yielded
        may lie in it, and is good until the next is asked for.
    """
    mine = threading.local()

    def worked(place: Place | None, reads: list[Future[Read]]) -> list[Made]:
        ready = [one.result() for one in reads]
        if not hasattr(mine, "stream"):
            mine.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # In a stream of its own: what one thread copies does not wait for what another computes.
        with torch.cuda.stream(mine.stream):
            return work(place, ready)

    reading = ThreadPoolExecutor(readers, thread_name_prefix="sader-read")
    working = ThreadPoolExecutor(WORKERS, thread_name_prefix="sader-tiles")
    queue: deque[tuple[Place | None, Future[list[Made]]]] = deque()
    free: list[Place] = []

    def first() -> Iterator[Made]:
        place, made = queue.popleft()
        yield from made.result()
        if place is not None:
            free.append(place)

    try:
        for start in range(0, len(windows), batch):
            group = windows[start : start + batch]
            place = None if room is None else free.pop() if free else room()
            reads = [reading.submit(read, place, slot, window) for slot, window in enumerate(group)]
            queue.append((place, working.submit(worked, place, reads)))
            if len(queue) > BATCHES_AHEAD:
                yield from first()
        while queue:
            yield from first()
    finally:
        working.shutdown(wait=True, cancel_futures=True)
        reading.shutdown(wait=True, cancel_futures=True)
