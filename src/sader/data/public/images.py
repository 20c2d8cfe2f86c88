"""Read the images of public datasets, with exact errors; find files of equal content.

GeoTIFF through rasterio, PNG and JPEG through Pillow, masks as plain `.npy`. Files are opened for reading only,
and nothing is unpickled.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sader.bands import canonical
from sader.data.radar import RADAR_BANDS, scale_sar
from sader.errors import BandError, DataError, ShapeError, ValueRangeError, require
from sader.files import file_digest

MOST_BANDS = 16
"""A TIFF of one band and at most this width has one page per row, bands last."""


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts patch_2 before patch_10, the same on every machine."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def files_in(folder: Path, suffix: str) -> list[str]:
    """Return the names in `folder` that end in `suffix`, in natural order; hidden ones (._x.tif) are left out."""
    names = (name for name in os.listdir(folder) if name.lower().endswith(suffix) and not name.startswith("."))
    return sorted(names, key=natural_key)


@contextmanager
def opened_tiff(path: Path) -> Iterator[Any]:
    """Open a GeoTIFF with rasterio, georeferenced or not; a `DataError` where it cannot be read."""
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with rasterio.open(path) as file:
                yield file
    except (rasterio.errors.RasterioError, OSError) as error:
        raise DataError(f"cannot read {path}: {_reason(path, error)}. Copy it again or remove it.") from error


def read_counts(path: Path, bands: Sequence[str], *, centre: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return counts float32 (C, H, W) of a GeoTIFF with exactly `bands`, and bool (H, W), where they were observed.

    Not observed: not finite, the file's nodata, or 0 in every band; there the counts are 0. `centre` crops to
    that many pixels a side. A channel-last TIFF with one page per row is supported.
    """
    values, nodata = _tiff(path, bands, None, centre)
    if values.dtype == np.uint8:
        raise ValueRangeError(f"{path} holds 8-bit values; expected reflectance x 10000. Use the files as published.")
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


