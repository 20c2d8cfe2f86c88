"""Muon against its definition, the grouping of parameters, and the schedule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sader.models import PRESETS, build_model
from sader.training.config import TrainConfig
from sader.training.optim import (
    Muon,
    make_optimizers,
    orthogonalised,
    progress_of,
    rate_factor,
    set_rate,
    split_parameters,
)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_parameter_is_in_exactly_one_group(preset: str) -> None:
    with torch.device("meta"):
        model = build_model(PRESETS[preset]())
    groups = split_parameters(model)
    named = dict(model.named_parameters())
    assert sorted(groups.muon + groups.adam) == sorted(named)
    assert not set(groups.muon) & set(groups.adam)
    assert all(named[name].ndim >= 2 for name in groups.muon)
    # The bulk of the weights is hidden; first and last layers are not.
    assert sum(named[name].numel() for name in groups.muon) > 0.9 * sum(p.numel() for p in named.values())
    assert {"network.stem.weight", "network.out.weight", "network.condition_net.stem.weight"} <= set(groups.adam)


def test_optimizers_hold_every_parameter_once() -> None:
    model = build_model(PRESETS["small"]())
    optimizers = make_optimizers(model, TrainConfig())
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("shape", [(6, 6), (4, 20), (20, 4)])
def test_newton_schulz_keeps_directions_and_evens_out_singular_values(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, *shape, generator=generator)
    result = orthogonalised(matrices)
    for matrix, even in zip(matrices, result, strict=True):
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inner = torch.diagonal(u.T @ even @ v.T)
        # The quintic does not converge to 1 but to a band around it; off-diagonal parts are rounding.
        assert (inner > 0.3).all()
        assert (inner < 1.5).all()
        assert torch.allclose(u @ torch.diag(inner) @ v, even, atol=1e-4)


def test_muon_step_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    conv = nn.Parameter(torch.randn(24, 2, 3, 3, generator=generator))
    linear = nn.Parameter(torch.randn(5, 18, generator=generator))
    before = [conv.detach().clone(), linear.detach().clone()]
    optimizer = Muon([conv, linear], lr=0.1, weight_decay=0.5)
    means = [torch.zeros_like(conv), torch.zeros_like(linear)]
    for _ in range(2):
        for index, parameter in enumerate((conv, linear)):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            means[index] = 0.95 * means[index] + 0.05 * parameter.grad
            blended = 0.05 * parameter.grad + 0.95 * means[index]
            flat = blended.reshape(len(blended), -1)
            scale = max(1.0, flat.shape[0] / flat.shape[1]) ** 0.5
            update = scale * orthogonalised(flat[None])[0].view_as(parameter)
            before[index] = before[index] * (1 - 0.1 * 0.5) - 0.1 * update
        optimizer.step()
    assert torch.allclose(conv, before[0], atol=1e-5)
    assert torch.allclose(linear, before[1], atol=1e-5)


def test_equal_shapes_in_one_batch_change_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(8, 12, generator=generator) for _ in range(4)]
    gradients = [torch.randn(8, 12, generator=generator) for _ in range(4)]
    together = [nn.Parameter(w.clone()) for w in weights]
    alone = [nn.Parameter(w.clone()) for w in weights]
    for group in (together, alone):
        for parameter, gradient in zip(group, gradients, strict=True):
            parameter.grad = gradient.clone()
    Muon(together, lr=0.1).step()
    for parameter in alone:
        Muon([parameter], lr=0.1).step()
    for a, b in zip(together, alone, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_zero_gradient_moves_nothing() -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.zeros(3, 4)
    Muon([parameter], lr=0.1).step()
    assert torch.equal(parameter, torch.ones(3, 4))


def test_muon_learns_a_linear_map() -> None:
    generator = torch.Generator().manual_seed(3)
    wanted = torch.randn(8, 8, generator=generator)
    layer = nn.Linear(8, 8, bias=False)
    optimizer = Muon(layer.parameters(), lr=0.05)
    x = torch.randn(64, 8, generator=generator)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 150)
        loss = (layer(x) - x @ wanted.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-2


def test_schedule_rises_falls_and_ends_at_one_percent() -> None:
    assert rate_factor(0.0, warmup=0.1) == 0.0
    assert rate_factor(0.05, warmup=0.1) == pytest.approx(0.5)
    assert rate_factor(0.1, warmup=0.1) == pytest.approx(1.0)
    assert rate_factor(0.55, warmup=0.1) == pytest.approx(0.01 + 0.99 / 2)
    assert rate_factor(1.0, warmup=0.1) == pytest.approx(0.01)
    assert rate_factor(2.0, warmup=0.1) == pytest.approx(0.01)
    assert rate_factor(0.0, warmup=0.0) == 1.0


def test_progress_is_the_further_of_steps_and_time() -> None:
    assert progress_of(TrainConfig(steps=100), 25, 90.0) == 0.25
    limited = TrainConfig(steps=100, max_seconds=100.0)
    assert progress_of(limited, 25, 90.0) == 0.9
    assert progress_of(limited, 25, 900.0) == 1.0
    assert math.isclose(progress_of(limited, 99, 1.0), 0.99)


def test_set_rate_scales_each_peak() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    optimizers = make_optimizers(model, TrainConfig(), outer=())
    set_rate(optimizers, 0.5)
    assert [o.param_groups[0]["lr"] for o in optimizers] == pytest.approx([5e-4, 1.5e-4])
