"""`clear_scene`: a stack of dates in, a Cloud Optimized GeoTIFF out, tile by tile, with memory that does not grow.

Tiles are read ahead by one thread, predicted, kept in the work folder; when a row of tiles is complete its rows are
blended, finished and written (`geo.scene.tiles`). Killed at any moment, the same call goes on from there. The output
appears under its name only when it is whole.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sader.errors import ConfigError, DataError, OutputError, SaderError, require
from sader.geo.scene.options import SceneOptions, layers_of, side_file
from sader.geo.scene.overview import Look, find_reference, take_look
from sader.geo.scene.resume import WorkFolder, describe_source
from sader.geo.scene.rows import NODATA, OBSERVED, RECONSTRUCTED
from sader.geo.scene.tiles import GPU_BATCH, Notice, SceneJob, TileMaker
from sader.geo.scene.warmup import WarmUp
from sader.geo.stack import GeoStack
from sader.geo.values import for_network
from sader.inference.options import default_backend
from sader.inference.remover import CloudRemover
from sader.inference.scene_match import SceneMatch
from sader.inference.tiling import Progress

__all__ = [
    "NODATA",
    "OBSERVED",
    "RECONSTRUCTED",
    "Notice",
    "SceneJob",
    "SceneOptions",
    "SceneReport",
    "TileMaker",
    "check_output",
    "clear_scene",
    "side_file",
]


CACHE_BYTES = 256 * 2**20
HARDLY_CLEAR = 0.01
"""Part of a date's pixels: where no date shows more than this clearly, everything is guessed."""


@dataclass(frozen=True)
class SceneReport:
    """What was done."""

    output: str
    files: tuple[str, ...]
    """All files written, the output first."""
    reference: str | None
    """Name of the date that was cleaned."""
    reference_index: int | None
    dates: tuple[str, ...]
    bands: tuple[str, ...]
    size: tuple[int, int]
    """(height, width)"""
    tiles: int
    pixels: dict[str, int]
    """nodata, observed, reconstructed"""
    clear_share: tuple[float, ...]
    """Part of the scene each date shows clearly, from afar."""
    model: str
    steps: str
    seed: int
    samples: int
    seconds: float
    notices: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)


def clear_scene(
    stack: GeoStack,
    remover: CloudRemover,
    out: str | Path,
    options: SceneOptions | None = None,
    *,
    progress: Progress | None = None,
    notice: Notice | None = None,
    maker: TileMaker | None = None,
) -> SceneReport:
    """Remove the clouds of a scene and write it to `out`; see `SceneOptions`.

    progress: called with (tiles done, tiles in all); notice: with what the user should know.
    maker: makes the tiles somewhere else (`sader.geo.xarray.cluster`); None = here.
    """
    options = options or SceneOptions()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (notice or (lambda text: warnings.warn(text, stacklevel=3)))(text)

    target = check_output(out, overwrite=options.overwrite)
    for layer in layers_of(stack, options)[1:]:
        check_output(side_file(target, layer.name), overwrite=options.overwrite)
    remover = retiled(remover, options)
    if maker is None:  # other machines have their own way
        remover = with_backend(remover, options)
    if options.samples is None and remover.states_error:
        options = replace(options, samples=1)  # such a network states its error itself
    steps = remover.check_numbers(options.steps, options.sample_count, options.seed)
    started = time.perf_counter()
    with modest_cache():
        warm = WarmUp(
            stack, remover, steps=options.steps, samples=options.sample_count, wanted=None if maker is None else False
        )
        try:
            look = take_look(stack, remover, ready=warm.wait)
        except Exception:
            warm.wait()  # a thread that computes on a GPU must not meet the end of the program
            raise
        reference = _reference(options, stack, look, remover, say)
        stack = replace(stack, coding=stack.sources[reference or 0].coding)
        check_not_input(target, stack)
        job = SceneJob(stack, remover, options, reference, target, maker, scene_match(stack, look, remover, reference))
        with WorkFolder(target, job.description()) as work:
            if work.note:
                strips = f" ({work.strips} of {len(job.starts)} strips of rows are done)" if work.strips else ""
                say(work.note + strips)
            if (look.clear_share <= HARDLY_CLEAR * look.valid.mean(axis=(1, 2))).all():
                say(
                    f"clouds hide {1 - HARDLY_CLEAR:.0%} of every date and more, so the result is a guess. If the "
                    "images look clear, check their scale and offset (--scale, --offset), or give masks (--mask)."
                )
            try:
                files = job.run(work, progress, say)
            except SaderError as error:
                if not _may_go_on(error, job):
                    work.remove()
                raise
            pixels = dict(work.counts)
            work.remove()
    return SceneReport(
        output=str(target),
        files=tuple(str(path) for path in files),
        reference=None if reference is None else stack.sources[reference].name,
        reference_index=reference,
        dates=tuple(source.name for source in stack.sources),
        bands=stack.bands,
        size=stack.grid.shape,
        tiles=len(job.windows),
        pixels=pixels,
        clear_share=tuple(round(float(share), 4) for share in look.clear_share),
        model=options.model_name or remover.config.name,
        steps="+".join(str(number) for number in steps).removesuffix("+0"),
        seed=options.seed,
        samples=options.sample_count,
        seconds=time.perf_counter() - started,
        notices=tuple(said),
    )


