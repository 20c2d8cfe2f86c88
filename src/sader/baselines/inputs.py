"""Inputs of a baseline: dates in the model's range, masked, and cut or repeated to the number it is built for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from sader.baselines.configs import BaselineConfig
from sader.data.batch import SeriesBatch, to_model_range
from sader.errors import BandError

NoiseOf = Callable[[int, int], Tensor]
"""(draw, channels) -> standard normal noise (B, channels, H, W) of the images at hand. The same draw gives the same
noise, whatever was drawn before it, so that the tiles of a scene agree."""


@dataclass(frozen=True)
class BaselineInputs:
    """B series of T dates in the model's range, checked and masked: what a network may look at."""

    cloudy: Tensor
    """(B, T, C, H, W) in [-1, 1]; 0 where a pixel, a date or a band is missing."""
    aux: Tensor | None
    """(B, T, A, H, W) in [-1, 1], 0 where missing; None for a network without auxiliary bands."""
    observed: Tensor
    """bool (B, T, H, W): the date exists and has data there."""
    cloud: Tensor
    """(B, T, H, W): 1 cloud or shadow, 0 clear, NaN unknown."""
    present: Tensor
    """bool (B, T): the date exists; False is padding."""
    reference: Tensor
    """long (B,): the date to clean, -1 for none."""
    days: Tensor | None
    """(B, T) days since the first date; NaN or None where unknown."""

    @property
    def stacked(self) -> Tensor:
        """(B, T, C + A, H, W): bands and auxiliary bands of each date."""
        return self.cloudy if self.aux is None else torch.cat([self.cloudy, self.aux], dim=2)

    @property
    def joined(self) -> Tensor:
        """(B, T * (C + A), H, W): the dates stacked as channels."""
        return rearrange(self.stacked, "b t c h w -> b (t c) h w")

    def arranged(self, dates: int) -> BaselineInputs:
        """Return exactly `dates` dates: the reference first, then the clearest of the others in the given order.

        A network without a flag for the reference date knows it by its place. Too many dates: those with most clear
        observed pixels stay (unknown masks count as clear). Too few: they are repeated in turn.
        """
        count = self.cloudy.shape[1]
        position = torch.arange(count, device=self.cloudy.device)
        own = position == self.reference[:, None]
        clear = self.observed & ~(self.cloud > 0.5)  # NaN > 0.5 is False
        share = clear.flatten(2).double().mean(dim=2)
        score = torch.where(own, 2.0, share).masked_fill(~self.present, -1.0)
        # Ties go to the earlier date; the small slope is below one pixel of any image.
        chosen = (score - position * 1e-12).argsort(dim=1, descending=True)[:, :dates]
        real = self.present.gather(1, chosen)
        key = torch.where(own.gather(1, chosen), -1, chosen) + torch.where(real, 0, count + 1)
        order = chosen.gather(1, key.argsort(dim=1))
        slots = torch.arange(dates, device=order.device)
        index = order.gather(1, slots % real.sum(dim=1, keepdim=True).clamp(min=1))
        taken: dict[str, Any] = {
            f.name: _taken(getattr(self, f.name), index) for f in fields(self) if f.name != "reference"
        }
        return replace(self, **taken, reference=torch.where(self.reference >= 0, 0, -1))

    def map_images(self, change: Callable[[Tensor], Tensor]) -> BaselineInputs:
        """Return the inputs with `change` applied to everything that has pixels."""
        images: dict[str, Any] = {name: change(getattr(self, name)) for name in ("cloudy", "observed", "cloud")}
        return replace(self, **images, aux=None if self.aux is None else change(self.aux))


def inputs_of(batch: SeriesBatch, config: BaselineConfig) -> BaselineInputs:
    """Return what a network of `config` may look at in a training batch, whose auxiliary bands follow the others."""
    count, wanted = config.channels, config.date_channels
    if batch.cloudy.shape[2] != wanted:
        raise BandError(
            f"the batch has {batch.cloudy.shape[2]} bands; this network wants {wanted}: "
            f"{', '.join((*config.bands, *config.aux_bands))}."
        )
    observed = batch.valid & batch.present[:, :, None, None]
    use = observed[:, :, None] & batch.band_present[:, None, :, None, None]
    # What is missing is 0 to the network, the middle of the range; as reflectance 0 it would be black.
    dates = to_model_range(batch.cloudy).masked_fill(~use, 0.0)
    cloud = batch.cloud_mask.to(torch.float32)
    return BaselineInputs(
        cloudy=dates[:, :, :count],
        aux=dates[:, :, count:] if config.aux_bands else None,
        observed=observed,
        cloud=cloud,
        present=batch.present,
        reference=batch.reference,
        days=batch.days,
    )


def generator_noise(inputs: BaselineInputs, generator: torch.Generator) -> NoiseOf:
    """Return noise for a whole batch from one generator (validation and tests); tiles of a scene use a `NoiseField`.

    Draws are made when first asked for and remembered, so that the same draw gives the same noise.
    """
    made: dict[tuple[int, int], Tensor] = {}
    batch, height, width = len(inputs.cloudy), *inputs.cloudy.shape[-2:]

    def noise(draw: int, channels: int) -> Tensor:
        if (draw, channels) not in made:
            shape = (batch, channels, height, width)
            made[draw, channels] = torch.randn(shape, generator=generator, device=generator.device)
        return made[draw, channels].to(inputs.cloudy.device)

    return noise


def _taken(value: Tensor | None, index: Tensor) -> Tensor | None:
    """Return the dates `index` (B, N) of a value (B, T, ...)."""
    if value is None:
        return None
    wide = index.view(*index.shape, *([1] * (value.ndim - 2))).expand(*index.shape, *value.shape[2:])
    return value.gather(1, wide)


def in_blocks(inputs: BaselineInputs, blocks: Callable[[Tensor], Tensor]) -> BaselineInputs:
    """Return the inputs with images cut by `blocks` and everything else repeated for each block of an image."""
    cut = inputs.map_images(blocks)
    times = len(cut.cloudy) // len(inputs.cloudy)
    if times == 1:
        return cut

    def again(x: Tensor) -> Tensor:
        return x.repeat_interleave(times, dim=0)

    return replace(
        cut,
        present=again(inputs.present),
        reference=again(inputs.reference),
        days=None if inputs.days is None else again(inputs.days),
    )
