"""Muon for hidden matrices, AdamW for the rest, and the schedule that moves both (METHOD 7).

As METHOD recommends, every weight is flattened to (out, everything else) and scaled from that shape. Single-process by
design: gradients are averaged over processes before a step, so every process computes the same update.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic a x + b x^3 + c x^5 that drives singular values towards 1 from near 0."""
OUTER_LAYERS = (
    "stem.", "out.", "condition_net.stem.", "noise_embedding.", "date_embedding.", "flag_embedding.",
    "cloud_head.lift.", "cloud_head.bands.", "cloud_head.out.", "composite_head.logit.", "composite_head.fill_logit.",
    "mask_refinement.lift.", "mask_refinement.bands.", "mask_refinement.out.", "error_head.out.",
)  # fmt: skip
"""First and last layers and embeddings of `MTCDN`: their rows are bands or features, not a hidden space."""
FINAL_FACTOR = 0.01
"""Where the cosine ends, in peak learning rates."""
Schedule = Literal["cosine", "linear", "constant"]


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
    """Momentum, Nesterov blend, orthogonalised update (METHOD 7). Equal shapes are stacked into one batch.

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
            if isinstance(rate, Tensor):  # a recorded step reads the rate from memory
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
    module: nn.Module,
    *,
    muon_lr: float,
    adam_lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    outer: Sequence[str] = OUTER_LAYERS,
    recorded: bool = False,
) -> list[torch.optim.Optimizer]:
    """Return [Muon, AdamW] over the parameters of `module`; one that would be empty is left out.

    recorded: keep learning rates and step counts in device memory, for `graph.GraphedStep`.

    Each group keeps its peak rate under "peak_lr"; `set_rate` moves "lr" along the schedule.
    """
    named = dict(module.named_parameters())
    groups = split_parameters(module, outer=outer)
    matrices, others = ([named[name] for name in names] for names in groups)
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, muon_lr, weight_decay=weight_decay))
    if others:
        made.append(make_adam(others, adam_lr, betas=betas, recorded=recorded))
    return _scheduled(made, recorded=recorded)


def make_phase_optimizers(
    groups: Mapping[str, Sequence[nn.Parameter]],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    decoupled: bool = False,
    recorded: bool = False,
) -> dict[str, list[torch.optim.Optimizer]]:
    """Return one Adam (AdamW where `decoupled`) for the parameters of each phase of a baseline's training."""
    return {
        phase: _scheduled(
            [make_adam(parameters, lr, betas=betas, weight_decay=weight_decay, decoupled=decoupled, recorded=recorded)],
            recorded=recorded,
        )
        for phase, parameters in groups.items()
    }


def make_adam(
    parameters: Sequence[Tensor],
    lr: float,
    *,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    decoupled: bool = True,
    recorded: bool = False,
) -> torch.optim.Optimizer:
    """Return AdamW, or Adam where the decay is part of the gradient (decoupled=False)."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    # The fused kernel moves all the small parameters in one launch.
    fused = all(p.is_cuda for p in parameters)
    return kind(
        parameters, lr, betas=betas, eps=1e-8, weight_decay=weight_decay, fused=fused or None, capturable=recorded
    )


def _scheduled(made: list[torch.optim.Optimizer], *, recorded: bool) -> list[torch.optim.Optimizer]:
    """Return the optimisers with their peak rates noted, ready for `set_rate`."""
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
            if recorded:
                group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    return made


def rate_factor(progress: float, *, warmup: float = 0.02, schedule: Schedule = "cosine") -> float:
    """Return the learning rate in peaks at `progress` in [0, 1]: linear over the share `warmup`, then the schedule.

    cosine: to 1 %; linear: constant for the first half of the run, then to 0; constant. A pure function, so a resumed
    run continues the same curve. Beyond 1 it stays where it ended.
    """
    if progress < warmup:
        return progress / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return min(1.0, 2 * (1 - min(1.0, progress)))
    share = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    return FINAL_FACTOR + (1 - FINAL_FACTOR) * 0.5 * (1 + math.cos(math.pi * share))


def progress_of(step: int, steps: int, elapsed: float = 0.0, max_seconds: float | None = None) -> float:
    """Return how far the run is, in [0, 1]: by steps or by time, whichever is further.

    A run limited in time then ends its cosine on time; without the limit this is a function of the step alone.
    """
    share = step / max(1, steps)
    if max_seconds is not None:
        share = max(share, elapsed / max_seconds)
    return min(1.0, share)


def set_rate(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` peaks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["peak_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
