"""Accelerated tiles: half precision, channels last, CUDA graphs and, on request, `torch.compile`.

The computation is that of `SaderTile` within rounding. On a GPU convolutions run in float16; on a CPU with bfloat16
instructions in bfloat16. Masks are estimated in float32, because rounding would move the edges of thresholded masks.
Matching, composite and all fits are float32. Settings that fail on a machine are turned off with a warning.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.inference.noise import NoiseOf
from sader.inference.tile import SaderTile, TileInputs, TileOutput
from sader.method.diffusion import Denoiser
from sader.method.resampling import fuse
from sader.model.blocks import ScalarEmbedding

N = TypeVar("N", bound=nn.Module)
log = logging.getLogger(__name__)
NEGLIGIBLE = 2e-3
"""Change of the image in the model's range, 0.001 of reflectance, below which a sampling step is left out."""


@dataclass(frozen=True)
class Acceleration:
    """Settings of `AcceleratedTile`."""

    dtype: torch.dtype = torch.float32
    """Type of the convolutions. Results in float16 that overflow are computed again in float32 (`predict_windows`)."""
    capture: bool = False
    """CUDA only: capture the computation of each shape as a CUDA graph and replay it."""
    compile: bool = False
    """Compile the network with `torch.compile`: up to two minutes before the first tile."""
    negligible: float = 0.0
    """As in `TileSettings`. 2e-3 leaves out the paper's last level, sigma = 0.001."""

    @classmethod
    def for_device(cls, device: torch.device, *, composite: bool, compile: bool = False) -> Acceleration:
        """Return the settings for a device and networks with or without a composite."""
        negligible = 0.0 if composite else NEGLIGIBLE
        if device.type == "cuda":
            return cls(torch.float16, capture=True, compile=compile, negligible=negligible)
        # bfloat16 is too coarse for networks that sample the whole image from noise.
        half = device.type == "cpu" and composite and has_bfloat16()
        return cls(torch.bfloat16 if half else torch.float32, compile=compile, negligible=negligible)

    def simpler(self) -> Acceleration | None:
        """Return the settings without the most demanding one, or None if float32 is all that is left."""
        if self.compile:
            return replace(self, compile=False)
        if self.capture:
            return replace(self, capture=False)
        return Acceleration() if self.dtype != torch.float32 else None


def has_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions (AVX512-BF16, AMX); emulated ones are slower than float32."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # x86 only, private to PyTorch
    return bool(supported is not None and supported())


class CastingConv(nn.Module):
    """A convolution that casts its input to the type of its weights."""

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = conv.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        return F.conv2d(x.to(conv.weight.dtype), conv.weight, conv.bias, padding=conv.padding)


