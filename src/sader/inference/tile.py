"""`SaderTile`: a batch of tiles from reflectance, masks and noise to clear image, cloud mask and error.

Every backend computes this module: eager float32 (here), half precision, compiled code and CUDA graphs
(`inference.accelerate`), ONNX (`inference.onnx`). Baselines answer the same call (`BaselineTile`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sader.inference.masks import HARDLY_SEEN, LEAST_SEEN, MaskSettings, TileMasks, leading_date
from sader.inference.noise import NoiseOf
from sader.inference.scene_match import feather
from sader.method.diffusion import Denoiser, Solver, sample
from sader.method.resampling import Guide, Resampler, ResamplerConfig, cloud_cover, fuse
from sader.model.blocks import reflect_pad, to_model_range, to_reflectance
from sader.model.composite import at_date, with_contrast
from sader.model.heads import error_terms, level_spread, seen_error, steady_correction
from sader.model.mtcdn import MTCDN, Condition

if TYPE_CHECKING:
    from sader.baselines.baseline import Baseline


@dataclass(frozen=True)
class TileInputs:
    """B tiles of a series as tensors in the model's band order."""

    cloudy: Tensor
    """(B, T, C, H, W) reflectance, 0.5 (the middle of the model's range) for nodata and missing bands."""
    valid: Tensor
    """bool (B, T, H, W)"""
    cloud: Tensor
    """(B, T, H, W): 1 cloud, 0 clear, NaN unknown."""
    reference: Tensor
    """(B,) long, -1 for none."""
    band_present: Tensor
    """bool (B, C)"""
    days: Tensor | None = None
    """(B, T)"""
    aux: Tensor | None = None
    """(B, T, A, H, W)"""
    change: Tensor | None = None
    """(B, T, C, H, W): reflectance that the match of the whole scene adds (`sader.inference.scene_match`)."""
    known_masks: bool = False
    """Whether `cloud` has no NaN, or nothing depends on it; True leaves the estimate of masks out."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        height, width = self.cloudy.shape[-2:]
        return height, width

    def padded(self, multiple: int) -> TileInputs:
        """Return the inputs extended by reflection to a multiple of `multiple` pixels."""
        height, width = (-(-size // multiple) * multiple for size in self.size)
        if (height, width) == self.size:
            return self
        return self._each(lambda x: reflect_pad(x, height, width) if x.ndim >= 4 else x)

    def to(self, device: torch.device | str) -> TileInputs:
        """Return the inputs on a device."""
        return self._each(lambda x: x.to(device))

    @staticmethod
    def joined(tiles: Sequence[TileInputs]) -> TileInputs:
        """Return tiles of one size and kind as one batch."""
        first = tiles[0]
        if len(tiles) == 1:
            return first
        joined: dict[str, Any] = {name: torch.cat([getattr(tile, name) for tile in tiles]) for name in first.tensors()}
        return replace(first, **joined, known_masks=all(tile.known_masks for tile in tiles))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def _each(self, change: Callable[[Tensor], Tensor]) -> TileInputs:
        changed: dict[str, Any] = {name: change(value) for name, value in self.tensors().items()}
        return replace(self, **changed)


class TileOutput(NamedTuple):
    """Result of a batch of tiles."""

    images: Tensor
    """(S, B, C, H, W) reflectance, one per sample; values may be below 0, no pixel of the reference date is copied."""
    cloud: Tensor
    """(B, T, H, W): mask of cloud or shadow that was used; NaN where none was given or needed."""
    error: Tensor | None = None
    """(B, C, H, W): expected standard deviation; None for networks without an error head."""
    shown: Tensor | None = None
    """bool (B, H, W), only with a scene match: see `masks.leading_date`."""
    weights: Tensor | None = None
    """(B, T + 1, H, W): weight of each date in the composite, the fill last; None for networks without a composite."""


@dataclass(frozen=True)
class TileSettings:
    """Settings that are the same for all tiles of a remover."""

    masks: MaskSettings = field(default_factory=MaskSettings)
    solver: Solver = "euler"
    resampling: Callable[[], ResamplerConfig] = ResamplerConfig
    guide: Callable[[], Guide | None] = lambda: None
    """Return the variant of the resampling and its guide; called when tiles are resampled."""
    negligible: float = 0.0
    """Noise levels at which a step changes the image by no more than this, in the model's range, are left out."""


class Tile(Protocol):
    """Computes batches of tiles. Implementations may be called from several threads at once."""

    def __call__(
        self, inputs: TileInputs, noises: Sequence[NoiseOf], *, steps: int, resamplings: int = 0
    ) -> TileOutput:
        """Return one image per noise, with mask and error; height and width are multiples of the network's."""


