"""Scores of the averaged weights on fixed batches, and panels of images. Training does not depend on it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sader.baselines.baseline import Baseline, generator_noise, inputs_of
from sader.data.batch import SeriesBatch, keyed_torch
from sader.method.diffusion import Denoiser, sample
from sader.model.blocks import to_model_range, to_reflectance
from sader.model.mtcdn import MTCDN
from sader.training.objective import batch_condition
from sader.training.trainer import Maker, Trainer

if TYPE_CHECKING:
    from sader.models import AnyModelConfig

VALIDATION_SEED = 20_000_003
"""Seed of the batches and the noise of every validation, in every run."""


@torch.no_grad()
def predict(
    denoiser: Denoiser | Baseline, batch: SeriesBatch, *, generator: torch.Generator
) -> tuple[Tensor | None, Tensor]:
    """Return the model's composite, if it has one, and clear image of a batch, (B, C, H, W) reflectance in [0, 1].

    The masks are the true ones. A model with a composite takes one step, others their default number of steps.
    """
    if isinstance(denoiser, Baseline):
        inputs = inputs_of(batch, denoiser.config)
        answer = denoiser.predict(inputs, generator_noise(inputs, generator))
        return None, to_reflectance(answer).clamp(0, 1)
    network = _network(denoiser)
    batch, aux = batch.split(len(network.config.bands))
    cloud = batch.cloud_mask.float() if network.config.matches_dates else None
    condition = batch_condition(network, batch, to_model_range(batch.cloudy), aux, cloud)
    mean = condition.mean.float()
    composite = to_reflectance(mean[:, 0]).clamp(0, 1) if network.config.matches_dates else None
    image = sample(
        partial(denoiser, condition=condition),
        mean,
        lambda _: torch.randn(mean.shape, generator=generator, device=mean.device),
        denoiser.sigmas(1 if network.config.matches_dates else denoiser.config.steps),
        alpha=denoiser.config.alpha,
        initial=denoiser.initial(condition),
    )
    height, width = condition.size
    return composite, to_reflectance(image[..., :height, :width]).clamp(0, 1)


def _network(denoiser: Denoiser) -> MTCDN:
    assert isinstance(denoiser.network, MTCDN)
    return denoiser.network


@torch.no_grad()
def scores(trainer: Trainer[Denoiser | Baseline], maker: Maker) -> dict[str, float]:
    """Return the mean loss and PSNR (dB) of the trainer's model on fixed batches.

    PSNR counts scored pixels that the reference date hides; all scored pixels in a series without reference.
    """
    denoiser, config, device = trainer.model, trainer.config, trainer.device
    losses, sums = [], torch.zeros(3, dtype=torch.float64, device=device)
    network = denoiser if isinstance(denoiser, Baseline) else _network(denoiser)
    bands = len(network.config.bands)
    for number in range(config.validate_batches):
        batch = maker.batch(VALIDATION_SEED + number, config.batch_size, config.dates, config.crop)
        loss, _ = trainer.loss(denoiser, batch, keyed_torch(device, VALIDATION_SEED, 2 * number))
        losses.append(loss.float())
        composite, image = predict(denoiser, batch, generator=keyed_torch(device, VALIDATION_SEED, 2 * number + 1))
        pixels = batch.scored & (batch.hidden | (batch.reference < 0)[:, None, None])
        weight = (pixels[:, None] & batch.band_present[:, :bands, None, None]).double()
        clear = batch.clear[:, :bands]
        sums[0] += weight.sum()
        sums[1] += (weight * (image - clear).square()).sum()
        if composite is not None:
            sums[2] += (weight * (composite - clear).square()).sum()
    count, error, composite_error = sums.tolist()
    result = {"validation_loss": float(torch.stack(losses).mean())}
    if count:
        result["validation_psnr"] = -10 * math.log10(max(error / count, 1e-12))
        if composite_error:
            result["validation_composite_psnr"] = -10 * math.log10(max(composite_error / count, 1e-12))
    return result


def save_panel(
    path: Path, denoiser: Denoiser | Baseline, config: AnyModelConfig, batch: SeriesBatch, *, title: str
) -> bool:
    """Write a PNG with one row per series: dates, composite, result, target. Returns False without Pillow."""
    try:
        from sader.figures.picture import Panel, compose, save_png, stretch_limits, true_colour
    except ImportError:
        return False
    bands = config.network.bands
    count = len(bands)
    composite, image = predict(denoiser, batch, generator=keyed_torch(batch.cloudy.device, VALIDATION_SEED, 0))

    def array(x: Tensor) -> np.ndarray:
        return x.float().cpu().numpy()

    cloudy, clear, result = array(batch.cloudy[:, :, :count]), array(batch.clear[:, :count]), array(image)
    scored, present = batch.scored.cpu().numpy(), batch.present.cpu().numpy()
    rows = []
    for b, reference in enumerate(batch.reference.tolist()):
        known = np.where(scored[b], clear[b], np.nan) if scored[b].any() else clear[b]
        limits = stretch_limits([known], bands=bands)

        def shown(image: np.ndarray, limits: tuple[float, float] = limits) -> np.ndarray:
            return true_colour(image, bands=bands, limits=limits)

        row = [
            Panel(shown(cloudy[b, t]), f"date {t + 1}" if present[b, t] else "(no date)", marked=t == reference)
            for t in range(cloudy.shape[1])
        ]
        if composite is not None:
            row.append(Panel(shown(array(composite[b])), "composite"))
        row += [Panel(shown(result[b]), "result"), Panel(shown(known), "target (grey: unknown)")]
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(compose(rows, title=title, panel_width=192), path)
    return True
