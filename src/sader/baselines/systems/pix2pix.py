"""Pix2Pix (Isola et al. 2017, "Image-to-Image Translation with Conditional Adversarial Networks"), dates concatenated.

Published: the size of the paper's table means the 9-block ResNet generator, not the U-Net; 70x70 PatchGAN.
Chosen here: batch norm and no dropout; four bands in and out (the facts leave 3 or 4 out open); the reference date, if
given, comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from sader.baselines.baseline import BaselineConfig, System
from sader.baselines.parts.adversarial import GAN_RECIPE, ConditionalGan, PatchDiscriminator, normal_init
from sader.baselines.parts.resnet import ResNetGenerator


@dataclass(frozen=True)
class Pix2PixConfig(BaselineConfig):
    """Sizes of the ResNet generator and its discriminator."""

    width: int = 64
    """Channels at full size; doubled at each of the two levels."""
    blocks: int = 9
    """Residual blocks at a quarter of the size."""
    judge_widths: tuple[int, ...] = (64, 128, 256)
    """Channels of the discriminator's stride-2 convolutions."""

    multiple = 4


class Pix2Pix(ConditionalGan):
    """ResNet generator on the stacked dates, conditional PatchGAN."""

    config: Pix2PixConfig

    def __init__(self, config: Pix2PixConfig) -> None:
        super().__init__(config)
        self.generator = ResNetGenerator(config.stacked, config.channels, width=config.width, blocks=config.blocks)
        self.discriminator = PatchDiscriminator(config.stacked + config.channels, widths=config.judge_widths)
        normal_init(self)


SYSTEM = System(
    name="pix2pix",
    title="Pix2Pix",
    year=2017,
    loss="vanilla GAN + 100 L1",
    config=Pix2PixConfig,
    network=Pix2Pix,
    printed=(11.45, 29.47),
    reference="Isola et al., CVPR 2017, arXiv 1611.07004",
    train=GAN_RECIPE,
)
