"""When a step may be recorded as a CUDA graph: only if replaying it repeats what the same step run eagerly does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sader.training.config import TrainConfig
from sader.training.module import TrainingModule


def recording(network: nn.Module, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> bool:
    monkeypatch.setattr(TrainingModule, "device", torch.device(device))
    return TrainingModule(network, pytest.fail, config, make_maker=pytest.fail, bf16=False).recording


def test_one_gpu_one_micro_batch_nothing_compiled(monkeypatch):
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout(0.0))
    assert recording(network, TrainConfig(), monkeypatch)
    assert not recording(network, TrainConfig(), monkeypatch, device="cpu")
    for changes in ({"record": False}, {"accumulate": 2}, {"compile": True}, {"accumulate": 2, "devices": 2}):
        assert not recording(network, TrainConfig(**changes), monkeypatch), changes


def test_not_with_dropout_whose_masks_a_resumed_run_could_not_repeat(monkeypatch):
    assert not recording(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout(0.1)), TrainConfig(), monkeypatch)
