"""Scored rows with their costs and example images: kept in memory, written to a folder, read back and merged.

`sader compare` scores all methods in one process; `sader reproduce` scores each row of a table on its own and merges
the folders.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from sader.errors import DataError
from sader.evaluation.costs import Cost
from sader.evaluation.figures import Example
from sader.evaluation.scoring import Row
from sader.files import write_atomically

SCORES_FILE, EXAMPLES_FILE = "scores.json", "examples.npz"


@dataclass(frozen=True)
class Results:
    """The scores of several methods on the same items, with the data of tables and figures."""

    rows: list[Row]
    costs: dict[str, Cost] = field(default_factory=dict)
    """Method -> cost; empty where costs were not counted."""
    examples: list[Example] = field(default_factory=list)
    predictions: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Method -> its image (C, H, W) of each example."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Settings that belong to the record."""

    @property
    def methods(self) -> list[str]:
        """The scored methods in their order."""
        return list(dict.fromkeys(row.method for row in self.rows))

    def seconds_per_megapixel(self, method: str) -> float:
        """Return the median over items, which leaves out the slow first call."""
        values = [row.scores["seconds_per_megapixel"] for row in self.rows if row.method == method]
        return float(np.median(values)) if values else float("nan")


def merge(parts: Sequence[Results]) -> Results:
    """Return the results of all methods; every part must have been scored on the same items."""
    if not parts:
        raise DataError("no row has been scored; expected at least one. Run the plan first.")
    names = [sorted({row.item for row in part.rows}) for part in parts]
    for part, mine in zip(parts, names, strict=True):
        if mine != names[0]:
            raise DataError(
                f"{', '.join(part.methods)} was scored on {len(mine)} items, {', '.join(parts[0].methods)} on "
                f"{len(names[0])} others; a table needs the same. Run the rows again with the same data and limits."
            )
    return Results(
        rows=[row for part in parts for row in part.rows],
        costs={name: cost for part in parts for name, cost in part.costs.items()},
        examples=next((part.examples for part in parts if part.examples), []),
        predictions={name: images for part in parts for name, images in part.predictions.items()},
        facts=dict(parts[0].facts),
    )


def save(results: Results, folder: Path) -> None:
    """Write examples.npz and then scores.json: where the second exists, the results are complete."""
    arrays: dict[str, np.ndarray] = {}
    for number, example in enumerate(results.examples):
        arrays |= {f"cloudy/{number}": example.cloudy, f"target/{number}": example.target}
    for place, images in enumerate(results.predictions.values()):
        arrays |= {f"image/{place}/{number}": image for number, image in enumerate(images)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / EXAMPLES_FILE, buffer.getvalue())
    content = {
        "rows": [asdict(row) for row in results.rows],
        "costs": {name: cost.as_dict() for name, cost in results.costs.items()},
        "examples": [{"name": e.name, "bands": list(e.bands), "reference": e.reference} for e in results.examples],
        "predictions": list(results.predictions),
        "facts": results.facts,
    }
    write_atomically(folder / SCORES_FILE, json.dumps(content).encode())


def load(folder: Path) -> Results | None:
    """Return the results of a folder, or None where there are none or they cannot be read."""
    try:
        content = json.loads((folder / SCORES_FILE).read_text(encoding="utf-8"))
        examples, predictions = _load_examples(folder / EXAMPLES_FILE, content)
        rows = [Row(**row) for row in content["rows"]]
        costs = {name: Cost(**cost) for name, cost in content["costs"].items()}
    except (OSError, ValueError, KeyError, TypeError, BadZipFile):
        return None
    return Results(rows, costs, examples, predictions, content.get("facts", {}))


def _load_examples(file: Path, content: Mapping[str, Any]) -> tuple[list[Example], dict[str, list[np.ndarray]]]:
    with np.load(file, allow_pickle=False) as arrays:
        examples = [
            Example(e["name"], tuple(e["bands"]), arrays[f"cloudy/{k}"], arrays[f"target/{k}"], e["reference"])
            for k, e in enumerate(content["examples"])
        ]
        predictions = {
            name: [arrays[f"image/{place}/{k}"] for k in range(len(examples))]
            for place, name in enumerate(content["predictions"])
        }
    return examples, predictions
