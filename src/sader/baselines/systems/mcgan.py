"""McGAN (Enomoto et al. 2017, "Filmy Cloud Removal on Satellite Imagery with Multispectral Conditional GANs").

Published: 3x3 convolution to 64; seven stride-2 4x4 convolutions 128, 256, 512 x5 (batch norm, LeakyReLU 0.2); seven
4x4 transposed convolutions back with skip concatenation (batch norm, ReLU, dropout on the first three); 3x3 convolution
out. Discriminator: stride-2 stems of 32 channels for condition and image, concatenated, then 128, 256, 512, 3x3 to 1.
The benchmark stacks 3 dates x 4 bands.
Chosen here: tanh at the end; no cloud mask as a further output; dropout 0.5; four bands out (54.422 M is 12 in, 3 out);
4x4 kernels with stride 2 in the discriminator's body; the reference date, if given, comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from sader.baselines.baseline import BaselineConfig, BaselineInputs, System
from sader.baselines.parts.adversarial import GAN_RECIPE, ConditionalGan, normal_init
from sader.errors import ShapeError


@dataclass(frozen=True)
class McGanConfig(BaselineConfig):
    """Sizes of the U-Net and of its discriminator."""

    width: int = 64
    """Channels at full size."""
    widths: tuple[int, ...] = (128, 256, 512, 512, 512, 512, 512)
    """Channels after each stride-2 convolution."""
    dropout: float = 0.5
    """After the first three transposed convolutions."""
    judge_stem: int = 32
    """Channels of each of the discriminator's two stems."""
    judge_widths: tuple[int, ...] = (128, 256, 512)
    """Channels of its body."""

    @property
    def multiple(self) -> int:
        return 2 ** len(self.widths)


class UNet(nn.Module):
    """(B, channels_in, H, W) -> (B, channels_out, H, W) in [-1, 1]; sizes are multiples of 2 ** len(widths)."""

    def __init__(self, channels_in: int, channels_out: int, config: McGanConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels_in, config.width, 3, padding=1)
        wide = [config.width, *config.widths]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for before, width in pairwise(wide):
            conv = nn.Conv2d(before, width, 4, stride=2, padding=1)
            self.down.append(nn.Sequential(nn.LeakyReLU(0.2), conv, nn.BatchNorm2d(width)))
        levels = len(config.widths)
        for place, level in enumerate(reversed(range(levels))):
            before = wide[level + 1] * (1 if place == 0 else 2)  # the skip beside it
            back = nn.ConvTranspose2d(before, wide[level], 4, stride=2, padding=1)
            drop = nn.Dropout(config.dropout if place < 3 else 0.0)
            self.up.append(nn.Sequential(nn.ReLU(), back, nn.BatchNorm2d(wide[level]), drop))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv2d(2 * config.width, channels_out, 3, padding=1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) * x.shape[-2] * x.shape[-1] == 4 ** len(self.down):
            raise ShapeError(
                f"one image of {x.shape[-2]}x{x.shape[-1]} leaves a single value at the coarsest level, which batch "
                f"norm cannot take. Use train.batch_size=2 or train.crop={2 * x.shape[-1]}."
            )
        x = self.stem(x)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = layer(x)
        for layer in self.up:
            x = torch.cat([layer(x), skips.pop()], dim=1)
        return self.out(x)


class TwoStemDiscriminator(nn.Module):
    """Condition (B, D, H, W) and image (B, C, H, W) -> (B, 1, H/16, W/16) logits."""

    def __init__(self, condition: int, image: int, config: McGanConfig) -> None:
        super().__init__()
        self.condition = nn.Conv2d(condition, config.judge_stem, 4, stride=2, padding=1)
        self.image = nn.Conv2d(image, config.judge_stem, 4, stride=2, padding=1)
        layers: list[nn.Module] = [nn.LeakyReLU(0.2)]
        before = 2 * config.judge_stem
        for width in config.judge_widths:
            conv = nn.Conv2d(before, width, 4, stride=2, padding=1)
            layers += [conv, nn.BatchNorm2d(width), nn.LeakyReLU(0.2)]
            before = width
        self.body = nn.Sequential(*layers, nn.Conv2d(before, 1, 3, padding=1))

    def forward(self, condition: Tensor, image: Tensor) -> Tensor:
        return self.body(torch.cat([self.condition(condition), self.image(image)], dim=1))


class McGan(ConditionalGan):
    """U-Net generator on the stacked dates, two-stem discriminator."""

    config: McGanConfig

    def __init__(self, config: McGanConfig) -> None:
        super().__init__(config)
        self.generator = UNet(config.stacked, config.channels, config)
        self.discriminator = TwoStemDiscriminator(config.stacked, config.channels, config)
        normal_init(self)

    def judged(self, inputs: BaselineInputs, image: Tensor) -> Tensor:
        return self.discriminator(inputs.joined, image)


SYSTEM = System(
    name="mcgan",
    title="McGAN",
    year=2017,
    loss="vanilla GAN + 100 L1",
    config=McGanConfig,
    network=McGan,
    printed=(54.42, 35.88),
    reference="Enomoto et al., CVPR Workshops 2017, arXiv 1710.04835",
    train={**GAN_RECIPE, "epochs": 300.0, "crop": 256},
)
