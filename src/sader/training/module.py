"""`TrainingModule`: one training step, readable top to bottom (METHOD 7). One step moves every optimiser once.

A step has phases, one for each set of parameters that is moved on a loss of its own: SADER has one, an adversarial
baseline two (`baselines.protocol`). The loss of a phase is evaluated after the phases before it have moved.

Every random number follows from (seed, micro-batch number), so a step depends on the weights before it and on nothing
else: not on what ran before, nor in how many processes. Files, folders and devices are `run.py`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, Phase
from sader.data.batch import SeriesBatch, keyed_generator
from sader.errors import ConfigError, TrainingError
from sader.training.config import TrainConfig
from sader.training.ema import Ema
from sader.training.feed import BatchFeed, Maker
from sader.training.optim import (
    OUTER_LAYERS,
    make_optimizers,
    make_phase_optimizers,
    progress_of,
    rate_factor,
    set_rate,
)


class LossOf(Protocol):
    """What a step minimises: `objective.Objective` for a denoiser, `guide.GuideObjective` for a guide.

    A baseline has its own losses, phase by phase; `objective.BaselineObjective` is used in validation only.
    """

    def __call__(
        self, network: Any, batch: SeriesBatch, generator: torch.Generator, /
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


AfterStep = Callable[["TrainingModule", int, bool], None]


class TrainingModule(LightningModule):
    """Trains a denoiser (or a guide, or a baseline system); holds all that a checkpoint must hold.

    outer: first and last layers, which Muon leaves to AdamW (`optim.split_parameters`).
    make_maker: called with the device once it is known; gives the batches.
    after_step: called with (module, steps done, whether the run is over) after every step.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        objective: LossOf,
        config: TrainConfig,
        *,
        make_maker: Callable[[torch.device], Maker],
        bf16: bool,
        outer: Sequence[str] = OUTER_LAYERS,
        after_step: AfterStep | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.denoiser, self.objective, self.config = denoiser, objective, config
        self.bf16, self.outer = bf16, tuple(outer)
        self.steps_done, self.elapsed = 0, 0.0
        self.latest: dict[str, float] = {}
        self._make_maker, self._after_step = make_maker, after_step
        self._optimizers: list[torch.optim.Optimizer] = []
        self._phases: dict[str, list[torch.optim.Optimizer]] = {}
        self._restored: dict[str, Any] | None = None
        self._recent: list[tuple[int, dict[str, Tensor]]] = []
        self._clock, self._factor = 0.0, 0.0
        self._graph: Any = None
        # Dropout in a replayed graph goes on with the device's generator, which nothing seeds step by step as
        # `_generator` does: a resumed run could not repeat the masks of an uninterrupted one.
        self._drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in denoiser.modules())

    # ---------------------------------------------------------------- the step

    def training_step(self, step: int, batch_idx: int = 0) -> None:
        """Do step number `step` (from 0): for each phase gradients, clip and optimisers; then the average."""
        config = self.config
        self._factor = rate_factor(self.progress(), warmup=config.warmup, schedule=config.schedule)
        set_rate(self._optimizers, self._factor)
        terms = self._recorded(step) if self.recording else self._eager(step)
        self.ema.update()

        self.steps_done = step + 1
        self._recent.append((self.steps_done, terms))
        over = self._tick() >= 1.0
        if not over:
            self.feed.prepare(self._micro_batches(step + 1)[0])
        self.feed.step_done()
        if self.steps_done % config.log_every == 0 or over:
            self.write_log()
        if self._after_step is not None:
            self._after_step(self, self.steps_done, over)
        if over:
            self.trainer.should_stop = True

    def _eager(self, step: int) -> dict[str, Tensor]:
        """For each phase the gradients of this process's micro-batches one after the other, then the update."""
        runs = {number: self._micro_batch(number) for number in self._micro_batches(step)}
        terms: dict[str, Tensor] = {}
        for place, phase in enumerate(self._phases):
            found: dict[str, Tensor] = {}
            for number, run in runs.items():
                torch.manual_seed(self._seed(number) + place)  # of dropout, whatever ran in between
                for name, value in self._gradients(run, phase).items():
                    found[name] = found.get(name, 0.0) + value / self.config.accumulate
                if place == len(self._phases) - 1:
                    run.close()  # lets go of its batch before the next one is made
            self._sum_over_processes(phase, found)
            self._update(phase, found)
            terms |= found
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return terms

    def _micro_batch(self, number: int) -> Generator[Phase]:
        """Yield the phases of micro-batch `number`, made when first asked for."""
        yield from self._losses(self.feed.take(number), self._generator(number))

    def _recorded(self, step: int) -> dict[str, Tensor]:
        """The same as one replay of a CUDA graph, recorded at the first step (after any state was restored)."""
        batch = self.feed.take(step)
        if self._graph is None:
            from sader.training.graph import GraphedStep

            def body(batch: SeriesBatch, generator: torch.Generator) -> dict[str, Tensor]:
                run = self._losses(batch, generator)
                terms: dict[str, Tensor] = {}
                for phase in self._phases:
                    found = self._gradients(run, phase)
                    self._update(phase, found)
                    terms |= found
                return terms

            # Running statistics of batch norms move in the warm-up as well.
            moved = [*self.denoiser.parameters(), *self.denoiser.buffers()]
            self._graph = GraphedStep(body, batch, parameters=moved, optimizers=self._optimizers)
        return self._graph(batch, self._seed(step))

    def _losses(self, batch: SeriesBatch, generator: torch.Generator) -> Generator[Phase]:
        """Yield the loss of each phase; a denoiser or a guide has one."""
        if isinstance(self.denoiser, Baseline):
            yield from self.denoiser.losses(batch, generator)
        else:
            yield Phase(MAIN, *self.objective(self.denoiser, batch, generator))

    def _gradients(self, run: Iterator[Phase], phase: str) -> dict[str, Tensor]:
        """Add the gradients of one micro-batch to the parameters of `phase`, and to no others; return its terms."""
        with self.precision():
            found = next(run)
        assert found.name == phase, f"the phases come as {found.name} where {phase} was expected"
        (found.loss / self.config.accumulate).backward(inputs=self._parameters_of(phase))
        name = "loss" if phase == MAIN else f"{phase}_loss"
        return {name: value.float() for name, value in {name: found.loss.detach(), **found.terms}.items()}

    def _update(self, phase: str, terms: dict[str, Tensor]) -> None:
        """Clip the gradients of a phase, note their norm and move its parameters."""
        parameters = [p for p in self._parameters_of(phase) if p.grad is not None]
        name = "gradient_norm" if phase == MAIN else f"{phase}_gradient_norm"
        terms[name] = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip or math.inf)
        for optimizer in self._phases[phase]:
            optimizer.step()

    def _parameters_of(self, phase: str) -> list[Tensor]:
        return [p for optimizer in self._phases[phase] for group in optimizer.param_groups for p in group["params"]]

    @property
    def recording(self) -> bool:
        """Whether steps are replayed as a CUDA graph: one GPU, one micro-batch a step, nothing compiled, no dropout."""
        config = self.config
        alone = config.devices == 1 and config.accumulate == 1 and not config.compile
        if isinstance(self.denoiser, Baseline) and not self.denoiser.recordable:
            return False
        return config.record and alone and not self._drops and self.device.type == "cuda"

    def _micro_batches(self, step: int) -> range:
        """Return the numbers of this process's micro-batches: a step's are dealt out in turn."""
        first = step * self.config.accumulate
        return range(first + self.global_rank, first + self.config.accumulate, self.config.devices)

    def _generator(self, number: int) -> torch.Generator:
        """Return the source of the noise of micro-batch `number`; dropout's is seeded along."""
        seed = self._seed(number)
        torch.manual_seed(seed)
        return torch.Generator(self.device).manual_seed(seed)

    def _seed(self, number: int) -> int:
        return int(keyed_generator(self.config.seed, number, 2).integers(2**62))

    def precision(self) -> Any:
        """Return the context the network is evaluated in."""
        # Only the network runs in bf16; batches, optimisers and averages never see the autocast.
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _sum_over_processes(self, phase: str, terms: dict[str, Tensor]) -> None:
        """Add up gradients and terms of all processes: the same sum that one process makes of all micro-batches."""
        if self.config.devices == 1:
            return
        gradients = [p.grad for p in self._parameters_of(phase) if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients] + [value.reshape(1) for value in terms.values()])
        torch.distributed.all_reduce(flat)
        sizes = [g.numel() for g in gradients] + [1] * len(terms)
        parts = flat.split(sizes)
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=False)])
        for name, value in zip(terms, parts[len(gradients) :], strict=True):
            terms[name] = value[0]

    # ---------------------------------------------------------------- time

    def progress(self) -> float:
        """Return how far the run is, in [0, 1]."""
        return progress_of(self.steps_done, self.config.steps, self.elapsed, self.config.max_seconds)

    def _tick(self) -> float:
        """Bring `elapsed` up to date and return the progress, the same in every process."""
        now = monotonic()
        self.elapsed += now - self._clock
        self._clock = now
        if self.config.devices > 1 and self.config.max_seconds is not None:
            shared = torch.tensor([self.elapsed], dtype=torch.float64, device=self.device)
            torch.distributed.broadcast(shared, src=0)
            self.elapsed = float(shared)
        return self.progress()

    # ---------------------------------------------------------------- log

    def write_log(self) -> None:
        """Fetch what happened since the last call, stop on values that are not finite, and log the means."""
        if not self._recent:
            return
        names = list(self._recent[0][1])
        values = [torch.stack([terms[name].float() for name in names]) for _, terms in self._recent]
        table = torch.stack(values).tolist()
        numbers = [number for number, _ in self._recent]
        self._recent.clear()
        for number, row in zip(numbers, table, strict=True):
            for name, value in zip(names, row, strict=True):
                if not math.isfinite(value):
                    raise TrainingError(
                        f"{name} is {value} at step {number}; the last checkpoint before it is kept. Lower "
                        "train.muon_lr and train.adam_lr, or train with train.precision=fp32, and go on with --init "
                        "and the run's model.safetensors; or look at the batch of that step for bad pixels."
                    )
        means = {name: sum(column) / len(column) for name, column in zip(names, zip(*table, strict=True), strict=True)}
        means["lr_factor"] = self._factor
        means["seconds"] = self.elapsed
        self.latest = means
        for logger in self.loggers:
            logger.log_metrics(means, numbers[-1])

    # ---------------------------------------------------------------- set-up and state

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        config, network = self.config, self.denoiser
        if config.optimizer == "muon":
            if isinstance(network, Baseline):
                raise ConfigError("train.optimizer is muon, which is for SADER's own networks; use adam or adamw.")
            made = make_optimizers(
                network,
                muon_lr=config.muon_lr,
                adam_lr=config.adam_lr,
                betas=config.betas,
                weight_decay=config.weight_decay,
                outer=self.outer,
                recorded=self.recording,
            )
            self._phases = {MAIN: made}
        else:
            own = {MAIN: [p for p in network.parameters() if p.requires_grad]}
            self._phases = make_phase_optimizers(
                network.parameter_groups() if isinstance(network, Baseline) else own,
                lr=config.adam_lr,
                betas=config.betas,
                weight_decay=config.weight_decay,
                decoupled=config.optimizer == "adamw",
                recorded=self.recording,
            )
        self._optimizers = [optimizer for phase in self._phases.values() for optimizer in phase]
        return self._optimizers

    def on_fit_start(self) -> None:
        """Everything that needs the device: the batches, the average, and what a checkpoint holds."""
        config = self.config
        maker = self._make_maker(self.device)
        self.feed = BatchFeed(
            maker, device=self.device, batch_size=config.batch_size, dates=config.dates, crop=config.crop
        )
        self.ema = Ema(self.denoiser, config.ema_decay)
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None

    def on_train_start(self) -> None:
        self._clock = monotonic()

    def state(self) -> dict[str, Any]:
        """Return all that the following steps depend on."""
        return {
            "step": self.steps_done,
            "elapsed": self.elapsed,
            "model": self.denoiser.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "memory": self.denoiser.memory() if isinstance(self.denoiser, Baseline) else {},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`: now where the optimisers exist, else as soon as they do."""
        self.steps_done, self.elapsed = int(state["step"]), float(state["elapsed"])
        self._restored = state

    def _restore(self, state: dict[str, Any]) -> None:
        self.denoiser.load_state_dict(state["model"], strict=True)
        self.ema.load_state_dict(state["ema"])
        if isinstance(self.denoiser, Baseline):
            self.denoiser.remember(state["memory"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            # The saved options would bring learning rates in host memory, which a recorded step cannot read.
            options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, own in zip(optimizer.param_groups, options, strict=True):
                group.update(own)
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"] = group["lr"].to(self.device)
