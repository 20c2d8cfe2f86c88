"""One radiometry for a whole scene: every date mapped onto the reference date from a look at all of it from afar.

Not from the paper. The network matches dates within a tile (`model.matching`). A tile that lies under one large cloud
of the reference date has nothing to match to, and would come out in another light than its neighbours. The same fit,
made once on a small picture of the scene, reaches across such a hole; tiles then only refine it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sader.inference.tiling import Window
from sader.model.blocks import full_precision, to_model_range
from sader.model.composite import NOISE_VARIANCE, clearest_date
from sader.model.infill import carried_inward
from sader.model.matching import CELL, MOST_CHANGE, fit_dates, inlier_weight

LOOK = 512
"""Longest edge of a look from afar, in pixels."""
NEARBY = 129
"""Edge in pixels of the window that says how near a pixel is to clear ones."""


def look_factor(height: int, width: int) -> int:
    """Return how many pixels of a scene lie along one pixel of the look at it."""
    return max(1, -(-max(height, width) // LOOK))


def decimation(height: int, width: int) -> tuple[slice, slice]:
    """Return the slices of a look from afar: the middle of every n x n pixels."""
    step = look_factor(height, width)
    first = slice(step // 2, None, step)
    return (first if height > step // 2 else slice(None)), (first if width > step // 2 else slice(None))


@dataclass(frozen=True)
class SceneMatch:
    """Linear maps of each date onto one date, slowly varying over the scene."""

    coefficients: NDArray[np.float32]
    """(T, C + 1, C, h, w): slopes and offsets per cell, in model units."""
    centre: NDArray[np.float32]
    """(C,) in model units."""
    cell: int
    """Pixels of the scene along one cell."""

    @classmethod
    def fit(
        cls,
        cloudy: NDArray[np.float32],
        *,
        valid: NDArray[np.bool_],
        cloud: NDArray[np.float32],
        reference: int | None,
        factor: int,
    ) -> SceneMatch:
        """Return the maps found in a look at the scene.

        cloudy: (T, C, h, w) reflectance; valid, cloud: (T, h, w), NaN = unknown. reference: None = the clearest date.
        factor: pixels of the scene along one pixel of the look.
        """
        series = to_model_range(torch.from_numpy(np.where(valid[:, None], cloudy, 0.5).astype(np.float32)))[None]
        observed = torch.from_numpy(valid)[None]
        clear = (1 - torch.from_numpy(np.nan_to_num(cloud, nan=0.0)).float()[None]) * observed
        with torch.inference_mode():
            anchor = clearest_date(series, clear, observed) if reference is None else torch.tensor([reference])
            coefficients, centre = fit_dates(series, clear, anchor)
            coefficients = coefficients.clone()
            coefficients[0, int(anchor[0])] = 0.0  # the date itself stays as it is, to the bit
        return cls(coefficients[0].numpy(), centre[0, 0, :, 0, 0].numpy(), CELL * factor)

    def change(self, window: Window, cloudy: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what is to be added to the dates (T, C, h, w) of a window, in reflectance."""
        cells = self.coefficients.shape[-2:]
        rows = _interpolation(window.row, window.height, self.cell, cells[0])
        cols = _interpolation(window.col, window.width, self.cell, cells[1])
        out = np.zeros_like(cloudy)
        for date, maps in enumerate(self.coefficients):
            if not maps.any():
                continue
            smooth = np.einsum("hp,ijpq,wq->ijhw", rows, maps, cols, optimize=True)
            x = 2 * cloudy[date] - 1 - self.centre[:, None, None]
            change = np.einsum("ihw,ijhw->jhw", x, smooth[:-1]) + smooth[-1]
            out[date] = change.clip(-MOST_CHANGE, MOST_CHANGE) / 2
        return out

    def change_of(self, windows: Sequence[Window], cloudy: Tensor) -> Tensor:
        """Return `change` of several windows of one size, (B, T, C, h, w), computed where `cloudy` is."""
        cells = self.coefficients.shape[-2:]
        device = cloudy.device
        centre = torch.from_numpy(self.centre).to(device)[:, None, None]
        maps = [torch.from_numpy(one).to(device) if one.any() else None for one in self.coefficients]
        out = torch.zeros_like(cloudy)
        with full_precision(cloudy):
            for index, window in enumerate(windows):
                rows = torch.from_numpy(_interpolation(window.row, window.height, self.cell, cells[0])).to(device)
                cols = torch.from_numpy(_interpolation(window.col, window.width, self.cell, cells[1])).to(device)
                for date, one in enumerate(maps):
                    if one is None:
                        continue
                    smooth = rows @ one @ cols.T
                    x = 2 * cloudy[index, date] - 1 - centre
                    # In the order of the sums of `change`.
                    change = x[0] * smooth[0]
                    for band in range(1, len(x)):
                        change += x[band] * smooth[band]
                    change += smooth[-1]
                    out[index, date] = change.clamp(-MOST_CHANGE, MOST_CHANGE) / 2
        return out


def feather(image: Tensor, own: Tensor, clear: Tensor) -> Tensor:
    """Return an image (B, C, H, W) that meets the pixels of a date where they are clear, without an edge around them.

    For tiles in which the reference date shows too little to lead the network: what the image gets wrong at its clear
    pixels is taken off around them and fades within half of `NEARBY` pixels. own: (B, C, H, W); clear: bool (B, H, W).
    """
    safe = clear[:, None].to(image.dtype)
    residual = (own - image) * safe
    safe = safe * inlier_weight(residual.square().mean(dim=1, keepdim=True), safe, NOISE_VARIANCE)
    shown = F.avg_pool2d(clear[:, None].to(image.dtype), NEARBY, stride=1, padding=NEARBY // 2, count_include_pad=False)
    near = (4 * shown).clamp(max=1)
    return image + near * carried_inward(residual, safe)


def _interpolation(start: int, length: int, cell: int, cells: int) -> NDArray[np.float32]:
    """Return the weights (length, cells) of linear interpolation between the middles of cells, flat beyond the ends."""
    position = ((np.arange(start, start + length) + 0.5) / cell - 0.5).clip(0, cells - 1)
    lower = np.minimum(position.astype(int), max(cells - 2, 0))
    share = position - lower
    weights = np.zeros((length, cells), dtype=np.float32)
    weights[np.arange(length), lower] = 1 - share
    weights[np.arange(length), np.minimum(lower + 1, cells - 1)] += share
    return weights
