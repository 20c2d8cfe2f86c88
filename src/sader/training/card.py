"""What a run writes about itself into its weights: command, commit, data, steps, and the weights it started from."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sader._version import __version__
from sader.checkpoint import find_checkpoint, read_header
from sader.config import to_dict
from sader.data.bank import SeriesBank
from sader.training.module import TrainingModule


def count_sources(bank: SeriesBank) -> dict[str, int]:
    """Return how many series of each source the bank holds."""
    return dict(Counter(name.split("/")[0] for name in bank.names))


def make_card(module: TrainingModule, sources: dict[str, int]) -> dict[str, Any]:
    """Return what is known about the training so far; `sources` counts the series of each source."""
    train = module.config
    made = {
        "command": " ".join(_command()),
        "commit": git_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "sader": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(module.device) if module.device.type == "cuda" else "cpu",
        "steps": module.steps_done,
        "seconds": round(module.elapsed, 1),
        "series_seen": module.steps_done * train.batch_size * train.accumulate,
        "data": dict(sources),
        "last": {name: round(value, 5) for name, value in module.latest.items()},
        "train": to_dict(train),
    }
    return {key: value for key, value in made.items() if value is not None}


def parent_card(init: str) -> dict[str, Any]:
    """Return what the card of a run says about the weights it started from."""
    path = find_checkpoint(init)
    card = read_header(path).get("card", {})
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    told = {"parent": f"{init} (SHA-256 {checksum[:16]}...)"}
    for name in ("training_data", "licence"):
        # Weights trained further state what their own parent was, and theirs is ours too.
        if found := card.get(name) or card.get(f"parent_{name}"):
            told[f"parent_{name}"] = found
    if "attribution" in card:
        told["attribution"] = card["attribution"]
    return told


def _command() -> list[str]:
    """Return the command as typed; the program's own path says nothing to others."""
    program = Path(sys.argv[0]).name
    return ["python -m sader.training" if program == "__main__.py" else program, *sys.argv[1:]]


def git_commit() -> str | None:
    """Return the commit of the source tree, with "+" where files differ from it; None outside a repository."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "."],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if dirty else "")
