"""`sader series`: every date of a stack in turn is the reference date, and is written without clouds.

The dates are those of `sader remove --reference DATE` on the same inputs, bit for bit: one scene loop writes both. The
source with its block cache, the overview and the masks of detectors are shared by all dates. The model's own masks are
computed for every date, because they are refined for the reference date.

A killed series continues where it stopped: finished dates are recognised by the checksum of their job, the unfinished
one by its work folder (`sader.geo.scene.resume`).
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from sader._version import __version__
from sader.errors import ConfigError, OutputError, require
from sader.geo.remove import (
    Loader,
    RemoveRequest,
    executor_of,
    load_remover,
    open_files,
    open_request,
    write_scene_item,
)
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.resume import job_digest
from sader.geo.scene.run import (
    Extras,
    MakeExecutor,
    Scene,
    SceneReport,
    clear_scene,
    finished_report,
    open_scene,
    prepared,
    resumable,
    scene_remover,
)
from sader.geo.scene.source import StackScene, overview_masks, overview_of
from sader.geo.stack import GeoStack
from sader.inference.remover import CloudRemover
from sader.inference.scene import Overview
from sader.inference.tiling import Notes, Notice, Progress, plan_windows

MANY_DATES = 12
"""A series of more dates is recommended to be cleaned with the nearest ones."""


@dataclass(frozen=True)
class SeriesReport:
    """What was written."""

    output: str
    scenes: tuple[SceneReport, ...]
    """One for each date, in the order of the inputs."""
    files: tuple[str, ...]
    """Files of the whole series: collection or Zarr store, animation, points."""
    seconds: float
    notices: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)


def run_series(
    request: RemoveRequest,
    *,
    nearest: int | None = None,
    animation: str | None = None,
    points: Sequence[str] = (),
    progress: Progress | None = None,
    notice: Notice | None = None,
    load: Loader | None = None,
) -> SeriesReport:
    """Clean every date of a request, whose `out` is a folder or a .zarr store; see `clean_series`."""
    if any(Path(given).suffix.lower() == ".zarr" for given in request.inputs):
        raise ConfigError(
            "sader series reads files; expected GeoTIFFs, folders, .SAFE products or STAC items. For a Zarr store: "
            'sader.remove_xarray(remover, cube, reference="each").'
        )
    notify = Notes(notice)
    _check_folder(Path(request.out))
    stack, remover, options = open_request(request, load or load_remover, notify)
    series = Series(stack, scene_remover(remover, options), options, Path(request.out), nearest, executor_of(request))
    return series.run(animation, points, progress, notify)


def clean_series(
    remover: CloudRemover,
    files: Sequence[str | Path],
    out: str | Path,
    *,
    nearest: int | None = None,
    animation: str | Path | None = None,
    points: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Any,
) -> SeriesReport:
    """Write every date of several files without clouds and return the report; a killed call is continued by the same.

    out: a folder, which receives one Cloud Optimized GeoTIFF and STAC item for each date and a STAC collection, or a
    name that ends in .zarr, which receives a cube (time, band, y, x).
    nearest: clean each date with this many dates nearest in time; None = all dates.
    animation: a GIF of all dates before and after. points: "longitude,latitude" of places whose NDVI before and after
    is written as points.csv and points.png.
    options: the other arguments of `sader.remove_files`, without `reference`: bands, mask, area, uncertainty ...

    >>> report = sader.clean_series(remover, ["2022/"], "clean/", points=["7.71,46.02"])      # doctest: +SKIP
    """
    if "reference" in options:
        raise ConfigError("a series cleans every date in turn; to clean one date: sader.remove_files(reference=...).")
    notify = Notes(lambda text: warnings.warn(text, stacklevel=5))
    _check_folder(Path(out))
    stack, wanted = open_files(remover, files, notify, **options)
    series = Series(stack, scene_remover(remover, wanted), wanted, Path(out), nearest)
    return series.run(None if animation is None else str(animation), points, progress, notify)


@dataclass(frozen=True)
class Series:
    """The dates of a stack, and where they are written without clouds."""

    stack: GeoStack
    remover: CloudRemover
    options: SceneOptions
    out: Path
    nearest: int | None = None
    executor: MakeExecutor | None = None

    @property
    def is_zarr(self) -> bool:
        return self.out.suffix.lower() == ".zarr"

    @property
    def folder(self) -> Path:
        """The folder of the GeoTIFFs: the output, or for a Zarr store a folder beside it that is removed in the end."""
        return self.out.with_name(f".{self.out.name}.dates") if self.is_zarr else self.out

    @cached_property
    def targets(self) -> tuple[Path, ...]:
        """One GeoTIFF for each date, named by the day, or by the input where days are unknown or repeated."""
        days = [one.day for one in self.stack.sources]
        names = [one.name.replace("\\", "/").replace("/", "_") for one in self.stack.sources]
        stems = [
            day if day is not None and days.count(day) == 1 else f"{Path(name).stem}_clear"
            for day, name in zip(days, names, strict=True)
        ]
        if len(set(stems)) < len(stems):
            stems = [f"{number:03d}_{stem}" for number, stem in enumerate(stems)]
        return tuple(self.folder / f"{stem}.tif" for stem in stems)

    @cached_property
    def opened(self) -> tuple[StackScene, Overview]:
        """Source and overview of all dates, read once."""
        return open_scene(self.stack, self.remover)

    def dates_for(self, date: int) -> list[int]:
        """Return the dates that one is cleaned with, in the order of the stack."""
        count, days = len(self.stack.sources), self.stack.days
        if self.nearest is None or self.nearest >= count - 1:
            return list(range(count))
        if days is None:
            unknown = next(source.name for source in self.stack.sources if source.date is None)
            raise ConfigError(f"nearest needs the date of every input; that of {unknown} is unknown.")
        order = sorted(range(count), key=lambda other: (abs(days[other] - days[date]), other != date, days[other]))
        return sorted(order[: self.nearest + 1])

    def open_part(self, part: GeoStack, dates: list[int]) -> tuple[StackScene, Overview]:
        """Return source and overview of some dates, whose stack is `part`."""
        source, overview = self.opened
        if len(dates) == len(self.stack.sources):
            return source, overview
        return (
            StackScene.of(part, self.remover.config.network.aux_bands),
            overview_of(part, self.remover, overview.cloudy[dates], overview.valid[dates], overview_masks(part)),
        )

    def run(
        self, animation: str | None, points: Sequence[str], progress: Progress | None, notify: Notes
    ) -> SeriesReport:
        """Clean all dates and write the files of the whole series."""
        started = time.perf_counter()
        from sader.geo.scene.report import animate, find_pixels, write_points

        pixels = find_pixels(points, self.stack)
        options = replace(self.options, provenance=self.options.provenance or bool(pixels))
        if animation is not None and Path(animation).suffix.lower() != ".gif":
            raise OutputError(f"the animation is {animation}; expected a name that ends in .gif.")
        if self.is_zarr and options.save_masks:
            raise ConfigError("--save-masks writes GeoTIFFs beside the dates; expected a folder as output, not .zarr.")
        if self.is_zarr and options.source_date and self.nearest is not None:
            raise ConfigError(
                "--source-date with --nearest counts other dates on each date; expected a folder as output."
            )
        count = len(self.stack.sources)
        if self.nearest is None and count > MANY_DATES:
            notify(
                f"each of {count} dates is cleaned with all others. --nearest 6 takes the six nearest in time: this is "
                "faster, and where the ground changes over the year the result is closer to the day."
            )
        series = replace(self, options=options)
        jobs = series.jobs()
        done = series._stored([job for _, job in jobs]) if self.is_zarr else None
        if done is None:
            finished = series._finished(jobs)
            begun = finished or any(resumable(scene.target) for scene, _ in jobs)
            if animation is not None and Path(animation).exists() and not begun and not options.overwrite:
                raise OutputError(f"{animation} exists. Use --overwrite to replace it, or choose another name.")
            done = series._clean([scene for scene, _ in jobs], finished, progress, notify)
        if not done:
            raise OutputError("no date has a valid pixel on the output grid: nothing was written.")
        if self.folder.exists():
            files = [] if animation is None else [str(animate(self.stack, done, animation))]
            if pixels:
                beside = self.out.with_name(f"{self.out.stem}_points") if self.is_zarr else self.out / "points"
                files += write_points(self.stack, done, pixels, beside)
            files.insert(0, str(series._join(done, [job for _, job in jobs])))
        else:
            files = [str(self.out)]
            notify(f"{self.out} exists already, from the same command and inputs; --overwrite makes it again.")
        scenes = tuple(scene for _, scene in done)
        if self.is_zarr:
            scenes = tuple(replace(scene, output=str(self.out), files=(str(self.out),)) for scene in scenes)
        return SeriesReport(str(self.out), scenes, tuple(files), time.perf_counter() - started, notify.texts)

    def _stored(self, jobs: Sequence[str]) -> list[tuple[int, SceneReport]] | None:
        """Return what a complete Zarr store of the same jobs holds; refuse any other, unless it may be replaced."""
        require("zarr", extra="cluster", purpose="writing Zarr")
        from sader.geo.xarray.zarr import find_dates

        done = find_dates(self.out, jobs)
        if done is None and self.out.exists() and not self.options.overwrite:
            raise OutputError(f"{self.out} exists. Use --overwrite to replace it, or choose another name.")
        return done

    def _join(self, done: Sequence[tuple[int, SceneReport]], jobs: Sequence[str]) -> Path:
        """Write the collection, or the Zarr store, whose GeoTIFFs are then removed; return its path."""
        if self.is_zarr:
            from sader.geo.xarray.zarr import find_dates, write_dates

            if find_dates(self.out, jobs) is None:
                write_dates(self.out, self.stack, done, work=self.folder, jobs=jobs)
            shutil.rmtree(self.folder)
            return self.out
        from sader.geo.stac.write import write_collection

        items = [Path(scene.output).with_suffix(".json") for _, scene in done]
        text = f"{len(items)} dates without clouds, written by sader {__version__}"
        return write_collection(self.out / "collection.json", items, text)

    def jobs(self) -> list[tuple[Scene, str]]:
        """Return the scene of each date and the checksum of its job."""
        found = []
        for date, target in enumerate(self.targets):
            dates = self.dates_for(date)
            part = replace(self.stack, sources=tuple(self.stack.sources[one] for one in dates))
            scene = prepared(part, self.remover, replace(self.options, reference=dates.index(date)), target)
            found.append((scene, job_digest(scene.job())))
        return found

    def _finished(self, jobs: Sequence[tuple[Scene, str]]) -> set[int]:
        """Return the dates that are complete; refuse files of other jobs before any work."""
        found = set()
        for date, (scene, job) in enumerate(jobs):
            if finished_report(scene, job) is not None:
                found.add(date)
            elif scene.target.exists() and not self.options.overwrite and not resumable(scene.target):
                raise OutputError(
                    f"{scene.target} exists, from other inputs or options. Use --overwrite to replace it, or another "
                    "folder."
                )
        return found

    def _clean(
        self, scenes: Sequence[Scene], finished: set[int], progress: Progress | None, notify: Notes
    ) -> list[tuple[int, SceneReport]]:
        """Return (date, report) of each date that has data."""
        if finished:
            notify(f"{len(finished)} of {len(self.targets)} dates are complete from an earlier run")
        tiles = len(
            plan_windows(*self.stack.grid.shape, tile=self.remover.tile_size, overlap=self.remover.options.overlap)
        )

        def advance(before: int, done: int, _: int) -> None:
            if progress is not None:
                progress(before + done, tiles * len(self.targets))

        done = []
        for date, (source, scene) in enumerate(zip(self.stack.sources, scenes, strict=True)):
            complete = date in finished
            if not complete and not self.opened[1].valid[date].any():
                notify(f"{source.name} has no valid pixel on the output grid; it is left out of the series.")
                continue
            report = clear_scene(
                scene.stack,
                self.remover,
                scene.target,
                replace(scene.options, overwrite=self.options.overwrite and not complete),
                progress=partial(advance, date * tiles),
                notice=(lambda text: None) if complete else notify,
                executor=self.executor,
                extras=self._extras(scene.target),
                opened=partial(self.open_part, scene.stack, self.dates_for(date)),
            )
            done.append((date, report))
        return done

    def _extras(self, target: Path) -> Extras:
        if self.is_zarr:
            return {}
        return {target.with_suffix(".json"): partial(write_scene_item, collection=self.out / "collection.json")}


def _check_folder(out: Path) -> None:
    if out.suffix.lower() in (".tif", ".tiff"):
        raise OutputError(f"the output is {out}; a series needs a folder, or a name that ends in .zarr.")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; a series needs a folder, or a name that ends in .zarr.")
