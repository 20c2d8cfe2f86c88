"""Batches made on the device one step ahead of their use, so that the network never waits for data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from time import perf_counter
from typing import Protocol

import torch

from sader.data.batch import SeriesBatch

_AHEAD = 2
"""Steps the host may be ahead of the device: enough to keep it busy, few enough to bound memory."""


class Maker(Protocol):
    """Whatever makes batch number `step`: `data.bank.SeriesMaker`, or a stand-in in tests."""

    def batch(self, step: int, batch_size: int, dates: int, crop: int) -> SeriesBatch: ...


class BatchFeed:
    """Gives batch number n and, when told, starts making another in a stream of its own.

    Making a batch copies small arrays from the host, and such a copy waits for its stream: in the stream that trains,
    that would be the whole step before it. Nothing here is random, so the order of making changes no batch.
    """

    def __init__(self, maker: Maker, *, device: torch.device, batch_size: int, dates: int, crop: int) -> None:
        self.maker, self.device = maker, device
        self.shape = (batch_size, dates, crop)
        self.wait_seconds = 0.0
        """Host time spent in `take`; with `prepare` called in time, that is next to nothing."""
        self._ready: dict[int, SeriesBatch] = {}
        # First in line: a batch is a chain of two thousand small kernels, and behind the long ones of a step each would
        # wait for its turn.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self._stream is not None:  # the series were loaded by the stream that trains
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._steps: deque[torch.cuda.Event] = deque()

    def prepare(self, number: int) -> None:
        """Start making batch `number`."""
        if number in self._ready:
            return
        if self._stream is None:
            self._ready[number] = self.maker.batch(number, *self.shape)
            return
        with torch.cuda.stream(self._stream), no_search():
            self._ready[number] = self.maker.batch(number, *self.shape)

    def take(self, number: int) -> SeriesBatch:
        """Return batch number `number`, made now unless it was prepared; the current stream may use it at once."""
        start = perf_counter()
        self.prepare(number)
        batch = self._ready.pop(number)
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for field in fields(batch):
                value = getattr(batch, field.name)
                if value is not None:
                    value.record_stream(current)
        self.wait_seconds += perf_counter() - start
        return batch

    def step_done(self) -> None:
        """Mark the end of a step; waits only where the host is more than two steps ahead."""
        if self._stream is None:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._steps.append(event)
        if len(self._steps) > _AHEAD:
            self._steps.popleft().synchronize()


@contextmanager
def no_search() -> Iterator[None]:
    """Without cuDNN's search for the fastest convolution of a shape.

    Each batch has other shapes (as many clouds, as soft as they happen to be), and a search waits until the device has
    finished all else: on an H200 a gap of 70 ms at every second of the first steps. It also chooses by the clock, and
    another choice rounds differently.
    """
    searching = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searching
