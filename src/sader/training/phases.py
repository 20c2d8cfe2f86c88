"""`PhasedTrainer`: training of the baselines, whose step may have several losses, such as generator and discriminator.

Each phase moves parameters of its own on a loss of its own, and the loss of a phase is evaluated after the phases
before it have moved theirs (`baselines.baseline.Baseline.phases_of`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sader.baselines.baseline import MAIN, Baseline
from sader.errors import ConfigError
from sader.training.optim import make_adam
from sader.training.trainer import MicroBatches, Trainer


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
                if not self.captures:
                    torch.manual_seed(seed + place)  # of dropout
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
