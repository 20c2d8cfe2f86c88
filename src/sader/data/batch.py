"""`SeriesBatch`, the input of a training step: series with targets and masks; symmetries; keyed generators."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from sader.errors import ShapeError

CLEAR, THICK, THIN, SHADOW, UNKNOWN = 0, 1, 2, 3, 255
"""Values of `SeriesBatch.labels`, as in CloudSEN12."""


@dataclass(frozen=True)
class SeriesBatch:
    """B series of T dates with everything a loss needs. Reflectance is float32 in [0, 1]."""

    cloudy: Tensor
    """(B, T, C, H, W) the input dates; 0 where not valid, in absent dates and in absent bands."""
    clear: Tensor
    """(B, C, H, W) the target; valid only at `scored` pixels."""
    scored: Tensor
    """bool (B, H, W), the target is observed and clear; the loss counts only these pixels."""
    hidden: Tensor
    """bool (B, H, W), pixels of the reference date under the pasted or simulated cloud; all False without reference."""
    cloud_mask: Tensor
    """bool (B, T, H, W), true cloud or shadow. Where labels are unknown it is an estimate from the target."""
    labels: Tensor
    """uint8 (B, T, H, W): 0 clear, 1 thick cloud, 2 thin cloud, 3 shadow, 255 unknown (no loss for the cloud head)."""
    valid: Tensor
    """bool (B, T, H, W), the pixel was observed."""
    present: Tensor
    """bool (B, T), the date exists; False is padding."""
    reference: Tensor
    """long (B,), the date to clean; -1 where the target is none of the dates (the paper's task)."""
    days: Tensor | None
    """(B, T) days since the first date of the series, NaN where unknown; or None."""
    band_present: Tensor
    """bool (B, C), the band was observed; elsewhere no loss."""

    def split(self, bands: int) -> tuple[SeriesBatch, Tensor | None]:
        """Return the batch with the first `bands` bands alone, and the auxiliary ones (B, T, A, H, W); None without.

        Auxiliary bands that are missing are 0.5, the middle of the range, which a network takes as missing.
        """
        if self.cloudy.shape[2] == bands:
            return self, None
        there = self.band_present[:, None, bands:, None, None]
        aux = self.cloudy[:, :, bands:].masked_fill(~there, 0.5)
        cloudy, clear, there = self.cloudy[:, :, :bands], self.clear[:, :bands], self.band_present[:, :bands]
        return replace(self, cloudy=cloudy, clear=clear, band_present=there), aux

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are not None."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None}

    def __post_init__(self) -> None:
        if self.cloudy.ndim != 5:
            raise ShapeError(
                f"cloudy has {self.cloudy.ndim} dimensions {tuple(self.cloudy.shape)}; expected (B, T, C, H, W). "
                "For one date use cloudy[:, None]."
            )
        b, t, c, h, w = self.cloudy.shape
        wanted = {
            "clear": (b, c, h, w), "scored": (b, h, w), "hidden": (b, h, w), "cloud_mask": (b, t, h, w),
            "labels": (b, t, h, w), "valid": (b, t, h, w), "present": (b, t), "reference": (b,), "band_present": (b, c),
        }  # fmt: skip
        if self.days is not None:
            wanted["days"] = (b, t)
        for name, shape in wanted.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ShapeError(f"{name} is {found}; expected {shape} beside cloudy {(b, t, c, h, w)}.")


def turn(image: Tensor, symmetry: int) -> Tensor:
    """Return (..., H, W) under one of the 8 symmetries of the square.

    Bit 2 swaps rows and columns, then bit 0 flips rows and bit 1 flips columns. 0 changes nothing; a swap gives
    (..., W, H).
    """
    if not 0 <= symmetry < 8:
        raise ShapeError(f"symmetry is {symmetry}; expected 0 to 7.")
    if symmetry & 4:
        image = image.transpose(-2, -1)
    axes = [axis for axis, bit in ((-2, 1), (-1, 2)) if symmetry & bit]
    return image.flip(axes) if axes else image


def keyed_torch(device: torch.device | str, *key: int) -> torch.Generator:
    """Return a generator on a device that depends on the integers `key` alone."""
    return torch.Generator(device).manual_seed(int(keyed_generator(*key).integers(2**62)))


def keyed_generator(*key: int) -> np.random.Generator:
    """Return a NumPy generator that depends on the integers `key` alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([number & 0xFFFFFFFF for number in key])))
