"""The scene loop: overview, reference date, radiometric match, tiles, rolling blend, finished rows.

Arrays, files, Zarr stores and dask clusters share it. They differ in the source that is read (`SceneSource`), in where
tiles are computed (`compute_tiles` here, or the workers of a cluster) and in the sink that takes finished rows.
Nothing in this module reads or writes files.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sader.errors import ConfigError
from sader.inference.scene_match import Overview, SceneMatch, decimation
from sader.inference.tile import TileInputs
from sader.inference.tiling import Blend, Progress, Window, common, plan_windows
from sader.inference.values import (
    FILLED,
    HIGHEST,
    LOWEST,
    MOST_SOURCES,
    NODATA,
    OBSERVED,
    RECONSTRUCTED,
    REFLECTANCE,
    UNKNOWN,
    ValueCoding,
    as_tensor,
    decode,
    encode,
    to_device,
)

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover, RemoverOptions

log = logging.getLogger(__name__)
T = TypeVar("T")

GPU_BATCH = 8
"""Tiles computed together on a GPU by default; halved where they do not fit."""
GPU_READERS = 12
"""Threads that read tiles for a GPU, at most."""
GPU_WORKERS = 4
"""Batches under way on a GPU: one is computed while the others are read, queued and cut into tiles."""
MISSING = 0.5
"""Reflectance at nodata and in missing bands: the middle of the model's range."""
AGREEMENT, LARGEST_AGREEMENT = 1.5, 0.02
"""A pixel agrees with the result if it differs by at most 1.5 times the expected error and 0.02 in reflectance."""
COLUMNS = 1024
"""Columns finished at a time, which bounds the memory of a wide scene."""


class computed_once(cached_property[T]):
    """A `cached_property` for values that threads share: the one of Python 3.12 and later may compute them twice."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        super().__init__(compute)
        self._computing = threading.RLock()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        with self._computing:
            return super().__get__(instance, owner)


# ------------------------------------------------------------------------------------------------ source


@dataclass(frozen=True)
class SceneWindow:
    """All dates of one window, as they are stored."""

    numbers: Sequence[NDArray[Any]]
    """One array (C, h, w) of stored numbers for each date."""
    masks: Sequence[NDArray[np.bool_] | None]
    """One cloud mask (h, w) for each date, True = cloud or shadow; None where it is unknown."""
    valid: NDArray[np.bool_] | None = None
    """(T, h, w), False where a date has no data although its numbers are not nodata; None = nodata decides alone."""
    aux: NDArray[np.float32] | None = None
    """(T, A, h, w), auxiliary bands of the paper's networks."""


class SceneSource(Protocol):
    """The dates of one scene, read window by window; `read` is called by several threads at once."""

    def read(self, window: Window) -> SceneWindow:
        """Return all dates of a window."""


# ------------------------------------------------------------------------------------------------ plan and tiles


