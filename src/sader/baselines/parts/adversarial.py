"""Parts of the adversarial systems: discriminators, GAN losses, optimiser settings, weight init, the date extractor.

Published defaults of these systems: 70x70 PatchGAN of 4x4 convolutions 64, 128, 256 with stride 2, then 512 and 1
with stride 1; the condition is concatenated to the image; the discriminator's loss is halved; weights start normal with
standard deviation 0.02. Chosen here: LeakyReLU 0.2 and no norm on the first layer, as in the pix2pix paper; where the
target is unknown the "real" image shows the generator's own pixels, so that nothing is learned there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase
from sader.errors import ConfigError, ShapeError

GanLoss = Literal["vanilla", "lsgan"]
Norm = Literal["batch", "instance", "none"]
DISCRIMINATOR = "discriminator"

GAN_RECIPE: dict[str, Any] = {"adam_lr": 2e-4, "betas": (0.5, 0.999), "schedule": "linear", "ema_decay": 0.0}
GAN_RECIPE |= {"epochs": 200.0, "batch_size": 1}
"""The pix2pix family: constant rate for 100 epochs, then 100 linear to zero; no average of weights."""


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """Return the normalisation of a layer with `channels` outputs."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "instance":
        return InstanceNorm()
    if norm == "none":
        return nn.Identity()
    raise ConfigError(f"norm is {norm!r}; expected batch, instance or none.")


class InstanceNorm(nn.Module):
    """Instance normalisation without parameters. PyTorch's own refuses a single pixel.

    A map without variation (nodata, a saturated cloud) becomes zero and has no gradient: the derivative there,
    1 / sqrt(eps) = 316 in every layer, would overflow in a deep stack (PMAA has 33 in a row).
    """

    flat = 1e-10
    """Variance up to which a map counts as constant."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            spread = x.detach().float().var((-2, -1), correction=0, keepdim=True)
            x = torch.where(spread > self.flat, x, x.detach())
        return torch.group_norm(x, x.shape[1], None, None, 1e-5)


def normal_init(module: nn.Module, *, std: float = 0.02) -> None:
    """Initialise convolutions with normal weights and zero biases, batch norms with scales near one, as pix2pix."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.normal_(part.weight, 0.0, std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.weight, 1.0, std)
            nn.init.zeros_(part.bias)


def gan_loss(logits: Tensor, real: bool, kind: GanLoss) -> Tensor:
    """Return the loss of a discriminator's map against "real" (or "fake") everywhere."""
    target = torch.full_like(logits, float(real), dtype=torch.float32)
    if kind == "lsgan":
        return F.mse_loss(logits.float(), target)
    return F.binary_cross_entropy_with_logits(logits.float(), target)


class PatchDiscriminator(nn.Module):
    """70x70 PatchGAN: (B, channels, H, W) -> (B, 1, H/8 - 2, W/8 - 2) logits.

    widths: outputs of the stride-2 convolutions; one more at stride 1 doubles the last, and a last one gives the map.
    """

    def __init__(self, channels: int, *, widths: Sequence[int] = (64, 128, 256), norm: Norm = "batch") -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for level, width in enumerate([*widths, 2 * widths[-1]]):
            # A bias before a batch norm has no effect.
            bias = level == 0 or norm != "batch"
            layers.append(nn.Conv2d(before, width, 4, stride=2 if level < len(widths) else 1, padding=1, bias=bias))
            if level > 0:
                layers.append(norm_layer(norm, width))
            layers.append(nn.LeakyReLU(0.2))
            before = width
        self.layers = nn.Sequential(*layers, nn.Conv2d(before, 1, 4, padding=1))
        self.least = 3 * 2 ** len(widths)

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < self.least:
            raise ShapeError(
                f"the images are {x.shape[-2]}x{x.shape[-1]}; this discriminator needs at least {self.least} pixels. "
                f"Use train.crop={-(-self.least // 32) * 32} or more."
            )
        return self.layers(x)


