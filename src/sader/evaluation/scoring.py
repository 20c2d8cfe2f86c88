"""Scores of several methods on the same items, on the scored pixels only; results written to a folder and merged.

A method is any callable from an `Item` to an image. `sader compare` scores all methods in one process; `sader
reproduce` scores each row of a table on its own and merges the folders.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from sader.bands import rgb_indices
from sader.data.items import Item
from sader.errors import ConfigError, DataError, ShapeError, ValueRangeError, check_known
from sader.evaluation.costs import Cost
from sader.evaluation.figures import Example
from sader.files import write_atomically
from sader.method.lpips import SMALLEST_SIDE, default_lpips
from sader.method.metrics import METRICS, evaluate

Method = Callable[[Item], np.ndarray]
"""(Item) -> (C, H, W) reflectance."""
Progress = Callable[[int, str], None]
"""Called with the number of items done and the name of the one that follows."""

DEFAULT_METRICS = ("psnr", "psnr_unbiased", "ssim", "sam", "rmse", "mae", "sharpness")
PUBLISHED_METRICS = ("psnr", "ssim", "rmse", "mae", "lpips")
"""Metrics of the published Sen2_MTC tables, under `mtc_stretch`."""
REGIONS = ("cloudy", "clear")
"""Parts of an image that are scored separately; see `regions`."""
REGION_METRICS = ("psnr", "ssim", "sam", "rmse", "mae")
LEAST_REGION = 64
"""A region of fewer pixels gets no score (NaN)."""
LOWER_IS_BETTER = frozenset(
    {
        *("sam", "rmse", "mae", "lpips", "seconds", "seconds_per_megapixel", "clear_mae"),
        *("mtc_rmse", "mtc_mae", "mtc_lpips"),
        *(f"{name}_{region}" for name in ("sam", "rmse", "mae") for region in REGIONS),
    }
)


@dataclass(frozen=True)
class Row:
    """The scores of one method on one item."""

    item: str
    group: str
    task: str
    method: str
    dates: int
    cover: float
    """Part of the observed input pixels under cloud or shadow."""
    pixels: int
    """Scored pixels."""
    scores: dict[str, float]
    """Metric -> value; also `psnr_cloudy`, `psnr_clear` and so on (`regions`), `unchanged` (share of the reference's
    clear pixels that come out bit for bit) and `clear_mae` (mean change of those pixels), NaN without a reference; and
    `seconds` and `seconds_per_megapixel`."""


def score_items(
    items: Iterable[Item],
    methods: Mapping[str, Method],
    metrics: Sequence[str] = DEFAULT_METRICS,
    progress: Progress | None = None,
    *,
    protocol: str = "reflectance",
) -> list[Row]:
    """Return one row per item and method, in that order.

    `protocol` "mtc_stretch" adds the published figures of Sen2_MTC beside plain reflectance: mtc_psnr and so on.
    """
    known = [*METRICS, "lpips"]
    for name in metrics:
        check_known("metric", name, known)
    if not methods:
        raise ConfigError("no method given; expected at least one to score.")
    rows = []
    for number, item in enumerate(items):
        if progress is not None:
            progress(number, item.name)
        for name, method in methods.items():
            started = time.perf_counter()
            image = method(item)
            seconds = time.perf_counter() - started
            scores = score(item, image, metrics, method=name)
            if protocol == "mtc_stretch":
                scores |= stretched_scores(item, image, lpips="lpips" in metrics)
            scores |= region_scores(item, image, scores)
            clock = {"seconds": seconds, "seconds_per_megapixel": seconds * 1e6 / item.scored.size}
            rows.append(
                Row(
                    item=item.name,
                    group=item.group,
                    task=item.task,
                    method=name,
                    dates=len(item.cloudy),
                    cover=item.cover,
                    pixels=int(item.scored.sum()),
                    scores={**scores, **_kept_scores(item, image), **clock},
                )
            )
    return rows


def score(
    item: Item, image: np.ndarray, metrics: Sequence[str] = DEFAULT_METRICS, *, method: str = "the method"
) -> dict[str, float]:
    """Return metric -> value of `image` (C, H, W) on the item's scored pixels.

    Outside the scored pixels the image is first replaced by the truth, because the windows of SSIM and LPIPS extend
    beyond them. LPIPS gets red, green and blue scaled so that the target's 99 % quantile is white.
    """
    if image.shape != item.clear.shape:
        raise ShapeError(f"{method} returned {image.shape} for {item.name}; expected (C, H, W) = {item.clear.shape}.")
    if not np.isfinite(image[:, item.scored]).all():
        raise ValueRangeError(
            f"{method} returned NaN or infinity on scored pixels of {item.name}; expected reflectance."
        )
    prediction = torch.from_numpy(np.where(item.scored, image, item.clear).astype(np.float32))[None]
    target = torch.from_numpy(item.clear)[None]
    mask = torch.from_numpy(item.scored)[None]
    plain = [name for name in metrics if name != "lpips"]
    # In channels-last memory SSIM takes a third and the spectral angle a tenth of the time.
    pair = (x.contiguous(memory_format=torch.channels_last) for x in (prediction, target))
    values = evaluate(*pair, metrics=plain, mask=mask) if plain else {}
    scores = {name: float(value) for name, value in values.items()}
    if "lpips" in metrics:
        scores["lpips"] = _lpips(item, prediction, target, mask)
    return {name: scores[name] for name in metrics}


def regions(item: Item) -> dict[str, np.ndarray]:
    """Return the cloudy and the clear pixels, bool (H, W) each, among those with a known truth.

    With a date to clean: scored pixels hidden in it, and its own clear pixels, which should stay unchanged. Without
    one: scored pixels hidden in any date, and pixels clear in every date.
    """
    if item.reference is not None:
        return {"cloudy": item.scored & item.cloud_mask[item.reference], "clear": item.kept}
    hidden = (item.cloud_mask | ~item.valid).any(0)
    return {"cloudy": item.scored & hidden, "clear": item.scored & ~hidden}


def region_scores(item: Item, image: np.ndarray, overall: Mapping[str, float]) -> dict[str, float]:
    """Return psnr_cloudy, ..., mae_clear of `image` (C, H, W); `overall`: the scores of all scored pixels."""
    scores: dict[str, float] = {}
    for region, pixels in regions(item).items():
        if pixels.sum() < LEAST_REGION or not np.isfinite(image[:, pixels]).all():
            values = dict.fromkeys(REGION_METRICS, float("nan"))
        elif np.array_equal(pixels, item.scored) and set(REGION_METRICS) <= set(overall):
            values = {name: overall[name] for name in REGION_METRICS}
        else:
            values = score(replace(item, scored=pixels), image, REGION_METRICS)
        scores |= {f"{name}_{region}": value for name, value in values.items()}
    return scores


def stretched_scores(item: Item, image: np.ndarray, *, lpips: bool = False) -> dict[str, float]:
    """Return mtc_psnr, mtc_ssim, mtc_rmse, mtc_mae, mtc_lpips: protocol `mtc_stretch` on the whole image, as published.

    Pixels without a value (NaN) count as black; the stretch clips the image to [0, 1].
    """
    wanted = [name for name in PUBLISHED_METRICS if name != "lpips" or lpips]
    if min(item.scored.shape) < SMALLEST_SIDE and lpips:
        wanted.remove("lpips")
    images = (torch.from_numpy(np.nan_to_num(x.astype(np.float32)))[None] for x in (image, item.clear))
    with torch.no_grad():
        values = evaluate(*images, protocol="mtc_stretch", metrics=wanted, rgb=rgb_indices(item.bands))
    scores = {name: float(values[name]) if name in values else float("nan") for name in PUBLISHED_METRICS}
    return {f"mtc_{name}": value for name, value in scores.items() if name != "lpips" or lpips}


def _lpips(item: Item, prediction: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> float:
    """Return LPIPS of stretched pictures: raw reflectance is nearly black, where LPIPS is insensitive."""
    if min(item.scored.shape) < SMALLEST_SIDE:
        return float("nan")
    colours = list(rgb_indices(item.bands))
    white = max(float(np.quantile(item.clear[colours][:, item.scored], 0.99)), 1e-3)
    with torch.no_grad():
        network = default_lpips(prediction.device)
        a, b = ((x[:, colours] / white).clamp(0, 1) for x in (prediction, target))
        return float(network(a, b, mask))


def _kept_scores(item: Item, image: np.ndarray) -> dict[str, float]:
    """Return the change of the clear pixels of the reference date, which every method should keep."""
    kept = item.kept
    if item.reference is None or not kept.any():
        return {"unchanged": float("nan"), "clear_mae": float("nan")}
    change = np.abs(image[:, kept] - item.cloudy[item.reference][:, kept])
    return {"unchanged": float((change == 0).all(0).mean()), "clear_mae": float(np.nan_to_num(change, nan=1.0).mean())}


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


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a compressed NumPy archive, complete or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(file, buffer.getvalue())


def save(results: Results, folder: Path) -> None:
    """Write examples.npz and then scores.json: where the second exists, the results are complete."""
    arrays: dict[str, np.ndarray] = {}
    for number, example in enumerate(results.examples):
        arrays |= {f"cloudy/{number}": example.cloudy, f"target/{number}": example.target}
    for place, images in enumerate(results.predictions.values()):
        arrays |= {f"image/{place}/{number}": image for number, image in enumerate(images)}
    write_arrays(folder / EXAMPLES_FILE, arrays)
    content = {
        "rows": [asdict(row) for row in results.rows],
        "costs": {name: asdict(cost) for name, cost in results.costs.items()},
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