@dataclass(frozen=True)
class ScenePlan:
    """What every tile of a scene needs besides its pixels. It can be sent to another process."""

    shape: tuple[int, int]
    bands: tuple[str, ...]
    codings: tuple[tuple[ValueCoding, ...], ...]
    days: tuple[float, ...] | None
    reference: int | None
    match: SceneMatch | None
    tile: int
    overlap: int
    steps: int | str | None = None
    seed: int = 0
    samples: int = 1
    clouds: tuple[int, ...] = ()
    """The dates whose cloud probability is blended."""
    spread: bool = False
    """Whether the standard deviation is blended."""
    sources: bool = False
    """Whether the weights of the dates are blended, for the layer of source dates."""

    @classmethod
    def of(
        cls,
        remover: CloudRemover,
        shape: tuple[int, int],
        bands: tuple[str, ...],
        codings: tuple[tuple[ValueCoding, ...], ...],
        days: Sequence[float] | None,
        **options: Any,
    ) -> ScenePlan:
        """Return the plan with the tiles of a remover, without reference date and match."""
        days = None if days is None else tuple(days)
        return cls(shape, bands, codings, days, None, None, remover.tile_size, remover.options.overlap, **options)

    def __post_init__(self) -> None:
        if self.sources and len(self.codings) > MOST_SOURCES:
            raise ConfigError(f"{len(self.codings)} dates; the layer of source dates names {MOST_SOURCES} at most.")

    @cached_property
    def windows(self) -> list[Window]:
        """The tiles, row by row."""
        return plan_windows(*self.shape, tile=self.tile, overlap=self.overlap)

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each row of tiles."""
        return sorted({window.row for window in self.windows})

    @property
    def channels(self) -> int:
        """Planes of a tile: image, cloud probabilities, agreement, standard deviation, weights of dates and fill."""
        return sum(self._planes)

    @property
    def _planes(self) -> tuple[int, ...]:
        bands, dates = len(self.bands), len(self.codings)
        agreement = int(self.reference is not None)
        return bands, len(self.clouds), agreement, bands * self.spread, (dates + 1) * self.sources

    def join(
        self,
        image: Tensor,
        cloud: Tensor,
        agrees: Tensor | None = None,
        spread: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the planes (channels, h, w) of one tile; cloud is (T, h, w), agrees (h, w), weights (T + 1, h, w).

        Without weights, all pixels are those of the reference date.
        """
        parts = [image, *(cloud[date, None] for date in self.clouds)]
        if self.reference is not None:
            parts.append(torch.zeros_like(image[:1]) if agrees is None else agrees[None].to(image.dtype))
        if self.spread:
            parts.append(torch.zeros_like(image) if spread is None else spread)
        if self.sources and weights is None:
            weights = image.new_zeros(len(self.codings) + 1, *image.shape[1:])
            weights[self.reference or 0] = 1.0
        return torch.cat([*parts, weights] if self.sources and weights is not None else parts)

    def split(self, planes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return image, cloud probabilities, agreement, standard deviation and weights of joined planes."""
        image, cloud, agrees, spread, weights = planes.split(self._planes)
        return image, cloud, agrees, spread if self.spread else None, weights if self.sources else None


class RawTile(NamedTuple):
    """One computed tile before blending."""

    planes: Tensor
    """(channels, h, w), as `ScenePlan.join` orders them."""
    valid: Tensor
    """bool (T, h, w)"""
    own: Tensor | None
    """(C, h, w): the stored numbers of the reference date."""

    @classmethod
    def of(cls, arrays: tuple[Any, ...]) -> RawTile:
        """Return the tile of `as_arrays`."""
        planes, valid, own = arrays
        return cls(as_tensor(planes), as_tensor(valid), None if own is None else as_tensor(own))


def as_arrays(tile: RawTile) -> tuple[Any, ...]:
    """Return a tile as a tuple of NumPy arrays, which other processes and dask can handle."""
    return tuple(None if value is None else value.cpu().numpy() for value in tile)


@dataclass(frozen=True)
class _Decoded:
    """One window in reflectance, on the device of the model."""

    window: Window
    cloudy: Tensor
    valid: Tensor
    own: Tensor | None
    read: SceneWindow


@torch.inference_mode()
def predict_windows(
    plan: ScenePlan,
    remover: CloudRemover,
    read: Callable[[Sequence[Window]], list[SceneWindow]],
    windows: Sequence[Window],
) -> list[RawTile | None]:
    """Return the tiles of windows of one size; None where no date has data. read: reads all dates of windows."""
    tiles: list[RawTile | None] = [None] * len(windows)
    todo: list[tuple[int, _Decoded]] = []
    for index, (window, one) in enumerate(zip(windows, read(windows), strict=True)):
        if _has_data(plan, one):
            decoded = _decoded(plan, remover, window, one)
            tiles[index] = _without_network(plan, decoded)
            if tiles[index] is None:
                todo.append((index, decoded))
    steps, resamplings = remover.check_numbers(plan.steps, plan.samples, plan.seed)
    batch = len(todo)
    while todo:
        group = [decoded for _, decoded in todo[:batch]]
        try:
            # Nothing inside a turn waits for a GPU, so that the next batch is queued while one is computed.
            given = TileInputs.joined([_inputs(plan, remover, one) for one in group])
            inputs, noises = remover.prepare(
                given, [one.window for one in group], steps=steps, seed=plan.seed, samples=plan.samples
            )
            with remover.turn:
                output = remover.tile(inputs, noises, steps=steps, resamplings=resamplings)
            if remover.plain_tile not in (None, remover.tile) and not bool(output.images.isfinite().all()):
                with remover.turn:  # float16 ends at 65504
                    output = remover.plain_tile(inputs, noises, steps=steps, resamplings=resamplings)
            clear, spread, cloud, weights = remover.raw_tiles(output, inputs, given.size)
        except torch.OutOfMemoryError as error:
            batch = _smaller_batch(plan, len(group), error)
            continue
        for number, (index, decoded) in enumerate(todo[:batch]):
            own = None if weights is None else weights[number]
            tiles[index] = _raw_tile(plan, remover, decoded, clear[number], spread[number], cloud[number], own)
        todo = todo[batch:]
    if remover.device.type == "cuda":  # the blend uses the tiles on another stream
        torch.cuda.current_stream(remover.device).record_event().synchronize()
    return tiles


def _has_data(plan: ScenePlan, read: SceneWindow) -> bool:
    """Whether any date has a valid pixel. A sparse grid is tried first, in the memory of the host."""
    for step in (16, 1):
        for date, numbers in enumerate(read.numbers):
            valid = decode(as_tensor(numbers[:, ::step, ::step]), plan.codings[date])[1]
            if read.valid is not None:
                valid &= as_tensor(read.valid[date, ::step, ::step])
            if bool(valid.any()):
                return True
    return False


def _smaller_batch(plan: ScenePlan, count: int, error: Exception) -> int:
    """Return half of a batch that did not fit into the memory of the device."""
    if count == 1:
        raise ConfigError(
            f"the device has not enough memory for one tile of {plan.windows[0].height} pixels with "
            f"{len(plan.codings)} dates. Use a smaller --tile, fewer dates, or --device cpu."
        ) from error
    log.warning("out of memory on the device; continuing with batches of %d", count // 2)
    torch.cuda.empty_cache()
    return count // 2


def _raw_tile(
    plan: ScenePlan,
    remover: CloudRemover,
    tile: _Decoded,
    clear: Tensor,
    spread: Tensor,
    cloud: Tensor,
    weights: Tensor | None,
) -> RawTile:
    """Return a computed tile in the bands of the scene; arguments as from `CloudRemover.raw_tiles`."""
    if plan.bands != remover.bands:
        places = [remover.bands.index(band) for band in plan.bands]
        clear, spread = clear[places], spread[places]
    if plan.match is not None and plan.match.level is not None:
        spread = torch.hypot(spread, to_device(plan.match.level, spread.device)[:, None, None])
    agrees = None
    if plan.reference is not None and tile.read.masks[plan.reference] is None and remover.states_error:
        difference = (tile.cloudy[plan.reference] - clear).abs()
        agrees = (difference <= (AGREEMENT * spread).clamp(max=LARGEST_AGREEMENT)).all(dim=0)
    return RawTile(plan.join(clear, cloud.float(), agrees, spread, weights), tile.valid, tile.own)


def _decoded(plan: ScenePlan, remover: CloudRemover, window: Window, read: SceneWindow) -> _Decoded:
    numbers = [to_device(one, remover.device) for one in read.numbers]
    pairs = [decode(one, codings) for one, codings in zip(numbers, plan.codings, strict=True)]
    cloudy, valid = torch.stack([values for values, _ in pairs]), torch.stack([there for _, there in pairs])
    if read.valid is not None:
        valid &= to_device(read.valid, remover.device)
        cloudy.masked_fill_(~valid[:, None], 0.0)
    return _Decoded(window, cloudy, valid, None if plan.reference is None else numbers[plan.reference], read)


def _without_network(plan: ScenePlan, tile: _Decoded) -> RawTile | None:
    """Return the tile if it needs no network, else None.

    Where the given mask of the reference date calls every pixel with data clear, all of them are kept whatever the
    network predicts, and neighbouring tiles read the same mask.
    """
    if plan.reference is None or any(tile.read.masks[date] is None for date in {plan.reference, *plan.clouds}):
        return None
    mask = to_device(np.asarray(tile.read.masks[plan.reference]), tile.valid.device)
    kept = tile.valid[plan.reference] & ~mask
    if not bool((kept | ~tile.valid.any(dim=0)).all()):
        return None
    planes = plan.join(tile.cloudy[plan.reference], _given_clouds(tile))
    return RawTile(planes, tile.valid, tile.own)


def _given_clouds(tile: _Decoded) -> Tensor:
    """Return the given masks as probabilities (T, h, w), NaN where there is none."""
    clouds = torch.full(tile.valid.shape, torch.nan, device=tile.valid.device)
    for date, mask in enumerate(tile.read.masks):
        if mask is not None:
            clouds[date] = to_device(np.asarray(mask), clouds.device).to(clouds)
    return clouds


def whole_inputs(remover: CloudRemover, scene: ArrayScene) -> TileInputs:
    """Return a scene that is not cut into tiles as the model takes it."""
    plan = ScenePlan.of(remover, scene.shape, scene.bands, scene.codings, scene.days)
    window = Window(0, 0, *scene.shape)
    plan = replace(plan, reference=scene.reference)
    return _inputs(plan, remover, _decoded(plan, remover, window, scene.read(window)))


def _inputs(plan: ScenePlan, remover: CloudRemover, tile: _Decoded) -> TileInputs:
    """Return one tile as the model takes it, with all bands of the model."""
    cloudy, there = tile.cloudy.clamp(LOWEST, HIGHEST), tile.valid[:, None]
    device = cloudy.device

    def in_all_bands(values: Tensor, missing: float) -> Tensor:
        if plan.bands == remover.bands:
            return values
        full = torch.full((len(values), len(remover.bands), *values.shape[2:]), missing, device=device)
        full[:, [remover.bands.index(band) for band in plan.bands]] = values
        return full

    change = aux = days = None
    if plan.match is not None:
        change = in_all_bands(torch.where(there, plan.match.change(tile.window, cloudy), 0.0), 0.0)[None]
    if tile.read.aux is not None:
        aux = torch.where(there, to_device(tile.read.aux, device).to(cloudy), MISSING)[None]
    if plan.days is not None:
        days = to_device(np.array(plan.days, np.float32), device)
        days = (days - days.min())[None]
    return TileInputs(
        cloudy=in_all_bands(torch.where(there, cloudy, MISSING), MISSING)[None],
        valid=tile.valid[None],
        cloud=_given_clouds(tile)[None],
        reference=torch.full((1,), -1 if plan.reference is None else plan.reference, device=device),
        band_present=to_device(np.array([[band in plan.bands for band in remover.bands]]), device),
        days=days,
        aux=aux,
        change=change,
        known_masks=all(mask is not None for mask in tile.read.masks)
        or (not plan.clouds and not remover.matches_dates),
    )


# ------------------------------------------------------------------------------------------------ executors


@dataclass(frozen=True)
class Executor:
    """Where tiles are computed: threads of this process, or a cluster (`sader.geo.xarray.cluster`)."""

    submit: Callable[[Sequence[Window]], Any]
    """Starts the tiles of some windows; the future that it returns has `result()`."""
    ahead: int
    """Windows that are under way at a time."""
    group: int = 1
    """Windows computed together."""


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local_executor(
    plan: ScenePlan, remover: CloudRemover, source: SceneSource, *, threads: int | None = None
) -> Iterator[Executor]:
    """Yield an executor of threads of this process.

    On a CPU each of `threads` threads computes one tile at a time on one core, so that the bits do not depend on their
    number; a scene of a single tile uses all of them for it. On a GPU one batch is read while another is computed.
    """
    before = torch.get_num_threads()
    cores = threads or available_cores()
    on_gpu = remover.device.type != "cpu"
    alone = len(plan.windows) == 1
    workers = GPU_WORKERS if on_gpu else 1 if alone else min(cores, len(plan.windows))
    # The setting belongs to the thread that makes it, but new threads start with the one made last.
    per_tile = (threads or before) if alone or on_gpu else 1
    pool: Any = ThreadPoolExecutor(workers, "sader-tile", initializer=torch.set_num_threads, initargs=(per_tile,))
    readers = ThreadPoolExecutor(min(GPU_READERS, cores), "sader-read") if on_gpu else None

    def read(windows: Sequence[Window]) -> list[SceneWindow]:
        return list(map(source.read, windows) if readers is None else readers.map(source.read, windows))

    group = remover.options.batch_size if on_gpu else 1
    try:
        yield Executor(partial(pool.submit, predict_windows, plan, remover, read), 2 * workers * group, group)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if readers is not None:
            readers.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)


@contextmanager
def warmed_up(plan: ScenePlan, remover: CloudRemover, source: SceneSource) -> Iterator[None]:
    """Prepare a GPU for the tiles of a scene while the body runs: libraries are loaded and CUDA graphs captured.

    plan: without reference date and match, which are not known yet.
    """
    if remover.device.type == "cpu":
        yield
        return
    with ThreadPoolExecutor(1, "sader-warm-up") as pool:
        pool.submit(compute_blank_tiles, plan, remover, source)  # an error is raised again by the first tiles
        yield


def compute_blank_tiles(plan: ScenePlan, remover: CloudRemover, source: SceneSource) -> None:
    """Compute a batch of constant tiles of the size, type and number of dates of the scene."""
    read = source.read(plan.windows[0])
    blank = [np.full_like(one, float(own[0].nodata == 0)) for one, own in zip(read.numbers, plan.codings, strict=True)]
    hidden = [None if mask is None else np.ones_like(mask) for mask in read.masks]
    read = SceneWindow(blank, hidden, aux=read.aux)
    if remover.matches_dates and len(plan.windows) > 1 and len(blank) > 1:
        bands = len(plan.bands)
        maps = np.zeros((len(blank), bands + 1, bands, 1, 1), np.float32)
        plan = replace(plan, match=SceneMatch(maps, np.zeros(bands, np.float32), plan.tile))
    predict_windows(plan, remover, lambda windows: [read] * len(windows), plan.windows[: remover.options.batch_size])


# ------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class FinishedRows:
    """Part of a finished scene: rows of all columns, a rectangle of them, or one chunk."""

    clear: Tensor
    """(C, h, w) reflectance, NaN where it has no value."""
    shown: Tensor
    """bool (h, w): pixels with a value: some date has data, and the settings do not withhold it."""
    kept: Tensor
    """bool (h, w): pixels taken unchanged from the reference date."""
    valid: Tensor
    """bool (T, h, w)"""
    cloud: Tensor
    """(planes, h, w) probability of cloud or shadow of the dates in `ScenePlan.clouds`."""
    spread: Tensor | None
    """(C, h, w) standard deviation, 0 where the reference date is clear, NaN where no date has data."""
    own: Tensor | None
    """(C, h, w) stored numbers of the reference date."""
    source_date: Tensor | None
    """uint8 (h, w): the date of largest weight, from 1; `NODATA` where there is no value, `FILLED` for the fill."""

    def provenance(self) -> Tensor:
        """Return uint8 (h, w): `NODATA`, `OBSERVED` or `RECONSTRUCTED`."""
        codes = torch.where(self.kept, OBSERVED, torch.where(self.shown, RECONSTRUCTED, NODATA))
        return codes.to(torch.uint8)

    def count(self, threshold: float) -> Tensor:
        """Return uint8 (h, w): how many dates show the ground clearly, 254 at most; `UNKNOWN` where none has data.

        `cloud` must hold all dates.
        """
        count = clear_dates(self.cloud, self.valid, threshold).clamp(max=UNKNOWN - 1)
        return torch.where(self.valid.any(dim=0), count, UNKNOWN).to(torch.uint8)

    def masks(self, threshold: float) -> Tensor:
        """Return uint8 (T, h, w): 0 clear, 1 cloud or shadow, 255 nodata. `cloud` must hold all dates."""
        return torch.where(self.valid, (self.cloud >= threshold).to(torch.uint8), UNKNOWN)

    def variables(self, threshold: float) -> dict[str, NDArray[Any]]:
        """Return the layers that are known, by their names in a dataset (`sader.geo.xarray.lazy.clear_dataset`)."""
        counted = self.count(threshold) if len(self.cloud) == len(self.valid) else None
        found = {"clear": self.clear, "uncertainty": self.spread, "provenance": self.provenance()}
        found |= {"clear_count": counted, "source_date": self.source_date}
        return {name: one.cpu().numpy() for name, one in found.items() if one is not None}

    def encoded(self, coding: ValueCoding, own: Sequence[ValueCoding]) -> NDArray[Any]:
        """Return the stored numbers (C, h, w) of the image.

        own: codings of the reference date, or none; where they are the coding of the result, kept pixels are copied.
        """
        numbers = encode(self.clear, self.shown, coding)
        if self.own is not None and own:
            same = [band for band, one in enumerate(own) if one == coding]
            numbers[same] = torch.where(self.kept, self.own.to(numbers.dtype)[same], numbers[same])
        if coding.is_integer:  # half the bytes to copy from a GPU
            numbers = numbers.to(torch.int64 if coding.dtype == "uint32" else torch.int32)
        return numbers.cpu().numpy().astype(coding.dtype)


def clear_dates(cloud: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Return (h, w): the number of dates (T, h, w) that show the ground clearly."""
    return (valid & (cloud < threshold)).sum(dim=0)


def _source_date(plan: ScenePlan, weights: Tensor | None, shown: Tensor, kept: Tensor) -> Tensor | None:
    """Return `FinishedRows.source_date` of blended weights (T + 1, h, w), the fill last."""
    if weights is None:
        return None
    dates = len(plan.codings)
    largest = weights.argmax(dim=0)
    codes = torch.where(largest == dates, FILLED, largest + 1)
    if plan.reference is not None:
        codes = codes.masked_fill(kept, plan.reference + 1)
    return codes.masked_fill(~shown, NODATA).to(torch.uint8)


class Pending:
    """The rectangle of a scene that tiles are being added to: the blend, and what is copied without blending."""

    def __init__(self, plan: ScenePlan, area: Window, device: torch.device | str) -> None:
        self.plan, self.area = plan, area
        self.blend = Blend(plan.channels, area, shape=plan.shape, overlap=plan.overlap, device=device)
        self.valid = torch.zeros((len(plan.codings), area.height, area.width), dtype=torch.bool, device=device)
        self.own: Tensor | None = None

    def add(self, window: Window, tile: RawTile) -> None:
        """Add one tile, in the order of the windows."""
        area = self.blend.area
        place, part = common(area, window), common(window, area)
        if place is None or part is None:
            return
        self.blend.add(window, tile.planes.to(self.blend.total.device))
        self.valid[:, *place.slices] = tile.valid[:, *part.slices].to(self.valid.device)
        if tile.own is not None:
            if self.own is None:
                shape = (len(tile.own), *self.valid.shape[1:])
                self.own = torch.zeros(shape, dtype=tile.own.dtype, device=self.valid.device)
            self.own[:, *place.slices] = tile.own[:, *part.slices].to(self.own.device)

    def finished(self, rows: int, options: RemoverOptions, columns: slice = slice(None)) -> FinishedRows:
        """Return the first rows of the rectangle, finished: clear pixels of the reference date are put back.

        So are pixels that an estimated mask hides, but that agree with the result in all bands: replacing them would
        correct nothing. Every pixel is finished for itself, so that any part of a scene may be finished alone.
        """
        plan, valid = self.plan, self.valid[:, :rows, columns]
        own = None if self.own is None else self.own[:, :rows, columns]
        reference, threshold = plan.reference, options.cloud_threshold
        image, cloud, agrees, spread, weights = plan.split(self.blend.result(rows)[..., columns])
        image = image.clamp(min=0.0)
        clear = kept = torch.zeros(valid.shape[1:], dtype=torch.bool, device=valid.device)
        if reference is not None and own is not None:
            clear = (cloud[plan.clouds.index(reference)] < threshold) & valid[reference]
            kept = clear | (agrees[0] > 0.5) & valid[reference]
            values, _ = decode(own, plan.codings[reference])
            image = torch.where(kept, values, image)
        seen = valid.any(dim=0)
        if spread is not None:
            spread = spread.masked_fill(~seen, torch.nan).masked_fill(clear, 0.0)
        shown = seen
        if options.min_count:
            shown = shown & (kept | (clear_dates(cloud, valid, threshold) >= options.min_count))
        if options.max_uncertainty is not None and spread is not None:
            shown = shown & (spread <= options.max_uncertainty).all(dim=0)
        image = image.masked_fill(~shown, torch.nan)
        return FinishedRows(image, shown, kept, valid, cloud, spread, own, _source_date(plan, weights, shown, kept))

    def advance(self, rows: int) -> None:
        """Move the rectangle down by so many rows."""
        self.blend.advance(rows)
        for array in (self.valid,) if self.own is None else (self.valid, self.own):
            array[..., :-rows, :] = array[..., rows:, :].clone()
            array[..., -rows:, :] = 0


class RowSink(Protocol):
    """Takes the finished rows of a scene, from top to bottom."""

    def write(self, top: int, left: int, part: FinishedRows) -> None:
        """Take a rectangle of the rows that are being finished."""

    def end_rows(self, strip: int, unfinished: tuple[Tensor, Tensor]) -> None:
        """Take note that row `strip` of the tiles is finished. unfinished: total and weight of the blend below it."""


def run_rows(
    plan: ScenePlan,
    executor: Executor,
    sink: RowSink,
    *,
    options: RemoverOptions,
    device: torch.device | str = "cpu",
    first: int = 0,
    unfinished: tuple[Tensor, Tensor] | None = None,
    progress: Progress | None = None,
) -> None:
    """Compute the tiles, blend them, finish the rows that no later tile changes and hand them to the sink.

    options: of the remover: the threshold of masks, and which pixels have no value.
    first: the row of tiles from which on rows are missing. unfinished: total and weight of the blend that reach into
    it, from an earlier run; without them the tiles above that reach into it are computed again.
    """
    top, tall = plan.starts[first], plan.windows[0].height
    left = [window for window in plan.windows if window.row >= top or (unfinished is None and window.row + tall > top)]
    last = {window.row: window for window in plan.windows}
    done = len(plan.windows) - len(left)
    groups: deque[Sequence[Window]] = deque(
        left[start : start + executor.group] for start in range(0, len(left), executor.group)
    )
    queue: deque[tuple[Sequence[Window], Any]] = deque()
    # On a GPU the rows have a stream of their own: they do not wait for the tiles that are queued behind them.
    stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        pending = Pending(plan, Window(top, 0, tall, plan.shape[1]), device)
        if unfinished is not None:
            pending.blend.restore(*unfinished)
        while groups or queue:
            while groups and len(queue) * executor.group < executor.ahead:
                windows = groups.popleft()
                queue.append((windows, executor.submit(windows)))
            windows, future = queue.popleft()
            tiles = future.result()
            for window, tile in zip(windows, tiles, strict=True):
                if tile is not None:
                    pending.add(window, tile)
                done += 1
                if window == last[window.row] and window.row >= top:
                    _end_rows(plan, plan.starts.index(window.row), pending, sink, options)
                if progress is not None:
                    progress(done, len(plan.windows))
            if stream is not None:
                stream.synchronize()  # before the memory of the tiles is used again


def _end_rows(plan: ScenePlan, strip: int, pending: Pending, sink: RowSink, options: RemoverOptions) -> None:
    """Finish the rows of one row of tiles."""
    height, width = plan.shape
    top = plan.starts[strip]
    count = (plan.starts[strip + 1] if strip + 1 < len(plan.starts) else height) - top
    step = COLUMNS if pending.valid.device.type == "cpu" else width
    for left in range(0, width, step):
        sink.write(top, left, pending.finished(count, options, slice(left, left + step)))
    pending.advance(count)
    below = pending.area.height - count
    sink.end_rows(strip, (pending.blend.total[:, :below], pending.blend.weight[:below]))


# ------------------------------------------------------------------------------------------------ arrays


@dataclass(frozen=True)
class ArrayScene:
    """A scene in memory, as a source of the loop."""

    cloudy: NDArray[np.float32]
    """(T, C, H, W) reflectance"""
    bands: tuple[str, ...]
    masks: Sequence[NDArray[np.bool_] | None]
    valid: NDArray[np.bool_]
    """(T, H, W)"""
    days: tuple[float, ...] | None = None
    aux: NDArray[np.float32] | None = None
    """(T, A, H, W)"""
    reference: int | None = None
    """The date to clean."""

    @property
    def shape(self) -> tuple[int, int]:
        height, width = self.cloudy.shape[2:]
        return height, width

    @property
    def codings(self) -> tuple[tuple[ValueCoding, ...], ...]:
        return ((REFLECTANCE,) * self.cloudy.shape[1],) * len(self.cloudy)

    def read(self, window: Window) -> SceneWindow:
        """Return all dates of a window."""
        return self._cut(window.slices)

    def overview(self, remover: CloudRemover) -> Overview:
        """Return the overview: the middle of every n x n pixels."""
        small = self._cut(decimation(*self.shape))
        assert small.valid is not None
        small_scene = replace(self, cloudy=np.stack(small.numbers), masks=small.masks, valid=small.valid)
        return small_scene.as_overview(remover)

    def as_overview(self, remover: CloudRemover) -> Overview:
        """Return a decimated scene as the overview."""
        cloudy = np.where(self.valid[:, None], self.cloudy, np.float32(0))
        return Overview.of(remover, cloudy, valid=self.valid, masks=self.masks, bands=self.bands)

    def _cut(self, place: tuple[slice, slice]) -> SceneWindow:
        return SceneWindow(
            numbers=list(self.cloudy[..., *place]),
            masks=[None if mask is None else mask[place] for mask in self.masks],
            valid=self.valid[:, *place],
            aux=None if self.aux is None else self.aux[..., *place],
        )


class ArraySink:
    """Takes finished rows into arrays."""

    def __init__(self, plan: ScenePlan) -> None:
        count = len(plan.bands)
        self.arrays: dict[str, NDArray[Any]] = {
            "clear": np.empty((count, *plan.shape), np.float32),
            "kept": np.empty(plan.shape, bool),
            "cloud": np.empty((len(plan.clouds), *plan.shape), np.float32),
        }
        if plan.spread:
            self.arrays["spread"] = np.empty((count, *plan.shape), np.float32)
        if plan.sources:
            self.arrays["source_date"] = np.empty(plan.shape, np.uint8)

    def write(self, top: int, left: int, part: FinishedRows) -> None:
        """Copy a rectangle of finished rows."""
        height, width = part.kept.shape
        place = slice(top, top + height), slice(left, left + width)
        for name, array in self.arrays.items():
            array[..., *place] = vars(part)[name].cpu().numpy()

    def end_rows(self, strip: int, unfinished: tuple[Tensor, Tensor]) -> None:
        """Arrays in memory keep nothing for a later run."""
