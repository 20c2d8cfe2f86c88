"""What a run writes beside its weights: checkpoints of the training state, the log, the progress line, and the card.

A process may be killed at any instruction. It leaves the previous checkpoint, the new one, or both; the log of a
resumed run drops the lines that are written again. Checkpoints hold tensors and plain values only.
"""

from __future__ import annotations

import csv
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from sader._version import __version__
from sader.checkpoint import find_checkpoint, read_header
from sader.config import to_dict
from sader.errors import OutputError, TrainingError
from sader.files import file_digest, remove_partial_files, write_atomically
from sader.training.trainer import Trainer

FOLDER = "checkpoints"
LOG_FILE = "metrics.csv"
KEEP = 2
FORMAT = 2

# ---------------------------------------------------------------- checkpoints


def state_files(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run_dir / FOLDER).glob("step-*.pt"))


def save_state(run_dir: Path, state: Mapping[str, Any]) -> Path:
    """Write the state (with its "step") as the newest checkpoint and remove all but the last two."""
    step = int(state["step"])
    path = run_dir / FOLDER / f"step-{step:08d}.pt"
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    try:
        write_atomically(path, [buffer.getbuffer()])
    except OutputError as error:
        kept = state_files(run_dir)
        found = f"{kept[-1]} is kept: --resume continues from it." if kept else "There is no earlier checkpoint."
        raise TrainingError(f"the checkpoint of step {step} could not be written: {error} {found}") from error
    _remove_old(run_dir)
    return path


def load_state(run_dir: Path, *, device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """Return the newest readable state, or None if the run has written none."""
    files = state_files(run_dir)
    for path in reversed(files):
        try:
            state = torch.load(path, map_location=device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            warnings.warn(f"{path} cannot be read ({error}); the one before it is used.", stacklevel=2)
            continue
        if state.get("format") != FORMAT:
            raise TrainingError(f"{path} has format {state.get('format')}; expected {FORMAT}. Start a new run.")
        return state
    if files:
        raise TrainingError(f"none of the {len(files)} checkpoints in {run_dir / FOLDER} can be read. Start a new run.")
    return None


def clean_folder(run_dir: Path) -> None:
    """Remove what a killed process left: temporary files and superseded checkpoints."""
    for folder in (run_dir, run_dir / FOLDER):
        remove_partial_files(folder)
    _remove_old(run_dir)


def _remove_old(run_dir: Path) -> None:
    for path in state_files(run_dir)[:-KEEP]:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------- log


class Log:
    """Appends lines (step, name, value) to metrics.csv, and the values to TensorBoard where it is installed.

    Lines after step `start` are removed first: a killed run may have been ahead of its last checkpoint. Every line is
    on disk when `write` returns.
    """

    def __init__(self, run_dir: Path, *, start: int = 0) -> None:
        self.path = run_dir / LOG_FILE
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("step", "name", "value"))
        writer.writerows((step, name, repr(value)) for step, name, value in read_log(self.path) if step <= start)
        write_atomically(self.path, text.getvalue().encode())
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(run_dir / "tensorboard", purge_step=start or None)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Append the values of one step."""
        text = "".join(f"{step},{name},{value!r}\n" for name, value in values.items())
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise OutputError(
                f"cannot write the log {self.path}: {error.strerror}. Free space, then go on with --resume."
            ) from error
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what TensorBoard has buffered."""
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[tuple[int, str, float]]:
    """Return the complete lines (step, name, value) of a log; none if the file does not exist."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    rows = []
    for line in lines[1:]:
        parts = line.rstrip("\n").split(",")
        if line.endswith("\n") and len(parts) == 3:
            rows.append((int(parts[0]), parts[1], float(parts[2])))
    return rows


class ProgressLine:
    """One line on standard error: step, samples, remaining time and the values last logged; rewritten on a terminal."""

    def __init__(self, trainer: Trainer[Any]) -> None:
        self.begun, self.start = monotonic(), trainer.progress
        self._shown = 0.0

    def show(self, trainer: Trainer[Any]) -> None:
        """Show the state of the run, at most every half second (every minute where the output is a file)."""
        terminal, now = sys.stderr.isatty(), monotonic()
        if now - self._shown < (0.5 if terminal else 60) and not trainer.over:
            return
        self._shown = now
        text = self.text(trainer, now - self.begun)
        ending = "" if terminal and not trainer.over else "\n"
        print(f"\r{text:<110s}" if terminal else text, end=ending, file=sys.stderr, flush=True)

    def text(self, trainer: Trainer[Any], seconds: float) -> str:
        """Return the line after `seconds` of this process."""
        config, done, share = trainer.config, trainer.steps_done, trainer.progress
        batch = config.batch_size * config.accumulate
        # A limit of time may end the run before its last step.
        total = config.steps if config.max_seconds is None else min(config.steps, round(done / max(share, 1e-9)))
        parts = [f"step {done:,} of {total:,} ({share:.0%})", f"{done * batch:,} of {total * batch:,} samples"]
        if share > self.start:
            parts.append(f"{timedelta(seconds=round(seconds * (1 - share) / (share - self.start)))} left")
        loss = trainer.latest.get("loss")
        return ", ".join(parts if loss is None else [*parts, f"loss {loss:.4g}"])


# ---------------------------------------------------------------- card


def make_card(trainer: Trainer[Any], sources: dict[str, int]) -> dict[str, Any]:
    """Return the facts about a training for its weights file; `sources` counts the series of each source."""
    train, program = trainer.config, Path(sys.argv[0]).name  # its name instead of its path
    facts = {
        "command": " ".join(["sader" if program == "__main__.py" else program, *sys.argv[1:]]),
        "commit": git_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "sader": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "cpu",
        "steps": trainer.steps_done,
        "seconds": round(trainer.elapsed, 1),
        "series_seen": trainer.steps_done * train.batch_size * train.accumulate,
        "data": dict(sources),
        "last": {name: round(value, 5) for name, value in trainer.latest.items()},
        "train": to_dict(train),
    }
    return {key: value for key, value in facts.items() if value is not None}


def parent_card(init: str) -> dict[str, Any]:
    """Return the part of a card about the weights that a run started from."""
    path = find_checkpoint(init)
    card = read_header(path).get("card", {})
    facts = {"parent": f"{init} (SHA-256 {file_digest(path)[:16]}...)"}
    for name in ("training_data", "licence"):
        # Weights that were fine-tuned themselves state the data of their own parent.
        if found := card.get(name) or card.get(f"parent_{name}"):
            facts[f"parent_{name}"] = found
    if "attribution" in card:
        facts["attribution"] = card["attribution"]
    return facts


def git_commit() -> str | None:
    """Return the commit of the source tree, with "+" if files differ from it; None outside a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
