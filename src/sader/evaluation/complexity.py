"""What a network costs: parameters and multiply-accumulates (the paper's complexity table, METHOD 2.8).

Counted by PyTorch's own operator counter: convolutions, linear layers, matrix products and attention. Pointwise work
(norms, activations, gates) is not counted, as everywhere in this field. Nothing here measures time or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

KINDS: Mapping[str, str] = {
    "convolution": "convolution",
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
}
"""Operator -> the name of its row; every fused attention operator is "attention", the rest keeps its own name."""


def count_parameters(module: nn.Module) -> int:
    """Return the number of weights of `module`, trained or frozen, shared ones once. Buffers do not count."""
    return sum(parameter.numel() for parameter in module.parameters())


def _cpu_attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """Return the operations of fused attention on a CPU, which PyTorch's counter does not know: q k^T, then times v."""
    batch, heads, tokens, width = query
    return 2 * batch * heads * tokens * key[-2] * (width + value[-1])


def count_macs(call: Callable[..., Any], *inputs: Any, **keywords: Any) -> dict[str, int]:
    """Return the multiply-accumulates of `call(*inputs, **keywords)`: "total" and one entry per kind of operator.

    call: a module or any function of tensors. On the `meta` device (`torch.device("meta")`) nothing is computed and
    a net of any size is counted in milliseconds; the count is the same on every device.
    """
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops}
    counter = FlopCounterMode(display=False, custom_mapping=fused)
    with counter, torch.no_grad():
        call(*inputs, **keywords)
    counts: dict[str, int] = {}
    for operator, flops in counter.get_flop_counts().get("Global", {}).items():
        name = str(operator).removeprefix("aten.").split(".")[0]
        kind = "attention" if "dot_product" in name else KINDS.get(name, name)
        counts[kind] = counts.get(kind, 0) + int(flops) // 2
    return {"total": sum(counts.values()), **dict(sorted(counts.items()))}


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of this shape without values, for `count_macs`."""
    return torch.empty(shape, dtype=dtype, device="meta")
