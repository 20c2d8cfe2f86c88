"""The cloud-aware loss: extra weight where clouds hid the ground, a cloud-free term, and a brightness term in YUV.

The paper's cloud-aware loss, Eqs. (15) to (19); see docs/method.md#loss. Values are in the model's range [-1, 1]. The
weights of pixels follow from the images alone: no cloud mask is read. The noise level enters through `weight`.

With r = |cloudy - clear| / (1 - clear) averaged over the bands, scaled to [0, 1] over the pixels of each date, and A
its mean over the dates:

    cloud term       lambda_c * M_A * d(denoised, clear),   M_A grows with A where A > 1 - threshold, else 0
    cloud-free term  lambda_u * M_U * d(denoised, clear),   M_U = 1 where 1 - A > threshold, else 0
    brightness term  lambda_b * d(YUV(denoised), YUV(clear))

d is the squared (or absolute) difference; each term is averaged over bands and pixels and multiplied by the weight of
the noise level. The public code has one A for each band (`masks="band"`) and a nearly constant M_A
(`weight_form="sigmoid"`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sader.errors import BandError, ConfigError, ShapeError

DENOMINATOR_FLOOR = 0.05
"""Least distance of the target from pure white: a bright roof must not become the thickest cloud."""

CHOICES = {"norm": ("l2", "l1"), "weight_form": ("sigmoid", "linear"), "masks": ("pixel", "band")}
ROBUST_MAXIMUM = 0.99
"""Share of the pixels at or below the robust maximum that scales the thickness."""


@dataclass(frozen=True)
class CloudAwareLossConfig:
    """Weights and variants of the loss; by default the paper's, with the protections of docs/method.md#loss."""

    cloud: float = 3.0
    """lambda_c: weight of pixels that clouds touched; 0 switches the term off."""
    clear: float = 1.0
    """lambda_u: weight of pixels that every date shows clear; 0 switches the term off."""
    brightness: float = 2.0
    """lambda_b: weight of the YUV difference; 0 switches the term off."""
    threshold: float = 0.95
    """theta in (0, 1): a pixel is clear where its thickness is below 1 - theta."""
    robust: bool = True
    """Protect the denominator and take the 99th percentile as maximum; False is the public code."""
    norm: Literal["l2", "l1"] = "l2"
    """Squared or absolute differences."""
    weight_form: Literal["linear", "sigmoid"] = "linear"
    """M_A = A (paper), or sigmoid(T A) / sigmoid(1), almost flat (public code)."""
    masks: Literal["pixel", "band"] = "pixel"
    """One map A of H x W for all bands (paper), or one for each band (public code)."""

    def __post_init__(self) -> None:
        for name in ("cloud", "clear", "brightness"):
            if getattr(self, name) < 0:
                raise ConfigError(f"loss weight {name} is {getattr(self, name)}; expected 0 (off) or more")
        if not 0 < self.threshold < 1:
            raise ConfigError(f"loss threshold is {self.threshold}; expected a value between 0 and 1, such as 0.95")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"loss {name} is {getattr(self, name)!r}; expected {known[0]!r} or {known[1]!r}")

    @classmethod
    def public_code(cls) -> CloudAwareLossConfig:
        """Return what the public code trains with: 3:2:1, theta .999, sigmoid weights per band, nothing protected."""
        weights = cls(cloud=3.0, clear=2.0, brightness=1.0, threshold=0.999)
        return replace(weights, robust=False, weight_form="sigmoid", masks="band")


class LossTerms(NamedTuple):
    """Scalars: `total` to minimise, and its three parts as they enter it (each includes its lambda)."""

    total: Tensor
    cloud: Tensor
    clear: Tensor
    brightness: Tensor


