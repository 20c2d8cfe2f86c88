"""Images with holes: a smooth weightless fill, random masks, and the training loss of learned guides.

Shared by the guides of the resampling (`method/guides.py`, `model/masked_autoencoder.py`). Images are (B, C, H, W),
holes are bool (B, 1, H, W) with True = missing. The values of missing pixels are never read; they may be NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sader.errors import ConfigError, ShapeError
from sader.model.matching import carried_inward


def check_holes(image: Tensor, missing: Tensor) -> None:
    """Raise unless image is (B, C, H, W) and missing is bool (B, 1, H, W) of the same size."""
    if image.ndim != 4:
        raise ShapeError(f"image has {image.ndim} dimensions {tuple(image.shape)}; expected (B, C, H, W).")
    wanted = (image.shape[0], 1, *image.shape[-2:])
    if tuple(missing.shape) != wanted or missing.dtype != torch.bool:
        raise ShapeError(
            f"missing is {missing.dtype} {tuple(missing.shape)}; expected torch.bool {wanted}, True where the image is "
            "not to be trusted. For a mask of all bands use mask.any(dim=1, keepdim=True)."
        )


def visible_mean(image: Tensor, missing: Tensor, *, fallback: float | Tensor) -> Tensor:
    """Return the per-band mean (B, C, 1, 1) over the pixels that are not missing; `fallback` where all are."""
    visible = ~missing
    count = visible.sum(dim=(-2, -1), keepdim=True)
    total = torch.where(missing, 0, image).sum(dim=(-2, -1), keepdim=True)
    return torch.where(count > 0, total / count.clamp(min=1), fallback)


def push_pull_fill(image: Tensor, missing: Tensor, *, fallback: float | Tensor) -> Tensor:
    """Return `image` with its holes filled smoothly from their surroundings; visible pixels do not change.

    `fallback` (number or (B, C, 1, 1)) is the value where nothing at all is visible.
    """
    known = (~missing).to(image.dtype)
    filled = carried_inward(torch.where(missing, 0, image), known)
    nothing = missing.all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.where(missing, torch.where(nothing, fallback, filled), image)


def random_block_mask(
    batch: int, height: int, width: int, *, block: int = 8, rate: float = 0.5, generator: torch.Generator | None = None
) -> Tensor:
    """Return holes bool (B, 1, H, W) of square blocks that cover about `rate` of each image (paper: 8, 0.5).

    The grid of blocks is shifted at random, so that holes also cut through patches, as they do when sampling. The mask
    lives on the generator's device.
    """
    if block < 1 or not 0 <= rate <= 1:
        raise ConfigError(
            f"block is {block} and rate {rate}; expected a block of 1 pixel or more and a rate of 0 to 1."
        )
    device = generator.device if generator is not None else torch.device("cpu")
    rows, columns = -(-height // block) + 1, -(-width // block) + 1
    scores = torch.rand((batch, rows * columns), generator=generator, device=device)
    # Ranking instead of a threshold gives every image the same share of blocks.
    chosen = scores.argsort(dim=1).argsort(dim=1) < round(rate * rows * columns)
    mask = chosen.view(batch, 1, rows, columns)
    mask = mask.repeat_interleave(block, dim=-2).repeat_interleave(block, dim=-1)
    shifts = torch.randint(block, (batch, 2), generator=generator, device=device).tolist()
    return torch.stack([m[:, y : y + height, x : x + width] for m, (y, x) in zip(mask, shifts, strict=True)])


def masked_autoencoder_loss(
    prediction: Tensor, target: Tensor, missing: Tensor, *, boundary: float = 1.0, smoothness: float = 1.0
) -> Tensor:
    """Return the scalar training loss of a learned guide: L1 + boundary + smoothness, weights 1, 1, 1.

    prediction, target: reflectance (B, C, H, W); only `missing` pixels (bool (B, 1, H, W)) of the prediction count,
    since the guide returns the input elsewhere.
    - L1 on the missing pixels;
    - boundary: L1 between the horizontal and vertical differences of the filled image and of the target, over the
      pairs of neighbours that straddle a border of the hole, so that the fill joins without a seam;
    - smoothness: |prediction - mean of the visible 3x3 neighbours| weighted by how many are visible.
    """
    check_holes(prediction, missing)
    bands = target.shape[1]
    filled = torch.where(missing, prediction, target)

    def mean_over(value: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(value.dtype)
        return (value * weight).sum() / (bands * weight.sum()).clamp(min=1)

    loss = mean_over((filled - target).abs(), missing)
    for dim in (-2, -1):
        straddles = missing.diff(dim=dim)  # for bool this is "exclusive or"
        loss = loss + boundary * mean_over((filled.diff(dim=dim) - target.diff(dim=dim)).abs(), straddles)
    visible = (~missing).to(target.dtype)
    kernel = torch.ones((1, 1, 3, 3), dtype=target.dtype, device=target.device)
    count = F.conv2d(visible, kernel, padding=1)
    known = torch.where(missing, 0, target)
    total = F.conv2d(known, kernel.expand(bands, 1, 3, 3), padding=1, groups=bands)
    neighbours = total / count.clamp(min=1)
    return loss + smoothness * mean_over((filled - neighbours).abs(), missing * count)
