"""Progress inside a tile: the layers of the network that have been computed, counted as they are.

A small scene is one tile, and a tile takes many seconds on a small machine: without this a person watches a bar that
stands still. Layers take about equal time, so their count is an honest measure; how many there will be is known after
the first tile, and estimated from the network before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AGAIN = 0.4
"""Part of a tile's layers that one more evaluation of the network (step or sample) computes again."""


class LayerProgress:
    """Joins tiles done and layers computed into one number from 0 to 1; `tell` hears of every percent."""

    def __init__(self, layers: int, evaluations: int, tell: Callable[[float], None], *, total: int = 1) -> None:
        """total: tiles there will be; without it the look at the whole scene would count as all of the work."""
        self._expected = max(1.0, layers * (1 + AGAIN * (evaluations - 1)))
        self._tell = tell
        self._computed = 0
        self._done, self._total = 0, max(1, total)
        self._told = -1

    def layer(self) -> None:
        """Count a layer."""
        self._computed += 1
        self._say()

    def tiles(self, done: int, total: int) -> None:
        """Note that tiles are done; what the last one took is what the next will take."""
        if self._computed and done > self._done:
            self._expected = max(1.0, self._computed / (done - self._done))
        self._computed, self._done, self._total = 0, done, max(1, total)
        self._say()

    def _say(self) -> None:
        within = min(0.97, self._computed / self._expected) if self._done < self._total else 0.0
        share = (self._done + within) / self._total
        if int(100 * share) != self._told:
            self._told = int(100 * share)
            self._tell(share)


@contextmanager
def counting(progress: LayerProgress) -> Iterator[None]:
    """Call `progress.layer` for each layer of any network that this process computes meanwhile."""
    from torch.nn.modules.module import register_module_forward_hook

    def count(module: Any, inputs: Any, output: Any) -> None:
        if not module._modules:
            progress.layer()

    hook = register_module_forward_hook(count)
    try:
        yield
    finally:
        hook.remove()


def count_layers(module: Any) -> int:
    """Return how many layers without parts a network has."""
    return sum(1 for part in module.modules() if not part._modules)
