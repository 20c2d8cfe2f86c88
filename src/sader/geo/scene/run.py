"""`clear_scene`: a stack of dates in, a Cloud Optimized GeoTIFF out, tile by tile, with bounded memory.

Killed at any moment, the same call continues where it stopped (`sader.geo.scene.resume`). The output appears under its
name only when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from sader._version import __version__
from sader.errors import ClusterError, ConfigError, DataError, OutputError, SaderError, require
from sader.geo.read.raster import close_files, open_raster
from sader.geo.scene.cog import Layer, RowFile, layers_of, make_cog, publish_cog, side_file, writing
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.resume import RowFiles, WorkFolder, describe_source, job_digest
from sader.geo.scene.source import StackScene, check_order, read_overview
from sader.geo.stack import GeoStack
from sader.inference.remover import DEFAULT_MODEL, CloudRemover, default_backend
from sader.inference.scene import GPU_BATCH, Executor, ScenePlan, SceneSource, local_executor, run_rows, warmed_up
from sader.inference.scene_match import Overview, find_reference
from sader.inference.tiling import Notes, Notice, Progress

CACHE_BYTES = 256 * 2**20
"""Block cache of GDAL; its default is a twentieth of the memory, for blocks that are read once."""
HARDLY_CLEAR = 0.01
"""Part of the pixels of a date: below this share in every date the whole result is an estimate."""
WORTH_A_NOTE = 0.0005
"""Part of the scene that no date shows: below this share, printed as 0.0 %, there is no note."""

OpenScene = Callable[[], tuple[StackScene, Overview]]
"""Returns the stack as a source, and its overview; several results of one stack share them (`sader.geo.series`)."""
MakeExecutor = Callable[[ScenePlan, CloudRemover, SceneSource], contextlib.AbstractContextManager[Executor]]
"""Provides the executor of a scene (`sader.geo.xarray.cluster`)."""


@dataclass(frozen=True)
class SceneReport:
    """What was written, from what, and how."""

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
    """0 where the result was complete before."""
    pixels: dict[str, int]
    """nodata, observed, reconstructed"""
    clear_share: tuple[float, ...]
    """Part of the scene that each date shows clearly, measured on the overview."""
    model: str
    steps: str
    seed: int
    samples: int
    seconds: float
    notices: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)

    def layer(self, name: str) -> str | None:
        """Return the file of a layer, such as "provenance"; None where it was not written."""
        file = self.output if name == "result" else str(side_file(Path(self.output), name))
        return file if file in self.files else None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SceneReport:
        """Return the report from the values of `as_dict`."""
        known = {one.name for one in fields(cls)}
        found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known}
        return cls(**found)


Extras = Mapping[Path, Callable[[SceneReport, GeoStack], object]]
"""Files beside the output (preview, STAC item, page) -> function that writes them once the output is complete."""


@dataclass(frozen=True)
class Scene:
    """One scene with everything that its result depends on, before any pixel is read."""

    stack: GeoStack
    remover: CloudRemover
    options: SceneOptions
    target: Path

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The images to write."""
        return layers_of(self.stack.bands, self.stack.coding, self.options, self.stack.sources)

    @property
    def outputs(self) -> dict[str, Path]:
        """Layer -> path."""
        names = [layer.name for layer in self.layers]
        return {name: self.target if name == "result" else side_file(self.target, name) for name in names}

    def job(self) -> dict[str, Any]:
        """Return all that the result depends on."""
        return {
            **job_facts(self.remover, self.options, self.layers),
            "inputs": [describe_source(source) for source in self.stack.sources],
            "grid": asdict(self.stack.grid),
            "bands": self.stack.bands,
        }

    def tags(self, report: SceneReport, digest: str) -> dict[str, str]:
        """Return the metadata of the result."""
        tags = {
            "SADER_VERSION": __version__,
            "SADER_MODEL": report.model,
            "SADER_MODEL_SHA256": self.remover.weights_sha256 or model_checksum(self.remover),
            "SADER_SEED": str(report.seed),
            "SADER_STEPS": report.steps,
            "SADER_SAMPLES": str(report.samples),
            "SADER_REFERENCE": report.reference or "none",
            "SADER_INPUTS": ", ".join(report.dates),
            "SADER_CLEAR_SHARE": ", ".join(f"{share:g}" for share in report.clear_share),
            "SADER_PIXELS": ", ".join(f"{name} {number}" for name, number in report.pixels.items()),
            "SADER_JOB": digest,
            "TIFFTAG_SOFTWARE": f"sader {__version__}",
        }
        date = None if report.reference_index is None else self.stack.sources[report.reference_index].date
        if date is not None:
            tags["ACQUISITION_DATE"] = date.isoformat()
        return tags


