"""Read the images of public datasets, with exact errors; find files of equal content.

GeoTIFF through rasterio, PNG and JPEG through Pillow, masks as plain `.npy`. Files are opened for reading only,
and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sader.errors import BandError, DataError, ShapeError, ValueRangeError, require


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts patch_2 before patch_10, the same on every machine."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def files_in(folder: Path, suffix: str) -> list[str]:
    """Return the names in `folder` that end in `suffix`, in natural order; hidden ones (._x.tif) are left out."""
    names = (name for name in os.listdir(folder) if name.lower().endswith(suffix) and not name.startswith("."))
    return sorted(names, key=natural_key)


def read_counts(path: Path, bands: Sequence[str], *, centre: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return counts float32 (C, H, W) of a GeoTIFF with exactly `bands`, and bool (H, W), where they were observed.

    Not observed: not finite, the file's nodata, or 0 in every band; there the counts are 0. `centre` crops to
    that many pixels a side. A channel-last TIFF with one page per row is supported.
    """
    values, nodata = _tiff(path, len(bands), None, centre)
    if values.shape[0] != len(bands):
        raise BandError(
            f"{path} has {values.shape[0]} bands; expected {len(bands)}: {', '.join(bands)}. "
            "Check that the folder holds the dataset named, unchanged."
        )
    values = values.astype(np.float32)
    absent = ~np.isfinite(values)
    if nodata is not None and np.isfinite(nodata):
        absent |= values == nodata
    seen = ~absent.any(0) & (values != 0).any(0)
    return np.where(seen, values, 0).astype(np.float32), seen


def read_bands(path: Path, numbers: Sequence[int], *, centre: int | None = None) -> np.ndarray:
    """Return some bands (C, H, W) of a GeoTIFF by number, from 1, as float32 with NaN kept: masks, radar."""
    return _tiff(path, 0, numbers, centre)[0].astype(np.float32)


def _tiff(path: Path, bands: int, numbers: Sequence[int] | None, centre: int | None) -> tuple[np.ndarray, float | None]:
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with rasterio.open(path) as file:
                if file.count == 1 and file.width == bands > 1:
                    return _pages(path), None
                if numbers is not None and max(numbers) > file.count:
                    raise BandError(
                        f"{path} has {file.count} bands; expected at least {max(numbers)}. "
                        "Check that the folder holds the dataset named, unchanged."
                    )
                window = None
                if centre is not None:
                    if min(file.height, file.width) < centre:
                        raise ShapeError(
                            f"{path} is {file.height}x{file.width} pixels; expected at least {centre} a side. "
                            "Download it again."
                        )
                    top, left = file.height // 2 - centre // 2, file.width // 2 - centre // 2
                    window = rasterio.windows.Window(left, top, centre, centre)
                return file.read(None if numbers is None else list(numbers), window=window), file.nodata
    except (rasterio.errors.RasterioError, OSError) as error:
        raise DataError(f"cannot read {path}: {_reason(path, error)}. Copy it again from the dataset.") from error


def _pages(path: Path) -> np.ndarray:
    """Return (C, H, W) of a TIFF whose pages are the rows of a channel-last array."""
    from PIL import Image, ImageSequence

    with Image.open(path) as file:
        rows = [np.asarray(page) for page in ImageSequence.Iterator(file)]
    return np.stack(rows).transpose(2, 0, 1)


def check_counts(path: Path, counts: np.ndarray, seen: np.ndarray) -> None:
    """Raise unless the counts can be reflectance x 10000: reflectance in [0, 1] would become black."""
    if seen.any() and float(counts.max()) <= 2:
        raise ValueRangeError(
            f"{path} holds values up to {float(counts.max()):.3g}; expected counts, reflectance x 10000. "
            "Use the dataset as published, not a rescaled copy."
        )


def read_picture(path: Path, *, colours: int = 3) -> np.ndarray:
    """Return float32 (colours, H, W) in [0, 1] of an 8-bit PNG or JPEG: value / 255.

    colours 3 needs a colour image (transparency is dropped); colours 1 takes the first channel, since infrared images
    are stored as grey or as three equal channels.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            mode = file.mode
            if mode == "P":
                values = np.asarray(file.convert("RGB"))
            elif mode in ("RGB", "RGBA", "L", "LA", "1"):
                values = np.asarray(file.convert("L") if mode == "1" else file)
            else:
                raise BandError(f"{path} is of mode {mode}; expected an 8-bit image. Use the dataset as published.")
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise DataError(f"cannot read {path}: {_reason(path, error)}. Copy it again from the dataset.") from error
    values = values[..., None] if values.ndim == 2 else values
    if colours == 3 and values.shape[2] < 3:
        raise BandError(
            f"{path} has {values.shape[2]} channels ({mode}); expected 3: red, green, blue. "
            "Check that the folder holds the dataset named, unchanged."
        )
    return np.ascontiguousarray(values[..., :colours].transpose(2, 0, 1)).astype(np.float32) / 255


def read_mask(path: Path) -> np.ndarray:
    """Return bool (H, W) of a `.npy` mask, True where not 0; a pickled file is refused."""
    try:
        values: Any = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        if "pickle" in str(error).lower():
            raise DataError(
                f"{path} holds pickled objects, which can run code; expected a plain array. "
                "Save it again with np.save(path, array.astype(bool))."
            ) from error
        raise DataError(f"cannot read {path}: {_reason(path, error)}. Remove it or make it again.") from error
    values = np.squeeze(values)
    if values.ndim != 2:
        raise ShapeError(f"{path} is {values.shape}; expected a mask (H, W). Remove it or make it again.")
    return values > 0


def same_size(paths: Sequence[Path], images: Sequence[np.ndarray]) -> None:
    """Raise unless all images (..., H, W) have the size of the first."""
    for path, image in zip(paths, images, strict=True):
        if image.shape[-2:] != images[0].shape[-2:]:
            raise ShapeError(
                f"{path} is {image.shape[-2]}x{image.shape[-1]} pixels, but {paths[0].name} is "
                f"{images[0].shape[-2]}x{images[0].shape[-1]}; one series needs one grid. Copy the series again."
            )


def _reason(path: Path, error: BaseException) -> str:
    if not path.exists():
        return "the file does not exist"
    text = str(error).strip().replace("\n", " ").rstrip(".")
    return f"{text or type(error).__name__} ({path.stat().st_size} bytes)"


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Copy it again from the dataset.") from error


def content_groups(names: Iterable[str], path_of: Callable[[str], Path]) -> dict[str, list[str]]:
    """Return hash -> names whose files are equal, the names in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(file_hash(path_of(name)), []).append(name)
    return groups


def without_twins(
    names: Sequence[str],
    seen: Iterable[str],
    paths_of: Callable[[str], Sequence[Path]],
    *,
    seen_paths_of: Callable[[str], Sequence[Path]] | None = None,
) -> list[str]:
    """Return `names` without those that have a file in common with one of `seen` or with an earlier one."""
    known = {file_hash(path) for name in seen for path in (seen_paths_of or paths_of)(name)}
    kept = []
    for name in names:
        hashes = {file_hash(path) for path in paths_of(name)}
        if not hashes & known:
            kept.append(name)
        known |= hashes
    return kept
