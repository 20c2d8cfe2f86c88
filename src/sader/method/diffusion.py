"""The mean-reverting diffusion, its preconditioned denoiser (paper, "Preliminaries"), and sampling (Algorithm 1).

Forward process, in the scaled variable, with the same clear image and noise level in every date:
    noised_t = clear + sigma (alpha cloudy_t + noise_t).
The unscaled state s x, s = 1 / (1 + alpha sigma), moves from the clear image to the cloudy dates and noise.

With a composite, one image m that is already close to the clear image, subtracting the known (1 + alpha sigma) m leaves
plain EDM on the residual clear - m. `DiffusionConfig.residual` is the standard deviation of that residual and selects
its preconditioning.

Sampling follows the probability-flow ODE, which in the scaled variable is
    dx/dsigma = alpha mu - (D + alpha sigma mu - x) / sigma = (x - D) / sigma,
because the two mu terms cancel. One Euler step to sigma' is therefore
    x' = D + sigma'/sigma (x - D),
which at sigma' = 0 is D itself. `resampling.py` holds the correction between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sader.errors import ConfigError

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(noised (B, S, C, H, W), sigma (B,)) -> denoised (B, C, H, W); S state frames: the dates, or 1 with a composite."""

NoiseSource = Callable[[int], Tensor]
"""Draw number -> standard normal noise (B, S, C, H, W). Draw 0 starts the sampling, the others feed resampling."""

Solver = Literal["euler", "heun"]
Start = Literal["zero", "median"]


@dataclass(frozen=True)
class DiffusionConfig:
    """Constants of the process; the defaults are the paper's Sen2_MTC_New setting."""

    alpha: float = 1.0
    """Mean-reversion rate: 1 for Sen2_MTC_New, 3 for SEN12MS-CR-TS."""
    sigma_data: float = 1.0
    """Standard deviation assumed for the clear image."""
    sigma_mean: float = 1.0
    """Standard deviation assumed for the cloudy dates."""
    correlation: float = 0.9
    """Covariance assumed between clear and cloudy."""
    residual: float | None = None
    """Standard deviation of clear - composite for networks with a composite; None = the paper's process."""
    sigma_min: float = 0.001
    """Last noise level of the sampling grid."""
    sigma_max: float = 40.0
    """First noise level of the sampling grid."""
    steps: int = 4
    """Default number of sampling steps."""
    start: Start = "zero"
    """First estimate of the clear image: "zero" (paper) or "median", that of the dates. 0 is a reflectance of 0.5,
    which the first steps keep in part: the result is too bright."""
    log_sigma_mean: float = -1.4
    """Training noise: ln sigma ~ N(log_sigma_mean, log_sigma_std^2)."""
    log_sigma_std: float = 1.4
    wide_share: float = 0.0
    """Share of training noise drawn log-uniformly over [wide_low, wide_high]. The normal density rarely reaches
    sigma_max, where sampling starts."""
    wide_low: float = 0.01
    wide_high: float = 120.0

    def __post_init__(self) -> None:
        if self.correlation >= self.sigma_data * self.sigma_mean:
            raise ConfigError(
                f"correlation {self.correlation} must stay below sigma_data * sigma_mean "
                f"= {self.sigma_data * self.sigma_mean}; otherwise c_out is not real."
            )
        if self.start not in ("zero", "median"):
            raise ConfigError(f"start is {self.start!r}; expected 'zero' (paper) or 'median'.")
        if not 0 <= self.wide_share <= 1:
            raise ConfigError(f"wide_share is {self.wide_share}; expected a share in [0, 1].")


class Coefficients(NamedTuple):
    """Preconditioning at given noise levels, each of shape (B,)."""

    c_in: Tensor
    c_skip: Tensor
    c_out: Tensor
    c_noise: Tensor
    weight: Tensor


