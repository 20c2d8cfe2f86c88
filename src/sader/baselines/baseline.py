"""One protocol for every baseline system: a series of cloudy dates in, a clear image out; losses per optimiser.

A system is one file: a frozen config (a subclass of `BaselineConfig`), a network (a subclass of `Baseline`) and its
`SYSTEM` with the facts. What is the same for all is here: padding to the network's
multiple, the choice of dates for networks with a fixed number of them, missing pixels and bands, and what a loss may
count. Training is in `sader.training`, tiles and files elsewhere; nothing here knows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from sader.bands import BANDS_RGBN
from sader.data.batch import SeriesBatch
from sader.errors import BandError, ConfigError, ShapeError
from sader.model.blocks import reflect_pad, to_model_range


@dataclass(frozen=True)
class BaselineConfig:
    """What every system's config holds; a subclass adds its sizes. Fields need defaults and one-line docstrings."""

    bands: tuple[str, ...] = BANDS_RGBN
    """Bands that come out, C of them; each date brings them in."""
    aux_bands: tuple[str, ...] = ()
    """Bands that only help, A of them, given for each date beside the others (NIR or SAR)."""
    dates: int | None = 3
    """Dates the network is built for; None = any number. Others are chosen or repeated (`BaselineInputs.arranged`)."""

    # Capabilities, as those of `MTCDNConfig`.
    finds_clouds = False
    states_error = False
    matches_dates = False
    needs_all_bands = True

    def __post_init__(self) -> None:
        if not self.bands:
            raise ConfigError("network.bands is empty; expected at least one band, such as [B02, B03, B04, B08].")
        if self.dates is not None and self.dates < 1:
            raise ConfigError(f"network.dates is {self.dates}; expected 1 or more.")

    @property
    def channels(self) -> int:
        """Channels C of the clear image."""
        return len(self.bands)

    @property
    def date_channels(self) -> int:
        """Channels C + A of one date."""
        return len(self.bands) + len(self.aux_bands)

    @property
    def multiple(self) -> int:
        """Height and width must be multiples of this; `Baseline` pads."""
        return 1

    @property
    def fixed_size(self) -> int | None:
        """The only height and width the network can take, or None. Then `multiple` must be the same number."""
        return None

    @property
    def steps(self) -> int | None:
        """Default number of sampling steps; None for a network that answers in one pass."""
        return None


@dataclass(frozen=True)
class BaselineModelConfig:
    """Everything needed to rebuild a baseline; stored in its checkpoint, as `config.ModelConfig` is for SADER."""

    system: str
    """Name in `registry.BASELINES`."""
    network: BaselineConfig

    @property
    def name(self) -> str:
        return self.system

    @property
    def default_steps(self) -> tuple[int, int]:
        """Sampling steps and resamplings per step."""
        return self.network.steps or 1, 0


NoiseOf = Callable[[int, int], Tensor]
"""(draw, channels) -> standard normal noise (B, channels, H, W) of the images at hand. The same draw gives the same
noise, whatever was drawn before it, so that the tiles of a scene agree."""


