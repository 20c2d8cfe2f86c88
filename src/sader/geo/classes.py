"""`sader mask` without the command line: the class of every pixel of every date, as rasters with STAC items.

The mask network sees all dates of a window together. Tiles overlap, and the part of each that is kept ends in the
middle of the overlap. Files appear under their names only when they are complete. `classify_xarray` returns the same of
an xarray cube.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sader._version import __version__
from sader.errors import ConfigError, OutputError
from sader.geo.align import LESS_RELIABLE
from sader.geo.read.masks import CLASSES_TAG
from sader.geo.remove import ALL_BANDS_MODEL, Loader, RemoveRequest, load_remover, open_files, open_request
from sader.geo.scene.cog import MASKS, Layer, RowFile, make_cog, publish_cog, side_file, writing
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.resume import WorkFolder
from sader.geo.scene.run import check_folder, check_target, gdal_cache, scene_remover
from sader.geo.scene.source import StackScene, read_overview
from sader.geo.stac.write import write_class_item, write_collection
from sader.geo.stack import GeoStack
from sader.geo.xarray.cube import cube_scene, open_cube
from sader.inference.masks import MASK_WEIGHTS
from sader.inference.remover import CloudRemover
from sader.inference.tiling import Notes, Notice, Progress, Window, plan_windows
from sader.inference.values import HIGHEST, LOWEST, UNKNOWN, decode_array
from sader.model.heads import MASK_CLASSES

if TYPE_CHECKING:
    import xarray as xr

LEGEND = (
    ("clear land", (120, 160, 90, 255)),
    ("thick cloud", (245, 245, 245, 255)),
    ("thin cloud or haze", (250, 190, 90, 255)),
    ("shadow", (110, 70, 140, 255)),
    ("water", (50, 110, 200, 255)),
    ("snow", (120, 225, 240, 255)),
)
"""Name and colour of each class, in the order of `MASK_CLASSES`; the class of a pixel is its index."""
CLASS_LAYER = Layer("mask", ("class",), MASKS, categories=True, legend=LEGEND)
PERCENT_LAYER = Layer("probability", tuple(f"{name} (%)" for name, _ in LEGEND), MASKS)

ReadWindow = Callable[[Window], tuple[NDArray[np.float32], NDArray[np.bool_]]]
"""Returns reflectance (T, C, h, w) and valid (T, h, w) of a window."""


@dataclass(frozen=True)
class MaskReport:
    """What was written."""

    output: str
    files: tuple[str, ...]
    dates: tuple[str, ...]
    size: tuple[int, int]
    """(height, width)"""
    tiles: int
    shares: tuple[dict[str, float], ...]
    """Share of each class among the pixels with data, for each date."""
    seconds: float
    notices: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)


def run_mask(
    request: RemoveRequest,
    *,
    progress: Progress | None = None,
    notice: Notice | None = None,
    load: Loader | None = None,
) -> MaskReport:
    """Write the classes of all dates of a request, whose `out` is a .tif file for one date, or a folder."""
    if any(Path(given).suffix.lower() == ".zarr" for given in request.inputs):
        raise ConfigError(
            "sader mask reads files; expected GeoTIFFs, folders, .SAFE products or STAC items. For a Zarr store: "
            "sader.classify_xarray(remover, cube)."
        )
    notes = Notes(notice)

    def notify(text: str) -> None:
        if not text.endswith(LESS_RELIABLE):  # of the other network: masks of four bands are as good as of thirteen
            notes(text)

    # The masks of this model are those of all models; it has the most bands and needs none in particular.
    request = replace(request, mask=("own",), model=request.model or ALL_BANDS_MODEL)
    stack, remover, options = open_request(request, load or load_remover, notify)
    done = write_classes(stack, remover, request.out, options, progress=progress)
    return replace(done, notices=notes.texts)


def classify_files(
    remover: CloudRemover,
    files: Sequence[str | Path],
    out: str | Path,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> MaskReport:
    """Write the classes of every date of several files and return the report.

    out: a folder, which receives NAME_mask.tif, NAME_probability.tif and a STAC item for each date and, for several
    dates, a STAC collection; for one date also the name of a .tif file.
    options: bands, offset, grid, area, load, tile, overlap and overwrite, as in `sader.remove_files`.

    >>> report = sader.classify_files(remover, ["2022/"], "masks/")      # doctest: +SKIP
    """

    def notify(text: str) -> None:
        warnings.warn(text, stacklevel=5)

    stack, wanted = open_files(remover, files, notify, **options, mask="own")
    return write_classes(stack, remover, out, wanted, progress=progress)


def write_classes(
    stack: GeoStack,
    remover: CloudRemover,
    out: str | Path,
    options: SceneOptions | None = None,
    *,
    progress: Progress | None = None,
) -> MaskReport:
    """Write classes and probabilities of each date of a stack, with STAC items, and return the report."""
    started = time.perf_counter()
    options = options or SceneOptions()
    remover = scene_remover(remover, options)
    targets = class_targets(stack, Path(out))
    collection = targets[0].with_name("collection.json") if len(targets) > 1 else None
    work = WorkFolder(targets[0], {})
    _check_outputs(stack, targets, collection, may_exist=options.overwrite or work.path.is_dir())
    with gdal_cache(), work:
        try:
            scene = StackScene(stack)
            read_overview(stack, remover, scene)  # refuses what is not reflectance
            rows = [
                [
                    RowFile(work.path / f"{one.name}-{number}.rows", one, stack.grid)
                    for one in (CLASS_LAYER, PERCENT_LAYER)
                ]
                for number in range(len(targets))
            ]
            with writing(targets[0]):
                counts = _write_rows(scene, remover, rows, progress)
                cogs = []
                for source, pair in zip(stack.sources, rows, strict=True):
                    date = None if source.date is None else source.date.isoformat()
                    cogs.append([make_cog(one, tags=class_tags(source.name, date)) for one in pair])
                for target, made in zip(targets, cogs, strict=True):
                    publish_cog(made[1], side_target(target))
                    publish_cog(made[0], target)
        finally:
            work.remove()
    files: list[str] = []
    items = []
    for source, target in zip(stack.sources, targets, strict=True):
        items.append(write_class_item(target, side_target(target), LEGEND, source=source, collection=collection))
        files += [str(target), str(side_target(target)), str(items[-1])]
    if collection is not None:
        text = f"cloud masks of {len(items)} dates, written by sader {__version__}"
        files.append(str(write_collection(collection, items, text)))
    return MaskReport(
        output=str(out),
        files=tuple(files),
        dates=tuple(source.name for source in stack.sources),
        size=stack.grid.shape,
        tiles=len(_windows(remover, stack.grid.shape)),
        shares=tuple(
            {name: round(int(one) / max(1, int(found.sum())), 4) for (name, _), one in zip(LEGEND, found, strict=True)}
            for found in counts
        ),
        seconds=time.perf_counter() - started,
    )


def classified(
    remover: CloudRemover,
    shape: tuple[int, int],
    bands: Sequence[str],
    read: ReadWindow,
    progress: Progress | None = None,
) -> Iterator[tuple[Window, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield every part of a scene with its classes (T, h, w) and percentages (T, 6, h, w); 255 = nodata."""
    windows = _windows(remover, shape)
    rows, cols = sorted({one.row for one in windows}), sorted({one.col for one in windows})
    for done, window in enumerate(windows, start=1):
        cloudy, valid = read(window)
        percent = np.full((len(cloudy), len(MASK_CLASSES), *valid.shape[1:]), UNKNOWN, np.uint8)
        classes = np.full(valid.shape, UNKNOWN, np.uint8)
        if valid.any():
            with remover.turn:
                found = remover.classify(cloudy.clip(LOWEST, HIGHEST), valid=valid, bands=bands)
            known = np.where(valid[:, None], found, 0)
            percent = np.where(valid[:, None], np.rint(100 * known).astype(np.uint8), percent)
            classes = np.where(valid, known.argmax(axis=1).astype(np.uint8), classes)
        top, bottom = _kept(window.row, rows, window.height, shape[0])
        left, right = _kept(window.col, cols, window.width, shape[1])
        part = Window(top - window.row, left - window.col, bottom - top, right - left).slices
        yield Window(top, left, bottom - top, right - left), classes[:, *part], percent[..., *part]
        if progress is not None:
            progress(done, len(windows))


