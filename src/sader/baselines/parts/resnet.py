"""The ResNet generator of the pix2pix family: shared by Pix2Pix, CycleGAN and (its blocks) STGAN.

Published: 7x7 convolution to 64; two stride-2 convolutions 128, 256; nine residual blocks; two transposed
convolutions; 7x7 convolution; tanh. Chosen here, after the papers: reflection padding at full size and in the blocks, a
norm and a ReLU after each convolution, no bias before a batch norm.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sader.baselines.parts.adversarial import Norm, norm_layer


class ReflectConv(nn.Conv2d):
    """A convolution of odd kernel with reflected edges that also takes images smaller than its reach."""

    def forward(self, x: Tensor) -> Tensor:
        reach = self.kernel_size[0] // 2
        small = min(x.shape[-2:]) <= reach  # reflection needs more pixels than it adds
        return F.conv2d(
            F.pad(x, (reach,) * 4, mode="replicate" if small else "reflect"), self.weight, self.bias, self.stride
        )


class ResidualBlock(nn.Module):
    """x + two 3x3 convolutions of the same width, with norm, ReLU and optional dropout between them."""

    def __init__(self, width: int, *, norm: Norm, dropout: float = 0.0) -> None:
        super().__init__()
        bias = norm != "batch"
        layers: list[nn.Module] = [ReflectConv(width, width, 3, bias=bias), norm_layer(norm, width), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers, ReflectConv(width, width, 3, bias=bias), norm_layer(norm, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def stem(channels: int, width: int, *, norm: Norm) -> nn.Sequential:
    """Return the 7x7 convolution at full size with its norm and ReLU."""
    return nn.Sequential(ReflectConv(channels, width, 7, bias=norm != "batch"), norm_layer(norm, width), nn.ReLU())


def down(channels: int, width: int, *, norm: Norm) -> nn.Sequential:
    """Return a 3x3 convolution of stride 2 with its norm and ReLU."""
    conv = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=norm != "batch")
    return nn.Sequential(conv, norm_layer(norm, width), nn.ReLU())


def up(channels: int, width: int, *, norm: Norm) -> nn.Sequential:
    """Return a 3x3 transposed convolution to twice the size with its norm and ReLU."""
    conv = nn.ConvTranspose2d(channels, width, 3, stride=2, padding=1, output_padding=1, bias=norm != "batch")
    return nn.Sequential(conv, norm_layer(norm, width), nn.ReLU())


def head(width: int, channels: int) -> nn.Sequential:
    """Return the 7x7 convolution to the image, and tanh."""
    return nn.Sequential(ReflectConv(width, channels, 7), nn.Tanh())


class ResNetGenerator(nn.Sequential):
    """(B, channels_in, H, W) -> (B, channels_out, H, W) in [-1, 1]; sizes must be multiples of 2 ** levels."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        width: int = 64,
        levels: int = 2,
        blocks: int = 9,
        norm: Norm = "batch",
        dropout: float = 0.0,
    ) -> None:
        wide = [width * 2**level for level in range(levels + 1)]
        parts: list[nn.Module] = [stem(channels_in, width, norm=norm)]
        parts += [down(wide[level], wide[level + 1], norm=norm) for level in range(levels)]
        parts += [ResidualBlock(wide[-1], norm=norm, dropout=dropout) for _ in range(blocks)]
        parts += [up(wide[level + 1], wide[level], norm=norm) for level in reversed(range(levels))]
        super().__init__(*parts, head(width, channels_out))
