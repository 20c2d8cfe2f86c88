"""The report of a run over many scenes: what was done, what failed and why, time, bytes and cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sader.errors import printable
from sader.files import write_atomically

DONE, UNCHANGED, FAILED, OPEN = "done", "unchanged", "failed", "open"
MOST_LINES = 20
"""Failed scenes in the text; the JSON file lists all of them."""


@dataclass(frozen=True)
class SceneOutcome:
    """What happened to one scene."""

    name: str
    status: str = OPEN
    """done, unchanged (complete from an earlier run with the same inputs and settings), failed, or open (not run)."""
    output: str = ""
    files: tuple[str, ...] = ()
    reason: str = ""
    """The error of a failed scene."""
    details: str = ""
    """The traceback of an error that names no mistake in the input."""
    may_pass: bool = False
    """Whether a failed scene may succeed when it is tried again."""
    attempts: int = 0
    """Tries that ended with a result or an error; the cluster repeats those of lost workers by itself."""
    seconds: float = 0.0
    """Of all attempts."""
    cores: int = 1
    """Processor cores of the scene; 0 where it was computed on a GPU."""
    bytes_in: int = 0
    """Stored size of the input files."""
    bytes_out: int = 0
    notices: tuple[str, ...] = ()
    items: dict[str, Any] = field(default_factory=dict)
    """Name -> STAC item of results on object storage; written by the main process."""


@dataclass(frozen=True)
class BatchReport:
    """What happened to all scenes."""

    output: str
    scenes: tuple[SceneOutcome, ...]
    started: str
    seconds: float
    price: float | None = None
    """Of one core hour, or one GPU hour for scenes computed on a GPU."""
    files: tuple[str, ...] = ()
    """The reports, and the STAC collection."""

    def with_status(self, status: str) -> list[SceneOutcome]:
        """Return the scenes that ended so."""
        return [one for one in self.scenes if one.status == status]

    @property
    def core_seconds(self) -> float:
        """Seconds of the scenes times their processor cores."""
        return sum(one.seconds * one.cores for one in self.scenes)

    @property
    def gpu_seconds(self) -> float:
        """Seconds of the scenes that were computed on a GPU."""
        return sum(one.seconds for one in self.scenes if one.cores == 0)

    @property
    def cost(self) -> float | None:
        """In the unit of the price; the idle time of workers is not in it."""
        return None if self.price is None else self.price * (self.core_seconds + self.gpu_seconds) / 3600

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        scenes = []
        for one in self.scenes:
            values = asdict(one)
            del values["items"], values["may_pass"]
            scenes.append(values)
        return {
            "output": self.output,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            **{status: len(self.with_status(status)) for status in (DONE, UNCHANGED, FAILED, OPEN)},
            "core_seconds": round(self.core_seconds, 3),
            "gpu_seconds": round(self.gpu_seconds, 3),
            "bytes_in": sum(one.bytes_in for one in self.scenes),
            "bytes_out": sum(one.bytes_out for one in self.scenes),
            "price": self.price,
            "cost": self.cost,
            "scenes": scenes,
        }

    def as_text(self) -> str:
        """Return the report in a few lines."""
        totals = self.as_dict()
        counts = [f"{totals[status]} {status}" for status in (DONE, UNCHANGED, FAILED, OPEN) if totals[status]]
        used = [f"{self.core_seconds:.1f} core seconds"] if self.core_seconds or not self.gpu_seconds else []
        used += [f"{self.gpu_seconds:.1f} GPU seconds"] if self.gpu_seconds else []
        used += [f"{totals['bytes_in'] / 1e6:.1f} MB in", f"{totals['bytes_out'] / 1e6:.1f} MB out"]
        used += [] if self.cost is None else [f"cost {self.cost:.4g} at {self.price:g} an hour"]
        lines = [f"{len(self.scenes)} scenes: {', '.join(counts)}; {self.seconds:.1f} s", ", ".join(used)]
        failed = self.with_status(FAILED)
        lines += [
            f"failed: {one.name} ({one.attempts} attempt{'' if one.attempts == 1 else 's'}): {one.reason}"
            for one in failed[:MOST_LINES]
        ]
        lines += [f"and {len(failed) - MOST_LINES} more"] if len(failed) > MOST_LINES else []
        return printable("\n".join(lines))


def write_report(report: BatchReport, path: Path) -> Sequence[str]:
    """Write the report as JSON and, beside it, as text; return both paths."""
    text = path.with_suffix(".txt")
    write_atomically(path, json.dumps(report.as_dict(), indent=1).encode())
    write_atomically(text, (report.as_text() + "\n").encode())
    return [str(path), str(text)]