def _windows(remover: CloudRemover, shape: tuple[int, int]) -> list[Window]:
    return plan_windows(*shape, tile=remover.tile_size, overlap=remover.options.overlap)


def _kept(start: int, starts: Sequence[int], length: int, size: int) -> tuple[int, int]:
    """Return where the kept part of a tile begins and ends along one axis: in the middle of each overlap."""
    index = starts.index(start)
    first = 0 if index == 0 else (starts[index - 1] + length + start) // 2
    last = size if index + 1 == len(starts) else (start + length + starts[index + 1]) // 2
    return first, last


def class_tags(name: str, date: str | None) -> dict[str, str]:
    """Return the metadata of the rasters of a date; the classes are recognised by `CLASSES_TAG`."""
    tags = {
        "SADER_VERSION": __version__,
        "SADER_MODEL": MASK_WEIGHTS.stem,
        "SADER_INPUTS": name,
        CLASSES_TAG: ", ".join(f"{code} {name}" for code, (name, _) in enumerate(LEGEND)),
        "TIFFTAG_SOFTWARE": f"sader {__version__}",
    }
    return tags if date is None else {**tags, "ACQUISITION_DATE": date}


def class_targets(stack: GeoStack, out: Path) -> list[Path]:
    """Return the class raster of each date: `out` itself, or NAME_mask.tif in the folder `out`."""
    names = [source.name.replace("\\", "/") for source in stack.sources]
    if out.suffix.lower() in (".tif", ".tiff"):
        if len(names) > 1:
            raise OutputError(f"the output is {out} for {len(names)} dates; expected a folder. Name one: -o masks.")
        return [check_target(out)]
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; expected a folder, or for one date a name that ends in .tif.")
    stems = [Path(name).stem for name in names]
    if len(set(stems)) < len(stems):
        stems = [Path(name.replace("/", "_")).stem for name in names]
    if len(set(stems)) < len(stems):
        stems = [f"{number:03d}_{stem}" for number, stem in enumerate(stems)]
    return [out / f"{stem}_mask.tif" for stem in stems]


