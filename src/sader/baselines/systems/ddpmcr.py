"""DDPM-CR (Jing et al., Remote Sensing 15(9) 2217, 2023), SIZES ASSUMED: a regression from the features of a DDPM.

Published: a DDPM over the inputs serves as a feature extractor at several scales; a cloud-removal head with attention
regresses the clear image; the loss joins high- and low-frequency terms and cloud regions. The rest is unknown.
Chosen here, all the rest: the U-Net of `parts/unet.py` (width 128, multipliers 1, 2, 4, 8, 8, one block per level) on
the stacked dates, predicting their noise, linear schedule of 1000 steps; its decoder features at step 50, all levels; a
head from coarse to fine of residual blocks with channel and spatial attention, its depths chosen to meet the table's
count; the dates themselves beside the finest features, since those come from a noised stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase, System
from sader.baselines.parts.ddpm import BetaSchedule, unit_scale
from sader.baselines.parts.unet import UNet, UNetConfig
from sader.baselines.systems.uncrtaints import SqueezeExcite
from sader.errors import ConfigError
from sader.model.blocks import ResBlock


@dataclass(frozen=True)
class DdpmCrConfig(BaselineConfig):
    """Sizes of DDPM-CR, assumed."""

    extractor: UNetConfig = field(default_factory=lambda: UNetConfig(blocks=1, emb_width=256))
    """The DDPM."""
    schedule: BetaSchedule = field(default_factory=BetaSchedule)
    feature_time: float = 50.0
    """Step of the schedule at which features are taken, 5 to 400: later ones are smoother."""
    head_blocks: tuple[int, ...] = (1, 1, 1, 2, 2)
    """Residual blocks of the head at each level, finest first."""
    blur: int = 7
    """Window in pixels, odd, whose mean is the low frequency of an error."""
    cloud_weight: float = 1.0
    """Weight of the error under clouds beside the two frequency terms."""
    use_of_dates = "DDPM-CR stacks the dates as channels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.head_blocks) != len(self.extractor.multipliers) or min(self.head_blocks) < 1 or self.blur % 2 == 0:
            raise ConfigError(
                f"network.head_blocks is {self.head_blocks} for {len(self.extractor.multipliers)} levels and "
                f"network.blur {self.blur}; expected one number of blocks per level, each 1 or more, and an odd window."
            )
        if not 0 < self.feature_time <= self.schedule.steps:
            raise ConfigError(
                f"network.feature_time is {self.feature_time}; expected more than 0 and at most {self.schedule.steps}."
            )

    @property
    def multiple(self) -> int:
        return self.extractor.multiple


class PixelAttention(nn.Module):
    """Scale each channel, then each pixel, by a function of its mean and maximum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = SqueezeExcite(channels, max(1, channels // 16))
        self.pixels = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(x)
        summary = torch.cat([x.mean(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)], dim=1)
        return x * self.pixels(summary).sigmoid()


class RemovalHead(nn.Module):
    """Features of all levels and the stacked dates -> clear image, from the coarsest level up."""

    def __init__(self, config: DdpmCrConfig, stacked: int) -> None:
        super().__init__()
        widths = config.extractor.widths
        self.levels = nn.ModuleList()
        for level, (width, depth) in enumerate(zip(widths, config.head_blocks, strict=True)):
            coarser = widths[level + 1] if level + 1 < len(widths) else 0
            first = ResBlock(width + coarser + (stacked if level == 0 else 0), width)
            rest = [ResBlock(width, width) for _ in range(depth - 1)]
            self.levels.append(nn.Sequential(first, *rest, PixelAttention(width)))
        self.out = nn.Conv2d(widths[0], config.channels, 3, padding=1)

    def forward(self, features: list[Tensor], stack: Tensor) -> Tensor:
        x: Tensor | None = None
        for level in reversed(range(len(features))):
            parts = [features[level]]
            if x is not None:
                parts.append(F.interpolate(x, scale_factor=2, mode="nearest"))
            if level == 0:
                parts.append(stack.to(parts[0].dtype))
            x = self.levels[level](torch.cat(parts, dim=1))
        assert x is not None
        return torch.tanh(self.out(x))


class DdpmCr(Baseline):
    """DDPM-CR; one pass of the extractor at one noise level, then the head. Not invariant to the order of the dates."""

    config: DdpmCrConfig
    compiled = ("features", "extractor.head", "head.forward")

    def __init__(self, config: DdpmCrConfig) -> None:
        super().__init__(config)
        self.extractor = UNet(config.stacked, config.stacked, config.extractor)
        self.head = RemovalHead(config, config.stacked)

    def stack(self, inputs: BaselineInputs) -> Tensor:
        """Return the dates as channels, (B, T (C + A), H, W), as many as the network is built for."""
        return self.arranged(inputs).joined

    def features(self, stack: Tensor, sigma: Tensor, noise: Tensor) -> list[Tensor]:
        """Return the extractor's decoder features, finest first, of stack + sigma noise."""
        noised = unit_scale(sigma).view(-1, 1, 1, 1) * (stack + sigma.view(-1, 1, 1, 1) * noise)
        return self.extractor.features(noised, sigma.log() / 4)

    def removed(self, stack: Tensor, noise: Tensor) -> Tensor:
        """Return the clear image (B, C, H, W); the extractor gets no gradient from it."""
        time = torch.full((len(stack),), self.config.feature_time, dtype=torch.float64, device=stack.device)
        features = self.features(stack, self.config.schedule.sigma_at(time).to(stack.dtype), noise)
        return self.head([feature.detach() for feature in features], stack).float()

    def forward(self, inputs: BaselineInputs) -> Tensor:
        stack = self.stack(inputs)
        return self.removed(stack, torch.zeros_like(stack))

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        stack = self.stack(inputs)
        return self.removed(stack, noise(0, stack.shape[1]))

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        stack = self.stack(example.inputs)
        noise = torch.randn((2, *stack.shape), generator=generator, device=generator.device)
        sigma = self.config.schedule.draw_sigma(len(stack), generator)
        predicted = self.extractor.head(self.features(stack, sigma, noise[0])[0]).float()
        denoising = F.mse_loss(predicted, noise[0])
        image = self.removed(stack, noise[1])
        low, high, cloudy = self._errors(image, example)
        loss = denoising + low + high + self.config.cloud_weight * cloudy
        terms = {"denoising": denoising, "low": low, "high": high, "cloudy": cloudy}
        yield Phase(MAIN, loss, {name: term.detach() for name, term in terms.items()})

    def _errors(self, image: Tensor, example: Example) -> tuple[Tensor, Tensor, Tensor]:
        """Return the absolute error of the low frequencies, of the high ones, and under clouds."""
        error = example.weight * (image - example.clear)
        low = F.avg_pool2d(error, self.config.blur, stride=1, padding=self.config.blur // 2)
        covered = example.inputs.cloud.nan_to_num().mean(dim=1)[:, None]
        return example.mean(low.abs()), example.mean((error - low).abs()), example.mean(covered * error.abs())


SYSTEM = System(
    name="ddpmcr",
    title="DDPM-CR",
    year=2023,
    loss="MSE of the noise + L1 of low and of high frequencies + L1 under clouds",
    config=DdpmCrConfig,
    network=DdpmCr,
    printed=(445.44, 852.37),
    assumed=True,
    reference="Jing et al., Remote Sensing 15(9) 2217",
    train={"adam_lr": 1e-4, "schedule": "cosine", "epochs": 200.0, "batch_size": 8},
    simplified="the diffusion model and the removal head are trained at once, the head on features without gradient. "
    "Published: first the diffusion model, then the head. The weights of the loss terms, epochs and rate are assumed.",
)
