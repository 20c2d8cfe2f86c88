"""DiffCR (Zou et al., TGRS 2024, arXiv 2308.04417): a fast conditional diffusion that predicts the clear image.

Published: two parallel encoders (noised image with the noise level; each date with shared weights), four levels of
width 64 to 512, one block each, 1024 in the middle; NAFNet-style block (channel LayerNorm, 1x1 to 2c, depthwise 3x3,
gate, channel attention by average pool on half of the channels and by max pool on the other half, 1x1, zero-initialised
scales, gated feed-forward); features of the dates summed and added to the noised branch at each level; 2x2 stride-2
conv down, 1x1 and pixel shuffle up, additive skips. Predicts the clear image. Continuous noise level as a 64-d sinusoid
and an MLP of 256. Sigmoid schedule, 2000 steps 1e-6 to 0.01 in training, 1000 steps 1e-4 to 0.09 in sampling;
DPM-Solver++ of second order, multistep, 20 steps uniform in time, dynamic thresholding, final denoise. Kaiming init.
Chosen here: the embedding enters as one shift per block (this gives the count), before the first 1x1; the sinusoid is
taken of 1000 times the level; the sum over dates is scaled to three of them where there are more or fewer, so that its
size is the one learned; the thresholding takes the 99.5 % quantile; the condition's encoder runs once per sample;
Kaiming init is PyTorch's own uniform one, since the normal one with a gain for ReLU makes images a hundred times too
bright in a network without ReLU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase, System
from sader.baselines.parts.ddpm import BetaSchedule, date_frames, sample_multistep, sinusoid, unit_scale
from sader.errors import ConfigError
from sader.method.diffusion import DiffusionConfig, MeanReverting
from sader.model.attention import masked_mean
from sader.model.blocks import depth_to_space

USUAL_DATES = 3
"""Dates at which the plain sum of the published network is taken."""


@dataclass(frozen=True)
class DiffCRConfig(BaselineConfig):
    """Sizes and schedules of DiffCR; the defaults are the paper's."""

    dates: int | None = None
    least_dates = 0
    width: int = 64
    """Channels at full resolution, doubled at each level."""
    levels: int = 4
    """Levels of both encoders; the middle lies below the last."""
    emb_width: int = 256
    """Width of the noise-level embedding."""
    training: BetaSchedule = field(default_factory=lambda: BetaSchedule("sigmoid", 2000, 1e-6, 0.01))
    sampling: BetaSchedule = field(default_factory=lambda: BetaSchedule("sigmoid", 1000, 1e-4, 0.09))
    sampling_steps: int = 20
    """Solver steps, 5 to 50; one more evaluation denoises the end."""
    threshold: float = 0.995
    """Quantile of the values that a denoised image may reach before it is shrunk; 1 = no thresholding."""
    reference_input: bool = False
    """Whether the reference date is marked (published: no)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold <= 1 or self.sampling_steps < 1:
            raise ConfigError(
                f"network.threshold is {self.threshold} and network.sampling_steps {self.sampling_steps}; expected a "
                "share in (0, 1] and at least 1 step."
            )

    @property
    def multiple(self) -> int:
        return int(2**self.levels)

    @property
    def steps(self) -> int | None:
        return self.sampling_steps


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1).to(x.dtype)


def gated(x: Tensor) -> Tensor:
    """Return the product of the two halves of the channels."""
    a, b = x.chunk(2, dim=1)
    return a * b


class NafBlock(nn.Module):
    """The block of both encoders, middle and decoder; without `emb_width` it has no noise-level input."""

    def __init__(self, channels: int, *, emb_width: int | None = None) -> None:
        super().__init__()
        half = channels // 2
        self.shift = nn.Linear(emb_width, channels) if emb_width else None
        self.norm_mix, self.norm_feed = ChannelNorm(channels), ChannelNorm(channels)
        self.widen = nn.Conv2d(channels, 2 * channels, 1)
        self.depthwise = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.by_mean, self.by_max = nn.Conv2d(half, half, 1), nn.Conv2d(half, half, 1)
        self.mix = nn.Conv2d(channels, channels, 1)
        self.feed_in, self.feed_out = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(channels, channels, 1)
        self.mix_scale = nn.Parameter(torch.zeros(channels, 1, 1))
        self.feed_scale = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        h = self.norm_mix(x)
        if self.shift is not None:
            assert emb is not None, "this block was built with an embedding"
            h = h + self.shift(emb)[:, :, None, None].to(h.dtype)
        first, second = gated(self.depthwise(self.widen(h))).chunk(2, dim=1)
        first = first * self.by_mean(first.mean(dim=(2, 3), keepdim=True))
        second = second * self.by_max(second.amax(dim=(2, 3), keepdim=True))
        x = x + self.mix_scale * self.mix(torch.cat([first, second], dim=1))
        return x + self.feed_scale * self.feed_out(gated(self.feed_in(self.norm_feed(x))))


class DiffCRNet(nn.Module):
    """The network: (noised, noise level, features of the dates) -> clear image."""

    def __init__(self, config: DiffCRConfig) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.levels)]
        emb = config.emb_width
        self.embedding = nn.Sequential(nn.Linear(config.width, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.features = config.width
        self.noised_in = nn.Conv2d(config.channels, config.width, 3, padding=1)
        self.date_in = nn.Conv2d(config.date_channels + config.reference_input, config.width, 3, padding=1)
        self.noised_blocks = nn.ModuleList(NafBlock(width, emb_width=emb) for width in widths)
        self.date_blocks = nn.ModuleList(NafBlock(width) for width in widths)
        self.noised_down = nn.ModuleList(nn.Conv2d(width, 2 * width, 2, stride=2) for width in widths)
        self.date_down = nn.ModuleList(nn.Conv2d(width, 2 * width, 2, stride=2) for width in widths)
        self.middle = NafBlock(2 * widths[-1], emb_width=emb)
        self.up = nn.ModuleList(nn.Conv2d(2 * width, 4 * width, 1, bias=False) for width in reversed(widths))
        self.blocks = nn.ModuleList(NafBlock(width, emb_width=emb) for width in reversed(widths))
        self.out = nn.Conv2d(config.width, config.channels, 3, padding=1)

    def condition(self, frames: Tensor, present: Tensor) -> list[Tensor]:
        """Return the summed features of the dates, finest first, one level more than the encoder has blocks."""
        batch, dates = frames.shape[:2]
        share = USUAL_DATES * present / present.sum(dim=1, keepdim=True).clamp(min=1)

        def summed(x: Tensor) -> Tensor:
            return (x.unflatten(0, (batch, dates)) * share[:, :, None, None, None].to(x.dtype)).sum(dim=1)

        x = self.date_in(rearrange(frames, "b t c h w -> (b t) c h w"))
        found = []
        for block, down in zip(self.date_blocks, self.date_down, strict=True):
            x = block(x)
            found.append(summed(x))
            x = down(x)
        return [*found, summed(x)]

    def forward(self, noised: Tensor, level: Tensor, condition: list[Tensor]) -> Tensor:
        """Return the clear image; noised (B, C, H, W) of unit variance, level sqrt(g) in [0, 1] (B,)."""
        emb = self.embedding(sinusoid(1000 * level, self.features))
        x = self.noised_in(noised)
        skips = []
        for block, down, dates in zip(self.noised_blocks, self.noised_down, condition, strict=False):
            x = block(x, emb) + dates
            skips.append(x)
            x = down(x)
        x = self.middle(x + condition[-1], emb)
        for up, block in zip(self.up, self.blocks, strict=True):
            x = block(depth_to_space(up(x), 2) + skips.pop(), emb)
        return self.out(x)


class DiffCR(Baseline):
    """DiffCR with its sampler. Invariant to the order of the dates."""

    config: DiffCRConfig
    compiled = ("condition", "denoise")

    def __init__(self, config: DiffCRConfig) -> None:
        super().__init__(config)
        self.network = DiffCRNet(config)
        self.process = MeanReverting(DiffusionConfig(alpha=0.0))

    @property
    def evaluations(self) -> int:
        return self.config.sampling_steps + 1

    def condition(self, inputs: BaselineInputs) -> list[Tensor]:
        """Return the features of the dates, once per sample."""
        return self.network.condition(date_frames(inputs, reference=self.config.reference_input), inputs.present)

    def denoise(self, noised: Tensor, sigma: Tensor, condition: list[Tensor]) -> Tensor:
        """Return the predicted clear image (B, C, H, W) of clear + sigma noise."""
        level = unit_scale(sigma)
        return self.network(level.view(-1, 1, 1, 1) * noised, level, condition).float()

    def forward(self, inputs: BaselineInputs) -> Tensor:
        sigma = torch.ones(len(inputs.cloudy), device=inputs.cloudy.device)
        return self.denoise(torch.zeros_like(inputs.cloudy[:, 0]), sigma, self.condition(inputs))

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        config, condition = self.config, self.condition(inputs)
        # Uniform in time down to the end of the schedule's first step, where the published solver stops.
        sigmas = config.sampling.grid(steps or config.sampling_steps, last=1.0)
        return sample_multistep(
            lambda x, sigma: thresholded(self.denoise(x, sigma, condition), config.threshold),
            lambda draw: noise(draw, config.channels),
            sigmas,
        )

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        clear = example.known(masked_mean(example.inputs.cloudy, example.inputs.observed))
        sigma = self.config.training.draw_sigma(len(clear), generator)
        noise = torch.randn(clear.shape, generator=generator, device=generator.device)[:, None]
        noised = self.process.noised(clear, torch.zeros_like(noise), sigma, noise)[:, 0]
        denoised = self.denoise(noised, sigma, self.condition(example.inputs))
        loss = example.mean((denoised - example.clear).square())
        yield Phase(MAIN, loss, {"squared": loss.detach()})


def thresholded(image: Tensor, share: float) -> Tensor:
    """Return the image (B, C, H, W) clipped at its `share` quantile s of absolute values and divided by it, if s > 1.

    Dynamic thresholding: a denoised image far out of [-1, 1] is shrunk rather than saturated.
    """
    if share >= 1:
        return image
    values = image.abs().flatten(1)
    limit = values.kthvalue(max(1, round(share * values.shape[1])), dim=1).values.clamp(min=1.0)
    limit = limit.view(-1, 1, 1, 1)
    return image.clamp(-limit, limit) / limit


SYSTEM = System(
    name="diffcr",
    title="DiffCR",
    year=2024,
    loss="MSE of the clear image",
    config=DiffCRConfig,
    network=DiffCR,
    printed=(22.19, 45.86),
    reference="Zou et al., DiffCR, IEEE TGRS, arXiv 2308.04417",
    note="3.4 % above the printed 22.19 M: the published structure counts 22.94 M. Without norms and scales it is "
    "22.91 M (22.19 with two digits swapped), without the layers that bring in the noise level 22.18 M; no fact "
    "decides.",
    train={"adam_lr": 5e-5, "schedule": "constant", "ema_decay": 0.9999, "epochs": 3000.0, "batch_size": 8},
)
