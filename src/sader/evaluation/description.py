"""What a baseline costs and is: parameters, multiply-accumulates and where it comes from (`sader info pix2pix`).

Counted without computing anything, as for SADER (`complexity.py`). The paper's own figures stand beside ours.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from sader.baselines.baseline import Baseline, BaselineInputs, BaselineModelConfig
from sader.evaluation.complexity import count_macs, count_parameters, on_meta
from sader.models import build_baseline, get_system


@dataclass(frozen=True)
class BaselineInfo:
    """Everything `sader info SYSTEM` prints."""

    name: str
    title: str
    """As tables spell it; "(sizes assumed)" where the facts do not fix the network."""
    kind: str
    """"baseline", or "weights" for a trained one."""
    trained: bool
    year: int
    published: str
    bands: tuple[str, ...]
    aux_bands: tuple[str, ...]
    sizes_assumed: bool
    parameters: int
    """Of what predicts; discriminators and the like are in `parameters_training`."""
    parameters_training: int
    """Of all that is trained."""
    paper_parameters: float | None
    """Millions."""
    paper_gmacs: float | None
    dates: int
    size: int
    gmacs_forward: float
    """One evaluation, as the paper counts."""
    gmacs_sample: float
    """The whole prediction of one image."""
    evaluations: int
    note: str = ""
    """What a reader of these figures should know."""
    card: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the description as plain values for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, text) for people to read."""
        case = f"T={self.dates}, {self.size}x{self.size}"
        times = f"{self.evaluations} evaluation{'s' * (self.evaluations != 1)}"
        extra = self.parameters_training - self.parameters
        training = f"; {extra / 1e6:.2f} M more while training" if extra else ""
        rows = [
            ("model", f"{self.title} ({self.kind}{'' if self.trained else ', untrained'})"),
            ("published", f"{self.published} ({self.year}); built here from facts, not from its code"),
            ("bands", " ".join(self.bands)),
            ("auxiliary bands", " ".join(self.aux_bands) or "none"),
            ("parameters", f"{self.parameters / 1e6:.2f} M ({_paper(self.paper_parameters, 'M')}{training})"),
            ("GMAC per forward", f"{self.gmacs_forward:.2f} ({case}; {_paper(self.paper_gmacs, '')})"),
            ("GMAC per sample", f"{self.gmacs_sample:.2f} ({times})"),
        ]
        rows += [("note", self.note)] if self.note else []
        return rows + [(key.replace("_", " "), str(value)) for key, value in self.card.items()]


def _paper(value: float | None, unit: str) -> str:
    return "not in the paper's table" if value is None else f"paper {value:.2f} {unit}".strip()


def describe_baseline(
    config: BaselineModelConfig, *, dates: int = 3, size: int = 256, card: dict[str, Any] | None = None
) -> BaselineInfo:
    """Return the description of a system; `card` is that of its trained weights. dates, size: the case counted."""
    system, baseline = get_system(config.system), _without_values(config)
    forward, sample = baseline_macs(baseline, dates=dates, size=size)
    return BaselineInfo(
        name=system.name,
        title=system.label,
        kind="baseline" if card is None else "weights",
        trained=card is not None,
        year=system.year,
        published=system.reference,
        bands=config.network.bands,
        aux_bands=config.network.aux_bands,
        sizes_assumed=system.assumed,
        parameters=count_parameters(baseline.counted),
        parameters_training=count_parameters(baseline),
        paper_parameters=system.paper_parameters,
        paper_gmacs=system.paper_gmacs,
        dates=dates,
        size=size,
        gmacs_forward=forward / 1e9,
        gmacs_sample=sample / 1e9,
        evaluations=baseline.evaluations,
        note=system.note,
        card=card or {},
    )


def count_baseline(config: BaselineModelConfig) -> int:
    """Return the parameters of what predicts."""
    return count_parameters(_without_values(config).counted)


def baseline_macs(baseline: Baseline, *, dates: int, size: int) -> tuple[int, int]:
    """Return the multiply-accumulates of (one evaluation, one whole prediction) of an image (dates, C, size, size)."""
    config = baseline.config
    height, width = baseline.padded_size(size, size)

    def inputs(rows: int, columns: int) -> BaselineInputs:
        return BaselineInputs(
            cloudy=on_meta(1, dates, config.channels, rows, columns),
            aux=on_meta(1, dates, len(config.aux_bands), rows, columns) if config.aux_bands else None,
            observed=on_meta(1, dates, rows, columns, dtype=torch.bool),
            cloud=on_meta(1, dates, rows, columns),
            present=on_meta(1, dates, dtype=torch.bool),
            reference=on_meta(1, dtype=torch.long),
            days=on_meta(1, dates),
        )

    fixed = config.fixed_size or 0
    once = count_macs(baseline, inputs(fixed or height, fixed or width))["total"]

    def sampling(steps: int | None) -> int:
        def noise(draw: int, channels: int) -> Tensor:
            return on_meta(1, channels, size, size)

        return count_macs(baseline.predict, inputs(size, size), noise, steps=steps)["total"]

    if config.steps is None or config.steps <= 3:
        return once, sampling(None)
    # Every step costs the same, so two short samplings tell the cost of a long one.
    few, more = sampling(2), sampling(3)
    return once, few + (config.steps - 2) * (more - few)


def _without_values(config: BaselineModelConfig) -> Baseline:
    """Return the network on the meta device: shapes only, in no time."""
    with torch.device("meta"):
        return build_baseline(config).eval()
