"""The loss of one training step: composite, diffusion and cloud masks, on one batch of series.

Networks without a composite use the paper's loss (`method.losses`). Random numbers come from the given generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from sader.bands import rgb_indices
from sader.data.batch import SeriesBatch
from sader.method.diffusion import Denoiser
from sader.method.losses import CloudAwareLoss, CloudAwareLossConfig, LossTerms
from sader.model.attention import masked_mean
from sader.model.blocks import to_model_range, without_autocast
from sader.model.composite import at_date, classical_blend
from sader.model.heads import hidden_probability, not_clear, with_anchor
from sader.model.mtcdn import MTCDN, Condition

RELATIVE_TO = 0.03
"""A typical error of the classical blend in model units; a series with this error has weight 2/3."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the terms, and the masks that the network is conditioned on."""

    cloud_aware: CloudAwareLossConfig = field(default_factory=CloudAwareLossConfig)
    """The paper's loss, used by networks without a composite."""
    composite: float = 1.0
    """Weight of the composite's own error; 0 trains the diffusion alone."""
    diffusion: float = 0.03
    """Weight of the denoising loss (squared error over c_out^2): its scale is 1, that of the absolute errors 0.03."""
    regression: float = 1.0
    """Weight of the absolute error of the denoised image at the highest noise level, the one-step result."""
    gradient: float = 0.7
    """Weight, beside each absolute error, of the absolute error of neighbouring differences: keeps edges sharp."""
    texture: float = 0.3
    """Weight of the difference of local contrast (mean gradient around a pixel) of the one-step result."""
    cloud_head: float = 0.3
    """Weight of the cross entropy of the cloud head, and of the mask refinement."""
    error_head: float = 0.02
    """Weight of the log likelihood of the errors under the stated scale (Laplace); it moves the error head alone."""
    masks_only: bool = False
    """Train the cloud head and the mask refinement alone: several times faster, the image does not change."""
    hidden: float = 4.0
    """Weight of pixels hidden in the reference date, relative to others."""
    own_mask: float = 0.5
    """Share of series trained with estimated masks instead of the true ones."""
    mask_network: bool = False
    """Estimate the masks of all dates but the reference date with the shipped mask network, as in tiles, not with the
    cloud head."""


def batch_condition(
    network: MTCDN, batch: SeriesBatch, cloudy: Tensor, aux: Tensor | None, cloud: Tensor | None = None
) -> Condition:
    """Return the condition of the network for a batch; cloudy: its dates in the model's range, aux: in [0, 1]."""
    return network.condition(
        cloudy,
        aux=None if aux is None else to_model_range(aux),
        present=batch.present,
        valid=batch.valid,
        cloud=cloud,
        reference=batch.reference,
        days=None if batch.days is None else batch.days.nan_to_num(0.0),
        band_present=batch.band_present,
    )


def spatial_error(prediction: Tensor, target: Tensor, weight: Tensor, *, gradient: float) -> Tensor:
    """Return per series the weighted mean absolute error plus `gradient` times that of neighbouring differences, (B,).

    prediction, target: (B, C, H, W); weight: (B, C, H, W), 0 where the target is unknown.
    """
    total = weight.sum(dim=(1, 2, 3)).clamp(min=1.0)
    error = prediction - target
    loss = (weight * error.abs()).sum(dim=(1, 2, 3)) / total
    if gradient:
        # Differences of errors are errors of differences; a pair has the smaller weight of its pixels.
        for dim in (-2, -1):
            size = error.shape[dim] - 1
            first, second = error.narrow(dim, 0, size), error.narrow(dim, 1, size)
            pair = torch.minimum(weight.narrow(dim, 0, size), weight.narrow(dim, 1, size))
            loss = loss + gradient * (pair * (second - first).abs()).sum(dim=(1, 2, 3)) / total
    return loss


