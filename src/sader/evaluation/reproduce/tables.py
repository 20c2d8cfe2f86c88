"""The tables of `sader reproduce`: measured figures beside the published ones, merged from the finished rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sader._version import __version__
from sader.config import plain
from sader.evaluation.costs import model_cost
from sader.evaluation.figures import Point, choose_examples, draw_loss_masks
from sader.evaluation.report import (
    CASE,
    COST_HEADING,
    Report,
    cost_cells,
    difference_lines,
    number_cell,
    region_table,
    table_lines,
    write_report,
)
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import FIGURE_CLASSICAL, HERE, SYSTEMS, TABLES, PlanRow, Table
from sader.evaluation.reproduce.setting import EUROSAT, Setting, scored_items
from sader.evaluation.scoring import LOWER_IS_BETTER, Results, load, merge
from sader.evaluation.statistics import Comparison, MethodSummary, compare_rows, summarise
from sader.files import write_atomically
from sader.models import BASELINES, get_system
from sader.training.config import resolve

_NAMES = {
    "psnr": "PSNR", "psnr_unbiased": "PSNR, bias removed", "ssim": "SSIM", "rmse": "RMSE", "mae": "MAE", "sam": "SAM",
    "sharpness": "sharpness", "lpips": "LPIPS",
}  # fmt: skip
_UNPUBLISHED = ("psnr", "psnr_unbiased", "ssim", "sam", "sharpness", "lpips")
"""Metrics of a table that is not in the paper: PSNR alone may reward the mean colour or a blur."""


@dataclass(frozen=True)
class _Page:
    """The content of one table."""

    setting: Setting
    table: Table
    task: str
    found: Sequence[tuple[PlanRow, Results]]
    results: Results
    metric: str
    missing: Mapping[str, str | None]
    """Unfinished row -> the reason of its failure; None: not run."""

    @property
    def title(self) -> str:
        title = f"{self.table.name} ({self.table.number}): {self.table.title}, {self.setting.label}"
        return title + (f", task {self.task}" if self.setting.dataset == HERE else "")


def row_folder(setting: Setting, row: PlanRow, task: str) -> Path:
    """Return the folder of a row's scores."""
    return setting.out / "rows" / setting.label / task / row.name


def failure_file(setting: Setting, row: PlanRow) -> Path:
    """Return the file with the reason of a row's failure."""
    return setting.out / "rows" / setting.label / "failed" / f"{row.name}.json"


def _failure(setting: Setting, row: PlanRow) -> str | None:
    try:
        return str(json.loads(failure_file(setting, row).read_text(encoding="utf-8"))["reason"])
    except (OSError, ValueError, KeyError):
        return None


def write_table(setting: Setting, table: Table, folder: Path) -> tuple[list[Path], str]:
    """Write the table with its figures and return (files, Markdown); unfinished rows are listed with the reason."""
    files: list[Path] = []
    texts: list[str] = []
    seed = setting.request.seed
    for task in setting.tasks:
        rows = table.rows[setting.dataset]
        found = [(row, part) for row in rows if (part := load(row_folder(setting, row, task))) is not None]
        finished = {row.name for row, _ in found}
        missing = {row.name: _failure(setting, row) for row in rows if row.name not in finished}
        if not found:
            head = f"## {table.name} on {setting.label}, task {task}"
            texts.append("\n".join([head, *_missing_lines(missing)]) + "\n")
            continue
        results = merge([part for _, part in found])
        metric = "mtc_psnr" if "mtc_psnr" in results.rows[0].scores else "psnr"  # under the dataset's protocol
        page = _Page(setting, table, task, found, results, metric, missing)
        summary = summarise(results.rows, metric=page.metric, seed=seed)
        against = _against(setting, found)
        tested = [name for name in (page.metric, "psnr", "ssim", "sam") if name in summary.methods[0].overall]
        comparisons = (
            compare_rows(results.rows, against=against, metrics=list(dict.fromkeys(tested)), seed=seed)
            if len(results.methods) > 1
            else []
        )
        text = _markdown(page, summary.methods, comparisons) + "\n".join(region_table(summary)) + "\n"
        published = _published_points() if setting.dataset == paper.SEN2 and table.name in ("table1", "pareto") else []
        report = Report(page.title, replace(results, facts=_facts(page, against)), summary, comparisons, page.metric)
        target = folder / task if len(setting.tasks) > 1 else folder
        files += write_report(target, report, text=text, published=published, shown=_shown(found))
        texts.append(text)
    return files, "\n".join(texts)


