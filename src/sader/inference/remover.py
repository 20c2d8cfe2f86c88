"""`CloudRemover`: cloudy arrays in, one clear array out. It joins model, options, tiles and the loop over them.

Reflectance comes in and goes out as float32 in [0, 1]. `inference.tile` computes a tile; files and map projections are
in `sader.geo`.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors.torch import load, save
from torch import Tensor

from sader.checkpoint import Checkpoint, fill_model, find_checkpoint, load_checkpoint, shipped_guide, untrained
from sader.errors import CheckpointError, ConfigError, check_known, did_you_mean
from sader.inference.inputs import check_whole_number, parse_steps, prepare_series
from sader.inference.masks import MaskSettings, TileMasks, date_heads, mask_network
from sader.inference.noise import NoiseField, NoiseOf, sample_seeds
from sader.inference.scene import (
    ArrayScene,
    ArraySink,
    ScenePlan,
    computed_once,
    local_executor,
    run_rows,
    whole_inputs,
)
from sader.inference.tile import BaselineTile, SaderTile, Tile, TileInputs, TileOutput, TileSettings, feathered
from sader.inference.tiling import Progress, Window
from sader.inference.values import MOST_SOURCES, to_device
from sader.method.diffusion import Denoiser, Solver
from sader.method.guides import GUIDES, make_guide
from sader.method.resampling import RESAMPLINGS
from sader.model.blocks import to_model_range
from sader.model.heads import MaskNetworkConfig
from sader.model.matching import match_dates
from sader.models import ModelConfig, build_model

if TYPE_CHECKING:
    from sader.method.resampling import Guide
    from sader.models import AnyModel, AnyModelConfig

__all__ = ["DEFAULT_MODEL", "CloudRemover", "Removal", "RemoverOptions"]

DEFAULT_MODEL = "sader-s2-rgbn"
BACKENDS = ("torch", "accelerated", "onnx")
_MOST_UNPICKLED = 2
_unpickled: dict[str, CloudRemover] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class RemoverOptions(MaskSettings):
    """Tiling, sampling, masks and backend of a remover."""

    tile: int = 512
    """Edge of a tile in pixels, 64 to 1024; a smaller image is one tile. Dates are matched within a tile, so that
    small tiles match on less evidence."""
    overlap: int = 64
    """Pixels shared by neighbouring tiles, at most half a tile."""
    batch_size: int = 1
    """Tiles per evaluation on a GPU. Always 1 on a CPU: larger batches are no faster there, and matrix products round
    differently for different batch sizes."""
    solver: Solver | None = None
    """"euler" or "heun"; None = the checkpoint's own."""
    resampling: str | None = None
    """"paper" (Algorithm 1), "public_code" or "default" (`method.resampling`); None = the checkpoint's own."""
    guide: str | None = None
    """Guide of the resampling; None = the checkpoint's own."""
    guide_weights: str | None = None
    """File with the weights of a learned guide (sader pretrain-guide); None = the shipped ones, where they exist."""
    min_count: int = 0
    """Dates that must show a reconstructed pixel clearly; with fewer it is nodata. 0: none is, and pixels that no
    date shows are filled from their surroundings."""
    max_uncertainty: float | None = None
    """Largest expected error of a reconstructed pixel, in reflectance, in any band; above it becomes nodata. None: none
    does."""
    backend: str = "torch"
    """"torch": PyTorch in float32. "accelerated": half precision where the GPU or CPU has it (`inference.accelerate`).
    "onnx": ONNX Runtime on the CPU, within 1e-4 of "torch"."""
    compile: bool = False
    """Backend accelerated: also use `torch.compile`. It takes up to two minutes before the first tile and pays for the
    paper's network over some hundred tiles."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; expected at least 1 tile per evaluation.")
        check_known("backend", self.backend, BACKENDS)
        for what, name, known in (("resampling", self.resampling, RESAMPLINGS), ("guide", self.guide, GUIDES)):
            if name is not None and name not in known:
                raise ConfigError(f"unknown {what} {name!r}{did_you_mean(name, known)}")
        super().__post_init__()
        if self.min_count < 0:
            raise ConfigError(f"min_count is {self.min_count}; expected 0 or more clear dates, such as 1.")
        if self.max_uncertainty is not None and not self.max_uncertainty > 0:
            raise ConfigError(f"max_uncertainty is {self.max_uncertainty}; expected reflectance above 0, such as 0.02.")


def default_backend(device: torch.device) -> str:
    """Return the backend for scenes where none is chosen: accelerated on a GPU, torch on a CPU."""
    return "accelerated" if device.type == "cuda" else "torch"


@dataclass(frozen=True)
class Removal:
    """A clear image with its masks and expected error; arrays cover the whole image."""

    clear: NDArray[np.float32]
    """(C, H, W) reflectance; NaN where no date has data, and where `min_count` or `max_uncertainty` withholds it."""
    cloud: NDArray[np.float32] | None
    """(T, H, W) mask of cloud or shadow that was used, given or estimated; None for networks that use no masks."""
    kept: NDArray[np.bool_]
    """(H, W): pixels taken unchanged from the reference date."""
    spread: NDArray[np.float32] | None
    """(C, H, W): expected standard deviation, 0 where the date is clear: the network's error estimate and the spread of
    the samples together. None for one sample of a network that does not estimate its error."""
    source_date: NDArray[np.uint8] | None = None
    """(H, W): the date that contributes most, counted from 1; 0 where `clear` is NaN, 255 where the pixel is filled
    from its surroundings. None where the weights of the dates are unknown (`CloudRemover.states_source`), or for more
    than 254 dates."""


class CloudRemover:
    """Removes clouds from arrays.

    >>> remover = CloudRemover.from_pretrained("sader-s2-rgbn")   # doctest: +SKIP
    >>> clear = remover(cloudy, reference=0)                      # doctest: +SKIP

    A remover can be pickled. It may be used from several threads.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, device: str | torch.device | None = None, options: RemoverOptions | None = None
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model: AnyModel = checkpoint.model.to(self.device).eval()
        self.config: AnyModelConfig = checkpoint.config
        self.card = checkpoint.card
        self.weights_sha256 = checkpoint.sha256
        self.options = options or RemoverOptions()
        self._default_steps = checkpoint.config.default_steps
        if not isinstance(self.model, Denoiser) and (size := self.model.config.fixed_size) is not None:
            self.options = replace(self.options, tile=size, overlap=min(self.options.overlap, size // 2))
        mask_network(self.device)  # loaded once, before the first tile
        date_heads(self.device)
        self.plain_tile = self._make_tile(self.model) if isinstance(self.model, Denoiser) else None
        """The tile of SADER's networks in float32; None for baselines."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path = DEFAULT_MODEL, **kwargs: Any) -> CloudRemover:
        """Return a remover with the weights of a shipped name, a file or a hub repository."""
        return cls(load_checkpoint(find_checkpoint(name_or_path)), **kwargs)

    @classmethod
    def from_preset(cls, name: str, *, seed: int = 0, **kwargs: Any) -> CloudRemover:
        """Return an UNTRAINED remover of a preset or baseline, with random weights."""
        return cls(untrained(name, seed=seed), **kwargs)

    def with_options(self, **changes: Any) -> CloudRemover:
        """Return a remover with the same model and other `RemoverOptions`; this one where nothing changes."""
        options = replace(self.options, **changes)
        if options == self.options:
            return self
        checkpoint = Checkpoint(self.model, self.config, self.card, self.weights_sha256)
        return type(self)(checkpoint, device=self.device, options=options)

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
    def states_error(self) -> bool:
        """Whether the model estimates its own error, so that one sample has a spread."""
        return self.config.network.states_error

    @property
    def states_source(self) -> bool:
        """Whether it is known how much each date contributes to a pixel; not so with backend onnx."""
        return self.matches_dates and self.options.backend != "onnx"

    @property
    def matches_dates(self) -> bool:
        """Whether the model uses masks and matches the dates to a reference date."""
        return self.config.network.matches_dates

    @property
    def needs_all_bands(self) -> bool:
        """Whether every band of the model must be given."""
        return self.config.network.needs_all_bands

    @property
    def multiple(self) -> int:
        """Height and width are padded to a multiple of this where the mask network runs."""
        return math.lcm(self.config.network.multiple, MaskNetworkConfig().multiple)

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
        count, resamplings = parse_steps(steps, self._default_steps)
        if isinstance(self.model, Denoiser) or steps is None:
            return count, resamplings
        if self.model.config.steps is None:
            raise ConfigError(f"steps is {steps!r}, but this model answers in one pass and takes no steps; omit it.")
        if resamplings:
            raise ConfigError(
                f"steps is {steps!r}; only SADER resamples. Give a plain number, such as {self.model.config.steps}."
            )
        return count, resamplings

    # ---------------------------------------------------------------- whole images

    def __call__(self, cloudy: ArrayLike, *, progress: Progress | None = None, **inputs: Any) -> NDArray[np.float32]:
        """Return the clear image (C, H, W) of the dates cloudy (T, C, H, W); see `predict` for the arguments."""
        plan, scene = self._planned(cloudy, **inputs)
        sink = ArraySink(plan)
        with local_executor(plan, self, scene) as executor:
            run_rows(plan, executor, sink, options=self.options, device=self.device, progress=progress)
        return sink.arrays["clear"]

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
        aux: (T, A, H, W), or (A, H, W) for all dates: auxiliary bands in [0, 1] of a model that takes them, such as
        near infrared or radar (`sader.data.radar.scale_sar` scales decibels).
        valid: bool (T, H, W), False for nodata. NaN is refused unless it is marked here.
        bands: names of the C bands (B02 or blue), if they are not the model's own in the model's order.
        steps: 4, or "4+1" for four steps with one resampling each (the paper); None = the checkpoint's own.
        samples: number of results with different noise to average; their standard deviation is part of
            `Removal.spread`.
        progress: called with (tiles done, tiles in all).
        """
        plan, scene = self._planned(
            cloudy,
            reference=reference,
            cloud_mask=cloud_mask,
            days=days,
            aux=aux,
            valid=valid,
            bands=bands,
            steps=steps,
            seed=seed,
            samples=samples,
        )
        sink = ArraySink(plan)
        with local_executor(plan, self, scene) as executor:
            run_rows(plan, executor, sink, options=self.options, device=self.device, progress=progress)
        found = sink.arrays
        cloud = found["cloud"] if self.matches_dates else None
        return Removal(found["clear"], cloud, found["kept"], found.get("spread"), found.get("source_date"))

    def _planned(
        self, cloudy: ArrayLike, *, steps: int | str | None = None, seed: int = 0, samples: int = 1, **series: Any
    ) -> tuple[ScenePlan, ArrayScene]:
        """Return the plan and the source of a series after checking the arguments of `predict`."""
        self.check_numbers(steps, samples, seed)
        spread = samples > 1 or self.states_error
        if self.options.max_uncertainty is not None and not spread:
            raise ConfigError(
                "max_uncertainty needs an expected error, which this model does not state: use samples=4."
            )
        scene = prepare_series(self.config.network, cloudy, **series)
        chosen, match = scene.reference, None
        if max(scene.shape) > self.tile_size and len(scene.cloudy) > 1 and self.matches_dates:
            match = scene.overview(self).match(self, chosen, scene.shape)
        clouds: tuple[int, ...] = () if chosen is None else (chosen,)
        if self.matches_dates or self.options.min_count:
            clouds = tuple(range(len(scene.cloudy)))
        sources = self.states_source and len(scene.cloudy) <= MOST_SOURCES
        options = {"steps": steps, "seed": seed, "samples": samples, "spread": spread, "sources": sources}
        plan = ScenePlan.of(self, scene.shape, scene.bands, scene.codings, scene.days, clouds=clouds, **options)
        return replace(plan, reference=chosen, match=match), scene

    # ---------------------------------------------------------------- tiles

    def prepare(
        self, inputs: TileInputs, windows: Sequence[Window], *, steps: int, seed: int = 0, samples: int = 1
    ) -> tuple[TileInputs, list[NoiseOf]]:
        """Return checked inputs as `tile` takes them, and the noise of each sample, one window of the scene per tile.

        inputs: any size; they are padded to the multiple of the networks. The noise follows from the windows, so that
        the result does not depend on the order or the batch.
        """
        inputs = inputs.padded(self.config.network.multiple if inputs.known_masks else self.multiple).to(self.device)
        places = [Window(window.row, window.col, *inputs.size) for window in windows]
        noises = [self.noise_field(one, steps).of(places, self.device) for one in sample_seeds(seed, samples)]
        return inputs, noises

    def raw_tiles(
        self, output: TileOutput, inputs: TileInputs, size: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return image, standard deviation, masks and weights of the result of `tile`, cut to a size.

        The image is the mean of the samples; the others are as in `TileOutput`. The standard deviation is 0 for one
        sample of a network that does not estimate its error.
        """
        height, width = size
        images = feathered(output, inputs)[..., :height, :width]
        if not bool(images.isfinite().all()):
            raise CheckpointError(
                f"the network {self.config.name!r} returned NaN or infinite values. Its weights may be damaged; use "
                "others, or backend 'torch' if the backend is another one."
            )
        clear = images.mean(dim=0)
        spread = (images - clear).square().mean(dim=0).sqrt()
        if output.error is not None:
            error = output.error[..., :height, :width]
            spread = error if len(images) == 1 else torch.hypot(spread, error)
        cloud = output.cloud[..., :height, :width]
        if not self.matches_dates:
            clear = self._following(clear, replace(inputs, cloud=output.cloud), height, width)
        weights = None if output.weights is None else output.weights[..., :height, :width]
        return clear, spread, cloud, weights

    def estimate_cloud(
        self,
        cloudy: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        cloud_mask: ArrayLike | Sequence[ArrayLike | None] | None = None,
        reference: int | None = None,
        bands: Sequence[str] | None = None,
    ) -> NDArray[np.float32]:
        """Return the masks (T, H, W) of cloud or shadow: the given ones, and the estimate elsewhere.

        The array is not cut into tiles, so this is for tiles and overviews. Arguments as in `predict`.
        """
        scene = prepare_series(
            self.config.network, cloudy, reference=reference, cloud_mask=cloud_mask, valid=valid, bands=bands, part=True
        )
        height, width = scene.shape
        padded = whole_inputs(self, scene).padded(self.multiple)
        with torch.inference_mode():
            masks = self._masks(padded) if bool(padded.cloud.isnan().any()) else padded.cloud
        return masks[0, :, :height, :width].float().cpu().numpy()

    def classify(
        self, cloudy: ArrayLike, *, valid: ArrayLike | None = None, bands: Sequence[str] | None = None
    ) -> NDArray[np.float32]:
        """Return the probabilities (T, 6, H, W) of `MASK_CLASSES`; NaN where a date has no data.

        The array is not cut into tiles. Arguments as in `predict`.
        """
        scene = prepare_series(self.config.network, cloudy, valid=valid, bands=bands, part=True)
        height, width = scene.shape
        padded = whole_inputs(self, scene).padded(self.multiple)
        with torch.inference_mode():
            scores = self._masks.class_scores(padded)[0, :, :, :height, :width]
            known = to_device(scene.valid[:, None], scores.device)
            return scores.float().softmax(dim=1).masked_fill(~known, torch.nan).cpu().numpy()

    @computed_once
    def turn(self) -> AbstractContextManager[Any]:
        """Held while a batch is computed: a lock on a GPU, where batches side by side would not fit."""
        return nullcontext() if self.device.type == "cpu" else threading.Lock()

    def noise_field(self, seed: int, steps: int) -> NoiseField:
        """Return the noise of one sample; balanced where a single step corrects a composite."""
        return NoiseField(seed, balanced=steps == 1 and self.matches_dates)

    # ---------------------------------------------------------------- pickling

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the weights as safetensors bytes; a process that receives them again finds the model it has."""
        state = (self.config, self.card, self.options, self.device.type)
        return _receive, (*state, self._packed_weights, self.checksum)

    @computed_once
    def _packed_weights(self) -> bytes:
        def smallest(value: Tensor) -> Tensor:
            # Shipped weights are float16 numbers in float32: as float16 they take half the bytes without loss.
            value = value.detach().cpu().contiguous()
            half = value.to(torch.float16)
            exact = value.dtype == torch.float32 and torch.equal(half.to(torch.float32), value)
            return half if exact else value

        return save({name: smallest(value) for name, value in self.model.state_dict().items()})

    @computed_once
    def checksum(self) -> str:
        """SHA-256 of weights, config, options and kind of device."""
        digest = hashlib.sha256(self._packed_weights)
        digest.update(repr((self.config, self.options, self.device.type)).encode())
        return digest.hexdigest()

    def __dask_tokenize__(self) -> str:
        return self.checksum

    # ---------------------------------------------------------------- parts

    @computed_once
    def _masks(self) -> TileMasks:
        """The masks of tiles in float32."""
        return TileMasks(self.bands, None, self.options) if self.plain_tile is None else self.plain_tile.masks

    def _make_tile(self, model: Denoiser) -> SaderTile:
        assert isinstance(self.config, ModelConfig)
        own = self.config.sampling
        settings = TileSettings(
            masks=self.options,
            solver=self.options.solver or ("heun" if own.solver == "heun" else "euler"),
            resampling=partial(own.resampler, self.options.resampling),
            guide=lambda: self._guide,
        )
        return SaderTile(model, settings).eval()

    @computed_once
    def tile(self) -> Tile:
        """Computes tiles with the backend of the options."""
        backend = self.options.backend
        if backend == "onnx" and self.device.type != "cpu":
            raise ConfigError(f"backend onnx computes on the CPU, but the device is {self.device}. Use device='cpu'.")
        if self.plain_tile is None:
            if backend == "onnx":
                raise ConfigError(f"backend onnx runs SADER's own networks, not {self.config.name}. Use backend torch.")
            assert not isinstance(self.model, Denoiser)
            return BaselineTile(self.model, self.options).eval()
        if backend == "accelerated":
            from sader.inference.accelerate import AcceleratedTile, Acceleration

            settings = Acceleration.for_device(self.device, composite=self.matches_dates, compile=self.options.compile)
            return AcceleratedTile(self.plain_tile, settings)
        if backend == "onnx":
            from sader.inference.onnx import OnnxTile

            return OnnxTile(self.plain_tile, self.config.name)
        return self.plain_tile

    @computed_once
    def _guide(self) -> Guide | None:
        """The guide of the resampling, the same one for every tile."""
        assert isinstance(self.config, ModelConfig)
        name = self.options.guide or self.config.sampling.guide
        with _lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a learned guide without weights starts at random
            weights = self.options.guide_weights or shipped_guide(name, self.bands)
            return make_guide(name, bands=len(self.bands), weights=weights)

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
            with torch.device("meta"):
                model = build_model(config)
            fill_model(model, load(weights))
            found = CloudRemover(Checkpoint(model, config, card), device=device, options=options)
        _unpickled[checksum] = found  # the most recent last
        while len(_unpickled) > _MOST_UNPICKLED:
            del _unpickled[next(iter(_unpickled))]
        return found
