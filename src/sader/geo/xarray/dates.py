"""The Zarr store of a series: the GeoTIFFs of its dates as one cube (time, band, y, x)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sader.errors import require
from sader.geo.read.raster import open_raster
from sader.geo.scene.cog import writing
from sader.geo.scene.run import SceneReport
from sader.geo.stack import GeoStack
from sader.geo.xarray.zarr import (
    TEXTS,
    VARIABLES,
    coding_attributes,
    new_store,
    publish_store,
    store_attributes,
    sync_store,
)
from sader.inference.values import REFLECTANCE, ValueCoding, decode_array

EDGE = 512
"""Edge of the chunks in pixels; rows of this number are copied at a time."""

Done = Sequence[tuple[int, SceneReport]]
"""(index of the date, report) of each result."""


def write_dates(target: Path, stack: GeoStack, done: Done, *, jobs: Sequence[str]) -> None:
    """Write the results of a series as one store, which gets its name when it is complete.

    Numbers are stored as in the files where all dates are coded alike, else as float32 reflectance. jobs: checksums by
    which `find_dates` recognises the store.
    """
    import zarr

    codings = {stack.sources[date].coding for date, _ in done}
    coding = codings.pop() if len(codings) == 1 else REFLECTANCE
    with writing(target):
        part = new_store(target)
        layers = _create(part, stack, done, coding)
        store: Any = zarr.open_group(str(part), mode="r+")
        for number, (date, scene) in enumerate(done):
            for layer in layers:
                own = stack.sources[date].coding if layer == "result" else None
                _copy(_file(scene, layer), store[VARIABLES[layer]], number, own, coding)
        store.attrs.update({"sader_jobs": list(jobs), "sader_dates": [(date, one.as_dict()) for date, one in done]})
        sync_store(part)
        publish_store(part, target)


def find_dates(target: Path, jobs: Sequence[str]) -> list[tuple[int, SceneReport]] | None:
    """Return (date, report) of the results in a complete store of the same jobs; None where there is none."""
    found = store_attributes(target) if target.exists() else {}
    if found.get("sader_jobs") != list(jobs):
        return None
    return [(int(date), SceneReport.from_dict(report)) for date, report in found["sader_dates"]]


def _file(scene: SceneReport, layer: str) -> str:
    return scene.output if layer == "result" else f"{scene.output.removesuffix('.tif')}_{layer}.tif"


def _copy(path: str, variable: Any, number: int, own: ValueCoding | None, coding: ValueCoding) -> None:
    """Copy a file into date `number` of a variable; own: coding of the file, decoded where it is not `coding`."""
    with open_raster(path) as dataset:
        for top in range(0, dataset.height, EDGE):
            end = min(top + EDGE, dataset.height)
            numbers = dataset.read(window=((top, end), (0, dataset.width)))
            if own is not None and own != coding:
                values, valid = decode_array(numbers, (own,) * len(numbers))
                numbers = np.where(valid, values, np.float32(np.nan))
            variable[number, ..., top:end, :] = numbers if variable.ndim == 4 else numbers[0]


def _create(part: Path, stack: GeoStack, done: Done, coding: ValueCoding) -> list[str]:
    """Create the variables and coordinates, without data; return the layers."""
    import dask.array as da
    import xarray

    first = done[0][1]
    layers = [layer for layer in VARIABLES if _file(first, layer) in first.files]
    types = {"result": coding.dtype, "uncertainty": "float32"}
    variables = {}
    for layer in layers:
        band = layer in types
        shape = (len(done), *((len(stack.bands),) if band else ()), *stack.grid.shape)
        dims = ["time", *(["band"] if band else []), "y", "x"]
        chunks = (1, *((-1,) if band else ()), EDGE, EDGE)
        empty = da.zeros(shape, dtype=types.get(layer, "uint8"), chunks=chunks)
        attrs = {"long_name": TEXTS[layer], "grid_mapping": "spatial_ref", **({"units": "1"} if band else {})}
        variables[VARIABLES[layer]] = xarray.Variable(dims, empty, attrs)
    variables["clear"].attrs.update(coding_attributes(coding))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Zarr (V3|format 3)")  # text as band names
        dataset = xarray.Dataset(variables, _coordinates(stack, done))
        dataset.to_zarr(part, mode="a", consolidated=False, compute=False)
    return layers


def _coordinates(stack: GeoStack, done: Done) -> dict[str, Any]:
    """Return time, band, y, x and the reference system; names instead of times where a date is unknown."""
    grid = stack.grid
    a, b, c, d, e, f = grid.transform
    sources = [stack.sources[date] for date, _ in done]
    times = [np.datetime64(one.date.replace(tzinfo=None), "ns") for one in sources if one.date is not None]
    place = {"GeoTransform": f"{c} {a} {b} {f} {d} {e}"}
    if grid.crs:
        crs = require("rasterio.crs", extra="geo", purpose="naming reference systems").CRS.from_user_input(grid.crs)
        place["crs_wkt"] = crs.to_wkt()
    found: dict[str, Any] = {
        "time": times if len(times) == len(done) else [one.name for one in sources],
        "band": list(stack.bands),
        "spatial_ref": ((), 0, place),
    }
    if not b and not d:
        found |= {"x": c + a * (np.arange(grid.width) + 0.5), "y": f + e * (np.arange(grid.height) + 0.5)}
    return found
