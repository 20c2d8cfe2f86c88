"""Zarr in, Zarr out: a cube of dates is read, cleared and written chunk by chunk, never held as a whole.

Not from the paper. The result is stored like the input (type, scale, offset, nodata) and appears under its name only
when it is whole.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import DataError, OutputError, ValueRangeError, require
from sader.geo.scene.rows import NODATA, OBSERVED, RECONSTRUCTED
from sader.geo.scene.run import Notice, SceneOptions, SceneReport, retiled
from sader.geo.stack import StackWindow, ValueCoding
from sader.geo.values import encode, fill_value, for_network
from sader.geo.xarray.cluster import connect
from sader.geo.xarray.cube import Cube, find_reference, look_from_afar, mask_data, open_cube
from sader.geo.xarray.lazy import clear_dataset
from sader.geo.xarray.tasks import decoded_window
from sader.inference.scene_match import decimation
from sader.inference.tiling import Progress, plan_windows

if TYPE_CHECKING:
    import xarray as xr

    from sader.inference.remover import CloudRemover


def clear_zarr(
    path: str | Path,
    out: str | Path,
    remover: CloudRemover,
    options: SceneOptions | None = None,
    *,
    variable: str | None = None,
    mask: str | None = None,
    address: str | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> SceneReport:
    """Write the clear image of the dates in a Zarr store as another Zarr store and return what was done.

    options: as for files; uncertainty, count and provenance become variables (`clear_count` for the count).
    variable: name of the (time, band, y, x) variable; None = the only one, or all (time, y, x) ones as bands.
    mask: name of a (time, y, x) variable, True = cloud or shadow.
    address: of a dask scheduler, as for `clear_stack_on_dask`; None = the active client or scheduler, else one tile
        after the other here.
    progress: called with (tiles done, tiles in all), except on a cluster; notice: with what the user should know.
    """
    options = options or SceneOptions()
    started, said = time.perf_counter(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        (notice or (lambda text: warnings.warn(text, stacklevel=3)))(text)

    target = check_zarr_output(out, overwrite=options.overwrite)
    array, masks = read_zarr(path, variable=variable, mask=mask)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cube = open_cube(array, remover)
    for one in caught:
        say(str(one.message))
    with _scheduler(address) as scheduler:
        look = _look(cube, mask_data(masks, cube), scheduler)
        if not look.valid.any() and not _any_valid(cube, scheduler):
            raise ValueRangeError(f"no date of {path} has a valid pixel; there is nothing to make. Check its nodata.")
        own = retiled(remover, options)
        afar = look_from_afar(own, look, cube.bands, cube.shape[2:])
        reference = _reference(cube, look, afar.clear_share, remover, options, say)
        match = own.scene_match(
            for_network(afar.cloudy), valid=afar.valid, cloud=afar.cloud, reference=reference, shape=cube.shape[2:]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said above
            made = clear_dataset(
                array, remover, reference=reference, cloud_mask=masks, tile=options.tile, overlap=options.overlap,
                seed=options.seed, samples=options.sample_count, steps=options.steps,
                scene_match=False if match is None else match,
            )  # fmt: skip
        pixels = _write(made, target, cube.coding, options, scheduler, progress)
    height, width = cube.shape[2:]
    names = tuple(str(time)[:19] for time in (range(cube.shape[0]) if cube.times is None else cube.times))
    return SceneReport(
        output=str(target),
        files=(str(target),),
        reference=None if reference is None else names[reference],
        reference_index=reference,
        dates=names,
        bands=cube.bands,
        size=(height, width),
        tiles=len(plan_windows(height, width, tile=own.tile_size, overlap=own.options.overlap)),
        pixels=pixels,
        clear_share=tuple(round(float(share), 4) for share in afar.clear_share),
        model=remover.config.name,
        steps="+".join(map(str, own.check_numbers(options.steps, options.sample_count, options.seed))).removesuffix(
            "+0"
        ),
        seed=options.seed,
        samples=options.sample_count,
        seconds=time.perf_counter() - started,
        notices=tuple(said),
    )


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


def encoded(clear: xr.DataArray, coding: ValueCoding) -> xr.DataArray:
    """Return reflectance as stored numbers with CF attributes that say how to read them; lazily."""

    def numbers(image: NDArray[np.float32]) -> NDArray[Any]:
        seen: NDArray[np.bool_] = np.asarray(np.isfinite(image).all(axis=0))
        return np.asarray(encode(image, seen, coding))

    made = clear.copy(data=clear.data.map_blocks(numbers, dtype=np.dtype(coding.dtype)))
    made.encoding = dict(clear.encoding)
    if np.dtype(coding.dtype).kind != "f" or coding.scale != 1.0 or coding.offset != 0.0:
        made.attrs.update(scale_factor=coding.scale, add_offset=coding.offset)
    made.attrs["_FillValue"] = np.dtype(coding.dtype).type(fill_value(coding))
    return made


def check_zarr_output(out: str | Path, *, overwrite: bool) -> Path:
    """Return the output's path; refuse now what cannot be written later."""
    target = Path(out)
    if "://" in str(out):
        raise OutputError(
            f"{out} is no local folder. To write elsewhere: sader.geo.xarray.lazy.clear(...).to_zarr(url)."
        )
    if target.suffix.lower() != ".zarr":
        raise OutputError(f"the output is {target}; expected a name that ends in .zarr, as the input is a Zarr store.")
    if target.exists() and not any((target / name).exists() for name in ("zarr.json", ".zgroup", ".zmetadata")):
        raise OutputError(f"{target} exists and is no Zarr store; it is not overwritten. Choose another name.")
    if target.exists() and not overwrite:
        raise OutputError(f"{target} exists. Use --overwrite to replace it, or choose another name.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write into {target.parent}: {error.strerror}. Choose another folder.") from error
    return target


