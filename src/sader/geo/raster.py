"""Write reflectance as a GeoTIFF that a GIS opens: CRS, transform, band names, scale, nodata.

Not from the paper. Values on disk are uint16, reflectance = value * 0.0001, 0 = nodata, as Sentinel-2 users expect.
It writes whole images; reading and writing by window belong here too and come with `sader remove`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sader.errors import OutputError, ShapeError, require

SCALE = 1e-4
NODATA = 0


def to_digital_numbers(image: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Return reflectance (C, H, W) as uint16 counts: round(reflectance * 10000), NaN -> 0 = nodata.

    A valid pixel is at least 1, so that a black one never turns into nodata; above 6.5535 it is cut.
    """
    counts = np.clip(np.rint(np.asarray(image, np.float64) / SCALE), NODATA + 1, np.iinfo(np.uint16).max)
    return np.where(np.isfinite(image), counts, NODATA).astype(np.uint16)


def write_geotiff(
    path: Path | str,
    image: NDArray[np.floating],
    *,
    bands: Sequence[str],
    crs: str,
    transform: tuple[float, float, float, float, float, float],
    tags: Mapping[str, str] | None = None,
) -> Path:
    """Write reflectance (C, H, W) to `path` and return it; the file appears under its name only when it is whole.

    crs: for example "EPSG:32632".
    transform: the affine (a, b, c, d, e, f) with x = a col + b row + c and y = d col + e row + f, in CRS units.
    tags: free text kept in the file.
    """
    rasterio = require("rasterio", extra="geo", purpose="writing GeoTIFF")
    if image.ndim != 3 or image.shape[0] != len(bands):
        raise ShapeError(f"image has shape {image.shape} for {len(bands)} band names; expected ({len(bands)}, H, W).")
    target = Path(path)
    part: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        os.close(handle)
        part = Path(name)
        with rasterio.open(
            part,
            "w",
            driver="GTiff",
            count=image.shape[0],
            height=image.shape[1],
            width=image.shape[2],
            dtype="uint16",
            crs=crs,
            transform=rasterio.Affine(*transform),
            nodata=NODATA,
            tiled=True,
            blockxsize=256,
            blockysize=256,
            compress="deflate",
            predictor=2,
        ) as dataset:
            dataset.write(to_digital_numbers(image))
            dataset.descriptions = tuple(bands)
            dataset.scales = (SCALE,) * len(bands)
            dataset.offsets = (0.0,) * len(bands)
            dataset.update_tags(**(tags or {}))
        part.chmod(0o666 & ~_umask())  # mkstemp keeps files private
        part.replace(target)
    except (OSError, rasterio.errors.RasterioError, rasterio.errors.CRSError) as error:
        reason = str(error).rstrip(".")
        raise OutputError(
            f"cannot write {target}: {reason}. Choose a folder that can be written to and has room."
        ) from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    return target


def _umask() -> int:
    """Return the process's file mode mask (which can only be read by setting it)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
