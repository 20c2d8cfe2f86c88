"""CR-TS Net (Ebel et al., TGRS 2022): a deep residual network per date, then 3D convolutions over the dates.

Published: per date a 3x3 conv to 256 and 16 residual blocks (two 3x3 convs, ReLU, no norm, residual scale 0.1), weights
shared; 3D conv 3x3x3 at 256; five 3D residual blocks; 3D conv (T, 3, 3) to the bands; tanh; no adversarial term.
Chosen here: zero padding; the 3D residual blocks are built like the 2D ones; other numbers of dates than the one the
last kernel is made for are chosen or repeated by the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase, System
from sader.baselines.parts.adversarial import GAN_RECIPE


@dataclass(frozen=True)
class CrTsNetConfig(BaselineConfig):
    """Sizes of CR-TS Net; the defaults are the paper's."""

    width: int = 256
    """Channels everywhere."""
    date_blocks: int = 16
    """Residual blocks per date."""
    series_blocks: int = 5
    """3D residual blocks over the dates."""
    residual_scale: float = 0.1
    """Factor of a block's residual branch."""
    use_of_dates = "the last kernel of CR-TS Net spans the dates"


class ScaledResidual(nn.Module):
    """x + scale conv(ReLU(conv(x))), 2D or 3D by the class of convolution."""

    def __init__(self, conv: type[nn.Conv2d] | type[nn.Conv3d], width: int, *, scale: float) -> None:
        super().__init__()
        self.first = conv(width, width, 3, padding=1)
        self.second = conv(width, width, 3, padding=1)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.second(F.relu(self.first(x)))


class CrTsNet(Baseline):
    """CR-TS Net; one pass. Not invariant to the order of the dates."""

    config: CrTsNetConfig

    def __init__(self, config: CrTsNetConfig) -> None:
        super().__init__(config)
        width, scale = config.width, config.residual_scale
        self.date_in = nn.Conv2d(config.date_channels, width, 3, padding=1)
        self.date_blocks = nn.Sequential(
            *(ScaledResidual(nn.Conv2d, width, scale=scale) for _ in range(config.date_blocks))
        )
        self.series_in = nn.Conv3d(width, width, 3, padding=1)
        self.series_blocks = nn.Sequential(
            *(ScaledResidual(nn.Conv3d, width, scale=scale) for _ in range(config.series_blocks))
        )
        self.out = nn.Conv3d(width, config.channels, (config.slots, 3, 3), padding=(0, 1, 1))

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        frames = self.arranged(inputs).stacked
        x = F.relu(self.date_in(rearrange(frames, "b t c h w -> (b t) c h w")))
        x = rearrange(self.date_blocks(x), "(b t) d h w -> b d t h w", t=self.config.slots)
        x = self.series_blocks(F.relu(self.series_in(x)))
        return torch.tanh(self.out(x)[:, :, 0])

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        loss = example.mean((self(example.inputs).float() - example.clear).abs())
        yield Phase(MAIN, loss, {"l1": loss.detach()})


SYSTEM = System(
    name="crtsnet",
    title="CR-TS Net",
    year=2022,
    loss="L1",
    config=CrTsNetConfig,
    network=CrTsNet,
    printed=(38.47, 7602.97),
    reference="Ebel et al., SEN12MS-CR-TS, IEEE TGRS",
    train=GAN_RECIPE,
    note="Published: the network of each date starts from weights of SEN12MS-CR and is frozen for 100,000 iterations. "
    "Here all weights start at random and learn from the first step.",
)
