"""The averaged weights: warm-up, evaluation and saving."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sader.errors import CheckpointError
from sader.training.optim import Ema


def test_update_follows_the_warm_up() -> None:
    layer = nn.Linear(2, 2)
    ema = Ema(layer, decay=0.5)
    expected = layer.weight.detach().clone()
    for n in range(1, 12):
        with torch.no_grad():
            layer.weight.fill_(float(n))
        ema.update()
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * n
        assert torch.allclose(ema.shadow[0], expected, atol=1e-6)


def test_applied_puts_everything_back() -> None:
    layer = nn.Linear(2, 2)
    ema = Ema(layer)
    with torch.no_grad():
        layer.weight.fill_(3.0)
    address = layer.weight.data_ptr()
    average = ema.shadow[0].clone()

    def fail() -> None:
        with ema.applied():
            assert torch.equal(layer.weight, average)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert (layer.weight == 3).all()
    assert layer.weight.data_ptr() == address
    assert layer.weight.requires_grad


def test_saved_average_goes_on_the_same() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    ema = Ema(first, 0.9)
    ema.update()
    other = Ema(second, 0.9)
    other.load_state_dict(ema.state_dict())
    assert other.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(ema.shadow, other.shadow, strict=True))
    with pytest.raises(CheckpointError, match="first difference: bias"):
        Ema(nn.Linear(3, 2, bias=False)).load_state_dict(ema.state_dict())