def _facts(page: _Page, against: str) -> dict[str, Any]:
    """Return the settings that belong to the record of a table."""
    setting, table = page.setting, page.table
    return {
        "table": table.name,
        "dataset": setting.dataset,
        "task": page.task,
        "metric": page.metric,
        "against": against,
        "tiny": setting.request.tiny,
        "sader": __version__,
        "not_run": [name for name, why in page.missing.items() if why is None],
        "failed": {name: why for name, why in page.missing.items() if why is not None},
        "rows": {row.name: part.facts for row, part in page.found},
        "published": {
            "about": paper.SOURCE,
            "metrics": list(table.metrics.get(setting.dataset, ())),
            "protocol": paper.PROTOCOL.get(setting.dataset),
            "values": {k: list(v) for k, v in table.published.get(setting.dataset, {}).items()},
        },
    }


def _against(setting: Setting, found: Sequence[tuple[PlanRow, Results]]) -> str:
    """Return the label of the row the others are compared with: SADER as the table has it, else the first row."""
    order = ("sader", "sader-5+0", "mae-guided", "small", "5+1" if setting.dataset == paper.TS else "4+1")
    by_name = {row.name: row for row, _ in found}
    for name in order:
        if name in by_name:
            return by_name[name].title
    return found[0][1].methods[0]


def _shown(found: Sequence[tuple[PlanRow, Results]]) -> list[str]:
    """Return the methods that figures show: of a table in parts its systems and the strongest classical methods."""
    methods = [(row, method) for row, part in found if row.group in ("", SYSTEMS) for method in part.methods]
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
    if setting.request.tiny:
        lines += ["**Tiny networks on synthetic data: these scores mean nothing.**", ""]
    items = len({row.item for row in page.results.rows})
    lines += [f"Budget: {_budget(page)}. {items} items; mean over items.", ""]
    if values:
        lines += [f'"published" columns: {paper.PROTOCOL[setting.dataset]}; not measured here.', ""]
    if "lpips" in names and own + "lpips" not in methods[0].overall:
        lines += ['LPIPS is not scored; it needs `pip install "sader[lpips]"`.', ""]
    if data := {str(one.facts["guide_data"]) for _, one in page.found if "guide_data" in one.facts}:
        lines += [f"Guides were trained on {' and '.join(sorted(data))}; the paper's on {EUROSAT}.", ""]
    heading = ["system", "trained: steps", "trained: series", "trained: s", "batch"]
    heading += [f"{_NAMES[n]}, {protocol}" if values else _NAMES[n] for n in names]
    heading += [f"{_NAMES[n]} published" for n in names if values]
    plain_names = ("psnr", "ssim", "sam") if own else ()
    heading += [f"{_NAMES[n]}, reflectance" for n in plain_names]
    heading += COST_HEADING
    groups: dict[str, list[list[str]]] = {}
    for row, one in page.found:
        for method in one.methods:
            mine = by_method[method]
            paper_values = values.get(row.name, ()) if row.run is not None else ()
            cells = [
                method,
                *(number_cell(one.facts.get(key), 0) for key in ("trained_steps", "series_seen", "trained_seconds")),
            ]
            batch = one.facts.get("batch_size")
            cells.append("-" if batch is None else f"{batch} x {one.facts['crop']} px")
            cells += [_mean(mine, own + name, name) for name in names]
            if values:
                cells += [f"{v:.3f}" for v in paper_values] or ["-"] * len(names)
            cells += [_mean(mine, name, name) for name in plain_names]
            groups.setdefault(row.group, []).append([*cells, *cost_cells(page.results, method)])
    if table.name in ("table1", "table2"):
        costs = ["-"] * (len(plain_names) + len(COST_HEADING))
        ours = {row.name: by_method[row.title] for row, _ in page.found if row.run is not None}
        means = {row: [_value(mine, own + n) for n in names] for row, mine in ours.items()}
        cells = [*improvement(means, names), *improvement(values, names)]
        groups[""].append(["improvement over the best baseline", *["-"] * 4, *cells, *costs])
    for group, rows in groups.items():
        lines += [*([f"### {group}", ""] if group else []), *table_lines(heading, rows), ""]
    lines = lines[:-1] + _missing_lines(page.missing) + _remark_lines(row for row, _ in page.found)
    lines += difference_lines(comparisons, metric)
    if own:
        lines += difference_lines(comparisons, "psnr")
    return "\n".join(lines) + "\n"


def improvement(values: Mapping[str, Sequence[float]], names: Sequence[str]) -> list[str]:
    """Return by how much SADER is better than the best baseline in each metric, such as +3.42 %."""
    cells = []
    for number, name in enumerate(names):
        others = [row[number] for key, row in values.items() if key != "sader" and np.isfinite(row[number])]
        if "sader" not in values or not others:
            cells.append("-")
            continue
        lower = name in LOWER_IS_BETTER
        best = min(others) if lower else max(others)
        gain = (values["sader"][number] - best) / best * (-1 if lower else 1)
        cells.append(f"{gain:+.2%}" if np.isfinite(gain) else "-")
    return cells


