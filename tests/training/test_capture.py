"""When a step may be captured as a CUDA graph: only if a replay repeats what the same step does eagerly."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from sader.training.config import TrainConfig
from sader.training.trainer import Trainer


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


def test_not_with_dropout_whose_masks_a_resumed_run_could_not_repeat() -> None:
    assert not captures(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout(0.1)), TrainConfig())
