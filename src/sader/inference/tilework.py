"""What is done to the tiles of a series: condition, sampling, backends. `CloudRemover` cuts, joins and checks.

The model's [-1, 1] exists only in here; reflectance comes in and goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sader.bands import BANDS_RGBN
from sader.baselines.baseline import Baseline
from sader.checkpoint import Checkpoint, shipped_guide
from sader.config import ModelConfig, SamplingConfig
from sader.data.batch import to_model_range, to_reflectance
from sader.errors import ConfigError
from sader.inference.baseline_tile import baseline_images
from sader.inference.inputs import PreparedSeries
from sader.inference.masks import four_bands, load_finder, sees_too_little
from sader.inference.noise import NoiseField, sample_seeds
from sader.inference.options import Removal, RemoverOptions
from sader.inference.scene_match import feather
from sader.inference.tile import TileResult, expected_error, used_cloud, where_seen
from sader.inference.tiling import Ticks, Window
from sader.method.sampling import Correction, NoiseSource, Solver, karras_sigmas, sample
from sader.model.contrast import with_contrast
from sader.model.matching import match_dates
from sader.model.mtcdn import MTCDN, Condition

if TYPE_CHECKING:
    from sader.inference.accelerate import FastOptions, FastSampler
    from sader.inference.onnx import OnnxTiles
    from sader.inference.quicktiles import QuickTiles
    from sader.method.resampling import Guide


class TileWork:
    """A model on its device, and how it turns prepared tiles into raw results."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str | torch.device | None = None,
        options: RemoverOptions | None = None,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.config = checkpoint.config
        self.card = checkpoint.card
        self.options = options or RemoverOptions()
        model = checkpoint.model.to(self.device).eval()
        self.baseline: Baseline | None = None
        """The network where it is not SADER's own; `denoiser` and `network` are SADER's and then not there."""
        if isinstance(model, Baseline):
            self.baseline = model
            if (size := model.config.fixed_size) is not None:  # not the caller's to choose
                self.options = replace(self.options, tile=size, overlap=min(self.options.overlap, size // 2))
        else:
            assert isinstance(model.network, MTCDN)
            self.denoiser, self.network = model, model.network

    @property
    def has_cloud_head(self) -> bool:
        """Whether the model can find clouds by itself."""
        return self.baseline is None and self.network.cloud_head is not None

    @property
    def states_error(self) -> bool:
        """Whether the network says by itself how far off it may be, so that one sample has a spread."""
        return self.config.network.error_head

    @property
    def bands(self) -> tuple[str, ...]:
        """The bands the model works on, in its order."""
        return self.config.network.bands

    def _tiles(
        self,
        tiles: Sequence[PreparedSeries],
        windows: Sequence[Window],
        steps: int,
        resamplings: int,
        seed: int,
        samples: int,
        ticks: Ticks,
    ) -> list[Removal]:
        """Return what the network makes of tiles of one size: raw images in the model's bands, nothing put back."""
        height, width = tiles[0].cloudy.shape[-2:]
        first, *_ = padded = [tile.padded(self.config.network.multiple) for tile in tiles]
        # The noise covers the padding too; a tile is padded only where the whole scene is smaller than a tile.
        places = [Window(w.row, w.col, *first.cloudy.shape[-2:]) for w in windows]

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(tile, name) for tile in padded]).to(self.device)

        reference = joined("reference")
        if self.baseline is not None:
            with torch.inference_mode():
                answers = baseline_images(
                    self.baseline, places, cloudy=joined("cloudy"), valid=joined("valid"), cloud=joined("cloud"),
                    reference=reference, days=None if first.days is None else joined("days"),
                    aux=None if first.aux is None else joined("aux"), steps=steps,
                    seeds=sample_seeds(seed, samples),
                )  # fmt: skip
            ticks.add(len(windows) * (1 + steps * samples))
            found = to_reflectance(torch.stack(answers))[..., :height, :width].cpu().numpy()
            return [self._raw_tile(tile, found[:, index], None, None) for index, tile in enumerate(tiles)]
        if self.options.backend == "onnx" or (self._quick is not None and self._can_be_quick(first, resamplings)):
            return self._graph_tiles(tiles, joined, places, steps, resamplings, seed, samples, ticks)
        cloudy, valid, band_present = to_model_range(joined("cloudy")), joined("valid"), joined("band_present")
        sampler = self._quick_sampler
        if sampler is not None and (self.options.solver or self._solver()) == "euler":
            more = {"valid": valid, "band_present": band_present}
            if first.aux is not None:
                more["aux"] = to_model_range(joined("aux"))
            if first.days is not None:
                more["days"] = joined("days")
            quick = []
            for one in sample_seeds(seed, samples):
                noise = self._noise(cloudy.shape, places, one, steps)
                quick.append(to_reflectance(sampler(cloudy, noise, steps=steps, resamplings=resamplings, **more)))
            ticks.add(len(windows) * (1 + steps * samples))
            found = torch.stack(quick)[..., :height, :width].cpu().numpy()
            return [self._raw_tile(tile, found[:, index], None, None) for index, tile in enumerate(tiles)]
        used: Tensor | None = None
        shown: Tensor | None = None
        with torch.inference_mode():
            if self.config.network.composite:
                used = self._cloud(cloudy, valid, joined("cloud"), band_present, reference)
                if first.change is not None:
                    cloudy = cloudy + 2 * joined("change")  # the model's range is twice as wide as reflectance
                    reference, shown = self._where_seen(reference, used, valid)
            condition = self.network.condition(
                cloudy,
                aux=None if first.aux is None else to_model_range(joined("aux")),
                valid=valid,
                cloud=used,
                reference=reference,
                days=None if first.days is None else joined("days"),
                band_present=band_present,
                same_light=first.change is not None,
            )
            ticks.add(len(windows))
            images = [
                to_reflectance(self._sample(condition, places, steps, resamplings, one, ticks))
                for one in sample_seeds(seed, samples)
            ]
            if condition.contrast is not None and steps == 1:  # more steps make texture of their own
                images = [with_contrast(image, condition.contrast) for image in images]
            if shown is not None:
                own = joined("cloudy")[torch.arange(len(tiles)), joined("reference").clamp(min=0)]
                images = [feather(image, own, shown) for image in images]
            stated = expected_error(condition, scene=first.change is not None)
        stacked = torch.stack(images)[..., :height, :width].cpu().numpy()
        clouds = None if used is None else used[..., :height, :width].float().cpu().numpy()
        errors = None if stated is None else stated[..., :height, :width].cpu().numpy()
        return [
            self._raw_tile(
                tile,
                stacked[:, index],
                None if clouds is None else clouds[index],
                None if errors is None else errors[index],
            )
            for index, tile in enumerate(tiles)
        ]

    def _graph_tiles(
        self,
        tiles: Sequence[PreparedSeries],
        joined: Callable[[str], Tensor],
        places: Sequence[Window],
        steps: int,
        resamplings: int,
        seed: int,
        samples: int,
        ticks: Ticks,
    ) -> list[Removal]:
        """Return what `_tiles` returns, each tile computed as one graph: by ONNX Runtime, or on the GPU (`_quick`)."""
        if resamplings or (self.options.solver or self._solver()) != "euler":
            raise ConfigError(
                f"backend onnx samples with Euler steps alone; asked for {steps}+{resamplings} steps and solver "
                f"{self.options.solver or self._solver()}. Use backend torch."
            )
        height, width = tiles[0].cloudy.shape[-2:]
        change = None if tiles[0].change is None else joined("change")
        cloud = joined("cloud")
        # Of a tile, not of what is on the device: asking that would wait for it.
        if self.needs_finder(tiles[0].band_present[0].tolist()) and bool(cloud.isnan().any()):
            with torch.inference_mode():
                frames = to_model_range(joined("cloudy"))
                cloud = self._cloud(frames, joined("valid"), cloud, joined("band_present"), joined("reference"))
        fields = [self.noise_field(one, steps) for one in sample_seeds(seed, samples)]
        noises = [
            field.windows(places, channels=len(self.bands), draw=0, device=self.device)[:, None] for field in fields
        ]
        images, made = self.graph_images(
            cloudy=joined("cloudy"), valid=joined("valid"), cloud=cloud, reference=joined("reference"),
            noises=noises, band_present=joined("band_present"),
            change=change, steps=steps,
        )  # fmt: skip
        ticks.add(len(places) * (1 + steps * samples))
        stacked = images[..., :height, :width].cpu().numpy()
        clouds = made.cloud[..., :height, :width].cpu().numpy()
        errors = made.error[..., :height, :width].cpu().numpy() if self.states_error else None
        return [
            self._raw_tile(tile, stacked[:, index], clouds[index], None if errors is None else errors[index])
            for index, tile in enumerate(tiles)
        ]

    def graph_images(
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
    ) -> tuple[Tensor, TileResult]:
        """Return (samples (S, B, C, H, W) in reflectance, the last result) of tiles computed as one graph.

        Arguments as in `TileGraph.forward`, on the device; one noise per sample.
        """
        engine = self._onnx if self.options.backend == "onnx" else self._quick
        assert engine is not None
        images, made = engine(
            cloudy=cloudy, valid=valid, cloud=cloud, reference=reference, noises=noises, band_present=band_present,
            change=change, steps=steps,
        )  # fmt: skip
        if made.shown is not None and made.shown.any():
            own = cloudy[torch.arange(len(cloudy), device=cloudy.device), reference.clamp(min=0)]
            images = [feather(image, own, made.shown) for image in images]
        return torch.stack(list(images)), made

    def _can_be_quick(self, tile: PreparedSeries, resamplings: int) -> bool:
        """Whether `_quick` computes what is asked for: Euler steps alone, nothing that its graph has no input for."""
        return self.can_be_graph(resamplings) and tile.aux is None

    def can_be_graph(self, resamplings: int) -> bool:
        """Whether backend quick computes tiles as one graph: Euler steps alone, a composite, no days or aux bands.

        Whether those are given does not matter: `TileGraph` refuses a network that could read them.
        """
        if self._quick is None or resamplings or (self.options.solver or self._solver()) != "euler":
            return False
        return self.network.config.date_input != "days" and not self.network.config.aux_bands

    @cached_property
    def _quick(self) -> QuickTiles | None:
        """The tiles of a network with composite by the short cuts of `accelerate`; None where they are not wanted."""
        if self.options.backend != "quick" or self.baseline is not None or not self.config.network.composite:
            return None
        from sader.inference.quicktiles import QuickTiles

        assert isinstance(self.config, ModelConfig)
        return QuickTiles(
            self.denoiser, self.config, self._short_cuts(composite=True), threshold=self.options.cloud_threshold,
            growth=self.options.mask_growth,
        )  # fmt: skip

    @cached_property
    def _quick_sampler(self) -> FastSampler | None:
        """The paper's networks by the short cuts of `sader.inference.accelerate`; None where they are not wanted."""
        if self.options.backend != "quick" or self.baseline is not None or self.config.network.composite:
            return None
        from sader.inference.accelerate import FastSampler

        assert isinstance(self.config, ModelConfig)
        return FastSampler(self.denoiser, self.config, self._short_cuts(composite=False), guide=self._guide)

    def _short_cuts(self, *, composite: bool) -> FastOptions:
        """The short cuts that suit the device, without fused kernels where they are not wanted."""
        from sader.inference.accelerate import FastOptions

        options = FastOptions.suited(self.device, composite=composite)
        # What builds on fused kernels says nothing without them.
        return replace(options, fused=False) if self.options.fused is False else options

    @cached_property
    def _onnx(self) -> OnnxTiles:
        """The graphs of this model in ONNX Runtime, made when first needed."""
        from sader.inference.onnx import OnnxTiles

        if self.device.type != "cpu":
            raise ConfigError(f"backend onnx computes on the CPU, but the device is {self.device}. Use device='cpu'.")
        if self.baseline is not None:
            raise ConfigError(f"backend onnx runs SADER's own networks, not {self.config.name}. Use backend torch.")
        own = Checkpoint(self.denoiser, self.config, self.card)
        return OnnxTiles(own, threshold=self.options.cloud_threshold, growth=self.options.mask_growth)

    def _where_seen(self, reference: Tensor, cloud: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `where_seen`, with None for what is shown where no tile shows too little."""
        led, shown = where_seen(reference, cloud, valid, threshold=self.options.cloud_threshold)
        return (reference, None) if torch.equal(led, reference) else (led, shown)

    def _raw_tile(
        self,
        tile: PreparedSeries,
        images: NDArray[np.float32],
        cloud: NDArray[np.float32] | None,
        stated: NDArray[np.float32] | None,
    ) -> Removal:
        """Return one tile from its samples (S, C, h, w), the cloud probability (T, h, w) that was used, and the error
        (C, h, w) that the network expects."""
        date, image = int(tile.reference[0]), images.mean(axis=0)
        kept = np.zeros(image.shape[-2:], dtype=bool)
        if date >= 0:
            probability = tile.cloud[0].numpy() if cloud is None else cloud
            kept = (probability[date] < self.options.cloud_threshold) & tile.valid[0, date].numpy()
            if not self.config.network.composite:
                image = follow(image, tile.cloudy[0, date].numpy(), kept)
        spread = images.std(axis=0)
        return Removal(image, cloud, kept, spread if stated is None else np.hypot(spread, stated))

    def _cloud(self, cloudy: Tensor, valid: Tensor, given: Tensor, band_present: Tensor, reference: Tensor) -> Tensor:
        """Return the cloud probability (B, T, H, W): the given masks, the model's estimate where they are NaN."""
        if not given.isnan().any():
            return given
        network = self.network
        if self.needs_finder(band_present.all(dim=0).tolist()):
            assert self._finder is not None
            network = self._finder
            cloudy, band_present = four_bands(self.bands, cloudy, band_present)
        return used_cloud(
            network, cloudy, valid, given, band_present, reference,
            threshold=self.options.cloud_threshold, growth=self.options.mask_growth,
        )  # fmt: skip

    def needs_finder(self, there: Sequence[bool]) -> bool:
        """Whether too few of the model's bands are `there` for its own cloud head, and the finder knows better."""
        if not self.has_cloud_head or len(self.bands) <= len(BANDS_RGBN):
            return False
        return sees_too_little(self.bands, there) and self._finder is not None

    @cached_property
    def _finder(self) -> MTCDN | None:
        return load_finder(self.device, multiple=self.config.network.multiple)

    def _sample(
        self,
        condition: Condition,
        windows: Sequence[Window],
        steps: int,
        resamplings: int,
        seed: int,
        ticks: Ticks,
    ) -> Tensor:
        """Return the sampled images (tiles, C, h, w) in the model's range."""
        diffusion = self.denoiser.config
        mean = condition.mean.float()
        sigmas = karras_sigmas(steps, sigma_min=diffusion.sigma_min, sigma_max=diffusion.sigma_max)
        return sample(
            lambda x, sigma: self.denoiser(x, sigma, condition),
            mean,
            self._noise(mean.shape, windows, seed, steps),
            sigmas,
            alpha=diffusion.alpha,
            initial=mean if self.config.network.composite else 0.0,
            solver=self.options.solver or self._solver(),
            correction=self._correction(resamplings, condition),
            callback=lambda step, image: ticks.add(len(windows)),
        )

    def noise_field(self, seed: int, steps: int) -> NoiseField:
        """Return the noise of a sample; balanced where one step makes the image from a composite."""
        return NoiseField(seed, balanced=steps == 1 and self.baseline is None and self.config.network.composite)

    def _noise(self, shape: Sequence[int], windows: Sequence[Window], seed: int, steps: int) -> NoiseSource:
        """Return the source of noise (tiles, S, C, h, w) at the places of the tiles."""
        field = self.noise_field(seed, steps)

        def noise(draw: int) -> Tensor:
            made = field.windows(windows, channels=shape[1] * shape[2], draw=draw, device=self.device)
            return made.view(*shape)

        return cached(noise)

    @property
    def _sampling(self) -> SamplingConfig:
        assert isinstance(self.config, ModelConfig)
        return self.config.sampling

    def _solver(self) -> Solver:
        return "heun" if self._sampling.solver == "heun" else "euler"

    def _correction(self, resamplings: int, condition: Condition) -> Correction | None:
        if resamplings == 0:
            return None
        from sader.method.resampling import Resampler, ResamplerConfig

        config = ResamplerConfig(steps=resamplings, threshold=self._sampling.resample_threshold)
        return Resampler(config, self._guide, present=condition.present)

    @cached_property
    def _guide(self) -> Guide | None:
        """The guide of the resampling, made once: every tile is judged by the same one."""
        from sader.method.guides import make_guide

        name = self.options.guide or self._sampling.guide
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a learned guide without weights starts at random
            weights = self.options.guide_weights or shipped_guide(name, self.bands)
            return make_guide(name, bands=len(self.bands), weights=weights)


def follow(image: NDArray[np.float32], own: NDArray[np.float32], clear: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return `image` (C, H, W) in the radiometry of `own`, fitted on the pixels where `own` is clear.

    For networks that know no reference date: their result is a new image, and pasting a date's clear pixels into it
    would show every edge.
    """
    pair = torch.from_numpy(np.stack([own, image]))[None] * 2 - 1
    weight = torch.from_numpy(np.stack([clear, np.ones_like(clear)]))[None].float()
    matched = match_dates(pair, weight, torch.zeros(1, dtype=torch.long))[0, 1]
    return ((matched + 1) / 2).clamp(min=0).numpy()


def cached(noise: NoiseSource) -> NoiseSource:
    """Return the noise source remembering its last draw: a guide and a solver may ask for the same one twice."""
    last: dict[int, Tensor] = {}

    def draw(number: int) -> Tensor:
        if number not in last:
            last.clear()
            last[number] = noise(number)
        return last[number]

    return draw
