"""Batches composed on the device one step ahead of their use, so that the network does not wait for data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Protocol

import torch

from sader.data.batch import SeriesBatch

_AHEAD = 2
"""Steps the host may be ahead of the device: enough to keep it busy, few enough to bound memory."""


class Maker(Protocol):
    """Source of batches by number: `data.bank.SeriesMaker`, `guide.GuideMaker`."""

    def batch(self, step: int, batch_size: int, dates: int, crop: int) -> SeriesBatch: ...


class BatchFeed:
    """Returns batch number n and can start composing another one in a CUDA stream of its own.

    Composing a batch copies small arrays from the host, and such a copy waits for its stream: in the training stream it
    would wait for the whole step before it. Batches depend on their number alone, so their order changes nothing.
    """

    def __init__(self, maker: Maker, batch_size: int, dates: int, crop: int, *, device: torch.device) -> None:
        self.maker, self.device = maker, device
        self.shape = (batch_size, dates, crop)
        self._ready: dict[int, SeriesBatch] = {}
        # High priority: a batch is a chain of two thousand small kernels; each would wait for a long one of the step.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        if self._stream is not None:  # the training stream loaded the series
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._steps: deque[torch.cuda.Event] = deque()

    def prepare(self, number: int) -> None:
        """Start composing batch `number`."""
        if number in self._ready:
            return
        if self._stream is None:
            self._ready[number] = self.maker.batch(number, *self.shape)
            return
        with torch.cuda.stream(self._stream), no_search():
            self._ready[number] = self.maker.batch(number, *self.shape)

    def take(self, number: int) -> SeriesBatch:
        """Return batch `number`, composed now unless it was prepared; the current stream may use it immediately."""
        self.prepare(number)
        batch = self._ready.pop(number)
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for field in fields(batch):
                value = getattr(batch, field.name)
                if value is not None:
                    value.record_stream(current)
        return batch

    def step_done(self) -> None:
        """Mark the end of a step; waits only if the host is more than two steps ahead of the device."""
        if self._stream is None:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._steps.append(event)
        if len(self._steps) > _AHEAD:
            self._steps.popleft().synchronize()


@contextmanager
def no_search() -> Iterator[None]:
    """Switch off cuDNN's search for the fastest convolution within the context.

    Batches differ in shape (number and softness of clouds). Each search waits until the device is idle: on an H200 a
    gap of 70 ms every second during the first steps. It also chooses by timing, and another choice rounds differently.
    """
    searching = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searching