class MeanReverting:
    """Forward process, noise-level density and preconditioning coefficients."""

    def __init__(self, config: DiffusionConfig | None = None) -> None:
        self.config = config or DiffusionConfig()

    def noised(self, clear: Tensor, mean: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        """Return clear + sigma (alpha mean + noise): (B, C, H, W) and (B, S, C, H, W) -> (B, S, C, H, W)."""
        level = sigma.view(-1, 1, 1, 1, 1)
        return clear[:, None] + level * (self.config.alpha * mean + noise)

    def draw_sigma(self, batch: int, generator: torch.Generator) -> Tensor:
        """Return one training noise level per item, (batch,), on the generator's device."""
        config, device = self.config, generator.device
        normal = torch.randn(batch, generator=generator, device=device)
        uniform = torch.rand(batch, generator=generator, device=device)
        choice = torch.rand(batch, generator=generator, device=device)
        log_sigma = config.log_sigma_mean + config.log_sigma_std * normal
        low, high = math.log(config.wide_low), math.log(config.wide_high)
        return torch.where(choice < config.wide_share, low + (high - low) * uniform, log_sigma).exp()

    def coefficients(self, sigma: Tensor, dates: Tensor | int) -> Coefficients:
        """Return the preconditioning for noise levels (B,) and the number of state frames that count, int or (B,).

        Computed in float64: at sigma = 0.001 the numerator of c_out is a small difference of large terms.
        """
        config = self.config
        level = sigma.double()
        c_noise = level.log() / 4
        if config.residual is not None:
            total = level**2 + config.residual**2
            c_in = total.rsqrt()
            c_skip = config.residual**2 / total
            c_out = level * config.residual / total.sqrt()
        else:
            frames = torch.as_tensor(dates, dtype=torch.float64, device=sigma.device)
            data, mean = config.sigma_data**2, config.sigma_mean**2
            m = config.alpha * level
            k = config.correlation * m
            c_in = (level**2 + data + m**2 * mean + 2 * k).rsqrt()
            total = level**2 / frames + data + m**2 * mean + 2 * k
            c_skip = (data + k) / total
            c_out = (((level**2 / frames + m**2 * mean) * data - k**2) / total).sqrt()
        parts = (c_in, c_skip, c_out, c_noise, c_out**-2)
        return Coefficients(*(part.to(torch.float32) for part in parts))

    def largest_change(self, sigma: float, dates: int) -> float:
        """Return a bound of |D(x; sigma) - mean(x)| for values and network outputs F of order 1.

        D = c_skip mean(x) + c_out F, so that the bound is (1 - c_skip) + c_out. Both are of the order of sigma where
        sigma is small: 0.0014 for the paper's last level, sigma = 0.001.
        """
        c = self.coefficients(torch.tensor([sigma]), dates)
        return float((1 - c.c_skip).abs() + c.c_out)


@lru_cache
def noise_levels(steps: int, sigma_min: float, sigma_max: float) -> tuple[float, ...]:
    """Return `karras_sigmas` as numbers. They are cached: `torch.export` cannot read numbers from tensors."""
    return tuple(karras_sigmas(steps, sigma_min=sigma_min, sigma_max=sigma_max).tolist())


class ConditionLike(Protocol):
    """The part of `model.condition.Condition` that the denoiser reads."""

    @property
    def mean(self) -> Tensor: ...
    @property
    def present(self) -> Tensor: ...


class Denoiser(nn.Module):
    """D(x; sigma) = c_skip mean_t(x_t) + c_out F(c_in x; c_noise), one clear image for all dates.

    With a composite m, x - (1 + alpha sigma) m takes the place of x, and m is added to the result.
    """

    def __init__(self, network: nn.Module, config: DiffusionConfig | None = None) -> None:
        super().__init__()
        self.network = network
        self.process = MeanReverting(config)

    @property
    def config(self) -> DiffusionConfig:
        return self.process.config

    def forward(self, noised: Tensor, sigma: Tensor, condition: ConditionLike) -> Tensor:
        """Return the denoised image (B, C, H, W) of noised (B, S, C, H, W) at sigma (B,)."""
        frames = condition.present.sum(dim=1)
        c_in, c_skip, c_out, c_noise, _ = self.process.coefficients(sigma, frames)
        height, width = noised.shape[-2:]
        centre: Tensor | None = None
        state = noised
        if self.config.residual is not None:
            centre = condition.mean[..., :height, :width].float()
            state = noised - (1 + self.config.alpha * sigma).view(-1, 1, 1, 1, 1) * centre
        raw = self.network(c_in.view(-1, 1, 1, 1, 1) * state, c_noise, condition).float()
        counted = condition.present[:, :, None, None, None]
        average = torch.where(counted, state, 0.0).sum(dim=1) / frames.view(-1, 1, 1, 1)
        denoised = c_skip.view(-1, 1, 1, 1) * average + c_out.view(-1, 1, 1, 1) * raw
        return denoised if centre is None else denoised + centre[:, 0]

    def sigmas(self, steps: int, *, dates: int = 1, negligible: float = 0.0) -> list[float]:
        """Return the noise levels of `steps` sampling steps, decreasing and ending in 0.

        negligible: leave out levels at which a step changes the image by no more than this, in the model's range (see
        `MeanReverting.largest_change`); the first level always stays. dates: number of state frames.
        """
        levels = noise_levels(steps, self.config.sigma_min, self.config.sigma_max)
        if not negligible:
            return list(levels)
        first, *middle, last = levels
        return [first, *(s for s in middle if self.process.largest_change(s, dates) > negligible), last]

    def initial(self, condition: ConditionLike) -> Tensor | float:
        """Return the first estimate of the clear image for `sample`: the composite; 0 in the paper, or the median."""
        if self.config.residual is not None:
            return condition.mean.float()
        return 0.0 if self.config.start == "zero" else median_of_dates(condition.mean.float(), condition.present)


def median_of_dates(mean: Tensor, present: Tensor) -> Tensor:
    """Return the median (B, 1, C, H, W) over the dates that are present; of two middle values the lower, not cloud.

    mean: (B, S, C, H, W); present: bool (B, S).
    """
    ordered = mean.masked_fill(~present[:, :, None, None, None], torch.inf).sort(dim=1).values
    middle = (present.sum(dim=1).clamp(min=1) - 1) // 2
    index = middle.view(-1, 1, 1, 1, 1).expand(-1, 1, *mean.shape[2:])
    return ordered.gather(1, index).nan_to_num(posinf=0.0)


# -------------------------------------------------------------------------------------------------- sampling


Correction = Callable[..., tuple[Tensor, Tensor] | None]
"""A correction between two steps, called as `resampling.Resampler`: (corrected denoised, renoised state), or None to
leave the step unchanged."""


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
    for step, (sigma, lower) in enumerate(pairwise(levels)):
        level = torch.full((batch,), sigma, dtype=mean.dtype, device=mean.device)
        denoised = denoise(x, level)
        if correction is not None:
            # A fixed stride, so that the number of draws of a correction does not shift later noise.
            own = partial(_later_draw, noise, 1 + 64 * step)
            corrected = correction(denoise, denoised, mean=mean, sigma=sigma, alpha=alpha, step=step, noise=own)
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


def _later_draw(noise: NoiseSource, first: int, draw: int) -> Tensor:
    return noise(first + draw)
