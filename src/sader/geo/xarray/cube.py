"""A (time, band, y, x) array of xarray: its bands, dates, coding and coordinates.

Arrays in memory and arrays backed by dask are opened alike; `sader.geo.xarray.lazy` clears both.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader._version import __version__
from sader.bands import canonical
from sader.errors import BandError, ShapeError, ValueRangeError, require
from sader.inference.scene import ArrayScene, SceneWindow
from sader.inference.values import (
    COUNTS_FROM,
    FILLED,
    NODATA,
    OBSERVED,
    RECONSTRUCTED,
    SENTINEL_SCALE,
    UNKNOWN,
    ValueCoding,
    coding_of,
    decode_array,
)

if TYPE_CHECKING:
    import xarray as xr

    from sader.inference.remover import CloudRemover

AXES: Mapping[str, tuple[str, ...]] = {
    "time": ("time", "t", "date"),
    "band": ("band", "bands", "channel", "variable"),
    "y": ("y", "lat", "latitude", "northing"),
    "x": ("x", "lon", "longitude", "easting"),
}
"""The four axes and the names under which they are known."""
MEANINGS = {
    "clear": "reflectance",
    "uncertainty": "expected standard deviation",
    "clear_count": f"dates that show the ground clearly, {UNKNOWN} where none has data",
    "provenance": f"{NODATA} no data, {OBSERVED} observed (reference date), {RECONSTRUCTED} reconstructed",
    "source_date": f"date that contributes most, from 1; {FILLED} none (filled), {NODATA} no data",
}
"""Layer of a result -> its meaning; the first two have bands, the others one plane."""
NODATA_ATTRS = ("_FillValue", "missing_value", "nodata")
CODING_ATTRS = ("scale_factor", "add_offset", *NODATA_ATTRS)
"""Attributes that speak of stored numbers (CF conventions; "nodata" is odc-stac's) and are not true of reflectance."""


@dataclass(frozen=True)
class Cube:
    """An array of dates with its metadata; `data` is not decoded and may be lazy."""

    data: Any
    """(T, C, H, W), a NumPy or dask array of stored numbers."""
    coding: ValueCoding
    bands: tuple[str, ...]
    """Canonical names; the band coordinate itself stays as it is."""
    names: tuple[str, ...]
    """The dates as text: the time coordinate, or numbers."""
    days: tuple[float, ...] | None
    """Days since the first date, if there is a time coordinate."""
    layout: xr.DataArray
    """The input (T, C, H, W): its coordinates and attributes are those of the result."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        dates, count, height, width = self.data.shape
        return dates, count, height, width

    @property
    def lazy(self) -> bool:
        """Whether the data is a dask array."""
        return not isinstance(self.data, np.ndarray)


def open_cube(array: xr.DataArray | xr.Dataset, remover: CloudRemover) -> Cube:
    """Return an array with its metadata, after checking that the remover can process it.

    array: four axes in any order, found by name; a Dataset with one variable per band (as odc-stac loads it) is
        stacked. Integers need CF attributes: reflectance = number * scale_factor + add_offset, _FillValue = nodata (0
        where none is named). Floats without attributes are reflectance, NaN = nodata.
    """
    xarray = require("xarray", extra="cluster", purpose="working on xarray arrays")
    if isinstance(array, xarray.Dataset):
        array = _stacked(array)
    if not isinstance(array, xarray.DataArray):
        raise ShapeError(
            f"array is a {type(array).__name__}; expected an xarray.DataArray (time, band, y, x). "
            "For a NumPy array call the remover itself."
        )
    array = _ordered(array)
    if 0 in array.shape:
        sizes = ", ".join(f"{name}: {size}" for name, size in array.sizes.items())
        raise ShapeError(f"array is empty ({sizes}); expected at least one date, band and pixel. Check the selection.")
    bands = _bands(array, remover)
    if not _has_crs(array):
        warnings.warn(
            "the array names no CRS, so the result has none. If you know it: array.rio.write_crs('EPSG:...').",
            stacklevel=3,
        )
    times, days = _times(array)
    names = tuple(str(time)[:19] for time in (range(array.shape[0]) if times is None else times))
    return Cube(array.data, _coding(array), bands, names, days, array)


def result_arrays(cube: Cube, layers: Mapping[str, Any]) -> dict[str, xr.DataArray]:
    """Return layers of a result, (C, H, W) or (H, W), as arrays at the place of the cube that state their meaning."""
    import xarray

    time, named, y, x = cube.layout.dims
    image = cube.layout.isel({time: 0}, drop=True)
    kept = {key: value for key, value in cube.layout.attrs.items() if key in ("grid_mapping", "crs")}
    found = {}
    for name, data in layers.items():
        band = data.ndim == 3
        attrs = {"units": "1"} if band else source_flags(cube.names) if name == "source_date" else {}
        found[name] = xarray.DataArray(
            data,
            dims=(named, y, x) if band else (y, x),
            coords=image.coords if band else image.isel({named: 0}, drop=True).coords,
            name=name,
            attrs={**kept, "long_name": MEANINGS[name], **attrs, "source": f"sader {__version__}"},
        )
        if "grid_mapping" in cube.layout.encoding:  # rioxarray finds the CRS by it
            found[name].encoding["grid_mapping"] = cube.layout.encoding["grid_mapping"]
    return found


def source_flags(names: Sequence[str]) -> dict[str, Any]:
    """Return the CF attributes of the layer of source dates; names: those of the dates."""
    codes = np.array([NODATA, *range(1, len(names) + 1), FILLED], np.uint8)
    meanings = ["no_data", *("_".join(name.split()) for name in names), "no_date"]
    return {"flag_values": codes, "flag_meanings": " ".join(meanings)}


def mask_data(cloud_mask: xr.DataArray | None, cube: Cube) -> Any:
    """Return the data (T, H, W) of a cloud mask, True = cloud or shadow, after checking that it fits; None for None."""
    if cloud_mask is None:
        return None
    time, _, y, x = cube.layout.dims
    wanted = {time: cube.shape[0], y: cube.shape[2], x: cube.shape[3]}
    if not hasattr(cloud_mask, "dims"):
        raise ShapeError(
            f"cloud_mask is a {type(cloud_mask).__name__}; expected an xarray.DataArray ({time}, {y}, {x})."
        )
    if dict(cloud_mask.sizes) != wanted:
        raise ShapeError(f"cloud_mask has {_sizes(cloud_mask.sizes)}; expected {_sizes(wanted)}, as the array has.")
    for axis in (time, y, x):
        if axis in cloud_mask.coords and axis in cube.layout.coords:
            theirs, ours = cloud_mask[axis].values, cube.layout[axis].values
            if not np.array_equal(theirs, ours):
                raise ShapeError(
                    f"cloud_mask has other {axis} coordinates than the array (first: {theirs[0]} and {ours[0]}). "
                    f"Put it on the same ones: cloud_mask.reindex_like(array)."
                )
    if cloud_mask.dtype.kind not in "biu":
        raise ValueRangeError(
            f"cloud_mask is of type {cloud_mask.dtype}; expected True = cloud or shadow. For probabilities use "
            "cloud_mask > 0.5."
        )
    return cloud_mask.transpose(time, y, x).data


def check_counts(numbers: NDArray[Any], coding: ValueCoding) -> None:
    """Refuse float numbers that cannot be reflectance."""
    if coding.is_integer:
        return
    nodata = np.nan if coding.nodata is None else coding.nodata
    there = np.isfinite(numbers) & (numbers != nodata)
    highest = float(numbers.max(where=there, initial=-np.inf)) * coding.scale + coding.offset
    if highest > COUNTS_FROM:
        raise ValueRangeError(
            f"array goes up to {highest:g}; expected reflectance in [0, 1]. These look like counts: set "
            "array.attrs['scale_factor'] = 1e-4 (and add_offset, _FillValue)."
        )


def cube_window(cube: Cube, numbers: NDArray[Any], masks: NDArray[Any] | None) -> SceneWindow:
    """Return stored numbers (T, C, h, w) of a cube and their masks (T, h, w) as a window of the scene loop."""
    check_counts(numbers, cube.coding)
    return SceneWindow(list(numbers), [None] * len(numbers) if masks is None else [one != 0 for one in masks])


def cube_scene(cube: Cube, numbers: NDArray[Any], masks: NDArray[Any] | None) -> ArrayScene:
    """Return stored numbers (T, C, h, w) of a cube and their masks (T, h, w) as a scene in memory."""
    window = cube_window(cube, np.asarray(numbers), masks)
    pairs = [decode_array(one, (cube.coding,) * len(cube.bands)) for one in window.numbers]
    cloudy, valid = np.stack([values for values, _ in pairs]), np.stack([there for _, there in pairs])
    return ArrayScene(cloudy, cube.bands, window.masks, valid, cube.days)


# ------------------------------------------------------------------------------------------------ reading an array


def _stacked(dataset: xr.Dataset) -> xr.DataArray:
    """Return the variables of a dataset as bands of one array; those without place and time are left out."""
    wanted = {name: value for name, value in dataset.data_vars.items() if value.ndim == 3}
    if not wanted:
        raise ShapeError(
            f"the dataset has no variable with the axes time, y, x (found: {', '.join(map(str, dataset.data_vars))}); "
            "expected one variable per band, or pass the DataArray: dataset['name']."
        )
    codings = {tuple(str(value.attrs.get(key)) for key in CODING_ATTRS) for value in wanted.values()}
    if len(codings) > 1:
        raise ValueRangeError(
            f"the variables {', '.join(map(str, wanted))} have different {', '.join(CODING_ATTRS)}; expected one "
            "coding. Select the reflectance bands, or decode them first (xarray.decode_cf)."
        )
    first = next(iter(wanted.values()))
    array = dataset[list(wanted)].to_dataarray(dim="band")
    array.attrs = dict(first.attrs)
    array.encoding = {key: value for key, value in first.encoding.items() if key == "grid_mapping"}
    return array


def _ordered(array: xr.DataArray) -> xr.DataArray:
    """Return the array with its axes in the order time, band, y, x, whatever they are called."""
    found: list[Hashable] = []
    for axis, names in AXES.items():
        match = [dim for dim in array.dims if str(dim).lower() in names]
        if len(match) != 1 or array.ndim != len(AXES):
            dims = ", ".join(map(str, array.dims))
            hint = {"time": "For one date use array.expand_dims('time').", "band": "For one band: expand_dims('band')."}
            missing = next((a for a, n in AXES.items() if not any(str(d).lower() in n for d in array.dims)), None)
            raise ShapeError(
                f"array has the axes ({dims}); expected (time, band, y, x) in any order. "
                + hint.get(missing or "", f"Rename them, for example array.rename({{...: '{missing or axis}'}}).")
            )
        found += match
    return array.transpose(*found)


def _bands(array: xr.DataArray, remover: CloudRemover) -> tuple[str, ...]:
    """Return the names in the band coordinate, which the model must know."""
    dim, wanted = array.dims[1], remover.bands
    if dim not in array.coords or array[dim].dtype.kind not in "UTOS":
        found = "no band coordinate" if dim not in array.coords else f"numbers as bands ({_some(array[dim].values)})"
        raise BandError(
            f"array has {found}; expected the names of its {array.shape[1]} bands, of {', '.join(wanted)}. "
            f"Name them: array.assign_coords({dim}=['{wanted[0]}', ...])."
        )
    given = [str(name) for name in array[dim].values]
    names = [name if name in wanted else canonical(name) or name for name in given]
    if len(set(names)) != len(names):
        raise BandError(
            f"array has bands {_some(given)}, which name a band twice; expected each once. "
            f"Select with array.isel({dim}=[...])."
        )
    known = [own for own, name in zip(given, names, strict=True) if name in wanted]
    if len(known) < len(names):
        hint = f"Select those: array.sel({dim}={known})." if known else f"Rename yours: assign_coords({dim}=[...])."
        raise BandError(f"array has bands {_some(given)}; this model knows {', '.join(wanted)}. {hint}")
    if len(known) < len(wanted) and remover.needs_all_bands:
        missing = ", ".join(name for name in wanted if name not in names)
        raise BandError(f"array has bands {', '.join(given)}; this model also needs {missing}. Load them too.")
    return tuple(names)


def _coding(array: xr.DataArray) -> ValueCoding:
    """Return how the numbers are stored, from the CF attributes; the rules are those of `sader.geo.values`."""
    attrs = array.attrs
    nodata = next((attrs[key] for key in NODATA_ATTRS if attrs.get(key) is not None), None)
    try:
        scale, offset, number = (
            _number(value) for value in (attrs.get("scale_factor"), attrs.get("add_offset"), nodata)
        )
    except (TypeError, ValueError, IndexError) as error:
        raise ValueRangeError(
            f"array has the attributes { ({key: attrs[key] for key in CODING_ATTRS if key in attrs}) }; expected one "
            "number each. Set them right, or decode the array first (xarray.decode_cf)."
        ) from error
    coding = coding_of("array", dtype=str(array.dtype), scale=scale, offset=offset, nodata=number)
    if array.dtype.kind in "iu" and "scale_factor" not in attrs:
        warnings.warn(
            f"array holds {array.dtype} without the attribute scale_factor: reflectance = number * {SENTINEL_SCALE:g}, "
            "0 = no data. From baseline 04.00 on set array.attrs.update(scale_factor=1e-4, add_offset=-0.1).",
            stacklevel=4,
        )
    return coding


def _number(value: Any) -> float | None:
    """Return an attribute as a number: some writers store arrays of one."""
    return None if value is None else float(np.asarray(value).reshape(-1)[0])


def _times(array: xr.DataArray) -> tuple[NDArray[Any] | None, tuple[float, ...] | None]:
    """Return the time coordinate and the days since its first, as far as they are known."""
    dim = array.dims[0]
    if dim not in array.coords:
        return None, None
    times = np.asarray(array[dim].values)
    if times.dtype.kind == "M" and not np.isnat(times).any():
        return times, tuple(float(day) for day in (times - times.min()) / np.timedelta64(1, "D"))
    if times.dtype.kind in "iuf" and np.isfinite(times).all():
        return times, tuple(float(day) for day in times - times.min())
    return times, None


def _has_crs(array: xr.DataArray) -> bool:
    """Whether the array names its reference system, in the way of rioxarray, of CF or as an attribute."""
    if array.attrs.get("crs"):
        return True
    named = array.encoding.get("grid_mapping") or array.attrs.get("grid_mapping") or "spatial_ref"
    return named in array.coords and any(
        array[named].attrs.get(key) for key in ("crs_wkt", "spatial_ref", "grid_mapping_name")
    )


def _some(names: Sequence[Any] | NDArray[Any]) -> str:
    """Return names for a message, not more than 16 of them."""
    shown = ", ".join(str(name) for name in names[:16])
    return shown if len(names) <= 16 else f"{shown}, ... ({len(names)} in all)"


def _sizes(sizes: Mapping[Any, int]) -> str:
    return ", ".join(f"{name}: {size}" for name, size in sizes.items())
