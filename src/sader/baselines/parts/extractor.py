"""The per-date extractor that CTGAN and PMAA share, and the losses that go with it.

From BASELINES 6: width 32; 3x3 convolution; six bottlenecks (1x1, dilated-2 3x3, 1x1, batch norm) with residual; a mask
head of 1x1 convolutions (32, 64, 128, 1, sigmoid), evaluated after blocks 1 and 3, gates blocks 2-3 and 4-5; ASPP with
hidden width 128 and rates 12, 24, 36; an auxiliary image by a 3x3 convolution and tanh. Losses: least-squares GAN +
100 L1 + squared error of the masks + 50 L1 of the auxiliary images. Discriminator: five 4x4 stride-2 convolutions 64,
64, 128, 256, 512, then 1.
Choice: a gate is 1 - mask (what is cloud is turned down); the masks are compared with those of the training data
where the original used a frozen network's; a 3x3 last convolution in the discriminator, which suits any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, BaselineConfig, BaselineInputs, Example, Phase
from sader.baselines.parts.adversarial import (
    DISCRIMINATOR,
    ConditionalGan,
    Norm,
    discriminator_loss,
    gan_loss,
    norm_layer,
    normal_init,
)
from sader.errors import ShapeError


class Features(NamedTuple):
    """What the extractor says about N dates."""

    maps: Tensor
    """(N, width, H, W)"""
    mask: Tensor
    """(N, 1, H, W): how cloudy, in [0, 1]."""
    image: Tensor
    """(N, C, H, W): a first guess of the clear image from this date alone, in [-1, 1]."""


class Bottleneck(nn.Module):
    """x + 1x1, 3x3 with dilation 2, 1x1 convolutions of the same width, each with a norm; ReLU."""

    def __init__(self, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 1, bias=False),
            norm_layer(norm, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=2, dilation=2, bias=False),
            norm_layer(norm, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1, bias=False),
            norm_layer(norm, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class Aspp(nn.Module):
    """Atrous spatial pyramid pooling: 1x1, three dilated 3x3 and the mean of the image, joined by a 1x1 convolution."""

    def __init__(self, width: int, hidden: int, rates: tuple[int, ...], *, norm: Norm) -> None:
        super().__init__()

        def branch(kernel: int, rate: int) -> nn.Sequential:
            padding = rate if kernel > 1 else 0
            conv = nn.Conv2d(width, hidden, kernel, padding=padding, dilation=rate, bias=False)
            return nn.Sequential(conv, norm_layer(norm, hidden), nn.ReLU())

        self.branches = nn.ModuleList([branch(1, 1), *(branch(3, rate) for rate in rates)])
        # One value per channel and image: nothing to normalise over.
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, hidden, 1), nn.ReLU())
        self.join = nn.Sequential(
            nn.Conv2d((2 + len(rates)) * hidden, width, 1, bias=False), norm_layer(norm, width), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        return self.join(torch.cat([*parts, self.mean(x).expand_as(parts[0])], dim=1))


class DateExtractor(nn.Module):
    """(N, D, H, W) dates -> `Features`; any size, the same weights for every date."""

    def __init__(self, channels: int, bands: int, *, width: int, hidden: int, norm: Norm) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), norm_layer(norm, width), nn.ReLU())
        self.blocks = nn.ModuleList([Bottleneck(width, norm=norm) for _ in range(6)])
        self.mask = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1), nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 1), nn.ReLU(),
            nn.Conv2d(4 * width, 1, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.aspp = Aspp(width, hidden, (12, 24, 36), norm=norm)
        self.image = nn.Sequential(nn.Conv2d(width, bands, 3, padding=1), nn.Tanh())

    def forward(self, dates: Tensor) -> Features:
        x = self.blocks[0](self.stem(dates))
        mask = self.mask(x)
        for number in (1, 2):
            x = self.blocks[number](x * (1 - mask))
        mask = self.mask(x)
        for number in (3, 4):
            x = self.blocks[number](x * (1 - mask))
        x = self.aspp(self.blocks[5](x))
        return Features(x, mask, self.image(x))


class StridedDiscriminator(nn.Module):
    """(B, channels, H, W) -> (B, 1, H/32, W/32) scores."""

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for level, width in enumerate(widths):
            layers.append(nn.Conv2d(before, width, 4, stride=2, padding=1))
            if level > 0:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.LeakyReLU(0.2))
            before = width
        self.layers = nn.Sequential(*layers, nn.Conv2d(before, 1, 3, padding=1))
        self.stride = 2 ** len(widths)

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < self.stride or (self.training and len(x) * x[0, 0].numel() < 2 * self.stride**2):
            raise ShapeError(
                f"{len(x)} images of {x.shape[-2]}x{x.shape[-1]} are too few pixels for this discriminator. Use "
                f"train.crop={2 * self.stride} or more."
            )
        return self.layers(x)


class ExtractorGan(ConditionalGan):
    """Dates through `self.extractor`, their features through `joined_image`; the losses of CTGAN and PMAA."""

    gan_kind = "lsgan"
    mask_weight: float = 1.0
    aux_weight: float = 50.0

    def __init__(self, config: BaselineConfig, generator: nn.Module, *, judge_widths: tuple[int, ...]) -> None:
        """`generator` holds its `extractor`; a strided discriminator over all dates and the image is added."""
        super().__init__(config)
        assert config.dates is not None
        self.generator = generator
        self.discriminator = StridedDiscriminator(config.dates * config.date_channels + config.channels, judge_widths)
        normal_init(self)

    @property
    def extractor(self) -> DateExtractor:
        """What sees one date at a time."""
        return cast(DateExtractor, self.generator.extractor)

    def joined_image(self, maps: Tensor) -> Tensor:
        """Return the clear image (B, C, H, W) from the features (B, T, width, H, W) of all dates."""
        return self.generator(maps)

    def features(self, inputs: BaselineInputs) -> Features:
        """Return the features of all dates, N = B * T."""
        return self.extractor(inputs.stacked.flatten(0, 1))

    def generated(self, inputs: BaselineInputs) -> Tensor:
        return self._with_features(inputs)[0]

    def _with_features(self, inputs: BaselineInputs) -> tuple[Tensor, Features]:
        found = self.features(inputs)
        return self.joined_image(found.maps.unflatten(0, inputs.cloudy.shape[:2])), found

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        inputs = self.arranged(example.inputs)
        fake, found = self._with_features(inputs)
        fake = fake.float()

        def judge(image: Tensor) -> Tensor:
            return self.judged(inputs, image)

        loss, terms = discriminator_loss(judge, example.known(fake), fake, self.gan_kind)
        yield Phase(DISCRIMINATOR, loss, terms)
        adversarial = gan_loss(judge(fake), True, self.gan_kind)
        l1 = example.mean((fake - example.clear).abs())
        mask = self._mask_error(inputs, found.mask.float())
        guesses = found.image.float().unflatten(0, inputs.cloudy.shape[:2])
        aux = torch.stack([example.mean((guess - example.clear).abs()) for guess in guesses.unbind(dim=1)]).mean()
        total = adversarial + self.l1_weight * l1 + self.mask_weight * mask + self.aux_weight * aux
        named = {"l1": l1, "adversarial": adversarial, "mask": mask, "auxiliary": aux}
        yield Phase(MAIN, total, {name: value.detach() for name, value in named.items()})

    def _mask_error(self, inputs: BaselineInputs, mask: Tensor) -> Tensor:
        """Return the mean squared error of the masks where the true ones are known."""
        known = inputs.observed & ~inputs.cloud.isnan()
        error = (mask[:, 0].unflatten(0, known.shape[:2]) - inputs.cloud.nan_to_num()).square()
        return (error * known).sum() / known.sum().clamp(min=1)
