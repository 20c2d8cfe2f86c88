"""Zarr in, Zarr out: the scene loop with a Zarr store as source and sink.

The result is stored like the input (type, scale, offset, nodata). It appears under its name only when it is complete.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sader.errors import DataError, OutputError, ValueRangeError, require
from sader.files import sync_folder
from sader.geo.scene.cog import writing
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.resume import PROVENANCE
from sader.geo.scene.run import SceneReport, scene_remover
from sader.geo.xarray.cluster import cluster_executor
from sader.geo.xarray.cube import Cube, check_counts, cube_scene, mask_data, open_cube, result_array
from sader.geo.xarray.lazy import PROVENANCE_TEXT, cube_plan
from sader.inference.scene import (
    FinishedRows,
    ScenePlan,
    SceneWindow,
    check_reference,
    find_reference,
    local_executor,
    run_rows,
)
from sader.inference.scene_match import decimation
from sader.inference.tiling import Notice, Progress, Window
from sader.inference.values import ValueCoding, fill_value

if TYPE_CHECKING:
    import xarray as xr

    from sader.inference.remover import CloudRemover

MARKER = ".sader-work"
"""File that marks an unfinished store as ours."""


@dataclass(frozen=True)
class CubeScene:
    """A lazy cube as the source of the scene loop."""

    cube: Cube
    masks: Any
    """(T, H, W), lazy; None where the model estimates the clouds."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.cube.shape[2:]

    @property
    def bands(self) -> tuple[str, ...]:
        return self.cube.bands

    @property
    def codings(self) -> tuple[tuple[ValueCoding, ...], ...]:
        return ((self.cube.coding,) * len(self.cube.bands),) * self.cube.shape[0]

    @property
    def days(self) -> tuple[float, ...] | None:
        return self.cube.days

    def read(self, window: Window) -> SceneWindow:
        """Return all dates of a window as they are stored."""
        numbers, masks = self.part(window.slices)
        check_counts(numbers, self.cube.coding)
        given = [None] * len(numbers) if masks is None else [one != 0 for one in masks]
        return SceneWindow(numbers=list(numbers), masks=given)

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
    address: str | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> SceneReport:
    """Write the clear image of the dates in a Zarr store as another Zarr store and return the report.

    options: as for files; uncertainty, count and provenance become variables (`clear_count` for the count).
    variable: name of the (time, band, y, x) variable; None = the only one, or all (time, y, x) ones as bands.
    mask: name of a (time, y, x) variable, True = cloud or shadow.
    address: of a dask scheduler (`cluster.connect`); None = threads of this process.
    progress: called with (tiles done, tiles in all); notice: called with messages for the user.
    """
    options = options or SceneOptions()
    started, messages = time.perf_counter(), list[str]()

    def notify(text: str) -> None:
        messages.append(text)
        (notice or (lambda text: warnings.warn(text, stacklevel=3)))(text)

    target = check_zarr_output(out, overwrite=options.overwrite)
    remover = scene_remover(remover, options)
    if options.samples is None and remover.states_error:
        options = replace(options, samples=1)
    numbers = remover.check_numbers(options.steps, options.sample_count, options.seed)
    array, masks = read_zarr(path, variable=variable, mask=mask)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cube = open_cube(array, remover)
    for one in caught:
        notify(str(one.message))
    source = CubeScene(cube, mask_data(masks, cube))
    plan, shares = _planned(source, remover, options, notify, path)
    make = partial(local_executor, threads=options.threads) if address is None else partial(cluster_executor, address)
    with _part(target) as part:
        sink = ZarrRows(part, cube, plan, options, remover.options.cloud_threshold)
        with make(plan, remover, source) as executor:
            device = remover.device if address is None else "cpu"
            run_rows(plan, executor, sink, threshold=sink.threshold, device=device, progress=progress)
        _replace(part, target, overwrite=options.overwrite)
    return SceneReport(
        output=str(target),
        files=(str(target),),
        reference=None if plan.reference is None else cube.names[plan.reference],
        reference_index=plan.reference,
        dates=tuple(cube.names),
        bands=cube.bands,
        size=plan.shape,
        tiles=len(plan.windows),
        pixels=sink.pixels,
        clear_share=shares,
        model=options.model_name or remover.config.name,
        steps="+".join(map(str, numbers)).removesuffix("+0"),
        seed=options.seed,
        samples=options.sample_count,
        seconds=time.perf_counter() - started,
        notices=tuple(messages),
    )


def _planned(
    source: CubeScene, remover: CloudRemover, options: SceneOptions, notice: Notice, path: str | Path
) -> tuple[ScenePlan, tuple[float, ...]]:
    """Return the plan and the clear share of each date, from the overview."""
    cube = source.cube
    overview = cube_scene(cube, *source.part(decimation(*source.shape))).as_overview(remover)
    if not overview.valid.any() and not _any_valid(source):
        raise ValueRangeError(f"no date of {path} has a valid pixel. Check its nodata value (_FillValue).")
    wanted = options.reference
    date = find_reference(wanted, cube.names, [None] * cube.shape[0], overview.clear_share)
    chosen = isinstance(wanted, str) and wanted.lower() == "auto"
    if date is not None:
        date = check_reference(date, remover, overview, chosen=chosen, name=cube.names[date], notice=notice)
    plan = cube_plan(cube, remover, replace(options, samples=options.sample_count), extras=True)
    match = overview.match(remover, date, plan.shape)
    clouds = plan.clouds if options.count else () if date is None else (date,)
    plan = replace(plan, reference=date, match=match, clouds=clouds, spread=plan.spread and options.uncertainty)
    return plan, tuple(round(float(share), 4) for share in overview.clear_share)


