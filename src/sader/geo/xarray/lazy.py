"""The same job over a dask cluster: xarray in, xarray out, lazily, with the bits of one process.

Not from the paper. Every tile is one task, which gets its own slice of the dates; every chunk of the result is one task
that blends the tiles touching it, in the order of `plan_windows`, which is why the bits agree with
`CloudRemover.predict`. No task sees the whole scene. The model travels as one `Shipment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sader.errors import ConfigError, require
from sader.geo.scene.run import SceneOptions, retiled
from sader.geo.xarray.cluster import clear_stack_on_dask
from sader.geo.xarray.cube import Cube, find_reference, mask_data, open_cube, result_array
from sader.geo.xarray.shipment import Shipment
from sader.geo.xarray.tasks import (
    NODATA,
    OBSERVED,
    RECONSTRUCTED,
    Guidance,
    Job,
    common,
    finish_region,
    hand_over,
    look,
    tile_of_array,
)
from sader.inference.scene_match import SceneMatch, decimation
from sader.inference.tiling import Window, plan_windows

if TYPE_CHECKING:
    import xarray as xr

    from sader.inference.remover import CloudRemover

__all__ = ["clear", "clear_dataset", "clear_stack_on_dask"]

PROVENANCE_TEXT = f"{NODATA} no data, {OBSERVED} observed (reference date), {RECONSTRUCTED} reconstructed"


def clear(
    array: xr.DataArray | xr.Dataset,
    remover: CloudRemover,
    *,
    reference: int | str | np.datetime64 | None = "auto",
    cloud_mask: xr.DataArray | None = None,
    tile: int | None = None,
    overlap: int | None = None,
    seed: int = 0,
    samples: int = 1,
    steps: int | str | None = None,
    chunks: int | None = None,
    scene_match: bool | SceneMatch = True,
) -> xr.DataArray:
    """Return the clear image (band, y, x) as a lazy, chunked array; nothing is computed until it is asked for.

    array: (time, band, y, x) in any order and any chunking, dask or NumPy; `xarrays.open_cube` says what it may hold.
    remover: its weights go to each worker once. CPU removers run tiles side by side on the threads of a worker, each
        with its own working memory; GPU removers one at a time.
    reference: the date to clean: "auto" (the clearest, found from a decimated look when the result is computed), an
        index, a date such as "2022-05-13", or None for a new image.
    cloud_mask: (time, y, x), True = cloud or shadow; None: the model estimates it.
    tile, overlap: None = the remover's own. chunks: edge of the result's chunks; None = tile - overlap.
    seed, samples, steps: as in `CloudRemover.predict`.
    scene_match: bring all dates into one light by a look at the whole scene, as `CloudRemover.predict` does, so that
        even a corner of the result needs that look. False: each tile by itself, and a corner reads a corner only. A
        `SceneMatch` made before is used as it is.

    >>> import sader.geo.xarray.lazy                                                       # doctest: +SKIP
    >>> lazy = sader.geo.xarray.lazy.clear(xarray.open_zarr("cube.zarr").reflectance, remover)   # doctest: +SKIP
    >>> lazy.to_zarr("clear.zarr")                                                     # doctest: +SKIP
    """
    made = clear_dataset(
        array,
        remover,
        reference=reference,
        cloud_mask=cloud_mask,
        tile=tile,
        overlap=overlap,
        seed=seed,
        samples=samples,
        steps=steps,
        chunks=chunks,
        scene_match=scene_match,
        extras=False,
    )
    return made["clear"]


def clear_dataset(
    array: xr.DataArray | xr.Dataset,
    remover: CloudRemover,
    *,
    reference: int | str | np.datetime64 | None = "auto",
    cloud_mask: xr.DataArray | None = None,
    tile: int | None = None,
    overlap: int | None = None,
    seed: int = 0,
    samples: int = 1,
    steps: int | str | None = None,
    chunks: int | None = None,
    scene_match: bool | SceneMatch = True,
    extras: bool = True,
) -> xr.Dataset:
    """Return the lazy clear image with what is known about it; arguments as in `clear`.

    extras: False leaves only `clear`; tiles are then smaller while they wait for their neighbours.
    clear: (band, y, x) reflectance, NaN where no date has data.
    uncertainty: (band, y, x) standard deviation to be expected, 0 where the pixel was observed; where there are several
        samples or the network states its own error.
    clear_count: (y, x) dates that saw the ground.
    provenance: (y, x) where the value comes from, in the codes of `sader.geo.scene.run`.
    """
    import xarray

    require("dask.array", extra="cluster", purpose="lazy arrays")
    remover = retiled(remover, SceneOptions(tile=tile, overlap=overlap))
    cube = open_cube(array, remover)
    _, count, height, width = cube.shape
    windows = plan_windows(height, width, tile=remover.tile_size, overlap=remover.options.overlap)
    remover.check_numbers(steps, samples, seed)
    spread = extras and (samples > 1 or remover.states_error)
    job = Job(height, width, remover.options.overlap, cube.bands, cube.days, steps, seed, samples, spread, extras)
    date = find_reference(reference, cube)
    mask = mask_data(cloud_mask, cube)
    if date is not None and mask is None and not remover.matches_dates:
        if date != "auto":
            raise ConfigError(
                f"reference={reference!r} keeps that date's clear pixels, but its cloud mask is unknown and this "
                "model has no cloud head. Give cloud_mask, or use reference=None."
            )
        date = None  # the paper's networks make a new image
    edge = chunks
    if edge is None:  # a scene of one tile is one chunk
        edge = max(height, width) if len(windows) == 1 else remover.tile_size - job.overlap
    if edge < 1:
        raise ConfigError(f"chunks is {chunks}; expected the edge of a chunk in pixels, at least 1.")
    if len(windows) == 1 or cube.shape[0] == 1 or not remover.matches_dates:
        scene_match = False
    regions = _graph(cube, job, Shipment(remover), windows, date, mask, edge, scene_match)
    floats, whole = (count, height, width), (height, width)
    variables = {
        "clear": result_array(
            cube, _joined(regions, "clear", floats, np.float32), name="clear", long_name="reflectance", units="1"
        )
    }
    if spread:
        variables["uncertainty"] = result_array(
            cube, _joined(regions, "uncertainty", floats, np.float32), name="uncertainty",
            long_name="standard deviation to be expected", units="1",
        )  # fmt: skip
    planes = (("clear_count", "dates that saw the ground"), ("provenance", PROVENANCE_TEXT))
    for name, text in planes if extras else ():
        plane = _joined(regions, name, whole, np.uint8)
        variables[name] = result_array(cube, plane, name=name, band=False, long_name=text)
    return xarray.Dataset(variables)


# ------------------------------------------------------------------------------------------------ the graph


def _graph(
    cube: Cube,
    job: Job,
    shipment: Shipment,
    windows: Sequence[Window],
    date: int | str | None,
    mask: Any,
    edge: int,
    match: bool | SceneMatch,
) -> list[list[tuple[Window, Any]]]:
    """Return the chunks of the result, row by row: (window, delayed mapping of name -> array)."""
    import dask
    import dask.array as da
    from dask.base import tokenize

    data = cube.data if cube.lazy else da.from_array(cube.data, chunks=(-1, -1, edge, edge))
    masks = mask if mask is None or not isinstance(mask, np.ndarray) else da.from_array(mask, chunks=(-1, edge, edge))
    token = tokenize(
        data.name, None if masks is None else masks.name, shipment, job, cube.coding, date, windows, edge, match
    )
    model = dask.delayed(hand_over)(shipment, dask_key_name=f"sader-model-{shipment.checksum[:32]}")
    guidance: Any = Guidance(None if isinstance(date, str) else date, match if isinstance(match, SceneMatch) else None)
    if date == "auto" or match is True:
        guidance = dask.delayed(look)(
            model, job, cube.coding, date, match is True, *_decimated(data, masks, job),
            dask_key_name=f"sader-look-{token}",
        )  # fmt: skip
    tile = dask.delayed(tile_of_array, pure=False)
    tiles = [
        tile(
            model,
            job,
            window,
            guidance,
            cube.coding,
            _piece(data[..., *window.slices]),
            None if masks is None else _piece(masks[..., *window.slices]),
            dask_key_name=f"sader-tile-{token}-{window.row:06d}-{window.col:06d}",
        )
        for window in windows
    ]
    region = dask.delayed(finish_region, pure=False)
    rows = []
    for top in range(0, job.height, edge):
        row = []
        for left in range(0, job.width, edge):
            place = Window(top, left, min(edge, job.height - top), min(edge, job.width - left))
            near = [index for index, window in enumerate(windows) if common(place, window) is not None]
            made = region(
                model,
                job,
                place,
                guidance,
                [windows[index] for index in near],
                [tiles[index] for index in near],
                dask_key_name=f"sader-region-{token}-{top:06d}-{left:06d}",
            )
            row.append((place, made))
        rows.append(row)
    return rows


def _piece(data: Any) -> Any:
    """Return a slice of a dask array as one delayed NumPy array; the tasks that read the array keep their names, so
    tiles share them.

    The parts are copied: a slice of a NumPy array is a view, and keeps its whole chunk in memory.
    """
    parts = data.map_blocks(np.array, dtype=data.dtype, meta=data._meta)
    return parts.rechunk(data.shape).to_delayed(optimize_graph=False).item()


def _decimated(data: Any, masks: Any, job: Job) -> tuple[Any, Any]:
    """Return the data and masks at every n-th pixel, delayed.

    The dates are read a second time for it, under other names: were the tiles to wait for this look with the chunks
    they share, the whole scene would wait in memory.
    """
    from dask.graph_manipulation import clone

    every = decimation(job.height, job.width)
    return _piece(clone(data)[..., *every]), None if masks is None else _piece(clone(masks)[..., *every])


def _joined(regions: list[list[tuple[Window, Any]]], name: str, shape: tuple[int, ...], dtype: type) -> Any:
    """Return one variable of all chunks as a dask array."""
    import dask.array as da

    return da.block(
        [
            [
                da.from_delayed(
                    made[name], (*shape[:-2], place.height, place.width), dtype=dtype, name=f"{made.key}-{name}"
                )
                for place, made in row
            ]
            for row in regions
        ]
    )