@dataclass(frozen=True)
class BaselineInputs:
    """B series of T dates in the model's range, checked and masked: what a network may look at."""

    cloudy: Tensor
    """(B, T, C, H, W) in [-1, 1]; 0 where a pixel, a date or a band is missing."""
    aux: Tensor | None
    """(B, T, A, H, W) in [-1, 1], 0 where missing; None for a network without auxiliary bands."""
    observed: Tensor
    """bool (B, T, H, W): the date exists and has data there."""
    cloud: Tensor
    """(B, T, H, W): 1 cloud or shadow, 0 clear, NaN unknown."""
    present: Tensor
    """bool (B, T): the date exists; False is padding."""
    reference: Tensor
    """long (B,): the date to clean, -1 for none."""
    days: Tensor | None
    """(B, T) days since the first date; NaN or None where unknown."""

    @property
    def stacked(self) -> Tensor:
        """(B, T, C + A, H, W): bands and auxiliary bands of each date."""
        return self.cloudy if self.aux is None else torch.cat([self.cloudy, self.aux], dim=2)

    @property
    def joined(self) -> Tensor:
        """(B, T * (C + A), H, W): the dates stacked as channels."""
        return rearrange(self.stacked, "b t c h w -> b (t c) h w")

    def arranged(self, dates: int) -> BaselineInputs:
        """Return exactly `dates` dates: the reference first, then the clearest of the others in the given order.

        A network without a flag for the reference date knows it by its place. Too many dates: those with most clear
        observed pixels stay (unknown masks count as clear). Too few: they are repeated in turn.
        """
        count = self.cloudy.shape[1]
        position = torch.arange(count, device=self.cloudy.device)
        own = position == self.reference[:, None]
        clear = self.observed & ~(self.cloud > 0.5)  # NaN > 0.5 is False
        share = clear.flatten(2).double().mean(dim=2)
        score = torch.where(own, 2.0, share).masked_fill(~self.present, -1.0)
        # Ties go to the earlier date; the small slope is below one pixel of any image.
        chosen = (score - position * 1e-12).argsort(dim=1, descending=True)[:, :dates]
        real = self.present.gather(1, chosen)
        key = torch.where(own.gather(1, chosen), -1, chosen) + torch.where(real, 0, count + 1)
        order = chosen.gather(1, key.argsort(dim=1))
        slots = torch.arange(dates, device=order.device)
        index = order.gather(1, slots % real.sum(dim=1, keepdim=True).clamp(min=1))
        taken: dict[str, Any] = {
            f.name: _taken(getattr(self, f.name), index) for f in fields(self) if f.name != "reference"
        }
        return replace(self, **taken, reference=torch.where(self.reference >= 0, 0, -1))

    def map_images(self, change: Callable[[Tensor], Tensor]) -> BaselineInputs:
        """Return the inputs with `change` applied to everything that has pixels."""
        images: dict[str, Any] = {name: change(getattr(self, name)) for name in ("cloudy", "observed", "cloud")}
        return replace(self, **images, aux=None if self.aux is None else change(self.aux))


def inputs_of(batch: SeriesBatch, config: BaselineConfig) -> BaselineInputs:
    """Return what a network of `config` may look at in a training batch, whose auxiliary bands follow the others."""
    count, wanted = config.channels, config.date_channels
    if batch.cloudy.shape[2] != wanted:
        raise BandError(
            f"the batch has {batch.cloudy.shape[2]} bands; this network wants {wanted}: "
            f"{', '.join((*config.bands, *config.aux_bands))}."
        )
    observed = batch.valid & batch.present[:, :, None, None]
    use = observed[:, :, None] & batch.band_present[:, None, :, None, None]
    # What is missing is 0 to the network, the middle of the range; as reflectance 0 it would be black.
    dates = to_model_range(batch.cloudy).masked_fill(~use, 0.0)
    cloud = batch.cloud_mask.to(torch.float32)
    return BaselineInputs(
        cloudy=dates[:, :, :count],
        aux=dates[:, :, count:] if config.aux_bands else None,
        observed=observed,
        cloud=cloud,
        present=batch.present,
        reference=batch.reference,
        days=batch.days,
    )


def generator_noise(inputs: BaselineInputs, generator: torch.Generator) -> NoiseOf:
    """Return noise for a whole batch from one generator (validation and tests); tiles of a scene use a `NoiseField`.

    Draws are made when first asked for and remembered, so that the same draw gives the same noise.
    """
    made: dict[tuple[int, int], Tensor] = {}
    batch, height, width = len(inputs.cloudy), *inputs.cloudy.shape[-2:]

    def noise(draw: int, channels: int) -> Tensor:
        if (draw, channels) not in made:
            shape = (batch, channels, height, width)
            made[draw, channels] = torch.randn(shape, generator=generator, device=generator.device)
        return made[draw, channels].to(inputs.cloudy.device)

    return noise


def _taken(value: Tensor | None, index: Tensor) -> Tensor | None:
    """Return the dates `index` (B, N) of a value (B, T, ...)."""
    if value is None:
        return None
    wide = index.view(*index.shape, *([1] * (value.ndim - 2))).expand(*index.shape, *value.shape[2:])
    return value.gather(1, wide)


def in_blocks(inputs: BaselineInputs, blocks: Callable[[Tensor], Tensor]) -> BaselineInputs:
    """Return the inputs with images cut by `blocks` and everything else repeated for each block of an image."""
    cut = inputs.map_images(blocks)
    times = len(cut.cloudy) // len(inputs.cloudy)
    if times == 1:
        return cut

    def again(x: Tensor) -> Tensor:
        return x.repeat_interleave(times, dim=0)

    return replace(
        cut,
        present=again(inputs.present),
        reference=again(inputs.reference),
        days=None if inputs.days is None else again(inputs.days),
    )


