"""`Trainer`: one training step, from a batch to the moved weights. The loop around it, files and devices: `run.py`.

All random numbers of a step follow from (seed, micro-batch number). A step therefore depends on the weights before it
and on nothing else: a resumed run, or one on several processes, computes the same numbers.

`PhasedTrainer` trains the baselines, whose step may have several losses, such as generator and discriminator. Each
phase moves parameters of its own on a loss of its own, evaluated after the phases before it have moved theirs
(`baselines.baseline.Baseline.phases_of`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline
from sader.data.batch import SeriesBatch, keyed_generator
from sader.errors import ConfigError, TrainingError
from sader.training.config import TrainConfig
from sader.training.graph import CapturedStep
from sader.training.optim import OUTER_LAYERS, Ema, make_adam, make_optimizers, progress_of, scheduled_rate, set_rate
from sader.training.processes import Process

Model = TypeVar("Model", bound=nn.Module)
MicroBatches = Iterable[tuple[SeriesBatch, torch.Generator]]
"""Batches with the generators of their noise."""
_AHEAD = 2
"""Steps the host may be ahead of the device: enough to keep it busy, few enough to bound memory."""


_KEPT = 4
"""Batches that a `SharedMaker` keeps: trainers that take turns are at most one step apart, in sizes of two kinds."""


Loss = Callable[[Any, SeriesBatch, torch.Generator], tuple[Tensor, dict[str, Tensor]]]
"""What a step minimises: (model, batch, generator of the noise) -> the loss, and detached scalars for the log."""


class Maker(Protocol):
    """Source of batches by number: `data.bank.SeriesMaker`, `guide.GuideMaker`."""

    def batch(self, step: int, batch_size: int, dates: int, crop: int) -> SeriesBatch: ...


class SharedMaker:
    """A maker for trainers that need the same batches at about the same time: each batch is composed once."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self._kept: dict[tuple[int, ...], tuple[SeriesBatch, torch.cuda.Event | None]] = {}

    def batch(self, step: int, batch_size: int, dates: int, crop: int) -> SeriesBatch:
        """Return batch number `step`, ready for the current stream. Its tensors belong to all that take it."""
        key = (step, batch_size, dates, crop)
        if key not in self._kept:
            batch, made = self.maker.batch(*key), None
            if batch.cloudy.is_cuda:
                made = torch.cuda.Event()
                made.record()
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = batch, made
        batch, made = self._kept[key]
        if made is not None:
            made.wait()
        return batch


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
        if number not in self._ready:
            with torch.cuda.stream(self._stream), no_search():  # None is no stream of its own
                self._ready[number] = self.maker.batch(number, *self.shape)

    def take(self, number: int) -> SeriesBatch:
        """Return batch `number`, composed now unless it was prepared; the current stream may use it immediately."""
        self.prepare(number)
        batch = self._ready.pop(number)
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for value in batch.tensors().values():
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


