"""`CloudRemover`: cloudy arrays in, one clear array out. The only place that joins model, sampler and tiles.

Reflectance comes in and goes out as float32 in [0, 1]; the model's [-1, 1] exists only in here. No files, no map
projections: those are in `sader.geo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sader.baselines.backend import check_rival_steps, rival_images
from sader.baselines.protocol import Rival
from sader.baselines.registry import find_config
from sader.checkpoint import Checkpoint, build_model, find_checkpoint, load_checkpoint, shipped_guide
from sader.config import ModelConfig, SamplingConfig
from sader.data.series import to_model_range, to_reflectance
from sader.errors import ConfigError
from sader.inputs import PreparedSeries, parse_steps, prepare_series
from sader.model.blocks import reflect_pad
from sader.model.matching import match_dates
from sader.model.mtcdn import MTCDN, Condition
from sader.sampling import Correction, NoiseSource, Solver, karras_sigmas, sample
from sader.tiling import Blend, NoiseField, Progress, Ticks, Window, plan_windows

if TYPE_CHECKING:
    from sader.resampling import Guide

DEFAULT_MODEL = "sader-s2-rgbn"


@dataclass(frozen=True)
class RemoverOptions:
    """How the work is cut up, sampled and masked, where that is not the caller's to say at every call."""

    tile: int = 512
    """Edge of a tile in pixels, 64 to 1024; an image smaller than that is one tile. Dates are matched within a tile:
    small tiles know less."""
    overlap: int = 64
    """Pixels shared by neighbouring tiles, at most half a tile."""
    batch_size: int = 1
    """Tiles per evaluation on a GPU. On a CPU it is always 1: there more are no faster, and matrix products round
    differently for different batches, so that the result would depend on this number."""
    solver: Solver | None = None
    """None = the checkpoint's own; "euler" or "heun"."""
    guide: str | None = None
    """Guide of the resampling; None = the checkpoint's own."""
    cloud_threshold: float = 0.25
    """Probability from which a pixel of the reference date counts as cloud and is not kept."""
    mask_growth: int = 2
    """Pixels by which the model's own estimate is widened: a cloud's fringe costs more than a little clear land."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; expected at least 1 tile per evaluation.")


@dataclass(frozen=True)
class Removal:
    """A result with what is known about it; arrays cover the whole image."""

    clear: NDArray[np.float32]
    """(C, H, W) reflectance; NaN where no date has data."""
    cloud: NDArray[np.float32] | None
    """(T, H, W) probability of cloud or shadow that was used, given or estimated; None for the paper's network."""
    kept: NDArray[np.bool_]
    """(H, W): pixels taken unchanged from the reference date."""
    spread: NDArray[np.float32] | None
    """(C, H, W): standard deviation over the samples; None for one sample."""


