"""Tiles of the product's networks by the short cuts of `inference.accelerate`: backend "quick" of `CloudRemover`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from sader.config import ModelConfig
from sader.inference.accelerate import TYPES, FastOptions, Recorded, quick_denoiser, with_fewer_short_cuts
from sader.inference.tile import TileGraph, TileResult
from sader.method.diffusion import Denoiser

log = logging.getLogger(__name__)


class QuickTiles:
    """Tiles of networks with a composite, as `TileGraph` computes them, in half precision and recorded per shape.

    Called as `backends.OnnxTiles` is. The matching of dates, the composite and all fits are float32 as ever.
    """

    def __init__(
        self, model: Denoiser, config: ModelConfig, options: FastOptions, *, threshold: float, growth: int
    ) -> None:
        self.plain, self.config, self.options = model, config, options
        self.threshold, self.growth = threshold, growth
        self._graphs: dict[tuple[int, bool, bool], TileGraph] = {}
        self._recordings: dict[tuple[object, ...], Recorded] = {}
        self._turn = threading.Lock()
        """A recording has one place for its inputs: while one thread uses it, others prepare theirs."""

    def graph(self, *, steps: int, estimate: bool, scene: bool) -> TileGraph:
        """Return one variant of the computation; arguments as in `TileGraph`."""
        key = (steps, estimate, scene)
        if key not in self._graphs:
            device = next(self.plain.parameters()).device
            model = next((graph.denoiser for graph in self._graphs.values()), None)
            self._graphs[key] = TileGraph(
                model or quick_denoiser(self.plain, self.options, device), self.config, steps=steps,
                threshold=self.threshold, growth=self.growth, estimate=estimate, scene=scene,
                precision=None if self.options.precision == "float32" else TYPES[self.options.precision],
                exact_masks=self.options.cpu_blocks,
            ).eval()  # fmt: skip
        return self._graphs[key]

    @torch.inference_mode()
    def __call__(
        self,
        *,
        cloudy: Tensor,
        valid: Tensor,
        cloud: Tensor,
        reference: Tensor,
        noises: Sequence[Tensor],
        band_present: Tensor,
        change: Tensor | None,
        steps: int,
    ) -> tuple[list[Tensor], TileResult]:
        """Return (one image per noise, the last result); arguments as in `TileGraph.forward`."""
        estimate = bool(cloud.isnan().any())  # else the cloud head need not run
        shared = [cloudy, valid, cloud, reference, band_present] + ([] if change is None else [change])
        images: list[Tensor] = []
        made: tuple[Tensor, ...] = ()
        for noise in noises:
            with self._turn:
                found = self._tried([noise, *shared], steps, estimate, change is not None)
                made = tuple(value.clone() for value in found)
                if noise.device.type == "cuda":  # the next thread may work in another stream
                    torch.cuda.current_stream(noise.device).synchronize()
            if self.options.precision == "float16" and not bool(made[0].isfinite().all()):
                made = self._plainly([noise, *shared], steps, estimate, change is not None)
            images.append(made[0])
        return images, TileResult(*made)

    def _tried(self, inputs: list[Tensor], steps: int, estimate: bool, scene: bool) -> tuple[Tensor, ...]:
        """Return the result, giving up what does not work here."""
        return with_fewer_short_cuts(self, lambda: self._run(inputs, steps, estimate, scene))

    def begin_anew(self, options: FastOptions) -> None:
        """Forget everything made with other options."""
        self.options, self._graphs, self._recordings = options, {}, {}

    def _plainly(self, inputs: list[Tensor], steps: int, estimate: bool, scene: bool) -> tuple[Tensor, ...]:
        """Return the result in float32: beyond 65504 float16 has no numbers."""
        noise, cloudy, valid, cloud, reference, band_present, *change = inputs
        graph = TileGraph(
            self.plain, self.config, steps=steps, threshold=self.threshold, growth=self.growth, estimate=estimate,
            scene=scene,
        )  # fmt: skip
        made: tuple[Tensor, ...] = graph(cloudy, valid, cloud, reference, noise, band_present, *change)
        return made

    def _run(self, inputs: list[Tensor], steps: int, estimate: bool, scene: bool) -> tuple[Tensor, ...]:
        graph = self.graph(steps=steps, estimate=estimate, scene=scene)
        device = inputs[0].device

        def whole(noise: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            cloudy, valid, cloud, reference, band_present, *change = rest
            made = graph(cloudy, valid, cloud, reference, noise, band_present, *change)
            return tuple(value.float() if value.is_floating_point() else value for value in made)

        if not (self.options.record and device.type == "cuda"):
            return whole(*inputs)
        key = (steps, estimate, scene, *(tuple(value.shape[1:]) for value in inputs))
        count = len(inputs[0])
        recorded = self._recordings.get(key)
        if recorded is None or len(recorded.inputs[0]) < count:
            # A scene's tiles take the GPU seconds in all: less than a search would.
            recorded = self._recordings[key] = Recorded(whole, inputs, search=False)
        # The last batch of a scene has fewer tiles: it goes through the same recording, filled up with its first.
        missing = len(recorded.inputs[0]) - count
        if missing:
            inputs = [torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) for value in inputs]
        return tuple(value[:count] for value in recorded(*inputs))