MAIN = "generator"
"""The phase whose loss is "loss" in the log; the only one of a system without a discriminator."""


class Example(NamedTuple):
    """One padded micro-batch: inputs, target and what may be counted."""

    inputs: BaselineInputs
    clear: Tensor
    """(B, C, H, W) in [-1, 1]."""
    weight: Tensor
    """float (B, C, H, W): 1 where the target is true, 0 elsewhere (unknown pixels, missing bands, padding)."""

    def known(self, image: Tensor) -> Tensor:
        """Return the target, with `image` (without its gradient) where the target is unknown: what may be looked at
        as a real image by a discriminator or noised by a diffusion."""
        return torch.where(self.weight > 0, self.clear, image.detach().to(self.clear.dtype))

    def mean(self, error: Tensor) -> Tensor:
        """Return the mean of `error` (B, C, H, W) over the values that count."""
        return (self.weight * error).sum() / self.weight.sum().clamp(min=1.0)


class Phase(NamedTuple):
    """The loss of one optimiser; `terms` are detached scalars for the log."""

    name: str
    """A key of `Baseline.parameter_groups`."""
    loss: Tensor
    terms: Mapping[str, Tensor]


class Baseline(nn.Module, ABC):
    """A baseline system. Subclasses write `phases_of`, `clear_image`, and `forward` where it differs.

    `forward(inputs)` is one evaluation as the paper's complexity table counts it; `predict` is the whole answer.
    Nothing is drawn from a global generator outside of dropout layers: training noise comes from the generator handed
    to `losses`, sampling noise from `NoiseOf`. In evaluation mode nothing may change the module's state.
    """

    capturable = False
    """Whether a training step may be captured as a CUDA graph; `models.build_baseline` sets `System.capturable`."""

    def __init__(self, config: BaselineConfig) -> None:
        super().__init__()
        self.config = config

    # ---------------------------------------------------------------- what a system writes

    @abstractmethod
    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        """Yield the loss of each optimiser, in the order the training needs.

        The trainer moves that optimiser's parameters before it asks for the next phase, so a loss written after a
        `yield` sees the moved weights. Shapes are multiples of `config.multiple`. Each name comes exactly once.
        """

    @abstractmethod
    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        """Return the clear image (B, C, H, W) in the model's range; sizes are multiples already.

        steps: for systems with a sampler; None = `config.steps`. Others never see anything but None.
        """

    def forward(self, inputs: BaselineInputs) -> Tensor:
        """Return the clear image of one evaluation (B, C, H, W)."""
        return self.clear_image(inputs, _no_noise)

    @property
    def counted(self) -> nn.Module:
        """The part whose parameters the paper counts; discriminators and the like are not in it."""
        return self

    @property
    def evaluations(self) -> int:
        """Evaluations of the network in one default prediction."""
        return self.config.steps or 1

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the trained parameters by phase, in the order of `phases_of`."""
        return {MAIN: [p for p in self.parameters() if p.requires_grad]}

    def memory(self) -> dict[str, Tensor]:
        """Return what training remembers beside weights and buffers, for its checkpoints; exported weights lack it."""
        return {}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Take over what `memory` returned."""

    # ---------------------------------------------------------------- the same for all

    def losses(self, batch: SeriesBatch, generator: torch.Generator) -> Iterator[Phase]:
        """Yield the phases of one micro-batch; see `phases_of`."""
        yield from self.phases_of(self.example(batch), generator)

    def main_loss(self, batch: SeriesBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the main phase and its terms, for validation."""
        phase = next(phase for phase in self.losses(batch, generator) if phase.name == MAIN)
        return phase.loss, dict(phase.terms)

    def example(self, batch: SeriesBatch) -> Example:
        """Return the batch in the model's range, masked, and padded to the network's multiple."""
        count, (height, width) = self.config.channels, self.padded_size(*batch.clear.shape[-2:])
        if self.config.fixed_size is not None and (height, width) != (self.config.fixed_size,) * 2:
            size = self.config.fixed_size
            raise ShapeError(
                f"the images are {batch.clear.shape[-2]}x{batch.clear.shape[-1]}; this network learns on at most "
                f"{size}x{size}. Use train.crop={size}, or another network.size."
            )
        inputs = inputs_of(batch, self.config).map_images(lambda x: reflect_pad(x, height, width))
        weight = (batch.scored[:, None] & batch.band_present[:, :count, None, None]).to(torch.float32)
        pad = (0, width - weight.shape[-1], 0, height - weight.shape[-2])
        clear = reflect_pad(to_model_range(batch.clear[:, :count]), height, width)
        return Example(inputs, clear, nn.functional.pad(weight, pad))

    def predict(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        """Return the clear image (B, C, H, W) in the model's range, any number of dates and any size.

        Sizes that the network cannot take are extended by reflection and cut again; a network of one fixed size sees
        the image in blocks of it.
        """
        self._check(inputs, steps)
        height, width = inputs.cloudy.shape[-2:]
        rows, columns = self.padded_size(height, width)
        padded = inputs.map_images(lambda x: reflect_pad(x, rows, columns))

        def extended(draw: int, channels: int) -> Tensor:
            return self._blocks(reflect_pad(noise(draw, channels), rows, columns))

        image = self.clear_image(in_blocks(padded, self._blocks), extended, steps=steps).float()
        if self.config.fixed_size is not None:
            image = rearrange(
                image, "(b i j) c h w -> b c (i h) (j w)", b=len(inputs.cloudy), i=rows // self.config.fixed_size
            )
        return image[..., :height, :width]

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size rounded up to the network's multiple."""
        multiple = self.config.multiple
        return -(-height // multiple) * multiple, -(-width // multiple) * multiple

    def _blocks(self, x: Tensor) -> Tensor:
        """Return (B, ..., H, W) as blocks of the fixed size folded into the batch; unchanged without a fixed size."""
        size = self.config.fixed_size
        if size is None:
            return x
        return rearrange(x, "b ... (i h) (j w) -> (b i j) ... h w", h=size, w=size)

    def _check(self, inputs: BaselineInputs, steps: int | None) -> None:
        config = self.config
        if inputs.cloudy.ndim != 5 or inputs.cloudy.shape[2] != config.channels:
            raise ShapeError(
                f"cloudy is {tuple(inputs.cloudy.shape)}; expected (B, T, C, H, W) with C = {config.channels} bands: "
                f"{', '.join(config.bands)}."
            )
        given = 0 if inputs.aux is None else inputs.aux.shape[2]
        if given != len(config.aux_bands):
            wanted = ", ".join(config.aux_bands) or "none"
            raise BandError(
                f"{given} auxiliary bands were given; this model wants {len(config.aux_bands)} ({wanted}) for every "
                "date. Pass aux=."
            )
        if steps is not None and config.steps is None:
            raise ConfigError(f"steps is {steps}, but this model answers in one pass and takes no steps; leave it out.")


@dataclass(frozen=True)
class System:
    """One baseline: its name, its classes and the facts about it (BASELINES). One per file, called `SYSTEM`."""

    name: str
    title: str
    """As the tables spell it."""
    year: int
    config: type[BaselineConfig]
    network: Callable[[Any], Baseline]
    """The subclass of `Baseline`, called with a config."""
    paper_parameters: float | None
    """Millions, in the SADER paper's complexity table; None = not listed."""
    paper_gmacs: float | None
    """10^9 multiply-accumulates in the same table; None = not listed."""
    assumed: bool = False
    """"Sizes assumed": the facts do not fix the network, so scores say little about the published one."""
    reference: str = ""
    """Where it was published."""
    note: str = ""
    """What a reader of the figures should know, such as why a count differs from the printed one."""
    capturable: bool = False
    """Whether a training step may be captured as a CUDA graph: its work depends on shapes alone, never on values, and
    the test marked `gpu` found captured and eager steps equal. Networks with dropout are never captured."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Changes to `training.config.TrainConfig`: the published optimiser settings."""

    @property
    def label(self) -> str:
        """The name for tables, with the mark that HOUSE asks for."""
        return f"{self.title} (sizes assumed)" if self.assumed else self.title


def _no_noise(draw: int, channels: int) -> Tensor:
    raise AssertionError("this network draws no noise; override forward")
