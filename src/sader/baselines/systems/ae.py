"""AE (Sintarasirikulchai et al. 2018): one convolutional autoencoder per band. Reimplementation, sizes assumed.

Published: one convolutional autoencoder for each band, independent of the others; input: that band at several dates.
Chosen here (layer sizes and optimiser are not known, no code is public): three stride-2 3x3 convolutions, one 3x3
convolution at the coarsest level, three transposed ones back, ReLU, no skips; widths chosen for both figures over four
bands (6.50 M, 17.79 GMACs). Bands run side by side as groups of one convolution. A pixel or date that is missing is 0;
the reference date, if given, comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase, System
from sader.errors import ConfigError


@dataclass(frozen=True)
class AutoencoderConfig(BaselineConfig):
    """Sizes of each band's autoencoder."""

    widths: tuple[int, ...] = (80, 184, 184)
    """Channels after each stride-2 convolution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aux_bands:
            raise ConfigError(
                f"network.aux_bands is {list(self.aux_bands)}; each autoencoder has one band as input. Leave it empty."
            )

    @property
    def multiple(self) -> int:
        return 2 ** len(self.widths)


class BandAutoencoders(nn.Sequential):
    """(B, C * T, H, W), the dates of a band beside each other -> (B, C, H, W); C autoencoders as groups."""

    def __init__(self, bands: int, dates: int, widths: tuple[int, ...]) -> None:
        wide = [dates, *widths]
        layers: list[nn.Module] = []
        for before, width in pairwise(wide):
            layers += [nn.Conv2d(bands * before, bands * width, 3, stride=2, padding=1, groups=bands), nn.ReLU()]
        layers += [nn.Conv2d(bands * wide[-1], bands * wide[-1], 3, padding=1, groups=bands), nn.ReLU()]
        back = [*reversed(widths), widths[0]]
        for before, width in pairwise(back):
            conv = nn.ConvTranspose2d(bands * before, bands * width, 4, stride=2, padding=1, groups=bands)
            layers += [conv, nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(bands * widths[0], bands, 3, padding=1, groups=bands))


class Autoencoders(Baseline):
    """All bands' autoencoders; squared error."""

    config: AutoencoderConfig

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__(config)
        self.network = BandAutoencoders(config.channels, config.slots, config.widths)

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        return self.network(rearrange(self.arranged(inputs).cloudy, "b t c h w -> b (c t) h w"))

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        error = (self(example.inputs).float() - example.clear).square()
        yield Phase(MAIN, example.mean(error), {})


SYSTEM = System(
    name="ae",
    title="AE",
    year=2018,
    loss="MSE",
    config=AutoencoderConfig,
    network=Autoencoders,
    printed=(6.53, 17.78),
    assumed=True,
    reference="Sintarasirikulchai et al., IEEE 8620054, 2018",
    train={"adam_lr": 1e-3, "schedule": "cosine", "ema_decay": 0.0, "epochs": 200.0, "batch_size": 16},
)
