"""SeqDMs (Zhao et al., Remote Sensing 15(11) 2861, 2023), SIZES ASSUMED: a multi-modal DDPM for any number of dates.

Published: a DDPM of the clear image whose reverse process takes auxiliary modalities (SAR) beside the optical date, and
a sequential rule of training and inference that handles any number of dates without retraining. Sizes, steps, schedule,
rate: unknown, no public code; not in the complexity table.
Chosen here, all the rest: the U-Net of `parts/unet.py` takes the noised image, one cloudy date and its auxiliary bands,
and predicts the clear image, not the noise (on a tiny set and the same training the error was a tenth); averaged
estimates make the number and order of the dates free. Linear schedule of 1000 steps, of which a sample takes 50,
ancestral; estimates are clipped to [-1, 1].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase, System
from sader.baselines.parts.ddpm import BetaSchedule, date_frames, sample_ancestral, unit_scale
from sader.baselines.parts.unet import UNet, UNetConfig
from sader.errors import ConfigError
from sader.method.diffusion import DiffusionConfig, MeanReverting
from sader.model.attention import masked_mean


@dataclass(frozen=True)
class SeqDMsConfig(BaselineConfig):
    """Sizes of SeqDMs, assumed."""

    dates: int | None = None
    least_dates = 0
    unet: UNetConfig = field(
        default_factory=lambda: UNetConfig(width=64, multipliers=(1, 2, 4, 8), attention_from=3, emb_width=256)
    )
    schedule: BetaSchedule = field(default_factory=BetaSchedule)
    sampling_steps: int = 50
    """Steps of the reverse chain, 20 to 1000."""
    reference_input: bool = False
    """Whether the reference date is marked (published: no)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.sampling_steps <= self.schedule.steps:
            raise ConfigError(
                f"network.sampling_steps is {self.sampling_steps}; expected 1 to {self.schedule.steps}, the length of "
                "the schedule."
            )

    @property
    def multiple(self) -> int:
        return self.unet.multiple

    @property
    def steps(self) -> int | None:
        return self.sampling_steps


class SeqDMs(Baseline):
    """SeqDMs with its reverse chain. Invariant to the order of the dates."""

    config: SeqDMsConfig

    def __init__(self, config: SeqDMsConfig) -> None:
        super().__init__(config)
        seen = config.channels + config.date_channels + config.reference_input
        self.network: nn.Module = UNet(seen, config.channels, config.unet)
        self.process = MeanReverting(DiffusionConfig(alpha=0.0))

    def clear_by(self, noised: Tensor, sigma: Tensor, frame: Tensor) -> Tensor:
        """Return the clear image (B, C, H, W) seen in clear + sigma noise beside one date (B, C + A, H, W)."""
        state = unit_scale(sigma).view(-1, 1, 1, 1) * noised
        return self.network(torch.cat([state, frame.to(state.dtype)], dim=1), sigma.log() / 4).float()

    def denoise(self, noised: Tensor, sigma: Tensor, frames: Tensor, observed: Tensor) -> Tensor:
        """Return the clear image (B, C, H, W) from the estimates of all dates (B, T, C + A, H, W)."""
        dates = frames.shape[1]
        found = self.clear_by(
            noised.repeat_interleave(dates, dim=0),
            sigma.repeat_interleave(dates),
            rearrange(frames, "b t c h w -> (b t) c h w"),
        )
        use = observed | ~observed.any(dim=1, keepdim=True)
        return masked_mean(rearrange(found, "(b t) c h w -> b t c h w", t=dates), use).clamp(-1, 1)

    def frames(self, inputs: BaselineInputs) -> Tensor:
        """Return the network's input of each date."""
        return date_frames(inputs, reference=self.config.reference_input)

    def forward(self, inputs: BaselineInputs) -> Tensor:
        sigma = torch.ones(len(inputs.cloudy), device=inputs.cloudy.device)
        return self.denoise(torch.zeros_like(inputs.cloudy[:, 0]), sigma, self.frames(inputs), inputs.observed)

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        frames = self.frames(inputs)
        return sample_ancestral(
            lambda x, sigma: self.denoise(x, sigma, frames, inputs.observed),
            lambda draw: noise(draw, self.config.channels),
            self.config.schedule.grid(steps or self.config.sampling_steps, last=0.0),
        )

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        inputs = example.inputs
        clear = example.known(masked_mean(inputs.cloudy, inputs.observed))
        # One present date of each series: the largest of uniform numbers, absent dates never.
        draw = torch.rand(inputs.present.shape, generator=generator, device=generator.device)
        date = draw.masked_fill(~inputs.present, -1.0).argmax(dim=1)
        frame = self.frames(inputs)[torch.arange(len(date), device=date.device), date]
        sigma = self.config.schedule.draw_sigma(len(clear), generator)
        noise = torch.randn(clear.shape, generator=generator, device=generator.device)
        noised = self.process.noised(clear, torch.zeros_like(noise)[:, None], sigma, noise[:, None])[:, 0]
        loss = example.mean((self.clear_by(noised, sigma, frame) - example.clear).square())
        yield Phase(MAIN, loss, {"squared": loss.detach()})


SYSTEM = System(
    name="seqdms",
    title="SeqDMs",
    year=2023,
    loss="MSE of the clear image",
    config=SeqDMsConfig,
    network=SeqDMs,
    printed=(None, None),
    assumed=True,
    reference="Zhao et al., Remote Sensing 15(11) 2861",
    train={"adam_lr": 1e-4, "schedule": "constant", "ema_decay": 0.9999, "epochs": 500.0, "batch_size": 8},
    simplified="the sequential rule of training and inference is not public in detail. Here training shows one date "
    "of each series at a time, and sampling averages the estimates from all dates at each step. Radar is an input only "
    "if network.aux_bands names it. Epochs, rate and schedule are assumed.",
)
