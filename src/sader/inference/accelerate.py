"""Sampling close to what the silicon allows: the mathematics of `sampling.sample`, less of everything else (METHOD 9).

The dates are seen once; levels at which a step provably changes next to nothing are left out; convolutions run in
float16 with float32 norms, softmax and sums, channels last, their blocks fused (`model.fused`); on CUDA the whole
computation of a shape is recorded once and replayed. Every one of these is a switch, and all off is the plain path to
the bit. What cannot be had on a machine (no Triton, a recording that fails) is done without. On a CPU the blocks are
those of `model.cpublocks`.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from sader.config import ModelConfig
from sader.errors import ConfigError
from sader.method.diffusion import Denoiser, MeanReverting
from sader.method.resampling import Guide, Resampler, ResamplerConfig
from sader.method.sampling import NoiseSource, karras_sigmas, sample
from sader.model.blocks import ResBlock
from sader.model.cpublocks import cpu_network, has_bfloat16
from sader.model.fused import can_fuse, fuse, half_network
from sader.model.mtcdn import MTCDN

Result = TypeVar("Result")
Precision = Literal["float32", "bfloat16", "float16"]
log = logging.getLogger(__name__)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class FastOptions:
    """What is done to save time; each alone or together."""

    precision: Precision = "float32"
    """Of convolutions and attention. float16 rounds eight times finer than bfloat16 at the same speed; numbers too
    large for it are noticed, and the batch is then computed in float32. Slower than float32 on most CPUs."""
    channels_last: bool = False
    """Weights, and with them activations, with the bands of a pixel beside each other; half precision always has it."""
    fused: bool = False
    """Blocks of few kernels (Triton); needs half precision."""
    joined: bool = False
    """Fewer copies, sums and biases between fused blocks (`model.joined`); says nothing without them."""
    folded: bool = False
    """Attention and the dates' maps in few kernels (`model.folded`); says nothing without joined blocks."""
    doubled: bool = False
    """Convolve before doubling the resolution, with fewer products; says nothing without joined blocks."""
    skip_below: float = 0.0
    """Leave out noise levels at which no step can change the image by more than this, in the model's range [-1, 1];
    see `skippable`. 0 = none; 2e-3 leaves out the paper's sigma = 0.001."""
    record: bool = False
    """CUDA only: record the whole computation per shape and replay it without launching from Python."""
    cpu_blocks: bool = False
    """CPU only: the blocks of `model.cpublocks`; whatever the precision, clouds are found in float32."""
    compiled: bool = False
    """Residual blocks through torch.compile: minutes of compiling; only where they are not fused."""
    strict: bool = False
    """Raise where something asked for cannot be had, instead of a warning and the next best way."""

    def __post_init__(self) -> None:
        if self.precision not in TYPES:
            raise ConfigError(f"precision is {self.precision!r}; expected {', '.join(TYPES)}.")
        if self.fused and self.precision == "float32":
            raise ConfigError("fused blocks compute in half precision; use precision='float16' with fused=True.")
        if self.cpu_blocks and self.fused:
            raise ConfigError("fused blocks are for a GPU, cpu_blocks for a CPU; use one of the two.")

    @classmethod
    def all_on(cls) -> FastOptions:
        """Return what suits a recent NVIDIA GPU."""
        return cls(
            precision="float16", channels_last=True, fused=True, joined=True, folded=True, doubled=True,
            skip_below=2e-3, record=True,
        )  # fmt: skip

    @classmethod
    def suited(cls, device: torch.device, *, composite: bool) -> FastOptions:
        """Return what suits a device and the networks with or without a composite."""
        if device.type == "cuda":
            return cls.all_on() if can_fuse(device) else replace(cls.all_on(), fused=False)
        if not composite:
            # Bfloat16 is too coarse for networks that make the whole image out of noise.
            return cls(channels_last=True, skip_below=2e-3)
        half = device.type == "cpu" and has_bfloat16()
        return cls(precision="bfloat16" if half else "float32", cpu_blocks=device.type == "cpu", channels_last=True)

    def fewer(self) -> FastOptions | None:
        """Return the options without the part most likely to have failed, or None if nothing is left to give up."""
        if self.compiled:
            return replace(self, compiled=False)
        if self.fused and self.joined and (self.folded or self.doubled):
            return replace(self, folded=False, doubled=False)
        if self.fused and self.joined:
            return replace(self, joined=False)
        if self.fused:
            return replace(self, fused=False)
        if self.record:
            return replace(self, record=False)
        if self.cpu_blocks:
            return replace(self, cpu_blocks=False, precision="float32")
        return None


def skippable(process: MeanReverting, sigma: float, *, frames: int, bound: float) -> bool:
    """Whether D(x; sigma) stays within `bound` of the mean of the state, if the network's output F is of order 1.

    D = c_skip mean(x) + c_out F: at small noise c_skip is nearly 1 and c_out is of the order of sigma, so what a step
    there can change is at most (1 - c_skip) |x| + c_out |F|. With trained weights this is to be measured, not assumed:
    the row "sigma = 0.001 left out" of benchmarks/paper_tile.py --weights FILE.
    """
    c = process.coefficients(torch.tensor([sigma]), frames)
    return float((1 - c.c_skip).abs() + c.c_out) <= bound