class Objective:
    """Computes the loss of a batch, and its terms for the log."""

    def __init__(self, config: ObjectiveConfig | None = None) -> None:
        self.config = config or ObjectiveConfig()

    def __call__(
        self, denoiser: Denoiser, batch: SeriesBatch, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, terms); terms are detached scalars."""
        network = denoiser.network
        assert isinstance(network, MTCDN)
        if network.config.composite:
            return self._composite(denoiser, network, batch, generator)
        return self._paper(denoiser, network, batch, generator)

    def _paper(
        self, denoiser: Denoiser, network: MTCDN, batch: SeriesBatch, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The paper's step: noise the clear image towards the dates, denoise, cloud-aware loss."""
        batch, aux = batch.split(len(network.config.bands))
        # A dropped band is 0 in the model's range, as a band that is not given; reflectance 0 would be black.
        there = batch.band_present[:, None, :, None, None]
        cloudy, clear = to_model_range(batch.cloudy).masked_fill(~there, 0.0), to_model_range(batch.clear)
        height, width = clear.shape[-2:]
        condition = batch_condition(network, batch, cloudy, aux)
        # The mean of training must be that of sampling, gaps of a date included.
        mean = condition.mean[..., :height, :width]
        # Unknown pixels of the target are those of the mean over the dates in the noised state.
        known = batch.scored[:, None] & batch.band_present[:, :, None, None]
        clear = torch.where(known, clear, masked_mean(mean, batch.present[:, :, None, None].expand_as(batch.valid)))
        sigma = denoiser.process.draw_sigma(len(clear), generator)
        noise = torch.randn(mean.shape, generator=generator, device=generator.device)
        denoised = denoiser(denoiser.process.noised(clear, mean, sigma, noise), sigma, condition)
        weight = denoiser.process.coefficients(sigma, batch.present.sum(dim=1)).weight
        loss = CloudAwareLoss(self.config.cloud_aware, rgb=rgb_indices(network.config.bands))
        total, *terms = loss(denoised, clear, mean, weight, present=batch.present, pixels=batch.scored)
        return total, {name: term.detach() for name, term in zip(LossTerms._fields[1:], terms, strict=True)}

    def _composite(
        self, denoiser: Denoiser, network: MTCDN, batch: SeriesBatch, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        batch, aux = batch.split(len(network.config.bands))
        cloudy, clear = to_model_range(batch.cloudy), to_model_range(batch.clear)
        observed = batch.valid & batch.present[:, :, None, None]
        use = observed[:, :, None] & batch.band_present[:, None, :, None, None]
        cloudy = cloudy.masked_fill(~use, 0.0)

        cloud, head = self._masks(network, cloudy, observed, batch, generator)
        if config.masks_only:
            return torch.stack(list(head.values())).sum(), {name: value.detach() for name, value in head.items()}
        condition = batch_condition(network, batch, cloudy, aux, cloud)
        per_pixel = batch.scored * (1 + (config.hidden - 1) * batch.hidden)
        weight = (per_pixel[:, None] * batch.band_present[:, :, None, None]).to(clear.dtype)
        share = self._series_weight(condition, observed, clear, weight)
        composite = condition.mean[:, 0].float()
        composite_loss = (share * spatial_error(composite, clear, weight, gradient=config.gradient)).mean()
        parts = self._denoising(denoiser, condition, composite, clear, weight, share, generator)

        total = (
            config.composite * composite_loss
            + config.diffusion * parts["diffusion"]
            + config.regression * (parts["one_step"] + config.texture * parts["texture"])
            + config.error_head * parts["error_head"]
            + config.cloud_head * sum(head.values())
        )
        named = {"composite": composite_loss, **parts, **head}
        return total, {name: value.detach() for name, value in named.items()}

    def _denoising(
        self,
        denoiser: Denoiser,
        condition: Condition,
        composite: Tensor,
        clear: Tensor,
        weight: Tensor,
        share: Tensor,
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """Return the weighted squared error at drawn noise levels, and the terms of the result at the highest level.

        Half of the batch is at the highest noise level, where the state is noise alone and the denoised image is the
        one-step result; it is trained with the absolute error.
        """
        config, process = self.config, denoiser.process
        batch = len(clear)
        answers = max(1, batch // 2)
        answer = torch.arange(batch, device=clear.device) < answers
        sigma = process.draw_sigma(batch, generator)
        sigma = torch.where(answer, torch.full_like(sigma, process.config.sigma_max), sigma)
        noise = torch.randn(clear.shape, generator=generator, device=generator.device)[:, None]
        # No gradient of the diffusion reaches the composite, which has a loss of its own.
        centre = composite.detach()
        known = torch.where(weight > 0, clear, centre)
        denoised = denoiser(process.noised(known, centre[:, None], sigma, noise), sigma, condition)
        scale = process.coefficients(sigma, 1).weight.view(-1, 1, 1, 1)
        rows = (~answer).view(-1, 1, 1, 1)
        squared = (weight * rows * scale * (denoised - clear).square()).sum() / (weight * rows).sum().clamp(min=1.0)
        denoised, clear, weight, share = denoised[:answers], clear[:answers], weight[:answers], share[:answers]
        direct = share * spatial_error(denoised, clear, weight, gradient=config.gradient)
        texture = share * texture_error(denoised, clear, weight)
        parts = {"diffusion": squared, "one_step": direct.mean(), "texture": texture.mean()}
        likelihood = torch.zeros_like(squared)
        if condition.log_error is not None:
            log_scale = condition.log_error[:answers, ..., : clear.shape[-2], : clear.shape[-1]]
            error = (denoised.detach().float() - clear).abs()
            surprise = error * (-log_scale).exp() + log_scale
            likelihood = (weight * surprise).sum() / weight.sum().clamp(min=1.0)
        return {**parts, "error_head": likelihood}

    def _series_weight(self, condition: Condition, observed: Tensor, clear: Tensor, weight: Tensor) -> Tensor:
        """Return the weight of each series, (B,): errors are relative to those of the classical blend.

        Otherwise a few series that cannot be restored would dominate the loss. PSNR, a mean of logarithms, weights all
        series alike.
        """
        assert condition.matched is not None
        with torch.no_grad():
            classical = classical_blend(condition.matched, observed)
            usual = spatial_error(classical, clear, weight, gradient=self.config.gradient)
        return RELATIVE_TO / (usual + RELATIVE_TO / 2)

    def _masks(
        self, network: MTCDN, cloudy: Tensor, observed: Tensor, batch: SeriesBatch, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cloud probability (B, T, H, W) each series is conditioned on, and the losses of its estimate.

        The truth, or for a share of the series the network's own estimate; where the truth is unknown (label 255)
        always the estimate.
        """
        logits = network.cloud_logits(cloudy, observed, batch.band_present)
        counted = (batch.labels <= 3) & batch.valid & batch.present[:, :, None, None]
        target = torch.where(counted, batch.labels.long(), -100)
        losses = {"cloud_head": _cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))}
        own = torch.rand(len(logits), generator=generator, device=generator.device) < self.config.own_mask
        take = own.view(-1, 1, 1, 1).to(logits.device) | ((batch.labels > 3) & ~batch.cloud_mask)
        estimate, truth = not_clear(logits.detach(), dim=2), batch.cloud_mask.float()
        is_reference = F.one_hot(batch.reference.clamp(min=0), estimate.shape[1]).bool()
        is_reference = (is_reference & (batch.reference >= 0)[:, None])[:, :, None, None]
        if self.config.mask_network:
            found = network_masks(network.config.bands, batch.cloudy, observed, batch.band_present)
            estimate = torch.where(is_reference, estimate, found)
        cloud = torch.where(take, estimate, truth)
        if network.mask_refinement is None:
            return cloud, losses
        # The refinement always gets the head's mask of the reference date: the true mask would reveal the answer.
        shown = torch.where(is_reference, estimate, cloud)
        anchor, second = network.mask_refinement(cloudy, observed, batch.band_present, logits, shown, batch.reference)
        losses["mask_refinement"] = _cross_entropy(second, at_date(target, anchor))
        refined = torch.where(at_date(take, anchor), not_clear(second.detach(), dim=1), at_date(truth, anchor))
        return with_anchor(cloud, anchor, refined), losses


@torch.no_grad()
def network_masks(bands: Sequence[str], cloudy: Tensor, observed: Tensor, band_present: Tensor) -> Tensor:
    """Return the masks (B, T, H, W) of 0 and 1 that the mask network finds in reflectance (B, T, C, H, W)."""
    from sader.inference.masks import MaskSettings, TileMasks
    from sader.inference.tile import TileInputs

    height, width = observed.shape[-2:]
    inputs = TileInputs(
        cloudy=cloudy,
        valid=observed,
        cloud=torch.full(observed.shape, torch.nan, device=cloudy.device),
        reference=torch.full((len(cloudy),), -1, device=cloudy.device),
        band_present=band_present,
    )
    padded, settings = inputs.padded(32), MaskSettings()
    with without_autocast(cloudy):
        scores = TileMasks(bands, None, settings).class_scores(padded)
    return settings.used(hidden_probability(scores, dim=2), padded.valid, padded.cloud)[..., :height, :width]


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy over pixels with a label; 0 without any."""
    total = F.cross_entropy(logits.float(), target, ignore_index=-100, reduction="sum")
    return total / (target >= 0).sum().clamp(min=1)


def texture_error(prediction: Tensor, target: Tensor, weight: Tensor, *, cell: int = 8) -> Tensor:
    """Return the difference of contrast of each series, (B,): absolute difference of mean |gradient| per cell.

    Absolute errors alone favour an image that is too smooth; this term rewards the right amount of detail regardless of
    its position. Arguments as in `spatial_error`.
    """
    total = weight.sum(dim=(1, 2, 3)).clamp(min=1.0)
    loss = torch.zeros_like(total)
    for dim in (-2, -1):
        size = target.shape[dim] - 1
        pair = torch.minimum(weight.narrow(dim, 0, size), weight.narrow(dim, 1, size))

        def contrast(image: Tensor, dim: int = dim, size: int = size, pair: Tensor = pair) -> Tensor:
            step = image.narrow(dim, 1, size) - image.narrow(dim, 0, size)
            return F.avg_pool2d(pair * step.abs(), cell, ceil_mode=True) * cell**2

        loss = loss + (contrast(prediction) - contrast(target)).abs().sum(dim=(1, 2, 3)) / total
    return loss
