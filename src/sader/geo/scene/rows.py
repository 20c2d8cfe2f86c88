"""The sink of the scene loop for files: finished rows are written to the work folder, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sader.geo.scene.cog import Layer, RowFile, writing
from sader.geo.scene.resume import PROVENANCE, WorkFolder
from sader.geo.stack import GeoStack
from sader.inference.scene import FinishedRows, ScenePlan


class RowFiles:
    """Writes the rows of each layer and records them in the work folder."""

    def __init__(
        self, work: WorkFolder, layers: Sequence[Layer], stack: GeoStack, plan: ScenePlan, threshold: float
    ) -> None:
        self.work, self.stack, self.plan, self.threshold = work, stack, plan, threshold
        self.files = [RowFile(work.file(f"{layer.name}.rows"), layer, stack.grid) for layer in layers]
        reference = plan.reference
        same_grid = reference is not None and stack.sources[reference].grid.same_as(stack.grid)
        # The stored numbers of the reference date are copied where they lie on the grid of the result.
        self._own = plan.codings[reference] if reference is not None and same_grid else ()
        self._top, self._parts = 0, list[tuple[int, dict[str, NDArray[Any]]]]()

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """(first row, rows) that each row of tiles finishes."""
        starts = [*self.plan.starts, self.plan.shape[0]]
        return [(top, end - top) for top, end in pairwise(starts)]

    def create(self) -> None:
        """Create the files, empty, and the first state."""
        with writing(self.work.output):
            for file in self.files:
                file.create()
        self.work.save()

    def write(self, top: int, left: int, part: FinishedRows) -> None:
        """Take a rectangle of the rows in progress."""
        layers: dict[str, NDArray[Any]] = {"provenance": part.provenance().cpu().numpy()[None]}
        for file in self.files:
            name = file.layer.name
            if name == "result":
                layers[name] = part.encoded(self.stack.coding, self._own)
            elif name == "count":
                layers[name] = part.count(self.threshold).cpu().numpy()[None]
            elif name == "uncertainty":
                assert part.spread is not None
                layers[name] = part.spread.cpu().numpy()
        self._top = top
        self._parts.append((left, layers))

    def end_rows(self, strip: int, unfinished: tuple[Tensor, Tensor]) -> None:
        """Write the rows in progress and record them, with the part of the blend that lies below."""
        sums = {}
        with writing(self.work.output):
            for file in self.files:
                lines = np.concatenate([layers[file.layer.name] for _, layers in self._parts], axis=2)
                sums[file.layer.name] = file.write(self._top, lines.swapaxes(0, 1))
        codes = np.concatenate([layers["provenance"].ravel() for _, layers in self._parts])
        found = np.bincount(codes, minlength=len(PROVENANCE))
        counts = {name: int(found[code]) for name, code in PROVENANCE.items()}
        self._parts.clear()
        self.work.end_rows(strip, unfinished, sums, counts)
