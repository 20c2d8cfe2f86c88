"""Discrete DDPM schedules as noise levels, and the two samplers of the DDPM baselines (DiffCR, DDPM-CR, SeqDMs).

A variance-preserving state sqrt(g) clear + sqrt(1 - g) noise, g the product of 1 - beta, is sqrt(g) times
clear + sigma noise with sigma = sqrt((1 - g) / g): the mean-reverting process of `diffusion.py` without a mean. States
are therefore kept in that scaled variable, where a first-order step (DDIM, DPM-Solver++ 1) is the Euler step of
`diffusion.py`, x' = D + sigma'/sigma (x - D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from sader.baselines.baseline import BaselineInputs
from sader.errors import ConfigError


def date_frames(inputs: BaselineInputs, *, reference: bool) -> Tensor:
    """Return the bands of each date, (B, T, C + A, H, W), with one more plane if `reference` is set.

    That plane is 1 in the reference date and 0 elsewhere. The published systems have none: they generate a new image,
    and a network that treats all dates alike cannot follow one of them.
    """
    frames = inputs.stacked
    if not reference:
        return frames
    position = torch.arange(frames.shape[1], device=frames.device)
    own = (position == inputs.reference[:, None]).to(frames.dtype)
    return torch.cat([frames, own[:, :, None, None, None].expand_as(frames[:, :, :1])], dim=2)


def sinusoid(value: Tensor, width: int, *, period: float = 10_000.0) -> Tensor:
    """Return cos and sin of `value` at width / 2 frequencies from 1 down to 1 / period: (...) -> (..., width)."""
    half = width // 2
    exponent = torch.arange(half, device=value.device, dtype=torch.float32) / half
    angle = value.float()[..., None] * period**-exponent
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def date_weights(query: Tensor, keys: Tensor, available: Tensor) -> Tensor:
    """Return the weight of each date for each head, (B, T, K, H, W), summing to 1 over the dates.

    query: (B or 1, K, D, H or 1, W or 1); keys: (B, T, K, D, H, W); available: bool (B, T, H, W). Where no date is
    available all of them have weight, because a softmax over nothing would be NaN.
    """
    # Products and sums, as in `model.attention`: tiny batched matrix products are several times slower.
    logits = (query[:, None] * keys).sum(dim=3).float() / keys.shape[3] ** 0.5
    use = available | ~available.any(dim=1, keepdim=True)
    return logits.masked_fill(~use[:, :, None], float("-inf")).softmax(dim=1)


def weigh_dates(frames: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over dates, each head weighing its own channels.

    frames (B, T, C, H, W) and weights (B, T, K, H, W) -> (B, C, H, W).
    """
    heads = weights.shape[2]
    grouped = frames.unflatten(2, (heads, -1))
    return (weights[:, :, :, None].to(frames.dtype) * grouped).sum(dim=1).flatten(1, 2)


DenoiseImage = Callable[[Tensor, Tensor], Tensor]
"""(noised (B, C, H, W), sigma (B,)) -> denoised (B, C, H, W), as `sampling.Denoise` with one state frame."""

ImageNoise = Callable[[int], Tensor]
"""Draw number -> standard normal noise (B, C, H, W), as `sampling.NoiseSource` with one state frame."""


