"""A baseline behind `CloudRemover`: tiles of a scene in, images out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sader.baselines.baseline import Baseline, BaselineInputs, NoiseOf
from sader.data.batch import to_model_range
from sader.errors import ConfigError
from sader.inference.noise import NoiseField
from sader.inference.tiling import Window


def check_baseline_steps(baseline: Baseline, steps: int | str | None, resamplings: int) -> None:
    """Refuse, before any work, steps that a baseline cannot take."""
    if steps is None:
        return
    if baseline.config.steps is None:
        raise ConfigError(f"steps is {steps!r}, but this model answers in one pass and takes no steps; leave it out.")
    if resamplings:
        raise ConfigError(
            f"steps is {steps!r}; only SADER resamples. Give a plain number, such as {baseline.config.steps}."
        )


def baseline_images(
    baseline: Baseline,
    windows: Sequence[Window],
    *,
    cloudy: Tensor,
    valid: Tensor,
    cloud: Tensor,
    reference: Tensor,
    days: Tensor | None,
    aux: Tensor | None,
    steps: int,
    seeds: Sequence[int],
) -> list[Tensor]:
    """Return one batch of images (tiles, C, h, w) in the model's range for each seed.

    windows: where the tiles lie in the scene, for the noise. Everything else is as in `inputs.PreparedSeries`, with the
    tiles along the batch axis and reflectance in [0, 1] (0.5 where nothing is known).
    """
    inputs = BaselineInputs(
        cloudy=to_model_range(cloudy),
        aux=None if aux is None else to_model_range(aux),
        observed=valid,
        cloud=cloud,
        # A date without a single valid pixel in the tile is no date there.
        present=valid.flatten(2).any(dim=2),
        reference=reference,
        days=days,
    )
    taken = None if baseline.config.steps is None else steps
    return [baseline.predict(inputs, scene_noise(windows, seed, cloudy.device), steps=taken) for seed in seeds]


def scene_noise(windows: Sequence[Window], seed: int, device: torch.device) -> NoiseOf:
    """Return the noise of the tiles, cut from the one field of the scene."""
    field = NoiseField(seed)

    def noise(draw: int, channels: int) -> Tensor:
        return field.windows(windows, channels=channels, draw=draw, device=device)

    return noise