def job_facts(remover: CloudRemover, options: SceneOptions, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return all that a result depends on besides its inputs."""
    machine = ("batch_size",)  # does not change the result
    return {
        "version": __version__,
        "model": model_checksum(remover),
        "device": remover.device.type,
        "reference": options.reference,
        "steps": remover.check_numbers(options.steps, options.sample_count, options.seed),
        "seed": options.seed,
        "samples": options.sample_count,
        "layers": [layer.name for layer in layers],
        "remover": {key: value for key, value in asdict(remover.options).items() if key not in machine},
    }


def clear_scene(
    stack: GeoStack,
    remover: CloudRemover,
    out: str | Path,
    options: SceneOptions | None = None,
    *,
    progress: Progress | None = None,
    notice: Notice | None = None,
    executor: MakeExecutor | None = None,
    extras: Extras | None = None,
    opened: OpenScene | None = None,
) -> SceneReport:
    """Remove the clouds of a scene and write it to `out`.

    progress: called with (tiles done, tiles in all). notice: called with messages for the user.
    executor: computes the tiles; None = threads of this process. extras: files that are written beside the output.
    opened: provides the source and the overview of the stack; None: they are read here.
    """
    started, notify = time.perf_counter(), Notes(notice or (lambda text: warnings.warn(text, stacklevel=4)))
    scene = prepared(stack, remover, options or SceneOptions(), check_target(out))
    extras = extras or {}
    job = scene.job()
    done = finished_report(scene, job_digest(job))
    if done is not None and not scene.options.overwrite:
        notify(f"{scene.target} exists already, from the same command and inputs.")
        missing = {path: write for path, write in extras.items() if not path.exists()}
        with contextlib.suppress(OutputError), WorkFolder(scene.target, job) as work:
            work.remove()  # what a killed run could not remove; a folder of others stays
        return _with_extras(done, scene.stack.coded_as(done.reference_index), missing)
    _check_outputs(scene, extras, resumable(scene.target))
    with gdal_cache(), WorkFolder(scene.target, job) as work:
        if work.state.report is None:
            _check_outputs(scene, extras, False)
        if work.note:
            notify(work.note)
        if work.state.report is None:
            try:
                rows, source, overview = _start_rows(scene, work, notify, opened)
                with missing_rows(rows, source, scene.remover, scene.options, executor) as compute:
                    compute(progress=progress)
            except SaderError as error:
                if work.fresh or not _resumable(error, scene):
                    work.remove()
                raise
            del source  # frees the blocks that were read
            names = [source.name for source in stack.sources]
            beside = [path for name, path in scene.outputs.items() if name != "result"]
            report = scene_report(work, rows.plan, overview, scene.remover, scene.options, names=names, beside=beside)
            _make_cogs(scene, work, replace(report, seconds=time.perf_counter() - started), rows.files)
        saved = SceneReport.from_dict(work.state.report or {})
        _publish(scene, work)
        stored = scene.stack.coded_as(saved.reference_index)
        done = _with_extras(replace(saved, notices=notify.texts), stored, extras)
        work.remove()
    return replace(done, seconds=time.perf_counter() - started)


@contextlib.contextmanager
def missing_rows(
    rows: RowFiles, source: SceneSource, remover: CloudRemover, options: SceneOptions, executor: MakeExecutor | None
) -> Iterator[Callable[..., None]]:
    """Yield the function that computes the rows of tiles which the work folder lacks; it takes `progress`."""
    plan, work = rows.plan, rows.work
    rows.prepare()
    if work.state.strips == len(plan.starts):
        yield lambda progress: None
        return
    make = executor or partial(local_executor, threads=options.threads)
    device = remover.device if executor is None else "cpu"
    first, last = work.state.strips, work.unfinished()
    with make(plan, remover, source) as tiles:
        run = partial(run_rows, plan, tiles, rows, options=remover.options, device=device)
        yield partial(run, first=first, unfinished=last)


def prepared(stack: GeoStack, remover: CloudRemover, options: SceneOptions, target: Path) -> Scene:
    """Return the scene with the options of the remover that belong to it."""
    for source in stack.sources:
        if os.path.realpath(target) in {os.path.realpath(path) for path in source.paths}:
            raise OutputError(f"{target} is one of the inputs ({source.name}). Choose another name for the output.")
    return Scene(stack, *checked(remover, options), target)


def checked(remover: CloudRemover, options: SceneOptions) -> tuple[CloudRemover, SceneOptions]:
    """Return the remover and the options as a scene takes them; refuse what the remover cannot do."""
    remover = scene_remover(remover, options)
    if options.samples is None and remover.states_error:
        options = replace(options, samples=1)
    remover.check_numbers(options.steps, options.sample_count, options.seed)
    if options.source_date and not remover.states_source:
        raise ConfigError(
            f"source_date needs a model that weights its dates, and not backend onnx; this is {remover.config.name} "
            f"with backend {remover.options.backend}. Use {DEFAULT_MODEL} with backend torch."
        )
    return remover, options


def scene_remover(remover: CloudRemover, options: SceneOptions) -> CloudRemover:
    """Return the remover with the tiles, masks and backend of a scene."""
    own = remover.options
    changes = {key: value for key, value in vars(options).items() if key in vars(own) and value is not None}
    if options.tile is not None and options.overlap is None:
        changes["overlap"] = min(own.overlap, options.tile // 4)
    if options.batch_size is None and own.batch_size == 1 and remover.device.type != "cpu":
        changes["batch_size"] = GPU_BATCH
    if options.backend is None and own.backend == "torch":
        changes["backend"] = default_backend(remover.device)
    return remover.with_options(**changes)


def open_scene(stack: GeoStack, remover: CloudRemover) -> tuple[StackScene, Overview]:
    """Return the stack as a source of the scene loop, and its overview."""
    source = StackScene.of(stack, remover.config.network.aux_bands)
    return source, read_overview(stack, remover, source)


def _start_rows(
    scene: Scene, work: WorkFolder, notice: Notice, opened: OpenScene | None
) -> tuple[RowFiles, StackScene, Overview]:
    """Read the overview, choose the reference date and match the dates to it; return the files of rows as well."""
    stack, remover, options = scene.stack, scene.remover, scene.options
    plan = ScenePlan.of(
        remover,
        stack.grid.shape,
        stack.bands,
        stack.codings,
        stack.days,
        steps=options.steps,
        seed=options.seed,
        samples=options.sample_count,
        spread=options.needs_spread or remover.options.max_uncertainty is not None,
        sources=options.source_date,
    )
    with contextlib.ExitStack() as until_matched:
        if opened is None:
            source = StackScene.of(stack, remover.config.network.aux_bands)
            until_matched.enter_context(warmed_up(plan, remover, source))
            overview = read_overview(stack, remover, source)
        else:
            source, overview = opened()
        reference = choose_reference(options, stack, overview, notice)
        for doubt in check_order([source.name for source in stack.sources], stack.bands, overview):
            notice(doubt)
        match = overview.match(remover, reference, stack.grid.shape)
    if (overview.clear_share <= HARDLY_CLEAR * overview.valid.mean(axis=(1, 2))).all():
        notice(
            f"clouds hide {1 - HARDLY_CLEAR:.0%} or more of every date, so the whole result is an estimate. If the "
            "images look clear, check their scale and offset (--scale, --offset), or give masks (--mask)."
        )
    elif opened is None and reference is not None and overview.shows_nothing(reference):
        notice(
            f"clouds hide all of {stack.sources[reference].name}: the result shows the ground as the other dates do, "
            "in the radiometry of the clearest of them."
        )
    elif (
        remover.options.min_count == 0
        and (unseen := overview.unseen_share(remover.options.cloud_threshold)) > WORTH_A_NOTE
    ):
        notice(
            f"no date shows {unseen:.1%} of the scene clearly: it is filled from its surroundings there. --min-count 1 "
            "writes nodata instead, --count shows where."
        )
    dates = tuple(range(len(stack.sources)))
    every = options.count or options.save_masks or remover.options.min_count
    clouds = dates if every else () if reference is None else (reference,)
    plan = replace(plan, reference=reference, match=match, clouds=clouds)
    # The stored numbers of the reference date are copied where they lie on the grid of the result.
    same_grid = reference is not None and stack.sources[reference].grid.same_as(stack.grid)
    own = plan.codings[reference] if reference is not None and same_grid else ()
    layers = replace(scene, stack=stack.coded_as(reference)).layers
    return RowFiles(work, layers, stack.grid, plan, remover.options.cloud_threshold, own), source, overview


def scene_report(
    work: WorkFolder,
    plan: ScenePlan,
    overview: Overview,
    remover: CloudRemover,
    options: SceneOptions,
    *,
    names: Sequence[str],
    beside: Sequence[Path] = (),
) -> SceneReport:
    """Return the report of finished rows. names: of the dates; beside: files that are written beside the output."""
    steps = remover.check_numbers(options.steps, options.sample_count, options.seed)
    return SceneReport(
        output=str(work.output),
        files=(str(work.output), *map(str, beside)),
        reference=None if plan.reference is None else names[plan.reference],
        reference_index=plan.reference,
        dates=tuple(names),
        bands=plan.bands,
        size=plan.shape,
        tiles=len(plan.windows),
        pixels=work.pixels,
        clear_share=tuple(round(float(share), 4) for share in overview.clear_share),
        model=options.model_name or remover.config.name,
        steps="+".join(map(str, steps)).removesuffix("+0"),
        seed=options.seed,
        samples=options.sample_count,
        seconds=0.0,
    )


def choose_reference(options: SceneOptions, stack: GeoStack, overview: Overview, notice: Notice) -> int | None:
    """Return the date to clean, None for a new image."""
    names = [source.name for source in stack.sources]
    days = [source.day for source in stack.sources]
    reference = find_reference(options.reference, names, overview, days=days)
    if reference is not None and not stack.sources[reference].grid.same_as(stack.grid):
        notice(
            f"{names[reference]} lies on another grid than the output: its pixels are interpolated, not copied bit "
            "for bit."
        )
    return reference


# ------------------------------------------------------------------------------------------------ publication


def _make_cogs(scene: Scene, work: WorkFolder, report: SceneReport, files: Sequence[RowFile]) -> None:
    """Make the COGs in the work folder and record the report: from here on files are published."""
    tags = scene.tags(report, work.digest)
    for rows in files:
        make_cog(rows, tags=tags)
    work.state.report = report.as_dict()
    work.save()


def _publish(scene: Scene, work: WorkFolder) -> None:
    """Move the COGs to their names, the output last: where it exists, the layers beside it do too."""
    with writing(scene.target):
        for name, path in sorted(scene.outputs.items(), key=lambda pair: pair[0] == "result"):
            publish_cog(work.path / f"{name}.tif", path)


def _with_extras(report: SceneReport, stack: GeoStack, extras: Extras) -> SceneReport:
    for path, write in extras.items():
        write(report, stack)
        report = replace(report, files=(*report.files, str(path)))
    return report


def check_target(out: str | Path) -> Path:
    """Return the path of the output; refuse now what cannot be written later."""
    target = Path(out)
    if target.suffix.lower() not in (".tif", ".tiff"):
        raise OutputError(f"the output is {target}; expected a name that ends in .tif.")
    check_folder(target)
    return target


def check_folder(target: Path) -> None:
    """Refuse a file whose folder cannot be written to, or whose name is a folder or a link that leads nowhere."""
    if re.match(r"[a-z0-9]{2,}:/|/vsi[a-z0-9]+/", str(target)):  # a Path has one slash for two
        raise OutputError(
            f"the output is {target}; one scene is written to a local file. On object storage: --scenes with a list."
        )
    if target.is_dir():
        raise OutputError(f"{target} is a folder; expected the name of a file.")
    if target.is_symlink() and not target.exists():
        raise OutputError(f"{target} is a link that leads nowhere; expected the name of a file. Remove the link.")
    try:
        str(target).encode("utf-8")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):  # without a name, so that nothing is left after a kill
            pass
    except UnicodeEncodeError as error:
        raise OutputError(f"the name {target} is not valid UTF-8, which GDAL needs. Choose another name.") from error
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"cannot write into {target.parent}: {reason}. Choose another folder.") from error


def check_output(out: str | Path, *, overwrite: bool) -> Path:
    """Return the path of the output; refuse one that exists and cannot be of the same job."""
    target = check_target(out)
    if target.exists() and not overwrite and job_of(target) is None and not resumable(target):
        raise OutputError(f"{target} exists. Use --overwrite to replace it, or choose another name.")
    return target


def resumable(target: Path) -> bool:
    """Whether an earlier run left its work folder: existing files may then be its own."""
    return (target.with_name(f".{target.name}.sader") / "state.json").is_file()


def _check_outputs(scene: Scene, extras: Extras, may_be_own: bool) -> None:
    """Refuse files that exist, unless they may be replaced."""
    for path in extras:
        check_folder(path)
    if scene.options.overwrite or may_be_own:
        return
    for path in (*scene.outputs.values(), *extras):
        if path.exists():
            raise OutputError(f"{path} exists. Use --overwrite to replace it, or choose another name.")


def job_of(path: Path | str) -> str | None:
    """Return the checksum of the job that wrote a file; None for other files."""
    try:
        with open_raster(path) as dataset:
            found: str | None = dataset.tags().get("SADER_JOB")
            return found
    except (SaderError, OSError, require("rasterio.errors", extra="geo", purpose="reading GeoTIFF").RasterioError):
        return None


def finished_report(scene: Scene, digest: str) -> SceneReport | None:
    """Return the report of a complete result of the same job, read from its tags; None where there is none."""
    if resumable(scene.target) or not all(path.exists() for path in scene.outputs.values()):
        return None
    if any(job_of(path) != digest for path in scene.outputs.values()):
        return None
    with open_raster(scene.target) as dataset:
        tags = dataset.tags()
    names = [source.name for source in scene.stack.sources]
    reference = tags["SADER_REFERENCE"]
    pairs = [pair.rsplit(" ", 1) for pair in tags["SADER_PIXELS"].split(", ")]
    return SceneReport(
        output=str(scene.target),
        files=(str(scene.target), *(str(path) for name, path in scene.outputs.items() if name != "result")),
        reference=None if reference == "none" else reference,
        reference_index=names.index(reference) if reference in names else None,
        dates=tuple(names),
        bands=scene.stack.bands,
        size=scene.stack.grid.shape,
        tiles=0,
        pixels={name: int(number) for name, number in pairs},
        clear_share=tuple(float(share) for share in tags["SADER_CLEAR_SHARE"].split(", ")),
        model=tags["SADER_MODEL"],
        steps=tags["SADER_STEPS"],
        seed=int(tags["SADER_SEED"]),
        samples=int(tags["SADER_SAMPLES"]),
        seconds=0.0,
    )


def _resumable(error: SaderError, scene: Scene) -> bool:
    """Whether the same command could succeed later: after a full disk, a lost cluster, or a network failure.

    A damaged local file must be replaced, and then the job is a different one; so it is with other options.
    """
    if isinstance(error, OutputError | ClusterError):
        return True
    remote = any(path.startswith("/vsi") for source in scene.stack.sources for path in source.paths)
    return isinstance(error, DataError) and (remote or any(not source.paths for source in scene.stack.sources))


@contextlib.contextmanager
def gdal_cache() -> Iterator[None]:
    """Bound the block cache of GDAL, and close the files that this thread has opened."""
    with require("rasterio", extra="geo", purpose="reading GeoTIFF").Env(GDAL_CACHEMAX=CACHE_BYTES):
        try:
            yield
        finally:
            close_files()


def model_checksum(remover: CloudRemover) -> str:
    """Return the SHA-256 of all weights in memory, which identifies a model that no file holds."""
    digest = hashlib.sha256()
    for name, value in sorted(remover.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
