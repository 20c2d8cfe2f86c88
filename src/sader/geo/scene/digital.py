"""Tiles for a GPU as the numbers on disk: they go to the device as they are, and come back as finished planes.

Turning counts into reflectance, matching them to the scene and joining the results are a few passes over every pixel.
On the device they take next to nothing; on the processor they were most of the time of a scene, and the memory they
took anew for every tile was most of that. Here a tile is copied once, into a place that is used again and again.
Warped dates, and types other than 16 bits, go the ordinary way (`SceneJob._read`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sader.geo.scene.block_cache import CHUNK, SharedBlocks
from sader.geo.scene.rows import Channels
from sader.geo.stack import GeoStack, ValueCoding
from sader.geo.values import decode, is_data
from sader.inference.inputs import HIGHEST, LOWEST, TileInputs
from sader.inference.remover import CloudRemover
from sader.inference.scene_match import SceneMatch
from sader.inference.tiling import Window

log = logging.getLogger(__name__)


@dataclass
class Room:
    """The places of one batch of tiles, for its numbers and its planes."""

    numbers: Tensor
    """int16 (B, T, C, h, w): the bits of the unsigned numbers."""
    planes: Tensor
    """(B, planes, h, w): what comes back, as `Channels.join` orders it."""
    masks: list[list[NDArray[np.bool_] | None]] = field(default_factory=list)
    """Of each tile, one per date."""


@dataclass(frozen=True)
class DigitalTiles:
    """A scene's tiles from shared blocks to planes."""

    stack: GeoStack
    remover: CloudRemover
    blocks: SharedBlocks
    channels: Channels
    reference: int | None
    match: SceneMatch | None
    steps: int
    resamplings: int
    samples: int
    seed: int

    def room(self, tiles: int, size: tuple[int, int]) -> Room:
        """Return a room for so many tiles of a size; what a GPU copies from and to is pinned where that can be."""
        dates, bands = len(self.stack.sources), len(self.stack.bands)
        shapes = [  # the wider type first: so each part begins where its type may
            ((tiles, self.channels.count, *size), torch.float32),
            ((tiles, dates, bands, *size), torch.int16),
        ]
        sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in shapes]
        # As one piece: pinned pieces are rounded up to powers of two.
        whole = _memory(sum(sizes), pinned=self.remover.device.type == "cuda")
        log.info("room for %d tiles: %.0f MB, %spinned", tiles, sum(sizes) / 1e6, "" if whole.is_pinned() else "not ")
        parts = whole.split(sizes)
        planes, numbers = (part.view(kind).view(shape) for part, (shape, kind) in zip(parts, shapes, strict=True))
        return Room(numbers, planes, [[] for _ in range(tiles)])

    def fill(self, room: Room, slot: int, window: Window) -> None:
        """Read a window into one place of a room: numbers and masks."""
        numbers = self.numbers(room, slot)
        for date in range(len(numbers)):
            self.blocks.fill_digital(date, window, numbers[date])
        room.masks[slot] = [source.read_mask(window, grid=self.stack.grid) for source in self.stack.sources]

    @staticmethod
    def numbers(room: Room, slot: int) -> NDArray[np.uint16]:
        """Return the numbers (T, C, h, w) in one place of a room."""
        return room.numbers[slot].numpy().view(np.uint16)

    def any_data(self, room: Room, slot: int) -> bool:
        """Whether any date has a pixel with data in one place of a room; looks no further than the first."""
        return any(
            bool(_has_data(part, source.coding).any())
            for values, source in zip(self.numbers(room, slot), self.stack.sources, strict=True)
            for part in (values[:, first : first + CHUNK] for first in range(0, values.shape[1], CHUNK))
        )

    def valid(self, room: Room, slot: int) -> NDArray[np.bool_]:
        """Return where each date has data (T, h, w) in one place of a room."""
        pairs = zip(self.numbers(room, slot), self.stack.sources, strict=True)
        return np.stack([_has_data(values, source.coding) for values, source in pairs])

    def reflectance(self, room: Room, slot: int, date: int) -> NDArray[np.float32]:
        """Return what one date shows (C, h, w) in one place of a room; 0 where it has no data."""
        coding = self.stack.sources[date].coding
        numbers = self.numbers(room, slot)[date]
        return np.where(_has_data(numbers, coding), decode(numbers, coding)[0], np.float32(0))

    @torch.inference_mode()
    def predict(self, room: Room, slots: Sequence[int], windows: Sequence[Window]) -> None:
        """Compute the planes of some places of a room; returns when they are there."""
        device = self.remover.device
        # All that follows is of this thread's stream; the room may be filled anew only after it was waited for.
        which: Any = slice(slots[0], slots[0] + len(slots))
        if list(slots) != list(range(slots[0], slots[0] + len(slots))):
            which = list(slots)
        codings = [source.coding for source in self.stack.sources]
        cloudy, valid = decoded(room.numbers[which].to(device, non_blocking=True), codings)
        bands = len(self.stack.bands)
        cloud = torch.full(valid.shape, torch.nan, device=device)
        for index, slot in enumerate(slots):
            for date, mask in enumerate(room.masks[slot]):
                if mask is not None:
                    cloud[index, date] = torch.from_numpy(mask).to(device)
        change = None
        if self.match is not None:
            change = self.match.change_of(windows, cloudy).mul_(valid[:, :, None])
        count = len(slots)
        inputs = TileInputs(
            cloudy=cloudy, valid=valid, cloud=cloud, change=change,
            reference=torch.full((count,), -1 if self.reference is None else self.reference, device=device),
            band_present=torch.ones((count, bands), dtype=torch.bool, device=device),
        )  # fmt: skip
        raw = self.remover.compute(
            inputs, windows, steps=self.steps, resamplings=self.resamplings, seed=self.seed, samples=self.samples
        )
        assert raw.cloud is not None
        parts = [raw.clear, raw.cloud[:, list(self.channels.cloud)]]
        if self.channels.spread:
            parts.append(raw.spread)
        planes = torch.cat(parts, dim=1)
        if isinstance(which, slice):
            room.planes[which].copy_(planes, non_blocking=True)
        else:
            room.planes[which] = planes.cpu()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def decoded(numbers: Tensor, codings: Sequence[ValueCoding]) -> tuple[Tensor, Tensor]:
    """Return (cloudy (B, T, C, h, w), valid (B, T, h, w)) of uint16 numbers held as int16, as a network takes them.

    The same sums as in `values.decode` and `values.for_network`; 0.5, the model's zero, where a date has no data.
    """
    cloudy = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
    valid = torch.ones(numbers.shape[:2] + numbers.shape[3:], dtype=torch.bool, device=numbers.device)
    for date, coding in enumerate(codings):
        counts = numbers[:, date].to(torch.int32) & 0xFFFF
        if coding.nodata is not None:
            valid[:, date] = (counts != coding.nodata).all(dim=1)
        reflectance = (counts.to(torch.float64) * coding.scale + coding.offset).float().clamp(LOWEST, HIGHEST)
        cloudy[:, date] = reflectance.masked_fill_(~valid[:, date, None], 0.5)
    return cloudy, valid


