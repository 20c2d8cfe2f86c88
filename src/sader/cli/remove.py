"""`sader remove`, `sader series` and `sader mask`: parse the command line, call one function, print its report."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sader.cli.options import BATCH, READ, RUN, AsJson, Device, declared, option, takes
from sader.errors import ConfigError, printable
from sader.geo.scene.options import WRITING, BatchSettings, RemoveRequest

LOG_EVERY = 60.0
"""Seconds between lines about progress where there is no terminal for a bar; SADER_LOG_SECONDS overrides them."""

app = typer.Typer()


@app.command(epilog="Example: sader remove S2_2022-*.tif -o clear.tif --reference 2022-05-13 --preview preview.png")
@takes(READ, RUN)
def remove(
    out: Annotated[
        str, option("GeoTIFF to write (or NAME.zarr); with --scenes a folder or s3://...", None, "--out", "-o")
    ] = "clear.tif",
    reference: Annotated[
        str, option("Date to clean: a file name, a date, auto (the clearest) or none (a new image).")
    ] = "auto",
    as_json: AsJson = False,
    preview: Annotated[Path | None, option("PNG of the inputs and the result.", WRITING)] = None,
    report: Annotated[
        Path | None, option("HTML page about the run; also writes provenance (and uncertainty).", WRITING)
    ] = None,
    item: Annotated[bool, option("Write a STAC item beside the output.", WRITING, "--item/--no-item")] = True,
    **given: Any,
) -> None:
    """Remove the clouds of one scene: several dates in, one cloud-free image out."""
    own = {"out": out, "reference": reference, "preview": preview, "report": report, "item": item}
    if given["scenes"] is not None:
        return _run_many({**given, **own}, as_json)
    with _watched_scenes(given) as callbacks:
        from sader.geo.remove import run_remove

        done = run_remove(_request({**given, **own}), **callbacks)
    _finish(done, as_json, print_report)


@app.command(epilog="Example: sader series 2022/ -o clean --nearest 6 --animation clean.gif --point 7.71,46.02")
@takes(READ, RUN)
def series(
    out: Annotated[
        str, option("Folder of GeoTIFFs to write, or NAME.zarr; with --scenes also s3://...", None, "--out", "-o")
    ] = "series",
    nearest: Annotated[
        int | None, option("Number of nearest dates used to clean each date, such as 6; default: all.", None, min=1)
    ] = None,
    as_json: AsJson = False,
    animation: Annotated[Path | None, option("GIF of all dates, before and after.", WRITING)] = None,
    point: Annotated[
        list[str] | None,
        option("NDVI before and after at longitude,latitude, as CSV and PNG in the output folder (repeat).", WRITING),
    ] = None,
    **given: Any,
) -> None:
    """Remove the clouds of every date: a folder of dates in, the same dates cloud-free out."""
    if given["scenes"] is not None:
        if animation is not None or point:
            raise typer.BadParameter("--animation and --point belong to one scene; they cannot be used with --scenes.")
        return _run_many({**given, "out": out}, as_json, series=True, nearest=nearest)
    with _watched_scenes(given) as callbacks:
        from sader.geo.series import run_series

        gif = None if animation is None else str(animation)
        done = run_series(
            _request({**given, "out": out}), nearest=nearest, animation=gif, points=tuple(point or ()), **callbacks
        )
    _finish(done, as_json, print_series)


@app.command(epilog="Example: sader mask S2_2022-*.tif -o masks")
@takes(READ, declared("tile", "overlap"))
def mask(
    out: Annotated[Path, option("Folder of masks to write, or for one image a GeoTIFF.", None, "--out", "-o")] = Path(
        "masks"
    ),
    as_json: AsJson = False,
    device: Device = None,
    **given: Any,
) -> None:
    """Classify the pixels of every date: land, thick and thin cloud, shadow, water, snow."""
    with _watched_scenes(given, "classifying", resumes=False) as callbacks:
        from sader.geo.classes import run_mask

        done = run_mask(_request({**given, "out": out, "device": device}), **callbacks)
    _finish(done, as_json, print_masks)


def _request(given: Mapping[str, Any]) -> RemoveRequest:
    """Return the request of the options of a command."""
    return RemoveRequest.of({name: value for name, value in given.items() if name not in BATCH})


def _run_many(given: Mapping[str, Any], as_json: bool, **series: Any) -> None:
    """Run all scenes of --scenes and print the report; the status is 1 where some failed."""
    with _watched_scenes(given, unit="scenes") as callbacks:
        from sader.geo.batch.run import run_batch

        settings = BatchSettings(**{name: given[name] for name in BATCH}, **series)
        done = run_batch(_request(given), settings, **callbacks)
    _finish(done, as_json, lambda report: print(report.as_text()))
    if done.with_status("failed"):
        raise typer.Exit(1)


def _watched_scenes(given: Mapping[str, Any], *names: str, **more: Any) -> AbstractContextManager[dict[str, Any]]:
    """Return `watched` after checking that there is something to read."""
    if not given["inputs"] and given["stac"] is None and given.get("scenes") is None:
        raise typer.BadParameter("name at least one GeoTIFF, folder, .SAFE product or STAC item.")
    return watched(*names, **more)


@contextmanager
def watched(work: str = "removing clouds", unit: str = "tiles", *, resumes: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the arguments `progress` and `notice` of a run; progress is a bar on a terminal, else lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    live = Console(stderr=True)
    remaining = TimeRemainingColumn(elapsed_when_finished=True)
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, remaining)
    with Progress(*columns, console=live, transient=True, disable=not live.is_terminal) as bar:
        # Importing torch, which follows, takes seconds: the bar is already on the screen.
        task = bar.add_task("opening", total=None, rate="")
        lines = (
            None
            if live.is_terminal
            else ProgressLines(lambda text: print(text, file=sys.stderr, flush=True), work, unit)
        )

        def progress(done: int, total: int) -> None:
            if lines is not None:
                lines(done, total)
            bar.update(task, description=work, completed=done, total=total)
            speed = bar.tasks[0].speed
            bar.update(task, rate=f"{60 * speed:.1f} {unit}/min" if speed else "")

        def notice(text: str) -> None:
            live.print(f"note: {printable(text)}", style="yellow", highlight=False, markup=False, soft_wrap=True)

        try:
            yield {"progress": progress, "notice": notice}
        except KeyboardInterrupt:
            continues = "continues from here; a different one with this output starts again."
            notice(f"stopped. The same command {continues if resumes else 'starts again.'}")
            raise


def show(content: Any, as_json: bool, print_text: Callable[[Any], None]) -> None:
    """Print a report or a list of them, as JSON or by `print_text`."""
    if as_json:
        plain = [one.as_dict() for one in content] if isinstance(content, list) else content.as_dict()
        print(json.dumps(plain, indent=2))
    else:
        print_text(content)


def _finish(report: Any, as_json: bool, print_text: Callable[[Any], None]) -> None:
    show(report, as_json, print_text)
    for path in () if as_json else report.files:
        print(f"wrote {printable(path)}")
    sys.stdout.flush()


class ProgressLines:
    """Progress for a log: one line a minute, or as often as SADER_LOG_SECONDS states."""

    def __init__(self, say: Callable[[str], None], work: str = "removing clouds", unit: str = "tiles") -> None:
        self._work, self._unit, self._say, self._every = work, unit, say, _log_interval()
        self._began = self._last = time.monotonic()
        self._before: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """Print a line if the last one is old enough; tiles that are done at the first call do not count as speed."""
        now = time.monotonic()
        if self._before is None:
            self._before, self._began = done, now
        if now - self._last < self._every or done >= total:
            return
        self._last = now
        text = f"{self._work}: {done} of {total} {self._unit}"
        if fresh := done - self._before:
            rate = fresh / (now - self._began)
            left = (total - done) / rate
            text += f", {60 * rate:.1f} {self._unit}/min, {_duration(left)} left"
        self._say(text)


def _duration(seconds: float) -> str:
    """Return "40 s", "12 min" or "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _log_interval() -> float:
    given = os.environ.get("SADER_LOG_SECONDS", "")
    try:
        return float(given) if given else LOG_EVERY
    except ValueError as error:
        raise ConfigError(f"the variable SADER_LOG_SECONDS is {given!r}; expected seconds, such as 60.") from error


