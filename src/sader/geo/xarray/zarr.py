"""Zarr in, Zarr out: the scene loop with a Zarr store as source and output.

The result is stored like the input (type, scale, offset, nodata). Finished rows are kept in the work folder
(`sader.geo.scene.resume`), so that a killed run continues. The store is written from them and gets its name when it is
complete. `write_dates` copies the GeoTIFFs of a series into one store (time, band, y, x).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import ClusterError, DataError, OutputError, SaderError, ValueRangeError, require
from sader.files import files_under, sync_folder
from sader.geo.grid import Grid, crs_of
from sader.geo.read.raster import open_raster
from sader.geo.scene.cog import IDENTITY, RowFile, layers_of, writing
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.resume import CHUNKS, REPLACED, STORE, RowFiles, WorkFolder, job_digest, sampled_hash
from sader.geo.scene.run import MakeExecutor, SceneReport, checked, job_facts, missing_rows, resumable, scene_report
from sader.geo.stack import GeoStack
from sader.geo.xarray.cube import (
    MEANINGS,
    Cube,
    cube_scene,
    cube_window,
    mask_data,
    open_cube,
    result_arrays,
    source_flags,
)
from sader.geo.xarray.lazy import cube_plan
from sader.inference.scene import ScenePlan, SceneWindow
from sader.inference.scene_match import Overview, decimation, find_reference
from sader.inference.tiling import Notes, Notice, Progress, Window
from sader.inference.values import REFLECTANCE, ValueCoding, decode_array, fill_value

if TYPE_CHECKING:
    import xarray as xr

    from sader.inference.remover import CloudRemover


@dataclass(frozen=True)
class CubeScene:
    """A lazy cube as the source of the scene loop."""

    cube: Cube
    masks: Any
    """(T, H, W), lazy; None where the model estimates the clouds."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.cube.shape[2:]

    def read(self, window: Window) -> SceneWindow:
        """Return all dates of a window as they are stored."""
        return cube_window(self.cube, *self.part(window.slices))

    def part(self, place: tuple[slice, slice]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return stored numbers (T, C, h, w) and masks (T, h, w)."""
        import dask

        masks = None if self.masks is None else self.masks[..., *place]
        numbers, given = dask.compute(self.cube.data[..., *place], masks, scheduler="synchronous")
        return np.asarray(numbers), None if given is None else np.asarray(given)


def clear_zarr(
    path: str | Path,
    out: str | Path,
    remover: CloudRemover,
    options: SceneOptions | None = None,
    *,
    variable: str | None = None,
    mask: str | None = None,
    executor: MakeExecutor | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> SceneReport:
    """Write the clear image of the dates in a Zarr store as another Zarr store and return the report.

    options: as for files; uncertainty, count, provenance and source_date become variables (`clear_count` the count).
    variable: name of the (time, band, y, x) variable; None = the only one, or all (time, y, x) ones as bands.
    mask: name of a (time, y, x) variable, True = cloud or shadow.
    executor: computes the tiles (`cluster.cluster_executor`); None = threads of this process.
    progress: called with (tiles done, tiles in all); notice: called with messages for the user.
    """
    started, notify = time.perf_counter(), Notes(notice or (lambda text: warnings.warn(text, stacklevel=4)))
    options = options or SceneOptions()
    target = check_zarr_output(out, overwrite=options.overwrite)
    remover, options = checked(remover, options)
    array, masks = read_zarr(path, variable=variable, mask=mask)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cube = open_cube(array, remover)
    for one in caught:
        notify(str(one.message))
    source = CubeScene(cube, mask_data(masks, cube))
    layers = layers_of(cube.bands, cube.coding, replace(options, save_masks=False))
    job = job_facts(remover, options, layers)
    job |= {"inputs": describe_store(path), "variable": variable, "mask": mask, "bands": cube.bands, "days": cube.days}
    _check_target(target, job_digest(job), overwrite=options.overwrite)
    with WorkFolder(target, job) as work:
        done = _check_target(target, work.digest, overwrite=options.overwrite)
        if done is not None:
            notify(f"{target} exists already, from the same command and inputs.")
            work.remove()
            return replace(done, notices=notify.texts)
        if work.note:
            notify(work.note)
        try:
            plan, overview = _planned(source, remover, options, path)
            grid = Grid("", IDENTITY, plan.shape[1], plan.shape[0])
            own = () if plan.reference is None else plan.codings[plan.reference]
            rows = RowFiles(work, layers, grid, plan, remover.options.cloud_threshold, own, overviews=False)
            with missing_rows(rows, source, remover, options, executor) as compute:
                compute(progress=progress)
        except SaderError as error:
            if work.fresh or not isinstance(error, OutputError | ClusterError):
                work.remove()
            raise
        report = scene_report(work, plan, overview, remover, options, names=cube.names)
        _write_store(rows, cube, report, target)
        work.remove()
    return replace(report, seconds=time.perf_counter() - started, notices=notify.texts)


def _planned(
    source: CubeScene, remover: CloudRemover, options: SceneOptions, path: str | Path
) -> tuple[ScenePlan, Overview]:
    """Return the plan and the overview."""
    cube = source.cube
    overview = cube_scene(cube, *source.part(decimation(*source.shape))).as_overview(remover)
    if not overview.valid.any() and not _any_valid(source):
        raise ValueRangeError(f"no date of {path} has a valid pixel. Check its nodata value (_FillValue).")
    date = find_reference(options.reference, cube.names, overview)
    plan = cube_plan(cube, remover, replace(options, samples=options.sample_count), extras=True)
    match = overview.match(remover, date, plan.shape)
    every = options.count or remover.options.min_count
    clouds = plan.clouds if every else () if date is None else (date,)
    spread = plan.spread and (options.uncertainty or remover.options.max_uncertainty is not None)
    plan = replace(plan, reference=date, match=match, clouds=clouds, spread=spread, sources=options.source_date)
    return plan, overview


def _any_valid(source: CubeScene) -> bool:
    """Whether any pixel has data, for scenes of which the overview has none."""
    height, width = source.shape
    strips = (source.part((slice(top, top + 256), slice(0, width)))[0] for top in range(0, height, 256))
    return any(bool(cube_scene(source.cube, numbers, None).valid.any()) for numbers in strips)


def describe_store(path: str | Path) -> dict[str, Any]:
    """Return what identifies a store: its path, and names, sizes, times and sampled content of its files."""
    if "://" in str(path):
        return {"path": str(path)}
    folder = Path(path)
    files = sorted(file for file in files_under(folder) if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        found = file.stat()
        digest.update(f"{file.relative_to(folder)} {found.st_size} {found.st_mtime_ns}\n".encode())
    for file in files[:: max(1, len(files) // CHUNKS)]:
        digest.update(sampled_hash(str(file), file.stat().st_size).encode())
    return {"path": os.path.abspath(path), "content": digest.hexdigest()}


# ------------------------------------------------------------------------------------------------ output

VARIABLES = {
    "result": "clear", "uncertainty": "uncertainty", "count": "clear_count", "provenance": "provenance",
    "source_date": "source_date",
}  # fmt: skip
"""Layer -> variable of the store."""


def _write_store(rows: RowFiles, cube: Cube, report: SceneReport, target: Path) -> None:
    """Write the rows of all layers as a store."""
    import dask.array as da
    import xarray

    plan = rows.plan
    edge = max(plan.shape) if len(plan.windows) == 1 else plan.tile - plan.overlap
    empty = {}
    for layer in (file.layer for file in rows.files):
        bands = (len(layer.bands),) if layer.name in ("result", "uncertainty") else ()
        chunks = (*bands, edge, edge)
        empty[VARIABLES[layer.name]] = da.zeros((*bands, *plan.shape), dtype=layer.coding.dtype, chunks=chunks)
    variables = result_arrays(cube, empty)
    variables["clear"].attrs.update(coding_attributes(cube.coding))
    with new_store(target, xarray.Dataset(variables), work=rows.work.path) as store:
        for file in rows.files:
            _copy_rows(file, store[VARIABLES[file.layer.name]], edge)
        store.attrs.update({"sader_job": rows.work.digest, "sader_report": report.as_dict()})


@contextmanager
def new_store(target: Path, dataset: xr.Dataset, *, work: Path) -> Iterator[Any]:
    """Yield a store in the folder `work` with the variables of a dataset but not their data; then name it `target`.

    An unfinished store of an earlier run is deleted. A store that has the name stays in the work folder until all files
    of the new one are on the disk and it has the name.
    """
    import zarr

    part, old = work / STORE, work / REPLACED
    with writing(target):
        if part.exists():
            shutil.rmtree(part)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Zarr (V3|format 3)")  # text as band names
            dataset.to_zarr(part, consolidated=False, compute=False)
        yield zarr.open_group(str(part), mode="r+")
        for path in part.rglob("*"):
            if path.is_file():
                with open(path, "rb") as opened:
                    os.fsync(opened.fileno())
        if old.exists():
            shutil.rmtree(old)
        if target.exists():
            target.rename(old)
        part.rename(target)
        sync_folder(target.parent)


def coding_attributes(coding: ValueCoding) -> dict[str, Any]:
    """Return the CF attributes of stored numbers."""
    found: dict[str, Any] = {"_FillValue": np.dtype(coding.dtype).type(fill_value(coding))}
    if coding.is_integer or coding.scale != 1.0 or coding.offset != 0.0:
        found |= {"scale_factor": coding.scale, "add_offset": coding.offset}
    return found


def _copy_rows(file: RowFile, variable: Any, edge: int) -> None:
    """Copy all rows into a variable, one row of chunks at a time."""
    for top in range(0, file.grid.height, edge):
        lines = file.read(top, edge).swapaxes(0, 1)
        variable[..., top : top + lines.shape[1], :] = lines if variable.ndim == 3 else lines[0]


def store_attributes(target: Path) -> dict[str, Any]:
    """Return the attributes of a store; none for other folders."""
    import zarr

    try:
        return dict(zarr.open_group(str(target), mode="r").attrs)
    except Exception:  # of many kinds, for what is not a store
        return {}


def _check_target(target: Path, digest: str, *, overwrite: bool) -> SceneReport | None:
    """Return the report of a complete store of the same job; refuse any other store, unless it may be replaced."""
    if overwrite or not target.exists():
        return None
    found = store_attributes(target)
    if found.get("sader_job") != digest:
        raise OutputError(f"{target} exists. Use --overwrite to replace it, or choose another name.")
    return SceneReport.from_dict(found["sader_report"])


def read_zarr(
    path: str | Path, *, variable: str | None = None, mask: str | None = None
) -> tuple[xr.DataArray | xr.Dataset, xr.DataArray | None]:
    """Return the lazy cube of a Zarr store, its numbers as they are stored, and its mask; names as in `clear_zarr`."""
    xarray = require("xarray", extra="cluster", purpose="reading Zarr")
    require("zarr", extra="cluster", purpose="reading Zarr")
    require("dask.array", extra="cluster", purpose="reading Zarr lazily")
    if "://" not in str(path) and not Path(path).exists():
        raise DataError(f"no Zarr store at {path}; expected a folder that ends in .zarr.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about consolidated metadata, which only saves time
            dataset = xarray.open_zarr(path, mask_and_scale=False, chunks={})
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read as a Zarr store ({first}). Write it with xarray's to_zarr.") from error
    return _cube(dataset, path, variable), None if mask is None else _named(dataset, mask, path)


def check_zarr_output(out: str | Path, *, overwrite: bool) -> Path:
    """Return the output's path; refuse now what cannot be written later."""
    target = Path(out)
    if "://" in str(out):
        raise OutputError(f"{out} is no local folder. To write elsewhere: sader.remove_xarray(...).to_zarr(url).")
    if target.suffix.lower() != ".zarr":
        raise OutputError(f"the output is {target}; expected a name that ends in .zarr, as the input is a Zarr store.")
    if target.exists() and not any((target / name).exists() for name in ("zarr.json", ".zgroup", ".zmetadata")):
        raise OutputError(f"{target} exists and is no Zarr store; it is not overwritten. Choose another name.")
    if target.exists() and not overwrite and "sader_job" not in store_attributes(target) and not resumable(target):
        raise OutputError(f"{target} exists. Use --overwrite to replace it, or choose another name.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write into {target.parent}: {error.strerror}. Choose another folder.") from error
    return target


def _cube(dataset: xr.Dataset, path: str | Path, variable: str | None) -> xr.DataArray | xr.Dataset:
    if variable is not None:
        return _named(dataset, variable, path)
    four = [name for name, value in dataset.data_vars.items() if value.ndim == 4]
    if len(four) > 1:
        raise DataError(
            f"{path} holds {len(four)} variables with four axes ({', '.join(map(str, four))}); name the "
            "reflectance: variable=NAME."
        )
    if four:
        return dataset[four[0]]
    # Masks and classes lie beside the bands and have no scale.
    # A store lists its variables in the order of the folder, which is none.
    names = sorted(dataset.data_vars, key=str)
    scaled = [name for name in names if "scale_factor" in dataset[name].attrs]
    return dataset[scaled or names]


def _named(dataset: xr.Dataset, name: str, path: str | Path) -> xr.DataArray:
    if name not in dataset.data_vars:
        raise DataError(
            f"{path} has no variable {name!r}; it has {', '.join(sorted(map(str, dataset.data_vars))) or 'none'}."
        )
    return dataset[name]


EDGE = 512
"""Edge of the chunks in pixels; rows of this number are copied at a time."""

Done = Sequence[tuple[int, SceneReport]]
"""(index of the date, report) of each result."""


def write_dates(target: Path, stack: GeoStack, done: Done, *, work: Path, jobs: Sequence[str]) -> None:
    """Write the results of a series as one store in the folder `work`; it gets its name when it is complete.

    Numbers are stored as in the files where all dates are coded alike, else as float32 reflectance. jobs: checksums by
    which `find_dates` recognises the store.
    """
    codings = {stack.sources[date].coding for date, _ in done}
    coding = codings.pop() if len(codings) == 1 else REFLECTANCE
    layers, empty = _empty(stack, done, coding)
    with new_store(target, empty, work=work) as store:
        for number, (date, scene) in enumerate(done):
            for layer in layers:
                own = stack.sources[date].coding if layer == "result" else None
                _copy(scene.layer(layer) or "", store[VARIABLES[layer]], number, own, coding)
        store.attrs.update({"sader_jobs": list(jobs), "sader_dates": [(date, one.as_dict()) for date, one in done]})


def find_dates(target: Path, jobs: Sequence[str]) -> list[tuple[int, SceneReport]] | None:
    """Return (date, report) of the results in a complete store of the same jobs; None where there is none."""
    found = store_attributes(target) if target.exists() else {}
    if found.get("sader_jobs") != list(jobs):
        return None
    return [(int(date), SceneReport.from_dict(report)) for date, report in found["sader_dates"]]


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


def _empty(stack: GeoStack, done: Done, coding: ValueCoding) -> tuple[list[str], xr.Dataset]:
    """Return the layers, and their variables and coordinates without data."""
    import dask.array as da
    import xarray

    layers = [layer for layer in VARIABLES if done[0][1].layer(layer) is not None]
    types = {"result": coding.dtype, "uncertainty": "float32"}
    variables = {}
    for layer in layers:
        band = layer in types
        shape = (len(done), *((len(stack.bands),) if band else ()), *stack.grid.shape)
        dims = ["time", *(["band"] if band else []), "y", "x"]
        chunks = (1, *((-1,) if band else ()), EDGE, EDGE)
        empty = da.zeros(shape, dtype=types.get(layer, "uint8"), chunks=chunks)
        attrs = {
            "long_name": MEANINGS[VARIABLES[layer]],
            "grid_mapping": "spatial_ref",
            **({"units": "1"} if band else {}),
        }
        if layer == "source_date":
            attrs |= source_flags([one.name for one in stack.sources])
        variables[VARIABLES[layer]] = xarray.Variable(dims, empty, attrs)
    variables["clear"].attrs.update(coding_attributes(coding))
    return layers, xarray.Dataset(variables, _coordinates(stack, done))


def _coordinates(stack: GeoStack, done: Done) -> dict[str, Any]:
    """Return time, band, y, x and the reference system; names instead of times where a date is unknown."""
    grid = stack.grid
    a, b, c, d, e, f = grid.transform
    sources = [stack.sources[date] for date, _ in done]
    times = [np.datetime64(one.date.replace(tzinfo=None), "ns") for one in sources if one.date is not None]
    place = {"GeoTransform": f"{c} {a} {b} {f} {d} {e}"}
    if grid.crs:
        place["crs_wkt"] = crs_of(grid.crs).to_wkt()
    found: dict[str, Any] = {
        "time": times if len(times) == len(done) else [one.name for one in sources],
        "band": list(stack.bands),
        "spatial_ref": ((), 0, place),
    }
    if not b and not d:
        found |= {"x": c + a * (np.arange(grid.width) + 0.5), "y": f + e * (np.arange(grid.height) + 0.5)}
    return found
