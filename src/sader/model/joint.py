"""What all dates together say about the date to be cleaned, beyond the blend of each one's own say.

`matching.py` explains the anchor by one date at a time and `composite.py` weighs these explanations as if their errors
were independent. They are not: dates of one season err alike. Here what the blend gets wrong at the anchor's clear
pixels is regressed on how the best dates deviate from the blend, once for the whole image and once around each cell.
Closed-form, float32, no learned parameter; where evidence is thin the correction fades to nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from sader.model.blocks import reflect_pad
from sader.model.matching import (
    CELL,
    add_local_fit,
    cell_moments,
    evaluate_whole,
    fit_whole,
    inlier_weight,
    to_cells,
    to_pixels,
)

BEST_DATES = 2
"""Dates that enter with all their bands. The others still speak through the blend; a third gave +0.05 dB at most."""
PIXELS_JOINT = 500.0
"""Evidence, in clear pixels, at which the joint fit is trusted by half."""
FLAG_SCALE = 0.05
"""Size of the "is this date seen here" features, in model units: comparable to the other features' deviations."""
FARTHEST = 4.0
"""Features are cut at this many standard deviations of the pixels fitted on: beyond, a line says nothing."""
MOST_CORRECTION = 0.25
"""Largest correction, in model units."""
PASSES = 2


def joint_correction(
    image: Tensor, dates: Tensor, clear: Tensor, variance: Tensor, anchor: Tensor, *, others: Tensor
) -> Tensor:
    """Return what is to be added to the blend of the other dates, (B, C, H, W).

    image: (B, C, H, W), the blend. dates: (B, T, C, H, W), matched to the anchor. clear: (B, T, H, W) in [0, 1].
    variance: (B, T, H, W), mean squared misfit of each date around a pixel. anchor: (B,). others: bool (B, T), the
    dates that may be used: present, and not the anchor.
    """
    rows = torch.arange(anchor.shape[0], device=anchor.device)
    own, own_clear = dates[rows, anchor], clear[rows, anchor]
    best, seen = _best_dates(dates, clear * others[:, :, None, None], variance, own_clear)
    features = torch.cat(
        [rearrange((best - image[:, None]) * seen[:, :, None], "b k c h w -> b (k c) h w"), image, FLAG_SCALE * seen],
        dim=1,
    )
    some = (clear * others[:, :, None, None]).amax(dim=1)
    weight = own_clear * some
    residual = own - image
    return some[:, None] * _regressed(features, residual, weight).clamp(-MOST_CORRECTION, MOST_CORRECTION)


def _best_dates(dates: Tensor, clear: Tensor, variance: Tensor, own_clear: Tensor) -> tuple[Tensor, Tensor]:
    """Return the dates that explain most of what the anchor hides, (B, K, C, H, W), and where each is clear.

    Ranked once for the whole image, so that a feature means the same date at every pixel.
    """
    # An empty date at the end: there may be fewer dates than are looked for.
    dates = torch.cat([dates, torch.zeros_like(dates[:, :1])], dim=1)
    clear = torch.cat([clear, torch.zeros_like(clear[:, :1])], dim=1)
    worth = clear[:, :-1] / variance * (1.01 - own_clear)[:, None]
    worth = F.pad(worth.mean(dim=(-2, -1)), (0, 1), value=-1.0)
    pick = worth.topk(BEST_DATES, dim=1).indices
    at = pick[:, :, None, None].expand(-1, -1, *clear.shape[-2:])
    seen = clear.gather(1, at)
    return dates.gather(1, at[:, :, None].expand(-1, -1, dates.shape[2], -1, -1)), seen


def _regressed(features: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Return the prediction of `residual` (B, C, H, W) from `features` (B, D, H, W), fitted where `weight` says."""
    height, width = residual.shape[-2:]
    total = weight.sum(dim=(-2, -1)).clamp(min=1.0)[:, None, None, None]
    near = weight[:, None]
    x = features - (features * near).sum(dim=(-2, -1), keepdim=True) / total
    spread = ((x.square() * near).sum(dim=(-2, -1), keepdim=True) / total).sqrt()
    x = torch.minimum(torch.maximum(x, -FARTHEST * spread), FARTHEST * spread)
    ph, pw = (height + CELL - 1) // CELL * CELL, (width + CELL - 1) // CELL * CELL
    padded = reflect_pad(x, ph, pw)[:, None]
    target = reflect_pad(residual, ph, pw)[:, None]
    counted = F.pad(near, (0, pw - width, 0, ph - height))
    cells = to_cells(padded, target)

    def fitted(misfit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = counted * inlier_weight(misfit.square().mean(dim=2), counted)
        moments = cell_moments(cells, kept, features=x.shape[1])
        return moments, *fit_whole(moments, half=PIXELS_JOINT)

    moments, slope, offset = fitted(target)
    for _ in range(PASSES - 1):  # again without what could not be explained: missed clouds, changed fields
        moments, slope, offset = fitted(target - evaluate_whole(padded, slope, offset))
    maps = add_local_fit(moments, slope, offset)[:, 0]
    # One band after the other: all maps of 13 bands at once would take gigabytes.
    made = [_applied(x, to_pixels(maps[:, :, band], height, width)) for band in range(maps.shape[2])]
    # A few pixels are enough for a local fit of one date, not for one of so many features.
    return torch.stack(made, dim=1) * (total / (total + PIXELS_JOINT))


def _applied(x: Tensor, maps: Tensor) -> Tensor:
    """Return (B, H, W) for features (B, D, H, W) and their maps (B, D + 1, H, W), the offset last."""
    return (x * maps[:, :-1]).sum(dim=1) + maps[:, -1]
