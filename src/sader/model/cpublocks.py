"""The same network for inference on a CPU: channels last, fewer products, half precision where it is safe.

Processors with bfloat16 products (AVX512-BF16, AMX) do twice as many of them in a second. The parts that find clouds
stay float32 all the same: a mask cut at a threshold flips by a rounding, and one pixel of a mask moves the fits around
it by ten times what rounding does everywhere else.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sader.model.blocks import Gate, ResBlock
from sader.model.fused import half_network
from sader.model.mtcdn import MTCDN

MASK_PARTS = ("cloud_head", "second_look")


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 numbers itself; emulated, they would be slower than float32."""
    asked = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # x86 only; a later PyTorch may rename it
    return bool(asked is not None and asked())


def cpu_network(network: MTCDN, dtype: torch.dtype) -> MTCDN:
    """Return a copy with its convolutions in `dtype`, the parts that find clouds in float32. Run it under autocast."""
    if dtype == torch.float32:
        made = copy.deepcopy(network).eval().requires_grad_(False)
    else:
        made = half_network(network, dtype)
        for name in MASK_PARTS:
            part = copy.deepcopy(getattr(network, name))
            setattr(made, name, None if part is None else part.eval().requires_grad_(False))
    made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exchange_blocks(made)
    return made


def exchange_blocks(module: nn.Module) -> None:
    """Exchange every block and gate below `module` for the one of this file."""
    for name, child in module.named_children():
        if isinstance(child, ResBlock):
            setattr(module, name, CpuResBlock(child))
        elif isinstance(child, Gate):
            setattr(module, name, SplitGate(child))
        else:
            exchange_blocks(child)


def gelu(x: Tensor) -> Tensor:
    """Return GELU(x). Of a map that lies channels last oneDNN makes a copy in another order; its rows need none."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return F.gelu(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return F.gelu(x)


class SplitGate(nn.Module):
    """`Gate` with a convolution for each half.

    Half the channels of a map that lies channels last are scattered over it, and GELU takes ten times as long on them.
    """

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        split = gate.split
        assert split.bias is not None
        for name, weight, bias in zip("ab", split.weight.chunk(2), split.bias.chunk(2), strict=True):
            self.register_buffer(f"weight_{name}", weight.detach().clone(memory_format=torch.channels_last))
            self.register_buffer(f"bias_{name}", bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        a = F.conv2d(x, self.get_buffer("weight_a"), self.get_buffer("bias_a"))
        b = F.conv2d(x, self.get_buffer("weight_b"), self.get_buffer("bias_b"))
        return torch.addcmul(gelu(x).to(a.dtype), a, gelu(b))


class DoublingConv(nn.Module):
    """A 3x3 convolution of an image doubled by repeating pixels, from the image itself.

    Of the nine pixels under the kernel only four differ. Each of the four outputs inside a pixel has its own four sums
    of weights: 16 products instead of 36.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        assert conv.kernel_size == (3, 3)
        weight = conv.weight.detach().float()
        for index, (row, column) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
            two_rows = _merged(weight, 2, row)
            merged = _merged(two_rows, 3, column).to(conv.weight.dtype)
            self.register_buffer(f"weight_{index}", merged.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", None if conv.bias is None else conv.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        made: Tensor | None = None
        for index in range(4):
            row, column = divmod(index, 2)
            part = F.conv2d(x, self.get_buffer(f"weight_{index}"), self.bias, padding=1)  # type: ignore[arg-type]
            part = part[..., row : row + height, column : column + width]
            if made is None:
                shape = (*part.shape[:2], 2 * height, 2 * width)
                made = torch.empty(shape, dtype=part.dtype, memory_format=torch.channels_last)
            made[..., row::2, column::2] = part
        assert made is not None
        return made


def _merged(weight: Tensor, dim: int, phase: int) -> Tensor:
    """Return the kernel as an output at an even (phase 0) or odd place sees it along `dim`: two taps of the three."""
    first, second, third = weight.unbind(dim)
    pair = (first, second + third) if phase == 0 else (first + second, third)
    return torch.stack(pair, dim)


class CpuResBlock(nn.Module):
    """`ResBlock` with the parts above."""

    def __init__(self, block: ResBlock) -> None:
        super().__init__()
        self.doubles = block.resample_mode == "up"
        self.resample, self.scale, self.skip = block.resample, block.scale, block.skip
        self.norm_in, self.norm_out, self.gate = block.norm_in, block.norm_out, SplitGate(block.gate)
        self.conv_in: nn.Module = DoublingConv(block.conv_in) if self.doubles else block.conv_in
        self.conv_out = block.conv_out

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        h = gelu(self.norm_in(x))
        h = self.norm_out(self.conv_in(h if self.doubles else self.resample(h)))
        if self.scale is not None:
            assert emb is not None, "this block was built with an embedding"
            h = h * (1 + self.scale(F.silu(emb)))[:, :, None, None].to(h.dtype)
        result: Tensor = self.conv_out(self.gate(h)) + self.skip(self.resample(x))
        return result
