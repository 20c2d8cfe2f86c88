"""The mean-reverting diffusion and its preconditioned denoiser (paper, "Preliminaries").

Forward process, in the scaled variable, with the same clear image and noise level in every date:
    noised_t = clear + sigma (alpha cloudy_t + noise_t).
The unscaled state s x, s = 1 / (1 + alpha sigma), moves from the clear image to the cloudy dates and noise.

With a composite, one image m that is already close to the clear image, subtracting the known (1 + alpha sigma) m leaves
plain EDM on the residual clear - m. `DiffusionConfig.residual` is the standard deviation of that residual and selects
its preconditioning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sader.errors import ConfigError
from sader.method.sampling import karras_sigmas


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
        """Return the first estimate of the clear image for `sampling.sample`: the composite; 0 in the paper."""
        return 0.0 if self.config.residual is None else condition.mean.float()
