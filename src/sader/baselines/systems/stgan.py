"""STGAN (Sarukkai et al., WACV 2020, "Cloud Removal in Satellite Images Using Spatiotemporal Generative Networks").

Published, the ResNet variant of the tables: a shared 7x7 stem to 64 for each date; the pairs of dates (01, 02, 12)
concatenated to 128; each pair through the same three stride-2 convolutions 256, 512, 1024 and nine residual blocks
(batch norm, dropout 0.5); the three results concatenated to 3072; transposed convolutions 1536, 768, 384; 7x7 out;
tanh. The discriminator gets all dates and the image.
Chosen here: 3x3 kernels with reflected edges as in the pix2pix family, no bias before batch norm; 70x70 PatchGAN; the
reference date, if given, comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from sader.baselines.baseline import BaselineConfig, BaselineInputs, System
from sader.baselines.parts.adversarial import GAN_RECIPE, ConditionalGan, PatchDiscriminator, normal_init
from sader.baselines.parts.resnet import ResidualBlock, down, head, stem, up

LEVELS = 3


@dataclass(frozen=True)
class StGanConfig(BaselineConfig):
    """Sizes of the ResNet variant."""

    width: int = 64
    """Channels of one date's stem; a pair has twice that, doubled at each of three levels."""
    blocks: int = 9
    """Residual blocks at an eighth of the size."""
    dropout: float = 0.5
    """Inside the residual blocks."""
    judge_widths: tuple[int, ...] = (64, 128, 256)
    """Channels of the discriminator's stride-2 convolutions."""

    least_dates, use_of_dates = 2, "STGAN joins pairs of dates"

    multiple = 2**LEVELS


class PairGenerator(nn.Module):
    """(B, T, D, H, W) dates -> (B, C, H, W) in [-1, 1]; sizes are multiples of 8."""

    def __init__(self, config: StGanConfig) -> None:
        super().__init__()
        self.pairs = list(combinations(range(config.slots), 2))
        self.stem = stem(config.date_channels, config.width, norm="batch")
        wide = [2 * config.width * 2**level for level in range(LEVELS + 1)]
        self.encoder = nn.Sequential(
            *(down(wide[level], wide[level + 1], norm="batch") for level in range(LEVELS)),
            *(ResidualBlock(wide[-1], norm="batch", dropout=config.dropout) for _ in range(config.blocks)),
        )
        merged = len(self.pairs) * wide[-1]
        self.decoder = nn.Sequential(
            *(up(merged // 2**level, merged // 2 ** (level + 1), norm="batch") for level in range(LEVELS)),
            head(merged // 2**LEVELS, config.channels),
        )

    def forward(self, dates: Tensor) -> Tensor:
        features = self.stem(dates.flatten(0, 1)).unflatten(0, dates.shape[:2])
        encoded = [self.encoder(torch.cat([features[:, a], features[:, b]], dim=1)) for a, b in self.pairs]
        return self.decoder(torch.cat(encoded, dim=1))


class StGan(ConditionalGan):
    """Generator over pairs of dates, PatchGAN over all of them."""

    config: StGanConfig

    def __init__(self, config: StGanConfig) -> None:
        super().__init__(config)
        self.generator = PairGenerator(config)
        self.discriminator = PatchDiscriminator(config.stacked + config.channels, widths=config.judge_widths)
        normal_init(self)

    def generated(self, inputs: BaselineInputs) -> Tensor:
        return self.generator(inputs.stacked)


SYSTEM = System(
    name="stgan",
    title="STGAN",
    year=2020,
    loss="vanilla GAN + 100 L1",
    config=StGanConfig,
    network=StGan,
    printed=(231.93, 1094.94),
    reference="Sarukkai et al., WACV 2020, arXiv 1912.06838",
    note="The printed 1094.94 GMACs count transposed convolutions at the size of their output: 703.2 + 391.4 = 1094.6.",
    train={**GAN_RECIPE, "batch_size": 4},
)