@dataclass(frozen=True)
class BetaSchedule:
    """The noise added per step of a DDPM."""

    kind: Literal["linear", "sigmoid"] = "linear"
    """How beta grows from `first` to `last`; sigmoid: along a logistic curve from -6 to 6."""
    steps: int = 1000
    first: float = 1e-4
    last: float = 0.02

    def __post_init__(self) -> None:
        if self.steps < 2 or not 0 < self.first <= self.last < 1:
            raise ConfigError(
                f"a schedule of {self.steps} steps with beta from {self.first} to {self.last}; expected at least 2 "
                "steps and 0 < first <= last < 1."
            )

    def log_signal(self) -> Tensor:
        """Return ln sqrt(g) after 0, 1, ... steps, (steps + 1,) float64, falling from 0."""
        position = torch.linspace(0, 1, self.steps, dtype=torch.float64)
        if self.kind == "sigmoid":
            position = torch.sigmoid(12 * position - 6)
        betas = self.first + (self.last - self.first) * position
        return torch.cat([betas.new_zeros(1), torch.log1p(-betas).cumsum(0) / 2])

    def sigma_at(self, time: Tensor) -> Tensor:
        """Return sigma after `time` steps (fractions between, ln sqrt(g) linear), any shape, float64."""
        table = _log_signal_on(self, time.device)
        position = time.double().clamp(0, self.steps)
        low = position.floor().long().clamp(max=self.steps - 1)
        log_signal = torch.lerp(table[low], table[low + 1], position - low)
        return torch.expm1(-2 * log_signal).sqrt()

    def draw_sigma(self, batch: int, generator: torch.Generator) -> Tensor:
        """Return one training noise level per item, (batch,) float32: uniform in continuous time over the schedule."""
        time = torch.rand(batch, generator=generator, device=generator.device).double()
        # Starts at a small fraction of the first step: at sigma = 0 there is no noise to predict.
        return self.sigma_at(0.1 + (self.steps - 0.1) * time).float()

    def grid(self, steps: int, *, last: float) -> Tensor:
        """Return steps + 1 noise levels (float64), uniform in time from the end of the schedule to `last` steps."""
        if not 1 <= steps <= self.steps:
            raise ConfigError(f"steps is {steps}; expected 1 to {self.steps}, the length of the schedule.")
        return self.sigma_at(torch.linspace(self.steps, last, steps + 1, dtype=torch.float64))


@lru_cache(maxsize=32)
def _log_signal_on(schedule: BetaSchedule, device: torch.device) -> Tensor:
    """Return the table on a device, copied there once: a captured training step may not copy from the host."""
    with torch.inference_mode(False):  # the first call may be a prediction, the next a training step
        return schedule.log_signal().to(device)


def unit_scale(sigma: Tensor) -> Tensor:
    """Return sqrt(g) = 1 / sqrt(1 + sigma^2): the factor from the scaled state to the variance-preserving one."""
    return (1 + sigma.double() ** 2).rsqrt().to(sigma.dtype)


def _levels(sigma: float, like: Tensor) -> Tensor:
    return torch.full((like.shape[0],), sigma, dtype=like.dtype, device=like.device)


@torch.no_grad()
def sample_multistep(denoise: DenoiseImage, noise: ImageNoise, sigmas: Tensor) -> Tensor:
    """Return the image (B, C, H, W) of DPM-Solver++(2M): one evaluation a step, second order from the second step on.

    sigmas: falling noise levels, the last above 0. With h the step in ln sigma and D' the denoised image of the step
    before, the Euler step is taken with D + h/(2 h') (D - D') in place of D. At the last level the image is denoised
    once more, which is the result ("final denoise").
    """
    levels = [float(sigma) for sigma in sigmas]
    log_steps = [float(-(lower.log() - upper.log())) for upper, lower in pairwise(sigmas)]
    x = levels[0] * noise(0)
    before: Tensor | None = None
    for step, (sigma, lower) in enumerate(pairwise(levels)):
        denoised = denoise(x, _levels(sigma, x))
        target = denoised
        if before is not None:
            target = denoised + log_steps[step] / (2 * log_steps[step - 1]) * (denoised - before)
        x = target + (lower / sigma) * (x - target)
        before = denoised
    return denoise(x, _levels(levels[-1], x))


@torch.no_grad()
def sample_ancestral(denoise: DenoiseImage, noise: ImageNoise, sigmas: Tensor) -> Tensor:
    """Return the image (B, C, H, W) of the DDPM reverse chain over the given noise levels, the last being 0.

    The posterior of a DDPM step from sigma to sigma', in the scaled variable, has the mean
    D + (sigma'/sigma)^2 (x - D) and the variance sigma'^2 (1 - (sigma'/sigma)^2). Draw 0 of `noise` starts the chain,
    draw i is used in step i.
    """
    levels = [float(sigma) for sigma in sigmas]
    x = levels[0] * noise(0)
    denoised = x
    for step, (sigma, lower) in enumerate(pairwise(levels)):
        denoised = denoise(x, _levels(sigma, x))
        share = (lower / sigma) ** 2
        x = denoised + share * (x - denoised)
        if lower > 0:
            x = x + lower * (1 - share) ** 0.5 * noise(step + 1)
    return denoised
