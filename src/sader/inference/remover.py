"""`CloudRemover`: cloudy arrays in, one clear array out. It joins model, options, tiles and the loop over them.

Reflectance comes in and goes out as float32 in [0, 1]. `inference.tile` computes a tile; files and map projections are
in `sader.geo`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors.torch import load, save
from torch import Tensor

from sader.bands import BANDS_RGBN
from sader.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, shipped_guide
from sader.errors import CheckpointError, ConfigError, ShapeError
from sader.inference.inputs import TileInputs, check_whole_number, parse_steps, prepare_series
from sader.inference.masks import estimate, four_bands, has_few_bands, load_fallback, used_mask
from sader.inference.noise import NoiseField, sample_seeds
from sader.inference.options import Removal, RemoverOptions
from sader.inference.scene_match import SceneMatch, decimation, look_factor
from sader.inference.tile import OnStep, SaderTile, Tile, TileSettings
from sader.inference.tiling import Blend, Progress, Ticks, Window, plan_windows
from sader.method.diffusion import Denoiser
from sader.method.guides import make_guide
from sader.model.blocks import to_model_range
from sader.model.matching import match_dates
from sader.model.mtcdn import MTCDN
from sader.models import build_model, find_config
from sader.presets import ModelConfig

if TYPE_CHECKING:
    from sader.method.resampling import Guide
    from sader.models import AnyModel, AnyModelConfig

__all__ = ["DEFAULT_MODEL", "CloudRemover", "Removal", "RemoverOptions"]

DEFAULT_MODEL = "sader-s2-rgbn"
_MOST_UNPICKLED = 2
_unpickled: dict[str, CloudRemover] = {}
_lock = threading.Lock()


class RawTiles(NamedTuple):
    """Tiles before blending, tensors on the remover's device."""

    clear: Tensor
    """(B, C, H, W) reflectance, the mean of the samples; values may be below 0, no pixel of the reference is copied."""
    spread: Tensor
    """(B, C, H, W): expected standard deviation; 0 for one sample of a network that does not estimate its error."""
    cloud: Tensor | None
    """(B, T, H, W): mask of cloud or shadow that was used; None for networks that use no masks."""


