"""Optimisers (Muon for hidden matrices, AdamW for the rest), the schedule of their rates, and averaged weights.

Muon flattens every weight to (out, everything else) and scales its update from that shape. Gradients are added up over
processes before a step, so every process computes the same update.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sader.errors import CheckpointError
from sader.training.config import Schedule, TrainConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic a x + b x^3 + c x^5 that drives singular values towards 1 from near 0."""
OUTER_LAYERS = (
    "stem.", "out.", "condition_net.stem.", "noise_embedding.", "date_embedding.", "flag_embedding.",
    "cloud_head.lift.", "cloud_head.bands.", "cloud_head.out.", "composite_head.logit.", "composite_head.fill_logit.",
    "mask_refinement.lift.", "mask_refinement.bands.", "mask_refinement.out.", "error_head.out.",
)  # fmt: skip
"""First and last layers and embeddings of `MTCDN`: their rows are bands or features, not a hidden space."""
FINAL_FACTOR = 0.01
"""Share of the peak learning rate at the end of the cosine."""


class ParameterGroups(NamedTuple):
    """Names of parameters by the optimiser that moves them."""

    muon: list[str]
    adam: list[str]


def split_parameters(module: nn.Module, *, outer: Sequence[str] = OUTER_LAYERS) -> ParameterGroups:
    """Return which trainable parameters Muon moves (hidden, two or more axes) and which AdamW (all others).

    outer: starts of names of first and last layers and embeddings; a leading "network." (a `Denoiser`'s) is ignored.
    """
    groups = ParameterGroups([], [])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            inner = name.removeprefix("network.")
            hidden = parameter.ndim >= 2 and not inner.startswith(tuple(outer))
            (groups.muon if hidden else groups.adam).append(name)
    return groups


def orthogonalised(matrices: Tensor, *, steps: int = 5) -> Tensor:
    """Return matrices (N, rows, columns) with their singular values brought near 1, by Newton-Schulz.

    In bfloat16 on a GPU and float32 on a CPU; the result has the dtype of the input.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the products below are then of the smaller size
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, Nesterov blend, orthogonalised update. Matrices of equal shape are stacked into one batch.

    lr: 1e-3 (Sen2_MTC_New), 1e-4 (SEN12MS-CR-TS), a number or a tensor of one; momentum: of the running mean, 0.95;
    weight_decay: per unit of lr.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        newton_steps: int = 5,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "newton_steps": newton_steps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            for parameter in moved:
                if not self.state[parameter]:
                    self.state[parameter]["mean"] = torch.zeros_like(parameter)
            gradients = [p.grad for p in moved]
            means = [self.state[p]["mean"] for p in moved]
            torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
            blended = torch._foreach_lerp(gradients, means, group["momentum"])
            updates = _orthogonal_updates(blended, steps=group["newton_steps"])
            rate = group["lr"]
            if group["weight_decay"]:
                torch._foreach_mul_(moved, 1 - rate * group["weight_decay"])
            if isinstance(rate, Tensor):  # a captured step reads the rate from memory
                torch._foreach_sub_(moved, torch._foreach_mul(updates, rate))
            else:
                torch._foreach_add_(moved, updates, alpha=-rate)


def _orthogonal_updates(blended: Sequence[Tensor], *, steps: int) -> list[Tensor]:
    """Return the update of each gradient, in its own shape; one batch of matrix products per flattened shape."""
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, gradient in enumerate(blended):
        by_shape[gradient.shape[0], gradient[0].numel()].append(index)
    updates: list[Tensor] = list(blended)
    for (rows, columns), indices in by_shape.items():
        stacked = torch.stack([blended[i].reshape(rows, columns) for i in indices])
        directions = orthogonalised(stacked, steps=steps) * max(1.0, rows / columns) ** 0.5
        for place, index in enumerate(indices):
            updates[index] = directions[place].view_as(blended[index])
    return updates


def make_optimizers(
    module: nn.Module, config: TrainConfig, *, outer: Sequence[str] = OUTER_LAYERS, captured: bool = False
) -> list[torch.optim.Optimizer]:
    """Return the optimisers of `module`: Muon and AdamW, or one Adam; one without parameters is left out.

    captured: keep learning rates and step counts in device memory, for `graph.CapturedStep`.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if config.optimizer != "muon":
        return [make_adam(list(named.values()), config, captured=captured)]
    groups = split_parameters(module, outer=outer)
    matrices, others = ([named[name] for name in names] for names in groups)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(_with_peak(Muon(matrices, config.muon_lr, weight_decay=config.weight_decay), captured))
    if others:
        optimizers.append(make_adam(others, config, captured=captured))
    return optimizers


