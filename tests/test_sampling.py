"""The sampler: the grid, the closed form, the order of convergence on Gaussian data, and independence of the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sader.errors import ConfigError
from sader.method.diffusion import generator_noise, karras_sigmas, sample

F64 = torch.float64


@pytest.mark.parametrize(
    ("steps", "sigma_max", "printed"),
    [
        (4, 40, ("40", "4.8616", "0.23499", "0.001", "0")),
        (5, 100, ("100", "20.656", "2.6881", "0.14951", "0.001", "0")),
        (1, 40, ("40", "0")),
    ],
)
def test_karras_grids_of_both_datasets(steps, sigma_max, printed):
    sigmas = karras_sigmas(steps, sigma_min=0.001, sigma_max=sigma_max)
    assert sigmas.shape == (steps + 1,)
    for value, text in zip(sigmas.tolist(), printed, strict=True):
        digits = len(text.partition(".")[2])
        assert value == pytest.approx(float(text), abs=0.51 * 10.0**-digits if digits else 1e-9)
    assert sigmas[-1] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": 0, "sigma_min": 0.001, "sigma_max": 40}, r"steps is 0; .*at least 1"),
        ({"steps": 4, "sigma_min": 0.0, "sigma_max": 40}, r"sigma_min 0\.0 .* expected 0 < sigma_min"),
        ({"steps": 4, "sigma_min": 2.0, "sigma_max": 1.0}, r"sigma_min 2\.0 and sigma_max 1\.0"),
    ],
)
def test_bad_grids_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        karras_sigmas(**arguments)


def fixed(noise: Tensor) -> Callable[[int], Tensor]:
    return lambda draw: noise


def test_euler_step_equals_the_ode_with_the_mean():
    """d_t = alpha mu_t - (D + alpha sigma mu_t - x_t) / sigma; x_t <- x_t + (sigma' - sigma) d_t."""
    generator = torch.Generator().manual_seed(0)
    mean, start = torch.randn(2, 2, 3, 4, 5, 6, generator=generator, dtype=F64)
    answers = torch.randn(4, 2, 4, 5, 6, generator=generator, dtype=F64)
    sigmas, alpha = karras_sigmas(4, sigma_min=0.001, sigma_max=40), 3.0
    states: list[Tensor] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        states.append(x)
        return answers[len(states) - 1] + 0.1 * x.mean(dim=1)

    result = sample(denoise, mean, fixed(start), sigmas, alpha=alpha)
    x = alpha * sigmas[0] * mean + sigmas[0] * start
    for step in range(4):
        sigma, lower = sigmas[step], sigmas[step + 1]
        torch.testing.assert_close(states[step], x)
        denoised = (answers[step] + 0.1 * x.mean(dim=1))[:, None]
        slope = alpha * mean - (denoised + alpha * sigma * mean - x) / sigma
        x = x + (lower - sigma) * slope
    assert len(states) == 4
    torch.testing.assert_close(result, x.mean(dim=1))  # at sigma' = 0 every frame is the answer


# y ~ N(M0, S0^2) for every pixel; x_t = y + sigma (alpha mu_t + eps_t). The ideal denoiser is the posterior mean, and
# it depends on the frames through their mean only, so the ODE of the frames' mean can be solved by hand.
M0, S0, ALPHA = 0.3, 0.7, 1.5


def ideal(mean: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    frames = mean.shape[1]

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        level = sigma.view(-1, 1, 1, 1)
        seen = (x - ALPHA * level[:, None] * mean).mean(dim=1)
        return M0 + S0**2 / (S0**2 + level**2 / frames) * (seen - M0)

    return denoise


def exact(mean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Return where the flow ends. With z = mean over frames of (x - alpha sigma mu) - M0, dx/dsigma = (x - D) / sigma
    gives dz/dsigma = z (1 - S0^2/(S0^2 + sigma^2/T)) / sigma, so z grows like sqrt(S0^2 + sigma^2/T)."""
    frames = mean.shape[1]
    # The start has no clear term (paper, Algorithm 1, line 1): z(sigma) = sigma * average noise - M0.
    z = sigma * noise.mean(dim=1) - M0
    return M0 + z * S0 / math.sqrt(S0**2 + sigma**2 / frames)


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize(("solver", "order"), [("euler", 1.0), ("heun", 2.0)])
def test_order_of_convergence_on_gaussian_data(solver, order, frames):
    generator = torch.Generator().manual_seed(frames)
    mean, noise = torch.randn(2, 2, frames, 2, 4, 4, generator=generator, dtype=F64)
    sigma_max, sigma_min = 3.0, 1e-5
    truth = exact(mean, noise, sigma_max)
    counts = [16, 32, 64, 128]
    errors = []
    for steps in counts:
        sigmas = karras_sigmas(steps, sigma_min=sigma_min, sigma_max=sigma_max, rho=3.0)
        found = sample(ideal(mean), mean, fixed(noise), sigmas, alpha=ALPHA, solver=solver)
        errors.append((found - truth).abs().max().item())
    slopes = [math.log(a / b) / math.log(2) for a, b in itertools.pairwise(errors)]
    assert slopes[-1] == pytest.approx(order, abs=0.12), (errors, slopes)
    assert errors[-1] < (0.02 if solver == "euler" else 1e-3)


@pytest.mark.parametrize(("solver", "evaluations"), [("euler", 4), ("heun", 7)])
def test_callback_and_evaluation_counts(solver, evaluations):
    mean = torch.zeros(1, 2, 3, 4, 4)
    calls: list[float] = []
    seen: list[tuple[int, Tensor]] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        assert sigma.shape == (1,)
        calls.append(sigma.item())
        return torch.full_like(x[:, 0], float(len(calls)))

    result = sample(
        denoise,
        mean,
        generator_noise((2, 3, 4, 4), [0]),
        karras_sigmas(4, sigma_min=0.001, sigma_max=40),
        alpha=1.0,
        solver=solver,
        callback=lambda step, image: seen.append((step, image)),
    )
    assert len(calls) == evaluations
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert torch.equal(seen[-1][1], result)


def test_start_is_initial_plus_mean_plus_noise_and_draw_zero():
    mean, noise = torch.full((1, 2, 1, 2, 2), 0.5), torch.full((1, 2, 1, 2, 2), -2.0)
    asked: list[int] = []
    states: list[Tensor] = []

    def source(draw: int) -> Tensor:
        asked.append(draw)
        return noise

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        states.append(x)
        return x[:, 0]

    sample(denoise, mean, source, torch.tensor([10.0, 0.0]), alpha=3.0, initial=torch.full((1, 1, 1, 2, 2), 0.25))
    assert asked == [0]
    torch.testing.assert_close(states[0], torch.full((1, 2, 1, 2, 2), 0.25 + 10 * (3 * 0.5 - 2.0)))


def test_correction_replaces_image_and_state_and_gets_noise_of_its_own_step():
    mean = torch.zeros(1, 1, 1, 2, 2)
    asked: list[tuple[int, int]] = []
    states: list[Tensor] = []

    def source(draw: int) -> Tensor:
        asked.append((len(states), draw))
        return torch.zeros_like(mean)

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        states.append(x)
        return torch.ones_like(x[:, 0])

    def correction(denoise, denoised, *, mean, sigma, alpha, step, noise):
        if step == 0:
            return None
        noise(1)
        noise(2)
        return denoised + 4.0, torch.full_like(mean, 9.0)

    sigmas = torch.tensor([8.0, 4.0, 2.0, 0.0])
    result = sample(denoise, mean, source, sigmas, alpha=1.0, correction=correction)
    assert states[1].unique().item() == pytest.approx(1 + 0.5 * (0 - 1))  # step 0 was left alone
    assert states[2].unique().item() == pytest.approx(5 + 0.5 * (9 - 5))  # the corrected image and the new state
    assert result.unique().item() == 5.0
    draws = [draw for _, draw in asked]
    assert len(set(draws)) == len(draws), "every resampling has noise of its own"


def test_noise_comes_from_the_given_seeds_one_generator_per_item():
    shape = (3, 2, 8, 8)
    noise = generator_noise(shape, [5, 6, 5])
    first = noise(0)
    assert first.shape == (3, *shape)
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, noise(0))
    assert not torch.equal(first, noise(1))
    big = generator_noise((4, 4, 64, 64), [1])(0)
    assert big.mean().abs() < 0.02
    assert big.std().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_batch_of_three_is_three_batches_of_one_bit_for_bit(solver):
    torch.manual_seed(0)
    weights = torch.randn(2, 2)
    mean = torch.randn(3, 2, 2, 6, 7)
    sigmas = karras_sigmas(4, sigma_min=0.001, sigma_max=40)

    def run(rows: list[int]) -> Tensor:
        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            level = sigma.view(-1, 1, 1, 1)
            mixed = weights[0, 0] * x[:, 0] + weights[0, 1] * x[:, 1].roll(1, dims=-1)
            return torch.tanh(mixed / (1 + level) + weights[1, 0])

        noise = generator_noise((2, 2, 6, 7), [100 + row for row in rows])
        return sample(denoise, mean[rows], noise, sigmas, alpha=1.0, solver=solver)

    together = run([0, 1, 2])
    for row in range(3):
        assert torch.equal(together[row : row + 1], run([row]))
    assert not torch.equal(together[0], together[1])


def test_unknown_solver_is_refused():
    mean = torch.zeros(1, 1, 1, 2, 2)
    with pytest.raises(ConfigError, match="solver is 'rk4'; expected 'euler' or 'heun'"):
        sample(lambda x, s: x[:, 0], mean, fixed(mean), torch.tensor([1.0, 0.0]), alpha=1.0, solver="rk4")
