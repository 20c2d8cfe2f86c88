"""PMAA (Zou et al., ECAI 2023, "PMAA: A Progressive Multi-Scale Attention Autoencoder Model ..."). Sizes assumed.

Published: extractor (width 32) and losses of CTGAN (`parts/adversarial.py`); the dates concatenated (96) into a
multi-scale block: 1x1 to 128, five depthwise stride-2 scales, all pooled to the coarsest and summed, a Conv2Former unit
(11x11 depthwise modulation, MLP x4, layer scale 1e-6, drop-path 0.1), sigmoid-gated injection back to each scale,
coarse-to-fine merging with 5x5 injection, 1x1 to 32 plus residual; two more such blocks; 1x1 to 4, tanh; instance norm.
Chosen here (the facts do not fix them; the count is fitted with the groups): 5x5 depthwise kernels between scales; an
injection is local * sigmoid(gate) + global with a convolution each, 1x1 at the scales, 5x5 in 8 groups when merging;
the first block's residual is a 1x1 convolution of the 96 maps; the reference date, if given, comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.baselines.baseline import BaselineConfig, System
from sader.baselines.parts.adversarial import DateExtractor, ExtractorGan, norm_layer
from sader.baselines.systems.ctgan import CONFORMER_RECIPE


@dataclass(frozen=True)
class PmaaConfig(BaselineConfig):
    """Sizes of extractor, multi-scale blocks and discriminator."""

    width: int = 32
    """Channels of a date's features and between blocks."""
    hidden: int = 128
    """Hidden width of the pyramid pooling."""
    block_width: int = 128
    """Channels inside a multi-scale block."""
    blocks: int = 3
    scales: int = 5
    """Stride-2 scales of a block."""
    kernel: int = 11
    """Of the Conv2Former's modulation."""
    groups: int = 8
    """Groups of the 5x5 convolutions that merge scales."""
    drop_path: float = 0.1
    judge_widths: tuple[int, ...] = (64, 64, 128, 256, 512)

    @property
    def multiple(self) -> int:
        return 2**self.scales


class DropPath(nn.modules.dropout._DropoutNd):
    """Drops a whole branch for a share p of the images in training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.p
        return x * kept / (1 - self.p)


class Conv2Former(nn.Module):
    """Convolutional modulation and an MLP, each as a scaled residual (Hou 2022)."""

    def __init__(self, width: int, *, kernel: int, drop_path: float, expansion: int = 4) -> None:
        super().__init__()
        self.norm_in, self.norm_out = norm_layer("instance", width), norm_layer("instance", width)
        self.weigh = nn.Sequential(
            nn.Conv2d(width, width, 1), nn.GELU(), nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        )
        self.value = nn.Conv2d(width, width, 1)
        self.project = nn.Conv2d(width, width, 1)
        self.mlp = nn.Sequential(
            nn.Conv2d(width, expansion * width, 1), nn.GELU(), nn.Conv2d(expansion * width, width, 1)
        )
        self.scales = nn.Parameter(torch.full((2, width, 1, 1), 1e-6))
        self.drop = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_in(x)
        x = x + self.drop(self.scales[0] * self.project(self.weigh(normed) * self.value(normed)))
        return x + self.drop(self.scales[1] * self.mlp(self.norm_out(x)))


class Injection(nn.Module):
    """Injects coarse maps into fine ones: local * sigmoid(gate of coarse) + global of coarse, at the fine size."""

    def __init__(self, width: int, *, kernel: int = 1, groups: int = 1) -> None:
        super().__init__()

        def conv() -> nn.Sequential:
            layer = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=groups, bias=False)
            return nn.Sequential(layer, norm_layer("instance", width))

        self.local, self.gate, self.whole = conv(), conv(), conv()

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        size = fine.shape[-2:]
        gate = F.interpolate(self.gate(coarse).sigmoid(), size=size, mode="nearest")
        whole = F.interpolate(self.whole(coarse), size=size, mode="nearest")
        return self.local(fine) * gate + whole


class MultiScaleBlock(nn.Module):
    """(B, channels, H, W) -> (B, out, H, W); sizes are multiples of 2 ** scales."""

    def __init__(self, channels: int, out: int, config: PmaaConfig) -> None:
        super().__init__()
        width = config.block_width
        self.lift = nn.Sequential(nn.Conv2d(channels, width, 1), norm_layer("instance", width), nn.PReLU())
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 5, stride=2, padding=2, groups=width, bias=False), norm_layer("instance", width)
            )
            for _ in range(config.scales)
        )
        self.attend = Conv2Former(width, kernel=config.kernel, drop_path=config.drop_path)
        self.inject = nn.ModuleList(Injection(width) for _ in range(config.scales))
        self.merge = nn.ModuleList(Injection(width, kernel=5, groups=config.groups) for _ in range(config.scales - 1))
        self.lower = nn.Conv2d(width, out, 1)
        self.skip = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        h = self.lift(x)
        for layer in self.down:
            h = layer(h)
            maps.append(h)
        size = maps[-1].shape[-2:]
        whole = self.attend(torch.stack([F.adaptive_avg_pool2d(m, size) for m in maps]).sum(dim=0))
        injected = [inject(m, whole) for inject, m in zip(self.inject, maps, strict=True)]
        merged = injected.pop()
        for merge in self.merge:
            merged = merge(injected.pop(), merged)
        whole_size = F.interpolate(self.lower(merged), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return whole_size + self.skip(x)


class PmaaGenerator(nn.Module):
    """Extractor, three multi-scale blocks, 1x1 out."""

    def __init__(self, config: PmaaConfig) -> None:
        super().__init__()
        self.extractor = DateExtractor(
            config.date_channels, config.channels, width=config.width, hidden=config.hidden, norm="instance"
        )
        widths = [config.slots * config.width, *[config.width] * config.blocks]
        self.blocks = nn.Sequential(*(MultiScaleBlock(a, b, config) for a, b in pairwise(widths)))
        self.out = nn.Sequential(nn.Conv2d(config.width, config.channels, 1), nn.Tanh())

    def forward(self, maps: Tensor) -> Tensor:
        """Return the clear image from the features (B, T, width, H, W)."""
        return self.out(self.blocks(maps.flatten(1, 2)))


class Pmaa(ExtractorGan):
    """The generator with its extractor, and CTGAN's discriminator."""

    config: PmaaConfig

    def __init__(self, config: PmaaConfig) -> None:
        super().__init__(config, PmaaGenerator(config), judge_widths=config.judge_widths)


SYSTEM = System(
    name="pmaa",
    title="PMAA",
    year=2023,
    loss="LSGAN + 100 L1 + MSE of the cloud masks + 50 L1 of the auxiliary images",
    config=PmaaConfig,
    network=Pmaa,
    printed=(3.44, 92.35),
    assumed=True,
    reference="Zou et al., ECAI 2023, arXiv 2303.16565",
    train=CONFORMER_RECIPE,
    note="52.5 GMACs of the printed 92.35: 44.4 are the extractor shared with CTGAN; the resolution of the multi-scale "
    "blocks is not published.",
)
