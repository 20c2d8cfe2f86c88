"""A seam detector: does an image step where its tiles meet, more than it does beside those lines?

Along every inner edge of a tile the mean step across the edge is compared with the steps across parallel lines nearby.
Averaging along the edge cancels the texture of the land and leaves what a seam adds: the same step all along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sader.inference.tiling import Window

NEAR, FAR = 4, 28
"""Parallel lines this many pixels away are the measure; nearer ones would see the seam too."""
DEPTH = 2
"""Pixels averaged on each side of a line."""
FEWEST = 16
"""Pixels an edge must have on both sides to count."""
FLOOR = 2e-5
"""Smallest usual step, in reflectance: a fifth of a count of Sentinel-2."""
EXCESS_LIMIT, WORST_LIMIT = 1.3, 1.5
"""Where there is no seam the tile edges are lines like any other, and both figures stay near or below 1."""


@dataclass(frozen=True)
class Seams:
    """What the detector found."""

    excess: float
    """Root mean square step at the tile edges, over that of the same pattern of lines moved aside (its 95th
    percentile over the moves)."""
    worst: float
    """The largest step at one edge, over the largest at any line beside an edge."""
    edges: int
    """How many edges of tiles were looked at, each band for itself."""

    @property
    def found(self) -> bool:
        """Whether tiles show."""
        return self.edges > 0 and (self.excess > EXCESS_LIMIT or self.worst > WORST_LIMIT)


def find_seams(image: NDArray[np.floating], windows: Sequence[Window]) -> Seams:
    """Return the seams of an image (C, H, W) that was made in `windows`; NaN is left out."""
    found: list[NDArray[np.float64]] = []
    for window in windows:
        rows, cols = window.slices
        for line in (window.row, window.row + window.height):
            found += _scores(image[:, :, cols], line)
        for line in (window.col, window.col + window.width):
            found += _scores(np.swapaxes(image[:, rows], 1, 2), line)
    if not found:
        return Seams(0.0, 0.0, 0)
    scores = np.stack(found)  # (edges, lines); the middle line is the edge itself
    beside = np.abs(np.arange(-FAR, FAR + 1)) >= NEAR
    moved = np.sqrt(np.nanmean(scores[:, beside] ** 2, axis=0))
    excess = np.sqrt(np.mean(scores[:, FAR] ** 2)) / max(float(np.percentile(moved, 95)), 1.0)
    worst = np.abs(scores[:, FAR]).max() / max(float(np.nanmax(np.abs(scores[:, beside]))), 1.0)
    return Seams(float(excess), float(worst), len(scores))


def _scores(strip: NDArray[np.floating], line: int) -> list[NDArray[np.float64]]:
    """Return the steps across the lines around row `line` of a strip (C, H, w), in usual steps: one row per band."""
    height = strip.shape[1]
    if line - FAR - DEPTH < 0 or line + FAR + DEPTH > height:
        return []
    part = strip[:, line - FAR - DEPTH : line + FAR + DEPTH].astype(np.float64)
    steps = np.stack([_step(part, DEPTH + at) for at in range(2 * FAR + 1)], axis=1)  # (C, lines)
    made = []
    for one in steps:
        if not np.isfinite(one[FAR]) or np.isfinite(one).sum() < FAR:
            continue
        # Land that brightens evenly steps everywhere alike: what counts is how far a line differs from its like.
        usual = np.nanmedian(one)
        spread = 1.4826 * np.nanmedian(np.abs(one - usual))
        made.append((one - usual) / max(float(spread), FLOOR))
    return made


def _step(part: NDArray[np.float64], line: int) -> NDArray[np.float64]:
    """Return the mean step (C,) from the rows above a line to the rows below it; NaN where too few are known."""
    with np.errstate(invalid="ignore"):
        difference = part[:, line : line + DEPTH].mean(axis=1) - part[:, line - DEPTH : line].mean(axis=1)
    known = np.isfinite(difference)
    count = known.sum(axis=1)
    total = np.where(known, difference, 0.0).sum(axis=1)
    return np.where(count >= FEWEST, total / np.maximum(count, 1), np.nan)