def can_be_digital(stack: GeoStack, remover: CloudRemover, blocks: SharedBlocks, size: tuple[int, int]) -> bool:
    """Whether the tiles of a scene, each of a size, can go to the device as they are on disk.

    Files on the scene's own grid with unsigned 16 bits, all bands of the model in its order, no tile to be padded.
    """
    multiple = remover.config.network.multiple
    return (
        blocks.all_shared
        and stack.bands == remover.bands
        and not any(edge % multiple for edge in size)
        and all(_is_uint16(date, stack, blocks) for date in range(len(stack.sources)))
    )


def _is_uint16(date: int, stack: GeoStack, blocks: SharedBlocks) -> bool:
    """Whether the numbers of a date are of that type, by its coding and as they are read: files may differ by band."""
    if stack.sources[date].coding.dtype != "uint16":
        return False
    first = blocks.read_digital(date, Window(0, 0, 1, 1))
    return first is not None and first.dtype == np.uint16


def _has_data(numbers: NDArray[np.uint16], coding: ValueCoding) -> NDArray[np.bool_]:
    """Return where all bands (C, h, w) have data."""
    return np.asarray(is_data(numbers, coding).all(axis=0))


def _memory(size: int, *, pinned: bool) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError:  # a machine that pins no, or no more, memory: copies are slower then
        return torch.empty(size, dtype=torch.uint8)
