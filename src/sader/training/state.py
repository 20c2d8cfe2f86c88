"""Training state on disk: whole files only, the last two kept, nothing unpickled but tensors and plain values.

A process may die at any instruction; what it leaves is the previous checkpoint, the new one, or both.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from sader.errors import OutputError, TrainingError
from sader.files import write_atomically

FOLDER = "checkpoints"
KEEP = 2
FORMAT = 1


def state_files(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run_dir / FOLDER).glob("step-*.pt"))


def save_state(run_dir: Path, state: dict[str, Any]) -> Path:
    """Write the state (with its "step") as the newest checkpoint and drop all but the last two."""
    step = int(state["step"])
    path = run_dir / FOLDER / f"step-{step:08d}.pt"
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    try:
        write_atomically(path, buffer.getvalue())
    except OutputError as error:
        kept = state_files(run_dir)
        found = f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
        raise TrainingError(
            f"the checkpoint of step {step} could not be written ({error}) {found}. Then go on with --resume."
        ) from error
    for old in state_files(run_dir)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def load_state(run_dir: Path, *, device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """Return the newest readable state, or None where the run never wrote one."""
    files = state_files(run_dir)
    for path in reversed(files):
        try:
            state = torch.load(path, map_location=device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            warnings.warn(f"{path} cannot be read ({error}); the one before it is used.", stacklevel=2)
            continue
        if state.get("format") != FORMAT:
            raise TrainingError(f"{path} has format {state.get('format')}; wanted {FORMAT}. Start a new run.")
        return state
    if files:
        raise TrainingError(f"none of the {len(files)} checkpoints in {run_dir / FOLDER} can be read. Start a new run.")
    return None


def drop_partial_files(run_dir: Path) -> None:
    """Remove what a killed process had not finished writing."""
    for folder in (run_dir, run_dir / FOLDER):
        for partial in folder.glob(".*.partial"):
            partial.unlink(missing_ok=True)
