"""A GPU made ready while a scene is still being looked at: kernels built and recorded for the tiles that will come.

The first batch on a GPU takes many times as long as any other. What it needs to know, the shape of a batch, is known
before a pixel has been read, so a thread computes one batch of nothing meanwhile. Whatever goes wrong here goes wrong
again, and is dealt with, when the tiles are made.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from sader.geo.stack import GeoStack
from sader.inference.inputs import TileInputs
from sader.inference.remover import CloudRemover
from sader.inference.tiling import plan_windows

log = logging.getLogger(__name__)


class WarmUp:
    """Computes one batch as a scene will ask for it, in a thread, where that pays: recorded tiles on a GPU."""

    def __init__(
        self,
        stack: GeoStack,
        remover: CloudRemover,
        *,
        steps: int | str | None,
        samples: int,
        wanted: bool | None = None,
    ) -> None:
        self.stack, self.remover, self.steps, self.samples = stack, remover, steps, samples
        if wanted is None:
            captured = remover.options.backend == "accelerated" and remover.matches_dates
            wanted = remover.device.type == "cuda" and captured
        self._thread = threading.Thread(target=self._run, name="sader-warm-up", daemon=True) if wanted else None
        if self._thread is not None:
            self._thread.start()

    def wait(self) -> None:
        """Return when the device is ready: while something is recorded, nobody else should use it."""
        if self._thread is not None:
            started = time.perf_counter()
            self._thread.join()
            log.info("waited %.1f s for the warm-up", time.perf_counter() - started)

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._one_batch()
            log.info("warm-up: %.1f s", time.perf_counter() - started)
        except Exception as error:
            log.info("warm-up failed (%s: %s)", type(error).__name__, error)
            if self.remover.device.type == "cuda":
                torch.cuda.empty_cache()

    def _one_batch(self) -> None:
        """Compute one batch of the scene's shape from random values."""
        stack, remover, device = self.stack, self.remover, self.remover.device
        windows = plan_windows(*stack.grid.shape, tile=remover.tile_size, overlap=remover.options.overlap)
        group = windows[: min(len(windows), remover.options.batch_size)]
        tiles, dates, bands = len(group), len(stack.sources), len(remover.bands)
        size = group[0].height, group[0].width
        # As `CloudRemover.scene_match` decides: a scene of one tile, or of one date, has no match.
        matched = len(windows) > 1 and dates > 1
        unknown = any(source.read_mask(group[0], grid=stack.grid) is None for source in stack.sources)
        steps, resamplings = remover.check_numbers(self.steps, self.samples)
        generator = torch.Generator(device).manual_seed(0)
        cloudy = 0.1 + 0.2 * torch.rand((tiles, dates, bands, *size), device=device, generator=generator)
        inputs = TileInputs(
            cloudy=cloudy,
            valid=torch.ones((tiles, dates, *size), dtype=torch.bool, device=device),
            cloud=torch.full((tiles, dates, *size), torch.nan if unknown else 0.0, device=device),
            reference=torch.full((tiles,), -1, device=device),
            band_present=torch.ones((tiles, bands), dtype=torch.bool, device=device),
            change=torch.zeros_like(cloudy) if matched else None,
        )
        remover.compute(inputs, group, steps=steps, resamplings=resamplings, samples=self.samples)
