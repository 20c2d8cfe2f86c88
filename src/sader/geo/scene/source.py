"""A stack of files as the source of the scene loop: windows as they are stored, and the overview.

Stored numbers are cached by rectangles of whole blocks, which all threads share. Tiles overlap and are not aligned with
the blocks of a file: read tile by tile, a block would be unpacked four times.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sader.errors import DataError, ValueRangeError
from sader.geo.grid import Grid
from sader.geo.stack import DateSource, GeoStack
from sader.inference.remover import CloudRemover
from sader.inference.scene import SceneWindow, available_cores, computed_once
from sader.inference.scene_match import Overview, overview_factor
from sader.inference.tiling import Window, copy_common
from sader.inference.values import HIGHEST, LOWEST, as_tensor, decode, decode_array

READERS = 12
"""Threads that read an overview, at most; unpacking the whole scene is most of the work."""
PART_PIXELS, PART_WIDTH = 2**18, 512
"""Pixels of the scene that a thread reads at a time, and their columns, unless the blocks of a file are whole lines.
Threads that read such parts seldom wait for the same block."""
IMPOSSIBLE_SHARE = 0.01
"""Part of the pixels of a date that may lie outside the range of reflectance (glint, faults)."""
NODATA_HINT = "and the nodata value of the file; rio edit-info --nodata VALUE FILE sets a missing one."
CACHE_LIMIT = 576 * 2**20
"""Bytes that are kept. A Sentinel-2 tile of four bands and three dates needs 540 MiB for no block to be unpacked twice;
larger scenes unpack some blocks again."""
EDGE = 512
"""Least edge of a cached rectangle in pixels: small blocks are read several at a time."""
LINES = 128
"""The same for files whose blocks are whole lines."""
MOST_PIXELS = 2048 * 2048
"""Largest cached rectangle; files with larger blocks are read directly."""

# Doubts about the order of the bands of one date. Band names come from the file, and nothing in its header shows that
# they are wrong. The spectra do: vegetation is bright in the near infrared and dark in blue, and the same ground keeps
# the order of its bands from date to date.
SAMPLES = 20_000
"""Pixels compared, at most."""
ENOUGH = 100
"""Fewer common pixels than this are no evidence."""
SHADOW, LEAST = 0.65, 0.3
"""Below this part of the other dates' brightness a pixel is in shadow, whose light is blue; a date with fewer than 30 %
of its pixels outside is not judged."""
DARKEST = 0.01
"""Reflectance below this is noise to the ratios between bands."""
DIFFERENT = 0.15
"""Mean difference of two spectra, relative to their means, from which they count as different."""
ORDERS = {"reversed": 0.4, "with red and blue exchanged": 0.12}
"""Other order -> share of the pixels that must fit it. Of 266 dates in 81 real series none is taken for another order;
237 and 142 of them are noticed when their bands are put into it."""
MARGIN = 3.0
"""Times as many pixels must fit the other order as fit the given one."""

# Doubts about all dates together, where one list of names is wrong for every file. Between bare and green land red
# varies more than blue; no surface is much brighter in blue than in all other bands.
RED_OVER_BLUE = 0.75
"""Least ratio of the range (5 to 95 %) of red to that of blue over clear land, median of the dates. In 457 real dates
it is 0.79 to 3.9; with both bands exchanged, 91 % of them fall below the limit."""
BLUE_OVER_OTHERS, BRIGHT_BLUE, BLUE_SHARE = 2.0, 0.1, 0.05
"""At most this share of the pixels is above 0.1 in blue and above twice the other bands: 0.0006 in 401 real dates,
of which 68 % are found with their bands reversed."""

Key = tuple[int, int, int]
"""(date, row, column), counted in rectangles."""


class BlockCache:
    """Reads the dates of a stack; dates that are warped are not cached."""

    def __init__(self, stack: GeoStack, *, limit: int | None = None) -> None:
        self.stack, self.limit = stack, CACHE_LIMIT if limit is None else limit
        self.edges = [_edges(source.block_shape(stack.bands, stack.grid), stack) for source in stack.sources]
        """(height, width) of the rectangles of each date; None where it is read directly."""
        self.unpacked = 0
        """Rectangles that were read from files."""
        self._kept: OrderedDict[Key, Future[NDArray[Any]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, date: int, window: Window) -> NDArray[Any]:
        """Return the stored numbers (C, h, w) of one date."""
        edges = self.edges[date]
        if edges is None:
            return self._from_file(date, window)
        out: NDArray[Any] | None = None
        for row in range(window.row // edges[0], (window.row + window.height - 1) // edges[0] + 1):
            for col in range(window.col // edges[1], (window.col + window.width - 1) // edges[1] + 1):
                numbers = self._rectangle((date, row, col))
                if out is None:
                    out = np.empty((len(numbers), window.height, window.width), numbers.dtype)
                copy_common(out, window, numbers, Window(row * edges[0], col * edges[1], *numbers.shape[1:]))
        assert out is not None
        return out

    def _from_file(self, date: int, window: Window) -> NDArray[Any]:
        return self.stack.sources[date].read_numbers(window, bands=self.stack.bands, grid=self.stack.grid)

    def _rectangle(self, key: Key) -> NDArray[Any]:
        """Return a rectangle; the first thread that needs it reads it, others wait for it."""
        with self._lock:
            future = self._kept.get(key)
            if future is not None:
                self._kept.move_to_end(key)
            else:
                mine = self._kept[key] = Future()
        if future is not None:
            return future.result()
        date, row, col = key
        height, width = self.edges[date] or (0, 0)
        top, left = row * height, col * width
        whole = self.stack.grid
        window = Window(top, left, min(height, whole.height - top), min(width, whole.width - left))
        try:
            numbers = self._from_file(date, window)
        except BaseException as error:
            with self._lock:
                del self._kept[key]
            mine.set_exception(error)
            raise
        with self._lock:
            self.unpacked += 1
            self._bytes += numbers.nbytes
            mine.set_result(numbers)
            for old in list(self._kept):
                if self._bytes <= self.limit:
                    break
                if old != key and self._kept[old].done():
                    self._bytes -= self._kept.pop(old).result().nbytes
        return numbers


def _edges(block: tuple[int, int] | None, stack: GeoStack) -> tuple[int, int] | None:
    """Return (height, width) of rectangles of whole blocks; None where they are too large or there is none."""
    if block is None:
        return None
    height, width = block
    grid = stack.grid
    lines = width >= grid.width
    width = grid.width if lines else -(-EDGE // width) * width
    least = LINES if lines else EDGE
    height = min(-(-least // height) * height, grid.height)
    return (height, width) if height * width <= MOST_PIXELS else None


@dataclass(frozen=True)
class StackScene:
    """The dates of a stack, read window by window. It can be sent to another process, without its cache."""

    stack: GeoStack
    aux_bands: tuple[str, ...] = ()
    """Auxiliary bands of the model that every date has."""

    @classmethod
    def of(cls, stack: GeoStack, aux_bands: tuple[str, ...]) -> StackScene:
        """Return the scene; auxiliary bands are read where every date has all of them."""
        complete = all(set(aux_bands) <= set(source.bands) for source in stack.sources)
        return cls(stack, tuple(aux_bands) if complete else ())

    @computed_once
    def blocks(self) -> BlockCache:
        """The blocks that threads share."""
        return BlockCache(self.stack)

    @cached_property
    def _aux(self) -> StackScene:
        return StackScene(replace(self.stack, bands=self.aux_bands))

    def read(self, window: Window) -> SceneWindow:
        """Return all dates of a window as they are stored."""
        grid, sources = self.stack.grid, self.stack.sources
        aux = None
        if self.aux_bands:
            other = self._aux
            numbers = [other.blocks.read(date, window) for date in range(len(sources))]
            pairs = zip(numbers, other.stack.codings, strict=True)
            aux = np.stack([decode_array(one, codings)[0] for one, codings in pairs])
        return SceneWindow(
            numbers=[self.blocks.read(date, window) for date in range(len(sources))],
            masks=[source.read_mask(window, grid=grid) for source in sources],
            aux=aux,
        )

    def __getstate__(self) -> dict[str, object]:
        return {"stack": self.stack, "aux_bands": self.aux_bands}


def overview_grid(stack: GeoStack) -> Grid:
    """Return the grid of the overview."""
    factor = overview_factor(*stack.grid.shape)
    return stack.grid if factor == 1 else stack.grid.coarser(factor)


def read_overview(stack: GeoStack, remover: CloudRemover, scene: StackScene | None = None) -> Overview:
    """Return the overview of a stack: means of the valid pixels; refuse values that cannot be reflectance."""
    scene = scene or StackScene(stack)
    grid = overview_grid(stack)
    factor = overview_factor(*stack.grid.shape)
    down, across = min(factor, stack.grid.height), min(factor, stack.grid.width)
    cloudy = np.zeros((len(stack.sources), len(stack.bands), *grid.shape), np.float32)
    valid = np.zeros((len(stack.sources), *grid.shape), bool)

    def read(date: int, part: Window) -> None:
        row, col = part.row * down, part.col * across
        height, width = stack.grid.shape
        window = Window(row, col, min(part.height * down, height - row), min(part.width * across, width - col))
        values, there = decode(as_tensor(scene.blocks.read(date, window)), stack.codings[date])
        means, some = cell_means(values, there, down, across)
        cloudy[date, :, *part.slices], valid[date, *part.slices] = means.numpy(), some.numpy()

    before = torch.get_num_threads()
    workers = max(1, min(READERS, available_cores()))
    with ThreadPoolExecutor(workers, "sader-overview", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # From the last rows to the first, whose blocks are then in the cache when the first tiles are read.
        parts = sorted(_parts(scene, grid, down, across), key=lambda pair: (-pair[1].row, pair[1].col, pair[0]))
        asked = [pool.submit(read, *part) for part in parts]
        try:
            masks = overview_masks(stack)
            if remover.device.type != "cpu":
                # Masks of a constant image: libraries are loaded and plans of convolutions built, one set per thread.
                overview_of(stack, remover, np.full_like(cloudy, 0.1), np.ones_like(valid), masks)
            for one in asked:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)
    for date, source in enumerate(stack.sources):
        check_values(source.name, cloudy[date], valid[date])
    if not valid.any():
        names = ", ".join(source.name for source in stack.sources)
        raise DataError(
            f"no date has a valid pixel: {names} hold nodata only. Check the files, their nodata value and --grid."
        )
    return overview_of(stack, remover, cloudy, valid, masks)


def overview_of(
    stack: GeoStack,
    remover: CloudRemover,
    cloudy: NDArray[np.float32],
    valid: NDArray[np.bool_],
    masks: Sequence[NDArray[np.bool_] | None],
) -> Overview:
    """Return the overview of dates that are read: cloudy (T, C, h, w), valid (T, h, w); unknown masks are estimated.

    A GPU estimates them beside the tiles of `warmed_up` where there is memory. Networks that match no dates wait for
    their tiles, which choose other algorithms for all convolutions of the process meanwhile.
    """
    if remover.matches_dates:
        with suppress(torch.OutOfMemoryError):
            return Overview.of(remover, cloudy, valid=valid, masks=masks, bands=stack.bands)
    with remover.turn:
        return Overview.of(remover, cloudy, valid=valid, masks=masks, bands=stack.bands)


def overview_masks(stack: GeoStack) -> list[NDArray[np.bool_] | None]:
    """Return the given masks of all dates on the grid of the overview."""
    grid = overview_grid(stack)
    return [_read_mask(source, stack.grid, grid) for source in stack.sources]


def _parts(scene: StackScene, grid: Grid, down: int, across: int) -> Iterator[tuple[int, Window]]:
    """Yield each date with the parts of the overview that are computed at a time."""
    for date, edges in enumerate(scene.blocks.edges):
        lines = edges is None or edges[1] >= scene.stack.grid.width
        width = grid.width if lines else min(max(1, PART_WIDTH // across), grid.width)
        height = max(1, PART_PIXELS // (down * across * width))
        for row in range(0, grid.height, height):
            for col in range(0, grid.width, width):
                yield date, Window(row, col, min(height, grid.height - row), min(width, grid.width - col))


def _read_mask(source: DateSource, whole: Grid, grid: Grid) -> NDArray[np.bool_] | None:
    """Return the mask on the grid of the overview, whose last pixels may have their centre outside the scene."""
    mask = source.read_mask(grid.whole, grid=grid)
    if mask is None:
        return None
    mask = mask.copy()
    down, across = (
        round(big / small) for big, small in zip(grid.resolution[::-1], whole.resolution[::-1], strict=True)
    )
    if len(mask) > 1 and (len(mask) - 0.5) * down >= whole.height:
        mask[-1] = mask[-2]
    if mask.shape[1] > 1 and (mask.shape[1] - 0.5) * across >= whole.width:
        mask[:, -1] = mask[:, -2]
    return mask


def cell_means(values: Tensor, valid: Tensor, down: int, across: int) -> tuple[Tensor, Tensor]:
    """Return the means (C, h, w) of the valid pixels in cells of `down` x `across`, and which cells have any."""
    if down == across == 1:
        return values, valid
    height, width = (-(-size // step) for size, step in zip(valid.shape, (down, across), strict=True))
    pad = (0, width * across - valid.shape[1], 0, height * down - valid.shape[0])
    counts = torch.nn.functional.pad(valid.float(), pad).view(height, down, width, across).sum(dim=(1, 3))
    sums = torch.stack(
        [torch.nn.functional.pad(band, pad).view(height, down, width, across).sum(dim=(1, 3)) for band in values]
    )
    return torch.where(counts > 0, sums / counts.clamp(min=1), 0.0), counts > 0


def check_values(name: str, values: NDArray[np.float32], valid: NDArray[np.bool_]) -> None:
    """Refuse a date whose values cannot be reflectance in more than a few pixels."""
    seen = values[:, valid]
    if seen.size == 0:
        return
    above, below = float((seen > HIGHEST).mean()), float((seen < LOWEST).mean())
    if above > IMPOSSIBLE_SHARE:
        raise ValueRangeError(
            f"{name}: {above:.0%} of the values are above {HIGHEST:g} (up to {seen.max():g}); expected reflectance, "
            f"about 0 to 1. Check the scale (--scale 0.0001 for counts of Sentinel-2) {NODATA_HINT}"
        )
    if below > IMPOSSIBLE_SHARE:
        raise ValueRangeError(
            f"{name}: {below:.0%} of the values are below {LOWEST:g} (down to {seen.min():g}); expected reflectance, "
            f"about 0 to 1. Check --offset {NODATA_HINT}"
        )
    if float(seen.max()) == float(seen.min()) == 0.0:
        raise ValueRangeError(f"{name} is 0 everywhere: that is nodata, not reflectance. Check the file and its bands.")


def check_order(names: Sequence[str], bands: Sequence[str], overview: Overview) -> list[str]:
    """Return a warning for each date whose bands are in another order than those of the other dates, else for all."""
    step = max(1, int(np.sqrt(overview.valid[0].size / SAMPLES)))
    values, valid = overview.cloudy[..., ::step, ::step], overview.valid[:, ::step, ::step]
    clear = valid & ~(overview.cloud[:, ::step, ::step] >= 0.5)
    found = []
    for date, name in enumerate(names if len(names) > 1 else ()):
        others = [other for other in range(len(names)) if other != date]
        # The own mask of a date with exchanged bands is wrong; spectra of clouds are flat and fit any order.
        common = valid[date] & clear[others].any(axis=0)
        rest = np.where(clear[others][:, None, common], values[others][..., common], np.nan)
        rest, own = np.nanmedian(rest, axis=0), values[date][:, common]
        lit = own.mean(axis=0) > SHADOW * rest.mean(axis=0)
        if lit.sum() < max(ENOUGH, LEAST * common.sum()):
            continue
        wanted, own = _shape(rest[:, lit]), _shape(own[:, lit])
        for text, order in _orders(bands).items():
            given, changed = np.abs(own - wanted).mean(axis=0), np.abs(own[order] - wanted).mean(axis=0)
            other = float(((changed < given / 2) & (given > DIFFERENT)).mean())
            same = float(((given < changed / 2) & (changed > DIFFERENT)).mean())
            if other > ORDERS[text] and other > MARGIN * same:
                found.append(
                    f"{name}: the spectra of {other:.0%} of its pixels fit the other dates better with its bands "
                    f"{text}. Check its band names; --bands names the bands of files that have none."
                )
                break
    if not found and (doubt := _doubt_all(values, valid, clear, bands)):
        return [doubt]
    return found[:1] if len(names) == 2 else found  # of two dates either may be wrong


def _doubt_all(
    values: NDArray[np.float32], valid: NDArray[np.bool_], clear: NDArray[np.bool_], bands: Sequence[str]
) -> str | None:
    """Return a warning if the names of the bands look wrong on all dates: values (T, C, H, W), masks (T, H, W)."""
    if not {"B02", "B03", "B04", "B08"} <= set(bands):
        return None
    blue, green, red, infrared = (values[:, list(bands).index(band)] for band in ("B02", "B03", "B04", "B08"))
    advice = "Compare the picture of --preview with a map; --bands names the bands in the order of the file."
    odd = (blue > BRIGHT_BLUE) & (blue > BLUE_OVER_OTHERS * np.maximum(np.maximum(green, red), infrared))
    if valid.sum() >= ENOUGH and (share := float(odd[valid].mean())) > BLUE_SHARE:
        return (
            f"{share:.0%} of the pixels are over twice as bright in blue as in any other band, which no ground is. "
            f"The bands seem to be in another order than their names. {advice}"
        )
    ratios = []
    for number, land in enumerate(clear & (infrared > np.maximum(np.maximum(blue, green), red))):
        if land.sum() >= ENOUGH:
            low, high = np.percentile([red[number][land], blue[number][land]], (5, 95), axis=1)
            ratios.append((high[0] - low[0]) / max(high[1] - low[1], DARKEST / 10))
    if ratios and (ratio := float(np.median(ratios))) < RED_OVER_BLUE:
        return (
            f"blue varies more over the land than red ({1 / max(ratio, 0.01):.1f} times; red usually varies more): red "
            f"and blue seem to be exchanged in all dates. {advice}"
        )
    return None


def _shape(spectra: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return spectra (C, n) relative to their mean."""
    spectra = spectra.clip(DARKEST)
    return spectra / spectra.mean(axis=0)


def _orders(bands: Sequence[str]) -> dict[str, list[int]]:
    """Return the orders that are tried."""
    count = len(bands)
    orders = {"reversed": list(range(count))[::-1]}
    if "B02" in bands and "B04" in bands:
        swapped, blue, red = list(range(count)), list(bands).index("B02"), list(bands).index("B04")
        swapped[blue], swapped[red] = red, blue
        orders["with red and blue exchanged"] = swapped
    return {text: order for text, order in orders.items() if order != list(range(count))}
