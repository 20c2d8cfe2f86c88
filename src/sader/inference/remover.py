"""`CloudRemover`: cloudy arrays in, one clear array out. The only place that joins model, sampler and tiles.

Reflectance comes in and goes out as float32 in [0, 1]. What happens to a tile is in `tilework.py`; files and map
projections are in `sader.geo`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sader.baselines.baseline import Baseline
from sader.checkpoint import Checkpoint, build_model, find_checkpoint, load_checkpoint
from sader.data.batch import to_model_range
from sader.errors import ConfigError, ShapeError
from sader.inference.baseline_tile import check_baseline_steps
from sader.inference.inputs import PreparedSeries, parse_steps, prepare_series
from sader.inference.options import Removal, RemoverOptions
from sader.inference.scene_match import SceneMatch, decimation, look_factor
from sader.inference.tilework import TileWork
from sader.inference.tiling import Blend, Progress, Ticks, Window, plan_windows
from sader.method.diffusion import Denoiser
from sader.models import find_config

if TYPE_CHECKING:
    import xarray as xr

    from sader.geo.read.arrays import LoadFunction
    from sader.geo.scene.run import SceneReport

__all__ = ["DEFAULT_MODEL", "CloudRemover", "Removal", "RemoverOptions"]

DEFAULT_MODEL = "sader-s2-rgbn"


class CloudRemover(TileWork):
    """Removes clouds from arrays.

    >>> remover = CloudRemover.from_pretrained("sader-s2-rgbn")   # doctest: +SKIP
    >>> clear = remover(cloudy, reference=0)                      # doctest: +SKIP
    """

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
    def model(self) -> Denoiser | Baseline:
        """The network with all its weights, SADER's own or a baseline's."""
        return self.denoiser if self.baseline is None else self.baseline

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
        options: the fields of `sader.geo.scene.run.SceneOptions`: reference, seed, samples, uncertainty, overwrite ...

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
        options: tile, overlap, seed, samples, steps; for lazy arrays also chunks (see `sader.geo.xarray.lazy.clear`).

        >>> cube = xarray.open_dataarray("cube.nc", chunks={})                      # doctest: +SKIP
        >>> remover = CloudRemover.from_pretrained("sader-s2-rgbn")                 # doctest: +SKIP
        >>> remover.remove_xarray(cube, reference="2022-05-13").to_zarr("clear.zarr")   # doctest: +SKIP
        """
        from sader.geo.xarray.cube import clear_array

        return clear_array(array, self, reference=reference, cloud_mask=cloud_mask, **options)

    # ---------------------------------------------------------------- the steps of predict

    def _check_numbers(self, steps: int | str | None, samples: int, seed: int) -> tuple[int, int]:
        if samples < 1:
            raise ConfigError(f"samples is {samples}; expected at least 1.")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; expected a whole number from 0 on.")
        count, resamplings = parse_steps(steps, self.config)
        if self.baseline is not None:
            check_baseline_steps(self.baseline, steps, resamplings)
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

    @staticmethod
    def _in_given_bands(removal: Removal, series: PreparedSeries) -> Removal:
        back = list(series.output)
        return replace(
            removal, clear=removal.clear[back], spread=None if removal.spread is None else removal.spread[back]
        )

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
