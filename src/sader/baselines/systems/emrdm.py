"""EMRDM (Liu et al., CVPR 2025, arXiv 2503.23717): mean-reverting diffusion with an hourglass transformer.

Published: the process, preconditioning, noise density and Euler sampler that SADER took over (`diffusion.py` is used
unchanged), alpha 1, sigma 0.001 to 100, 5 steps, no churn. Network: patch 4, widths 256, 512, 768, depths 2, 2, 16,
feed-forward 512, 1024, 1536; neighbourhood attention 7x7 on two levels, global on the third, heads of 64; weights
shared by the dates, L-TAE fusion (16 heads, d_k 48, grouped) collapses time; in: noised bands and the date's bands,
auxiliary ones among them. 148,878,322 parameters (RGB and NIR in, RGB out), which the sizes below meet exactly.
Chosen here: cosine attention with a learned temperature and rotary positions (relative, so that tiles agree), RMS norms
scaled by the noise level, a mapping network of two gated layers 768 / 2304, skips joined by a learned interpolation;
the dates are fused before the middle and, for the skips, at each level; the L-TAE's query is the mean over the dates,
so that their number is free, and there is no encoding of days: the order of the dates does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.baselines.baseline import MAIN, Baseline, BaselineConfig, BaselineInputs, Example, NoiseOf, Phase, System
from sader.baselines.parts.ddpm import date_frames, date_weights, weigh_dates
from sader.errors import ConfigError
from sader.method.diffusion import Denoiser, DiffusionConfig, karras_sigmas, sample
from sader.model.attention import masked_mean, neighbourhood_attention, pool_available
from sader.model.blocks import FourierFeatures, depth_to_space, space_to_depth, zero_init

FIELD = 128.0
"""Pixels per unit of position: an image of 256 spans two units, whatever the tile."""


@dataclass(frozen=True)
class EmrdmConfig(BaselineConfig):
    """Sizes and process of EMRDM; the defaults are the paper's for Sen2_MTC_New."""

    dates: int | None = None
    least_dates = 0
    patch: int = 4
    """Pixels along a side of a token of the finest level."""
    widths: tuple[int, ...] = (256, 512, 768)
    depths: tuple[int, ...] = (2, 2, 16)
    """Blocks of each level, on the way down and again on the way up; of the last level once."""
    feed_widths: tuple[int, ...] = (512, 1024, 1536)
    head_width: int = 64
    kernel: int = 7
    """Window of the neighbourhood attention, in tokens; the last level attends everywhere."""
    mapping_width: int = 768
    """Width of the noise-level embedding."""
    mapping_feed: int = 2304
    fusion_heads: int = 16
    fusion_key_width: int = 48
    diffusion: DiffusionConfig = field(default_factory=lambda: DiffusionConfig(sigma_max=100.0, steps=5))
    reference_input: bool = False
    """Whether the reference date is marked (published: no)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.widths) == len(self.depths) == len(self.feed_widths) > 0:
            raise ConfigError(
                f"network.widths {self.widths}, depths {self.depths} and feed_widths {self.feed_widths} differ in "
                "length; expected one number per level in each."
            )
        for width in self.widths:
            if width % self.head_width or width % self.fusion_heads or self.head_width % 8:
                raise ConfigError(
                    f"network.widths has {width} with heads of {self.head_width} and {self.fusion_heads} fusion heads; "
                    "expected multiples of both, and head_width a multiple of 8."
                )
        if self.diffusion.residual is not None:
            raise ConfigError("diffusion.residual is set, but EMRDM has no composite; leave it null.")

    @property
    def multiple(self) -> int:
        return int(self.patch * 2 ** (len(self.widths) - 1))

    @property
    def steps(self) -> int | None:
        return self.diffusion.steps


@dataclass(frozen=True)
class EmrdmCondition:
    """Inputs of the denoiser beside the state."""

    frames: Tensor
    """(B, T, C + A, H, W) the dates with their auxiliary bands."""
    mean: Tensor
    """(B, T, C, H, W) the mean of the process."""
    present: Tensor
    """bool (B, T)"""
    observed: Tensor
    """bool (B, T, H, W)"""


class RmsNorm(nn.RMSNorm):
    """RMS norm in the precision of its input; the kernels accumulate in float32 anyway."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GatedFeed(nn.Module):
    """a GELU(b) of a widened x, narrowed again: (..., D) -> (..., D); starts at zero."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 2 * hidden, bias=False)
        self.narrow = zero_init(nn.Linear(hidden, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.widen(x).chunk(2, dim=-1)
        return self.narrow(a * F.gelu(b))


class Mapping(nn.Module):
    """Embedding of the noise level, (B,) -> (B, width)."""

    def __init__(self, width: int, hidden: int, *, depth: int = 2) -> None:
        super().__init__()
        self.features = FourierFeatures(width)
        self.lift = nn.Linear(width, width, bias=False)
        self.norm_in, self.norm_out = RmsNorm(width), RmsNorm(width)
        self.norms = nn.ModuleList(RmsNorm(width) for _ in range(depth))
        self.feeds = nn.ModuleList(GatedFeed(width, hidden) for _ in range(depth))

    def forward(self, value: Tensor) -> Tensor:
        x = self.norm_in(self.lift(self.features(value)))
        for norm, feed in zip(self.norms, self.feeds, strict=True):
            x = x + feed(norm(x))
        return self.norm_out(x)


class AdaptiveRms(nn.Module):
    """RMS norm of tokens (B, H, W, D), scaled by the embedding; starts as the plain norm."""

    def __init__(self, width: int, emb_width: int) -> None:
        super().__init__()
        self.scale = zero_init(nn.Linear(emb_width, width, bias=False))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * (1 + self.scale(emb))[:, None, None].to(x.dtype)


def rotated(x: Tensor, step: float) -> Tensor:
    """Return queries or keys (B, K, H, W, D) turned by their position: half of D, a quarter for rows and for columns.

    step: distance of neighbouring tokens in units of `FIELD` pixels. A product of two turned vectors depends on the
    difference of their positions alone.
    """
    height, width, depth = x.shape[2:]
    count = depth // 8
    octave = torch.arange(count, device=x.device, dtype=torch.float32) / max(count - 1, 1)
    frequencies = torch.pi * 10.0**octave * step
    rows = torch.arange(height, device=x.device, dtype=torch.float32)[:, None] * frequencies
    columns = torch.arange(width, device=x.device, dtype=torch.float32)[:, None] * frequencies
    angle = torch.cat([rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)], dim=-1)
    a, b, rest = x.split([2 * count, 2 * count, depth - 4 * count], dim=-1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


class TokenBlock(nn.Module):
    """Attention (kernel x kernel window, or everywhere without a kernel) and gated feed-forward on (B, H, W, D)."""

    def __init__(
        self, width: int, hidden: int, *, emb_width: int, head_width: int, kernel: int | None, step: float
    ) -> None:
        super().__init__()
        self.heads, self.kernel, self.step = width // head_width, kernel, step
        self.norm_attend, self.norm_feed = AdaptiveRms(width, emb_width), AdaptiveRms(width, emb_width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.temperature = nn.Parameter(torch.full((self.heads,), 10.0))
        self.out = zero_init(nn.Linear(width, width, bias=False))
        self.feed = GatedFeed(width, hidden)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        q, k, v = rearrange(self.to_qkv(self.norm_attend(x, emb)), "b h w (n k d) -> n b k h w d", n=3, k=self.heads)
        root = self.temperature.clamp(min=1e-6).sqrt().view(1, -1, 1, 1, 1)
        q, k = (rotated(F.normalize(part.float(), dim=-1, eps=1e-6) * root, self.step).to(v.dtype) for part in (q, k))
        if self.kernel is None:
            size = q.shape[2:4]
            q, k, v = (part.flatten(2, 3) for part in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, scale=1.0).unflatten(2, size)
        else:
            attended = neighbourhood_attention(q, k, v, self.kernel)
        x = x + self.out(rearrange(attended, "b k h w d -> b h w (k d)"))
        return x + self.feed(self.norm_feed(x, emb))


class DateFusion(nn.Module):
    """L-TAE: tokens of the dates (B, T, H, W, D) -> one map (B, H, W, D), each head weighing its own channels."""

    def __init__(self, width: int, *, heads: int, key_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = RmsNorm(width)
        self.to_query_key = nn.Linear(width, 2 * heads * key_width, bias=False)

    def forward(self, tokens: Tensor, available: Tensor) -> Tensor:
        query_key = rearrange(self.to_query_key(self.norm(tokens)), "b t h w d -> b t d h w")
        queries, keys = query_key.chunk(2, dim=2)
        query = masked_mean(queries, available).unflatten(1, (self.heads, -1))
        weights = date_weights(query, keys.unflatten(2, (self.heads, -1)), available)
        return weigh_dates(rearrange(tokens, "b t h w d -> b t d h w"), weights).movedim(1, -1)


class EmrdmNet(nn.Module):
    """The hourglass: F(c_in x, c_noise, condition) -> (B, C, H, W)."""

    def __init__(self, config: EmrdmConfig) -> None:
        super().__init__()
        self.config = config
        widths, patch = config.widths, config.patch
        depth = (config.channels + config.date_channels + config.reference_input) * patch**2
        self.mapping = Mapping(config.mapping_width, config.mapping_feed)
        self.tokens_in = nn.Linear(depth, widths[0], bias=False)
        self.down = nn.ModuleList(self._level(level) for level in range(len(widths) - 1))
        self.middle = self._level(len(widths) - 1)
        self.up = nn.ModuleList(self._level(level) for level in range(len(widths) - 1))
        pairs = list(pairwise(widths))
        self.merge = nn.ModuleList(nn.Linear(4 * fine, coarse, bias=False) for fine, coarse in pairs)
        self.split = nn.ModuleList(nn.Linear(coarse, 4 * fine, bias=False) for fine, coarse in pairs)
        self.join = nn.ParameterList(nn.Parameter(torch.full((1,), 0.5)) for _ in pairs)
        self.fuse = nn.ModuleList(
            DateFusion(width, heads=config.fusion_heads, key_width=config.fusion_key_width) for width in widths
        )
        self.norm_out = RmsNorm(widths[0])
        self.tokens_out = zero_init(nn.Linear(widths[0], config.channels * patch**2, bias=False))

    def _level(self, level: int) -> nn.ModuleList:
        config = self.config
        return nn.ModuleList(
            TokenBlock(
                config.widths[level],
                config.feed_widths[level],
                emb_width=config.mapping_width,
                head_width=config.head_width,
                kernel=config.kernel if level < len(config.widths) - 1 else None,
                step=config.patch * 2**level / FIELD,
            )
            for _ in range(config.depths[level])
        )

    def forward(self, noised: Tensor, c_noise: Tensor, condition: EmrdmCondition) -> Tensor:
        batch, dates = noised.shape[:2]
        emb = self.mapping(c_noise)
        each = emb.repeat_interleave(dates, dim=0)
        frames = torch.cat([noised, condition.frames.to(noised.dtype)], dim=2)
        available = pool_available(condition.observed, self.config.patch)
        x = self.tokens_in(rearrange(space_to_depth(frames, self.config.patch), "b t d h w -> (b t) h w d"))
        skips = []
        for level, merge in enumerate(self.merge):
            x = _through(self.down[level], x, each)
            skips.append(self.fuse[level](x.unflatten(0, (batch, dates)), available))
            x = merge(rearrange(x, "b (h i) (w j) d -> b h w (i j d)", i=2, j=2))
            available = pool_available(available, 2)
        x = self.fuse[-1](x.unflatten(0, (batch, dates)), available)
        x = _through(self.middle, x, emb)
        for level in reversed(range(len(skips))):
            x = rearrange(self.split[level](x), "b h w (i j d) -> b (h i) (w j) d", i=2, j=2)
            x = torch.lerp(skips[level], x.to(skips[level].dtype), self.join[level].to(skips[level].dtype))
            x = _through(self.up[level], x, emb)
        tokens = self.tokens_out(self.norm_out(x))
        return depth_to_space(tokens.movedim(-1, 1), self.config.patch)


def _through(blocks: nn.Module, x: Tensor, emb: Tensor) -> Tensor:
    for block in cast(nn.ModuleList, blocks):
        x = block(x, emb)
    return x


class Emrdm(Baseline):
    """EMRDM with its sampler. Invariant to the order of the dates, their noise moving with them."""

    config: EmrdmConfig

    def __init__(self, config: EmrdmConfig) -> None:
        super().__init__(config)
        self.denoiser = Denoiser(EmrdmNet(config), config.diffusion)

    def condition(self, inputs: BaselineInputs) -> EmrdmCondition:
        """Return the dates as inputs of the denoiser."""
        frames = date_frames(inputs, reference=self.config.reference_input)
        # A tile without any date gets an image as well; NaN would reach the tiles it is blended with.
        present = inputs.present | ~inputs.present.any(dim=1, keepdim=True)
        return EmrdmCondition(frames, inputs.cloudy, present, inputs.observed)

    def forward(self, inputs: BaselineInputs) -> Tensor:
        sigma = torch.ones(len(inputs.cloudy), device=inputs.cloudy.device)
        return self.denoiser(inputs.cloudy, sigma, self.condition(inputs))

    def clear_image(self, inputs: BaselineInputs, noise: NoiseOf, *, steps: int | None = None) -> Tensor:
        config, condition, mean = self.config.diffusion, self.condition(inputs), inputs.cloudy
        dates, channels = mean.shape[1:3]
        return sample(
            lambda x, sigma: self.denoiser(x, sigma, condition),
            mean,
            lambda draw: noise(draw, dates * channels).unflatten(1, (dates, channels)),
            karras_sigmas(steps or config.steps, sigma_min=config.sigma_min, sigma_max=config.sigma_max),
            alpha=config.alpha,
        )

    def phases_of(self, example: Example, generator: torch.Generator) -> Iterator[Phase]:
        inputs, process = example.inputs, self.denoiser.process
        condition = self.condition(inputs)
        clear = example.known(masked_mean(inputs.cloudy, inputs.observed))
        sigma = process.draw_sigma(len(clear), generator)
        noise = torch.randn(inputs.cloudy.shape, generator=generator, device=generator.device)
        denoised = self.denoiser(process.noised(clear, inputs.cloudy, sigma, noise), sigma, condition)
        weight = process.coefficients(sigma, condition.present.sum(dim=1)).weight.view(-1, 1, 1, 1)
        squared = (denoised - example.clear).square()
        loss = example.mean(weight * squared)
        yield Phase(MAIN, loss, {"squared": example.mean(squared).detach()})


SYSTEM = System(
    name="emrdm",
    title="EMRDM",
    year=2025,
    loss="MSE / c_out^2",
    config=EmrdmConfig,
    network=Emrdm,
    printed=(148.88, 74.39),
    reference="Liu et al., EMRDM, CVPR, arXiv 2503.23717",
    train={"optimizer": "adamw", "adam_lr": 1e-4, "schedule": "constant", "ema_decay": 0.9999, "epochs": 1000.0,
           "batch_size": 4, "weight_decay": 0.01},
)  # fmt: skip
