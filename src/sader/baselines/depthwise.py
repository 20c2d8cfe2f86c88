"""Depthwise convolution in the layout for which cuDNN has kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DepthwiseConv2d(nn.Conv2d):
    """`nn.Conv2d` with one filter per channel; on a GPU the map is laid channels last.

    For channels first PyTorch takes kernels of its own, whose gradients in half precision are many times slower: a
    training step of DiffCR took seconds on an H200.
    """

    def __init__(
        self, channels: int, kernel_size: int, *, stride: int = 1, padding: int = 0, bias: bool = True
    ) -> None:
        super().__init__(channels, channels, kernel_size, stride=stride, padding=padding, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H', W')."""
        return super().forward(x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x)