class SaderTile(nn.Module):
    """Tiles of SADER's networks, with a composite or without."""

    def __init__(self, model: Denoiser, settings: TileSettings | None = None) -> None:
        super().__init__()
        assert isinstance(model.network, MTCDN)
        self.denoiser, self.network = model, model.network
        self.condition: Callable[..., Condition] = model.network.condition
        """`MTCDN.condition`, or a compiled version of it."""
        self.fuse: Callable[..., Tensor] = fuse
        """`resampling.fuse`, or a compiled version of it."""
        self.settings = settings or TileSettings()
        self.masks = TileMasks(model.network.config.bands, model.network, self.settings.masks)

    def forward(self, inputs: TileInputs, noises: Sequence[NoiseOf], *, steps: int, resamplings: int = 0) -> TileOutput:
        """Return the images (S, B, C, H, W), masks and errors of a batch of tiles; see `Tile`.

        No branch depends on the value of a tensor, so that it can be captured as a CUDA graph and exported.
        """
        settings, denoiser, threshold = self.settings, self.denoiser, self.settings.masks.cloud_threshold
        cloudy = to_model_range(inputs.cloudy)
        cloud = inputs.cloud if inputs.known_masks else self.masks(inputs)
        reference, shown = inputs.reference, None
        if inputs.change is not None:
            cloudy = cloudy + 2 * inputs.change  # the model's range is twice as wide as reflectance
            reference, shown = leading_date(reference, cloud, inputs.valid, threshold=threshold, least=LEAST_SEEN)
        elif self.network.config.matches_dates:
            reference, _ = leading_date(reference, cloud, inputs.valid, threshold=threshold, least=HARDLY_SEEN)
        condition = self.condition(
            cloudy,
            aux=None if inputs.aux is None else to_model_range(inputs.aux),
            valid=inputs.valid,
            cloud=cloud if self.network.config.matches_dates else None,
            reference=reference,
            days=inputs.days,
            band_present=inputs.band_present,
            already_matched=inputs.change is not None,
        )
        shape = condition.mean.shape
        correction = None
        if resamplings:
            correction = Resampler(
                replace(settings.resampling(), steps=resamplings),
                settings.guide(),
                present=condition.present,
                cloud_cover=cloud_cover(cloud, inputs.valid),
                fuse=self.fuse,
            )
        images = []
        for noise in noises:
            image = sample(
                partial(denoiser, condition=condition),
                condition.mean.float(),
                partial(_state_noise, noise, shape),
                denoiser.sigmas(steps, dates=shape[1], negligible=settings.negligible),
                alpha=denoiser.config.alpha,
                initial=denoiser.initial(condition),
                solver=settings.solver,
                correction=correction,
            )
            image = to_reflectance(image)
            if condition.contrast is not None and steps == 1:  # more steps add texture of their own
                image = with_contrast(image, condition.contrast)
            images.append(image)
        error = expected_error(condition, images[0], self.network.config.bands, scene=inputs.change is not None)
        if error is not None and condition.matched is not None and inputs.change is None:
            clear = condition.matched.clear[..., : cloudy.shape[-2], : cloudy.shape[-1]]
            level = level_spread(cloudy.float(), clear.float(), condition.matched.anchor)[:, :, None, None] / 2
            replaced = ((inputs.reference >= 0) & (reference < 0))[:, None, None, None]
            error = torch.where(replaced, (error.square() + level.square()).sqrt(), error)
        return TileOutput(torch.stack(images), cloud, error, shown, condition.weights)


def _state_noise(noise: NoiseOf, shape: torch.Size, draw: int) -> Tensor:
    """Return a draw of noise in the shape (B, S, C, H, W) of the state."""
    return noise(draw, shape[1] * shape[2]).view(shape)


def feathered(output: TileOutput, inputs: TileInputs) -> Tensor:
    """Return the images (S, B, C, H, W), which meet the reference date's clear pixels in tiles it does not lead."""
    if output.shown is None or not bool(output.shown.any()):
        return output.images
    own = at_date(inputs.cloudy, inputs.reference.clamp(min=0))
    return torch.stack([feather(image, own, output.shown) for image in output.images])


def expected_error(condition: Condition, image: Tensor, bands: Sequence[str], *, scene: bool = False) -> Tensor | None:
    """Return the standard deviation (B, C, H, W) in reflectance that is to be expected of `image`, or None.

    The network's own estimate is corrected by the errors that show at the clear pixels of the tile (`seen_error`).
    bands: names of the C bands. scene: the tile belongs to a scene, so that neighbouring tiles may lie in the same gap
    of the reference date.
    """
    stated = condition.log_error
    if stated is None:
        return None
    matched, weights, others = condition.matched, condition.weights, condition.others
    if matched is not None and weights is not None and others is not None:
        correction = steady_correction(matched, weights) if scene else 0.0
        images = condition.mean[:, 0], to_model_range(image)
        terms = error_terms(stated, matched, weights, others, images, bands, correction)
        stated = seen_error(stated + correction, terms)
    # The head predicts the scale of a Laplace distribution, whose standard deviation is sqrt(2) times as large; the
    # model's range is twice as wide as reflectance.
    return stated.exp() * (2**0.5 / 2)


class BaselineTile(nn.Module):
    """Tiles of a baseline: images and masks, no error. The baseline itself gets the given masks alone."""

    def __init__(self, model: Baseline, masks: MaskSettings | None = None) -> None:
        super().__init__()
        self.model = model
        self.masks = TileMasks(model.config.bands, None, masks or MaskSettings())

    def forward(self, inputs: TileInputs, noises: Sequence[NoiseOf], *, steps: int, resamplings: int = 0) -> TileOutput:
        """Return the images (S, B, C, H, W) of a batch of tiles; see `Tile`."""
        from sader.baselines.baseline import BaselineInputs

        assert not resamplings, "baselines do not resample"
        given = BaselineInputs(
            cloudy=to_model_range(inputs.cloudy),
            aux=None if inputs.aux is None else to_model_range(inputs.aux),
            observed=inputs.valid,
            cloud=inputs.cloud,
            # A date without a valid pixel in the tile is absent there.
            present=inputs.valid.flatten(2).any(dim=2),
            reference=inputs.reference,
            days=inputs.days,
        )
        taken = None if self.model.config.steps is None else steps
        images = [to_reflectance(self.model.predict(given, noise, steps=taken)) for noise in noises]
        cloud = inputs.cloud if inputs.known_masks else self.masks(inputs)
        return TileOutput(torch.stack(images), cloud)
