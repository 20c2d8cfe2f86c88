"""CycleGAN (Zhu et al. 2017, "Unpaired Image-to-Image Translation using Cycle-Consistent Adversarial Networks").

Published: two ResNet-9 generators and two PatchGANs; an image pool. In the benchmark: the stack of cloudy dates to
clear, and back. The paper counts one generator.
Chosen here: instance norm (as published); the two sides differ in channels, so "identity" means that an image of the
target side, shown in every date, comes out as itself (and a cloudy date as a stack of itself). No pixel of the target
is compared with the answer: unpaired, as published. Unknown pixels of the target show the generator's own. The
reference date, if given, comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase, System
from sader.baselines.parts.adversarial import (
    DISCRIMINATOR,
    GAN_RECIPE,
    PatchDiscriminator,
    discriminator_loss,
    gan_loss,
    normal_init,
)
from sader.baselines.parts.resnet import ResNetGenerator


@dataclass(frozen=True)
class CycleGanConfig(BaselineConfig):
    """Sizes of the generators and discriminators, weights of the losses."""

    width: int = 64
    """Channels at full size; doubled at each of the two levels."""
    blocks: int = 9
    """Residual blocks at a quarter of the size."""
    judge_widths: tuple[int, ...] = (64, 128, 256)
    """Channels of the discriminators' stride-2 convolutions."""
    cycle: float = 10.0
    """Weight of the cycle consistency."""
    identity: float = 0.5
    """Weight of the identity loss, in cycle weights; 0 = off."""
    pool: int = 50
    """Size of the pool of fake images for the discriminators; 0 = none."""

    multiple = 4


class ImagePool:
    """The last fake images: half of the images shown to a discriminator are older ones (Shrivastava 2017).

    All state stays on the device of the images: a step that waits for the host cannot be captured as a CUDA graph.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: Tensor | None = None
        """(size, C, H, W), filled from the front."""
        self._filled: Tensor | None = None
        """Number of filled slots, a scalar."""

    @property
    def images(self) -> Tensor | None:
        """A copy of the pool (N, C, H, W), N up to `size`; None before the first image. Waits for the device."""
        if self._places is None or self._filled is None:
            return None
        return self._places[: int(self._filled)].clone()

    @images.setter
    def images(self, images: Tensor | None) -> None:
        self._places = self._filled = None
        if images is not None:
            self._places = images.new_zeros(self.size, *images.shape[1:])
            self._places[: len(images)] = images
            self._filled = torch.full((), len(images), dtype=torch.long, device=images.device)

    def exchanged(self, fakes: Tensor, generator: torch.Generator) -> Tensor:
        """Return as many images as given: each unchanged, or swapped for one of the pool."""
        if self.size == 0:
            return fakes
        if self._places is None or self._filled is None:
            self.images = fakes[:0]
        assert self._places is not None
        assert self._filled is not None
        draws = torch.rand(len(fakes), 2, generator=generator, device=generator.device).to(fakes.device)
        chosen = (draws[:, 1].double() * self.size).long()
        shown = []
        for image, swap, which in zip(fakes, draws[:, 0] < 0.5, chosen, strict=True):
            free = self._filled < self.size
            place = torch.where(free, self._filled, which).view(1)
            old = self._places.index_select(0, place)[0]
            shown.append(torch.where(swap & ~free, old, image))
            # In place: a captured step holds the addresses.
            self._places.index_copy_(0, place, torch.where(swap | free, image, old)[None])
            self._filled.add_(1).clamp_(max=self.size)
        return torch.stack(shown)


class CycleGan(Baseline):
    """Cloudy stack to clear and back, each side with its discriminator."""

    config: CycleGanConfig

    def __init__(self, config: CycleGanConfig) -> None:
        super().__init__(config)
        stacked, image = config.stacked, config.channels
        sizes = {"width": config.width, "blocks": config.blocks}
        self.clearing = ResNetGenerator(stacked, image, norm="instance", **sizes)
        self.clouding = ResNetGenerator(image, stacked, norm="instance", **sizes)
        self.judge_clear = PatchDiscriminator(image, widths=config.judge_widths, norm="instance")
        self.judge_cloudy = PatchDiscriminator(stacked, widths=config.judge_widths, norm="instance")
        self.pools = {"clear": ImagePool(config.pool), "cloudy": ImagePool(config.pool)}
        normal_init(self)

    @property
    def counted(self) -> nn.Module:
        return self.clearing

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {
            MAIN: [*self.clearing.parameters(), *self.clouding.parameters()],
            DISCRIMINATOR: [*self.judge_clear.parameters(), *self.judge_cloudy.parameters()],
        }

    def memory(self) -> dict[str, Tensor]:
        return {name: pool.images for name, pool in self.pools.items() if pool.images is not None}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        device = next(self.parameters()).device
        for name, pool in self.pools.items():
            pool.images = memory[name].to(device) if name in memory else None

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        return self.clearing(self.arranged(inputs).joined)

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        inputs, config = self.arranged(example.inputs), self.config
        cloudy = inputs.joined
        clear = self.clearing(cloudy).float()
        truth = example.known(clear)
        clouded = self.clouding(truth).float()
        fooled = gan_loss(self.judge_clear(clear), True, "lsgan") + gan_loss(self.judge_cloudy(clouded), True, "lsgan")
        cycle = (self.clouding(clear).float() - cloudy).abs().mean()
        cycle = cycle + (self.clearing(clouded).float() - truth).abs().mean()
        loss = fooled + config.cycle * cycle
        terms = {"adversarial": fooled.detach(), "cycle": cycle.detach()}
        if config.identity:
            same = self._identity(inputs, truth)
            loss, terms = loss + config.cycle * config.identity * same, {**terms, "identity": same.detach()}
        yield Phase(MAIN, loss, terms)

        shown = {"clear": clear.detach(), "cloudy": clouded.detach()}
        if self.training:  # validation does not change the pools
            shown = {name: self.pools[name].exchanged(image, generator) for name, image in shown.items()}
        on_clear, parts = discriminator_loss(self.judge_clear, truth, shown["clear"], "lsgan")
        on_cloudy, _ = discriminator_loss(self.judge_cloudy, cloudy, shown["cloudy"], "lsgan")
        yield Phase(DISCRIMINATOR, on_clear + on_cloudy, parts)

    def _identity(self, inputs: BaselineInputs, truth: Tensor) -> Tensor:
        """Return the identity loss: the change of images that are on a generator's target side already."""
        dates = inputs.cloudy.shape[1]

        def shown_in_all(image: Tensor) -> Tensor:
            full = image if inputs.aux is None else torch.cat([image, inputs.aux[:, 0]], dim=1)
            return full.repeat(1, dates, 1, 1)

        first = inputs.cloudy[:, 0]
        stays_clear = (self.clearing(shown_in_all(truth)).float() - truth).abs().mean()
        return stays_clear + (self.clouding(first).float() - shown_in_all(first)).abs().mean()


SYSTEM = System(
    name="cyclegan",
    title="CycleGAN",
    year=2017,
    loss="LSGAN + 10 L1 of the cycle + 5 L1 of the identity",
    config=CycleGanConfig,
    network=CycleGan,
    printed=(11.44, 56.80),
    reference="Zhu et al., ICCV 2017, arXiv 1703.10593",
    note="The printed 56.80 GMACs are those of 3 bands in and out, with transposed convolutions counted at the size of "
    "their output.",
    train=GAN_RECIPE,
    capturable=False,
)
