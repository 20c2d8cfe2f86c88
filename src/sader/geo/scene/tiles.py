"""A stack of files as the source of the scene loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sader.geo.scene.block_cache import BlockCache
from sader.geo.stack import GeoStack
from sader.inference.scene import SceneWindow
from sader.inference.tiling import Window
from sader.inference.values import ValueCoding, decode_array


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

    @property
    def shape(self) -> tuple[int, int]:
        return self.stack.grid.shape

    @property
    def bands(self) -> tuple[str, ...]:
        return self.stack.bands

    @cached_property
    def codings(self) -> tuple[tuple[ValueCoding, ...], ...]:
        return self.stack.codings

    @property
    def days(self) -> list[float] | None:
        return self.stack.days

    @cached_property
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
            pairs = zip(numbers, other.codings, strict=True)
            aux = np.stack([decode_array(one, codings)[0] for one, codings in pairs])
        return SceneWindow(
            numbers=[self.blocks.read(date, window) for date in range(len(sources))],
            masks=[source.read_mask(window, grid=grid) for source in sources],
            aux=aux,
        )

    def __getstate__(self) -> dict[str, object]:
        return {"stack": self.stack, "aux_bands": self.aux_bands}
