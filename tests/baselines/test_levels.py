"""Schedules as noise levels and the samplers of the DDPM baselines, against what is known in closed form."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sader.baselines.parts.ddpm import BetaSchedule, DenoiseImage, sample_ancestral, sample_multistep, unit_scale
from sader.errors import ConfigError

SHAPE = (2, 3, 8, 8)
MEAN, SPREAD = 0.3, 0.5


def noise(draw: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)


def gaussian(x: Tensor, sigma: Tensor) -> Tensor:
    """The ideal denoiser of pixels that are N(MEAN, SPREAD^2)."""
    level = sigma.view(-1, 1, 1, 1)
    return (SPREAD**2 * x + level**2 * MEAN) / (SPREAD**2 + level**2)


def test_levels_are_those_of_the_product_of_betas() -> None:
    schedule = BetaSchedule("linear", 1000, 1e-4, 0.02)
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    g = torch.cumprod(1 - betas, 0)
    found = schedule.sigma_at(torch.tensor([1.0, 500.0, 1000.0]))
    torch.testing.assert_close(found, ((1 - g) / g).sqrt()[[0, 499, 999]], rtol=1e-9, atol=0)
    torch.testing.assert_close(unit_scale(found) ** 2, g[[0, 499, 999]], rtol=1e-9, atol=0)
    assert float(schedule.sigma_at(torch.zeros(1))) == 0


def test_sigmoid_schedule_starts_and_ends_near_its_betas() -> None:
    steps = BetaSchedule("sigmoid", 1000, 1e-4, 0.09).log_signal().diff().mul(2).expm1().neg()
    edge = 1 / (1 + math.exp(6))
    assert float(steps[0]) == pytest.approx(1e-4 + 0.0899 * edge, rel=1e-6)
    assert float(steps[-1]) == pytest.approx(1e-4 + 0.0899 * (1 - edge), rel=1e-6)
    assert float(steps[499:501].mean()) == pytest.approx((1e-4 + 0.09) / 2, rel=1e-6)


def test_between_steps_the_level_rises_and_training_levels_stay_inside() -> None:
    schedule = BetaSchedule("sigmoid", 20, 1e-3, 0.3)
    time = torch.linspace(0, 20, 201)
    assert (schedule.sigma_at(time).diff() > 0).all()
    drawn = schedule.draw_sigma(500, torch.Generator().manual_seed(0))
    assert float(drawn.min()) > 0
    assert float(drawn.max()) <= float(schedule.sigma_at(torch.tensor(20.0)))
    # Uniform in time: half of the levels lie below that of the middle.
    below = (drawn < schedule.sigma_at(torch.tensor(10.0))).double().mean()
    assert 0.42 < float(below) < 0.58


@pytest.mark.parametrize("sampler", [sample_multistep, sample_ancestral])
def test_the_constant_a_denoiser_always_answers_comes_back(sampler: object) -> None:
    answer = torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8).expand(SHAPE).double()
    denoise: DenoiseImage = lambda x, sigma: answer  # noqa: E731
    last = 1.0 if sampler is sample_multistep else 0.0
    grid = BetaSchedule("sigmoid", 1000, 1e-4, 0.09).grid(7, last=last)
    torch.testing.assert_close(sampler(denoise, noise, grid), answer)  # type: ignore[operator]


def _flow_error(steps: int) -> float:
    """How far the solver's state is from the exact flow of Gaussian data, before the final denoise."""
    schedule = BetaSchedule("linear", 1000, 1e-4, 0.02)
    grid = schedule.grid(steps, last=5.0)
    seen: list[Tensor] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append(x)
        return gaussian(x, sigma)

    sample_multistep(denoise, noise, grid)
    first, last = float(grid[0]), float(grid[-1])
    shrink = math.sqrt((SPREAD**2 + last**2) / (SPREAD**2 + first**2))
    exact = MEAN + shrink * (first * noise(0) - MEAN)
    return float((seen[-1] - exact).abs().max())


def test_multistep_solver_is_of_second_order() -> None:
    errors = [_flow_error(steps) for steps in (40, 80, 160)]
    assert errors[-1] < 5e-3
    for coarse, fine in pairwise(errors):
        assert 3.2 < coarse / fine < 5.0, errors


def test_multistep_denoises_once_more_than_it_steps() -> None:
    levels: list[float] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        levels.append(float(sigma[0]))
        return gaussian(x, sigma)

    grid = BetaSchedule().grid(6, last=1.0)
    sample_multistep(denoise, noise, grid)
    assert levels == pytest.approx(grid.tolist())


def test_ancestral_chain_gives_the_data_its_spread() -> None:
    def wide(draw: int) -> Tensor:
        return torch.randn(1, 1, 100, 100, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)

    states: list[Tensor] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        states.append(x)
        return gaussian(x, sigma)

    sample_ancestral(denoise, wide, BetaSchedule().grid(400, last=0.0))
    # The last state is data with hardly any noise left; 10,000 pixels.
    assert float(states[-1].mean()) == pytest.approx(MEAN, abs=0.03)
    assert float(states[-1].std()) == pytest.approx(SPREAD, rel=0.04)


def test_wrong_schedules_and_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 steps with beta from 0\.0001 to 0\.02; expected at least 2"):
        BetaSchedule(steps=1)
    with pytest.raises(ConfigError, match="0 < first <= last < 1"):
        BetaSchedule(first=0.5, last=0.1)
    with pytest.raises(ConfigError, match="steps is 0; expected 1 to 1000"):
        BetaSchedule().grid(0, last=0.0)