def read_reflectance(
    paths: Sequence[Path], bands: Sequence[str], *, centre: int | None = None, check: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of one grid as reflectance (N, C, H, W), and where they were observed, bool (N, H, W).

    Reflectance is clip(counts, 0, 10000) / 10000, as in SEN12MS-CR(-TS) and AllClear "default". Sen2_MTC_New is
    published without the clip; only clouds brighter than reflectance 1 differ. Arguments as in `read_counts`; check:
    raise for values that cannot be counts.
    """
    images = [read_counts(path, bands, centre=centre) for path in paths]
    same_size(paths, [counts for counts, _ in images])
    if check:
        for path, (counts, seen) in zip(paths, images, strict=True):
            check_counts(path, counts, seen)
    reflectance = [(np.clip(counts, 0, 10000) / 10000).astype(np.float32) for counts, _ in images]
    return np.stack(reflectance), np.stack([seen for _, seen in images])


def read_bands(path: Path, numbers: Sequence[int], *, centre: int | None = None, window: Any = None) -> np.ndarray:
    """Return some bands (C, H, W) of a GeoTIFF by number, from 1, as float32 with NaN kept: masks, radar."""
    return _tiff(path, None, numbers, centre, window)[0].astype(np.float32)


def read_sar(paths: Sequence[Path], scaling: str | None, path: Path, image: np.ndarray) -> dict[str, Any]:
    """Return the auxiliary bands of a series from its Sentinel-1 files, on the grid of an image; none if not wanted."""
    if scaling is None:
        return {}
    echoes = [read_bands(each, (1, 2)) for each in paths]
    same_size([path, *paths], [image, *echoes])
    return {"aux": np.stack([scale_sar(each, scaling=scaling) for each in echoes]), "aux_bands": RADAR_BANDS}


def _check_names(path: Path, descriptions: Sequence[str | None], bands: Sequence[str]) -> None:
    """Raise for a file whose band names are those of `bands` in another order; other descriptions are ignored."""
    found = [canonical(text or "") for text in descriptions]
    if found != list(bands) and set(found) == set(bands):
        order = ", ".join(map(str, found))
        raise BandError(f"{path} has bands {order}; expected the order {', '.join(bands)}. Use the files as published.")


def _tiff(
    path: Path, names: Sequence[str] | None, numbers: Sequence[int] | None, centre: int | None, window: Any = None
) -> tuple[np.ndarray, float | None]:
    with opened_tiff(path) as file:
        if names is not None:
            _check_names(path, file.descriptions, names)
        if file.count == 1 and file.width == len(names or ()) > 1:
            return _pages(path), None
        if numbers is not None and max(numbers) > file.count:
            raise BandError(
                f"{path} has {file.count} bands; expected at least {max(numbers)}. "
                "Check that the folder holds the dataset named, unchanged."
            )
        if centre is not None:
            if min(file.height, file.width) < centre:
                raise ShapeError(
                    f"{path} is {file.height}x{file.width} pixels; expected at least {centre} a side. "
                    "Download it again."
                )
            top, left = file.height // 2 - centre // 2, file.width // 2 - centre // 2
            window = (top, top + centre), (left, left + centre)
        return file.read(None if numbers is None else list(numbers), window=window), file.nodata


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


def read_pictures(colour: Sequence[Path], grey: Sequence[Path]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the colour images of one grid, (N, 3, H, W), and grey ones on the same grid, (1, H, W) each."""
    colours, greys = [read_picture(path) for path in colour], [read_picture(path, colours=1) for path in grey]
    same_size([*colour, *grey], [*colours, *greys])
    return np.stack(colours), greys


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


def check_files(paths: Iterable[Path]) -> None:
    """Raise for files that are missing, cut short or no image, with the first of them; pixels are not decoded."""
    every = sorted(set(paths))
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.filterwarnings("ignore", message="Dataset has no geotransform")
        damaged = [(path, why) for path, why in zip(every, pool.map(_damage, every), strict=True) if why]
    if damaged:
        shown = "; ".join(f"{path}: {why}" for path, why in damaged[:5])
        raise DataError(f"{len(damaged)} of {len(every)} files cannot be read: {shown}. Copy them again.")


def _damage(path: Path) -> str | None:
    """Return why a GeoTIFF, PNG or JPEG cannot be read; None if its parts are all in the file."""
    size = path.stat().st_size if path.is_file() else 0
    if size == 0:
        return "the file is empty" if path.exists() else "the file does not exist"
    if path.suffix.lower() in (".tif", ".tiff"):
        rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
        try:
            with rasterio.open(path) as file:
                ends = [_last_byte(file, band) for band in (1, file.count)]
                in_pages = file.count == 1 and file.width <= MOST_BANDS
            if in_pages:
                _pages(path)
        except (rasterio.errors.RasterioError, OSError, ValueError) as error:
            return _reason(path, error)
        return f"it ends after {size} of {max(ends)} bytes" if max(ends) > size else None
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        return _reason(path, error)
    return None


def _last_byte(file: Any, band: int) -> int:
    """Return the end of the last block of a band in the file."""
    rows, columns = file.block_shapes[band - 1]
    block = f"{-(-file.width // columns) - 1}_{-(-file.height // rows) - 1}"
    found = [file.get_tag_item(f"BLOCK_{key}_{block}", "TIFF", bidx=band) for key in ("OFFSET", "SIZE")]
    return sum(int(each) for each in found) if all(found) else 0


def check_order(images: Sequence[np.ndarray], bands: Sequence[str], root: Path) -> None:
    """Raise where clear images (C, H, W) contradict the order of `bands`.

    The cirrus band is near 0 over clear land (at most a third of the median band in SEN12MS-CR), near infrared is the
    brightest of four bands over most land. Images with equal bands decide nothing.
    """
    means = np.array([image.reshape(len(bands), -1).mean(1) for image in images])
    means = means[means.std(1) > 0.02 * means.mean(1)]
    found = ""
    if "B10" in bands and len(means):
        cirrus = list(bands).index("B10")
        share = means[:, cirrus] / np.median(means, axis=1)
        if np.median(share) > 0.5:
            found = f"band {cirrus + 1} has {np.median(share):.2f} of the median brightness; expected cirrus, near 0"
    elif "B08" in bands and len(means) >= 4:
        count = np.bincount(means.argmax(1), minlength=len(bands))
        brightest = int(count.argmax())
        if bands[brightest] != "B08" and count[brightest] >= 0.75 * len(means):
            found = f"band {brightest + 1} is the brightest; expected near infrared as band {bands.index('B08') + 1}"
    if found:
        raise BandError(
            f"the clear images in {root} are not in the order {', '.join(bands)}: {found}. Use the files as published."
        )


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


def content_groups(names: Iterable[str], path_of: Callable[[str], Path]) -> dict[str, list[str]]:
    """Return hash -> names whose files are equal, the names in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(file_digest(path_of(name)), []).append(name)
    return groups