def shortened(process: MeanReverting, sigmas: Tensor, *, frames: int, bound: float) -> Tensor:
    """Return the levels without those at which nothing changes; the first level and the final 0 always stay."""
    levels = [float(sigma) for sigma in sigmas]
    kept = [
        sigma
        for index, sigma in enumerate(levels)
        if index in (0, len(levels) - 1) or not skippable(process, sigma, frames=frames, bound=bound)
    ]
    return torch.tensor(kept, dtype=sigmas.dtype)


def quick_denoiser(model: Denoiser, options: FastOptions, device: torch.device) -> Denoiser:
    """Return the denoiser as the options want it: the one given, or one with a copy of its network."""
    network = model.network
    assert isinstance(network, MTCDN)
    kind = TYPES[options.precision]
    if options.fused:
        if not can_fuse(device):
            raise ConfigError(f"fused blocks need Triton and a CUDA device; the device is {device}. Use fused=False.")
        network = fuse(network, kind, joined=options.joined, folded=options.folded, doubled=options.doubled)
    elif options.cpu_blocks:
        if device.type != "cpu":
            raise ConfigError(f"cpu_blocks are for a CPU; the device is {device}. Use cpu_blocks=False.")
        network = cpu_network(network, kind)
    elif options.precision != "float32":
        network = half_network(network, kind)
    elif options.channels_last or options.compiled:
        network = copy.deepcopy(network)
    else:
        return model
    if options.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if options.compiled:
        for module in network.modules():
            if isinstance(module, ResBlock):
                module.compile(dynamic=False)
    return Denoiser(network, model.config).eval()


