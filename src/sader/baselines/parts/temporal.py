"""What the baselines for any number of dates share: their frames, attention over dates in channel groups, sinusoids.

L-TAE (BASELINES 9 and 13): several heads, each weighing its own group of channels ("grouped"); a date that is not
available has no part. Shapes: K heads, D key width, everything else as in HOUSE 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sader.baselines.baseline import BaselineInputs


def date_frames(inputs: BaselineInputs, *, reference: bool) -> Tensor:
    """Return what a network sees of each date, (B, T, C + A, H, W), with one more plane where `reference` is asked for.

    That plane is 1 in the date to clean and 0 elsewhere. The published systems have none: they make a new image, and
    one that treats all dates alike cannot tell which of them to follow.
    """
    frames = inputs.stacked
    if not reference:
        return frames
    position = torch.arange(frames.shape[1], device=frames.device)
    own = (position == inputs.reference[:, None]).to(frames.dtype)
    return torch.cat([frames, own[:, :, None, None, None].expand_as(frames[:, :, :1])], dim=2)


def sinusoid(value: Tensor, width: int, *, period: float = 10_000.0) -> Tensor:
    """Return cos and sin of `value` at width / 2 frequencies from 1 down to 1 / period: (...) -> (..., width)."""
    half = width // 2
    exponent = torch.arange(half, device=value.device, dtype=torch.float32) / half
    angle = value.float()[..., None] * period**-exponent
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def date_weights(query: Tensor, keys: Tensor, available: Tensor) -> Tensor:
    """Return how much each date counts for each head, (B, T, K, H, W), summing to 1 over the dates.

    query: (B or 1, K, D, H or 1, W or 1); keys: (B, T, K, D, H, W); available: bool (B, T, H, W). Where no date is
    available all of them count: there is nothing better, and a softmax over nothing would be NaN.
    """
    # Products and sums, as in `model.fusion`: tiny batched matrix products are several times slower.
    logits = (query[:, None] * keys).sum(dim=3).float() / keys.shape[3] ** 0.5
    use = available | ~available.any(dim=1, keepdim=True)
    return logits.masked_fill(~use[:, :, None], float("-inf")).softmax(dim=1)


def weigh_dates(frames: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over dates, each head weighing its own channels.

    frames (B, T, C, H, W) and weights (B, T, K, H, W) -> (B, C, H, W).
    """
    heads = weights.shape[2]
    grouped = frames.unflatten(2, (heads, -1))
    return (weights[:, :, :, None].to(frames.dtype) * grouped).sum(dim=1).flatten(1, 2)
