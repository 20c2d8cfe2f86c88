"""One scene being worked on: tiles read ahead, predicted and kept; rows blended, finished and written; files published.

What makes a run resumable lives in `sader.geo.workfolder`, what makes rows of tiles in `sader.geo.strips`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sader._version import __version__
from sader.errors import ConfigError, OutputError
from sader.geo.cog import RowFile, make_cog, writing
from sader.geo.options import SceneOptions, layers_of, side_file
from sader.geo.raster import close_files
from sader.geo.shared import SharedBlocks, quick_change
from sader.geo.stack import GeoStack, StackWindow
from sader.geo.strips import Channels, Finisher, RowBlend
from sader.geo.values import for_network
from sader.geo.workfolder import WorkFolder, describe_source
from sader.inputs import HIGHEST, LOWEST
from sader.pipeline import CloudRemover
from sader.scenematch import SceneMatch
from sader.tiling import Progress, Window, plan_windows

Notice = Callable[[str], None]
TileMaker = Callable[["SceneJob", Sequence[Window], Notice], Iterator[tuple[Window, NDArray[np.float32] | None]]]
"""Yields the planes of windows in order, made somewhere else (`sader.geo.remote`); None where no date has data."""


WORKERS = 4
"""Batches in hand at a time on a GPU: one is computed, two prepared, one taken back."""
BATCHES_AHEAD = 4
"""Batches that may be read before their turn on a GPU; each takes memory."""
READERS = 8
"""Threads that read tiles for a GPU, at most."""
GPU_BATCH = 8
"""Tiles computed together on a GPU where nobody says how many; halved where they do not fit."""


class TileRead(NamedTuple):
    """One window as it was read."""

    window: Window
    dates: StackWindow
    aux: NDArray[np.float32] | None
    cloudy: NDArray[np.float32]
    """(T, C, h, w) as the network takes it."""
    change: NDArray[np.float32] | None
    """What the match of the whole scene adds to it."""

    def for_network(self) -> dict[str, Any]:
        """Return what `CloudRemover.predict_tiles` takes for one window."""
        dates = self.dates
        return {"cloudy": self.cloudy, "valid": dates.valid, "cloud_mask": dates.masks, "scene_change": self.change}


class SceneJob:
    """One scene being worked on: its windows, its layers, and the loop over them."""

    def __init__(
        self,
        stack: GeoStack,
        remover: CloudRemover,
        options: SceneOptions,
        reference: int | None,
        target: Path,
        maker: TileMaker | None = None,
        match: SceneMatch | None = None,
    ) -> None:
        self.stack, self.remover, self.options, self.target = stack, remover, options, target
        self.reference, self.maker, self.match = reference, maker, match
        height, width = stack.grid.shape
        self.windows = plan_windows(height, width, tile=remover._tile(), overlap=remover.options.overlap)
        self.starts = sorted({window.row for window in self.windows})
        self.layers = layers_of(stack, options)
        everyone = tuple(range(len(stack.sources)))
        wanted = everyone if options.count else () if reference is None else (reference,)
        self.channels = Channels(len(stack.bands), wanted, options.uncertainty)
        self.on_gpu = remover.device.type != "cpu"
        self.batch = remover.options.batch_size if self.on_gpu else 1
        # The first batch on a GPU is computed alone: what is recorded or chosen then must not be disturbed.
        self._warm, self._warming = False, threading.Lock()
        self.readers = max(1, min(READERS, (os.cpu_count() or 2) // 2))
        self.blocks: SharedBlocks | None = None
        """What the threads that read for a GPU share."""
        auxiliary = remover.config.network.aux_bands
        has_all = bool(auxiliary) and all(set(auxiliary) <= set(source.bands) for source in stack.sources)
        self.aux = replace(stack, bands=auxiliary) if has_all else None

    def description(self) -> dict[str, Any]:
        """Return all that decides the result, for the work folder."""
        options, own = self.options, self.remover.options
        return {
            "version": __version__,
            "model": model_checksum(self.remover),
            "device": self.remover.device.type,
            "inputs": [describe_source(source) for source in self.stack.sources],
            "grid": asdict(self.stack.grid),
            "bands": self.stack.bands,
            "reference": self.reference,
            "steps": self.remover._check_numbers(options.steps, options.sample_count, options.seed),
            "seed": options.seed,
            "samples": options.sample_count,
            "layers": [layer.name for layer in self.layers],
            "remover": {key: value for key, value in asdict(own).items() if key != "batch_size"},
        }

    def run(self, work: WorkFolder, progress: Progress | None, say: Notice) -> list[Path]:
        """Work through the tiles, write the layers, move them to their names; return the paths."""
        rows = {layer.name: RowFile(work.file(f"{layer.name}.rows"), layer, self.stack.grid) for layer in self.layers}
        if work.fresh:
            self._check_room(work)
            with writing(self.target):
                for file in rows.values():
                    file.create()
            work.save(strips=0, counts={})
        self._strips(work, rows, progress, say)
        return self._publish(rows)

    # ---------------------------------------------------------------- tiles

    def _strips(self, work: WorkFolder, rows: dict[str, RowFile], progress: Progress | None, say: Notice) -> None:
        """Make the tiles of each row of tiles, then finish the rows that no later tile touches."""
        height, width = self.stack.grid.shape
        tall = self.windows[0].height
        if work.strips == len(self.starts):
            return
        top = self.starts[work.strips]
        # Rows above have been finished, but tiles that began above still reach down to here.
        reaching = [window for window in self.windows if window.row + window.height > top]
        done = len(self.windows) - len(reaching)
        blend = RowBlend(
            self.channels.count, height=height, width=width, rows=tall, top=top, overlap=self.remover.options.overlap
        )
        together = self.maker is None and self.on_gpu
        self.blocks = SharedBlocks(self.stack) if together else None
        finisher = Finisher(
            self.stack, self.remover, self.reference, self.channels, self.layers, self.readers if self.on_gpu else 1,
            self.blocks,
        )  # fmt: skip
        counts = dict(work.counts)

        def finish(strip: int, end: int, planes: NDArray[np.float32]) -> None:
            first = self.starts[strip]
            made, found = finisher.rows(first, planes)
            with writing(self.target):
                for name, values_of_layer in made.items():
                    rows[name].write(first, values_of_layer)
            for key, number in found.items():
                counts[key] = counts.get(key, 0) + number
            work.save(strips=strip + 1, counts=counts)
            for old in self.windows:
                if old.row <= first and old.row + old.height <= end:
                    work.drop_tile(old)
            if self.blocks is not None:
                self.blocks.forget_above(end)

        # Beside a GPU rows are finished while later tiles are made: in order, one row of tiles waiting at most.
        aside = ThreadPoolExecutor(1, thread_name_prefix="sader-rows") if together else None
        finishing: Future[None] | None = None
        try:
            for window, values in self._made(work, reaching, say):
                if values is not None:
                    blend.add(window, values)
                done += 1
                if progress is not None:
                    progress(done, len(self.windows))
                at = self.windows.index(window)
                last_of_row = at + 1 == len(self.windows) or self.windows[at + 1].row != window.row
                if not last_of_row or window.row < top:
                    continue
                strip = self.starts.index(window.row)
                end = self.starts[strip + 1] if strip + 1 < len(self.starts) else height
                planes = blend.take(end - window.row)
                if aside is None:
                    finish(strip, end, planes)
                    continue
                if finishing is not None:
                    finishing.result()
                finishing = aside.submit(finish, strip, end, planes)
            if finishing is not None:
                finishing.result()
        finally:
            if aside is not None:
                aside.shutdown(wait=True, cancel_futures=True)
            if self.blocks is not None:
                self.blocks.close()

    def _made(
        self, work: WorkFolder, windows: Sequence[Window], say: Notice
    ) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield the windows in order with their planes; None where no date has data. What is kept is not made again."""
        missing = [window for window in windows if not work.has_tile(window)]
        to_make = set(missing)
        together = self.maker is None and self.on_gpu

        def keep(window: Window, values: NDArray[np.float32] | None) -> None:
            work.save_tile(window, np.zeros((0, 1, 1), np.float32) if values is None else values)

        if together:
            fresh = self._predicted_together(missing, say, keep)
        else:
            fresh = self._predicted(missing, say) if self.maker is None else self.maker(self, missing, say)
        for window in windows:
            if window not in to_make:
                values = work.load_tile(window)
                yield window, values if values.size else None
                continue
            made_of, made = next(fresh)
            assert made_of == window
            if not together:
                keep(window, made)
            yield window, made

    def tile(self, window: Window, say: Notice) -> NDArray[np.float32] | None:
        """Return the planes of one window by itself; None where no date has data."""
        read = self._read(window)
        settled, values = self._without_network(read.dates)
        return values if settled else self._predict([read], say)[window]

    def _predicted(self, windows: Sequence[Window], say: Notice) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield the planes of windows in order, reading ahead in a thread and predicting several at a time on a GPU."""
        ahead = self._read_ahead(windows)
        while group := list(islice(ahead, self.batch)):
            yield from self._planes(group, say)

    def _predicted_together(
        self, windows: Sequence[Window], say: Notice, keep: Callable[[Window, NDArray[np.float32] | None], None]
    ) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield the same for a GPU: many windows are read at a time, and while it computes one batch others are
        prepared, taken back and kept, so that it does not wait for them."""

        mine = threading.local()

        def work(reads: list[Future[TileRead]]) -> list[tuple[Window, NDArray[np.float32] | None]]:
            ready = [read.result() for read in reads]
            if not hasattr(mine, "stream"):
                mine.stream = torch.cuda.Stream(self.remover.device) if self.remover.device.type == "cuda" else None
            # In a stream of its own: what one thread copies does not wait for what another computes.
            with torch.cuda.stream(mine.stream):
                made = list(self._planes(ready, say))
            for window, values in made:
                keep(window, values)
            return made

        reading = ThreadPoolExecutor(self.readers, thread_name_prefix="sader-read")
        working = ThreadPoolExecutor(WORKERS, thread_name_prefix="sader-tiles")
        queue: deque[Future[list[tuple[Window, NDArray[np.float32] | None]]]] = deque()
        try:
            for start in range(0, len(windows), self.batch):
                reads = [reading.submit(self._read, window) for window in windows[start : start + self.batch]]
                queue.append(working.submit(work, reads))
                if len(queue) > BATCHES_AHEAD:
                    yield from queue.popleft().result()
            while queue:
                yield from queue.popleft().result()
        finally:
            working.shutdown(wait=True, cancel_futures=True)
            reading.shutdown(wait=True, cancel_futures=True)

    def _planes(self, group: Sequence[TileRead], say: Notice) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield the planes of windows that have been read."""
        planes: dict[Window, NDArray[np.float32] | None] = {}
        todo = []
        for read in group:
            settled, values = self._without_network(read.dates)
            if settled:
                planes[read.window] = values
            else:
                todo.append(read)
        planes |= self._predict(todo, say)
        for read in group:
            yield read.window, planes[read.window]

    def _read(self, window: Window) -> TileRead:
        blocks = self.blocks
        dates = self.stack.read(window) if blocks is None else blocks.read(window)
        aux = None if self.aux is None else self.aux.read(window).cloudy
        if blocks is not None and dates.cloudy.min() >= LOWEST and dates.cloudy.max() <= HIGHEST:
            cloudy = dates.cloudy  # nothing to cut: no second copy of what waits for its turn
        else:
            cloudy = for_network(dates.cloudy)
        if self.match is None or not dates.valid.any():
            change = None
        elif blocks is None:
            change = self.match.change(window, cloudy)
        else:
            change = quick_change(self.match, window, cloudy)
        return TileRead(window, dates, aux, cloudy, change)

    def _read_ahead(self, windows: Sequence[Window]) -> Iterator[TileRead]:
        with ThreadPoolExecutor(1, thread_name_prefix="sader-read") as pool:
            try:
                queue = []
                for window in windows:
                    queue.append(pool.submit(self._read, window))
                    if len(queue) > self.batch + 1:
                        yield queue.pop(0).result()
                for waiting in queue:
                    yield waiting.result()
            finally:
                for waiting in queue:
                    waiting.cancel()
                pool.submit(close_files)

    def _without_network(self, dates: StackWindow) -> tuple[bool, NDArray[np.float32] | None]:
        """Return (True, planes) for a tile that needs no network, else (False, None).

        Without any data there is nothing to make. Where the reference date's mask is given and calls every pixel with
        data clear, all of them are kept whatever the network would say; neighbours read the same mask.
        """
        if not dates.valid.any():
            return True, None
        if self.reference is None:
            return False, None
        known = self.channels.cloud if self.options.count else (self.reference,)
        masks = [dates.masks[date] for date in known]
        mask = dates.masks[self.reference]
        if mask is None or any(one is None for one in masks):
            return False, None
        kept = dates.valid[self.reference] & ~mask
        if not (kept | ~dates.valid.any(axis=0)).all():
            return False, None
        cloud = np.stack([np.zeros_like(kept) if one is None else one for one in dates.masks]).astype(np.float32)
        own = dates.cloudy[self.reference]
        return True, self.channels.join(own, cloud, np.zeros_like(own))

    def _predict(self, todo: Sequence[TileRead], say: Notice) -> dict[Window, NDArray[np.float32] | None]:
        """Return window -> planes; out of memory, the batch is halved, with a word to the user."""
        if todo and self.on_gpu and not self._warm:
            with self._warming:
                if not self._warm:
                    made = self._batches(todo, say)
                    self._warm = True
                    return made
        return self._batches(todo, say)

    def _batches(self, todo: Sequence[TileRead], say: Notice) -> dict[Window, NDArray[np.float32] | None]:
        made: dict[Window, NDArray[np.float32] | None] = {}
        start = 0
        while start < len(todo):
            group = todo[start : start + self.batch]
            try:
                results = self.remover.predict_tiles(
                    [read.for_network() for read in group],
                    windows=[read.window for read in group],
                    reference=self.reference,
                    bands=self.stack.bands,
                    steps=self.options.steps,
                    seed=self.options.seed,
                    samples=self.options.sample_count,
                    days=self.stack.days,
                    aux=[read.aux for read in group],
                )
            except torch.OutOfMemoryError as error:
                if self.batch == 1:
                    raise ConfigError(
                        f"the device has not enough memory for one tile of {self.windows[0].height} pixels with "
                        f"{len(self.stack.sources)} dates. Use a smaller --tile, fewer dates, or --device cpu."
                    ) from error
                self.batch = max(1, self.batch // 2)
                torch.cuda.empty_cache()
                say(f"out of memory on the device; going on with batches of {self.batch}.")
                continue
            for read, result in zip(group, results, strict=True):
                cloud = result.cloud if result.cloud is not None else _given(read.dates)
                made[read.window] = self.channels.join(result.clear, cloud, result.spread)
            start += len(group)
        return made

    # ---------------------------------------------------------------- files

    def _check_room(self, work: WorkFolder) -> None:
        """Refuse now what would fail after hours: not enough room for the rows, the tiles in hand and the COG."""
        grid = self.stack.grid
        tile = self.windows[0]
        layers = sum(layer.bytes_for(grid) for layer in self.layers)
        tiles = 2 * len({window.col for window in self.windows}) * tile.height * tile.width * self.channels.count * 4
        needed = int(2.4 * layers + tiles)
        free = shutil.disk_usage(work.path).free
        if needed > free:
            work.remove()
            raise OutputError(
                f"writing {self.target} takes up to {needed / 1e9:.1f} GB while it is made; {free / 1e9:.1f} GB are "
                "free there. Free some space, or choose another folder."
            )

    def _publish(self, rows: dict[str, RowFile]) -> list[Path]:
        tags = self._tags()
        made = {name: make_cog(file, tags=tags) for name, file in rows.items()}
        paths = {name: self.target if name == "result" else side_file(self.target, name) for name in made}
        with writing(self.target):
            # The output itself comes last: whoever sees it finds the others beside it.
            for name in sorted(made, key=lambda name: name == "result"):
                os.replace(made[name], paths[name])
        return [paths["result"], *(path for name, path in paths.items() if name != "result")]

    def _tags(self) -> dict[str, str]:
        steps, again = self.remover._check_numbers(self.options.steps, 1, self.options.seed)
        reference = "none" if self.reference is None else self.stack.sources[self.reference].name
        tags = {
            "SADER_VERSION": __version__,
            "SADER_MODEL": self.options.model_name or self.remover.config.name,
            "SADER_MODEL_SHA256": model_checksum(self.remover),
            "SADER_SEED": str(self.options.seed),
            "SADER_STEPS": f"{steps}+{again}" if again else str(steps),
            "SADER_SAMPLES": str(self.options.sample_count),
            "SADER_REFERENCE": reference,
            "SADER_INPUTS": ", ".join(source.name for source in self.stack.sources),
            "TIFFTAG_SOFTWARE": f"sader {__version__}",
        }
        date = None if self.reference is None else self.stack.sources[self.reference].date
        if date is not None:
            tags["ACQUISITION_DATE"] = date.isoformat()
        return tags


def model_checksum(remover: CloudRemover) -> str:
    """Return the SHA-256 of all weights."""
    digest = hashlib.sha256()
    for name, value in sorted(remover.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _given(dates: StackWindow) -> NDArray[np.float32]:
    """Return the given masks as probabilities (T, h, w), NaN where there is none."""
    shape = dates.valid.shape[1:]
    return np.stack([np.full(shape, np.nan, np.float32) if m is None else m.astype(np.float32) for m in dates.masks])
