"""The tables of `sader reproduce`: our figures beside the published ones, merged from the rows that are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sader._version import __version__
from sader.baselines.registry import RIVALS, find_config
from sader.checkpoint import write_atomically
from sader.evaluation import published as paper
from sader.evaluation.bench import Bench, merge_benches
from sader.evaluation.costs import model_cost
from sader.evaluation.pareto import Point
from sader.evaluation.plans import HERE, PlanRow, Table
from sader.evaluation.rows import Setting, load_row
from sader.evaluation.significance import Comparison, compare_rows
from sader.evaluation.summary import MethodSummary, plain, region_table, summarise, table_lines
from sader.evaluation.tables import CASE, cost_cells, difference_lines, write_comparison

_NAMES = {"psnr": "PSNR", "ssim": "SSIM", "rmse": "RMSE", "mae": "MAE", "sam": "SAM", "lpips": "LPIPS"}
_DIGITS = {"psnr": 3, "sam": 3, "rmse": 4, "mae": 4}


def write_outcome(setting: Setting, table: Table, folder: Path) -> tuple[list[Path], str]:
    """Write the table with its figures and return (files, Markdown); rows that have not been run are named."""
    files: list[Path] = []
    texts: list[str] = []
    for task in setting.tasks:
        rows = table.rows[setting.dataset]
        found = [(row, bench) for row in rows if (bench := load_row(setting, row, task)) is not None]
        missing = [row.name for row in rows if row.name not in {done.name for done, _ in found}]
        if not found:
            texts.append(f"## {table.name} on {setting.label}, task {task}\n\nnot run yet: {', '.join(missing)}\n")
            continue
        bench = merge_benches([bench for _, bench in found])
        metric = _main_metric(setting, bench)
        summary = summarise(bench.rows, metric=metric, seed=setting.seed)
        against = _against(setting, found)
        several = len(bench.methods) > 1
        tested = [name for name in (metric, "psnr", "ssim", "sam") if name in summary.methods[0].overall]
        comparisons = (
            compare_rows(bench.rows, against=against, metrics=list(dict.fromkeys(tested)), seed=setting.seed)
            if several
            else []
        )
        title = f"{table.name} ({table.number}): {table.title}, {setting.label}"
        title += f", task {task}" if setting.dataset == HERE else ""
        text = _markdown(setting, table, found, bench, summary.methods, comparisons, metric, missing, title, task)
        text += "\n".join(region_table(summary)) + "\n"
        facts: dict[str, Any] = {
            "table": table.name, "dataset": setting.dataset, "task": task, "metric": metric, "against": against,
            "tiny": setting.tiny, "sader": __version__, "not_run": missing,
            "rows": {row.name: bench.facts for row, bench in found},
            "published": {
                "about": paper.SOURCE, "metrics": list(table.metrics.get(setting.dataset, ())),
                "protocol": paper.PROTOCOL.get(setting.dataset),
                "values": {k: list(v) for k, v in table.published.get(setting.dataset, {}).items()},
            },
        }  # fmt: skip
        points = _published_points() if setting.dataset == paper.SEN2 and table.name in ("table1", "pareto") else []
        where = folder / task if len(setting.tasks) > 1 else folder
        files += write_comparison(
            where, bench, summary, comparisons, title=title, facts=facts, text=text, published=points
        )
        texts.append(text)
    return files, "\n".join(texts)


def _main_metric(setting: Setting, bench: Bench) -> str:
    """Return the metric of the paper's table: PSNR under the dataset's protocol."""
    return "mtc_psnr" if "mtc_psnr" in bench.rows[0].scores else "psnr"


def _against(setting: Setting, found: Sequence[tuple[PlanRow, Bench]]) -> str:
    """Return the label of the row the others are compared with: SADER as the table has it, else the first row."""
    order = ("sader", "sader-5+0", "mae-guided", "small", "5+1" if setting.dataset == paper.TS else "4+1")
    by_name = {row.name: row for row, _ in found}
    for name in order:
        if name in by_name:
            return by_name[name].title
    return found[0][1].methods[0]


def _markdown(
    setting: Setting,
    table: Table,
    found: Sequence[tuple[PlanRow, Bench]],
    bench: Bench,
    methods: Sequence[MethodSummary],
    comparisons: Sequence[Comparison],
    metric: str,
    missing: Sequence[str],
    title: str,
    task: str,
) -> str:
    own = "mtc_" if metric.startswith("mtc_") else ""
    names = list(table.metrics.get(setting.dataset, ("psnr", "ssim", "sam", "lpips")))
    values = table.published.get(setting.dataset, {})
    if not values:
        names = [name for name in names if any(np.isfinite(m.overall[name].mean) for m in methods if name in m.overall)]
    by_method = {m.method: m for m in methods}
    protocol = "mtc_stretch" if own else "reflectance"
    lines = [f"## {title}", ""]
    if setting.tiny:
        lines += ["**Tiny networks on made data: these scores mean nothing.**", ""]
    lines += [f"Budget: {setting.budget}. {len({row.item for row in bench.rows})} items; mean over items.", ""]
    if values:
        lines += [f'"published" columns: {paper.PROTOCOL[setting.dataset]}; not measured here.', ""]
    heading = ["system", "trained: steps", "trained: s", *(f"{_NAMES[n]}, {protocol}" for n in names)]
    heading += [f"{_NAMES[n]} published" for n in names if values]
    plain_names = ("psnr", "ssim", "sam") if own else ()
    heading += [f"{_NAMES[n]}, reflectance" for n in plain_names]
    heading += ["parameters M", "GMAC per forward", "GMAC per sample", "evaluations", "s / megapixel", "peak MiB"]
    rows = []
    for row, one in found:
        for method in one.methods:
            mine = by_method[method]
            paper_values = values.get(row.name, ()) if row.run is not None else ()
            cells = [method, _whole(one.facts.get("trained_steps")), _whole(one.facts.get("trained_seconds"))]
            cells += [_mean(mine, own + name, name) for name in names]
            if values:
                cells += [f"{v:.3f}" for v in paper_values] or ["-"] * len(names)
            cells += [_mean(mine, name, name) for name in plain_names]
            rows.append([*cells, *cost_cells(bench, method)])
    lines += table_lines(heading, rows)
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    lines += difference_lines(comparisons, metric)
    if own:
        lines += difference_lines(comparisons, "psnr")
    return "\n".join(lines) + "\n"


def write_complexity(folder: Path, table: Table) -> tuple[list[Path], str]:
    """Write the paper's Table 7: parameters and GMACs counted here beside the published ones."""
    lines = [f"## {table.name} ({table.number}): {table.title}", ""]
    lines += [f"Counted here for {CASE}; published: the paper counts one forward. A sample takes several.", ""]
    rows, facts = [], []
    for name, theirs in paper.TABLE_7.items():
        title = RIVALS[name].label if name in RIVALS else "SADER (Sen2_MTC_New, 4+1)"
        # The paper counts its guide nowhere; its masked autoencoder is counted in the sample here.
        cost = model_cost(find_config(name if name in RIVALS else "sen2_mtc_new"))
        parameters = (cost.parameters or 0) / 1e6
        rows.append([
            title, f"{parameters:.2f}", f"{theirs.parameters:.2f}", f"{parameters / theirs.parameters - 1:+.1%}",
            f"{cost.gmacs_forward:.2f}", f"{theirs.gmacs:.2f}", f"{cost.gmacs_sample:.2f}", str(cost.evaluations),
            f"{theirs.psnr:.3f}",
        ])  # fmt: skip
        facts.append({"system": name, "title": title, "ours": cost.as_dict(), "published": theirs._asdict()})
    heading = [
        "system", "parameters M", "published", "difference", "GMAC per forward", "published", "GMAC per sample",
        "evaluations", "PSNR published",
    ]  # fmt: skip
    text = "\n".join([*lines, *table_lines(heading, rows)]) + "\n"
    write_atomically(folder / "table.md", text.encode())
    write_atomically(folder / "summary.json", json.dumps(plain({"systems": facts}), indent=2).encode())
    return [folder / "table.md", folder / "summary.json"], text


def _published_points() -> list[Point]:
    """Return the paper's own points; it gives the GMACs of one forward only."""
    return [
        Point(RIVALS[name].title if name in RIVALS else "SADER", v.psnr, v.parameters, v.gmacs, published=True)
        for name, v in paper.TABLE_7.items()
    ]


def _mean(method: MethodSummary, key: str, name: str) -> str:
    value = method.overall[key].mean if key in method.overall else float("nan")
    return f"{value:.{_DIGITS.get(name, 3)}f}" if np.isfinite(value) else "-"


def _whole(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else "-"
