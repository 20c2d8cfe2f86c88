"""One scene being worked on: tiles read ahead, predicted and kept; rows blended, finished and written; files published.

What makes a run resumable lives in `sader.geo.scene.resume`, what makes rows of tiles in `sader.geo.scene.rows`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sader._version import __version__
from sader.errors import ConfigError
from sader.geo.scene.ahead import made_ahead
from sader.geo.scene.block_cache import SharedBlocks
from sader.geo.scene.cog import RowFile, writing
from sader.geo.scene.digital import DigitalTiles, Room, can_be_digital
from sader.geo.scene.options import SceneOptions, layers_of
from sader.geo.scene.publish import check_room, model_checksum, publish
from sader.geo.scene.resume import WorkFolder, describe_source
from sader.geo.scene.rows import Channels, Finisher, RowBlend
from sader.geo.scene.tileread import TileRead, read_ahead, read_tile
from sader.geo.stack import GeoStack, StackWindow
from sader.inference.remover import CloudRemover
from sader.inference.scene_match import SceneMatch
from sader.inference.tiling import Progress, Window, plan_windows

Notice = Callable[[str], None]
TileMaker = Callable[["SceneJob", Sequence[Window], Notice], Iterator[tuple[Window, NDArray[np.float32] | None]]]
"""Yields the planes of windows in order, made somewhere else (`geo.xarray.cluster`); None where no date has data."""


READERS = 8
"""Threads that read tiles for a GPU, at most."""
GPU_BATCH = 8
"""Tiles computed together on a GPU where nobody says how many; halved where they do not fit."""


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
        self.windows = plan_windows(height, width, tile=remover.tile_size, overlap=remover.options.overlap)
        self.starts = sorted({window.row for window in self.windows})
        self.layers = layers_of(stack, options)
        everyone = tuple(range(len(stack.sources)))
        wanted = everyone if options.count else () if reference is None else (reference,)
        self.channels = Channels(len(stack.bands), wanted, options.uncertainty)
        self.on_gpu = remover.device.type != "cpu"
        self.batch = remover.options.batch_size if self.on_gpu else 1
        # The first batch on a GPU is computed alone: what is recorded or chosen then must not be disturbed.
        self._warm, self._warming, self._halving = False, threading.Lock(), threading.Lock()
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
            "steps": self.remover.check_numbers(options.steps, options.sample_count, options.seed),
            "seed": options.seed,
            "samples": options.sample_count,
            "layers": [layer.name for layer in self.layers],
            "remover": {key: value for key, value in asdict(own).items() if key != "batch_size"},
        }

    def run(self, work: WorkFolder, progress: Progress | None, say: Notice) -> list[Path]:
        """Work through the tiles, write the layers, move them to their names; return the paths."""
        rows = {layer.name: RowFile(work.file(f"{layer.name}.rows"), layer, self.stack.grid) for layer in self.layers}
        if work.fresh:
            check_room(self, work)
            with writing(self.target):
                for file in rows.values():
                    file.create()
            work.save(strips=0, counts={})
        self._strips(work, rows, progress, say)
        return publish(self, rows)

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
        together = self.maker is None and self.on_gpu
        # Two places: rows are taken while those before them may still be finished in the other.
        blend = RowBlend(
            self.channels.count, height=height, width=width, rows=tall, top=top, places=2 if together else 0,
            overlap=self.remover.options.overlap,
        )  # fmt: skip
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
        settled, values = self._settled(read.dates)
        return values if settled else self._predict([read], say)[window]

    def _predicted(self, windows: Sequence[Window], say: Notice) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield the planes of windows in order, reading ahead in a thread and predicting several at a time on a GPU."""
        with closing(read_ahead(windows, self._read, ahead=self.batch + 1)) as ahead:
            while group := list(islice(ahead, self.batch)):
                yield from self._planes(group, say)

    def _predicted_together(
        self, windows: Sequence[Window], say: Notice, keep: Callable[[Window, NDArray[np.float32] | None], None]
    ) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield the same for a GPU, made by threads (`sader.geo.scene.ahead`); good until the next is asked for."""
        tiles = self._digital()
        size = self.windows[0].height, self.windows[0].width

        def work(room: Room | None, reads: list[Any]) -> list[tuple[Window, NDArray[np.float32] | None]]:
            made = list(self._planes(reads, say) if room is None else self._digital_planes(tiles, room, reads, say))
            for window, values in made:
                keep(window, values)
            return made

        def read(room: Room | None, slot: int, window: Window) -> Any:
            if room is None or tiles is None:
                return self._read(window)
            tiles.fill(room, slot, window)
            return slot, window

        yield from made_ahead(
            windows, self.batch, readers=self.readers, device=self.remover.device, read=read, work=work,
            room=None if tiles is None else partial(tiles.room, self.batch, size),
        )  # fmt: skip

    def _planes(self, group: Sequence[TileRead], say: Notice) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield the planes of windows that have been read."""
        planes: dict[Window, NDArray[np.float32] | None] = {}
        todo = []
        for read in group:
            settled, values = self._settled(read.dates)
            if settled:
                planes[read.window] = values
            else:
                todo.append(read)
        planes |= self._predict(todo, say)
        for read in group:
            yield read.window, planes[read.window]

    def _digital(self) -> DigitalTiles | None:
        """Return the way of tiles to a GPU as they are on disk; None where they cannot go it."""
        steps, resamplings = self.remover.check_numbers(
            self.options.steps, self.options.sample_count, self.options.seed
        )
        size = self.windows[0].height, self.windows[0].width
        if (
            self.blocks is None
            or self.aux is not None
            or not self.remover.matches_dates
            or not can_be_digital(self.stack, self.remover, self.blocks, size)
        ):
            return None
        return DigitalTiles(
            self.stack, self.remover, self.blocks, self.channels, self.reference, self.match,
            steps=steps, resamplings=resamplings, samples=self.options.sample_count, seed=self.options.seed,
        )  # fmt: skip

    def _digital_planes(
        self, tiles: DigitalTiles | None, room: Room, reads: Sequence[tuple[int, Window]], say: Notice
    ) -> Iterator[tuple[Window, NDArray[np.float32] | None]]:
        """Yield the planes of windows that were read into a room."""
        assert tiles is not None
        planes: dict[Window, NDArray[np.float32] | None] = {}
        todo = []
        for slot, window in reads:
            settled, values = self._without_network(
                room.masks[slot], any_data=tiles.any_data(room, slot), valid=partial(tiles.valid, room, slot),
                own=partial(tiles.reflectance, room, slot),
            )  # fmt: skip
            if settled:
                planes[window] = values
            else:
                todo.append((slot, window))

        def predict(group: Sequence[tuple[int, Window]]) -> None:
            tiles.predict(room, [slot for slot, _ in group], [window for _, window in group])
            planes.update({window: room.planes[slot].numpy() for slot, window in group})

        self._in_turn(todo, predict, say)
        for _, window in reads:
            yield window, planes[window]

    def _read(self, window: Window) -> TileRead:
        return read_tile(window, self.stack, aux=self.aux, match=self.match, blocks=self.blocks)

    def _without_network(
        self,
        masks: Sequence[NDArray[np.bool_] | None],
        *,
        any_data: bool,
        valid: Callable[[], NDArray[np.bool_]],
        own: Callable[[int], NDArray[np.float32]],
    ) -> tuple[bool, NDArray[np.float32] | None]:
        """Return (True, planes) for a tile that needs no network, else (False, None).

        Without any data there is nothing to make. Where the reference date's mask is given and calls every pixel with
        data clear, all of them are kept whatever the network would say; neighbours read the same mask.
        valid, own: give (T, h, w), and the reflectance (C, h, w) of a date, where they are needed.
        """
        if not any_data:
            return True, None
        if self.reference is None:
            return False, None
        mask = masks[self.reference]
        known = self.channels.cloud if self.options.count else (self.reference,)
        if mask is None or any(masks[date] is None for date in known):
            return False, None
        there = valid()
        kept = there[self.reference] & ~mask
        if not (kept | ~there.any(axis=0)).all():
            return False, None
        cloud = np.stack([np.zeros_like(kept) if one is None else one for one in masks]).astype(np.float32)
        image = own(self.reference)
        return True, self.channels.join(image, cloud, np.zeros_like(image))

    def _settled(self, dates: StackWindow) -> tuple[bool, NDArray[np.float32] | None]:
        """Return `_without_network` of dates that were read."""
        return self._without_network(
            dates.masks,
            any_data=bool(dates.valid.any()),
            valid=lambda: dates.valid,
            own=lambda date: dates.cloudy[date],
        )

    def _predict(self, todo: Sequence[TileRead], say: Notice) -> dict[Window, NDArray[np.float32] | None]:
        """Return window -> planes."""
        made: dict[Window, NDArray[np.float32] | None] = {}

        def predict(group: Sequence[TileRead]) -> None:
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
            for read, result in zip(group, results, strict=True):
                cloud = result.cloud if result.cloud is not None else read.given_clouds()
                made[read.window] = self.channels.join(result.clear, cloud, result.spread)

        self._in_turn(todo, predict, say)
        return made

    def _in_turn(self, todo: Sequence[Any], predict: Callable[[Sequence[Any]], None], say: Notice) -> None:
        """Predict in batches, on a GPU the first of them before all others."""
        if todo and self.on_gpu and not self._warm:
            with self._warming:
                if not self._warm:
                    self._batches(todo, predict, say)
                    self._warm = True
                    return
        self._batches(todo, predict, say)

    def _batches(self, todo: Sequence[Any], predict: Callable[[Sequence[Any]], None], say: Notice) -> None:
        """Predict in batches; out of memory, the batch is halved, with a word to the user."""
        start = 0
        while start < len(todo):
            group = todo[start : start + self.batch]
            try:
                predict(group)
            except torch.OutOfMemoryError as error:
                if len(group) == self.batch == 1:
                    raise ConfigError(
                        f"the device has not enough memory for one tile of {self.windows[0].height} pixels with "
                        f"{len(self.stack.sources)} dates. Use a smaller --tile, fewer dates, or --device cpu."
                    ) from error
                torch.cuda.empty_cache()
                with self._halving:  # another thread may have met the same, or taken what this one lacks
                    fewer = max(1, (len(group) if len(group) > 1 else self.batch) // 2)
                    if fewer < self.batch:
                        self.batch = fewer
                        say(f"out of memory on the device; going on with batches of {fewer}.")
                continue
            start += len(group)
