"""Error of NDVI for a number of dates nearest in time: clear dates of a long series are hidden in turn and cleaned.

    python benchmarks/nearest_dates.py SERIES.npz

SERIES.npz holds `img` (T, 4, H, W), B02 B03 B04 B08 in counts of 0.0001, `scl` (T, H, W) and `date` (T,). Half of a
date is hidden, then all of it, under a value of 0.6; masks are those of the scene classification.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

import sader

NEAREST = (3, 4, 6, 8, 10**6)


def ndvi(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the vegetation index of an image (4, H, W)."""
    return (image[3] - image[2]) / (image[3] + image[2])


def straight_line(
    at: float, days: NDArray[np.float64], images: NDArray[np.float32], seen: NDArray[np.bool_]
) -> NDArray:
    """Return the image (4, H, W) interpolated in time between the clear values of each pixel."""
    result = np.empty_like(images[0])
    for row, column in np.ndindex(images.shape[-2:]):
        clear = seen[:, row, column]
        for band in range(len(result)):
            result[band, row, column] = np.interp(at, days[clear], images[clear, band, row, column])
    return result


def main(path: str) -> None:
    """Print the mean absolute error of NDVI over the hidden pixels."""
    series = np.load(path)
    images = series["img"].astype(np.float32) / 10_000
    hidden = np.isin(series["scl"], (0, 1, 2, 3, 8, 9, 10))
    days = series["date"].astype("datetime64[D]").astype(float)
    remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    left = np.broadcast_to(np.arange(images.shape[-1]) < images.shape[-1] // 2, hidden.shape[1:])
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for date in np.flatnonzero(hidden.mean(axis=(1, 2)) < 0.005)[2::2]:
        order = np.argsort(np.abs(days - days[date]), kind="stable")[1:]
        for name, mask in {"half": left, "all": np.ones_like(left)}.items():
            cloudy = np.where(mask, np.float32(0.6), images[date])
            for count in NEAREST:
                others = np.sort(order[:count])
                stack = np.concatenate([cloudy[None], images[others]])
                masks = np.concatenate([mask[None], hidden[others]])
                clear = remover(stack, reference=0, cloud_mask=masks)
                errors[name, f"{len(others)} nearest"].append(
                    float(np.abs(ndvi(clear) - ndvi(images[date]))[mask].mean())
                )
            seen = ~hidden
            seen[date] &= ~mask
            line = straight_line(days[date], days, images, seen)
            errors[name, "straight line"].append(float(np.abs(ndvi(line) - ndvi(images[date]))[mask].mean()))
    for (name, method), values in errors.items():
        print(f"{name:5s} {method:14s} {np.mean(values):.3f} ({len(values)} dates)")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        print(__doc__)