def discriminator_loss(
    judge: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, kind: GanLoss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the halved discriminator loss on real and fake images, and its terms."""
    on_real, on_fake = gan_loss(judge(real), True, kind), gan_loss(judge(fake.detach()), False, kind)
    return (on_real + on_fake) / 2, {"judged_real": on_real.detach(), "judged_fake": on_fake.detach()}


class ConditionalGan(Baseline):
    """A generator from cloudy dates to a clear image, with a discriminator that gets the dates as well.

    Subclasses create `generator` and `discriminator`. Loss: the adversarial term plus
    `l1_weight` times L1 (Isola 2017); the discriminator is updated first, on the same fake image.
    """

    generator: nn.Module
    discriminator: nn.Module
    compiled: tuple[str, ...] = ("with_features", "judged")
    gan_kind: GanLoss = "vanilla"
    l1_weight: float = 100.0

    def generated(self, inputs: BaselineInputs) -> Tensor:
        """Return the clear image (B, C, H, W) of the network's number of dates, here from the stacked dates."""
        return self.generator(inputs.joined)

    def with_features(self, inputs: BaselineInputs) -> tuple[Tensor, Any]:
        """Return `generated`, and what `more_terms` needs."""
        return self.generated(inputs), None

    def more_terms(self, example: Example, inputs: BaselineInputs, found: Any) -> dict[str, tuple[float, Tensor]]:
        """Return further terms of the generator's loss with their weights; found: of `with_features`."""
        return {}

    def judged(self, inputs: BaselineInputs, image: Tensor) -> Tensor:
        """Return the discriminator's map for an image beside its dates."""
        return self.discriminator(torch.cat([inputs.joined, image], dim=1))

    @property
    def counted(self) -> nn.Module:
        return self.generator

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {DISCRIMINATOR: list(self.discriminator.parameters()), MAIN: list(self.generator.parameters())}

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        return self.generated(self.arranged(inputs))

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        inputs = self.arranged(example.inputs)
        fake, found = self.with_features(inputs)
        fake = fake.float()

        def judge(image: Tensor) -> Tensor:
            return self.judged(inputs, image)

        loss, terms = discriminator_loss(judge, example.known(fake), fake, self.gan_kind)
        yield Phase(DISCRIMINATOR, loss, terms)
        l1 = example.mean((fake - example.clear).abs())
        adversarial = gan_loss(judge(fake), True, self.gan_kind)
        total, terms = adversarial + self.l1_weight * l1, {"l1": l1, "adversarial": adversarial}
        for name, (weight, value) in self.more_terms(example, inputs, found).items():
            total, terms[name] = total + weight * value, value
        yield Phase(MAIN, total, {name: value.detach() for name, value in terms.items()})


class Features(NamedTuple):
    """Output of the extractor for N dates."""

    maps: Tensor
    """(N, width, H, W)"""
    mask: Tensor
    """(N, 1, H, W): cloudiness in [0, 1]."""
    image: Tensor
    """(N, C, H, W): an estimate of the clear image from this date alone, in [-1, 1]."""


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
        # One value per channel and image cannot be normalised.
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
    """Dates through the extractor of the generator, their features through the rest of it; losses of CTGAN and PMAA."""

    # Apart: grouped convolutions of the generator would keep the compiler from channels last in the extractor.
    compiled = ("generator.extractor.forward", "generator.forward", "judged")
    gan_kind = "lsgan"
    mask_weight: float = 1.0
    aux_weight: float = 50.0

    def __init__(self, config: BaselineConfig, generator: nn.Module, *, judge_widths: tuple[int, ...]) -> None:
        """`generator` holds its `extractor`; a strided discriminator over all dates and the image is added."""
        super().__init__(config)
        self.generator = generator
        self.discriminator = StridedDiscriminator(config.stacked + config.channels, judge_widths)
        normal_init(self)

    def generated(self, inputs: BaselineInputs) -> Tensor:
        return self.with_features(inputs)[0]

    def with_features(self, inputs: BaselineInputs) -> tuple[Tensor, Features]:
        extractor = cast(DateExtractor, self.generator.extractor)
        found: Features = extractor(inputs.stacked.flatten(0, 1))
        return self.generator(found.maps.unflatten(0, inputs.cloudy.shape[:2])), found

    def more_terms(self, example: Example, inputs: BaselineInputs, found: Any) -> dict[str, tuple[float, Tensor]]:
        mask = self._mask_error(inputs, found.mask.float())
        guesses = found.image.float().unflatten(0, inputs.cloudy.shape[:2])
        aux = torch.stack([example.mean((guess - example.clear).abs()) for guess in guesses.unbind(dim=1)]).mean()
        return {"mask": (self.mask_weight, mask), "auxiliary": (self.aux_weight, aux)}

    def _mask_error(self, inputs: BaselineInputs, mask: Tensor) -> Tensor:
        """Return the mean squared error of the masks where the true masks are known."""
        known = inputs.observed & ~inputs.cloud.isnan()
        error = (mask[:, 0].unflatten(0, known.shape[:2]) - inputs.cloud.nan_to_num()).square()
        return (error * known).sum() / known.sum().clamp(min=1)