class CloudRemover:
    """Removes clouds from arrays.

    >>> remover = CloudRemover.from_pretrained("sader-s2-rgbn")   # doctest: +SKIP
    >>> clear = remover(cloudy, reference=0)                      # doctest: +SKIP

    A remover can be pickled. It may be used from several threads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str | torch.device | None = None,
        options: RemoverOptions | None = None,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model: AnyModel = checkpoint.model.to(self.device).eval()
        self.config: AnyModelConfig = checkpoint.config
        self.card = checkpoint.card
        self.options = options or RemoverOptions()
        if not isinstance(self.model, Denoiser) and (size := self.model.config.fixed_size) is not None:
            self.options = replace(self.options, tile=size, overlap=min(self.options.overlap, size // 2))

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path = DEFAULT_MODEL, **kwargs: Any) -> CloudRemover:
        """Return a remover with the weights of a shipped name, a file or a hub repository."""
        return cls(load_checkpoint(find_checkpoint(name_or_path)), **kwargs)

    @classmethod
    def from_preset(cls, name: str, *, seed: int = 0, **kwargs: Any) -> CloudRemover:
        """Return an UNTRAINED remover of a preset or baseline, with random weights."""
        config = find_config(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(config)
        return cls(Checkpoint(model, config, {"trained": False}), **kwargs)

    def with_options(self, **changes: Any) -> CloudRemover:
        """Return a remover with the same model and other `RemoverOptions`; this one where nothing changes."""
        options = replace(self.options, **changes)
        if options == self.options:
            return self
        return type(self)(Checkpoint(self.model, self.config, self.card), device=self.device, options=options)

    @property
    def denoiser(self) -> Denoiser:
        """SADER's denoiser; a baseline has none."""
        if not isinstance(self.model, Denoiser):
            raise ConfigError(f"the model {self.config.name!r} is a baseline without a denoiser.")
        return self.model

    # ---------------------------------------------------------------- capabilities

    @property
    def bands(self) -> tuple[str, ...]:
        """The model's bands, in its order."""
        return self.config.network.bands

    @property
    def finds_clouds(self) -> bool:
        """Whether the model estimates cloud masks."""
        return self.config.network.finds_clouds

    @property
    def states_error(self) -> bool:
        """Whether the model estimates its own error, so that one sample has a spread."""
        return self.config.network.states_error

    @property
    def matches_dates(self) -> bool:
        """Whether the model uses masks and matches the dates to a reference date."""
        return self.config.network.matches_dates

    @property
    def needs_all_bands(self) -> bool:
        """Whether every band of the model must be given."""
        return self.config.network.needs_all_bands

    @property
    def tile_size(self) -> int:
        """Edge of a tile in pixels: that of the options, rounded down to the network's multiple."""
        multiple = self.config.network.multiple
        tile = self.options.tile // multiple * multiple
        if tile < multiple:
            raise ConfigError(f"tile is {self.options.tile}; this network needs at least {multiple} pixels.")
        return tile

    def check_numbers(self, steps: int | str | None, samples: int = 1, seed: int = 0) -> tuple[int, int]:
        """Return (steps, resamplings) after checking all three numbers."""
        check_whole_number("samples", samples, least=1)
        check_whole_number("seed", seed, least=0)
        count, resamplings = parse_steps(steps, self.config)
        if isinstance(self.model, Denoiser) or steps is None:
            return count, resamplings
        if self.model.config.steps is None:
            raise ConfigError(f"steps is {steps!r}, but this model answers in one pass and takes no steps; omit it.")
        if resamplings:
            raise ConfigError(
                f"steps is {steps!r}; only SADER resamples. Give a plain number, such as {self.model.config.steps}."
            )
        return count, resamplings

    def uses_fallback_masks(self, present: Sequence[bool]) -> bool:
        """Whether masks come from the fallback model, because too few of this model's bands are `present`."""
        if not self.finds_clouds or len(self.bands) <= len(BANDS_RGBN):
            return False
        return has_few_bands(self.bands, present) and self._fallback is not None

    # ---------------------------------------------------------------- whole images

    def __call__(self, cloudy: ArrayLike, **kwargs: Any) -> NDArray[np.float32]:
        """Return the clear image (C, H, W) of the dates cloudy (T, C, H, W); see `predict` for the arguments."""
        return self.predict(cloudy, **kwargs).clear

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

        cloudy: (T, C, H, W) reflectance, any T >= 1 and any size. A NumPy masked array marks nodata by its mask.
        reference: the date to clean: the result has its radiometry and its clear pixels unchanged. None: a new image
            (the paper's task).
        cloud_mask: bool (T, H, W), True = cloud or shadow; or a list with None for dates whose mask is unknown. Unknown
            masks are estimated by the model.
        days: one number per date, days since any start; used only by networks with date_input="days".
        aux: (T, A, H, W), auxiliary input bands (NIR or SAR of the paper's networks).
        valid: bool (T, H, W), False for nodata. NaN is refused unless it is marked here.
        bands: names of the C bands, if they are not the model's own in the model's order.
        steps: 4, or "4+1" for four steps with one resampling each (the paper); None = the checkpoint's own.
        samples: number of results with different noise to average; their standard deviation is part of
            `Removal.spread`.
        progress: called with (work done, total work): each tile counts once for its dates and once per step.
        """
        count, resamplings = self.check_numbers(steps, samples, seed)
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
        self.check_reference(series)
        dates, channels, height, width = series.cloudy.shape[1:]
        windows = plan_windows(height, width, tile=self.tile_size, overlap=self.options.overlap)
        clear = Blend(channels, height, width, overlap=self.options.overlap)
        spreads = Blend(channels, height, width, overlap=self.options.overlap)
        cloud = Blend(dates, height, width, overlap=self.options.overlap) if self.matches_dates else None
        together = 1 if self.device.type == "cpu" else self.options.batch_size
        ticks = Ticks(len(windows) * (1 + count * samples), progress)
        match = self._match_series(series)
        for start in range(0, len(windows), together):
            group = windows[start : start + together]
            parts = TileInputs.joined([self._matched(series.cut(window), window, match) for window in group])
            raw = self.compute(
                parts,
                group,
                steps=count,
                resamplings=resamplings,
                seed=seed,
                samples=samples,
                on_step=partial(ticks.add, len(group)),
            )
            for index, window in enumerate(group):
                clear.add(window, raw.clear[index].cpu().numpy())
                spreads.add(window, raw.spread[index].cpu().numpy())
                if cloud is not None and raw.cloud is not None:
                    cloud.add(window, raw.cloud[index].float().cpu().numpy())
        return self._finish(
            series,
            clear.result(),
            spreads.result() if samples > 1 or self.states_error else None,
            None if cloud is None else cloud.result(),
        )

    # ---------------------------------------------------------------- tiles

    @torch.inference_mode()
    def compute(
        self,
        inputs: TileInputs,
        windows: Sequence[Window],
        *,
        steps: int,
        resamplings: int = 0,
        seed: int = 0,
        samples: int = 1,
        on_step: OnStep | None = None,
    ) -> RawTiles:
        """Return the raw tiles of checked inputs, one window of the scene each. Threads may call this at once.

        inputs: any size; they are padded to the network's multiple and the result is cut. The noise follows from the
        windows, so that the result does not depend on the order or the batch.
        """
        height, width = inputs.size
        inputs = self._with_fallback_masks(inputs.padded(self.config.network.multiple).to(self.device))
        places = [Window(window.row, window.col, *inputs.size) for window in windows]
        noises = [self.noise_field(one, steps).of(places, self.device) for one in sample_seeds(seed, samples)]
        output = self._tile(inputs, noises, steps=steps, resamplings=resamplings, on_step=on_step)
        images = output.images[..., :height, :width]
        if not bool(images.isfinite().all()):
            raise CheckpointError(
                f"the network {self.config.name!r} returned NaN or infinite values. Its weights may be damaged; use "
                "others, or backend 'torch' if the backend is another one."
            )
        clear = images.mean(dim=0)
        spread = (images - clear).square().mean(dim=0).sqrt()
        if output.error is not None:
            error = output.error[..., :height, :width]
            spread = error if samples == 1 else torch.hypot(spread, error)
        cloud = None if output.cloud is None else output.cloud[..., :height, :width]
        if not self.matches_dates:
            clear = self._following(clear, inputs, height, width)
        return RawTiles(clear, spread, cloud)

    def predict_tile(
        self,
        cloudy: ArrayLike,
        *,
        window: Window,
        valid: ArrayLike | None = None,
        cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None = None,
        match: SceneMatch | None = None,
        aux: ArrayLike | None = None,
        **kwargs: Any,
    ) -> Removal:
        """Return the raw result of one tile (T, C, h, w) of a larger scene; see `predict_tiles`.

        match: the scene's `scene_match`. With `plan_windows`, `scene_match` and `Blend` the result is that of
        `predict`.
        """
        change = None if match is None else match.change(window, np.asarray(cloudy, dtype=np.float32))
        tile = {"cloudy": cloudy, "valid": valid, "cloud_mask": cloud_mask, "scene_change": change}
        return self.predict_tiles([tile], windows=[window], aux=[aux], **kwargs)[0]

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
        """Return the raw results of tiles of one size, evaluated together.

        tiles: one mapping each, with "cloudy", optionally "valid" and "cloud_mask", and "scene_change" from
            `SceneMatch.change`. windows: their positions in the scene.
        Values may be below 0 and no pixel of the reference date is copied yet, because `finish` decides on the blend
        of the tiles. `kept` is the decision for this tile alone; `spread` is 0 for one sample without an error head.
        """
        count, resamplings = self.check_numbers(steps, samples, seed)
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
            self.check_reference(one)
            if one.size != (window.height, window.width):
                raise ShapeError(
                    f"the tile is {one.size} pixels but its window {(window.height, window.width)}; give the window "
                    "the tile was cut from."
                )
        raw = self.compute(
            TileInputs.joined(series), windows, steps=count, resamplings=resamplings, seed=seed, samples=samples
        )
        return [self._removal(raw, index, one) for index, one in enumerate(series)]

    def finish(
        self,
        image: NDArray[np.float32],
        own: NDArray[np.float32] | None,
        *,
        cloud: NDArray[np.float32] | None,
        valid: NDArray[np.bool_],
        reference: int | None,
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return (clear (C, H, W), kept (H, W)): the blended image with the reference date's clear pixels copied in.

        own: (C, H, W) the reference date; cloud: (T, H, W) the blended mask; valid: bool (T, H, W). Pixels are
        independent of each other, so that any part of a scene can be finished alone.
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
        """Return the masks (T, H, W) of cloud or shadow: the given ones, and the model's estimate elsewhere.

        The array is not cut into tiles, so this is for tiles and overviews. NaN where no mask is given and the model
        estimates none. Arguments as in `predict`.
        """
        series = prepare_series(
            self.config.network, cloudy, reference=reference, cloud_mask=cloud_mask, valid=valid, bands=bands, part=True
        )
        height, width = series.size
        if not self.finds_clouds:
            return series.cloud[0].numpy()
        padded = series.padded(self.config.network.multiple).to(self.device)
        with torch.inference_mode():
            padded = self._with_fallback_masks(padded)
            masks = self._plain.masks(padded) if bool(padded.cloud.isnan().any()) else padded.cloud
        return masks[0, :, :height, :width].float().cpu().numpy()

    def scene_match(
        self,
        look: NDArray[np.float32],
        *,
        valid: NDArray[np.bool_],
        cloud: NDArray[np.float32],
        reference: int | None,
        shape: tuple[int, int],
    ) -> SceneMatch | None:
        """Return the radiometric match of a scene's dates, fitted on an overview (T, C, h, w) of it.

        valid, cloud: (T, h, w), the latter from `estimate_cloud`. shape: (height, width) of the scene. None for a scene
        of one tile or one date, and for a model that matches no dates.
        """
        if max(shape) <= self.tile_size or len(look) == 1 or not self.matches_dates or not valid.any():
            return None
        return SceneMatch.fit(look, valid=valid, cloud=cloud, reference=reference, factor=look_factor(*shape))

    def noise_field(self, seed: int, steps: int) -> NoiseField:
        """Return the noise of one sample; balanced where a single step corrects a composite."""
        return NoiseField(seed, balanced=steps == 1 and self.matches_dates)

    def check_reference(self, series: TileInputs) -> None:
        """Raise, before any work, if the clear pixels of the reference date cannot be known."""
        date = int(series.reference[0])
        if date >= 0 and not self.matches_dates and series.cloud[0, date].isnan().any():
            raise ConfigError(
                f"reference={date} keeps that date's clear pixels, but its cloud mask is unknown and this "
                "model has no cloud head. Give cloud_mask, or use reference=None."
            )

    # ---------------------------------------------------------------- pickling

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the weights as safetensors bytes; a process that receives them again finds the model it has."""
        state = (self.config, self.card, self.options, self.device.type)
        return _receive, (*state, self._packed_weights, self.checksum)

    @cached_property
    def _packed_weights(self) -> bytes:
        def smallest(value: Tensor) -> Tensor:
            # Shipped weights are float16 numbers in float32: as float16 they take half the bytes without loss.
            value = value.detach().cpu().contiguous()
            half = value.to(torch.float16)
            exact = value.dtype == torch.float32 and torch.equal(half.to(torch.float32), value)
            return half if exact else value

        return save({name: smallest(value) for name, value in self.model.state_dict().items()})

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of weights, config, options and kind of device."""
        digest = hashlib.sha256(self._packed_weights)
        digest.update(repr((self.config, self.options, self.device.type)).encode())
        return digest.hexdigest()

    def __dask_tokenize__(self) -> str:
        return self.checksum

    # ---------------------------------------------------------------- parts

    @cached_property
    def _plain(self) -> SaderTile:
        """The tile of SADER's networks in float32."""
        assert isinstance(self.config, ModelConfig)
        own = self.config.sampling
        settings = TileSettings(
            threshold=self.options.cloud_threshold,
            growth=self.options.mask_growth,
            solver=self.options.solver or ("heun" if own.solver == "heun" else "euler"),
            resample_threshold=own.resample_threshold,
            guide=lambda: self._guide,
        )
        return SaderTile(self.denoiser, settings).eval()

    @cached_property
    def _tile(self) -> Tile:
        """The tile of the backend."""
        backend = self.options.backend
        if backend == "onnx" and self.device.type != "cpu":
            raise ConfigError(f"backend onnx computes on the CPU, but the device is {self.device}. Use device='cpu'.")
        if not isinstance(self.model, Denoiser):
            from sader.inference.baseline_tile import BaselineTile

            if backend == "onnx":
                raise ConfigError(f"backend onnx runs SADER's own networks, not {self.config.name}. Use backend torch.")
            return BaselineTile(self.model).eval()
        if backend == "accelerated":
            from sader.inference.accelerate import AcceleratedTile, Acceleration

            settings = Acceleration.for_device(self.device, composite=self.matches_dates, compile=self.options.compile)
            return AcceleratedTile(self._plain, settings)
        if backend == "onnx":
            from sader.inference.onnx import OnnxTile

            return OnnxTile(self._plain, self.config.name)
        return self._plain

    @cached_property
    def _fallback(self) -> MTCDN | None:
        return load_fallback(self.device, multiple=self.config.network.multiple)

    @cached_property
    def _guide(self) -> Guide | None:
        """The guide of the resampling, the same one for every tile."""
        assert isinstance(self.config, ModelConfig)
        name = self.options.guide or self.config.sampling.guide
        with _lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a learned guide without weights starts at random
            weights = self.options.guide_weights or shipped_guide(name, self.bands)
            return make_guide(name, bands=len(self.bands), weights=weights)

    def _with_fallback_masks(self, inputs: TileInputs) -> TileInputs:
        """Return the inputs with masks of the fallback network, where the bands are too few for the model's own."""
        if not self.uses_fallback_masks(inputs.band_present.all(dim=0).tolist()):
            return inputs
        if not bool(inputs.cloud.isnan().any()):
            return inputs
        assert self._fallback is not None
        cloudy, present = four_bands(self.bands, to_model_range(inputs.cloudy), inputs.band_present)
        probability = estimate(self._fallback, cloudy, inputs.valid, inputs.cloud, present, inputs.reference)
        own = self.options
        cloud = used_mask(
            probability, inputs.valid, inputs.cloud, threshold=own.cloud_threshold, growth=own.mask_growth
        )
        return replace(inputs, cloud=cloud)

    def _following(self, images: Tensor, inputs: TileInputs, height: int, width: int) -> Tensor:
        """Return images (B, C, H, W) in the radiometry of their reference dates, fitted on the clear pixels.

        For networks without a reference date: their result is a new image, and copying clear pixels of a date into it
        would leave an edge around each of them.
        """
        followed = []
        for index, date in enumerate(inputs.reference.tolist()):
            image = images[index]
            if date >= 0:
                own = inputs.cloudy[index, date, :, :height, :width]
                clear = inputs.cloud[index, date, :height, :width] < self.options.cloud_threshold
                clear = clear & inputs.valid[index, date, :height, :width]
                pair = to_model_range(torch.stack([own, image]))[None]
                weight = torch.stack([clear, torch.ones_like(clear)])[None].float()
                anchor = torch.zeros(1, dtype=torch.long, device=image.device)
                image = ((match_dates(pair, weight, anchor)[0, 1] + 1) / 2).clamp(min=0)
            followed.append(image)
        return torch.stack(followed)

    def _match_series(self, series: TileInputs) -> SceneMatch | None:
        """Return `scene_match` of a whole array, from the central pixel of every n x n."""
        height, width = series.size
        shape = height, width
        if max(shape) <= self.tile_size or series.cloudy.shape[1] == 1 or not self.matches_dates:
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
    def _matched(part: TileInputs, window: Window, match: SceneMatch | None) -> TileInputs:
        if match is None:
            return part
        return part.with_change(match.change(window, part.cloudy[0][:, list(part.output)].numpy()))

    def _removal(self, raw: RawTiles, index: int, series: TileInputs) -> Removal:
        """Return one raw tile in the user's bands, as arrays."""
        date, back = int(series.reference[0]), list(series.output)
        cloud = None if raw.cloud is None else raw.cloud[index].float().cpu().numpy()
        kept = np.zeros(series.size, dtype=bool)
        if date >= 0:
            mask = series.cloud[0].numpy() if cloud is None else cloud
            kept = (mask[date] < self.options.cloud_threshold) & series.valid[0, date].numpy()
        clear, spread = (value[index].cpu().numpy()[back] for value in (raw.clear, raw.spread))
        return Removal(clear, cloud, kept, spread)

    def _finish(
        self,
        series: TileInputs,
        image: NDArray[np.float32],
        spread: NDArray[np.float32] | None,
        used: NDArray[np.float32] | None,
    ) -> Removal:
        """Return the result of a whole image, with the reference date's clear pixels copied in."""
        date, back = int(series.reference[0]), list(series.output)
        clear, kept = self.finish(
            image,
            series.cloudy[0, date].numpy() if date >= 0 else None,
            cloud=series.cloud[0].numpy() if used is None else used,
            valid=series.valid[0].numpy(),
            reference=date if date >= 0 else None,
        )
        if spread is not None:
            spread = np.where(kept, 0.0, spread).astype(np.float32)[back]
        return Removal(clear[back], used, kept, spread)


def _receive(
    config: AnyModelConfig, card: dict[str, Any], options: RemoverOptions, device: str, weights: bytes, checksum: str
) -> CloudRemover:
    """Return an unpickled remover; the process keeps the last ones, because dask sends one with every task."""
    with _lock:
        found = _unpickled.pop(checksum, None)
        if found is None:
            if device == "cuda" and not torch.cuda.is_available():
                raise ConfigError(
                    "the remover is on a GPU (cuda), but this process has none; expected one kind of device "
                    "everywhere. Make the remover with device='cpu', or start the workers on machines with a GPU."
                )
            with torch.random.fork_rng(devices=[]):  # building a model draws random weights
                model = build_model(config)
            own, tensors = model.state_dict(), load(weights)
            model.load_state_dict({name: tensors[name].to(own[name].dtype) for name in own}, strict=True)
            found = CloudRemover(Checkpoint(model, config, card), device=device, options=options)
        _unpickled[checksum] = found  # the most recent last
        while len(_unpickled) > _MOST_UNPICKLED:
            del _unpickled[next(iter(_unpickled))]
        return found