@contextmanager
def modest_cache() -> Iterator[None]:
    """Keep GDAL from taking a twentieth of the machine's memory for blocks that are read once."""
    with require("rasterio", extra="geo", purpose="reading GeoTIFF").Env(GDAL_CACHEMAX=CACHE_BYTES):
        yield


def check_not_input(target: Path, stack: GeoStack) -> None:
    """Refuse to replace a file that the result is made from."""
    for source in stack.sources:
        if str(target.resolve()) in {os.path.realpath(path) for path in describe_source(source).get("files", ())}:
            raise OutputError(f"{target} is one of the inputs ({source.name}). Choose another name for the output.")


def _may_go_on(error: SaderError, job: SceneJob) -> bool:
    """Whether the same command could succeed later: a full disk can be helped, and so can a network that failed.

    A file on disk that cannot be read must be replaced, which makes another job of it; so does another option.
    """
    if isinstance(error, OutputError):
        return True
    return isinstance(error, DataError) and any("files" not in one for one in job.description()["inputs"])


def scene_match(stack: GeoStack, look: Look, remover: CloudRemover, reference: int | None) -> SceneMatch | None:
    """Return how the dates are brought into one light; None where one tile sees all, or the model matches no dates."""
    return remover.scene_match(
        for_network(look.cloudy), valid=look.valid, cloud=look.cloud, reference=reference, shape=stack.grid.shape
    )


def check_output(out: str | Path, *, overwrite: bool) -> Path:
    """Return the output's path; refuse now what cannot be written later."""
    target = Path(out)
    if target.suffix.lower() not in (".tif", ".tiff"):
        raise OutputError(f"the output is {target}; expected a name that ends in .tif.")
    if target.is_dir():
        raise OutputError(f"{target} is a folder; expected the name of a file.")
    if target.exists() and not overwrite:
        raise OutputError(f"{target} exists. Use --overwrite to replace it, or choose another name.")
    probe = target.with_name(f".{target.name}.{os.getpid()}.probe")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"cannot write into {target.parent}: {reason}. Choose another folder.") from error
    return target


def retiled(remover: CloudRemover, options: SceneOptions) -> CloudRemover:
    """Return the remover with what the scene's options say of tiles and masks."""
    batch = options.batch_size
    if batch is None and remover.device.type != "cpu" and remover.options.batch_size == 1:
        batch = GPU_BATCH
    asked = {
        "tile": options.tile, "overlap": options.overlap, "batch_size": batch,
        "cloud_threshold": options.cloud_threshold, "mask_growth": options.mask_growth,
    }  # fmt: skip
    changes: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    if options.tile is not None and options.overlap is None:
        changes["overlap"] = min(remover.options.overlap, options.tile // 4)
    return remover.with_options(**changes)


def with_backend(remover: CloudRemover, options: SceneOptions) -> CloudRemover:
    """Return the remover with the backend of the options, or the default one of its device."""
    return remover.with_options(backend=options.backend or default_backend(remover.device))


def _reference(options: SceneOptions, stack: GeoStack, look: Look, remover: CloudRemover, say: Notice) -> int | None:
    """Return the date to clean; say what was chosen and what it means."""
    reference = find_reference(options.reference, stack, look)
    if reference is None:
        return None
    name = stack.sources[reference].name
    if np.isnan(look.cloud[reference]).any() and not remover.matches_dates:
        if options.reference == "auto":
            say("this model has no cloud head and no mask is given, so no date can be cleaned: a new image is made.")
            return None
        raise ConfigError(
            f"--reference {options.reference} keeps the clear pixels of {name}, but its cloud mask is unknown and this "
            "model has no cloud head. Give --mask, or use --reference none."
        )
    if look.valid[reference].any():
        if not stack.sources[reference].grid.same_as(stack.grid):
            say(f"{name} lies on another grid than the output: its pixels are interpolated, not copied bit for bit.")
        return reference
    raise DataError(f"--reference {name} has no valid pixel on the output grid. Choose another date.")
