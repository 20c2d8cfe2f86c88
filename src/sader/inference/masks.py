"""Who finds the clouds where a model of many bands sees few of them: the shipped network of four bands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sader.bands import BANDS_RGBN
from sader.checkpoint import load_checkpoint, shipped, verified
from sader.model.mtcdn import MTCDN

FINDER = "sader-s2-rgbn"
ENOUGH_BANDS = 0.75
"""Part of a model's bands from which it finds clouds as well as the finder: with 6 of its 13 `sader-s2-msi` takes half
of the clear land for cloud, with 10 it is the better one (MODELS.md)."""


def sees_too_little(bands: Sequence[str], there: Sequence[bool]) -> bool:
    """Whether a model of `bands`, of which some are `there`, should leave the clouds to the finder."""
    found = {band for band, present in zip(bands, there, strict=True) if present}
    return len(found) < ENOUGH_BANDS * len(bands) and set(BANDS_RGBN) <= found


def load_finder(device: torch.device, *, multiple: int) -> MTCDN | None:
    """Return the network, or None where it is not in the package or does not take tiles of `multiple` pixels."""
    path = shipped().get(FINDER)
    if path is None:
        return None
    model = load_checkpoint(verified(path)).model
    network = model.network
    assert isinstance(network, MTCDN)
    return network.to(device).eval() if multiple % network.config.multiple == 0 else None


def four_bands(bands: Sequence[str], cloudy: Tensor, band_present: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cloudy (B, T, 4, H, W), band_present (B, 4)): what the finder looks at."""
    chosen = [list(bands).index(band) for band in BANDS_RGBN]
    return cloudy[:, :, chosen], band_present[:, chosen]