class Trainer(Generic[Model]):
    """Trains a model on one loss and holds everything a checkpoint must hold.

    outer: first and last layers, which Muon leaves to AdamW (`optim.split_parameters`).
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        config: TrainConfig,
        maker: Maker,
        process: Process,
        *,
        outer: Sequence[str] = OUTER_LAYERS,
    ) -> None:
        self.model, self.loss, self.config, self.process = model.to(process.device), loss, config, process
        self.device = process.device
        self.bf16 = config.precision == "bf16" or (config.precision == "auto" and self.device.type == "cuda")
        self.outer = tuple(outer)
        self.steps_done, self.elapsed = 0, 0.0
        self.latest: dict[str, float] = {}
        """The values last logged."""
        self.optimizers = self.make_optimizers()
        self.feed = BatchFeed(maker, config.batch_size, config.dates, config.crop, device=self.device)
        self.ema = Ema(model, config.ema_decay)
        self.saved_at = 0.0
        """Value of `elapsed` at the last checkpoint."""
        self._recent: list[tuple[int, dict[str, Tensor]]] = []
        self._clock: float | None = None
        self._factor = 0.0
        self._graph: CapturedStep | None = None

    # ---------------------------------------------------------------- the step

    def step(self) -> None:
        """Do the next step: rate, gradients, clip, optimisers, average; then start making the next batch."""
        config, step = self.config, self.steps_done
        self._clock = monotonic() if self._clock is None else self._clock
        self._factor = scheduled_rate(config, step, self.elapsed)
        set_rate(self.optimizers, self._factor)
        if self.captures:
            terms = self._replay(step)
        else:
            terms = self.update(self._micro_batches(step))
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        self.ema.update()

        self.steps_done = step + 1
        self._recent.append((self.steps_done, terms))
        self._tick()
        if not self.over:
            self.feed.prepare(self._numbers(step + 1)[0])
        self.feed.step_done()

    def update(self, micro_batches: MicroBatches) -> dict[str, Tensor]:
        """Add up the gradients of the micro-batches and move the parameters once; return the terms of the log."""
        terms: dict[str, Tensor] = {}
        for batch, generator in micro_batches:
            with self.precision():
                loss, parts = self.loss(self.model, batch, generator)
            (loss / self.config.accumulate).backward()
            self.add_terms(terms, {"loss": loss.detach(), **parts})
        self.move(self.optimizers, terms)
        return terms

    def add_terms(self, terms: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
        """Add the parts of one micro-batch to the means in `terms`."""
        for name, value in parts.items():
            terms[name] = terms.get(name, 0.0) + value.float() / self.config.accumulate

    def move(
        self, optimizers: Sequence[torch.optim.Optimizer], terms: dict[str, Tensor], *, norm: str = "gradient_norm"
    ) -> None:
        """Add up gradients and terms over the processes, clip, add the norm to the terms, and step the optimisers."""
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]
        if self.process.count > 1:
            self.process.add_up([*(p.grad for p in parameters), *terms.values()])
        terms[norm] = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip or math.inf)
        for optimizer in optimizers:
            optimizer.step()

    def _micro_batches(self, step: int) -> Iterator[tuple[SeriesBatch, torch.Generator]]:
        """Yield this process's micro-batches of a step; the global generator of dropout is seeded for each."""
        for number in self._numbers(step):
            seed = self._seed(number)
            torch.manual_seed(seed)
            yield self.feed.take(number), torch.Generator(self.device).manual_seed(seed)

    def _numbers(self, step: int) -> range:
        """Return the numbers of this process's micro-batches: those of a step are dealt out in turn."""
        first = step * self.config.accumulate
        return range(first + self.process.rank, first + self.config.accumulate, self.process.count)

    def _seed(self, number: int) -> int:
        return int(keyed_generator(self.config.seed, number, 2).integers(2**62))

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context the network is evaluated in; batches, optimisers and averages stay outside."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    # ---------------------------------------------------------------- CUDA graph

    @property
    def captures(self) -> bool:
        """Whether steps are replayed as a CUDA graph: one GPU, one micro-batch a step."""
        config = self.config
        single = config.devices == 1 and config.accumulate == 1
        return config.cuda_graph and single and self.device.type == "cuda"

    def _replay(self, step: int) -> dict[str, Tensor]:
        """Do the update as one replay of a CUDA graph, captured at the first step after any state was restored."""
        batch = self.feed.take(step)
        if self._graph is None:
            # The running statistics of batch norms change during the warm-up of the capture as well.
            moved = [*self.model.parameters(), *self.model.buffers()]
            self._graph = CapturedStep(
                lambda batch, generator: self.update([(batch, generator)]),
                batch,
                parameters=moved,
                optimizers=self.optimizers,
            )
        return self._graph(batch, self._seed(step))

    # ---------------------------------------------------------------- time and log

    @property
    def progress(self) -> float:
        """The finished share of the run, in [0, 1]."""
        return progress_of(self.config, self.steps_done, self.elapsed)

    @property
    def over(self) -> bool:
        """Whether the last step is done."""
        return self.progress >= 1

    def _tick(self) -> None:
        """Bring `elapsed` up to date, the same in every process."""
        now = monotonic()
        assert self._clock is not None
        self.elapsed, self._clock = self.elapsed + now - self._clock, now
        if self.config.max_seconds is not None or self.config.pause_seconds is not None:
            self.elapsed = self.process.of_main(self.elapsed)

    def collect(self) -> dict[str, float]:
        """Return the means of all terms since the last call; raise a `TrainingError` where one is not finite."""
        if not self._recent:
            return {}
        names = list(self._recent[0][1])
        table = torch.stack([torch.stack([terms[n].float() for n in names]) for _, terms in self._recent]).tolist()
        numbers = [number for number, _ in self._recent]
        self._recent.clear()
        for number, row in zip(numbers, table, strict=True):
            for name, value in zip(names, row, strict=True):
                if not math.isfinite(value):
                    raise TrainingError(
                        f"{name} is {value} at step {number}; the last checkpoint before it is kept. Lower "
                        "train.muon_lr and train.adam_lr, or train with train.precision=fp32, and continue with --init "
                        "and the run's model.safetensors; or check the batch of that step for bad pixels."
                    )
        means = {name: sum(column) / len(column) for name, column in zip(names, zip(*table, strict=True), strict=True)}
        self.latest = means | {"lr_factor": self._factor, "seconds": self.elapsed}
        return self.latest

    # ---------------------------------------------------------------- optimisers and state

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimisers of all trained parameters."""
        return make_optimizers(self.model, self.config, outer=self.outer, captured=self.captures)

    def state(self) -> dict[str, Any]:
        """Return everything the following steps depend on."""
        return {
            "step": self.steps_done,
            "elapsed": self.elapsed,
            "latest": self.latest,
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.steps_done, self.elapsed = int(state["step"]), float(state["elapsed"])
        self.saved_at, self.latest = self.elapsed, dict(state["latest"])
        self.model.load_state_dict(state["model"], strict=True)
        self.ema.load_state_dict(state["ema"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            # Keep the own options: saved learning rates are in host memory, which a captured step cannot read.
            options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, own in zip(optimizer.param_groups, options, strict=True):
                group.update(own)


class PhasedTrainer(Trainer[Baseline]):
    """Trains a baseline phase by phase."""

    def update(self, micro_batches: MicroBatches) -> dict[str, Tensor]:
        """Move the parameters of each phase once, in order; return the terms of all phases."""
        runs = [(g.initial_seed(), self.model.losses(batch, g)) for batch, g in micro_batches]
        result: dict[str, Tensor] = {}
        for place, (phase, optimizer) in enumerate(self.phases.items()):
            terms: dict[str, Tensor] = {}
            prefix = "" if phase == MAIN else f"{phase}_"
            for seed, run in runs:
                # Of dropout. With one micro-batch the step's seed serves all phases, as in a replayed graph.
                if self.config.accumulate > 1:
                    torch.manual_seed(seed + place)
                with self.precision():
                    found = next(run)
                assert found.name == phase, f"phase {found.name} was evaluated where {phase} was expected"
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                (found.loss / self.config.accumulate).backward(inputs=parameters)
                self.add_terms(terms, {f"{prefix}loss": found.loss.detach(), **found.terms})
            self.move([optimizer], terms, norm=f"{prefix}gradient_norm")
            result |= terms
        return result

    @property
    def captures(self) -> bool:
        return self.model.capturable and super().captures

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.config.optimizer == "muon":
            raise ConfigError("train.optimizer is muon, which is for SADER's own networks; use adam or adamw.")
        self.phases = {
            phase: make_adam(parameters, self.config, captured=self.captures)
            for phase, parameters in self.model.parameter_groups().items()
        }
        return list(self.phases.values())

    def state(self) -> dict[str, Any]:
        return super().state() | {"memory": self.model.memory()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.model.remember(state["memory"])
