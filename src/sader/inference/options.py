"""`RemoverOptions`, the settings of a `CloudRemover`, and `Removal`, its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sader.errors import ConfigError, did_you_mean
from sader.method.guides import GUIDES
from sader.method.resampling import RESAMPLINGS
from sader.method.sampling import Solver

BACKENDS = ("torch", "accelerated", "onnx")
LARGEST_GROWTH = 64
"""Pixels; the smallest edge of a tile."""


@dataclass(frozen=True)
class RemoverOptions:
    """Tiling, sampling, masks and backend of a remover."""

    tile: int = 512
    """Edge of a tile in pixels, 64 to 1024; a smaller image is one tile. Dates are matched within a tile, so that
    small tiles match on less evidence."""
    overlap: int = 64
    """Pixels shared by neighbouring tiles, at most half a tile."""
    batch_size: int = 1
    """Tiles per evaluation on a GPU. Always 1 on a CPU: larger batches are no faster there, and matrix products round
    differently for different batch sizes."""
    solver: Solver | None = None
    """"euler" or "heun"; None = the checkpoint's own."""
    resampling: str | None = None
    """"paper" (Algorithm 1), "public_code" or "default" (`method.resampling`); None = the checkpoint's own."""
    guide: str | None = None
    """Guide of the resampling; None = the checkpoint's own."""
    guide_weights: str | None = None
    """File with the weights of a learned guide (sader pretrain-guide); None = the shipped ones, where they exist."""
    cloud_threshold: float = 0.5
    """Probability of cloud or shadow from which an estimated mask hides a pixel."""
    mask_growth: int = 2
    """Pixels by which estimated masks are widened: the fringe of a cloud costs more quality than lost clear pixels."""
    backend: str = "torch"
    """"torch": PyTorch in float32. "accelerated": half precision where the GPU or CPU has it (`inference.accelerate`).
    "onnx": ONNX Runtime on the CPU, within 1e-4 of "torch"."""
    compile: bool = False
    """Backend accelerated: also use `torch.compile`. It takes up to two minutes before the first tile and pays for the
    paper's network over some hundred tiles."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; expected at least 1 tile per evaluation.")
        if self.backend not in BACKENDS:
            raise ConfigError(f"unknown backend {self.backend!r}{did_you_mean(self.backend, BACKENDS)}")
        for what, name, known in (("resampling", self.resampling, RESAMPLINGS), ("guide", self.guide, GUIDES)):
            if name is not None and name not in known:
                raise ConfigError(f"unknown {what} {name!r}{did_you_mean(name, known)}")
        if not 0 < self.cloud_threshold < 1:
            raise ConfigError(
                f"cloud_threshold is {self.cloud_threshold}; expected a probability between 0 and 1, such as 0.5."
            )
        if not 0 <= self.mask_growth <= LARGEST_GROWTH:
            raise ConfigError(f"mask_growth is {self.mask_growth}; expected 0 to {LARGEST_GROWTH} pixels, such as 2.")


def default_backend(device: torch.device) -> str:
    """Return the backend for scenes where none is chosen: accelerated on a GPU, torch on a CPU."""
    return "accelerated" if device.type == "cuda" else "torch"


@dataclass(frozen=True)
class Removal:
    """A clear image with its masks and expected error; arrays cover the whole image."""

    clear: NDArray[np.float32]
    """(C, H, W) reflectance; NaN where no date has data."""
    cloud: NDArray[np.float32] | None
    """(T, H, W) mask of cloud or shadow that was used, given or estimated; None for networks that use no masks."""
    kept: NDArray[np.bool_]
    """(H, W): pixels taken unchanged from the reference date."""
    spread: NDArray[np.float32] | None
    """(C, H, W): expected standard deviation, 0 for kept pixels: the network's estimate of its error and the spread of
    the samples together. None for one sample of a network that does not estimate its error."""
