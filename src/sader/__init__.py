"""SADER: one cloud-free image from several cloudy satellite acquisitions.

The names below are resolved when first used, so that `import sader` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sader._version import __version__

_WHERE = {
    "CloudRemover": "sader.pipeline",
    "MTCDN": "sader.model.mtcdn",
    "MTCDNConfig": "sader.model.mtcdn",
    "Denoiser": "sader.diffusion",
    "DiffusionConfig": "sader.diffusion",
    "CloudAwareLoss": "sader.losses",
    "Resampler": "sader.resampling",
    "sample": "sader.sampling",
    "karras_sigmas": "sader.sampling",
    "evaluate": "sader.metrics",
    "get_preset": "sader.presets",
    "load_checkpoint": "sader.checkpoint",
    "save_checkpoint": "sader.checkpoint",
    "SaderError": "sader.errors",
}

# Written out, because readers of source (ruff, mypy, editors) do not run it; a test compares it with `_WHERE`.
__all__ = [
    "MTCDN",
    "CloudAwareLoss",
    "CloudRemover",
    "Denoiser",
    "DiffusionConfig",
    "MTCDNConfig",
    "Resampler",
    "SaderError",
    "__version__",
    "evaluate",
    "get_preset",
    "karras_sigmas",
    "load_checkpoint",
    "sample",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'sader' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return list(__all__)


if TYPE_CHECKING:
    from sader.checkpoint import load_checkpoint, save_checkpoint
    from sader.diffusion import Denoiser, DiffusionConfig
    from sader.errors import SaderError
    from sader.losses import CloudAwareLoss
    from sader.metrics import evaluate
    from sader.model.mtcdn import MTCDN, MTCDNConfig
    from sader.pipeline import CloudRemover
    from sader.presets import get_preset
    from sader.resampling import Resampler
    from sader.sampling import karras_sigmas, sample
