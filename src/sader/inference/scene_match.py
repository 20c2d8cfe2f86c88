"""Radiometric match of a whole scene: every date mapped onto the reference date, fitted on an overview.

Not from the paper. The network matches dates within a tile (`model.matching`). A tile that lies under one large cloud
of the reference date has no clear pixel to match to, and its radiometry would differ from that of its neighbours. The
same fit on an overview of the scene reaches across such a gap; tiles then only refine it.
"""

from __future__ import annotations

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

OVERVIEW = 512
"""Longest edge of an overview, in pixels."""
NEARBY = 129
"""Edge in pixels of the window that says how near a pixel is to clear ones."""


def overview_factor(height: int, width: int) -> int:
    """Return how many pixels of a scene lie along one pixel of its overview."""
    return max(1, -(-max(height, width) // OVERVIEW))


def decimation(height: int, width: int) -> tuple[slice, slice]:
    """Return the slices of an overview: the middle of every n x n pixels."""
    step = overview_factor(height, width)
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
        """Return the maps fitted on an overview of the scene.

        cloudy: (T, C, h, w) reflectance; valid, cloud: (T, h, w), NaN = unknown. reference: None = the clearest date.
        factor: pixels of the scene along one pixel of the overview.
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

    def change(self, window: Window, cloudy: Tensor) -> Tensor:
        """Return the correction of the dates (T, C, h, w) of a window, in reflectance, on their device."""
        cells = self.coefficients.shape[-2:]
        device = cloudy.device
        centre = torch.from_numpy(self.centre).to(device)[:, None, None]
        rows = torch.from_numpy(_interpolation(window.row, window.height, self.cell, cells[0])).to(device)
        cols = torch.from_numpy(_interpolation(window.col, window.width, self.cell, cells[1])).to(device)
        out = torch.zeros_like(cloudy)
        down_last = cells[0] * window.width < cells[1] * window.height  # the smaller intermediate result
        with full_precision(cloudy):
            for date, maps in enumerate(self.coefficients):
                if not maps.any():
                    continue
                cellwise = torch.from_numpy(maps).to(device)
                smooth = rows @ (cellwise @ cols.T) if down_last else rows @ cellwise @ cols.T
                x = 2 * cloudy[date] - 1 - centre
                change = x[0] * smooth[0]
                for band in range(1, len(x)):
                    change += x[band] * smooth[band]
                change += smooth[-1]
                out[date] = change.clamp(-MOST_CHANGE, MOST_CHANGE) / 2
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