# ------------------------------------------------------------------------------------------------ the steps


def _reference(
    cube: Cube,
    look: StackWindow,
    shares: NDArray[np.float64],
    remover: CloudRemover,
    options: SceneOptions,
    say: Notice,
) -> int | None:
    """Return the date to clean; shares: how much of the scene each date shows."""
    date = find_reference(options.reference, cube)
    if date == "auto":
        unknown = not remover.matches_dates and any(mask is None for mask in look.masks)
        if unknown:
            say("this model has no cloud head and no mask is given, so no date can be cleaned: a new image is made.")
        date = None if unknown else int(shares.argmax())
    assert not isinstance(date, str)
    return date


def _look(cube: Cube, mask: Any, scheduler: Any) -> StackWindow:
    import dask

    every = decimation(*cube.shape[2:])
    raw, given = dask.compute(cube.data[..., *every], None if mask is None else mask[..., *every], scheduler=scheduler)
    return decoded_window(raw, given, cube.coding)


def _any_valid(cube: Cube, scheduler: Any) -> bool:
    """Whether any pixel has data, for scenes of which the look from afar sees none."""
    from sader.geo.values import is_data

    seen = cube.data.map_blocks(is_data, cube.coding, dtype=bool)
    return bool(seen.any().compute(scheduler=scheduler))


def _write(
    made: xr.Dataset,
    target: Path,
    coding: ValueCoding,
    options: SceneOptions,
    scheduler: Any,
    progress: Progress | None,
) -> dict[str, int]:
    """Write the store under another name, then give it its own; return the pixels by what became of them."""
    import dask
    import dask.array as da

    asked = {"uncertainty": options.uncertainty, "clear_count": options.count, "provenance": options.provenance}
    wanted = made[["clear", *(name for name, yes in asked.items() if yes and name in made)]]
    wanted["clear"] = encoded(made["clear"], coding)
    codes = {"nodata": NODATA, "observed": OBSERVED, "reconstructed": RECONSTRUCTED}
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with warnings.catch_warnings(), _counted(made, progress):
            warnings.filterwarnings("ignore", message="Sending large graph")  # that is the model, once
            warnings.filterwarnings("ignore", message=".*Zarr (V3|format 3)")  # strings as band names
            store = wanted.to_zarr(part, mode="w", consolidated=False, compute=False)
            _, counts = dask.compute(
                store, da.bincount(made["provenance"].data.ravel(), minlength=3), scheduler=scheduler
            )
        _replace(part, target)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"cannot write {target}: {reason}. Free space or choose another folder.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {name: int(counts[code]) for name, code in codes.items()}


@contextlib.contextmanager
def _scheduler(address: str | None) -> Iterator[Any]:
    """Yield what dask should compute with."""
    from dask.base import get_scheduler

    if address is not None:
        with connect(address) as client:
            yield client
    else:
        # Tiles side by side in one process would each need their memory, and torch uses all cores for one.
        yield None if get_scheduler() is not None else "synchronous"


@contextlib.contextmanager
def _counted(made: xr.Dataset, progress: Progress | None) -> Iterator[None]:
    """Tell `progress` about each finished tile, where the work is done in this process."""
    from dask.callbacks import Callback

    total = sum("sader-tile" in str(key) for key in dict(made["clear"].__dask_graph__() or {}))
    done = 0

    def finished(key: Any, result: Any, graph: Any, state: Any, worker: Any) -> None:
        nonlocal done
        if progress is not None and "sader-tile" in str(key):
            done += 1
            progress(min(done, total), total)

    with Callback(posttask=finished):
        yield


def _replace(part: Path, target: Path) -> None:
    """Give the finished store its name; an old one is there until the new one is."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _cube(dataset: xr.Dataset, path: str | Path, variable: str | None) -> xr.DataArray | xr.Dataset:
    if variable is not None:
        return _named(dataset, variable, path)
    four = [name for name, value in dataset.data_vars.items() if value.ndim == 4]
    if len(four) > 1:
        raise DataError(
            f"{path} holds {len(four)} variables with four axes ({', '.join(map(str, four))}); say which is the "
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
