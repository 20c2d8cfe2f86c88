"""The CSV log of a run, and its progress bar. A resumed run drops the lines it is about to write again."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers.logger import Logger

from sader.errors import OutputError
from sader.files import write_atomically


class CsvLog(Logger):
    """Appends one line per call to `metrics.csv`: step, name, value. Each line is on disk when the call returns."""

    def __init__(self, folder: Path, *, keep_until: int = 0) -> None:
        super().__init__()
        self.path = folder / "metrics.csv"
        self._keep(keep_until)

    def _keep(self, until: int) -> None:
        """Keep whole lines up to step `until`: a killed run may be ahead of its checkpoint and end in half a line."""
        rows = [row for row in read_log(self.path) if row[0] <= until]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("step", "name", "value"))
        writer.writerows((step, name, repr(value)) for step, name, value in rows)
        write_atomically(self.path, text.getvalue().encode())

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved config is a file of its own."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append the values."""
        text = "".join(f"{step},{name},{value!r}\n" for name, value in metrics.items())
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise OutputError(
                f"cannot write the log {self.path}: {error.strerror}. Free space, then go on with --resume."
            ) from error


def read_log(path: Path) -> list[tuple[int, str, float]]:
    """Return the whole lines (step, name, value) of a log; none where there is no file."""
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


class Bar(TQDMProgressBar):
    """Lightning's bar with the last logged values: reading newer ones would wait for the device at every step."""

    def get_metrics(self, trainer: Trainer, module: LightningModule) -> dict[str, int | str | float | dict[str, float]]:
        latest: dict[str, float] = getattr(module, "latest", {})
        return {name: f"{latest[name]:.4g}" for name in ("loss", "lr_factor") if name in latest}
