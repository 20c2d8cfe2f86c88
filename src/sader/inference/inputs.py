"""User inputs of `CloudRemover`: checked, and turned into a scene.

Nothing is repaired silently: a value that cannot be reflectance is an error and is not clipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sader.bands import canonical
from sader.config import NetworkConfig
from sader.errors import BandError, ConfigError, ShapeError, ValueRangeError
from sader.inference.scene import MISSING, ArrayScene
from sader.inference.values import HIGHEST, LOWEST

MOST_STEPS = 1000
"""Largest number of sampling steps; the paper uses 4 and 5."""
MOST_RESAMPLINGS = 63
"""Largest number of resamplings per step (`sader.method.resampling`)."""


def parse_steps(steps: int | str | None, default: tuple[int, int]) -> tuple[int, int]:
    """Return (steps, resamplings) from 4 or "4" (no resampling), "4+1", or None (the default)."""
    if steps is None:
        return default
    wanted = ConfigError(
        f"steps is {steps!r}; expected a number from 1 to {MOST_STEPS} such as 4, or '4+1' for resampling, with at "
        f"most {MOST_RESAMPLINGS} resamplings."
    )
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer | str):
        raise wanted
    count, plus, extra = (part.strip() for part in str(steps).partition("+"))
    if not (count.isascii() and count.isdecimal()) or (plus and not (extra.isascii() and extra.isdecimal())):
        raise wanted
    if len(count) > 9 or len(extra) > 9 or not 1 <= int(count) <= MOST_STEPS or int(extra or 0) > MOST_RESAMPLINGS:
        raise wanted
    return int(count), int(extra or 0)


def check_whole_number(name: str, value: object, *, least: int) -> int:
    """Return a whole number of at least `least`, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {least}.")
    return int(value)


def prepare_series(
    network: NetworkConfig,
    cloudy: ArrayLike,
    *,
    reference: int | None = None,
    cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None = None,
    days: Sequence[float] | None = None,
    aux: ArrayLike | None = None,
    valid: ArrayLike | None = None,
    bands: Sequence[str] | None = None,
    part: bool = False,
) -> ArrayScene:
    """Return the checked series; arguments as in `CloudRemover.predict`.

    part: the series is one tile of a scene, in which zero reflectance everywhere (deep water) is possible.
    """
    array, unmasked = _number_array(cloudy, "cloudy")
    if array.ndim != 4:
        hint = "For one date use cloudy[None]." if array.ndim == 3 else "Stack the dates first, then the bands."
        raise ShapeError(f"cloudy has {array.ndim} dimensions {array.shape}; expected (T, C, H, W). {hint}")
    dates, count, height, width = array.shape
    if dates == 0:
        raise ShapeError("cloudy holds no date (T = 0); give at least one.")
    if 0 in array.shape:
        raise ShapeError(f"cloudy is {array.shape}: it holds no pixel. Give (T, C, H, W) with every size at least 1.")
    names = _band_names(network, count, bands)
    seen = _valid(valid, array, unmasked)
    _check_range(array, seen, "cloudy", part=part)
    return ArrayScene(
        cloudy=np.where(seen[:, None], array, np.float32(MISSING)),
        bands=names,
        masks=_masks(cloud_mask, (dates, height, width)),
        valid=seen,
        days=_days(days, dates),
        aux=_aux(aux, network, array.shape, seen),
        reference=_reference(reference, dates),
    )


def _number_array(values: ArrayLike, name: str) -> tuple[NDArray[np.float32], NDArray[np.bool_] | None]:
    """Return (values as float32, False at masked values): the second is None without a mask."""
    if isinstance(values, Tensor):
        # NumPy has no bfloat16 and reads no tensor that requires a gradient.
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    unmasked: NDArray[np.bool_] | None = None
    if isinstance(values, np.ma.MaskedArray):
        unmasked = ~np.ma.getmaskarray(values)
        values = values.data
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # dates of different sizes, tensors of a foreign library
        raise ShapeError(f"{name} is not one array ({error}); expected one size for every date.") from error
    if array.dtype == bool:
        raise ValueRangeError(f"{name} is boolean; expected reflectance. Pass masks as cloud_mask= or valid=.")
    if array.dtype == object or not np.issubdtype(array.dtype, np.number):
        raise ShapeError(f"{name} is of type {array.dtype}; expected one numeric array (same size for every date).")
    if np.issubdtype(array.dtype, np.complexfloating):
        raise ValueRangeError(f"{name} is complex ({array.dtype}); expected real reflectance.")
    return array.astype(np.float32, copy=False), unmasked