def side_target(target: Path) -> Path:
    """Return the raster of the probabilities beside that of the classes: a_mask.tif -> a_probability.tif."""
    return side_file(target.with_name(f"{target.stem.removesuffix('_mask')}{target.suffix}"), PERCENT_LAYER.name)


def _check_outputs(stack: GeoStack, targets: Sequence[Path], collection: Path | None, *, may_exist: bool) -> None:
    """Refuse now what cannot be written later."""
    inputs = {str(Path(path).resolve()) for source in stack.sources for path in source.paths}
    wanted = [path for one in targets for path in (one, side_target(one), one.with_suffix(".json"))]
    for path in wanted if collection is None else [*wanted, collection]:
        check_folder(path)
        if str(path.resolve()) in inputs:
            raise OutputError(f"{path} is one of the inputs. Choose another name for the output.")
        if path.exists() and not may_exist:
            raise OutputError(f"{path} exists. Use --overwrite to replace it, or choose another name.")


def _write_rows(
    scene: StackScene, remover: CloudRemover, rows: Sequence[Sequence[RowFile]], progress: Progress | None
) -> NDArray[np.int64]:
    """Write classes and percentages into the files of rows; return the pixels (T, 6) of each class."""
    for file in (one for pair in rows for one in pair):
        file.create()

    def read(window: Window) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        dates = enumerate(scene.stack.codings)
        values, valid = zip(*(decode_array(scene.blocks.read(one, window), own) for one, own in dates), strict=True)
        return np.stack(values), np.stack(valid)

    counts = np.zeros((len(rows), len(LEGEND)), np.int64)
    strip: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
    shape = scene.stack.grid.shape
    for window, classes, percent in classified(remover, shape, scene.stack.bands, read, progress):
        strip.append((classes[:, None], percent))
        for date, one in enumerate(classes):
            counts[date] += np.bincount(one.ravel(), minlength=UNKNOWN + 1)[: len(LEGEND)]
        if window.col + window.width == shape[1]:  # the last part of its rows
            for number, parts in enumerate(zip(*strip, strict=True)):
                for pair, lines in zip(rows, np.concatenate(parts, axis=3), strict=True):
                    pair[number].write(window.row, lines.swapaxes(0, 1), sync=False)
            strip.clear()
    return counts


def classify_xarray(
    remover: CloudRemover, array: xr.DataArray | xr.Dataset, *, progress: Progress | None = None
) -> xr.Dataset:
    """Return classes (time, y, x) and percentages (time, class, y, x) of an array (time, band, y, x); 255 = nodata.

    array: as in `sader.remove_xarray`. One backed by dask is read tile by tile; the result is in memory.

    >>> masks = sader.classify_xarray(remover, cube)                     # doctest: +SKIP
    >>> clear = cube.where(masks.classes.isin([0, 4, 5]))                # doctest: +SKIP
    """
    cube = open_cube(array, remover)
    import xarray

    def read(window: Window) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        scene = cube_scene(cube, np.asarray(cube.data[..., *window.slices]), None)
        return scene.cloudy, scene.valid

    dates, _, height, width = cube.shape
    classes = np.empty((dates, height, width), np.uint8)
    percent = np.empty((dates, len(LEGEND), height, width), np.uint8)
    for window, ours, theirs in classified(remover, (height, width), cube.bands, read, progress):
        classes[:, *window.slices], percent[..., *window.slices] = ours, theirs
    time, band, y, x = cube.layout.dims
    names = [name for name, _ in LEGEND]
    kept = {key: value for key, value in cube.layout.attrs.items() if key in ("grid_mapping", "crs")}
    attrs = {"flag_values": list(range(len(names))), "flag_meanings": " ".join(one.replace(" ", "_") for one in names)}
    found = xarray.Dataset(
        {
            "classes": ((time, y, x), classes, {**kept, **attrs, "_FillValue": UNKNOWN}),
            "probability": ((time, "class", y, x), percent, {**kept, "units": "percent", "_FillValue": UNKNOWN}),
        },
        coords={**cube.layout.isel({band: 0}, drop=True).coords, "class": names},
        attrs={"source": f"sader {__version__}"},
    )
    if "grid_mapping" in cube.layout.encoding:  # rioxarray finds the CRS by it
        for one in found.data_vars.values():
            one.encoding["grid_mapping"] = cube.layout.encoding["grid_mapping"]
    return found
