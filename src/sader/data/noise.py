"""Random numbers and spectral noise for the cloud simulator, one set of parameters per image of a batch.

Used by `data/clouds.py`. Knows nothing of clouds: it draws, shapes, ranks and moves fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sader.errors import ConfigError


@dataclass(frozen=True)
class Draws:
    """Random numbers, one per image of a batch."""

    batch: int
    generator: torch.Generator
    device: torch.device

    def uniform(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.batch, generator=self.generator, device=self.device)

    def log_uniform(self, low: float, high: float) -> Tensor:
        return self.uniform(math.log(low), math.log(high)).exp()

    def choice(self, weights: Sequence[float]) -> Tensor:
        """Return (B,) indices drawn with the given weights."""
        if min(weights) < 0 or sum(weights) <= 0:
            raise ConfigError(f"weights of the cloud kinds are {tuple(weights)}; expected none negative, one positive.")
        edges = torch.tensor(
            [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights) - 1)], device=self.device
        )
        return (self.uniform(0.0, 1.0)[:, None] >= edges).sum(dim=1)

    def by_kind(self, kind: Tensor, ranges: Sequence[tuple[float, float]]) -> Tensor:
        bounds = torch.tensor(ranges, device=self.device)[kind]
        return bounds[:, 0] + (bounds[:, 1] - bounds[:, 0]) * self.uniform(0.0, 1.0)


class Grid:
    """A periodic grid on which noise is made and moved by its Fourier transform."""

    def __init__(self, rows: int, columns: int, draw: Draws) -> None:
        self.rows, self.columns, self.draw = rows, columns, draw
        self.ky = torch.fft.fftfreq(rows, device=draw.device)[:, None]
        self.kx = torch.fft.rfftfreq(columns, device=draw.device)[None, :]

    def noise(self, slope: Tensor, scale: Tensor, *, stretch: Tensor | None = None) -> Tensor:
        """Return (B, rows, columns) of zero mean and unit deviation; amplitude (1/scale^2 + k^2)^(-slope/2).

        `stretch` draws the noise out along a random direction by that factor.
        """
        angle = self.draw.uniform(0.0, torch.pi)[:, None, None]
        along = self.kx * angle.cos() + self.ky * angle.sin()
        k2 = self.kx**2 + self.ky**2
        if stretch is not None:
            s = stretch[:, None, None]
            k2 = (k2 - along**2) / s + along**2 * s
        amplitude = (k2 + scale[:, None, None] ** -2) ** (-slope[:, None, None] / 2)
        # No structure below the sharpness of the sensor, where thresholding would leave single pixels.
        amplitude = amplitude * torch.exp(-2 * (torch.pi * 0.7) ** 2 * (self.kx**2 + self.ky**2))
        amplitude[:, 0, 0] = 0
        white = torch.randn(
            (self.draw.batch, self.rows, self.kx.shape[1], 2), generator=self.draw.generator, device=self.draw.device
        )
        return unit(self._back(torch.view_as_complex(white) * amplitude))

    def shift_and_blur(self, field: Tensor, shift: Tensor, deviation: Tensor) -> Tensor:
        """Return `field` (B, rows, columns) moved by `shift` (B, 2) pixels, not only whole ones, and softened."""
        k2 = self.kx**2 + self.ky**2
        soften = torch.exp(-2 * torch.pi**2 * deviation[:, None, None] ** 2 * k2)
        phase = -2 * torch.pi * (self.ky * shift[:, 0, None, None] + self.kx * shift[:, 1, None, None])
        return self._back(self._there(field) * torch.polar(soften, phase))

    # On a GPU cuFFT makes a plan for every size of a batch, and making one may wait until the device has finished all
    # else: so few sizes.
    def _there(self, field: Tensor) -> Tensor:
        return torch.fft.rfft2(filled_up(field) if field.is_cuda else field)[: len(field)]

    def _back(self, spectrum: Tensor) -> Tensor:
        given = filled_up(spectrum) if spectrum.is_cuda else spectrum
        return torch.fft.irfft2(given, s=(self.rows, self.columns))[: len(spectrum)]


def filled_up(images: Tensor) -> Tensor:
    """Return the batch followed by zeros, so many that there are a multiple of 8."""
    missing = -len(images) % 8
    return torch.cat([images, images.new_zeros((missing, *images.shape[1:]))]) if missing else images


def unit(field: Tensor) -> Tensor:
    field = field - field.mean(dim=(1, 2), keepdim=True)
    return field / field.std(dim=(1, 2), keepdim=True).clamp_min(1e-12)


def quantile(field: Tensor, level: Tensor) -> Tensor:
    """Return (B,) the value of `field` (B, H, W) below which a part `level` (B,) of the pixels lies."""
    height, width = field.shape[1:]
    stride = max(1, int((height * width / 65536) ** 0.5))  # the fields are smooth: a sparse grid ranks them well
    values = field[:, ::stride, ::stride].flatten(1).sort(dim=1).values
    count = values.shape[1]
    found = values.gather(1, (level * count).long().clamp(0, count - 1)[:, None])[:, 0]
    # Level 1 must leave nothing above the cut, not even beside the image, and level 0 everything.
    found = torch.where(level >= 1, math.inf, found)
    return torch.where(level <= 0, field.amin(dim=(1, 2)) - 0.5, found)


def quick_size(size: int) -> int:
    """Return the next multiple of 32: quick to transform."""
    return -(-size // 32) * 32
