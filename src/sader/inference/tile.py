"""One tile as one function of tensors: dates, masks and noise in, the clear image, its clouds and its error out.

`CloudRemover` works through tiles; this is what it does to each of them, without any branch on a value, so that it can
be exported (`inference.export`), compiled (`inference.onnx`) or recorded. Nothing here knows files, scenes or numpy.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.config import ModelConfig
from sader.data.batch import to_model_range, to_reflectance
from sader.errors import ConfigError
from sader.method.diffusion import Denoiser
from sader.method.sampling import karras_sigmas, sample
from sader.model.blocks import is_exporting
from sader.model.contrast import with_contrast
from sader.model.mtcdn import MTCDN, Condition
from sader.model.uncertainty import steady_correction

BESIDE_NODATA = 6
"""Pixels within which a clear pixel may not have both an own mask's cloud and missing data. Seen in products with
clouds cut out: what was left of them there was taken for land."""
SLIVER, HOLE = 3, 3
"""Data that no square of this radius fits into is a sliver; missing data that one fits into is a hole."""
LEAST_SEEN = 0.15
"""Part of a tile that the reference date must show clearly to be the measure for the other dates there."""


class TileResult(NamedTuple):
    """What is made of a batch of tiles."""

    clear: Tensor
    """(B, C, H, W) reflectance; raw: may be below 0, no pixel of the reference date put back."""
    cloud: Tensor
    """(B, T, H, W): probability of cloud or shadow that was used, given or estimated."""
    error: Tensor
    """(B, C, H, W): standard deviation to be expected, 0 for a network without error head."""
    shown: Tensor | None = None
    """bool (B, H, W), only with a scene match: what the reference date shows in tiles where it shows too little."""


class TileGraph(nn.Module):
    """The whole computation of tiles for a network with a composite, as `CloudRemover` does it.

    steps: Euler steps without resampling. threshold, growth: `RemoverOptions.cloud_threshold` and `mask_growth`.
    estimate: False leaves the cloud head out, for tiles whose masks are all given.
    scene: True takes one more input, what the match of the whole scene adds to each date.
    precision: type of the networks' convolutions under autocast (`inference.accelerate`); None = that of their weights.
    exact_masks: True finds clouds in the weights' own type whatever the precision.
    """

    def __init__(
        self,
        model: Denoiser,
        config: ModelConfig,
        *,
        steps: int | None = None,
        threshold: float = 0.5,
        growth: int = 2,
        estimate: bool = True,
        scene: bool = False,
        precision: torch.dtype | None = None,
        exact_masks: bool = False,
    ) -> None:
        super().__init__()
        check_exportable(config)
        self.precision, self.exact_masks = precision, exact_masks
        self.denoiser = model
        assert isinstance(model.network, MTCDN)
        self.network: MTCDN = model.network
        self.config = config
        process = config.diffusion
        self.steps = process.steps if steps is None else steps
        levels = karras_sigmas(self.steps, sigma_min=process.sigma_min, sigma_max=process.sigma_max)
        # Numbers, not a tensor: what is known when the graph is made becomes part of it.
        self.sigmas = [float(level) for level in levels]
        self.threshold, self.growth, self.estimate, self.scene = threshold, growth, estimate, scene

    def forward(
        self,
        cloudy: Tensor,
        valid: Tensor,
        cloud: Tensor,
        reference: Tensor,
        noise: Tensor,
        band_present: Tensor,
        change: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return `TileResult` as a plain tuple; H and W are multiples of `config.network.multiple`.

        cloudy: (B, T, C, H, W) reflectance, 0.5 where there is no data; valid: bool (B, T, H, W).
        cloud: (B, T, H, W), 1 cloud or shadow, 0 clear, NaN unknown. reference: (B,) long, -1 for none.
        noise: (B, 1, C, H, W) standard normal. band_present: bool (B, C). change: (B, T, C, H, W) reflectance.
        """
        frames = to_model_range(cloudy)
        used = cloud
        if self.estimate:
            with nullcontext() if self.exact_masks else self._precise(frames):
                used = used_cloud(
                    self.network, frames, valid, cloud, band_present, reference,
                    threshold=self.threshold, growth=self.growth,
                )  # fmt: skip
        shown: Tensor | None = None
        if self.scene:
            assert change is not None
            frames = frames + 2 * change  # the model's range is twice as wide as reflectance
            reference, shown = where_seen(reference, used, valid, threshold=self.threshold)
        with self._precise(frames):
            condition = self.network.condition(
                frames, valid=valid, cloud=used, reference=reference, band_present=band_present, same_light=self.scene
            )
        mean = condition.mean.float()
        image = sample(
            lambda x, sigma: self._denoise(x, sigma, condition),
            mean,
            lambda draw: noise,
            self.sigmas,
            alpha=self.config.diffusion.alpha,
            initial=mean,
        )
        if condition.contrast is not None and self.steps == 1:  # as in `CloudRemover`
            image = with_contrast(image, condition.contrast)
        error = expected_error(condition, scene=self.scene)
        made = (to_reflectance(image), used, torch.zeros_like(image) if error is None else error)
        return made if shown is None else (*made, shown)

    def _denoise(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        with self._precise(x):
            result: Tensor = self.denoiser(x, sigma, condition)
            return result

    def _precise(self, x: Tensor) -> AbstractContextManager[object]:
        if self.precision is None:
            return nullcontext()
        # Without the cache: recorded kernels must not read weights that a cache has thrown away since.
        return torch.autocast(x.device.type, dtype=self.precision, cache_enabled=False)


def check_exportable(config: ModelConfig) -> None:
    """Raise for a network whose tiles cannot be one function of these inputs."""
    network = config.network
    if not network.composite:
        raise ConfigError(
            f"the model {config.name!r} makes no composite; only such networks (the shipped ones, presets small and "
            "small_msi) run as one graph. Use the torch backend."
        )
    if network.date_input == "days" or network.aux_bands:
        raise ConfigError(
            f"the model {config.name!r} reads days or auxiliary bands, for which the graph has no input. "
            "Use the torch backend."
        )


def used_cloud(
    network: MTCDN,
    cloudy: Tensor,
    valid: Tensor,
    given: Tensor,
    band_present: Tensor,
    reference: Tensor,
    *,
    threshold: float,
    growth: int,
) -> Tensor:
    """Return the cloud probability (B, T, H, W): the given masks, the network's estimate where they are NaN.

    cloudy: (B, T, C, H, W) in the model's range. growth: pixels by which the estimate is widened.
    """
    use = valid[:, :, None] & band_present[:, None, :, None, None]
    estimate = network.cloud_estimate(
        cloudy.masked_fill(~use, 0.0), valid, band_present, given=given, reference=reference
    )
    # Cut to a mask, as given ones are: half-believed clouds would weigh in every fit, and cost half a dB.
    mask = (grown(estimate, growth) >= threshold).to(given.dtype)
    # Most tiles are whole, and then there is nothing to look for. A graph has no such question, nor may a GPU be asked.
    if is_exporting() or valid.is_cuda or not bool(valid.all()):
        mask = torch.maximum(mask, shreds(mask, valid))
    return torch.where(given.isnan(), mask, given)


def shreds(mask: Tensor, valid: Tensor) -> Tensor:
    """Return what is left of clouds that a provider has taken out, 1 or 0 (B, T, H, W); mask: the clouds known."""
    seen = valid.to(mask.dtype)
    # Between a cloud and missing data lies the rest of that cloud. Single pixels without data are something else: dark
    # water, a sensor's fault.
    gaps, holes = 1 - grown(seen, 1), 1 - grown(seen, HOLE)
    between = grown(mask, BESIDE_NODATA) * grown(gaps, 1 + BESIDE_NODATA)
    # So are slivers of data among large holes, whatever they look like: land is wider.
    slivers = 1 - grown(1 - grown(1 - seen, SLIVER), SLIVER)
    return torch.maximum(between, slivers * grown(holes, HOLE + BESIDE_NODATA))


def grown(x: Tensor, radius: int) -> Tensor:
    """Return the largest value of (B, T, H, W) within a square of `radius` pixels, one axis after the other."""
    edge = 2 * radius + 1
    tall = F.max_pool2d(x, (edge, 1), stride=1, padding=(radius, 0))
    return F.max_pool2d(tall, (1, edge), stride=1, padding=(0, radius))


def where_seen(reference: Tensor, cloud: Tensor, valid: Tensor, *, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the reference date (B,), -1 for tiles in which it shows next to nothing, and what it shows in those.

    There it can be no measure for the others. They have its light already (`scene_match`), so that the clearest
    of them may take its place. The second is bool (B, H, W), False throughout in all other tiles.
    """
    rows = torch.arange(reference.shape[0], device=reference.device)
    date = reference.clamp(min=0)
    clear = (cloud[rows, date] < threshold) & valid[rows, date]
    hidden = (reference >= 0) & (clear.float().mean(dim=(-2, -1)) < LEAST_SEEN)
    return torch.where(hidden, -1, reference), clear & hidden[:, None, None]


def expected_error(condition: Condition, *, scene: bool = False) -> Tensor | None:
    """Return the standard deviation (B, C, H, W) in reflectance that the network expects, or None.

    scene: it is a tile of a scene, whose neighbours may lie in the same hole of the reference date.
    """
    stated = condition.log_error
    if stated is None:
        return None
    if scene and condition.matched is not None and condition.weights is not None:
        stated = stated + steady_correction(condition.matched, condition.weights)
    # The network states the scale of a Laplace distribution, whose standard deviation is sqrt(2) times that; the
    # model's range is twice that of reflectance.
    return stated.exp() * (2**0.5 / 2)
