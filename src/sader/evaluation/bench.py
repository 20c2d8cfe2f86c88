"""One method after another on the same items: rows, cost, and the few images that figures show.

Shared by `compare.py` (all methods in one process) and `reproduce.py` (one process per row, merged from files). A
`Bench` is what one process knows; `merge_benches` joins several that saw the same items.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from sader.data.items import Item
from sader.errors import DataError
from sader.evaluation.costs import MethodCost, cost_of, with_memory
from sader.evaluation.gallery import Example, choose_examples, cut, example_of
from sader.evaluation.scoring import Method, Progress, Row, score_items
from sader.files import write_atomically


@dataclass(frozen=True)
class Bench:
    """Scored rows with what figures and tables need besides."""

    rows: list[Row]
    costs: dict[str, MethodCost]
    """Method -> cost."""
    examples: list[Example]
    predictions: dict[str, list[np.ndarray]]
    """Method -> its image (C, H, W) of each example."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """The scored methods in their order."""
        return list(dict.fromkeys(row.method for row in self.rows))

    def seconds_per_megapixel(self, method: str) -> float:
        """Return the median over items: the first call of a process is no measure."""
        values = [row.scores["seconds_per_megapixel"] for row in self.rows if row.method == method]
        return float(np.median(values)) if values else float("nan")


def run_bench(
    items: Sequence[Item],
    methods: Mapping[str, Method],
    metrics: Sequence[str],
    *,
    protocol: str = "reflectance",
    examples: int = 3,
    progress: Progress | None = None,
) -> Bench:
    """Score every method on every item. The first prediction of each is made twice: once to measure its memory."""
    chosen = choose_examples(items, examples)
    shown = [items[index] for index in chosen]
    recorders = {name: _Recorder(method, [item.name for item in shown]) for name, method in methods.items()}
    first = items[0]
    costs = {
        name: with_memory(cost_of(method), lambda method=method: method(first))  # type: ignore[misc]
        for name, method in methods.items()
    }
    rows = score_items(items, recorders, metrics, progress, protocol=protocol)
    predictions = {name: [recorder.seen[item.name] for item in shown] for name, recorder in recorders.items()}
    return Bench(rows, costs, [example_of(item) for item in shown], predictions)


class _Recorder:
    """A method that keeps its images of some items."""

    def __init__(self, method: Method, names: Sequence[str]) -> None:
        self.method, self.names = method, frozenset(names)
        self.seen: dict[str, np.ndarray] = {}

    def __call__(self, item: Item) -> np.ndarray:
        image = self.method(item)
        if item.name in self.names:
            self.seen[item.name] = cut(image)
        return image


def merge_benches(benches: Sequence[Bench]) -> Bench:
    """Return one bench of all methods; every one must have been scored on the same items."""
    if not benches:
        raise DataError("no row has been scored yet; expected at least one. Run the plan first.")
    names = [sorted({row.item for row in bench.rows}) for bench in benches]
    for bench, mine in zip(benches, names, strict=True):
        if mine != names[0]:
            raise DataError(
                f"{', '.join(bench.methods)} was scored on {len(mine)} items, {', '.join(benches[0].methods)} on "
                f"{len(names[0])} others; one table needs the same. Run the rows again with the same data and limits."
            )
    return Bench(
        rows=[row for bench in benches for row in bench.rows],
        costs={name: cost for bench in benches for name, cost in bench.costs.items()},
        examples=next((bench.examples for bench in benches if bench.examples), []),
        predictions={name: images for bench in benches for name, images in bench.predictions.items()},
        facts=dict(benches[0].facts),
    )


def save_bench(bench: Bench, folder: Path) -> None:
    """Write the bench as examples.npz and, last, bench.json: whoever finds the latter finds a whole bench."""
    import io

    arrays: dict[str, np.ndarray] = {}
    for number, example in enumerate(bench.examples):
        arrays |= {f"cloudy/{number}": example.cloudy, f"target/{number}": example.target}
    for place, (_, images) in enumerate(bench.predictions.items()):
        arrays |= {f"image/{place}/{number}": image for number, image in enumerate(images)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / "examples.npz", buffer.getvalue())
    plain = {
        "rows": [asdict(row) for row in bench.rows],
        "costs": {name: cost.as_dict() for name, cost in bench.costs.items()},
        "examples": [{"name": e.name, "bands": list(e.bands), "reference": e.reference} for e in bench.examples],
        "predictions": list(bench.predictions),
        "facts": bench.facts,
    }
    write_atomically(folder / "bench.json", json.dumps(plain).encode())


def load_bench(folder: Path) -> Bench | None:
    """Return the bench of a folder, or None where there is none or only part of one.

    Without its examples.npz (left out of an archive) the scores stand, and there is nothing to draw.
    """
    try:
        plain = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
        examples, predictions = _load_examples(folder / "examples.npz", plain)
        rows = [Row(**row) for row in plain["rows"]]
        costs = {name: MethodCost(**cost) for name, cost in plain["costs"].items()}
    except (OSError, ValueError, KeyError, TypeError, BadZipFile):
        return None
    return Bench(rows, costs, examples, predictions, plain.get("facts", {}))


def _load_examples(file: Path, plain: Mapping[str, Any]) -> tuple[list[Example], dict[str, list[np.ndarray]]]:
    if not file.is_file():
        return [], {}
    with np.load(file, allow_pickle=False) as arrays:
        examples = [
            Example(e["name"], tuple(e["bands"]), arrays[f"cloudy/{k}"], arrays[f"target/{k}"], e["reference"])
            for k, e in enumerate(plain["examples"])
        ]
        predictions = {
            name: [arrays[f"image/{place}/{k}"] for k in range(len(examples))]
            for place, name in enumerate(plain["predictions"])
        }
    return examples, predictions
