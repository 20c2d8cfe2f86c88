"""The tables of `sader reproduce`: our figures beside the published ones, merged from the rows that are there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sader._version import __version__
from sader.evaluation.bench import Bench, merge_benches
from sader.evaluation.costs import model_cost
from sader.evaluation.figures import Point
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import FIGURE_CLASSICAL, HERE, SYSTEMS, PlanRow, Table
from sader.evaluation.reproduce.rows import failure_of, load_row
from sader.evaluation.reproduce.setting import Setting
from sader.evaluation.statistics import Comparison, compare_rows
from sader.evaluation.summary import MethodSummary, plain, region_table, summarise, table_lines
from sader.evaluation.tables import CASE, cost_cells, difference_lines, write_comparison
from sader.files import write_atomically
from sader.models import BASELINES, find_config

_NAMES = {
    "psnr": "PSNR", "psnr_unbiased": "PSNR, bias removed", "ssim": "SSIM", "rmse": "RMSE", "mae": "MAE", "sam": "SAM",
    "sharpness": "sharpness", "lpips": "LPIPS",
}  # fmt: skip
_DIGITS = {"psnr": 3, "sam": 3, "rmse": 4, "mae": 4}
_UNPUBLISHED = ("psnr", "psnr_unbiased", "ssim", "sam", "sharpness", "lpips")
"""What a table that is not the paper's prints: a PSNR alone may be mean colour, or a blur (LESSONS 1, 3)."""


@dataclass(frozen=True)
class _Page:
    """What one table is written from."""

    setting: Setting
    table: Table
    task: str
    found: Sequence[tuple[PlanRow, Bench]]
    bench: Bench
    metric: str
    missing: Mapping[str, str | None]
    """Row that is not there -> why it failed; None: not run yet."""

    @property
    def title(self) -> str:
        title = f"{self.table.name} ({self.table.number}): {self.table.title}, {self.setting.label}"
        return title + (f", task {self.task}" if self.setting.dataset == HERE else "")


def write_outcome(setting: Setting, table: Table, folder: Path) -> tuple[list[Path], str]:
    """Write the table with its figures and return (files, Markdown); rows that are not there are named, with why."""
    files: list[Path] = []
    texts: list[str] = []
    for task in setting.tasks:
        rows = table.rows[setting.dataset]
        found = [(row, bench) for row in rows if (bench := load_row(setting, row, task)) is not None]
        there = {row.name for row, _ in found}
        missing = {row.name: failure_of(setting, row) for row in rows if row.name not in there}
        if not found:
            head = f"## {table.name} on {setting.label}, task {task}"
            texts.append("\n".join([head, *_missing_lines(missing)]) + "\n")
            continue
        bench = merge_benches([bench for _, bench in found])
        page = _Page(setting, table, task, found, bench, _main_metric(bench), missing)
        summary = summarise(bench.rows, metric=page.metric, seed=setting.seed)
        against = _against(setting, found)
        tested = [name for name in (page.metric, "psnr", "ssim", "sam") if name in summary.methods[0].overall]
        comparisons = (
            compare_rows(bench.rows, against=against, metrics=list(dict.fromkeys(tested)), seed=setting.seed)
            if len(bench.methods) > 1
            else []
        )
        text = _markdown(page, summary.methods, comparisons) + "\n".join(region_table(summary)) + "\n"
        points = _published_points() if setting.dataset == paper.SEN2 and table.name in ("table1", "pareto") else []
        files += write_comparison(
            folder / task if len(setting.tasks) > 1 else folder, bench, summary, comparisons, title=page.title,
            facts=_facts(page, against), text=text, published=points, shown=_shown(found),
        )  # fmt: skip
        texts.append(text)
    return files, "\n".join(texts)


def _facts(page: _Page, against: str) -> dict[str, Any]:
    """Return what belongs to the record of a table."""
    setting, table = page.setting, page.table
    return {
        "table": table.name, "dataset": setting.dataset, "task": page.task, "metric": page.metric, "against": against,
        "tiny": setting.tiny, "sader": __version__, "not_run": [k for k, why in page.missing.items() if why is None],
        "failed": {name: why for name, why in page.missing.items() if why is not None},
        "rows": {row.name: bench.facts for row, bench in page.found},
        "published": {
            "about": paper.SOURCE, "metrics": list(table.metrics.get(setting.dataset, ())),
            "protocol": paper.PROTOCOL.get(setting.dataset),
            "values": {k: list(v) for k, v in table.published.get(setting.dataset, {}).items()},
        },
    }  # fmt: skip


def _main_metric(bench: Bench) -> str:
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


def _shown(found: Sequence[tuple[PlanRow, Bench]]) -> list[str]:
    """Return the methods that figures show: of a table in parts its systems and the strongest classical methods."""
    methods = [(row, method) for row, bench in found if row.group in ("", SYSTEMS) for method in bench.methods]
    return [name for row, name in methods if not row.group or row.run is not None or name in FIGURE_CLASSICAL]


