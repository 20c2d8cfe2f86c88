"""Several plausible dates of one place from a single clear image: season, sun, air, small shifts and sensor noise.

All changes are smooth in space or follow the surface, so that fine detail stays valid on every date. Clouds are added
by `clouds.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PseudoDateSettings:
    """How strongly pseudo-dates differ; each is a standard deviation in the logarithm unless stated otherwise."""

    surfaces: int = 3
    """Soft surface classes (random directions in colour) that change on their own."""
    season: tuple[float, float] = (0.02, 0.2)
    """Range of the change of one surface class from date to date."""
    gain: float = 0.07
    """Sun height: all bands together."""
    band_gain: float = 0.025
    """Calibration and air: each band alone."""
    slow: float = 0.035
    """Fields of a quarter of the crop: moisture, thin air, slopes."""
    path: float = 0.008
    """Reflectance added by the air in the bluest band; it falls with wavelength."""
    shift: float = 0.6
    """Largest misregistration in pixels, for half of the dates; the date kept sharp is not moved."""
    noise: tuple[float, float] = (0.0004, 0.0025)
    """Range of the sensor noise, reflectance."""
    bright: float = 0.12
    """Probability that a surface class is permanent snow or bright sand, so that these are not removed as cloud."""


def pseudo_dates(
    image: Tensor, dates: int, kept: Tensor, *, generator: torch.Generator, settings: PseudoDateSettings | None = None
) -> Tensor:
    """Return (B, T, C, H, W) dates derived from `image` (B, C, H, W), reflectance in [0, 1].

    `kept` (B,) is the date that is never shifted by a fraction of a pixel, which would blur it: the target. Bands that
    are 0 everywhere (absent) stay 0.
    """
    s = settings or PseudoDateSettings()
    b, c, h, w = image.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=image.device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=image.device)

    direction = F.normalize(normal(b, s.surfaces, c), dim=-1)
    centred = image - image.mean((-2, -1), keepdim=True)
    along = torch.einsum("bkc,bchw->bkhw", direction, centred)
    along = along / along.std((-2, -1), keepdim=True).clamp_min(1e-4)
    surface = torch.sigmoid(2.5 * (along - 2 * uniform(b, s.surfaces, 1, 1) + 1))

    # Snow and sand are equal on all dates: white, with the relief of the ground.
    white = (0.35 + 0.5 * uniform(b, 1, 1, 1)) * (1 + 0.05 * normal(b, c, 1, 1))
    lasting = (uniform(b, 1, 1, 1) < s.bright) * (0.5 + 0.5 * uniform(b, 1, 1, 1)) * surface[:, :1]
    relief = image / image.mean((-2, -1), keepdim=True).clamp_min(1e-3)
    observed = image.amax((-2, -1), keepdim=True) > 0
    image = image + lasting * observed * (white * (0.8 + 0.2 * relief.clamp(0.3, 2)) - image)

    low, high = s.season
    size = low * (high / low) ** uniform(b, dates, 1, 1)
    change = size * (0.8 * normal(b, dates, s.surfaces, 1) + 0.35 * normal(b, dates, s.surfaces, c))
    log_gain = torch.einsum("btkc,bkhw->btchw", change, surface)
    log_gain += s.gain * normal(b, dates, 1, 1, 1) + s.band_gain * normal(b, dates, c, 1, 1)
    coarse = s.slow * (normal(b * dates, 1, 4, 4) + 0.5 * normal(b * dates, c, 4, 4))
    log_gain += F.interpolate(coarse, (h, w), mode="bicubic", align_corners=True).view(b, dates, c, h, w)
    series = image[:, None] * log_gain.exp()
    blue_first = 0.6 ** torch.arange(c, device=image.device, dtype=image.dtype).view(1, 1, c, 1, 1)
    series = series + s.path * normal(b, dates, 1, 1, 1).abs() * blue_first * (series > 0)

    movable = torch.arange(dates, device=image.device)[None, :] != kept[:, None]
    moved = ((uniform(b, dates) < 0.5) & movable)[..., None]
    shift = s.shift * (2 * uniform(b, dates, 2) - 1) * moved
    series = torch.where(moved[..., None, None], _shifted(series, shift), series)
    level = s.noise[0] + (s.noise[1] - s.noise[0]) * uniform(b, dates, 1, 1, 1)
    noisy = (series + level * normal(b, dates, c, h, w)).clamp(1e-4, 1)
    return torch.where(image[:, None] > 0, noisy, 0.0)


def _shifted(series: Tensor, shift: Tensor) -> Tensor:
    """Return `series` (B, T, C, H, W) moved by `shift` (B, T, 2) pixels (x, y), bicubic."""
    b, t, c, h, w = series.shape
    theta = torch.eye(2, 3, device=series.device).repeat(b * t, 1, 1)
    theta[:, :, 2] = shift.reshape(b * t, 2) * torch.tensor([2 / w, 2 / h], device=series.device)
    grid = F.affine_grid(theta, [b * t, c, h, w], align_corners=False)
    flat = series.reshape(b * t, c, h, w)
    moved = F.grid_sample(flat, grid, mode="bicubic", padding_mode="border", align_corners=False)
    return moved.reshape(b, t, c, h, w)