class CloudRemover:
    """Removes clouds from arrays.

    >>> remover = CloudRemover.from_pretrained("sader-s2-rgbn")   # doctest: +SKIP
    >>> clear = remover(cloudy, reference=0)                      # doctest: +SKIP
    """

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
        self.rival: Rival | None = None
        """The network where it is not SADER's own; `denoiser` and `network` are SADER's and then not there."""
        if isinstance(model, Rival):
            self.rival = model
            if (size := model.config.fixed_size) is not None:  # not the caller's to choose
                self.options = replace(self.options, tile=size, overlap=min(self.options.overlap, size // 2))
        else:
            assert isinstance(model.network, MTCDN)
            self.denoiser, self.network = model, model.network

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path = DEFAULT_MODEL, **kwargs: Any) -> CloudRemover:
        """Return a remover with the weights of a shipped name, a file or a hub repository."""
        return cls(load_checkpoint(find_checkpoint(name_or_path)), **kwargs)

    @classmethod
    def from_preset(cls, name: str, *, seed: int = 0, **kwargs: Any) -> CloudRemover:
        """Return an UNTRAINED remover of a preset, for tests and for counting; its weights are random."""
        config = find_config(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(config)
        return cls(Checkpoint(model, config, {"trained": False}), **kwargs)

    @property
    def bands(self) -> tuple[str, ...]:
        """The bands the model works on, in its order."""
        return self.config.network.bands

    @property
    def has_cloud_head(self) -> bool:
        """Whether the model can find clouds by itself."""
        return self.rival is None and self.network.cloud_head is not None

    def __call__(
        self,
        cloudy: ArrayLike,
        *,
        reference: int | None = None,
        cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None = None,
        days: Sequence[float] | None = None,
        aux: ArrayLike | None = None,
        steps: int | str | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> NDArray[np.float32]:
        """Return the clear image (C, H, W) of the dates cloudy (T, C, H, W); see `predict` for the arguments."""
        return self.predict(
            cloudy,
            reference=reference,
            cloud_mask=cloud_mask,
            days=days,
            aux=aux,
            steps=steps,
            seed=seed,
            **kwargs,
        ).clear

    def predict(
        self,
        cloudy: ArrayLike,
        *,
        reference: int | None = None,
        cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None = None,
        days: Sequence[float] | None = None,
        aux: ArrayLike | None = None,
        valid: ArrayLike | None = None,
        bands: Sequence[str] | None = None,
        steps: int | str | None = None,
        seed: int = 0,
        samples: int = 1,
        progress: Progress | None = None,
    ) -> Removal:
        """Return the clear image with its masks and spread.

        cloudy: (T, C, H, W) reflectance, any T >= 1 and any size.
        reference: the date to clean: its radiometry, its clear pixels unchanged. None: a new image (the paper's task).
        cloud_mask: bool (T, H, W), True = cloud or shadow; or a list with None for dates whose mask is unknown. What
            is unknown is estimated by the model.
        days: one number per date, days since any start; read only by networks built with date_input="days", which the
            shipped one is not.
        aux: (T, A, H, W), bands that only help (NIR or SAR of the paper's networks).
        valid: bool (T, H, W), False where a date has no data. NaN is refused unless it is marked here.
        bands: names of the C bands where they are not the model's own in the model's order.
        steps: 4, or "4+1" for four steps with one resampling each (the paper); None = the checkpoint's own of both.
        samples: how many results with different noise to average; their standard deviation is `Removal.spread`.
        progress: called with (work done, work in all): each tile counts once for its dates and once per step.
        """
        count, resamplings = parse_steps(steps, self.config)
        if self.rival is not None:
            check_rival_steps(self.rival, steps, resamplings)
        if samples < 1:
            raise ConfigError(f"samples is {samples}; expected at least 1.")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; expected a whole number from 0 on.")
        series = prepare_series(
            self.config.network,
            cloudy,
            reference=reference,
            cloud_mask=cloud_mask,
            days=days,
            aux=aux,
            valid=valid,
            bands=bands,
        )
        self._check_reference(series)
        padded = self._padded(series)
        _, _, channels, height, width = padded.cloudy.shape
        windows = plan_windows(height, width, tile=self._tile(), overlap=self.options.overlap)
        dates = padded.cloudy.shape[1]
        masks = self.has_cloud_head and self.config.network.composite
        clear = Blend(channels, height, width, overlap=self.options.overlap)
        spreads = Blend(channels, height, width, overlap=self.options.overlap)
        cloud = Blend(dates, height, width, overlap=self.options.overlap) if masks else None
        together = 1 if self.device.type == "cpu" else self.options.batch_size
        ticks = Ticks(len(windows) * (1 + count * samples), progress)
        for start in range(0, len(windows), together):
            group = windows[start : start + together]
            images, used = self._tiles(padded, group, count, resamplings, seed, samples, ticks)
            for index, window in enumerate(group):
                clear.add(window, images[:, index].mean(axis=0))
                spreads.add(window, images[:, index].std(axis=0))
                if cloud is not None and used is not None:
                    cloud.add(window, used[index])
        return self._finish(series, clear, spreads if samples > 1 else None, cloud)

    # ---------------------------------------------------------------- the steps of predict

    def _check_reference(self, series: PreparedSeries) -> None:
        """Refuse, before any work, a reference date whose clear pixels nobody can tell."""
        date = int(series.reference[0])
        if date >= 0 and not self.config.network.composite and series.cloud[0, date].isnan().any():
            raise ConfigError(
                f"reference={date} keeps that date's clear pixels, but its cloud mask is unknown and this "
                "model has no cloud head. Give cloud_mask, or use reference=None."
            )

    def _padded(self, series: PreparedSeries) -> PreparedSeries:
        """Return the series with its size reflected up to the network's multiple, so that tiles need no padding."""
        multiple = self.config.network.multiple
        height, width = (-(-size // multiple) * multiple for size in series.cloudy.shape[-2:])

        def pad(x: Tensor | None) -> Tensor | None:
            return None if x is None else reflect_pad(x, height, width)

        return replace(
            series,
            cloudy=reflect_pad(series.cloudy, height, width),
            valid=reflect_pad(series.valid, height, width),
            cloud=reflect_pad(series.cloud, height, width),
            aux=pad(series.aux),
        )

    def _tile(self) -> int:
        multiple = self.config.network.multiple
        tile = self.options.tile // multiple * multiple
        if tile < multiple:
            raise ConfigError(f"tile is {self.options.tile}; this network needs at least {multiple} pixels.")
        return tile

    def _tiles(
        self,
        series: PreparedSeries,
        windows: Sequence[Window],
        steps: int,
        resamplings: int,
        seed: int,
        samples: int,
        ticks: Ticks,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return samples x tiles x (C, h, w) reflectance, and the cloud probabilities (tiles, T, h, w) used."""

        def cut(x: Tensor) -> Tensor:
            return torch.stack([x[0][..., *window.slices] for window in windows]).to(self.device)

        def each(x: Tensor) -> Tensor:
            return x.expand(len(windows), *x.shape[1:]).to(self.device)

        if self.rival is not None:
            with torch.inference_mode():
                answers = rival_images(
                    self.rival, windows, cloudy=cut(series.cloudy), valid=cut(series.valid), cloud=cut(series.cloud),
                    reference=each(series.reference), days=None if series.days is None else each(series.days),
                    aux=None if series.aux is None else cut(series.aux), steps=steps,
                    seeds=[seed + 7919 * number for number in range(samples)],
                )  # fmt: skip
            ticks.add(len(windows) * (1 + steps * samples))
            return to_reflectance(torch.stack(answers)).cpu().numpy(), None
        cloudy, valid = to_model_range(cut(series.cloudy)), cut(series.valid)
        used: Tensor | None = None
        with torch.inference_mode():
            if self.config.network.composite:
                used = self._cloud(cloudy, valid, cut(series.cloud), each(series.band_present))
            condition = self.network.condition(
                cloudy,
                aux=None if series.aux is None else to_model_range(cut(series.aux)),
                valid=valid,
                cloud=used,
                reference=each(series.reference),
                days=None if series.days is None else each(series.days),
                band_present=each(series.band_present),
            )
            ticks.add(len(windows))
            images = [
                to_reflectance(self._sample(condition, windows, steps, resamplings, seed + 7919 * number, ticks))
                for number in range(samples)
            ]
        stacked = torch.stack(images).cpu().numpy()
        return stacked, None if used is None else used.float().cpu().numpy()

    def _cloud(self, cloudy: Tensor, valid: Tensor, given: Tensor, band_present: Tensor) -> Tensor:
        """Return the cloud probability (B, T, H, W): the given masks, the model's estimate where they are NaN."""
        unknown = given.isnan()
        if not unknown.any():
            return given
        use = valid[:, :, None] & band_present[:, None, :, None, None]
        estimate = self.network.cloud_probability(cloudy.masked_fill(~use, 0.0), valid, band_present)
        reach = 2 * self.options.mask_growth + 1
        estimate = F.max_pool2d(estimate, reach, stride=1, padding=reach // 2)
        return torch.where(unknown, estimate, given)

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
        field = NoiseField(seed)

        def noise(draw: int) -> Tensor:
            frames, bands = mean.shape[1:3]
            tiles = [field.window(window, channels=frames * bands, draw=draw) for window in windows]
            return torch.from_numpy(np.stack(tiles)).view(mean.shape).to(mean.device)

        sigmas = karras_sigmas(steps, sigma_min=diffusion.sigma_min, sigma_max=diffusion.sigma_max)
        return sample(
            lambda x, sigma: self.denoiser(x, sigma, condition),
            mean,
            cached(noise),
            sigmas,
            alpha=diffusion.alpha,
            initial=mean if self.config.network.composite else 0.0,
            solver=self.options.solver or self._solver(),
            correction=self._correction(resamplings, condition),
            callback=lambda step, image: ticks.add(len(windows)),
        )

    @property
    def _sampling(self) -> SamplingConfig:
        assert isinstance(self.config, ModelConfig)
        return self.config.sampling

    def _solver(self) -> Solver:
        return "heun" if self._sampling.solver == "heun" else "euler"

    def _correction(self, resamplings: int, condition: Condition) -> Correction | None:
        if resamplings == 0:
            return None
        from sader.resampling import Resampler, ResamplerConfig

        config = ResamplerConfig(steps=resamplings, threshold=self._sampling.resample_threshold)
        return Resampler(config, self._guide, present=condition.present)

    @cached_property
    def _guide(self) -> Guide | None:
        """The guide of the resampling, made once: every tile is judged by the same one."""
        from sader.model.guide import make_guide

        name = self.options.guide or self._sampling.guide
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a learned guide without weights starts at random
            return make_guide(name, bands=len(self.bands), weights=shipped_guide(name, self.bands))

    def _finish(self, series: PreparedSeries, clear: Blend, spreads: Blend | None, cloud: Blend | None) -> Removal:
        """Return the result at the size of the input, with the reference date's clear pixels put back."""
        height, width = series.cloudy.shape[-2:]
        image = clear.result()[:, :height, :width].clip(min=0.0)
        used = None if cloud is None else cloud.result()[:, :height, :width]
        kept = np.zeros((height, width), dtype=bool)
        observed = series.valid[0].any(dim=0).numpy()
        date = int(series.reference[0])
        if date >= 0:
            given = series.cloud[0].numpy()
            probability = given if used is None else used
            own = series.cloudy[0, date].numpy()
            kept = (probability[date] < self.options.cloud_threshold) & series.valid[0, date].numpy()
            if not self.config.network.composite:
                image = follow(image, own, kept)
            image = np.where(kept, own, image)
        image = np.where(observed, image, np.nan).astype(np.float32)
        spread = None if spreads is None else spreads.result()[:, :height, :width]
        if spread is not None:
            spread = np.where(kept, 0.0, spread).astype(np.float32)
        back = list(series.output)
        return Removal(image[back], used, kept, None if spread is None else spread[back])


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
