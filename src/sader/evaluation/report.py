"""Files of an evaluation: Markdown table, JSON, one CSV row per item and method, pictures of best and worst cases."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sader.data.items import Item
from sader.errors import OutputError
from sader.evaluation.scoring import LOWER_IS_BETTER, Method, Row
from sader.evaluation.summary import Summary, markdown


def write_report(
    folder: Path | str,
    rows: Sequence[Row],
    summary: Summary,
    *,
    title: str,
    facts: Mapping[str, object] | None = None,
) -> list[Path]:
    """Write table.md, summary.json and items.csv into `folder` and return their paths.

    facts: what else belongs to the record, such as the command, the data and the cloud head's scores.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "table.md"
        table.write_text(markdown(summary, title=title), encoding="utf-8")
        plain = folder / "summary.json"
        content = {"title": title, **(facts or {}), **summary.as_dict()}
        plain.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        items = folder / "items.csv"
        metrics = list(dict.fromkeys(name for row in rows for name in row.scores))
        with items.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["item", "group", "task", "method", "dates", "cover", "pixels", *metrics])
            for row in rows:
                facts_of_row = [row.item, row.group, row.task, row.method, row.dates, f"{row.cover:.4f}", row.pixels]
                writer.writerow([*facts_of_row, *(f"{row.scores.get(name, np.nan):.6g}" for name in metrics)])
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"cannot write the report to {folder}: {reason}. Choose another --out.") from error
    return [table, plain, items]


def extreme_items(rows: Sequence[Row], method: str, *, metric: str = "psnr", count: int = 2) -> dict[str, list[str]]:
    """Return the names of the `count` items on which `method` is best and worst, {"best": ..., "worst": ...}."""
    mine = [row for row in rows if row.method == method and np.isfinite(row.scores[metric])]
    mine.sort(key=lambda row: row.scores[metric], reverse=metric not in LOWER_IS_BETTER)
    names = [row.item for row in mine]
    best = names[:count]
    return {"best": best, "worst": [name for name in names[::-1][:count] if name not in best]}


def write_panels(
    folder: Path | str,
    items: Sequence[Item],
    rows: Sequence[Row],
    methods: Mapping[str, Method],
    *,
    shown: str,
    baseline: str | None = None,
    count: int = 2,
) -> list[Path]:
    """Write a picture of the best and worst cases of `shown`: dates, mask, result, baseline, truth, error."""
    from sader.figures.picture import before_after, save_png

    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make {folder}: {error.strerror or error}. Choose another --out.") from error
    extremes = extreme_items(rows, shown, count=count)
    wanted = [name for names in extremes.values() for name in names]
    # A public dataset reads its items from disk: take those few, not all.
    named = getattr(items, "named", None)
    found = named(wanted) if named else [item for item in items if item.name in wanted]
    by_name = {item.name: item for item in found}
    values = {(row.item, row.method): row.scores for row in rows}
    paths = []
    for kind, names in extremes.items():
        for number, name in enumerate(names, 1):
            item = by_name[name]
            result, spread = _with_spread(methods[shown], item)
            result = np.where(item.valid.any(0), result, np.nan)
            truth = np.where(item.scored | item.kept, item.clear, np.nan)
            baselines = []
            if baseline is not None and baseline != shown and baseline in methods:
                baselines = [(f"{baseline} {values[name, baseline]['psnr']:.2f} dB", methods[baseline](item))]
            figure = before_after(
                np.where(item.valid[:, None], item.cloudy, np.nan),
                result,
                bands=item.bands,
                truth=truth,
                cloud_mask=item.cloud_mask,
                reference=item.reference,
                days=item.days,
                baselines=baselines,
                spread=spread,
                title=f"{shown}: {name}, {values[name, shown]['psnr']:.2f} dB on the scored pixels",
            )
            safe = "".join(letter if letter.isalnum() else "-" for letter in shown)
            paths.append(save_png(figure, folder / f"{safe}-{kind}{number}.png"))
    return paths


def _with_spread(method: Method, item: Item) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the image of a method and, where it states one, the error it expects."""
    predict = getattr(method, "predict", None)
    if predict is None:
        return method(item), None
    removal = predict(item)
    return removal.clear, removal.spread
