"""`sader remove` without the shell: open the inputs, load the model, clear the scene, write what goes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sader.bands import BANDS_13, BANDS_RGBN, parse_bands
from sader.errors import ConfigError, OutputError
from sader.geo.offset import check_source
from sader.geo.read.sources import open_sources
from sader.geo.stack import DateSource

if TYPE_CHECKING:
    from sader.geo.scene.run import SceneOptions, SceneReport
    from sader.inference.remover import CloudRemover
    from sader.inference.tiling import Progress

    Loader = Callable[[str | None, str | None], tuple[CloudRemover, str]]

ALL_BANDS_MODEL = "sader-s2-msi"
"""Shipped weights for scenes with more than `BANDS_RGBN`; it goes without those that a scene has not."""
SMALL_TILE = 64
"""Edge in pixels below which tiles are too small to be meant."""


@dataclass(frozen=True)
class RemoveRequest:
    """What `sader remove` was asked for."""

    inputs: tuple[str, ...]
    out: str
    options: SceneOptions
    bands: str | None = None
    """A preset or names with commas between them."""
    offset: str = "auto"
    scale: float | None = None
    """Reflectance per count, where the file does not say or is wrong."""
    mask: tuple[str, ...] = ()
    """What `sader.geo.read.masks.with_masks` takes: one word, or files."""
    grid: str | None = None
    model: str | None = None
    device: str | None = None
    preview: str | None = None
    report: str | None = None
    """An HTML page about the run; provenance, and uncertainty where it costs nothing, are then written as well."""
    item: bool = True
    """Write a STAC item beside the output."""
    dask: str | None = None
    stac: str | None = None
    bbox: str | None = None
    dates: str | None = None
    collection: str | None = None


def run_remove(
    request: RemoveRequest,
    *,
    load: Loader | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> SceneReport:
    """Remove the clouds and return the report; every problem of the input is found before the long work.

    load: returns the remover of (model, device) and its name, such as one from a cache; default `load_remover`.
    """
    load = load or load_remover
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if notice is not None:
            notice(text)

    from sader.figures.html import check_page
    from sader.geo.align import build_stack
    from sader.geo.scene.preview import check_preview, write_preview
    from sader.geo.scene.run import check_output, clear_scene

    if any(Path(given).suffix.lower() == ".zarr" for given in request.inputs):
        return _remove_zarr(request, load, progress, say)
    check_output(request.out, overwrite=request.options.overwrite)
    if request.preview is not None:
        check_preview(request.preview)
    if request.report is not None:
        check_page(request.report, overwrite=request.options.overwrite)
    beside = Path(request.out).with_suffix(".json")
    if request.item and beside.exists() and not request.options.overwrite:
        raise OutputError(f"{beside} exists. Use --overwrite to replace it, or --no-item to write no STAC item.")
    sources = find_sources(request, say)
    asked = None if request.bands is None else parse_bands(request.bands)
    remover, name = load(request.model or choose_model(sources, asked, say), request.device)
    request = replace(request, options=replace(request.options, model_name=name))
    if request.report is not None:
        request = replace(request, options=_with_layers(request.options, remover))
    if not remover.card.get("trained", True):
        say(f"the model {name} is untrained: the result shows that everything runs, not how good the method is.")
    if request.options.tile is not None and request.options.tile < SMALL_TILE:
        say(
            f"tiles of {request.options.tile} pixels show the model too little of the place: clouds are missed, and it "
            "takes long. 256 or more are better; memory is bounded anyway."
        )
    stack = build_stack(sources, remover.config.network, bands=asked, grid=request.grid, notice=say)
    if doubt := few_bands(remover, stack.bands):
        say(doubt)
    for source in stack.sources:
        warning = check_source(source)
        if warning:
            say(warning)
    if request.dask is not None:
        from sader.geo.xarray.lazy import clear_stack_on_dask

        report = clear_stack_on_dask(
            stack, remover, request.out, request.options, address=request.dask, progress=progress, notice=say
        )
    else:
        report = clear_scene(stack, remover, request.out, request.options, progress=progress, notice=say)
    # What was written is stored like the cleaned date, which need not be the first.
    stack = replace(stack, coding=stack.sources[report.reference_index or 0].coding)
    files = list(report.files)
    if request.preview is not None:
        files.append(str(write_preview(request.preview, stack, report)))
    if request.item:
        from sader.geo.stac.write import write_item

        reference = None if report.reference_index is None else stack.sources[report.reference_index]
        item = write_item(
            report.output,
            sources=stack.sources,
            reference=reference,
            assets={layer_name(file, report, request.preview): file for file in files[1:]},
            processing={
                "sader:model": report.model,
                "sader:seed": report.seed,
                "sader:steps": report.steps,
                "sader:samples": report.samples,
            },
            coding=stack.coding,
        )
        files.append(str(item))
    report = replace(report, files=tuple(files), notices=tuple(dict.fromkeys(said)))
    if request.report is not None:
        from sader.geo.scene.report import write_scene_report

        page = write_scene_report(request.report, stack, report, remover, settings=_settings(request))
        report = replace(report, files=(*files, str(page)))
    return report


def _with_layers(options: SceneOptions, remover: CloudRemover) -> SceneOptions:
    """Return the options with the layers a report shows; uncertainty only where it takes no further samples."""
    free = remover.states_error or (options.samples or 1) > 1
    return replace(options, provenance=True, uncertainty=options.uncertainty or free)


def _settings(request: RemoveRequest) -> dict[str, object]:
    """Return what was asked for, as a reader would write it."""
    options = request.options
    return {
        "reference": options.reference, "bands": request.bands or "those of the model", "offset": request.offset,
        "scale": request.scale or "what the files say", "mask": request.mask or "what the files bring, else the model",
        "grid": request.grid or "that of the first input", "tile": options.tile or "the model's own",
        "overlap": options.overlap or "the model's own", "search": request.stac, "area": request.bbox,
        "period": request.dates,
    }  # fmt: skip


def _remove_zarr(
    request: RemoveRequest, load: Loader, progress: Progress | None, say: Callable[[str], None]
) -> SceneReport:
    """Remove the clouds of a cube in a Zarr store; --mask names a variable of it."""
    from sader.geo.xarray.zarr import check_zarr_output, clear_zarr

    if len(request.inputs) > 1 or len(request.mask) > 1:
        raise ConfigError(
            "a Zarr store holds all dates of a place: give one, and at most one --mask (a variable of it)."
        )
    asked = {"--bands": request.bands, "--grid": request.grid, "--scale": request.scale, "--preview": request.preview,
             "--report": request.report}  # fmt: skip
    unused = [name for name, value in asked.items() if value is not None]
    if unused:
        raise ConfigError(f"{', '.join(unused)} does not go with a Zarr store: its own attributes say how to read it.")
    check_zarr_output(request.out, overwrite=request.options.overwrite)
    remover, name = load(request.model, request.device)
    if not remover.card.get("trained", True):
        say(f"the model {name} is untrained: the result shows that everything runs, not how good the method is.")
    return clear_zarr(
        request.inputs[0], request.out, remover, request.options, mask=request.mask[0] if request.mask else None,
        address=request.dask, progress=progress, notice=say,
    )  # fmt: skip


def layer_name(file: str, report: SceneReport, preview: str | None) -> str:
    """Return what a file beside the output is: "uncertainty", "count", "provenance" or "preview"."""
    if preview is not None and Path(file) == Path(preview):
        return "preview"
    return Path(file).stem.removeprefix(Path(report.output).stem + "_")


def find_sources(request: RemoveRequest, say: Callable[[str], None]) -> list[DateSource]:
    """Return the dates of a request: files, folders, products, or a search."""
    if request.stac is None:
        asked = {"--bbox": request.bbox, "--dates": request.dates, "--collection": request.collection}
        if named := [name for name, value in asked.items() if value is not None]:
            raise ConfigError(f"{' and '.join(named)} without a STAC API to choose from: give its address with --stac.")
        return open_sources(
            request.inputs,
            bands=request.bands,
            offset=request.offset,
            scale=request.scale,
            mask=_mask(request),
            notice=say,
        )
    if request.inputs:
        raise ConfigError(f"--stac searches for scenes, but files are given as well: {', '.join(request.inputs[:3])}.")
    if request.bbox is None or request.dates is None:
        raise ConfigError("--stac needs --bbox west,south,east,north and --dates 2022-03-01/2022-05-31.")
    from sader.geo.read.masks import with_masks
    from sader.geo.stac.search import search

    found = search(
        request.stac, request.bbox, request.dates, collection=request.collection, offset=request.offset, notice=say
    )
    return with_masks(found, _mask(request), notice=say)


def _mask(request: RemoveRequest) -> str | list[str] | None:
    if not request.mask:
        return None
    return request.mask[0] if len(request.mask) == 1 else list(request.mask)


def choose_model(sources: Sequence[DateSource], bands: Sequence[str] | None, say: Callable[[str], None]) -> str:
    """Return the shipped model for the bands that all dates have: that of four bands, or that of all where more are.

    bands: those the user named, None for all.
    """
    from sader.inference.remover import DEFAULT_MODEL

    common = [band for band in sources[0].bands if all(band in source.bands for source in sources)]
    more = [band for band in common if band in BANDS_13 and band not in BANDS_RGBN and (bands is None or band in bands)]
    if not more:
        return DEFAULT_MODEL
    say(
        f"the model is {ALL_BANDS_MODEL}, because the files have {', '.join(more)} too. For a map of "
        f"{', '.join(BANDS_RGBN)} alone, which is faster: --model {DEFAULT_MODEL}."
    )
    return ALL_BANDS_MODEL


def few_bands(remover: CloudRemover, bands: Sequence[str]) -> str | None:
    """Return what to say where a scene has too few of a model's bands for its own cloud masks, or None."""
    from sader.inference.masks import ENOUGH_BANDS, FALLBACK_MODEL

    known = [band in bands for band in remover.bands]
    few = f"with {sum(known)} of its {len(known)} bands"
    if remover.uses_fallback_masks(known):
        return f"{few} the model finds clouds badly: where no masks are, {FALLBACK_MODEL} finds them."
    if remover.finds_clouds and len(known) > len(BANDS_RGBN) and sum(known) < ENOUGH_BANDS * len(known):
        return f"{few} the model finds clouds badly: give masks (--mask) where the files bring none."
    return None


def load_remover(model: str | None, device: str | None = None) -> tuple[CloudRemover, str]:
    """Return the remover and the name it goes by; a preset is untrained."""
    import torch

    from sader.inference.remover import DEFAULT_MODEL, CloudRemover
    from sader.presets import PRESETS

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
    """Return what results call a model: a file by its name; all runs call theirs model.safetensors, so by the run."""
    from sader.checkpoint import HUB_FILE

    path = Path(name) / HUB_FILE if Path(name).is_dir() else Path(name)
    if not path.is_file():
        return name
    return path.stem if path.stem != "model" else f"{path.resolve().parent.name}/{path.stem}"