def _markdown(page: _Page, methods: Sequence[MethodSummary], comparisons: Sequence[Comparison]) -> str:
    setting, table, metric = page.setting, page.table, page.metric
    own = "mtc_" if metric.startswith("mtc_") else ""
    values = table.published.get(setting.dataset, {})
    names = list(table.metrics.get(setting.dataset, _UNPUBLISHED))
    if not values:
        names = [name for name in names if any(np.isfinite(m.overall[name].mean) for m in methods if name in m.overall)]
    by_method = {m.method: m for m in methods}
    protocol = "mtc_stretch" if own else "reflectance"
    lines = [f"## {page.title}", ""]
    if setting.tiny:
        lines += ["**Tiny networks on made data: these scores mean nothing.**", ""]
    items = len({row.item for row in page.bench.rows})
    lines += [f"Budget: {_budget(page)}. {items} items; mean over items.", ""]
    if values:
        lines += [f'"published" columns: {paper.PROTOCOL[setting.dataset]}; not measured here.', ""]
    heading = ["system", "trained: steps", "trained: s", "batch"]
    heading += [f"{_NAMES[n]}, {protocol}" if values else _NAMES[n] for n in names]
    heading += [f"{_NAMES[n]} published" for n in names if values]
    plain_names = ("psnr", "ssim", "sam") if own else ()
    heading += [f"{_NAMES[n]}, reflectance" for n in plain_names]
    heading += ["parameters M", "GMAC per forward", "GMAC per sample", "evaluations", "s / megapixel", "peak MiB"]
    groups: dict[str, list[list[str]]] = {}
    for row, one in page.found:
        for method in one.methods:
            mine = by_method[method]
            paper_values = values.get(row.name, ()) if row.run is not None else ()
            cells = [method, _whole(one.facts.get("trained_steps")), _whole(one.facts.get("trained_seconds"))]
            cells += [_batch(one.facts), *(_mean(mine, own + name, name) for name in names)]
            if values:
                cells += [f"{v:.3f}" for v in paper_values] or ["-"] * len(names)
            cells += [_mean(mine, name, name) for name in plain_names]
            groups.setdefault(row.group, []).append([*cells, *cost_cells(page.bench, method)])
    for group, rows in groups.items():
        lines += [*([f"### {group}", ""] if group else []), *table_lines(heading, rows), ""]
    lines = lines[:-1] + _missing_lines(page.missing)
    lines += difference_lines(comparisons, metric)
    if own:
        lines += difference_lines(comparisons, "psnr")
    return "\n".join(lines) + "\n"


def _budget(page: _Page) -> str:
    """Return the budget in words, with the device and what else ran on it."""
    text = page.setting.budget
    trained = [bench.facts for row, bench in page.found if row.run is not None]
    if not trained:
        return text
    text = str(trained[0].get("budget", text))
    devices = sorted({str(facts.get("device")) for facts in trained})
    together = sorted({int(facts.get("trained_at_once", 1)) for facts in trained})
    text += f" on {' or '.join(devices)}"
    if together[-1] > 1:
        count = str(together[0]) if len(together) == 1 else f"{together[0]} to {together[-1]}"
        text += f", shared by {count} trainings at a time (so s / megapixel, measured meanwhile, is no speed)"
    return text


def _missing_lines(missing: Mapping[str, str | None]) -> list[str]:
    waiting = [name for name, why in missing.items() if why is None]
    lines = ["", f"Not run yet: {', '.join(waiting)}."] if waiting else []
    failed = [f"- {name}: {why}" for name, why in missing.items() if why is not None]
    return [*lines, *(["", "Failed:", "", *failed] if failed else [])]


def _batch(facts: Mapping[str, Any]) -> str:
    """Return series a step and pixels along a side, such as 16 x 128 px."""
    if facts.get("batch_size") is None:
        return "-"
    return f"{facts['batch_size']} x {facts['crop']} px"


def write_complexity(folder: Path, table: Table) -> tuple[list[Path], str]:
    """Write the paper's Table 7: parameters and GMACs counted here beside the published ones."""
    lines = [f"## {table.name} ({table.number}): {table.title}", ""]
    lines += [f"Counted here for {CASE}; published: the paper counts one forward. A sample takes several.", ""]
    rows, facts = [], []
    for name, theirs in paper.TABLE_7.items():
        title = BASELINES[name].label if name in BASELINES else "SADER (Sen2_MTC_New, 4+1)"
        # The paper counts its guide nowhere; its masked autoencoder is counted in the sample here.
        cost = model_cost(find_config(name if name in BASELINES else "sen2_mtc_new"))
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
        Point(BASELINES[name].title if name in BASELINES else "SADER", v.psnr, v.parameters, v.gmacs, published=True)
        for name, v in paper.TABLE_7.items()
    ]


def _mean(method: MethodSummary, key: str, name: str) -> str:
    value = method.overall[key].mean if key in method.overall else float("nan")
    return f"{value:.{_DIGITS.get(name, 3)}f}" if np.isfinite(value) else "-"


def _whole(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else "-"
