"""The running mean of the parameters that is evaluated and shipped (METHOD 7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sader.errors import CheckpointError


class Ema:
    """Exponential moving average of a module's parameters, with warm-up min(decay, (1 + n) / (10 + n)).

    Updated once per optimiser step (the published code does it per micro-batch, which makes the decay depend on the
    accumulation). Buffers are not averaged: those of this package never change.
    """

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        self.decay, self.updates = decay, 0
        self._parameters: list[Tensor] = list(module.parameters())
        self._names = [name for name, _ in module.named_parameters()]
        self.shadow = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take the module's parameters in."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.shadow, self._parameters, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the module hold the averaged parameters for a while."""
        # Copies, not swapped pointers: compiled graphs and optimiser state keep the addresses they know.
        with torch.no_grad():
            kept = [parameter.detach().clone() for parameter in self._parameters]
            torch._foreach_copy_(self._parameters, self.shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, kept)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs; tensors by name."""
        return {"updates": self.updates, "shadow": dict(zip(self._names, self.shadow, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved average, strictly."""
        shadow: dict[str, Tensor] = state["shadow"]
        if shadow.keys() != set(self._names):
            odd = sorted(shadow.keys() ^ set(self._names))[0]
            raise CheckpointError(f"the saved average does not fit this network (first difference: {odd}).")
        self.updates = int(state["updates"])
        with torch.no_grad():
            torch._foreach_copy_(
                self.shadow, [shadow[name].to(s) for name, s in zip(self._names, self.shadow, strict=True)]
            )
