"""Sampling close to what a GPU allows: the mathematics of `sampling.sample`, less of everything around it (METHOD 9).

The dates are seen once; levels at which a step provably changes next to nothing are left out; convolutions run in
bfloat16 with float32 norms, softmax and sums; weights lie channels last; on CUDA both networks are recorded once per
shape and replayed. Every one of these is a switch, and all off is the plain path to the bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from sader.config import ModelConfig
from sader.diffusion import Denoiser, MeanReverting
from sader.errors import ConfigError
from sader.model.mtcdn import MTCDN, Condition
from sader.resampling import Guide, Resampler, ResamplerConfig
from sader.sampling import Denoise, NoiseSource, karras_sigmas, sample


@dataclass(frozen=True)
class FastOptions:
    """What is done to save time; each alone or together."""

    bfloat16: bool = False
    """Convolutions and attention in bfloat16 (autocast). Needs hardware for it: slower on most CPUs."""
    channels_last: bool = False
    """Weights, and with them activations, with the bands of a pixel beside each other."""
    skip_below: float = 0.0
    """Leave out noise levels at which no step can change the image by more than this, in the model's range [-1, 1];
    see `skippable`. 0 = none; 2e-3 leaves out the paper's sigma = 0.001."""
    record: bool = False
    """CUDA only: record both networks per shape and replay them without launching from Python."""

    @classmethod
    def all_on(cls) -> FastOptions:
        """Return what suits a recent NVIDIA GPU."""
        return cls(bfloat16=True, channels_last=True, skip_below=2e-3, record=True)


def skippable(process: MeanReverting, sigma: float, *, frames: int, bound: float) -> bool:
    """Whether D(x; sigma) stays within `bound` of the mean of the state, if the network's output F is of order 1.

    D = c_skip mean(x) + c_out F: at small noise c_skip is nearly 1 and c_out is of the order of sigma, so what a step
    there can change is at most (1 - c_skip) |x| + c_out |F|. With trained weights this is to be measured, not assumed:
    the row "sigma = 0.001 left out" of benchmarks/paper_tile.py --model FILE.
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


class FastSampler:
    """Samples batches of tiles of SADER's networks without composite (the paper's), with the options' short cuts.

    The model given is changed by `channels_last` (memory layout only).
    """

    def __init__(
        self, model: Denoiser, config: ModelConfig, options: FastOptions | None = None, *, guide: Guide | None = None
    ) -> None:
        self.model, self.config, self.options, self.guide = model, config, options or FastOptions(), guide
        assert isinstance(model.network, MTCDN)
        self.network: MTCDN = model.network
        if config.network.composite:
            raise ConfigError(f"{config.name!r} makes a composite; FastSampler is for the paper's networks.")
        if self.options.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._recordings: dict[tuple[int, ...], _Recording] = {}

    def sigmas(self, steps: int, dates: int) -> Tensor:
        """Return the noise levels that are evaluated."""
        process = self.config.diffusion
        levels = karras_sigmas(steps, sigma_min=process.sigma_min, sigma_max=process.sigma_max)
        if self.options.skip_below <= 0:
            return levels
        return shortened(self.model.process, levels, frames=dates, bound=self.options.skip_below)

    @torch.inference_mode()
    def __call__(
        self, cloudy: Tensor, noise: NoiseSource, *, aux: Tensor | None = None, steps: int = 4, resamplings: int = 0
    ) -> Tensor:
        """Return the clear images (B, C, H, W) of cloudy (B, T, C, H, W), both in the model's [-1, 1].

        H and W are multiples of the network's unit. noise: draws of the shape of cloudy.
        """
        denoise, mean, present = self._prepared(cloudy, aux)
        correction = None
        if resamplings:
            settings = ResamplerConfig(steps=resamplings, threshold=self.config.sampling.resample_threshold)
            correction = Resampler(settings, self.guide, present=present)
        return sample(
            denoise,
            mean,
            noise,
            self.sigmas(steps, cloudy.shape[1]),
            alpha=self.config.diffusion.alpha,
            correction=correction,
        )

    def _prepared(self, cloudy: Tensor, aux: Tensor | None) -> tuple[Denoise, Tensor, Tensor]:
        """Return (the denoiser about these dates, what it reverts to, which dates count)."""
        if self.options.record and cloudy.device.type == "cuda":
            key = (*cloudy.shape, int(aux is not None))
            if key not in self._recordings:
                self._recordings[key] = _Recording(self, cloudy, aux)
            recording = self._recordings[key]
            recording.see(cloudy, aux)
            return recording.denoise, recording.condition.mean.float(), recording.condition.present
        condition = self._condition(cloudy, aux)
        return lambda x, sigma: self._denoise(x, sigma, condition), condition.mean.float(), condition.present

    def _condition(self, cloudy: Tensor, aux: Tensor | None) -> Condition:
        with self._precision(cloudy):
            return self.network.condition(cloudy, aux=aux)

    def _denoise(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        with self._precision(x):
            return self.model(x, sigma, condition)

    def _precision(self, x: Tensor) -> AbstractContextManager[object]:
        # Without the cache: recorded kernels must not read weights that a cache has thrown away since.
        if not self.options.bfloat16:
            return nullcontext()
        return torch.autocast(x.device.type, dtype=torch.bfloat16, cache_enabled=False)


class _Recording:
    """Both networks recorded for one shape: what they read and write lies in fixed places."""

    def __init__(self, sampler: FastSampler, cloudy: Tensor, aux: Tensor | None) -> None:
        self.cloudy, self.aux = cloudy.clone(), None if aux is None else aux.clone()
        self.x, self.sigma = torch.zeros_like(cloudy), torch.ones(len(cloudy), device=cloudy.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a first run outside: cuDNN chooses its kernels, cuBLAS takes its workspace
            for _ in range(2):
                warm = sampler._condition(self.cloudy, self.aux)
                sampler._denoise(self.x, self.sigma, warm)
        torch.cuda.current_stream().wait_stream(stream)
        self.seeing, self.denoising = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.seeing):
            self.condition = sampler._condition(self.cloudy, self.aux)
        with torch.cuda.graph(self.denoising, pool=self.seeing.pool()):
            self.denoised = sampler._denoise(self.x, self.sigma, self.condition)

    def see(self, cloudy: Tensor, aux: Tensor | None) -> None:
        """Make the condition of these dates."""
        self.cloudy.copy_(cloudy)
        if aux is not None and self.aux is not None:
            self.aux.copy_(aux)
        self.seeing.replay()

    def denoise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return D(x; sigma) about the dates last seen."""
        self.x.copy_(x)
        self.sigma.copy_(sigma)
        self.denoising.replay()
        return self.denoised.clone()


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
