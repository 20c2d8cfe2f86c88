"""`CloudRemover`: cloudy arrays in, one clear array out. The only place that joins model, sampler and tiles.

Reflectance comes in and goes out as float32 in [0, 1]; the model's [-1, 1] exists only in here. No files, no map
projections: those are in `sader.geo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sader.baselines.backend import check_rival_steps, rival_images
from sader.baselines.protocol import Rival
from sader.baselines.registry import find_config
from sader.checkpoint import Checkpoint, build_model, find_checkpoint, load_checkpoint, shipped_guide
from sader.config import ModelConfig, SamplingConfig
from sader.data.series import to_model_range, to_reflectance
from sader.diffusion import Denoiser
from sader.errors import ConfigError, ShapeError
from sader.inputs import PreparedSeries, parse_steps, prepare_series
from sader.model.contrast import with_contrast
from sader.model.matching import match_dates
from sader.model.mtcdn import MTCDN, Condition
from sader.sampling import Correction, NoiseSource, Solver, karras_sigmas, sample
from sader.scenematch import SceneMatch, decimation, feather, look_factor
from sader.tilegraph import expected_error, used_cloud, where_seen
from sader.tiling import Blend, NoiseField, Progress, Ticks, Window, plan_windows

if TYPE_CHECKING:
    import xarray as xr

    from sader.backends import OnnxTiles
    from sader.fast import FastSampler, QuickTiles
    from sader.geo.arrays import LoadFunction
    from sader.geo.scene import SceneReport
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
    guide_weights: str | None = None
    """File with the weights of a learned guide (sader pretrain-guide); None = the shipped ones, where there are."""
    cloud_threshold: float = 0.5
    """Probability of cloud or shadow from which the model's own estimate calls a pixel hidden; chosen, with the growth
    below, on training places of CloudSEN12."""
    mask_growth: int = 2
    """Pixels by which the model's own estimate is widened: a cloud's fringe costs more than a little clear land."""
    backend: str = "torch"
    """Who computes the tiles: "torch", "quick" (the same with the short cuts of `sader.fast`, in half precision where
    the GPU or CPU has it; where they cannot be had it is "torch"), or "onnx" (ONNX Runtime on the CPU; within 1e-4 of
    the first)."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; expected at least 1 tile per evaluation.")
        if self.backend not in ("torch", "quick", "onnx"):
            raise ConfigError(f"backend is {self.backend!r}; expected 'torch', 'quick' or 'onnx'.")


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
    """(C, H, W): standard deviation to be expected, 0 where pixels are kept: the network's own estimate of its error,
    where it has one, and the spread over the samples together. None for one sample of a network without estimate."""


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
    def model(self) -> Denoiser | Rival:
        """The network with all its weights, SADER's own or a rival's."""
        return self.denoiser if self.rival is None else self.rival

    @property
    def states_error(self) -> bool:
        """Whether the network says by itself how far off it may be, so that one sample has a spread."""
        return self.config.network.error_head

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
        samples: how many results with different noise to average; their standard deviation is part of
            `Removal.spread`.
        progress: called with (work done, work in all): each tile counts once for its dates and once per step.
        """
        count, resamplings = self._check_numbers(steps, samples, seed)
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
        dates, channels, height, width = series.cloudy.shape[1:]
        windows = plan_windows(height, width, tile=self._tile(), overlap=self.options.overlap)
        masks = self.has_cloud_head and self.config.network.composite
        clear = Blend(channels, height, width, overlap=self.options.overlap)
        spreads = Blend(channels, height, width, overlap=self.options.overlap)
        cloud = Blend(dates, height, width, overlap=self.options.overlap) if masks else None
        together = 1 if self.device.type == "cpu" else self.options.batch_size
        ticks = Ticks(len(windows) * (1 + count * samples), progress)
        match = self._match_series(series)
        for start in range(0, len(windows), together):
            group = windows[start : start + together]
            parts = [self._matched(series.cut(window), window, match) for window in group]
            tiles = self._tiles(parts, group, count, resamplings, seed, samples, ticks)
            for window, tile in zip(group, tiles, strict=True):
                clear.add(window, tile.clear)
                assert tile.spread is not None
                spreads.add(window, tile.spread)
                if cloud is not None and tile.cloud is not None:
                    cloud.add(window, tile.cloud)
        return self._finish(
            series,
            clear.result(),
            spreads.result() if samples > 1 or self.states_error else None,
            None if cloud is None else cloud.result(),
        )

    def predict_tile(
        self,
        cloudy: ArrayLike,
        *,
        window: Window,
        valid: ArrayLike | None = None,
        cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None = None,
        reference: int | None = None,
        bands: Sequence[str] | None = None,
        steps: int | str | None = None,
        seed: int = 0,
        samples: int = 1,
        days: Sequence[float] | None = None,
        aux: ArrayLike | None = None,
        match: SceneMatch | None = None,
    ) -> Removal:
        """Return what the network makes of one tile (T, C, h, w) of a larger scene; see `predict` for the arguments.

        window: where the tile lies in the scene. The noise belongs to the scene's pixels, so the result does not depend
            on who computes the tile, or when; with `plan_windows`, `scene_match` and `Blend` it is what `predict`
            computes.
        match: how the dates of the whole scene are brought into one light (`scene_match`).
        The tile is raw: values may be below 0 and no pixel of the reference date is put back yet, because what is kept
        is decided on the blend of the tiles (`finish`). `kept` says what this tile alone would keep; `spread` is 0
        for one sample.
        """
        change = None if match is None else match.change(window, np.asarray(cloudy, dtype=np.float32))
        return self.predict_tiles(
            [{"cloudy": cloudy, "valid": valid, "cloud_mask": cloud_mask, "scene_change": change}],
            windows=[window], reference=reference, bands=bands, steps=steps, seed=seed, samples=samples, days=days,
            aux=[aux],
        )[0]  # fmt: skip

    def predict_tiles(
        self,
        tiles: Sequence[Mapping[str, Any]],
        *,
        windows: Sequence[Window],
        reference: int | None = None,
        bands: Sequence[str] | None = None,
        steps: int | str | None = None,
        seed: int = 0,
        samples: int = 1,
        days: Sequence[float] | None = None,
        aux: Sequence[ArrayLike | None] | None = None,
    ) -> list[Removal]:
        """Return `predict_tile` of several tiles of one size, evaluated together.

        tiles: one mapping each, with "cloudy", and "valid" and "cloud_mask" where they are known; "scene_change" is
            what `SceneMatch.change` says about the tile.
        """
        count, resamplings = self._check_numbers(steps, samples, seed)
        series = [
            prepare_series(
                self.config.network,
                tile["cloudy"],
                reference=reference,
                cloud_mask=tile.get("cloud_mask"),
                days=days,
                aux=None if aux is None else aux[index],
                valid=tile.get("valid"),
                bands=bands,
                part=True,
                scene_change=tile.get("scene_change"),
            )
            for index, tile in enumerate(tiles)
        ]
        for one, window in zip(series, windows, strict=True):
            self._check_reference(one)
            if one.cloudy.shape[-2:] != (window.height, window.width):
                raise ShapeError(
                    f"the tile is {tuple(one.cloudy.shape[-2:])} pixels but its window "
                    f"{(window.height, window.width)}; give the window the tile was cut from."
                )
        made = self._tiles(series, windows, count, resamplings, seed, samples, Ticks(1, None))
        return [self._in_given_bands(tile, one) for tile, one in zip(made, series, strict=True)]

    def finish(
        self,
        image: NDArray[np.float32],
        own: NDArray[np.float32] | None,
        *,
        cloud: NDArray[np.float32] | None,
        valid: NDArray[np.bool_],
        reference: int | None,
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return (clear (C, H, W), kept (H, W)): the blended image with the reference date's clear pixels put back.

        own: (C, H, W) the reference date; cloud: (T, H, W) the blended probability; valid: bool (T, H, W).
        Every pixel is finished for itself, so that any part of a scene may be finished alone.
        """
        image = image.clip(min=0.0)
        kept = np.zeros(valid.shape[1:], dtype=bool)
        if reference is not None and own is not None and cloud is not None:
            kept = (cloud[reference] < self.options.cloud_threshold) & valid[reference]
            image = np.where(kept, own, image)
        return np.where(valid.any(axis=0), image, np.nan).astype(np.float32), kept

    def estimate_cloud(
        self,
        cloudy: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None = None,
        reference: int | None = None,
        bands: Sequence[str] | None = None,
    ) -> NDArray[np.float32]:
        """Return the probability (T, H, W) of cloud or shadow: the given masks, the model's own estimate elsewhere.

        All pixels are looked at together, so this is for tiles and for looks from afar. NaN where the model has no
        cloud head and no mask is given. Arguments as in `predict`.
        """
        series = prepare_series(
            self.config.network, cloudy, reference=reference, cloud_mask=cloud_mask, days=None, aux=None, valid=valid,
            bands=bands, part=True,
        )  # fmt: skip
        height, width = series.cloudy.shape[-2:]
        if not self.has_cloud_head:
            return series.cloud[0].numpy()
        padded = series.padded(self.config.network.multiple)
        inputs = [padded.valid, padded.cloud, padded.band_present, padded.reference]
        with torch.inference_mode():
            found = self._cloud(
                to_model_range(padded.cloudy.to(self.device)), *(value.to(self.device) for value in inputs)
            )
        return found[0, :, :height, :width].float().cpu().numpy()

    def scene_match(
        self,
        look: NDArray[np.float32],
        *,
        valid: NDArray[np.bool_],
        cloud: NDArray[np.float32],
        reference: int | None,
        shape: tuple[int, int],
    ) -> SceneMatch | None:
        """Return how the dates of a scene are brought into one light, from a look at it from afar (T, C, h, w).

        valid, cloud: (T, h, w), the latter as `estimate_cloud` gives it. shape: (height, width) of the scene. None
        where there is nothing to bring together: one tile sees all, one date only, or a network that matches no dates.
        """
        if max(shape) <= self._tile() or len(look) == 1 or not self.config.network.composite or not valid.any():
            return None
        return SceneMatch.fit(look, valid=valid, cloud=cloud, reference=reference, factor=look_factor(*shape))

    def remove_files(
        self,
        files: Sequence[str | Path],
        out: str | Path,
        *,
        bands: str | Sequence[str] | None = None,
        offset: str | float | None = "auto",
        mask: str | Path | Sequence[str | Path] | None = None,
        grid: str | Path | None = None,
        load: LoadFunction | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> SceneReport:
        """Write one clear image of several files as a Cloud Optimized GeoTIFF and return what was done.

        files: GeoTIFFs, folders, .SAFE products or STAC items of one place; read and written window by window.
        bands: names where the files have none. offset: "auto", None, or counts such as -1000 (baseline 04.00).
        mask: "scl", "s2cloudless", "omnicloudmask", or mask files; None: what the files bring, else the model's own.
        grid: the output's, as a raster file or "EPSG:32632/20"; None = that of the first file.
        load: a function path -> (array (C, H, W), rasterio profile) for files of another kind.
        options: the fields of `sader.geo.scene.SceneOptions`: reference, seed, samples, uncertainty, overwrite ...

        >>> remover = CloudRemover.from_pretrained("sader-s2-rgbn")                     # doctest: +SKIP
        >>> report = remover.remove_files(["march.tif", "may.tif"], "clear.tif")        # doctest: +SKIP
        >>> print(report.reference, report.pixels)                                      # doctest: +SKIP
        """
        from sader.geo.files import clear_files

        return clear_files(
            self, files, out, bands=bands, offset=offset, mask=mask, grid=grid, load=load, progress=progress,
            options=options,
        )  # fmt: skip

    def remove_xarray(
        self,
        array: xr.DataArray | xr.Dataset,
        *,
        reference: int | str | np.datetime64 | None = "auto",
        cloud_mask: xr.DataArray | None = None,
        **options: Any,
    ) -> xr.DataArray:
        """Return the clear image (band, y, x) of an array (time, band, y, x), with its coordinates and CRS.

        An array in memory is computed now, one backed by dask when the result is (and then on many machines, if a
        `dask.distributed` client is there). Axes and bands are found by name; integers are read with their CF
        attributes (scale_factor, add_offset, _FillValue), floats are reflectance with NaN = no data.

        reference: "auto" (the clearest date), an index, a date such as "2022-05-13", or None for a new image.
        cloud_mask: (time, y, x), True = cloud or shadow; None: the model estimates it.
        options: tile, overlap, seed, samples, steps; for lazy arrays also chunks (see `sader.geo.cluster.clear`).

        >>> cube = xarray.open_dataarray("cube.nc", chunks={})                      # doctest: +SKIP
        >>> remover = CloudRemover.from_pretrained("sader-s2-rgbn")                 # doctest: +SKIP
        >>> remover.remove_xarray(cube, reference="2022-05-13").to_zarr("clear.zarr")   # doctest: +SKIP
        """
        from sader.geo.xarrays import clear_array

        return clear_array(array, self, reference=reference, cloud_mask=cloud_mask, **options)

    # ---------------------------------------------------------------- the steps of predict

    def _check_numbers(self, steps: int | str | None, samples: int, seed: int) -> tuple[int, int]:
        if samples < 1:
            raise ConfigError(f"samples is {samples}; expected at least 1.")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; expected a whole number from 0 on.")
        count, resamplings = parse_steps(steps, self.config)
        if self.rival is not None:
            check_rival_steps(self.rival, steps, resamplings)
        return count, resamplings

    def _check_reference(self, series: PreparedSeries) -> None:
        """Refuse, before any work, a reference date whose clear pixels nobody can tell."""
        date = int(series.reference[0])
        if date >= 0 and not self.config.network.composite and series.cloud[0, date].isnan().any():
            raise ConfigError(
                f"reference={date} keeps that date's clear pixels, but its cloud mask is unknown and this "
                "model has no cloud head. Give cloud_mask, or use reference=None."
            )

    def _match_series(self, series: PreparedSeries) -> SceneMatch | None:
        """Return `scene_match` of a whole array, from the middle of every n x n pixels."""
        height, width = series.cloudy.shape[-2:]
        shape = height, width
        if max(shape) <= self._tile() or series.cloudy.shape[1] == 1 or not self.config.network.composite:
            return None
        every = decimation(*shape)
        look = series.cloudy[0][:, list(series.output)][..., *every].numpy()
        valid, cloud = series.valid[0][..., *every].numpy(), series.cloud[0][..., *every].numpy()
        date = int(series.reference[0])
        if valid.any():
            masks = [None if np.isnan(one).any() else one for one in cloud]
            names = [self.bands[position] for position in series.output]
            cloud = self.estimate_cloud(look, valid=valid, cloud_mask=masks, bands=names)
        return self.scene_match(look, valid=valid, cloud=cloud, reference=None if date < 0 else date, shape=shape)

    @staticmethod
    def _matched(part: PreparedSeries, window: Window, match: SceneMatch | None) -> PreparedSeries:
        if match is None:
            return part
        return part.with_change(match.change(window, part.cloudy[0][:, list(part.output)].numpy()))

    def _tile(self) -> int:
        multiple = self.config.network.multiple
        tile = self.options.tile // multiple * multiple
        if tile < multiple:
            raise ConfigError(f"tile is {self.options.tile}; this network needs at least {multiple} pixels.")
        return tile

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
        if self.rival is not None:
            with torch.inference_mode():
                answers = rival_images(
                    self.rival, places, cloudy=joined("cloudy"), valid=joined("valid"), cloud=joined("cloud"),
                    reference=reference, days=None if first.days is None else joined("days"),
                    aux=None if first.aux is None else joined("aux"), steps=steps,
                    seeds=[seed + 7919 * number for number in range(samples)],
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
            for number in range(samples):
                noise = self._noise(cloudy.shape, places, seed + 7919 * number)
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
            )
            ticks.add(len(windows))
            images = [
                to_reflectance(self._sample(condition, places, steps, resamplings, seed + 7919 * number, ticks))
                for number in range(samples)
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
        fields = [NoiseField(seed + 7919 * number) for number in range(samples)]
        noises = [
            torch.from_numpy(np.stack([field.window(place, channels=len(self.bands), draw=0) for place in places]))
            for field in fields
        ]
        engine = self._onnx if self.options.backend == "onnx" else self._quick
        assert engine is not None
        images, made = engine(
            cloudy=joined("cloudy"), valid=joined("valid"), cloud=joined("cloud"), reference=joined("reference"),
            noises=[noise[:, None].to(self.device) for noise in noises], band_present=joined("band_present"),
            change=change, steps=steps,
        )  # fmt: skip
        ticks.add(len(places) * (1 + steps * samples))
        if made.shown is not None and made.shown.any():
            own = joined("cloudy")[torch.arange(len(tiles)), joined("reference").clamp(min=0)]
            images = [feather(image, own, made.shown) for image in images]
        stacked = torch.stack(images)[..., :height, :width].cpu().numpy()
        clouds = made.cloud[..., :height, :width].cpu().numpy()
        errors = made.error[..., :height, :width].cpu().numpy() if self.states_error else None
        return [
            self._raw_tile(tile, stacked[:, index], clouds[index], None if errors is None else errors[index])
            for index, tile in enumerate(tiles)
        ]

    def _can_be_quick(self, tile: PreparedSeries, resamplings: int) -> bool:
        """Whether `_quick` computes what is asked for: Euler steps alone, nothing that its graph has no input for."""
        euler = (self.options.solver or self._solver()) == "euler"
        days_count = tile.days is not None and self.network.config.date_input == "days"
        return euler and not resamplings and tile.aux is None and not days_count

    @cached_property
    def _quick(self) -> QuickTiles | None:
        """The tiles of a network with composite by the short cuts of `sader.fast`; None where they are not wanted."""
        if self.options.backend != "quick" or self.rival is not None or not self.config.network.composite:
            return None
        from sader.fast import FastOptions, QuickTiles

        assert isinstance(self.config, ModelConfig)
        options = FastOptions.suited(self.device, composite=True)
        return QuickTiles(
            self.denoiser, self.config, options, threshold=self.options.cloud_threshold,
            growth=self.options.mask_growth,
        )  # fmt: skip

    @cached_property
    def _quick_sampler(self) -> FastSampler | None:
        """The paper's networks by the short cuts of `sader.fast`; None where they are not wanted."""
        if self.options.backend != "quick" or self.rival is not None or self.config.network.composite:
            return None
        from sader.fast import FastOptions, FastSampler

        assert isinstance(self.config, ModelConfig)
        options = FastOptions.suited(self.device, composite=False)
        return FastSampler(self.denoiser, self.config, options, guide=self._guide)

    @cached_property
    def _onnx(self) -> OnnxTiles:
        """The graphs of this model in ONNX Runtime, made when first needed."""
        from sader.backends import OnnxTiles

        if self.device.type != "cpu":
            raise ConfigError(f"backend onnx computes on the CPU, but the device is {self.device}. Use device='cpu'.")
        if self.rival is not None:
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

    @staticmethod
    def _in_given_bands(removal: Removal, series: PreparedSeries) -> Removal:
        back = list(series.output)
        return replace(
            removal, clear=removal.clear[back], spread=None if removal.spread is None else removal.spread[back]
        )

    def _cloud(self, cloudy: Tensor, valid: Tensor, given: Tensor, band_present: Tensor, reference: Tensor) -> Tensor:
        """Return the cloud probability (B, T, H, W): the given masks, the model's estimate where they are NaN."""
        if not given.isnan().any():
            return given
        return used_cloud(
            self.network, cloudy, valid, given, band_present, reference,
            threshold=self.options.cloud_threshold, growth=self.options.mask_growth,
        )  # fmt: skip

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
            self._noise(mean.shape, windows, seed),
            sigmas,
            alpha=diffusion.alpha,
            initial=mean if self.config.network.composite else 0.0,
            solver=self.options.solver or self._solver(),
            correction=self._correction(resamplings, condition),
            callback=lambda step, image: ticks.add(len(windows)),
        )

    def _noise(self, shape: Sequence[int], windows: Sequence[Window], seed: int) -> NoiseSource:
        """Return the source of noise (tiles, S, C, h, w) at the places of the tiles."""
        field = NoiseField(seed)

        def noise(draw: int) -> Tensor:
            tiles = [field.window(window, channels=shape[1] * shape[2], draw=draw) for window in windows]
            return torch.from_numpy(np.stack(tiles)).view(*shape).to(self.device)

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
            weights = self.options.guide_weights or shipped_guide(name, self.bands)
            return make_guide(name, bands=len(self.bands), weights=weights)

    def _finish(
        self,
        series: PreparedSeries,
        image: NDArray[np.float32],
        spread: NDArray[np.float32] | None,
        used: NDArray[np.float32] | None,
    ) -> Removal:
        """Return the result of a whole image, with the reference date's clear pixels put back."""
        date = int(series.reference[0])
        asked = date >= 0
        clear, kept = self.finish(
            image,
            series.cloudy[0, date].numpy() if asked else None,
            cloud=series.cloud[0].numpy() if used is None else used,
            valid=series.valid[0].numpy(),
            reference=date if asked else None,
        )
        if spread is not None:
            spread = np.where(kept, 0.0, spread).astype(np.float32)
        return self._in_given_bands(Removal(clear, used, kept, spread), series)


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