def make_adam(parameters: Sequence[Tensor], config: TrainConfig, *, captured: bool = False) -> torch.optim.Optimizer:
    """Return Adam, or AdamW where config.optimizer is not "adam". Beside Muon it has no weight decay."""
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return _with_peak(
        kind(
            parameters,
            config.adam_lr,
            betas=config.betas,
            weight_decay=0.0 if config.optimizer == "muon" else config.weight_decay,
            # The fused kernel moves all the small parameters in one launch.
            fused=all(p.is_cuda for p in parameters) or None,
            capturable=captured,
        ),
        captured,
    )


def _with_peak(optimizer: torch.optim.Optimizer, captured: bool) -> torch.optim.Optimizer:
    """Return the optimiser with its peak rates under "peak_lr"; `set_rate` moves "lr" along the schedule."""
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
        if captured:
            group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    return optimizer


def rate_factor(progress: float, *, warmup: float = 0.02, schedule: Schedule = "cosine") -> float:
    """Return the learning rate in peaks at `progress` in [0, 1]: linear over the share `warmup`, then the schedule.

    cosine: to 1 %; linear: constant for the first half of the run, then to 0; exponential: to 0.95^100; constant. The
    function has no state, so a resumed run continues the same curve. Beyond 1 the last value holds.
    """
    if progress < warmup:
        return progress / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "exponential":
        return float(0.95 ** (100 * min(1.0, progress)))
    if schedule == "linear":
        return min(1.0, 2 * (1 - min(1.0, progress)))
    share = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    return FINAL_FACTOR + (1 - FINAL_FACTOR) * 0.5 * (1 + math.cos(math.pi * share))


def progress_of(config: TrainConfig, step: int, elapsed: float) -> float:
    """Return the finished share of a run, in [0, 1]: by steps or by seconds, whichever is larger.

    The schedule of a run limited in time thus ends with it; without a limit the step alone counts.
    """
    by_time = 0.0 if config.max_seconds is None else elapsed / config.max_seconds
    return min(1.0, max(step / config.steps, by_time))


def scheduled_rate(config: TrainConfig, step: int, elapsed: float) -> float:
    """Return the learning rate of a step in peaks; the schedule is as long as the run unless its length is given."""
    own = config.schedule_steps
    progress = progress_of(config, step, elapsed) if own is None else min(1.0, step / own)
    return rate_factor(progress, warmup=config.warmup, schedule=config.schedule)


def set_rate(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` peaks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["peak_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class Ema:
    """Exponential moving average of a module's parameters, with warm-up min(decay, (1 + n) / (10 + n)).

    Updated once per optimiser step (the public code updates per micro-batch, so that the decay depends on the
    accumulation). Buffers are not averaged: those of this package never change.
    """

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        self.decay, self.updates = decay, 0
        self._parameters: list[Tensor] = list(module.parameters())
        self._names = [name for name, _ in module.named_parameters()]
        self.shadow = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Include the present parameters of the module."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.shadow, self._parameters, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters of the module by the averaged ones within the context."""
        # Values are copied, not swapped: compiled and captured graphs hold the addresses.
        with torch.no_grad():
            kept = [parameter.detach().clone() for parameter in self._parameters]
            torch._foreach_copy_(self._parameters, self.shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the average by name and the number of updates."""
        return {"updates": self.updates, "shadow": dict(zip(self._names, self.shadow, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved average; its names must be exactly those of the module."""
        shadow: dict[str, Tensor] = state["shadow"]
        if shadow.keys() != set(self._names):
            odd = sorted(shadow.keys() ^ set(self._names))[0]
            raise CheckpointError(f"the saved average does not fit this network (first difference: {odd}).")
        self.updates = int(state["updates"])
        with torch.no_grad():
            torch._foreach_copy_(
                self.shadow, [shadow[name].to(s) for name, s in zip(self._names, self.shadow, strict=True)]
            )
