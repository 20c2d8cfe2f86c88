"""SADER: one cloud-free image from several cloudy satellite acquisitions.

The names below are imported when first used, so that `import sader` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sader._version import __version__

_NAMES = {
    "sader.inference.remover": ("CloudRemover", "RemoverOptions"),
    "sader.geo.remove": ("remove_files",),
    "sader.geo.series": ("clean_series",),
    "sader.geo.batch.run": ("remove_scenes",),
    "sader.geo.classes": ("classify_files", "classify_xarray"),
    "sader.geo.xarray.lazy": ("remove_xarray",),
    "sader.model.mtcdn": ("MTCDN", "MTCDNConfig"),
    "sader.method.diffusion": ("Denoiser", "DiffusionConfig", "karras_sigmas", "sample"),
    "sader.method.losses": ("CloudAwareLoss",),
    "sader.method.resampling": ("Resampler",),
    "sader.method.metrics": ("evaluate",),
    "sader.models": ("get_preset",),
    "sader.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "sader.errors": ("SaderError",),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}

# Written out for tools that read the source (ruff, mypy, editors); a test compares it with `_WHERE`.
__all__ = [
    "MTCDN",
    "CloudAwareLoss",
    "CloudRemover",
    "Denoiser",
    "DiffusionConfig",
    "MTCDNConfig",
    "RemoverOptions",
    "Resampler",
    "SaderError",
    "__version__",
    "classify_files",
    "classify_xarray",
    "clean_series",
    "evaluate",
    "get_preset",
    "karras_sigmas",
    "load_checkpoint",
    "remove_files",
    "remove_scenes",
    "remove_xarray",
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
    from sader.errors import SaderError
    from sader.geo.batch.run import remove_scenes
    from sader.geo.classes import classify_files, classify_xarray
    from sader.geo.remove import remove_files
    from sader.geo.series import clean_series
    from sader.geo.xarray.lazy import remove_xarray
    from sader.inference.remover import CloudRemover, RemoverOptions
    from sader.method.diffusion import Denoiser, DiffusionConfig, karras_sigmas, sample
    from sader.method.losses import CloudAwareLoss
    from sader.method.metrics import evaluate
    from sader.method.resampling import Resampler
    from sader.model.mtcdn import MTCDN, MTCDNConfig
    from sader.models import get_preset
