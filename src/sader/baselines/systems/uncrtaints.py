"""UnCRtainTS (Ebel et al., CVPRW 2023): temporal attention at low resolution, and a variance beside every value.

Published: 1x1 conv to 128 (GroupNorm 4); one MBConv (expansion 2, reflect-padded depthwise 3x3, squeeze-excite 0.25,
GELU, pre-norm); max-pool to 32x32 (a factor of 8 at 256 pixels); attention-only L-TAE (16 heads, d_model 256, d_k 4)
with day offsets; weights upsampled bilinearly, dropout 0.1, grouped weighted sum over time; five MBConv at 128
(BatchNorm); 1x1 to means (sigmoid) and variances (softplus). 3 dates.
Chosen here: the pooling factor is fixed at 8, so that tiles of any size agree; squeeze-excite is 0.25 of the block's
own width, without biases (this gives the 0.57 M); dates without known days get no position, which makes the network
invariant to their order; weights of dates that were not observed at a pixel are dropped and the others rescaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase, System
from sader.baselines.parts.ddpm import date_frames, date_weights, sinusoid, weigh_dates
from sader.errors import ConfigError
from sader.model.attention import pool_available
from sader.model.blocks import GroupNorm32, reflect_pad, to_model_range, to_reflectance

NormOf = Callable[[int], nn.Module]


@dataclass(frozen=True)
class UnCRtainTSConfig(BaselineConfig):
    """Sizes of UnCRtainTS; the defaults are the paper's."""

    dates: int | None = None
    least_dates = 0
    width: int = 128
    """Channels everywhere."""
    decoder_blocks: int = 5
    """MBConv blocks after the dates are joined."""
    pool: int = 8
    """Resolution step at which dates are compared: 32x32 for 256x256."""
    heads: int = 16
    model_width: int = 256
    """Channels the dates are compared in (d_model)."""
    key_width: int = 4
    """Channels per head (d_k)."""
    dropout: float = 0.1
    """Of the weights of the dates."""
    scale: float = 10.0
    """Factor of reflectance in the loss; variances have its square."""
    least_variance: float = 1e-3
    """Added to every variance in scaled units, 1e-4 to 1e-2: keeps the loss finite at an exact value."""
    reference_input: bool = False
    """Whether the reference date is marked (published: no)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads or self.model_width % self.heads:
            raise ConfigError(
                f"width {self.width} and model_width {self.model_width} with {self.heads} heads; expected multiples "
                "of the heads."
            )

    @property
    def multiple(self) -> int:
        return self.pool


class SqueezeExcite(nn.Module):
    """Scale each channel by a function of the channel means."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.shrink = nn.Conv2d(channels, hidden, 1, bias=False)
        self.widen = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.widen(F.gelu(self.shrink(x.mean(dim=(2, 3), keepdim=True)))).sigmoid()