class Float32(nn.Module):
    """A module whose input is cast to float32: embeddings scale every block and cost next to nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x.float())
        return result


def accelerated_network(network: N, dtype: torch.dtype) -> N:
    """Return a copy for inference with convolutions in `dtype`, channels last; everything else stays float32."""
    copied = copy.deepcopy(network).eval().requires_grad_(False)
    copied = copied.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if dtype != torch.float32:
        _exchange(copied, dtype)
    return copied


def _exchange(module: nn.Module, dtype: torch.dtype) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            setattr(module, name, CastingConv(child, dtype))
        elif isinstance(child, nn.Linear | ScalarEmbedding):
            setattr(module, name, Float32(child))
        else:
            _exchange(child, dtype)


class AcceleratedTile:
    """Tiles as `SaderTile` computes them, accelerated; see `Tile` for the call. The given tile is not changed."""

    def __init__(self, tile: SaderTile, settings: Acceleration) -> None:
        self.plain = tile
        self._graphs: dict[tuple[object, ...], CapturedCall] = {}
        self._lock = threading.Lock()
        """A captured graph has one set of input buffers; threads take turns on a GPU."""
        self._use(settings)

    def _use(self, settings: Acceleration) -> None:
        """Start again with other settings."""
        self.settings, self._graphs = settings, {}
        network = accelerated_network(self.plain.network, settings.dtype)
        denoiser = Denoiser(network, self.plain.denoiser.config).eval()
        self.tile = SaderTile(denoiser, replace(self.plain.settings, negligible=settings.negligible))
        if settings.compile:
            denoiser.compile(dynamic=False)
            self.tile.condition = torch.compile(network.condition, dynamic=False)
            self.tile.fuse = torch.compile(fuse, dynamic=False)
        self.tile.masks = self.plain.masks

    def __call__(
        self, inputs: TileInputs, noises: Sequence[NoiseOf], *, steps: int, resamplings: int = 0
    ) -> TileOutput:
        """Return the images, masks and errors of a batch of tiles. On a GPU this does not wait for the result."""
        device = inputs.cloudy.device
        with self._lock if device.type == "cuda" else nullcontext():
            output = self._attempted(inputs, noises, steps, resamplings)
            if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
                torch.cuda.current_stream(device).synchronize()  # another stream may use the buffers next
        return output

    def _attempted(self, inputs: TileInputs, noises: Sequence[NoiseOf], steps: int, resamplings: int) -> TileOutput:
        """Return the result; a setting that fails is turned off with a warning."""
        while True:
            try:
                return self._computed(inputs, noises, steps, resamplings)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                simpler = self.settings.simpler()
                if simpler is None:
                    raise
                text = (str(error).strip().splitlines() or [""])[0][:160]
                warnings.warn(
                    f"acceleration failed ({type(error).__name__}: {text}); continuing with {simpler}.", stacklevel=4
                )
                self._use(simpler)

    def _computed(self, inputs: TileInputs, noises: Sequence[NoiseOf], steps: int, resamplings: int) -> TileOutput:
        def compute(inputs: TileInputs, noises: Sequence[NoiseOf]) -> TileOutput:
            output = self.tile(inputs, noises, steps=steps, resamplings=resamplings)
            images, cloud, error, shown, weights = output
            return TileOutput(images.float(), cloud.float(), _float(error), shown, _float(weights))

        if not (self.settings.capture and inputs.cloudy.is_cuda):
            return compute(inputs, noises)
        shapes = tuple((name, tuple(value.shape[1:])) for name, value in inputs.tensors().items())
        key = (steps, resamplings, inputs.known_masks, len(noises), shapes)
        graph, count = self._graphs.get(key), len(inputs.cloudy)
        if graph is None or graph.batch < count:
            # The paper's networks evaluate the same convolutions eight times a tile, so that a search pays.
            search = not self.plain.network.config.matches_dates
            graph = self._graphs[key] = CapturedCall(compute, inputs, noises, search=search)
        return graph(inputs, noises)


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


class CapturedCall:
    """A computation of tiles captured as a CUDA graph for one shape; smaller batches are filled up.

    search: let cuDNN time its algorithms for each convolution first. It takes seconds and pays over many replays.
    """

    def __init__(
        self,
        compute: Callable[[TileInputs, Sequence[NoiseOf]], TileOutput],
        inputs: TileInputs,
        noises: Sequence[NoiseOf],
        *,
        search: bool,
    ) -> None:
        self.batch = len(inputs.cloudy)
        self.buffers: dict[str, Any] = {name: value.clone() for name, value in inputs.tensors().items()}
        self.noise: list[dict[tuple[int, int], Tensor]] = [{} for _ in noises]
        fixed = replace(inputs, **self.buffers)

        def buffered(number: int) -> NoiseOf:
            def noise(draw: int, channels: int) -> Tensor:
                if (draw, channels) not in self.noise[number]:
                    self.noise[number][draw, channels] = noises[number](draw, channels).clone()
                return self.noise[number][draw, channels]

            return noise

        sources = [buffered(number) for number in range(len(noises))]
        chosen, started = torch.backends.cudnn.benchmark, time.perf_counter()
        torch.backends.cudnn.benchmark = search
        try:
            # A new thread starts on the first GPU; the capture must run on that of the inputs.
            with torch.cuda.device(inputs.cloudy.device):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):  # algorithms, compiled code and workspaces are prepared before capture
                    for _ in range(2):
                        compute(fixed, sources)
                        stream.synchronize()
                torch.cuda.current_stream().wait_stream(stream)
                self.graph = torch.cuda.CUDAGraph()
                # Other threads may use the device meanwhile; only the work of this thread is captured.
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.output = compute(fixed, sources)
        finally:
            torch.backends.cudnn.benchmark = chosen
        log.info("first batch of %s: %.1f s", tuple(inputs.cloudy.shape), time.perf_counter() - started)

    def __call__(self, inputs: TileInputs, noises: Sequence[NoiseOf]) -> TileOutput:
        """Return the result as new tensors."""
        count = len(inputs.cloudy)
        for name, buffer in self.buffers.items():
            self._fill(buffer, getattr(inputs, name))
        for buffers, noise in zip(self.noise, noises, strict=True):
            for (draw, channels), buffer in buffers.items():
                self._fill(buffer, noise(draw, channels))
        self.graph.replay()
        images, cloud, *others = self.output
        rest = (None if x is None else x[:count].clone() for x in others)
        return TileOutput(images[:, :count].clone(), cloud[:count].clone(), *rest)

    @staticmethod
    def _fill(buffer: Tensor, values: Tensor) -> None:
        """Copy values into the buffer; the rest of the batch repeats the first tile."""
        buffer[: len(values)].copy_(values, non_blocking=True)
        if len(values) < len(buffer):
            buffer[len(values) :] = values[:1]
