"""Overview of a scene, its reference date, and the radiometric match of every date to it, fitted on the overview.

Not from the paper. The network matches dates within a tile (`model.matching`). A tile that lies under one large cloud
of the reference date has no clear pixel to match to, and its radiometry would differ from that of its neighbours. The
same fit on an overview of the scene reaches across such a gap; tiles then only refine it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sader.errors import ConfigError, DataError
from sader.inference.masks import HARDLY_SEEN
from sader.inference.tiling import Window
from sader.inference.values import HIGHEST, LOWEST, to_device
from sader.model.blocks import full_precision, to_model_range
from sader.model.composite import clearest_date
from sader.model.heads import level_spread
from sader.model.matching import CELL, MOST_CHANGE, NOISE_VARIANCE, carried_inward, fit_dates, inlier_weight

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover

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
    level: NDArray[np.float32] | None = None
    """(C,) reflectance: error to be expected because nothing of the reference date is seen; None where it is seen."""

    @classmethod
    def fit(cls, overview: Overview, reference: int | None, factor: int, *, hidden: bool = False) -> SceneMatch:
        """Return the maps fitted on an overview of the scene. reference: None = the clearest date.

        factor: pixels of the scene along one pixel of the overview. hidden: the date to be cleaned shows nothing.
        """
        values = np.where(overview.valid[:, None], overview.cloudy.clip(LOWEST, HIGHEST), np.float32(0.5))
        series, observed = to_model_range(torch.from_numpy(values))[None], torch.from_numpy(overview.valid)[None]
        clear = (1 - torch.from_numpy(np.nan_to_num(overview.cloud, nan=0.0)).float()[None]) * observed
        with torch.inference_mode():
            anchor = clearest_date(series, clear, observed) if reference is None else torch.tensor([reference])
            coefficients, centre = fit_dates(series, clear, anchor, observed=observed)
            coefficients = coefficients.clone()
            coefficients[0, int(anchor[0])] = 0.0  # the date itself stays as it is, to the bit
            level = (level_spread(series, clear, anchor)[0] / 2).numpy() if hidden else None
        return cls(coefficients[0].numpy(), centre[0, 0, :, 0, 0].numpy(), CELL * factor, level)

    def change(self, window: Window, cloudy: Tensor) -> Tensor:
        """Return the correction of the dates (T, C, h, w) of a window, in reflectance, on their device."""
        cells = self.coefficients.shape[-2:]
        device = cloudy.device
        centre = to_device(self.centre, device)[:, None, None]
        rows = to_device(_interpolation(window.row, window.height, self.cell, cells[0]), device)
        cols = to_device(_interpolation(window.col, window.width, self.cell, cells[1]), device)
        out = torch.zeros_like(cloudy)
        down_last = cells[0] * window.width < cells[1] * window.height  # the smaller intermediate result
        with full_precision(cloudy):
            for date, maps in enumerate(self.coefficients):
                if not maps.any():
                    continue
                cellwise = to_device(maps, device)
                smooth = rows @ (cellwise @ cols.T) if down_last else rows @ cellwise @ cols.T
                x = 2 * cloudy[date] - 1 - centre
                change = x[0] * smooth[0]
                for band in range(1, len(x)):
                    change += x[band] * smooth[band]
                change += smooth[-1]
                out[date] = change.clamp(-MOST_CHANGE, MOST_CHANGE) / 2
        return out


def _interpolation(start: int, length: int, cell: int, cells: int) -> NDArray[np.float32]:
    """Return the weights (length, cells) of linear interpolation between the middles of cells, flat beyond the ends."""
    position = ((np.arange(start, start + length) + 0.5) / cell - 0.5).clip(0, cells - 1)
    lower = np.minimum(position.astype(int), max(cells - 2, 0))
    share = position - lower
    weights = np.zeros((length, cells), dtype=np.float32)
    weights[np.arange(length), lower] = 1 - share
    weights[np.arange(length), np.minimum(lower + 1, cells - 1)] += share
    return weights


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


# ------------------------------------------------------------------------------------------------ overview


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Let PyTorch use so many cores for one operation of this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Overview:
    """All dates of a scene, decimated to at most `OVERVIEW` pixels along the longer edge."""

    cloudy: NDArray[np.float32]
    """(T, C, h, w) reflectance, 0 where not valid."""
    valid: NDArray[np.bool_]
    """(T, h, w)"""
    cloud: NDArray[np.float32]
    """(T, h, w) probability of cloud or shadow; NaN where it is unknown."""

    @classmethod
    def of(
        cls,
        remover: CloudRemover,
        cloudy: NDArray[np.float32],
        *,
        valid: NDArray[np.bool_],
        masks: Sequence[NDArray[np.bool_] | None],
        bands: Sequence[str],
    ) -> Overview:
        """Return the overview of decimated dates, with the clouds that the model finds where no mask is given."""
        cloud = np.ones(valid.shape, np.float32)
        if valid.any():
            # On one core, so that the bits do not depend on the number of cores.
            with intra_op_threads(1):
                values = cloudy.clip(LOWEST, HIGHEST)
                cloud = remover.estimate_cloud(values, valid=valid, cloud_mask=list(masks), bands=bands)
        return cls(cloudy, valid, cloud)

    @property
    def clear_share(self) -> NDArray[np.float64]:
        """(T,): the part of the scene that each date shows clearly. Pixels of unknown state count as clear."""
        clear = 1 - np.nan_to_num(self.cloud, nan=0.0)
        return (clear * self.valid).mean(axis=(1, 2), dtype=np.float64)

    def unseen_share(self, threshold: float) -> float:
        """Return the part of the pixels with data that no date shows clearly."""
        seen = self.valid.any(axis=0)
        clear = (self.valid & ~(self.cloud >= threshold)).any(axis=0)
        return float((seen & ~clear).sum() / max(seen.sum(), 1))

    def shows_nothing(self, date: int) -> bool:
        """Return whether clouds hide (nearly) all of a date, so that no other date can be matched to it."""
        return bool(self.clear_share[date] < HARDLY_SEEN)

    def match(self, remover: CloudRemover, reference: int | None, shape: tuple[int, int]) -> SceneMatch | None:
        """Return the maps that bring all dates to one radiometry.

        None where there is nothing to match: a scene of one tile, one date, or a model that matches no dates.
        """
        alone = max(shape) <= remover.tile_size or len(self.cloudy) == 1 or not remover.matches_dates
        if alone or not self.valid.any():
            return None
        hidden = reference is not None and self.shows_nothing(reference)
        with intra_op_threads(1):
            return SceneMatch.fit(self, None if hidden else reference, overview_factor(*shape), hidden=hidden)


def find_reference(
    wanted: str | int | np.datetime64 | None,
    names: Sequence[str],
    overview: Overview | None = None,
    *,
    days: Sequence[str | None] | None = None,
) -> int | None:
    """Return the index of the reference date, None for a new image; raise where the date that is named has no data.

    wanted: "auto" (the clearest on the overview), "none" or None, an index, a name or the start of exactly one, or a
        date.
    days: date of each as YYYY-MM-DD, None where it is unknown.
    """
    if wanted is None or (isinstance(wanted, str) and wanted.lower() == "none"):
        return None
    if overview is not None and str(wanted).lower() == "auto":
        return int(np.argmax(overview.clear_share))
    reference = _index_of(wanted, names, days or [None] * len(names))
    if overview is not None and not overview.valid[reference].any():
        raise DataError(f"reference {names[reference]} has no valid pixel on the output grid. Choose another date.")
    return reference


def _index_of(wanted: str | int | np.datetime64, names: Sequence[str], days: Sequence[str | None]) -> int:
    if isinstance(wanted, int | np.integer) and not isinstance(wanted, bool):
        if not -len(names) <= wanted < len(names):
            last = len(names) - 1
            raise ConfigError(f"reference is {wanted}; there are {len(names)} dates, so it goes from 0 to {last}.")
        return int(wanted) % len(names)
    text = str(wanted)
    found = [index for index, (name, day) in enumerate(zip(names, days, strict=True)) if _means(text, name, day)]
    found = found or [index for index, name in enumerate(names) if name.startswith(text)]
    if len(found) == 1:
        return found[0]
    pairs = zip(names[:12], days, strict=False)
    known = ", ".join(name if day is None or day in name else f"{name} ({day})" for name, day in pairs)
    raise ConfigError(
        f"reference is {text!r}, which fits {len(found) or 'none'} of the dates: {known}. Give one name, a date as "
        "YYYY-MM-DD, auto or none."
    )


def _means(wanted: str, name: str, day: str | None) -> bool:
    path = wanted.replace("\\", "/").rstrip("/")
    last = path.rsplit("/", 1)[-1]
    if path.endswith(f"/{name}") or last == name or path == name or last.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]:
        return True
    digits = "".join(letter for letter in wanted if letter.isdigit())
    return day is not None and len(digits) == 8 and day.replace("-", "") == digits
