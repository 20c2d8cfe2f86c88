"""When a step may be captured as a CUDA graph: only if a replay repeats what the same step does eagerly."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sader.baselines.baseline import Phase
from sader.training.config import TrainConfig
from sader.training.graph import CapturedStep
from sader.training.trainer import PhasedTrainer, Trainer


@dataclass
class SimpleBatch:
    """A batch without tensors."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}


def captures(network: nn.Module, config: TrainConfig, device: str = "cuda") -> bool:
    trainer = SimpleNamespace(config=config, model=network, device=torch.device(device))
    return Trainer.captures.fget(trainer)


def test_one_gpu_one_micro_batch() -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout(0.0))
    assert captures(network, TrainConfig())
    assert captures(network, TrainConfig(compile=True))
    assert not captures(network, TrainConfig(), device="cpu")
    for changes in ({"cuda_graph": False}, {"accumulate": 2}, {"accumulate": 2, "devices": 2}):
        assert not captures(network, TrainConfig(**changes)), changes


def test_dropout_follows_the_seed_of_the_step_alone() -> None:
    """A replay seeds the global generator, so that a graph draws the masks of the eager step with that seed."""
    drop, masks = nn.Dropout(0.5), []
    step = CapturedStep.__new__(CapturedStep)
    step.batch, step.terms, step.generator = SimpleBatch(), {}, torch.Generator()
    step.graph = SimpleNamespace(replay=lambda: masks.append(drop(torch.ones(64))))
    for seed in (1, 2, 1):
        torch.rand(seed)  # other draws before the step change nothing
        step(SimpleBatch(), seed)
    torch.manual_seed(1)
    assert torch.equal(masks[0], drop(torch.ones(64)))
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])
    assert captures(nn.Sequential(nn.Conv2d(1, 1, 1), drop), TrainConfig())


@pytest.mark.parametrize(("accumulate", "again"), [(1, False), (2, True)])
def test_one_seed_of_dropout_serves_all_phases_of_a_step(
    monkeypatch: pytest.MonkeyPatch, accumulate: int, again: bool
) -> None:
    """Eager steps that could be captured seed once as a replay does; micro-batches of processes seed each phase."""
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    phases = [Phase(name, torch.ones((), requires_grad=True), {}) for name in ("discriminator", "generator")]
    model = SimpleNamespace(losses=lambda batch, generator: iter(phases))
    optimizers = {phase.name: torch.optim.SGD([phase.loss], 0.1) for phase in phases}
    trainer = PhasedTrainer.__new__(PhasedTrainer)
    trainer.model, trainer.phases, trainer.bf16 = model, optimizers, False
    trainer.config, trainer.process = TrainConfig(accumulate=accumulate), SimpleNamespace(count=1)
    trainer.update([(None, torch.Generator().manual_seed(7)) for _ in range(accumulate)])
    assert seeds == ([7, 7, 8, 8] if again else [])