def _budget(page: _Page) -> str:
    """Return the training budget and the devices in words."""
    trained = [part.facts for row, part in page.found if row.run is not None]
    if not trained:
        return page.setting.budget
    devices = sorted({str(facts.get("device")) for facts in trained})
    return f"{trained[0].get('budget', page.setting.budget)} on {' or '.join(devices)}"


def _missing_lines(missing: Mapping[str, str | None]) -> list[str]:
    waiting = [name for name, why in missing.items() if why is None]
    lines = ["", f"Not run: {', '.join(waiting)}."] if waiting else []
    failed = [f"- {name}: {why}" for name, why in missing.items() if why is not None]
    return [*lines, *(["", "Failed:", "", *failed] if failed else [])]


def _remark_lines(rows: Iterable[PlanRow]) -> list[str]:
    """Return what differs from the publication of a system, one line each."""
    names = dict.fromkeys(row.run.base for row in rows if row.run is not None and row.run.base in BASELINES)
    lines = [f"- {get_system(name).title}: {text}" for name in names if (text := get_system(name).remarks)]
    return ["", "Remarks:", "", *lines] if lines else []


def write_complexity(folder: Path, table: Table) -> tuple[list[Path], str]:
    """Write the paper's Table 7: parameters and GMACs counted here beside the published ones."""
    lines = [f"## {table.name}: {table.title}", ""]
    lines += [f"Counted for {CASE}; the published figures are of one forward, and a sample takes several.", ""]
    rows, facts = [], []
    runs = {row.name: (row.title, row.run) for row in TABLES["table1"].rows[paper.SEN2]}
    for name, theirs in paper.TABLE_7.items():
        title, run = runs[name]
        assert run is not None
        # The paper does not count its guide; the sample here includes the masked autoencoder of the preset.
        cost = model_cost(resolve(run.base, run.overrides).model)
        parameters = cost.parameters / 1e6
        rows.append([
            title, f"{parameters:.2f}", f"{theirs.parameters:.2f}", f"{parameters / theirs.parameters - 1:+.1%}",
            f"{cost.gmacs_forward:.2f}", f"{theirs.gmacs:.2f}", f"{cost.gmacs_forward / theirs.gmacs - 1:+.1%}",
            f"{cost.gmacs_sample:.2f}", str(cost.evaluations), f"{theirs.psnr:.3f}",
            _gmac_note(name, cost.gmacs_forward / theirs.gmacs),
        ])  # fmt: skip
        facts.append({"system": name, "title": title, "ours": asdict(cost), "published": theirs._asdict()})
    heading = [
        "system", "parameters M", "published", "difference", "GMAC per forward", "published", "difference",
        "GMAC per sample", "evaluations", "PSNR published", "note",
    ]  # fmt: skip
    text = "\n".join([*lines, *table_lines(heading, rows)]) + "\n"
    write_atomically(folder / "table.md", text.encode())
    write_atomically(folder / "summary.json", json.dumps(plain({"systems": facts}), indent=2).encode())
    return [folder / "table.md", folder / "summary.json"], text


def _gmac_note(system: str, ratio: float) -> str:
    """Return the reason of a difference of GMACs above 5 %, if it is known."""
    if abs(ratio - 1) <= 0.05:
        return ""
    known = get_system(system).remarks if system in BASELINES else ""
    return known or "not explained: the published counter is not known"


def write_loss_masks(setting: Setting, table: Table, folder: Path) -> tuple[list[Path], str]:
    """Write the figure of the pixel weights of the loss for a few items, and return (files, Markdown)."""
    from sader.figures.picture import save_png

    items, _, facts = scored_items(setting, "paper")
    chosen = [items[number] for number in choose_examples(items, max(1, setting.request.examples))]
    title = f"{table.name}: {table.title}, {setting.label}"
    file = save_png(draw_loss_masks(chosen, title=title), folder / "loss-masks.png")
    return [file], f"## {title}\n\n{len(chosen)} of {facts['items']} items.\n"


def _published_points() -> list[Point]:
    """Return the paper's own points, with the GMACs of one forward."""
    return [
        Point(get_system(name).title if name in BASELINES else "SADER", v.psnr, v.parameters, v.gmacs, published=True)
        for name, v in paper.TABLE_7.items()
    ]


def _value(method: MethodSummary, key: str) -> float:
    return method.overall[key].mean if key in method.overall else float("nan")


def _mean(method: MethodSummary, key: str, name: str) -> str:
    return number_cell(_value(method, key), 4 if name in ("rmse", "mae") else 3)