def _band_names(network: NetworkConfig, count: int, bands: Sequence[str] | None) -> tuple[str, ...]:
    wanted = network.bands
    if bands is None:
        if count != len(wanted):
            raise BandError(
                f"cloudy has {count} bands; this model works on {len(wanted)}: {', '.join(wanted)}. "
                "Select them by name, or pass bands=[...] with the names of yours."
            )
        return wanted
    if len(bands) != count:
        raise BandError(f"bands names {len(bands)} ({', '.join(bands)}) but cloudy has {count}; give one name each.")
    bands = [band if band in wanted else canonical(band) or band for band in bands]
    unknown = [band for band in bands if band not in wanted]
    if unknown or len(set(bands)) != len(bands):
        raise BandError(
            f"bands are {', '.join(bands)}; this model has {', '.join(wanted)}, each once. "
            f"Leave out {', '.join(unknown) or 'the duplicates'}."
        )
    if len(bands) < len(wanted) and network.needs_all_bands:
        missing = [band for band in wanted if band not in bands]
        raise BandError(f"bands {', '.join(missing)} are missing; this model needs all of {', '.join(wanted)}.")
    return tuple(bands)


def _valid(
    valid: ArrayLike | None, array: NDArray[np.float32], unmasked: NDArray[np.bool_] | None
) -> NDArray[np.bool_]:
    dates, _, height, width = array.shape
    if valid is None:
        seen = np.ones((dates, height, width), dtype=bool)
    else:
        seen = np.asarray(valid).astype(bool)
        if seen.shape != (dates, height, width):
            raise ShapeError(f"valid is {seen.shape}; expected (T, H, W) = {(dates, height, width)}.")
    if unmasked is not None:
        seen = seen & unmasked.all(axis=1)
    if not seen.any():
        raise ValueRangeError("no date has a valid pixel. Check nodata and valid.")
    bad = int((~np.isfinite(array) & seen[:, None]).sum())
    if bad:
        raise ValueRangeError(
            f"cloudy holds {bad} values that are NaN or infinite; expected numbers. If they mean 'no data', pass "
            "valid=np.isfinite(cloudy).all(axis=1)."
        )
    return seen


def _check_range(array: NDArray[np.float32], seen: NDArray[np.bool_], name: str, *, part: bool = False) -> None:
    where = seen[:, None]
    low = float(array.min(where=where, initial=np.inf))
    high = float(array.max(where=where, initial=-np.inf))
    if high > HIGHEST:
        hint = (
            "They look like digital numbers: divide by 10000 (and subtract the offset) first."
            if high > 50
            else "Check scale and nodata."
        )
        raise ValueRangeError(f"{name} goes up to {high:g}; expected reflectance in [0, 1]. {hint}")
    if low < LOWEST:
        raise ValueRangeError(
            f"{name} goes down to {low:g}; expected reflectance in [0, 1]. Check scale and offset, and mark nodata "
            "with valid=."
        )
    if name == "cloudy" and low == high == 0.0 and not part:
        raise ValueRangeError("cloudy is 0 everywhere: that is nodata, not reflectance. Check the files and the bands.")


def _masks(
    cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None, shape: tuple[int, int, int]
) -> list[NDArray[np.bool_] | None]:
    dates, height, width = shape
    found: list[NDArray[np.bool_] | None] = [None] * dates
    if cloud_mask is None:
        return found
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
        found[date] = values > 0
    return found


def _reference(reference: int | None, dates: int) -> int | None:
    if reference is None:
        return None
    if isinstance(reference, bool) or not isinstance(reference, int | np.integer):
        raise ConfigError(f"reference is {reference!r}; expected the index of a date (0 to {dates - 1}) or None.")
    if not -dates <= reference < dates:
        raise ConfigError(f"reference is {reference}; there are {dates} dates, so it goes from 0 to {dates - 1}.")
    return int(reference) % dates


def _days(days: Sequence[float] | None, dates: int) -> tuple[float, ...] | None:
    if days is None:
        return None
    try:
        values = np.asarray(days, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"days is {days!r}; expected one number per date, such as days since the first.") from error
    if values.shape != (dates,) or not np.isfinite(values).all():
        raise ShapeError(f"days is {list(np.ravel(values))}; expected one finite number for each of {dates} dates.")
    return tuple((values - values.min()).tolist())


def _aux(
    aux: ArrayLike | None, network: NetworkConfig, shape: tuple[int, ...], seen: NDArray[np.bool_]
) -> NDArray[np.float32] | None:
    if aux is None:
        return None
    if not network.aux_bands:
        raise BandError("aux was given, but this model takes no auxiliary bands. Leave aux out.")
    array, unmasked = _number_array(aux, "aux")
    if array.ndim == 3:  # one for all dates
        array = np.broadcast_to(array, (shape[0], *array.shape))
        unmasked = None if unmasked is None else np.broadcast_to(unmasked, array.shape)
    wanted = (shape[0], len(network.aux_bands), shape[2], shape[3])
    if array.shape != wanted:
        raise ShapeError(
            f"aux is {array.shape}; expected (T, A, H, W) = {wanted} for {', '.join(network.aux_bands)}, "
            "or (A, H, W), one for all dates."
        )
    if unmasked is not None:
        seen = seen & unmasked.all(axis=1)
    if not np.isfinite(array[np.broadcast_to(seen[:, None], array.shape)]).all():
        raise ValueRangeError("aux holds NaN or infinite values; expected numbers scaled to [0, 1].")
    return np.where(seen[:, None], array, np.float32(MISSING))
