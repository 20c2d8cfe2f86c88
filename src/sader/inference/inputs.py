"""What a user may hand to `CloudRemover`, checked and turned into tensors; every refusal says what to do.

Nothing is repaired silently: a value that cannot be reflectance is an error, not a clip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sader.baselines.baseline import BaselineConfig
from sader.errors import BandError, ConfigError, ShapeError, ValueRangeError
from sader.inference.tiling import Window
from sader.model.blocks import reflect_pad
from sader.model.mtcdn import MTCDNConfig
from sader.models import AnyModelConfig

LOWEST, HIGHEST = -0.2, 3.0
"""Reflectance outside this cannot be: offsets give slightly negative values, sun glint on cloud up to about 2."""


@dataclass(frozen=True)
class PreparedSeries:
    """One series as tensors with a batch axis of 1, in the model's band order."""

    cloudy: Tensor
    """(1, T, C, H, W) reflectance, 0.5 (the model's zero) where there is no data or no such band."""
    valid: Tensor
    """bool (1, T, H, W)"""
    cloud: Tensor
    """(1, T, H, W): 1 cloud, 0 clear, NaN unknown."""
    reference: Tensor
    """(1,) long, -1 for none."""
    band_present: Tensor
    """bool (1, C)"""
    days: Tensor | None
    """(1, T)"""
    aux: Tensor | None
    """(1, T, A, H, W)"""
    output: tuple[int, ...]
    """Positions, among the model's bands, of the bands the user gave, in the user's order."""
    change: Tensor | None = None
    """(1, T, C, H, W): what the matching of the whole scene adds to each date (`sader.inference.scene_match`)."""

    def cut(self, window: Window) -> PreparedSeries:
        """Return the part of the series inside a window."""
        return self._each(lambda x: x[..., *window.slices])

    def with_change(self, change: NDArray[np.float32]) -> PreparedSeries:
        """Return the series with what the matching of the whole scene adds: (T, C, H, W), in the bands of the user."""
        added = np.zeros(self.cloudy.shape[1:], dtype=np.float32)
        added[:, list(self.output)] = np.where(self.valid[0, :, None].numpy(), change, 0.0)
        return replace(self, change=torch.from_numpy(added)[None])

    def padded(self, multiple: int) -> PreparedSeries:
        """Return the series with its size reflected up to a multiple."""
        height, width = (-(-size // multiple) * multiple for size in self.cloudy.shape[-2:])
        return self._each(lambda x: reflect_pad(x, height, width))

    def _each(self, change: Callable[[Tensor], Tensor]) -> PreparedSeries:
        return replace(
            self,
            cloudy=change(self.cloudy),
            valid=change(self.valid),
            cloud=change(self.cloud),
            aux=None if self.aux is None else change(self.aux),
            change=None if self.change is None else change(self.change),
        )


def parse_steps(steps: int | str | None, config: AnyModelConfig) -> tuple[int, int]:
    """Return (steps, resamplings) from 4 or "4" (no resampling), "4+1", or None (the checkpoint's own)."""
    if steps is None:
        return config.default_steps
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer | str):
        raise ConfigError(f"steps is {steps!r}; expected a number such as 4, or '4+1' for resampling.")
    count, plus, extra = str(steps).partition("+")
    if not count.strip().isdecimal() or (plus and not extra.strip().isdecimal()) or int(count) < 1:
        raise ConfigError(f"steps is {steps!r}; expected a number such as 4, or '4+1' for resampling.")
    return int(count), int(extra) if plus else 0


def prepare_series(
    network: MTCDNConfig | BaselineConfig,
    cloudy: ArrayLike,
    *,
    reference: int | None,
    cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None,
    days: Sequence[float] | None,
    aux: ArrayLike | None,
    valid: ArrayLike | None,
    bands: Sequence[str] | None,
    part: bool = False,
    scene_change: NDArray[np.float32] | None = None,
) -> PreparedSeries:
    """Return the checked series; arguments as in `CloudRemover.predict`.

    part: it is one tile of a scene, where a patch of zero reflectance (deep water) proves no mistake.
    scene_change: (T, C, H, W) from `sader.inference.scene_match`, in the bands of cloudy.
    """
    array = _number_array(cloudy, "cloudy")
    if array.ndim != 4:
        hint = "For one date use cloudy[None]." if array.ndim == 3 else "Stack the dates first, then the bands."
        raise ShapeError(f"cloudy has {array.ndim} dimensions {array.shape}; expected (T, C, H, W). {hint}")
    dates, count, height, width = array.shape
    if dates == 0:
        raise ShapeError("cloudy holds no date (T = 0); give at least one.")
    if 0 in array.shape:
        raise ShapeError(f"cloudy is {array.shape}: it holds no pixel. Give (T, C, H, W) with every size at least 1.")
    positions = _band_positions(network, count, bands)
    seen = _valid(valid, array)
    _check_range(array, seen, "cloudy", part=part)

    full = np.full((dates, len(network.bands), height, width), 0.5, dtype=np.float32)
    full[:, list(positions)] = np.where(seen[:, None], array, 0.5)
    present = np.zeros(len(network.bands), dtype=bool)
    present[list(positions)] = True
    series = PreparedSeries(
        cloudy=torch.from_numpy(full)[None],
        valid=torch.from_numpy(seen)[None],
        cloud=torch.from_numpy(_cloud(cloud_mask, (dates, height, width)))[None],
        reference=torch.tensor([_reference(reference, dates)]),
        band_present=torch.from_numpy(present)[None],
        days=_days(days, dates),
        aux=_aux(aux, network, array.shape, seen),
        output=positions,
    )
    return series if scene_change is None else series.with_change(scene_change)


def _number_array(values: ArrayLike, name: str) -> NDArray[np.float32]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # NumPy's word for dates of different sizes
        raise ShapeError(f"{name} is not one array ({error}); expected one size for every date.") from error
    if array.dtype == object or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise ShapeError(f"{name} is of type {array.dtype}; expected one numeric array (same size for every date).")
    if np.issubdtype(array.dtype, np.complexfloating):
        raise ValueRangeError(f"{name} is complex ({array.dtype}); expected real reflectance.")
    return array.astype(np.float32, copy=False)


def _band_positions(network: MTCDNConfig | BaselineConfig, count: int, bands: Sequence[str] | None) -> tuple[int, ...]:
    wanted = network.bands
    if bands is None:
        if count != len(wanted):
            raise BandError(
                f"cloudy has {count} bands; this model works on {len(wanted)}: {', '.join(wanted)}. "
                "Select them by name, or pass bands=[...] with the names of yours."
            )
        return tuple(range(count))
    if len(bands) != count:
        raise BandError(f"bands names {len(bands)} ({', '.join(bands)}) but cloudy has {count}; give one name each.")
    unknown = [band for band in bands if band not in wanted]
    if unknown or len(set(bands)) != len(bands):
        raise BandError(
            f"bands are {', '.join(bands)}; this model knows {', '.join(wanted)}, each once. "
            f"Leave out {', '.join(unknown) or 'the duplicates'}."
        )
    if len(bands) < len(wanted) and not network.composite:
        missing = [band for band in wanted if band not in bands]
        raise BandError(f"bands {', '.join(missing)} are missing; this model needs all of {', '.join(wanted)}.")
    return tuple(wanted.index(band) for band in bands)


def _valid(valid: ArrayLike | None, array: NDArray[np.float32]) -> NDArray[np.bool_]:
    dates, _, height, width = array.shape
    if valid is None:
        seen = np.ones((dates, height, width), dtype=bool)
    else:
        seen = np.asarray(valid).astype(bool)
        if seen.shape != (dates, height, width):
            raise ShapeError(f"valid is {seen.shape}; expected (T, H, W) = {(dates, height, width)}.")
    if not seen.any():
        raise ValueRangeError("no date has a valid pixel; there is nothing to work with. Check nodata and valid.")
    bad = int((~np.isfinite(array) & seen[:, None]).sum())
    if bad:
        raise ValueRangeError(
            f"cloudy holds {bad} values that are NaN or infinite; expected numbers. If they mean 'no data', pass "
            "valid=np.isfinite(cloudy).all(axis=1)."
        )
    return seen


def _check_range(array: NDArray[np.float32], seen: NDArray[np.bool_], name: str, *, part: bool = False) -> None:
    values = array[np.broadcast_to(seen[:, None], array.shape)]
    low, high = float(values.min()), float(values.max())
    if high > HIGHEST:
        hint = (
            "They look like digital numbers: divide by 10000 (and subtract the offset) first."
            if high > 50
            else ("Check scale and nodata.")
        )
        raise ValueRangeError(f"{name} goes up to {high:g}; expected reflectance in [0, 1]. {hint}")
    if low < LOWEST:
        raise ValueRangeError(
            f"{name} goes down to {low:g}; expected reflectance in [0, 1]. Check scale and offset, and mark nodata "
            "with valid=."
        )
    if name == "cloudy" and low == high == 0.0 and not part:
        raise ValueRangeError("cloudy is 0 everywhere: that is nodata, not reflectance. Check the files and the bands.")


def _cloud(
    cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None, shape: tuple[int, int, int]
) -> NDArray[np.float32]:
    dates, height, width = shape
    out = np.full(shape, np.nan, dtype=np.float32)
    if cloud_mask is None:
        return out
    if not isinstance(cloud_mask, Sequence) and np.ndim(cloud_mask) == 0:
        raise ShapeError(f"cloud_mask is {cloud_mask!r}; expected (T, H, W) = {shape}, or a list (None = unknown).")
    if len(cloud_mask) != dates:  # type: ignore[arg-type]
        raise ShapeError(f"cloud_mask is for {len(cloud_mask)} dates; cloudy has {dates}.")  # type: ignore[arg-type]
    for date, mask in enumerate(cloud_mask):  # type: ignore[arg-type]
        if mask is None:
            continue
        values = np.asarray(mask)
        if values.shape != (height, width):
            raise ShapeError(f"cloud_mask of date {date} is {values.shape}; expected (H, W) = {(height, width)}.")
        if values.dtype != bool and not np.isin(np.unique(values), (0, 1)).all():
            raise ValueRangeError(
                f"cloud_mask of date {date} holds values other than 0 and 1; expected True = cloud or shadow. "
                "Turn classes or probabilities into a mask first."
            )
        out[date] = values
    return out


def _reference(reference: int | None, dates: int) -> int:
    if reference is None:
        return -1
    if isinstance(reference, bool) or not isinstance(reference, int | np.integer):
        raise ConfigError(f"reference is {reference!r}; expected the index of a date (0 to {dates - 1}) or None.")
    if not -dates <= reference < dates:
        raise ConfigError(f"reference is {reference}; there are {dates} dates, so it goes from 0 to {dates - 1}.")
    return int(reference) % dates


def _days(days: Sequence[float] | None, dates: int) -> Tensor | None:
    if days is None:
        return None
    try:
        values = np.asarray(days, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"days is {days!r}; expected one number per date, such as days since the first.") from error
    if values.shape != (dates,) or not np.isfinite(values).all():
        raise ShapeError(f"days is {list(np.ravel(values))}; expected one finite number for each of {dates} dates.")
    return torch.from_numpy(values - values.min())[None]


def _aux(
    aux: ArrayLike | None, network: MTCDNConfig | BaselineConfig, shape: tuple[int, ...], seen: NDArray[np.bool_]
) -> Tensor | None:
    if aux is None:
        return None
    if not network.aux_bands:
        raise BandError("aux was given, but this model takes no auxiliary bands. Leave aux out.")
    array = _number_array(aux, "aux")
    wanted = (shape[0], len(network.aux_bands), shape[2], shape[3])
    if array.shape != wanted:
        raise ShapeError(f"aux is {array.shape}; expected (T, A, H, W) = {wanted} for {', '.join(network.aux_bands)}.")
    if not np.isfinite(array[np.broadcast_to(seen[:, None], array.shape)]).all():
        raise ValueRangeError("aux holds NaN or infinite values; expected numbers scaled to [0, 1].")
    return torch.from_numpy(np.where(seen[:, None], array, 0.5).astype(np.float32))[None]
