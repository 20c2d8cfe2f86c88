"""xarray in, xarray out, lazily, over dask: every tile and every chunk of the result is one task.

A chunk blends the tiles that touch it in the order of `plan_windows`, so that the bits are those of
`CloudRemover.predict`. No task holds the whole scene. The model is one task that every tile depends on, so that dask
sends it to a worker once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import ConfigError, require
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.run import scene_remover
from sader.geo.xarray.cluster import same
from sader.geo.xarray.cube import Cube, cube_scene, cube_window, mask_data, open_cube, result_arrays
from sader.inference.scene import FinishedRows, Pending, RawTile, ScenePlan, as_arrays, predict_windows
from sader.inference.scene_match import SceneMatch, decimation, find_reference, intra_op_threads
from sader.inference.tiling import Window, common
from sader.inference.values import HIGHEST, LOWEST, MOST_SOURCES, as_tensor

if TYPE_CHECKING:
    import xarray as xr

    from sader.inference.remover import CloudRemover, Removal, RemoverOptions

PLANES = ("clear_count", "provenance", "source_date")
Reference = int | str | np.datetime64 | None


def remove_xarray(
    remover: CloudRemover,
    array: xr.DataArray | xr.Dataset,
    *,
    reference: int | str | np.datetime64 | None = "auto",
    cloud_mask: xr.DataArray | None = None,
    layers: bool = False,
    **options: Any,
) -> xr.DataArray | xr.Dataset:
    """Return the clear image (band, y, x) of an array (time, band, y, x), with its coordinates and CRS.

    With reference="each" every date is cleaned in turn: the result is (time, band, y, x). With layers=True it is a
    Dataset of `clear`, `uncertainty`, `clear_count`, `provenance` and `source_date` (see `clear_dataset`).

    An array in memory is computed at once, one backed by dask lazily (on a cluster with a `dask.distributed` client).
    Axes and bands are found by name; integers are decoded by their CF attributes (scale_factor, add_offset,
    _FillValue), floats are reflectance with NaN = nodata.

    reference: "auto" (the clearest date), an index, a date such as "2022-05-13", or None for a new image.
    cloud_mask: (time, y, x), True = cloud or shadow; None: the model estimates it.
    options: tile, overlap, min_count, max_uncertainty, haze, seed, samples, steps and others of `SceneOptions`; for
        lazy arrays also chunks and scene_match (see `clear_dataset`).

    >>> cube = xarray.open_dataarray("cube.nc", chunks={})                                      # doctest: +SKIP
    >>> remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn")                           # doctest: +SKIP
    >>> sader.remove_xarray(remover, cube, reference="2022-05-13").to_zarr("clear.zarr")        # doctest: +SKIP
    """
    cube = open_cube(array, remover)
    if not isinstance(reference, str) or reference.lower() != "each":
        return _clear(remover, cube, reference, cloud_mask, layers, options)
    import xarray

    # Lazy arrays share the tasks that read them.
    dates: list[Any] = [_clear(remover, cube, date, cloud_mask, layers, options) for date in range(cube.shape[0])]
    time = cube.layout.dims[0]
    joined: xr.DataArray | xr.Dataset
    joined = xarray.concat(dates, dim=cube.layout[time] if time in cube.layout.coords else time)
    return joined


def _clear(
    remover: CloudRemover,
    cube: Cube,
    reference: Reference,
    cloud_mask: xr.DataArray | None,
    layers: bool,
    options: dict[str, Any],
) -> xr.DataArray | xr.Dataset:
    """Return the result of one reference date; arguments as in `remove_xarray`."""
    import xarray

    if cube.lazy:
        found = clear_dataset(cube, remover, reference=reference, cloud_mask=cloud_mask, extras=layers, **options)
        return found if layers else found["clear"]
    own = set(SceneOptions.__dataclass_fields__) - {"seed", "samples", "steps"}
    remover = scene_remover(remover, SceneOptions(**{key: value for key, value in options.items() if key in own}))
    mask = mask_data(cloud_mask, cube)
    masks = None if mask is None else np.asarray(mask)
    scene = cube_scene(cube, cube.data, masks)
    date = reference
    if isinstance(reference, str) and reference.lower() == "auto":
        date = int(scene.overview(remover).clear_share.argmax()) if remover.matches_dates or masks is not None else None
    made = remover.predict(
        scene.cloudy.clip(LOWEST, HIGHEST),
        reference=find_reference(date, cube.names),
        cloud_mask=list(scene.masks),
        days=cube.days,
        valid=scene.valid,
        bands=cube.bands,
        **{key: value for key, value in options.items() if key not in own},
    )
    if not layers:
        return result_arrays(cube, {"clear": made.clear})["clear"]
    return xarray.Dataset(result_arrays(cube, _layers(made, scene.valid, remover.options.cloud_threshold)))


def _layers(made: Removal, valid: NDArray[np.bool_], threshold: float) -> dict[str, NDArray[Any]]:
    """Return a result in memory as the layers of `clear_dataset`."""
    clear, kept, there = as_tensor(made.clear), as_tensor(made.kept), as_tensor(valid)
    cloud, spread, source = (None if x is None else as_tensor(x) for x in (made.cloud, made.spread, made.source_date))
    shown, none = clear.isfinite().all(dim=0), clear[:0]
    part = FinishedRows(clear, shown, kept, there, none if cloud is None else cloud, spread, None, source)
    return part.variables(threshold)


def clear_dataset(
    array: xr.DataArray | xr.Dataset | Cube,
    remover: CloudRemover,
    *,
    reference: Reference = "auto",
    cloud_mask: xr.DataArray | None = None,
    chunks: int | None = None,
    scene_match: bool = True,
    extras: bool = True,
    **options: Any,
) -> xr.Dataset:
    """Return the lazy clear image and its layers; nothing is computed until it is needed. See also `remove_xarray`.

    array: (time, band, y, x) in any order and any chunking, dask or NumPy, opened (`cube.open_cube`) or not.
    remover: its weights go to each worker once. On a CPU tiles run in parallel on the threads of a worker; on a GPU one
        after the other.
    reference: with "auto" the clearest date is found on the overview when the result is computed.
    chunks: edge of the chunks of the result; None = tile - overlap.
    scene_match: match the dates of the whole scene, as `CloudRemover.predict` does; even a corner of the result then
        needs the overview. False: each tile by itself.
    extras: False leaves only `clear`; tiles are then smaller while they wait for their neighbours.

    clear: (band, y, x) reflectance, NaN where no date has data, or min_count or max_uncertainty withholds it.
    uncertainty: (band, y, x) expected standard deviation, 0 where the pixel was observed; for several samples, or a
        network that states its error.
    clear_count: (y, x) dates that show the ground clearly, 255 where none has data.
    provenance: (y, x) `NODATA`, `OBSERVED`, `RECONSTRUCTED`.
    source_date: (y, x) the date that contributes most, from 1; 255 none (filled from the surroundings), 0 no data.
    """
    import xarray

    require("dask.array", extra="cluster", purpose="lazy arrays")
    asked = SceneOptions(**options)
    remover = scene_remover(remover, asked)
    cube = array if isinstance(array, Cube) else open_cube(array, remover)
    remover.check_numbers(asked.steps, 1 if asked.samples is None else asked.samples, asked.seed)
    plan = cube_plan(cube, remover, asked, extras=extras)
    mask = mask_data(cloud_mask, cube)
    if len(plan.windows) == 1 or cube.shape[0] == 1 or not remover.matches_dates:
        scene_match = False
    if str(reference).lower() != "auto":
        date = find_reference(reference, cube.names)
        plan = _referred(plan, date, None)
    regions = _graph(cube, plan, remover, mask, _edge(chunks, plan), reference, scene_match)
    layers = {"clear": _joined(regions, "clear", plan, np.float32)}
    if plan.spread:
        layers["uncertainty"] = _joined(regions, "uncertainty", plan, np.float32)
    for name in PLANES if extras else ():
        if name != "source_date" or plan.sources:
            layers[name] = _joined(regions, name, plan, np.uint8)
    return xarray.Dataset(result_arrays(cube, layers))


def cube_plan(cube: Cube, remover: CloudRemover, options: SceneOptions, *, extras: bool) -> ScenePlan:
    """Return the plan of a cube before its overview is known."""
    samples = options.samples or 1
    dates, _, height, width = cube.shape
    return ScenePlan.of(
        remover,
        (height, width),
        cube.bands,
        ((cube.coding,) * len(cube.bands),) * dates,
        cube.days,
        steps=options.steps,
        seed=options.seed,
        samples=samples,
        clouds=tuple(range(dates)) if extras or remover.options.min_count else (),
        spread=(extras or remover.options.max_uncertainty is not None) and (samples > 1 or remover.states_error),
        sources=extras and remover.states_source and dates <= MOST_SOURCES,
    )


def _referred(plan: ScenePlan, reference: int | None, match: SceneMatch | None) -> ScenePlan:
    clouds = plan.clouds if plan.clouds or reference is None else (reference,)
    return replace(plan, reference=reference, match=match, clouds=clouds)


def _edge(chunks: int | None, plan: ScenePlan) -> int:
    """Return the edge of the chunks of the result; a scene of one tile is one chunk."""
    if chunks is None:
        return max(plan.shape) if len(plan.windows) == 1 else plan.tile - plan.overlap
    if chunks < 1:
        raise ConfigError(f"chunks is {chunks}; expected the edge of a chunk in pixels, at least 1.")
    return chunks


# ------------------------------------------------------------------------------------------------ tasks


def find_plan(
    remover: CloudRemover,
    cube: Cube,
    plan: ScenePlan,
    reference: Reference,
    match: bool,
    numbers: NDArray[Any],
    masks: NDArray[Any] | None,
) -> ScenePlan:
    """Return the plan with the reference date and the match found on the decimated dates."""
    with remover.turn:
        overview = cube_scene(cube, numbers, masks).as_overview(remover)
        date = find_reference(reference, cube.names, overview)
        return _referred(plan, date, overview.match(remover, date, plan.shape) if match else None)


def compute_tile(
    remover: CloudRemover,
    cube: Cube,
    plan: ScenePlan,
    window: Window,
    numbers: NDArray[Any],
    masks: NDArray[Any] | None,
) -> tuple[Any, ...] | None:
    """Return one raw tile as arrays, from its stored numbers (T, C, h, w) and masks (T, h, w); None without data."""
    read = cube_window(cube, numbers, masks)
    with intra_op_threads(1):
        (tile,) = predict_windows(plan, remover, lambda windows: [read], [window])
    return None if tile is None else as_arrays(tile)


def finish_chunk(
    plan: ScenePlan,
    options: RemoverOptions,
    area: Window,
    windows: Sequence[Window],
    tiles: Sequence[tuple[Any, ...] | None],
) -> dict[str, NDArray[Any]]:
    """Return the finished variables of one chunk from the tiles that touch it, in the order of `plan_windows`."""
    pending = Pending(plan, area, "cpu")
    for window, tile in zip(windows, tiles, strict=True):
        if tile is not None:
            pending.add(window, RawTile.of(tile))
    return pending.finished(area.height, options).variables(options.cloud_threshold)


# ------------------------------------------------------------------------------------------------ the graph

Regions = list[list[tuple[Window, Any]]]
"""Chunks of the result, row by row: (window, delayed mapping of variable -> array)."""


def _graph(
    cube: Cube, plan: ScenePlan, remover: CloudRemover, mask: Any, edge: int, reference: Reference, match: bool
) -> Regions:
    import dask
    import dask.array as da
    from dask.base import tokenize

    data = cube.data if cube.lazy else da.from_array(cube.data, chunks=(-1, -1, edge, edge))
    masks = mask if mask is None or not isinstance(mask, np.ndarray) else da.from_array(mask, chunks=(-1, edge, edge))
    bare = replace(cube, data=None, layout=None)  # type: ignore[arg-type]  # tasks need the metadata alone
    token = tokenize(data.name, None if masks is None else masks.name, remover, plan, cube.coding, edge, match)
    model = dask.delayed(same)(remover, dask_key_name=f"sader-model-{remover.checksum[:32]}")
    settled: Any = plan
    if str(reference).lower() == "auto" or match:
        small = _decimated(data, masks, plan)
        settled = dask.delayed(find_plan)(
            model, bare, plan, reference, match, *small, dask_key_name=f"sader-overview-{token}"
        )
    tile = dask.delayed(compute_tile, pure=False)
    tiles = [
        tile(
            model,
            bare,
            settled,
            window,
            _piece(data[..., *window.slices]),
            None if masks is None else _piece(masks[..., *window.slices]),
            dask_key_name=f"sader-tile-{token}-{window.row:06d}-{window.col:06d}",
        )
        for window in plan.windows
    ]
    chunk = dask.delayed(finish_chunk, pure=False)
    rows = []
    height, width = plan.shape
    for top in range(0, height, edge):
        row = []
        for left in range(0, width, edge):
            area = Window(top, left, min(edge, height - top), min(edge, width - left))
            near = [index for index, window in enumerate(plan.windows) if common(area, window) is not None]
            windows, parts = [plan.windows[index] for index in near], [tiles[index] for index in near]
            key = f"sader-chunk-{token}-{top:06d}-{left:06d}"
            row.append((area, chunk(settled, remover.options, area, windows, parts, dask_key_name=key)))
        rows.append(row)
    return rows


def _piece(data: Any) -> Any:
    """Return a slice of a dask array as one delayed NumPy array.

    The tasks that read the array keep their names, so that tiles share them. The parts are copied: a slice of a NumPy
    array is a view, and keeps its whole chunk in memory.
    """
    parts = data.map_blocks(np.array, dtype=data.dtype, meta=data._meta)
    return parts.rechunk(data.shape).to_delayed(optimize_graph=False).item()


def _decimated(data: Any, masks: Any, plan: ScenePlan) -> tuple[Any, Any]:
    """Return the data and masks of the overview, delayed.

    The dates are read a second time for it, under other names: if the tiles shared its chunks, the whole scene would
    wait in memory for the overview.
    """
    from dask.graph_manipulation import clone

    every = decimation(*plan.shape)
    return _piece(clone(data)[..., *every]), None if masks is None else _piece(clone(masks)[..., *every])


def _joined(regions: Regions, name: str, plan: ScenePlan, dtype: type) -> Any:
    """Return one variable of all chunks as a dask array; those of floats have bands."""
    import dask.array as da

    bands = (len(plan.bands),) if dtype is np.float32 else ()
    return da.block(
        [
            [
                da.from_delayed(made[name], (*bands, area.height, area.width), dtype=dtype, name=f"{made.key}-{name}")
                for area, made in row
            ]
            for row in regions
        ]
    )