class MBConv(nn.Module):
    """Inverted bottleneck: norm, widen, depthwise 3x3, squeeze-excite, narrow, plus its input."""

    def __init__(self, channels: int, norm: NormOf, *, expansion: int = 2, squeeze: float = 0.25) -> None:
        super().__init__()
        hidden = expansion * channels
        self.widen = nn.Sequential(norm(channels), nn.Conv2d(channels, hidden, 1, bias=False), norm(hidden), nn.GELU())
        self.depthwise = nn.Conv2d(hidden, hidden, 3, groups=hidden, bias=False)
        self.narrow = nn.Sequential(
            norm(hidden),
            nn.GELU(),
            SqueezeExcite(hidden, max(1, int(squeeze * channels))),
            nn.Conv2d(hidden, channels, 1, bias=False),
            norm(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.widen(x)
        h = self.depthwise(F.pad(h, (1, 1, 1, 1), mode="reflect" if min(h.shape[-2:]) > 1 else "replicate"))
        return x + self.narrow(h)


class DateWeights(nn.Module):
    """The attention of an L-TAE: features of dates and their days -> weights (B, T, K, H, W)."""

    def __init__(self, channels: int, *, heads: int, model_width: int, key_width: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, model_width // heads
        self.norm = GroupNorm32(heads, channels)
        self.lift = nn.Conv2d(channels, model_width, 1)
        self.to_keys = nn.Conv2d(model_width, heads * key_width, 1)
        self.query = nn.Parameter(torch.randn(heads, key_width) * (2 / key_width) ** 0.5)

    def forward(self, frames: Tensor, days: Tensor | None, available: Tensor) -> Tensor:
        dates = frames.shape[1]
        x = self.lift(self.norm(rearrange(frames, "b t d h w -> (b t) d h w")))
        if days is not None:
            # Unknown days have no position, rather than that of day 0.
            position = sinusoid(days.nan_to_num(), self.head_width, period=1000.0).repeat(1, 1, self.heads)
            position = torch.where(days.isnan()[..., None], 0.0, position)
            x = x + rearrange(position, "b t d -> (b t) d 1 1").to(x.dtype)
        keys = rearrange(self.to_keys(x), "(b t) (k d) h w -> b t k d h w", t=dates, k=self.heads)
        return date_weights(self.query[None, :, :, None, None], keys, available)


class UnCRtainTS(Baseline):
    """UnCRtainTS; one pass. Invariant to the order of the dates (their days moving with them)."""

    config: UnCRtainTSConfig
    compiled = ("distribution",)

    def __init__(self, config: UnCRtainTSConfig) -> None:
        super().__init__(config)
        width = config.width

        def group(channels: int) -> nn.Module:
            return GroupNorm32(4, channels)

        self.date_in = nn.Sequential(
            nn.Conv2d(config.date_channels + config.reference_input, width, 1), group(width), nn.GELU()
        )
        self.date_block = MBConv(width, group)
        self.weights = DateWeights(
            width, heads=config.heads, model_width=config.model_width, key_width=config.key_width
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(MBConv(width, nn.BatchNorm2d) for _ in range(config.decoder_blocks)))
        self.out = nn.Conv2d(width, 2 * config.channels, 1)

    def distribution(self, inputs: BaselineInputs) -> tuple[Tensor, Tensor]:
        """Return (mean reflectance in [0, 1], variance in scaled units), each (B, C, H, W); sizes are multiples."""
        frames = date_frames(inputs, reference=self.config.reference_input)
        batch, dates = frames.shape[:2]
        x = self.date_block(self.date_in(rearrange(frames, "b t c h w -> (b t) c h w")))
        small = rearrange(F.max_pool2d(x, self.config.pool), "(b t) d h w -> b t d h w", t=dates)
        weights = self.weights(small, inputs.days, pool_available(inputs.observed, self.config.pool))
        weights = F.interpolate(weights.flatten(0, 1), scale_factor=self.config.pool, mode="bilinear")
        weights = self.dropout(_observed_only(weights.unflatten(0, (batch, dates)), inputs.observed))
        fused = weigh_dates(rearrange(x, "(b t) d h w -> b t d h w", t=dates), weights)
        mean, variance = self.out(self.blocks(fused)).float().chunk(2, dim=1)
        return mean.sigmoid(), F.softplus(variance) + self.config.least_variance

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        return to_model_range(self.distribution(inputs)[0])

    def uncertainty(self, inputs: BaselineInputs) -> Tensor:
        """Return the predicted standard deviation of each value, (B, C, H, W) in reflectance, for any size."""
        height, width = inputs.cloudy.shape[-2:]
        rows, columns = self.padded_size(height, width)
        _, variance = self.distribution(inputs.map_images(lambda x: reflect_pad(x, rows, columns)))
        return variance.sqrt()[..., :height, :width] / self.config.scale

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        mean, variance = self.distribution(example.inputs)
        squared = (self.config.scale * (mean - to_reflectance(example.clear))).square()
        # The constant ln(2 pi) / 2 has no gradient and is left out.
        loss = example.mean((variance.log() + squared / variance) / 2)
        terms = {"squared": example.mean(squared).detach(), "variance": example.mean(variance).detach()}
        yield Phase(MAIN, loss, terms)


def _observed_only(weights: Tensor, observed: Tensor) -> Tensor:
    """Return weights (B, T, K, H, W) without dates that have no data at a pixel, summing to 1 again."""
    use = observed | ~observed.any(dim=1, keepdim=True)
    kept = weights * use[:, :, None]
    return kept / kept.sum(dim=1, keepdim=True).clamp(min=1e-6)


SYSTEM = System(
    name="uncrtaints",
    title="UnCRtainTS",
    year=2023,
    loss="Gaussian negative log likelihood, diagonal, of the data times 10",
    config=UnCRtainTSConfig,
    network=UnCRtainTS,
    printed=(0.57, 37.16),
    reference="Ebel et al., UnCRtainTS, CVPR EarthVision workshop",
    train={"adam_lr": 1e-3, "schedule": "constant", "ema_decay": 0.0, "epochs": 20.0, "batch_size": 4},
)