def _any_valid(source: CubeScene) -> bool:
    """Whether any pixel has data, for scenes of which the overview has none."""
    height, width = source.shape
    strips = (source.part((slice(top, top + 256), slice(0, width)))[0] for top in range(0, height, 256))
    return any(bool(cube_scene(source.cube, numbers, None).valid.any()) for numbers in strips)


class ZarrRows:
    """The sink of the scene loop for a Zarr store."""

    def __init__(self, part: Path, cube: Cube, plan: ScenePlan, options: SceneOptions, threshold: float) -> None:
        import zarr

        self.coding, self.plan, self.threshold = cube.coding, plan, threshold
        self.pixels = dict.fromkeys(PROVENANCE, 0)
        self.names = ["clear"]
        self.names += ["uncertainty"] if plan.spread else []
        self.names += [
            name for name, yes in (("clear_count", options.count), ("provenance", options.provenance)) if yes
        ]
        self._create(part, cube)
        self.store: Any = zarr.open_group(str(part), mode="r+")

    def _create(self, part: Path, cube: Cube) -> None:
        """Write the metadata and coordinates of the store, without data."""
        import dask.array as da
        import xarray

        edge = max(self.plan.shape) if len(self.plan.windows) == 1 else self.plan.tile - self.plan.overlap
        texts = {"clear_count": "dates that show the ground clearly", "provenance": PROVENANCE_TEXT}
        variables = {}
        for name in self.names:
            band = name not in texts
            shape = (len(self.plan.bands), *self.plan.shape) if band else self.plan.shape
            kind = self.coding.dtype if name == "clear" else "float32" if band else "uint8"
            empty = da.zeros(shape, dtype=kind, chunks=(-1, edge, edge) if band else edge)
            text = "reflectance" if name == "clear" else texts.get(name, "expected standard deviation")
            units = {"units": "1"} if band else {}
            variables[name] = result_array(cube, empty, name=name, band=band, long_name=text, **units)
        attrs = variables["clear"].attrs
        if not self.coding.is_integer and self.coding.scale == 1.0 and self.coding.offset == 0.0:
            attrs["_FillValue"] = np.dtype(self.coding.dtype).type(fill_value(self.coding))
        else:
            attrs.update(scale_factor=self.coding.scale, add_offset=self.coding.offset)
            attrs["_FillValue"] = np.dtype(self.coding.dtype).type(fill_value(self.coding))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Zarr (V3|format 3)")  # text as band names
            xarray.Dataset(variables).to_zarr(part, mode="a", consolidated=False, compute=False)

    def write(self, top: int, left: int, part: FinishedRows) -> None:
        """Write a rectangle of finished rows."""
        own = () if self.plan.reference is None else self.plan.codings[self.plan.reference]
        provenance = part.provenance().cpu().numpy()
        values = {"clear": part.encoded(self.coding, own), "provenance": provenance}
        if "clear_count" in self.names:
            values["clear_count"] = part.count(self.threshold).cpu().numpy()
        if part.spread is not None:
            values["uncertainty"] = part.spread.cpu().numpy()
        height, width = provenance.shape
        for name in self.names:
            self.store[name][..., top : top + height, left : left + width] = values[name]
        found = np.bincount(provenance.ravel(), minlength=len(PROVENANCE))
        for name, code in PROVENANCE.items():
            self.pixels[name] += int(found[code])

    def end_rows(self, strip: int, unfinished: tuple[Tensor, Tensor]) -> None:
        """Nothing is kept for a later run."""


@contextmanager
def _part(target: Path) -> Iterator[Path]:
    """Yield the folder of an unfinished store, empty and marked; it is removed in the end."""
    part = target.with_name(f".{target.name}.part")
    with writing(target):
        _discard(part)
        part.mkdir()
        (part / MARKER).touch()
        try:
            yield part
        finally:
            _discard(part)


def _discard(folder: Path) -> None:
    """Delete an unfinished store; refuse a link, and a folder that is not ours."""
    if not folder.is_symlink() and not folder.exists():
        return
    if folder.is_symlink() or not (folder / MARKER).is_file():
        raise OutputError(
            f"{folder} is no unfinished store of sader; it is left as it is. Move it away, or choose another name."
        )
    shutil.rmtree(folder)


def _replace(part: Path, target: Path, *, overwrite: bool) -> None:
    """Give the finished store its name; an old one stays until the new one has it."""
    old = target.with_name(f".{target.name}.part")
    if target.exists():
        if not overwrite:
            raise OutputError(f"{target} exists. Use --overwrite to replace it, or choose another name.")
        old = target.with_name(f".{target.name}.old")
        _discard(old)
        (target / MARKER).touch()
        target.rename(old)
    (part / MARKER).unlink()
    part.rename(target)
    sync_folder(target.parent)
    if old != part:
        _discard(old)


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
        raise OutputError(
            f"{out} is not a local folder. To write elsewhere: sader.geo.xarray.lazy.clear(...).to_zarr(url)."
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
