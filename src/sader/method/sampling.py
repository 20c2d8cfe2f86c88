"""Sampling: from the start noise to the clear image in a few steps (paper, Algorithm 1).

The probability-flow ODE of the mean-reverting process, written in the scaled variable, is
    dx/dsigma = alpha mu - (D + alpha sigma mu - x) / sigma = (x - D) / sigma,
because the two mu terms cancel. One Euler step to sigma' is therefore
    x' = D + sigma'/sigma (x - D),
which at sigma' = 0 is D itself. `resampling.py` holds the correction between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from sader.errors import ConfigError

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(noised (B, S, C, H, W), sigma (B,)) -> denoised (B, C, H, W); S state frames: the dates, or 1 with a composite."""

NoiseSource = Callable[[int], Tensor]
"""Draw number -> standard normal noise (B, S, C, H, W). Draw 0 starts the sampling, the others feed resampling."""

Solver = Literal["euler", "heun"]


class Correction(Protocol):
    """A correction between two steps: see `resampling.Resampler`."""

    def __call__(
        self,
        denoise: Denoise,
        denoised: Tensor,
        *,
        mean: Tensor,
        sigma: float,
        alpha: float,
        step: int,
        noise: NoiseSource,
    ) -> tuple[Tensor, Tensor] | None:
        """Return (corrected denoised, renoised state), or None to leave this step unchanged."""


def karras_sigmas(steps: int, *, sigma_min: float, sigma_max: float, rho: float = 7.0) -> Tensor:
    """Return the noise levels (steps + 1,) from `sigma_max` down to `sigma_min`, then 0 (the EDM grid).

    steps: 1 to about 50; with one step the grid is (sigma_max, 0).
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}; sampling needs at least 1. Use steps=4 for the paper's setting.")
    if not 0 < sigma_min <= sigma_max:
        raise ConfigError(f"sigma_min {sigma_min} and sigma_max {sigma_max}; expected 0 < sigma_min <= sigma_max.")
    position = torch.linspace(0, 1, steps, dtype=torch.float64)
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    sigmas = (high + position * (low - high)) ** rho
    return torch.cat([sigmas, torch.zeros(1, dtype=torch.float64)])


def generator_noise(shape: tuple[int, ...], seeds: list[int], *, device: torch.device | str = "cpu") -> NoiseSource:
    """Return a noise source for a batch: item b draws from its own generator seeded with (seeds[b], draw).

    shape: of one item, (S, C, H, W). The noise is drawn on the CPU, so that a seed gives the same image on every
    device and in every batch.
    """

    def draw(number: int) -> Tensor:
        items = []
        for seed in seeds:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % (2**63))
            items.append(torch.randn(shape, generator=generator))
        return torch.stack(items).to(device)

    return draw


@torch.no_grad()
def sample(
    denoise: Denoise,
    mean: Tensor,
    noise: NoiseSource,
    sigmas: Tensor | Sequence[float],
    *,
    alpha: float,
    initial: Tensor | float = 0.0,
    solver: Solver = "euler",
    correction: Correction | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Return the clear image (B, C, H, W) sampled from noise with a denoiser.

    mean: what the process reverts to, (B, S, C, H, W): the cloudy dates, or one composite.
    sigmas: decreasing noise levels ending in 0 (`karras_sigmas`).
    initial: first estimate of the clear image; 0 in the paper, the composite (B, 1, C, H, W) where one exists.
    solver: "euler" (the paper) or "heun" (second order, two evaluations a step except the last).
    callback: called with (step, denoised) after each step, for progress bars and figures.
    """
    if solver not in ("euler", "heun"):
        raise ConfigError(f"solver is {solver!r}; expected 'euler' or 'heun'.")
    batch = mean.shape[0]
    levels = [float(s) for s in sigmas]
    x = initial + levels[0] * (alpha * mean + noise(0))
    denoised = x.mean(dim=1)
    draws = 1
    for step, (sigma, lower) in enumerate(pairwise(levels)):
        level = torch.full((batch,), sigma, dtype=mean.dtype, device=mean.device)
        denoised = denoise(x, level)
        if correction is not None:
            corrected = correction(
                denoise, denoised, mean=mean, sigma=sigma, alpha=alpha, step=step, noise=_from_draw(noise, draws)
            )
            draws += 64  # a fixed stride, so that the number of draws of a correction does not shift later noise
            if corrected is not None:
                denoised, x = corrected
        image = denoised[:, None]
        following = image + (lower / sigma) * (x - image)
        if solver == "heun" and lower > 0:
            next_level = torch.full_like(level, lower)
            slope = (x - image) / sigma
            next_slope = (following - denoise(following, next_level)[:, None]) / lower
            following = x + (lower - sigma) * (slope + next_slope) / 2
        x = following
        if callback is not None:
            callback(step, denoised)
    # After the last step every state frame equals the last denoised image (sigma' = 0), so that is the result.
    return denoised


def _from_draw(noise: NoiseSource, first: int) -> NoiseSource:
    """Return the source whose draw 0 is draw `first` of `noise`."""
    return lambda draw: noise(first + draw)
