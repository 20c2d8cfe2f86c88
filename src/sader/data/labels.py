"""Labels of training scenes: what covers each pixel, from a label file or from the mask of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sader.data.batch import CLEAR, SHADOW, THICK, THIN, UNKNOWN
from sader.data.public.images import opened_tiff
from sader.errors import DataError, require

MOST_MASKED = 0.05
"""Masked share of a date above which its unmasked pixels are labelled unknown, not clear, where a mask is not reliable
at the edges of clouds or has no shadows."""
CLOUD_PERCENT = 40
"""Probability in percent from which a pixel is cloud, as in s2cloudless."""
SCL = np.array([UNKNOWN, UNKNOWN, UNKNOWN, SHADOW, CLEAR, CLEAR, CLEAR, UNKNOWN, THICK, THICK, THIN, CLEAR], np.uint8)
"""Class of the scene classification of L2A -> label; dark areas and unclassified pixels are unknown."""
ENDINGS = ("_label", "_scl", "_fmask", "_s2cloudless", "_cld")
"""Ends of the names of label files, the first one found counts: labels (0 clear, 1 thick cloud, 2 thin cloud, 3 shadow,
255 unknown), SCL, Fmask of HLS v2, mask of s2cloudless (0 clear, 1 cloud), cloud probability in percent."""


def is_label_file(path: Path) -> bool:
    """Whether the name is that of a label file."""
    return path.stem.lower().endswith(ENDINGS)


def label_file(path: Path) -> Path | None:
    """Return the label file beside the scene at `path`; None where there is none."""
    spellings = ((ending, ending.upper(), f"_{ending[1:].capitalize()}") for ending in ENDINGS)
    names = (path.with_name(f"{path.stem}{end}.tif") for ends in spellings for end in ends)
    return next((file for file in names if file.is_file()), None)


def read_labels(path: Path, size: tuple[int, int], *, window: Any = None) -> np.ndarray:
    """Return the labels uint8 (H, W) of a label file; its name states what the numbers mean.

    size: height and width of the scene. The file may be coarser, such as SCL at 20 m. window: a part of the scene.
    """
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    with opened_tiff(path) as file:
        if file.height * size[1] != file.width * size[0]:
            raise DataError(
                f"{path} is {(file.height, file.width)} pixels and its scene {size}; expected the same area. "
                "Warp it first."
            )
        part = window or rasterio.windows.Window(0, 0, size[1], size[0])
        shape, factor = (int(part.height), int(part.width)), file.height / size[0]
        scaled = rasterio.windows.Window(*(factor * x for x in (part.col_off, part.row_off, part.width, part.height)))
        numbers = file.read(1, window=scaled, out_shape=shape)
    kind = next(ending for ending in ENDINGS if path.stem.lower().endswith(ending))[1:]
    highest = {"label": SHADOW, "scl": len(SCL) - 1, "fmask": 255, "s2cloudless": 1, "cld": 100}[kind]
    wrong = numbers[(numbers > highest) & (numbers != UNKNOWN)]
    if wrong.size:
        hint = " Name probabilities in percent NAME_cld.tif." if kind == "s2cloudless" else ""
        raise DataError(f"{path} holds {wrong[0]}; expected values from 0 to {highest}, or 255 for unknown.{hint}")
    if kind == "scl":
        return np.where(numbers < len(SCL), SCL[np.minimum(numbers, len(SCL) - 1)], UNKNOWN).astype(np.uint8)
    if kind == "fmask":
        return _fmask_labels(numbers)
    if kind in ("s2cloudless", "cld"):
        cloud = numbers >= (1 if kind == "s2cloudless" else CLOUD_PERCENT)
        known = numbers != UNKNOWN
        # s2cloudless finds no shadows: beside clouds, the rest of a date is not certain to be clear.
        rest = CLEAR if (cloud & known).sum() <= MOST_MASKED * known.sum() else UNKNOWN
        return np.where(known, np.where(cloud, THICK, rest), UNKNOWN).astype(np.uint8)
    return numbers.astype(np.uint8)


def _fmask_labels(bits: np.ndarray) -> np.ndarray:
    """Return the labels of Fmask: bit 0 cirrus, 1 cloud, 2 adjacent to cloud or shadow (unknown), 3 shadow."""
    rules = [(bits == UNKNOWN, UNKNOWN), (bits & 2, THICK), (bits & 8, SHADOW), (bits & 1, THIN), (bits & 4, UNKNOWN)]
    return np.select([np.asarray(rule) > 0 for rule, _ in rules], [label for _, label in rules], CLEAR).astype(np.uint8)
