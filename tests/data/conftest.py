"""Writers of small files in the layouts of the public datasets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

Write = Callable[[Path, np.ndarray], Path]


@pytest.fixture
def write_tif() -> Write:
    """Return a function that writes (C, H, W) as a plain GeoTIFF, making its folder."""
    rasterio = pytest.importorskip("rasterio")

    def write(path: Path, image: np.ndarray) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        count, height, width = image.shape
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            profile = {"driver": "GTiff", "count": count, "height": height, "width": width, "dtype": image.dtype.name}
            with rasterio.open(path, "w", **profile, compress="deflate") as file:
                file.write(image)
        return path

    return write


@pytest.fixture
def write_picture() -> Write:
    """Return a function that writes uint8 (H, W) or (H, W, C) as PNG or JPEG, making its folder."""
    from PIL import Image

    def write(path: Path, image: np.ndarray) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path, quality=95)
        return path

    return write


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, tuple[int, int]]]:
    """Return a function that lists every file and folder below a root with its time of change and size."""

    def look(root: Path) -> dict[str, tuple[int, int]]:
        return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}

    return look
