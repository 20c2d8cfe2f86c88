"""`sader remove` without the command line (`run_remove`), and `remove_files` for a loaded remover."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sader.bands import BANDS_13, BANDS_RGBN, parse_bands
from sader.checkpoint import HUB_FILE
from sader.errors import ConfigError, DataError, OutputError
from sader.geo.align import build_stack, cropped, find_grid, in_period
from sader.geo.grid import Box, Grid, area_window, parse_area
from sader.geo.offset import check_source
from sader.geo.read.arrays import LoadFunction, source_from
from sader.geo.read.masks import with_masks
from sader.geo.read.radar import check_radar, with_radar
from sader.geo.read.sources import open_sources
from sader.geo.scene.options import RemoveRequest, SceneOptions
from sader.geo.scene.run import Extras, MakeExecutor, SceneReport, check_output, clear_scene
from sader.geo.stack import DateSource, GeoStack
from sader.inference.remover import DEFAULT_MODEL, CloudRemover
from sader.inference.tiling import Notes, Notice, Progress

Loader = Callable[[str | None, str | None], tuple[CloudRemover, str]]
"""(model, device) -> the remover and its name in results."""
ALL_BANDS_MODEL = "sader-s2-msi"
"""Shipped weights for scenes with more than `BANDS_RGBN`; it works without those that a scene lacks."""
FILE_OPTIONS = ("bands", "offset", "mask", "mask_values", "aux", "grid", "load")
"""Options of `remove_files` besides those of `SceneOptions`."""
SMALL_TILE = 64
"""Edge in pixels below which the user is warned."""


def area_of(request: RemoveRequest) -> Box | None:
    """Return the area of a request in degrees, if one is given."""
    if request.bbox is not None and request.aoi is not None:
        raise ConfigError("--bbox and --aoi both give an area; expected one of them.")
    given = request.bbox if request.aoi is None else Path(request.aoi)
    return None if given is None else parse_area(given)


def run_remove(
    request: RemoveRequest,
    *,
    progress: Progress | None = None,
    notice: Notice | None = None,
    load: Loader | None = None,
) -> SceneReport:
    """Remove the clouds and return the report; problems of the input are found before the long work.

    load: returns the remover of (model, device) and its name, such as one from a cache; default `load_remover`.
    """
    notes = Notes(notice)
    if any(Path(given).suffix.lower() == ".zarr" for given in request.inputs):
        return _remove_zarr(request, load or load_remover, progress, notes)
    check_output(request.out, overwrite=request.options.overwrite)
    _check_extras(request)
    stack, remover, options = open_request(request, load or load_remover, notes)
    done = clear_scene(
        stack,
        remover,
        request.out,
        options,
        progress=progress,
        notice=notes,
        executor=executor_of(request),
        extras=_extras(request, remover, notes),
    )
    return replace(done, notices=notes.texts)


def open_request(request: RemoveRequest, load: Loader, notify: Notice) -> tuple[GeoStack, CloudRemover, SceneOptions]:
    """Return the stack, the remover and the options of a request, after all checks that read no pixels."""
    sources = find_sources(request, notify)
    remover, name = load(request.model or choose_model(sources, request.bands, notify), request.device)
    options = replace(request.scene_options, model_name=name)
    if request.aux:
        check_radar(name, remover.config.network.aux_bands)
    if request.report is not None:
        options = _with_layers(options, remover)
    _check_trained(remover, notify)
    if options.tile is not None and options.tile < SMALL_TILE:
        notify(
            f"tiles of {options.tile} pixels contain too little context: clouds are missed, and the run takes long. "
            "Use 256 or more; memory is bounded anyway."
        )
    return _stack(request, sources, remover, notify), remover, options


def _stack(request: RemoveRequest, sources: Sequence[DateSource], remover: CloudRemover, notify: Notice) -> GeoStack:
    """Return the dates on the grid of the request, with the bands of the model; notify of doubtful offsets."""
    bands = None if request.bands is None else parse_bands(request.bands)
    grid: str | Grid | None = request.grid
    if grid is not None and (area := area_of(request)) is not None:
        whole = find_grid(grid, sources[0].grid)
        window = area_window(whole, area)
        grid = whole if window is None else whole.part(window)
    stack = build_stack(sources, remover.config.network, bands=bands, grid=grid, notice=notify)
    for warning in filter(None, map(check_source, stack.sources)):
        notify(warning)
    return stack


def executor_of(request: RemoveRequest) -> MakeExecutor | None:
    """Return what provides the executor of a cluster; None for threads of this process."""
    if request.dask is None:
        return None
    from sader.geo.xarray.cluster import cluster_executor

    return partial(cluster_executor, request.dask)


def _check_trained(remover: CloudRemover, notice: Notice) -> None:
    if not remover.card.get("trained", True):
        name = remover.config.name
        notice(f"the model {name} is untrained: the result shows that everything runs, not how good the method is.")


def _check_extras(request: RemoveRequest) -> None:
    for kind, path, endings in (("preview", request.preview, (".png",)), ("report", request.report, (".html", ".htm"))):
        if path is None:
            continue
        if Path(path).suffix.lower() not in endings:
            raise OutputError(f"the {kind} is {path}; expected a name that ends in {endings[0]}.")
        if not Path(path).parent.is_dir() or not os.access(Path(path).parent, os.W_OK):
            raise OutputError(f"cannot write the {kind} into {Path(path).parent}: no such folder, or it is read-only.")


def _extras(request: RemoveRequest, remover: CloudRemover, notes: Notes) -> Extras:
    """Return the files beside the output, in the order in which they are written."""
    from sader.geo.scene.report import write_preview, write_scene_report

    found: dict[Path, Callable[[SceneReport, GeoStack], object]] = {}
    if (preview := request.preview) is not None:
        found[Path(preview)] = lambda report, stack: write_preview(preview, stack, report)
    if request.item:
        found[Path(request.out).with_suffix(".json")] = partial(write_scene_item, preview=request.preview)
    if (page := request.report) is not None:
        settings = _settings(request)

        def write(report: SceneReport, stack: GeoStack) -> None:
            write_scene_report(page, stack, replace(report, notices=notes.texts), remover, settings=settings)

        found[Path(page)] = write
    return found


def write_scene_item(
    report: SceneReport, stack: GeoStack, *, preview: str | None = None, collection: Path | None = None
) -> None:
    """Write the STAC item of a result beside it. collection: the file of the collection that it belongs to."""
    from sader.geo.stac.write import write_item

    reference = None if report.reference_index is None else stack.sources[report.reference_index]
    write_item(
        report.output,
        sources=stack.sources,
        reference=reference,
        assets={layer_name(file, report, preview): file for file in report.files[1:]},
        processing={
            "sader:model": report.model,
            "sader:seed": report.seed,
            "sader:steps": report.steps,
            "sader:samples": report.samples,
        },
        coding=stack.coding,
        collection=collection,
    )


def _with_layers(options: SceneOptions, remover: CloudRemover) -> SceneOptions:
    """Return the options with the layers a report shows; uncertainty only where it takes no further samples."""
    free = remover.states_error or (options.samples or 1) > 1
    return replace(options, provenance=True, uncertainty=options.uncertainty or free)


def _settings(request: RemoveRequest) -> dict[str, object]:
    """Return the options of the run for the page."""
    options = request.options
    return {
        "reference": options.reference, "bands": request.bands or "those of the model", "offset": request.offset,
        "scale": request.scale or "that of the files", "mask": request.mask or "those of the files, else of the model",
        "grid": request.grid or "that of the first input", "tile": options.tile or "the model's own",
        "overlap": options.overlap or "the model's own", "search": request.stac, "area": request.bbox or request.aoi,
        "period": request.dates,
    }  # fmt: skip


def _remove_zarr(request: RemoveRequest, load: Loader, progress: Progress | None, notify: Notice) -> SceneReport:
    """Remove the clouds of a cube in a Zarr store; --mask names a variable of it."""
    from sader.geo.xarray.zarr import check_zarr_output, clear_zarr

    if len(request.inputs) > 1 or len(request.mask) > 1:
        raise ConfigError(
            "a Zarr store holds all dates of a place: give one, and at most one --mask (a variable of it)."
        )
    asked = {"--bands": request.bands, "--grid": request.grid, "--scale": request.scale, "--preview": request.preview,
             "--report": request.report, "--bbox": request.bbox, "--aoi": request.aoi, "--dates": request.dates,
             "--mask-values": request.mask_values, "--aux": request.aux or None,
             "--save-masks": request.options.save_masks or None}  # fmt: skip
    unused = [name for name, value in asked.items() if value is not None]
    if unused:
        raise ConfigError(
            f"{', '.join(unused)} cannot be used with a Zarr store: its attributes define how it is read."
        )
    check_zarr_output(request.out, overwrite=request.options.overwrite)
    remover, name = load(request.model, request.device)
    _check_trained(remover, notify)
    return clear_zarr(
        request.inputs[0],
        request.out,
        remover,
        replace(request.options, model_name=name),
        mask=request.mask[0] if request.mask else None,
        executor=executor_of(request),
        progress=progress,
        notice=notify,
    )


def layer_name(file: str, report: SceneReport, preview: str | None) -> str:
    """Return what a file beside the output is: "uncertainty", "count", "provenance" or "preview"."""
    if preview is not None and Path(file) == Path(preview):
        return "preview"
    return Path(file).stem.removeprefix(Path(report.output).stem + "_")


def find_sources(request: RemoveRequest, notify: Notice) -> list[DateSource]:
    """Return the dates of a request: files, folders, products, or a search."""
    area = area_of(request)
    if request.stac is None:
        if request.collection is not None:
            raise ConfigError("--collection without a STAC API to choose from: give its address with --stac.")
        if request.load is not None:
            bands = None if request.bands is None else parse_bands(request.bands)
            found: list[DateSource] = [source_from(path, request.load, bands=bands) for path in request.inputs]
        else:
            found = open_sources(
                request.inputs, bands=request.bands, offset=request.offset, scale=request.scale, notice=notify
            )
        found = with_radar(found, request.aux) if request.aux else found
        found = found if area is None else cropped(found, area, notify)
        found = with_masks(found, request.mask, values=request.mask_values, notice=notify)
        return found if request.dates is None else in_period(found, request.dates)
    if request.aux:
        raise ConfigError("--aux names radar for files that are given; it cannot be used with --stac.")
    if request.inputs:
        raise ConfigError(f"--stac searches for scenes, but files are given as well: {', '.join(request.inputs[:3])}.")
    if area is None or request.dates is None:
        raise ConfigError("--stac needs --bbox west,south,east,north (or --aoi) and --dates 2022-03-01/2022-05-31.")
    from sader.geo.stac.search import search

    found = search(
        request.stac, area, request.dates, collection=request.collection, offset=request.offset, notice=notify
    )
    return with_masks(found, request.mask, values=request.mask_values, notice=notify)


def choose_model(sources: Sequence[DateSource], bands: str | Sequence[str] | None, notify: Notice) -> str:
    """Return the shipped model for the bands that all dates have: that of four bands, or that of all where more are.

    bands: those the user named, None for all.
    """
    bands = None if bands is None else parse_bands(bands)
    common = [band for band in sources[0].bands if all(band in source.bands for source in sources)]
    more = [band for band in common if band in BANDS_13 and band not in BANDS_RGBN and (bands is None or band in bands)]
    if not more:
        return DEFAULT_MODEL
    notify(
        f"the model is {ALL_BANDS_MODEL}, because the files have {', '.join(more)} too. For a map of "
        f"{', '.join(BANDS_RGBN)} alone, which is faster: --model {DEFAULT_MODEL}."
    )
    return ALL_BANDS_MODEL


def load_remover(model: str | None, device: str | None = None) -> tuple[CloudRemover, str]:
    """Return the remover of a name, a file or a preset, which is untrained, and its name in results."""
    from sader.models import PRESETS

    name = model or DEFAULT_MODEL
    if device is not None:
        try:
            kind = torch.device(device).type
        except RuntimeError as error:
            raise ConfigError(f"--device is {device!r}; expected cpu, cuda or cuda:0.") from error
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"--device {device}: no CUDA device is available here. Use --device cpu.")
    if name in PRESETS:
        return CloudRemover.from_preset(name, device=device), name
    return CloudRemover.from_pretrained(name, device=device), _shown_name(name)


def _shown_name(name: str) -> str:
    """Return the name of a model in results: a file by its stem, and model.safetensors by the folder of its run."""
    path = Path(name) / HUB_FILE if Path(name).is_dir() else Path(name)
    if not path.is_file():
        return name
    return path.stem if path.stem != "model" else f"{path.resolve().parent.name}/{path.stem}"


def remove_files(
    remover: CloudRemover,
    files: Sequence[str | Path],
    out: str | Path,
    *,
    bands: str | Sequence[str] | None = None,
    offset: str | float | None = "auto",
    mask: str | Path | Sequence[str | Path] | None = None,
    mask_values: str | None = None,
    aux: Sequence[str | Path] = (),
    grid: str | Path | None = None,
    area: str | Path | Sequence[float] | None = None,
    load: LoadFunction | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> SceneReport:
    """Write one clear image of several files as a Cloud Optimized GeoTIFF and return the report.

    files: GeoTIFFs, folders, .SAFE products or STAC items of one place; read and written window by window.
    bands: names where the files have none. offset: "auto", None, or counts such as -1000 (baseline 04.00).
    mask: "scl", "fmask", "qa_pixel", "qa60", "s2cloudless", "omnicloudmask", "head", or mask files; None: those of the
    product, else those of the mask network. mask_values: "2,4", the values of mask files that count as cloud or shadow.
    aux: GeoTIFFs with Sentinel-1 VV and VH in dB, one for all dates or one for each; for models that take radar.
    grid: the output's, as a raster file or "EPSG:32632/20"; None = that of the first file.
    area: (west, south, east, north) in degrees, or a GeoJSON file; None = all of it.
    load: a function path -> (array (C, H, W), rasterio profile) for files of another kind.
    options: the fields of `sader.geo.scene.options.SceneOptions`: reference, seed, samples, uncertainty, overwrite ...
    Notes of `sader remove` are warnings here.

    >>> remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn")                   # doctest: +SKIP
    >>> report = sader.remove_files(remover, ["march.tif", "may.tif"], "clear.tif")     # doctest: +SKIP
    >>> print(report.reference, report.pixels)                                          # doctest: +SKIP
    """

    def notify(text: str) -> None:
        warnings.warn(text, stacklevel=5)

    check_output(out, overwrite=bool(options.get("overwrite")))
    stack, wanted = open_files(
        remover,
        files,
        notify,
        bands=bands,
        offset=offset,
        mask=mask,
        mask_values=mask_values,
        aux=aux,
        grid=grid,
        area=area,
        load=load,
        **options,
    )
    return clear_scene(stack, remover, out, wanted, progress=progress, notice=notify)


def open_files(
    remover: CloudRemover, files: Sequence[str | Path], notify: Notice, *, area: Any = None, **options: Any
) -> tuple[GeoStack, SceneOptions]:
    """Return the stack of some files and the options; arguments as in `remove_files`."""
    if isinstance(files, str | Path):
        raise DataError(f"files is one path ({files}); expected a list of them, one for each date or folder.")
    own = {"inputs": list(files), "out": "", "bbox": area}
    request = RemoveRequest.of({**options, **own}, (*own, *FILE_OPTIONS))
    sources = find_sources(request, notify)
    if request.aux:
        check_radar("this model", remover.config.network.aux_bands)
    return _stack(request, sources, remover, notify), request.scene_options
