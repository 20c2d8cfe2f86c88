"""The fused network with less between its blocks: no copy to put maps beside each other, no pass for a bias or a sum.

A block adds the next injection while it writes its map, leaves the sums that the next norm needs, and writes straight
into the half of the map that the decoder reads (`model.joinkernels`). Convolutions of one pixel are matrix products,
to which cuBLAS adds the bias. What is computed is what `model.fused` computes, to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.model.blocks import depth_to_space
from sader.model.condition import Condition
from sader.model.cpublocks import DoublingConv
from sader.model.fused import ALIGNED, AlignedConv, Better, FusedNorm, FusedResBlock, exchanged
from sader.model.fusion import FeedForward
from sader.model.joinkernels import empty_sums, interleave, join, product_gelu
from sader.model.kernels import add_skip, empty_map, pixels_first
from sader.model.mtcdn import MTCDN


def joined_part(module: nn.Module, better: Better, dtype: torch.dtype) -> nn.Module | None:
    """Return what takes the place of a module before `model.fused` is asked, or None."""
    if isinstance(module, FeedForward):
        return JoinedFeedForward(exchanged(module, better))
    if not isinstance(module, nn.Conv2d) or module.kernel_size != (1, 1) or module.bias is None:
        return None
    return None if module.in_channels % ALIGNED or module.out_channels % ALIGNED else PointConv(module)


def join_blocks(network: nn.Module, *, doubled: bool = False) -> None:
    """Make a fused network hand its maps from block to block; doubled: `DoublingResBlock` where it applies."""
    for module in list(network.modules()):
        if isinstance(module, FusedResBlock):
            module.__class__ = JoinedResBlock
            if doubled and module.resample_mode == "up":
                module.__class__ = DoublingResBlock
                module.doubling = DoublingConv(module.conv_in)
    if isinstance(network, MTCDN):
        network.__class__ = JoinedMTCDN


def with_sums(x: Tensor, sums: Tensor) -> Tensor:
    """Return x with the sums of its channels at hand: `fused.known_sums`. Whatever is made of x has lost them."""
    x.sader_sums = sums  # type: ignore[attr-defined]
    return x


class PointConv(nn.Module):
    """A convolution of one pixel as a matrix product."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        assert conv.bias is not None
        self.register_buffer("weight", conv.weight.detach()[:, :, 0, 0].contiguous())
        self.register_buffer("bias", conv.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(x, self.get_buffer("bias"))

    def apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution with another bias, or none."""
        weight = self.get_buffer("weight")
        n, _, height, width = x.shape
        pixels = pixels_first(x.to(weight.dtype)).permute(0, 2, 3, 1).reshape(-1, weight.shape[1])
        return F.linear(pixels, weight, bias).view(n, height, width, -1).permute(0, 3, 1, 2)


class JoinedFeedForward(nn.Module):
    """`FeedForward` with its product and its sum in one pass each."""

    def __init__(self, block: FeedForward) -> None:
        super().__init__()
        self.norm, self.widen, self.out = block.norm, block.widen, block.out

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.out, PointConv | AlignedConv)
        x = pixels_first(x)
        h = self.out.apply_to(product_gelu(pixels_first(self.widen(self.norm(x)))), None)
        bias = self.out.bias
        assert isinstance(bias, Tensor)
        bias = bias[: h.shape[1]]
        result: Tensor = add_skip(h.contiguous(memory_format=torch.channels_last), bias, x)
        return result


class JoinedResBlock(FusedResBlock):
    """A fused block whose map comes with its sums."""

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        return self.joined(x, emb)

    def joined(
        self, x: Tensor, emb: Tensor | None, *, more: Tensor | None = None, beside: Beside | None = None
    ) -> Tensor:
        """Return the block's map, plus `more`; the map without it goes into a half of `beside` where that is given."""
        x = pixels_first(x.to(self.norm_in.dtype))
        h, skip, mode = self.before_the_sum(x, emb)
        return joined_sum(h, self.get_buffer("bias_out"), skip, mode, more=more, beside=beside)


class DoublingResBlock(JoinedResBlock):
    """A block that doubles the resolution, its first convolution from the small map: 16 products instead of 36."""

    doubling: DoublingConv

    def first_map(self, x: Tensor) -> Tensor:
        small = self.norm_in(x, "gelu")
        weights = [self.doubling.get_buffer(f"weight_{index}") for index in range(4)]
        parts = [F.conv2d(small, weight, None, padding=1) for weight in weights]
        return with_sums(*interleave([part.contiguous(memory_format=torch.channels_last) for part in parts]))


class Beside:
    """Two maps beside each other, each written by the block that makes it; the second is made before the first."""

    def __init__(self, like: Tensor, first: int, second: int, height: int, width: int) -> None:
        self.whole = empty_map(len(like), first + second, height, width, like)
        self._first, self._second = slice(0, first), slice(first, None)
        self._half = self._second

    def next_half(self) -> Tensor:
        """Return where the next map goes."""
        half, self._half = self._half, self._first
        return self.whole[:, half]


def joined_sum(
    h: Tensor, bias: Tensor, skip: Tensor, mode: str, *, more: Tensor | None = None, beside: Beside | None = None
) -> Tensor:
    """Return h + bias + skip (+ more) with its sums; see `joinkernels.join`."""
    if more is not None:
        more = pixels_first(more.to(h.dtype))
    n, channels, height, width = h.shape
    sums = empty_sums(n, channels, height, width, h)
    out = None if beside is None else beside.next_half()
    # The sums are those of the map that is returned, in which the other half of `beside` has no part.
    return with_sums(join(h, bias, skip, sums, resample=mode, more=more, out=out), sums)  # type: ignore[arg-type]


class JoinedMTCDN(MTCDN):
    """`MTCDN` with fused blocks; only `forward` differs."""

    def forward(self, scaled: Tensor, c_noise: Tensor, condition: Condition) -> Tensor:
        """Return what `MTCDN.forward` returns."""
        height, width = scaled.shape[-2:]
        emb = self.noise_embedding(c_noise)
        h = self._dates_as_one(scaled, emb, condition)
        h, pairs = self._encoded(h, condition.features.injections, emb)
        if self.attention is not None:
            h = self.attention(h, emb)
        h = self._decoded(h, pairs, emb)
        assert isinstance(self.norm_out, FusedNorm)
        raw = depth_to_space(self.out(self.norm_out(h, "silu")), self.config.stem)
        return raw[..., :height, :width]

    def _encoded(self, h: Tensor, injections: tuple[Tensor, ...], emb: Tensor) -> tuple[Tensor, list[Beside]]:
        """Return the encoder's last map, and per level the pair of maps whose second half it has written."""
        blocks = [block for block in self.encoder if isinstance(block, JoinedResBlock)]
        assert len(blocks) == len(self.encoder)
        stem = self.stem
        if isinstance(stem, AlignedConv):
            lifted, bias = stem.apply_to(h, None), stem.bias
        else:
            lifted, bias = F.conv2d(h.to(stem.weight.dtype), stem.weight, None, padding=stem.padding), stem.bias
        assert bias is not None
        lifted = lifted.contiguous(memory_format=torch.channels_last)
        first = pixels_first(injections[0].to(lifted.dtype))
        h = joined_sum(lifted, bias[: lifted.shape[1]], first, "none")
        pairs: list[Beside] = []
        entries = self._entries()
        for index, block in enumerate(blocks):
            pair = None
            if index in self.skip_after:
                level = len(pairs)
                width = self.config.widths[level]
                pair = Beside(h, entries[level] - width, width, *h.shape[-2:])
                pairs.append(pair)
            more = injections[index + 1] if index + 1 < len(blocks) else None
            h = block.joined(h, emb, more=more, beside=pair)
        return h, pairs

    def _decoded(self, h: Tensor, pairs: list[Beside], emb: Tensor) -> Tensor:
        assert isinstance(self.middle, JoinedResBlock)
        self.middle.joined(h, emb, beside=pairs[-1])
        blocks = iter(self.decoder)
        for level in reversed(range(len(pairs))):
            h = pairs[level].whole
            count = self.config.blocks[level] + (level > 0)
            for number in range(count):
                block = next(blocks)
                assert isinstance(block, JoinedResBlock)
                last = level > 0 and number == count - 1
                h = block.joined(h, emb, beside=pairs[level - 1] if last else None)
        return h

    def _entries(self) -> list[int]:
        """Return the channels of the decoder's first block of each level, finest first."""
        counts = [self.config.blocks[level] + (level > 0) for level in range(len(self.config.widths))]
        found, start = [], 0
        for level in reversed(range(len(counts))):
            block = self.decoder[start]
            assert isinstance(block, JoinedResBlock)
            found.append(int(block.conv_in.weight.shape[1]))
            start += counts[level]
        return found[::-1]