def quick_precision(options: FastOptions, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a quick denoiser runs."""
    if options.precision == "float32":
        return nullcontext()
    # Without the cache: recorded kernels must not read weights that a cache has thrown away since.
    return torch.autocast(device.type, dtype=TYPES[options.precision], cache_enabled=False)


class Recorded:
    """A function of tensors recorded on CUDA for the shapes of its examples; what it reads lies in fixed places.

    search: let cuDNN try its ways of each convolution first, which takes seconds and pays over many replays.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], examples: Sequence[Tensor], *, search: bool = True
    ) -> None:
        self.inputs = [example.clone() for example in examples]
        choosing = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = search
        marks = [time.perf_counter()]
        try:
            # A thread begins on the first GPU: recorded there, the work of another would be no part of the recording.
            with torch.cuda.device(self.inputs[0].device):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):  # first outside: cuDNN chooses, Triton compiles, cuBLAS takes its room
                    for _ in range(2):
                        function(*self.inputs)
                        stream.synchronize()
                        marks.append(time.perf_counter())
                torch.cuda.current_stream().wait_stream(stream)
                self.graph = torch.cuda.CUDAGraph()
                # Other threads read files and may touch the device meanwhile: only this thread's work is recorded.
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.outputs = function(*self.inputs)
            marks.append(time.perf_counter())
        finally:
            torch.backends.cudnn.benchmark = choosing
        building, again, recording = (after - before for before, after in pairwise(marks))
        log.info(
            "first batch of %s: building kernels %.1f s, once more %.2f s, recording %.2f s",
            tuple(self.inputs[0].shape), building, again, recording,
        )  # fmt: skip

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what the function returns; the tensors are overwritten by the next call."""
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        self.graph.replay()
        return self.outputs


class TakesShortCuts(Protocol):
    """Something that computes with options and can begin anew with others."""

    options: FastOptions

    def begin_anew(self, options: FastOptions) -> None: ...


def with_fewer_short_cuts(worker: TakesShortCuts, attempt: Callable[[], Result]) -> Result:
    """Return what `attempt` returns; where a short cut fails, it is given up with a warning and tried again."""
    while True:
        try:
            return attempt()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            fewer = worker.options.fewer()
            if worker.options.strict or fewer is None:
                raise
            warnings.warn(f"a short cut does not work here ({_short(error)}); going on without it.", stacklevel=4)
            worker.begin_anew(fewer)


class FastSampler:
    """Samples batches of tiles of SADER's networks without composite (the paper's), with the options' short cuts.

    The model given is left as it is.
    """

    def __init__(
        self, model: Denoiser, config: ModelConfig, options: FastOptions | None = None, *, guide: Guide | None = None
    ) -> None:
        assert isinstance(model.network, MTCDN)
        if config.network.composite:
            raise ConfigError(f"{config.name!r} makes a composite; FastSampler is for the paper's networks.")
        self.plain, self.config, self.guide = model, config, guide
        self.options = options or FastOptions()
        self._model: Denoiser | None = None
        self._recordings: dict[tuple[object, ...], tuple[list[int], Recorded]] = {}
        self._turn = threading.Lock()
        """A recording has one place for its inputs, and a scene's tiles come from several threads."""

    def sigmas(self, steps: int, dates: int) -> Tensor:
        """Return the noise levels that are evaluated."""
        process = self.config.diffusion
        levels = karras_sigmas(steps, sigma_min=process.sigma_min, sigma_max=process.sigma_max)
        if self.options.skip_below <= 0:
            return levels
        return shortened(self.plain.process, levels, frames=dates, bound=self.options.skip_below)

    @torch.inference_mode()
    def __call__(
        self, cloudy: Tensor, noise: NoiseSource, *, steps: int = 4, resamplings: int = 0, **more: Tensor | None
    ) -> Tensor:
        """Return the clear images (B, C, H, W) of cloudy (B, T, C, H, W), both in the model's [-1, 1].

        H and W are multiples of the network's unit. noise: draws of the shape of cloudy. more: aux, valid,
        band_present, present and days as `MTCDN.condition` takes them.
        """
        work = _Work(
            cloudy, {key: value for key, value in more.items() if value is not None}, noise, steps, resamplings
        )
        with self._turn:
            image = with_fewer_short_cuts(self, lambda: self._sampled(work))
            if image.device.type == "cuda":  # the next thread may work in another stream
                torch.cuda.current_stream(image.device).synchronize()
        if self.options.precision == "float16" and not bool(image.isfinite().all()):
            # Beyond 65504 float16 has no numbers. Trained networks are far from that, but nothing forbids it.
            return self._plain(self.plain, work)
        return image

    def begin_anew(self, options: FastOptions) -> None:
        """Forget everything made with other options."""
        self.options, self._model, self._recordings = options, None, {}

    def _sampled(self, work: _Work) -> Tensor:
        device = work.cloudy.device
        if self._model is None:
            self._model = quick_denoiser(self.plain, self.options, device)
        if not (self.options.record and device.type == "cuda"):
            return self._plain(self._model, work)
        shapes = tuple((name, tuple(value.shape)) for name, value in work.more.items())
        key = (tuple(work.cloudy.shape), shapes, work.steps, work.resamplings)
        if key not in self._recordings:
            self._recordings[key] = self._record(work)
        draws, recorded = self._recordings[key]
        return recorded(work.cloudy, *work.more.values(), *(work.noise(number) for number in draws))[0].clone()

    def _record(self, work: _Work) -> tuple[list[int], Recorded]:
        """Return the numbers of the draws that are taken and the recording, whose inputs end with them."""
        model = self._model
        assert model is not None
        draws: list[int] = []

        def listed(number: int) -> Tensor:
            if number not in draws:
                draws.append(number)
            return work.noise(number)

        self._plain(model, replace(work, noise=listed))
        names = list(work.more)

        def whole(cloudy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            more = dict(zip(names, inputs, strict=False))
            fixed = dict(zip(draws, inputs[len(names) :], strict=True))
            return (self._plain(model, replace(work, cloudy=cloudy, more=more, noise=lambda number: fixed[number])),)

        examples = [work.cloudy, *work.more.values(), *(work.noise(number) for number in draws)]
        return draws, Recorded(whole, examples)

    def _plain(self, model: Denoiser, work: _Work) -> Tensor:
        """Return the images by `sampling.sample`, the dates seen once."""
        network = model.network
        assert isinstance(network, MTCDN)
        options = FastOptions() if model is self.plain else self.options
        device = work.cloudy.device
        with quick_precision(options, device):
            condition = network.condition(work.cloudy, **work.more)  # type: ignore[arg-type]  # its flags are left out

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            with quick_precision(options, device):
                return model(x, sigma, condition)

        correction = None
        if work.resamplings:
            settings = ResamplerConfig(steps=work.resamplings, threshold=self.config.sampling.resample_threshold)
            correction = Resampler(settings, self.guide, present=condition.present)
        return sample(
            denoise,
            condition.mean.float(),
            work.noise,
            self.sigmas(work.steps, work.cloudy.shape[1]),
            alpha=self.config.diffusion.alpha,
            correction=correction,
        )


@dataclass(frozen=True)
class _Work:
    """One batch to be sampled."""

    cloudy: Tensor
    more: dict[str, Tensor]
    noise: NoiseSource
    steps: int
    resamplings: int


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def naive_sample(
    model: Denoiser,
    config: ModelConfig,
    cloudy: Tensor,
    noise: NoiseSource,
    *,
    aux: Tensor | None,
    steps: int,
    resamplings: int,
    guide: Guide | None,
    counted: list[None] | None = None,
) -> Tensor:
    """Return the same image as the public code makes it: the whole network, dates included, at every evaluation.

    counted: a list that gets one entry per evaluation. For comparison only (benchmarks/paper_tile.py).
    """
    network = model.network
    assert isinstance(network, MTCDN)
    process = config.diffusion

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        if counted is not None:
            counted.append(None)
        return model(x, sigma, network.condition(cloudy, aux=aux))

    correction = None
    if resamplings:
        settings = ResamplerConfig(steps=resamplings, threshold=config.sampling.resample_threshold)
        correction = Resampler(settings, guide)
    with torch.inference_mode():
        return sample(
            denoise,
            cloudy,
            noise,
            karras_sigmas(steps, sigma_min=process.sigma_min, sigma_max=process.sigma_max),
            alpha=process.alpha,
            correction=correction,
        )
