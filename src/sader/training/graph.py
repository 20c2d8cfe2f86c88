"""One training step as a CUDA graph: thousands of small kernels launched as one.

Launching, not arithmetic, limits the steps of small networks (measurements: benchmarks/RESULTS.md). Shapes are fixed
during a run. Values that change from step to step are read from memory: the batch, the seed of the noise and of
dropout, the learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sader.data.batch import SeriesBatch

_WARM_UP = 3
"""Eager steps before the capture: they choose algorithms and create the state of the optimisers."""

StepBody = Callable[[SeriesBatch, torch.Generator], dict[str, Tensor]]
"""Gradients, clip, optimiser steps; returns the terms to log. Must not wait for the device."""


class CapturedStep:
    """Captures `body` once and replays it for every batch.

    parameters, optimizers: what `body` changes; their values before the capture are kept. Optimisers must read their
    learning rate from memory (`optim.make_optimizers(..., captured=True)`).
    """

    def __init__(
        self,
        body: StepBody,
        example: SeriesBatch,
        *,
        parameters: Sequence[Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.batch = replace(example, **{name: value.clone() for name, value in example.tensors().items()})
        self.generator = torch.Generator(example.cloudy.device).manual_seed(0)
        before = [parameter.detach().clone() for parameter in parameters]
        states_before = _state_tensors(optimizers)
        saved = [tensor.clone() for tensor in states_before]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                _drop_gradients(parameters)
                body(self.batch, self.generator)
        torch.cuda.current_stream().wait_stream(side)
        _drop_gradients(parameters)

        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph):
            self.terms = body(self.batch, self.generator)
        # The warm-up changed all values: restore them in place, because the graph holds their addresses.
        with torch.no_grad():
            torch._foreach_copy_(list(parameters), before)
            kept = {id(tensor): value for tensor, value in zip(states_before, saved, strict=True)}
            for tensor in _state_tensors(optimizers):
                if id(tensor) in kept:
                    tensor.copy_(kept[id(tensor)])
                else:  # created by the warm-up
                    tensor.zero_()

    def __call__(self, batch: SeriesBatch, seed: int) -> dict[str, Tensor]:
        """Do one step on `batch` with noise and dropout from `seed`; return its terms."""
        for name, buffer in self.batch.tensors().items():
            buffer.copy_(getattr(batch, name), non_blocking=True)
        self.generator.manual_seed(seed)
        torch.manual_seed(seed)  # the graph reads the global generator's seed at each replay
        self.graph.replay()
        return {name: value.clone() for name, value in self.terms.items()}


def _drop_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _state_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Return all tensors of the optimisers' state, in a fixed order."""
    return [
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]
