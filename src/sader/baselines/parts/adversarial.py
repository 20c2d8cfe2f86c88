"""What the adversarial systems share: patch discriminator, the two GAN losses, the optimiser recipe, weight init.

From BASELINES ("Common GAN defaults"): 70x70 PatchGAN of 4x4 convolutions 64, 128, 256 with stride 2, then 512 and 1
with stride 1; the condition is concatenated to the image; the discriminator's loss is halved; weights start normal with
standard deviation 0.02. Choices: LeakyReLU 0.2 and no norm on the first layer, as in the pix2pix paper; where the
target is unknown the "real" image shows the generator's own pixels, so that nothing is learned there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineInputs, Example, NoiseOf, Phase
from sader.errors import ConfigError, ShapeError

GanLoss = Literal["vanilla", "lsgan"]
Norm = Literal["batch", "instance", "none"]
DISCRIMINATOR = "discriminator"

GAN_RECIPE: Mapping[str, Any] = {
    "optimizer": "adam", "adam_lr": 2e-4, "betas": (0.5, 0.999), "schedule": "linear", "warmup": 0.0, "clip": 0.0,
    "ema_decay": 0.0, "dates": 3,
}  # fmt: skip
"""The pix2pix family: constant rate for half of the run, then linear to zero; no average of weights."""


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
    """Instance normalisation without parameters. PyTorch's own refuses a single pixel, which a small image can be.

    A map without any variation (nodata, a saturated cloud) comes out as zero and learns nothing: the derivative there,
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
    """Give convolutions normal weights and zero biases, batch norms scales near one (the pix2pix family's start)."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.normal_(part.weight, 0.0, std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.weight, 1.0, std)
            nn.init.zeros_(part.bias)


def gan_loss(logits: Tensor, real: bool, kind: GanLoss) -> Tensor:
    """Return how far a discriminator's map is from saying "real" (or "fake") everywhere."""
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
            # A bias before a batch norm would be subtracted again.
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
    """A generator from cloudy dates to a clear image, judged by a discriminator that sees the dates as well.

    Subclasses make `generator` and `discriminator` and write `generated`. Loss: the adversarial term plus `l1_weight`
    times L1 (Isola 2017); the discriminator is moved first, on the same fake image.
    """

    generator: nn.Module
    discriminator: nn.Module
    gan_kind: GanLoss = "vanilla"
    l1_weight: float = 100.0

    @abstractmethod
    def generated(self, inputs: BaselineInputs) -> Tensor:
        """Return the clear image (B, C, H, W) of inputs with the network's number of dates."""

    def judged(self, inputs: BaselineInputs, image: Tensor) -> Tensor:
        """Return the discriminator's map for an image beside its dates."""
        return self.discriminator(torch.cat([inputs.joined, image], dim=1))

    def arranged(self, inputs: BaselineInputs) -> BaselineInputs:
        """Return the inputs with the number of dates the network is built for."""
        return inputs if self.config.dates is None else inputs.arranged(self.config.dates)

    @property
    def counted(self) -> nn.Module:
        return self.generator

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {DISCRIMINATOR: list(self.discriminator.parameters()), MAIN: list(self.generator.parameters())}

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        return self.generated(self.arranged(inputs))

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        inputs = self.arranged(example.inputs)
        fake = self.generated(inputs).float()

        def judge(image: Tensor) -> Tensor:
            return self.judged(inputs, image)

        loss, terms = discriminator_loss(judge, example.known(fake), fake, self.gan_kind)
        yield Phase(DISCRIMINATOR, loss, terms)
        l1 = example.mean((fake - example.clear).abs())
        adversarial = gan_loss(judge(fake), True, self.gan_kind)
        yield Phase(MAIN, adversarial + self.l1_weight * l1, {"l1": l1.detach(), "adversarial": adversarial.detach()})
