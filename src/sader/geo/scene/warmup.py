"""A GPU made ready while a scene is still being looked at: kernels built and recorded for the tiles that will come.

The first batch on a GPU takes many times as long as any other. What it needs to know, the shape of a batch, is known
before a pixel has been read, so a thread computes one batch of nothing meanwhile. Whatever goes wrong here goes wrong
again, and is dealt with, when the tiles are made.
"""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import torch

from sader.geo.stack import GeoStack
from sader.inference.remover import CloudRemover
from sader.inference.tiling import plan_windows

log = logging.getLogger(__name__)


FUSED_FROM = 3500 * 512 * 512 * 3
"""Pixels of dates from which building fused kernels pays: 3500 tiles of 512 x 512 with three dates, more than five
times a Sentinel-2 tile. On an H200 the first batch took 35.4 s with them and 4.8 s without, a tile 0.013 s and
0.022 s, so that 3400 tiles make up for it (benchmarks/RESULTS.md, issue 6)."""


def worth_fusing(stack: GeoStack, remover: CloudRemover, *, samples: int) -> bool:
    """Whether a scene is large enough for fused kernels: decided by its size alone, so that a result never depends on
    how fast a machine was."""
    windows = plan_windows(*stack.grid.shape, tile=remover._tile(), overlap=remover.options.overlap)
    pixels = len(windows) * windows[0].height * windows[0].width
    return pixels * len(stack.sources) * samples >= FUSED_FROM


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
            recorded = (
                remover.options.backend == "quick" and remover.baseline is None and remover.config.network.composite
            )
            wanted = remover.device.type == "cuda" and recorded
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
        stack, remover = self.stack, self.remover
        tile = remover._tile()
        shape = stack.grid.shape
        windows = plan_windows(*shape, tile=tile, overlap=remover.options.overlap)
        group = windows[: min(len(windows), remover.options.batch_size)]
        first = group[0]
        size = first.height, first.width
        # As `CloudRemover.scene_match` decides: a scene of one tile, or of one date, has no match.
        matched = max(shape) > tile and len(stack.sources) > 1 and remover.config.network.composite
        masks = [source.read_mask(first, grid=stack.grid) for source in stack.sources]
        steps, resamplings = remover._check_numbers(self.steps, self.samples, 0)
        padded = any(edge % remover.config.network.multiple for edge in size)
        if remover.can_be_graph(resamplings) and not padded:
            self._on_device(len(group), size, unknown=any(mask is None for mask in masks), matched=matched, steps=steps)
            return
        cloudy = np.full((len(stack.sources), len(stack.bands), *size), 0.1, dtype=np.float32)
        cloudy += 0.2 * np.random.default_rng(0).random(cloudy.shape, dtype=np.float32)
        one = {"cloudy": cloudy, "valid": np.ones((len(stack.sources), *size), bool), "cloud_mask": masks,
               "scene_change": np.zeros_like(cloudy) if matched else None}  # fmt: skip
        remover.predict_tiles(
            [one] * len(group), windows=group, reference=None, bands=stack.bands, steps=self.steps,
            samples=self.samples, days=stack.days,
        )  # fmt: skip

    def _on_device(self, tiles: int, size: tuple[int, int], *, unknown: bool, matched: bool, steps: int) -> None:
        """Compute a batch that is made on the device: a scene's own may come there without ever being reflectance here.

        unknown: some masks are not given.
        """
        remover, device = self.remover, self.remover.device
        dates, bands = len(self.stack.sources), len(remover.bands)
        generator = torch.Generator(device).manual_seed(0)
        cloudy = 0.1 + 0.2 * torch.rand((tiles, dates, bands, *size), device=device, generator=generator)
        remover.graph_images(
            cloudy=cloudy,
            valid=torch.ones((tiles, dates, *size), dtype=torch.bool, device=device),
            cloud=torch.full((tiles, dates, *size), torch.nan if unknown else 0.0, device=device),
            reference=torch.full((tiles,), -1, device=device),
            noises=[torch.randn((tiles, 1, bands, *size), device=device, generator=generator)],
            band_present=torch.ones((tiles, bands), dtype=torch.bool, device=device),
            change=torch.zeros_like(cloudy) if matched else None,
            steps=steps,
        )
