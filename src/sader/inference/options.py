"""What a removal is asked for and what it gives: the options of `CloudRemover` and its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sader.errors import ConfigError
from sader.method.sampling import Solver

MOST_GROWTH = 64
"""Pixels by which own masks can be widened: the least tile's edge."""


@dataclass(frozen=True)
class RemoverOptions:
    """How the work is cut up, sampled and masked, where that is not the caller's to say at every call."""

    tile: int = 512
    """Edge of a tile in pixels, 64 to 1024; an image smaller than that is one tile. Dates are matched within a tile:
    small tiles know less."""
    overlap: int = 64
    """Pixels shared by neighbouring tiles, at most half a tile."""
    batch_size: int = 1
    """Tiles per evaluation on a GPU. On a CPU it is always 1: there more are no faster, and matrix products round
    differently for different batches, so that the result would depend on this number."""
    solver: Solver | None = None
    """None = the checkpoint's own; "euler" or "heun"."""
    guide: str | None = None
    """Guide of the resampling; None = the checkpoint's own."""
    guide_weights: str | None = None
    """File with the weights of a learned guide (sader pretrain-guide); None = the shipped ones, where there are."""
    cloud_threshold: float = 0.5
    """Probability of cloud or shadow from which the model's own estimate calls a pixel hidden; chosen, with the growth
    below, on training places of CloudSEN12."""
    mask_growth: int = 2
    """Pixels by which the model's own estimate is widened: a cloud's fringe costs more than a little clear land."""
    backend: str = "torch"
    """Who computes the tiles: "torch", "quick" (the same with the short cuts of `accelerate`, in half precision where
    the GPU or CPU has it; where they cannot be had it is "torch"), or "onnx" (ONNX Runtime on the CPU; within 1e-4 of
    the first)."""
    fused: bool | None = None
    """Backend quick on a GPU: kernels built by Triton, half a minute before the first tile, then twice as fast. None:
    built where they can be, for scenes only where that pays (`sader.geo.scene.warmup.worth_fusing`)."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; expected at least 1 tile per evaluation.")
        if self.backend not in ("torch", "quick", "onnx"):
            raise ConfigError(f"backend is {self.backend!r}; expected 'torch', 'quick' or 'onnx'.")
        if not 0 < self.cloud_threshold < 1:
            raise ConfigError(
                f"cloud_threshold is {self.cloud_threshold}; expected a probability between 0 and 1, such as 0.5."
            )
        if not 0 <= self.mask_growth <= MOST_GROWTH:
            raise ConfigError(f"mask_growth is {self.mask_growth}; expected 0 to {MOST_GROWTH} pixels, such as 2.")


@dataclass(frozen=True)
class Removal:
    """A result with what is known about it; arrays cover the whole image."""

    clear: NDArray[np.float32]
    """(C, H, W) reflectance; NaN where no date has data."""
    cloud: NDArray[np.float32] | None
    """(T, H, W) probability of cloud or shadow that was used, given or estimated; None for the paper's network."""
    kept: NDArray[np.bool_]
    """(H, W): pixels taken unchanged from the reference date."""
    spread: NDArray[np.float32] | None
    """(C, H, W): standard deviation to be expected, 0 where pixels are kept: the network's own estimate of its error,
    where it has one, and the spread over the samples together. None for one sample of a network without estimate."""