def print_report(report: Any) -> None:
    """Print what was cleaned and how."""
    total = max(1, sum(report.pixels.values()))
    share = {name: number / total for name, number in report.pixels.items()}
    cleaned = f"cleaned {printable(report.reference)}" if report.reference else "a new image"
    height, width = report.size
    print(
        f"{cleaned} with {report.model}: {width} x {height} pixels, {', '.join(report.bands)}; "
        f"{share.get('observed', 0):.1%} observed, {share.get('reconstructed', 0):.1%} reconstructed, "
        f"{share.get('nodata', 0):.1%} without data; "
        f"{report.seconds:.1f} s"
    )


def print_series(report: Any) -> None:
    """Print one line for each date."""
    for scene in report.scenes:
        total = max(1, sum(scene.pixels.values()))
        rebuilt = scene.pixels.get("reconstructed", 0) / total
        print(f"{printable(scene.reference)}: {rebuilt:.1%} reconstructed, {printable(scene.output)}")
    print(f"{len(report.scenes)} dates in {report.seconds:.1f} s")


def print_masks(report: Any) -> None:
    """Print the share of each class for each date."""
    for name, shares in zip(report.dates, report.shares, strict=True):
        print(f"{printable(name)}: {', '.join(f'{share:.1%} {one}' for one, share in shares.items())}")