class CloudAwareLoss:
    """Cloud, cloud-free and brightness terms of one batch (paper, Eq. (15)).

    rgb: where red, green and blue are among the bands: (0, 1, 2) for Sen2_MTC_New, (3, 2, 1) for 13 bands.
    """

    def __init__(self, config: CloudAwareLossConfig | None = None, *, rgb: tuple[int, int, int] = (0, 1, 2)) -> None:
        self.config = config if config is not None else CloudAwareLossConfig()
        self.rgb = rgb

    def __call__(
        self,
        denoised: Tensor,
        clear: Tensor,
        cloudy: Tensor,
        weight: Tensor,
        *,
        present: Tensor | None = None,
        pixels: Tensor | None = None,
    ) -> LossTerms:
        """Return the terms, averaged over the batch.

        denoised, clear: (B, C, H, W) in [-1, 1]; cloudy: (B, T, C, H, W); weight: (B,), 1 / c_out^2 of the noise level;
        present: bool (B, T), False for padded dates; pixels: bool (B, H, W), where the target is truly known: the
        others neither add to the loss nor scale the thickness.
        """
        if denoised.shape != clear.shape or weight.shape != clear.shape[:1]:
            raise ShapeError(
                f"denoised is {tuple(denoised.shape)}, clear {tuple(clear.shape)}, weight {tuple(weight.shape)}; "
                "expected (B, C, H, W) twice and (B,)"
            )
        config = self.config
        cloud_weight, clear_mask = self.pixel_weights(cloudy, clear, present=present, pixels=pixels)
        # An unknown target may be NaN: both sides become 0 before any arithmetic, so gradients stay finite.
        if pixels is not None:
            denoised, clear = (x.where(pixels[:, None], 0) for x in (denoised, clear))
        difference = self._distance(denoised, clear)
        off = denoised.new_zeros(())

        def mean(values: Tensor) -> Tensor:
            if pixels is None:
                per_image = values.mean((1, 2, 3))
            else:
                per_image = (values * pixels[:, None]).sum((1, 2, 3)) / (pixels.sum((1, 2)) * values.shape[1]).clamp(
                    min=1
                )
            return (weight * per_image).mean()

        cloud = config.cloud * mean(cloud_weight * difference) if config.cloud else off
        uncloud = config.clear * mean(clear_mask * difference) if config.clear else off
        brightness = off
        if config.brightness:
            yuv = self._distance(to_yuv(denoised, rgb=self.rgb), to_yuv(clear, rgb=self.rgb))
            brightness = config.brightness * mean(yuv)
        return LossTerms(cloud + uncloud + brightness, cloud, uncloud, brightness)

    @torch.no_grad()
    def pixel_weights(
        self, cloudy: Tensor, clear: Tensor, *, present: Tensor | None = None, pixels: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return M_A and M_U, each (B, 1, H, W), or (B, C, H, W) for `masks="band"`: their supports are complements."""
        config = self.config
        thickness = cloud_thickness(
            cloudy, clear, present=present, pixels=pixels, robust=config.robust, masks=config.masks
        )
        touched = thickness > 1 - config.threshold
        if config.weight_form == "linear":
            strength = thickness
        else:
            dates = _present(cloudy, present).sum(1).to(thickness.dtype)[:, None, None, None]
            strength = torch.sigmoid(dates * thickness) / torch.sigmoid(torch.ones_like(dates))
        return strength * touched, (~touched).to(thickness.dtype)

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square() if self.config.norm == "l2" else (a - b).abs()


@torch.no_grad()
def cloud_thickness(
    cloudy: Tensor,
    clear: Tensor,
    present: Tensor | None = None,
    *,
    pixels: Tensor | None = None,
    robust: bool = True,
    masks: Literal["pixel", "band"] = "pixel",
) -> Tensor:
    """Return the cloud thickness A, (B, 1, H, W) in [0, 1], averaged over bands and dates (paper, Eq. (16)).

    cloudy: (B, T, C, H, W) and clear: (B, C, H, W) in [-1, 1]; present: bool (B, T), False for missing dates, which
    have no influence (a sample without any date has thickness 0); pixels: bool (B, H, W), the pixels that set the scale
    (others get 0); robust: clamp the denominator and scale by the 99th percentile; masks: "band" for one map of each
    band, (B, C, H, W). No gradient flows.
    """
    if cloudy.ndim != 5 or clear.shape != cloudy[:, 0].shape:
        raise ShapeError(
            f"cloudy is {tuple(cloudy.shape)} and clear {tuple(clear.shape)}; expected (B, T, C, H, W) and (B, C, H, W)"
        )
    there = _present(cloudy, present)
    white_distance = (1 - clear).clamp(min=DENOMINATOR_FLOOR) if robust else 1 - clear + 1e-8
    ratio = (cloudy - clear[:, None]).abs() / white_distance[:, None]
    if masks == "pixel":
        ratio = ratio.mean(2, keepdim=True)
    low, high = _spatial_range(ratio, pixels, robust=robust)
    scaled = (ratio - low) / (high - low + 1e-8)
    if robust:
        scaled = scaled.clamp(0, 1)
    # Values that are not there may be NaN until here; `where`, unlike a product, drops them.
    keep = there[:, :, None, None, None]
    if pixels is not None:
        keep = keep & pixels[:, None, None]
    return scaled.where(keep, 0).sum(1) / there.sum(1).clamp(min=1)[:, None, None, None]


def to_yuv(image: Tensor, *, rgb: tuple[int, int, int] = (0, 1, 2)) -> Tensor:
    """Return brightness and two colour differences, (B, 3, H, W), of (B, C, H, W) in [-1, 1] (BT.601)."""
    if max(rgb) >= image.shape[1]:
        raise BandError(
            f"rgb={tuple(rgb)} but the image has {image.shape[1]} bands; pass rgb= with indexes of bands, "
            "or switch the brightness term off with brightness=0"
        )
    red, green, blue = (image[:, index] for index in rgb)
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    return torch.stack([y, 0.492 * (blue - y), 0.877 * (red - y)], dim=1)


def _present(cloudy: Tensor, present: Tensor | None) -> Tensor:
    """Return which dates exist, bool (B, T)."""
    if present is None:
        return torch.ones(cloudy.shape[:2], dtype=torch.bool, device=cloudy.device)
    if present.shape != cloudy.shape[:2]:
        raise ShapeError(f"present is {tuple(present.shape)}; expected (B, T) = {tuple(cloudy.shape[:2])}")
    return present.bool()


def _spatial_range(ratio: Tensor, pixels: Tensor | None, *, robust: bool) -> tuple[Tensor, Tensor]:
    """Return the least and the (robust) greatest value over the scored pixels, each (B, T, C, 1, 1)."""
    flat = ratio.flatten(3)
    count = flat.shape[-1]
    if pixels is None:
        low = flat.amin(-1)
        # kthvalue, not quantile: the latter refuses tensors of more than 16 million values.
        high = flat.kthvalue(1 + int(ROBUST_MAXIMUM * (count - 1)), dim=-1).values if robust else flat.amax(-1)
    else:
        scored = pixels.flatten(1)[:, None, None]
        low = flat.where(scored, torch.inf).amin(-1)
        if robust:
            ordered = flat.where(scored, torch.inf).sort(dim=-1).values
            rank = (ROBUST_MAXIMUM * (scored.sum(-1) - 1).clamp(min=0)).long().expand(flat.shape[:-1])
            high = ordered.gather(-1, rank[..., None])[..., 0]
        else:
            high = flat.where(scored, -torch.inf).amax(-1)
        some = scored.any(-1)
        low, high = low.where(some, 0), high.where(some, 0)
    return low[..., None, None], high[..., None, None]
