"""The report of an evaluation: Markdown tables, JSON, one CSV row per item and method, figures and pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sader.config import plain
from sader.data.items import Item
from sader.data.public.registry import DatasetItems
from sader.evaluation.figures import Point, draw_gallery, draw_pareto, pareto_front
from sader.evaluation.methods import CONTROL, with_spread
from sader.evaluation.scoring import LOWER_IS_BETTER, REGION_METRICS, REGIONS, Method, Results, Row
from sader.evaluation.statistics import Comparison, Interval, Summary
from sader.files import write_atomically

CASE = "T = 3, 256x256"
COST_HEADING = ("parameters M", "GMAC per forward", "GMAC per sample", "evaluations", "s / megapixel", "peak MiB")
HEADINGS = {
    "psnr": "PSNR dB", "psnr_unbiased": "PSNR, bias removed", "ssim": "SSIM", "sam": "SAM °", "rmse": "RMSE",
    "mae": "MAE",
    "lpips": "LPIPS", "sharpness": "sharpness", "unchanged": "clear pixels unchanged", "clear_mae": "their change",
    "seconds": "s / item", "mtc_psnr": "PSNR dB, mtc_stretch", "mtc_ssim": "SSIM, mtc_stretch",
    "mtc_lpips": "LPIPS, mtc_stretch", "seconds_per_megapixel": "s / megapixel",
}  # fmt: skip
_BY_REGION = tuple(f"{name}_{region}" for region in REGIONS for name in REGION_METRICS)
_ONLY_IN_FILES = ("rmse", "mae", "clear_mae", "seconds", "seconds_per_megapixel", "mtc_rmse", "mtc_mae", *_BY_REGION)
"""In the JSON and the CSV, not in the Markdown tables."""
_DIGITS = dict.fromkeys(("psnr", "psnr_unbiased", "sam", "sharpness", "seconds", "seconds_per_megapixel"), 2)
_DIGITS |= dict.fromkeys(("rmse", "mae", "mtc_rmse", "mtc_mae"), 4) | {"clear_mae": 5}
"""Digits of a metric in tables; 3 for the others."""


@dataclass(frozen=True)
class Report:
    """The content of a report; a comparison has paired tests, and results with costs and examples."""

    title: str
    results: Results
    summary: Summary
    comparisons: Sequence[Comparison] = ()
    metric: str = "psnr"
    """The metric of the tests in the table and of the Pareto figure."""


def markdown(report: Report) -> str:
    """Return the tables: means with intervals, regions, places, differences to the best classical method.

    A comparison adds the paired tests and the costs.
    """
    summary = report.summary
    if not summary.methods:
        return "no item was scored\n"
    known = list(summary.methods[0].overall)
    shown = [name for name in known if name not in _ONLY_IN_FILES]
    lines = [f"## {report.title}", ""] if report.title else []
    lines += [counted(summary), ""]
    lines += table_lines(
        ["method", *(HEADINGS.get(name, name) for name in shown)],
        [[m.method, *(score_cell(m.overall[name], name) for name in shown)] for m in summary.methods],
    )
    lines += region_table(summary)
    lines += calibration_lines(report.results)
    lines += _place_table(summary)
    if summary.best_classical is not None and len(summary.methods) > 1:
        lines += ["", f"Difference to {summary.best_classical}, paired by item [95 % interval]:", ""]
        compared = [name for name in shown if name != "unchanged"]
        lines += table_lines(
            ["method", *(HEADINGS.get(name, name) for name in compared)],
            [
                [m.method, *(score_cell(m.against[name], name, sign=True) for name in compared)]
                for m in summary.methods
                if m.against
            ],
        )
    lines += difference_lines(report.comparisons, report.metric)
    lines += cost_lines(report.results)
    return "\n".join(lines) + "\n"


def _place_table(summary: Summary) -> list[str]:
    places = list(dict.fromkeys(group for m in summary.methods for group in m.groups))
    if "psnr" not in summary.methods[0].overall or not places:
        return []
    rows = []
    for m in summary.methods:
        values = [m.groups.get(place, {}).get("psnr") for place in places]
        rows.append([m.method, *(number_cell(value, 2) for value in (*values, m.over_groups["psnr"]))])
    lines = table_lines(["method", *places, "mean over places"], rows)
    return ["", "PSNR by place, and the mean over places:", "", *lines]


def counted(summary: Summary) -> str:
    """Return the sentence with the number of items and places."""
    items = "1 item" if summary.items == 1 else f"{summary.items} items"
    places = "1 place" if summary.groups == 1 else f"{summary.groups} places"
    if summary.items == 1:
        return f"{items} in {places}: too few for intervals, and for any conclusion."
    return f"{items} in {places}; mean over items [95 % bootstrap interval]."


def print_summary(report: Report) -> None:
    """Print the main metrics as one table for a terminal; the files of --out hold all of them."""
    from rich.console import Console
    from rich.table import Table

    summary, console = report.summary, Console()
    console.print(f"{report.title}: {counted(summary)}", highlight=False)
    if not summary.methods:
        return
    known = summary.methods[0].overall
    shown = [name for name in ("psnr", "ssim", "sam", "lpips", "sharpness") if name in known]
    table = Table()
    table.add_column("method", overflow="fold")
    for name in shown:
        table.add_column(HEADINGS[name], justify="right", no_wrap=True)
    best = summary.best_classical
    if best is not None:
        table.add_column(f"PSNR dB against {best}", justify="right")
    for method in summary.methods:
        cells = [_number(method.overall[name].mean, name) for name in shown]
        if best is not None:
            cells.append(score_cell(method.against["psnr"], "psnr", sign=True) if "psnr" in method.against else "")
        table.add_row(method.method, *cells)
    console.print(table, highlight=False)
    if lines := calibration_lines(report.results):
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def region_table(summary: Summary) -> list[str]:
    """Return the lines of the table of cloudy and clear regions; none where the rows lack region scores."""
    shown = [f"{name}_{region}" for region in REGIONS for name in ("psnr", "ssim", "mae")]
    if not summary.methods or not set(shown) <= set(summary.methods[0].overall):
        return []
    about = "cloudy: hidden in the date to clean, or in any date where no date is to be cleaned; clear: not hidden."
    heading = ["method", *(f"{region} {HEADINGS[name]}" for region in REGIONS for name in ("psnr", "ssim", "mae"))]
    rows = [
        [m.method, *(score_cell(m.overall[name], name.rpartition("_")[0]) for name in shown)] for m in summary.methods
    ]
    return ["", f"By region ({about})", "", *table_lines(heading, rows)]


def calibration_lines(results: Results) -> list[str]:
    """Return the lines of the table that compares expected and true errors; none where no method states its error."""
    start = "calibration of "
    found = {name.removeprefix(start): fact for name, fact in results.facts.items() if name.startswith(start)}
    columns = {
        "ratio": "true / expected RMSE", "inside_one": "within 1 x expected", "inside_two": "within 2 x expected",
        "correlation": "rank correlation over pixels", "between_items": "over items",
    }  # fmt: skip
    rows = [[name, *(_number(fact[key], "psnr") for key in columns)] for name, fact in found.items()]
    about = "Expected and true error, on the scored pixels (1, 0.68 and 0.95 are calibrated):"
    return ["", about, "", *table_lines(["method", *columns.values()], rows)] if rows else []


def difference_lines(comparisons: Sequence[Comparison], metric: str) -> list[str]:
    """Return the lines of the table of paired differences of one metric."""
    mine = [each for each in comparisons if each.metric == metric]
    if not mine:
        return []
    head = f"{HEADINGS.get(metric, metric)} against {mine[0].against}, paired by item"
    about = "p: Wilcoxon signed rank, sign flips over items, sign flips over places; Holm corrects the first"
    rows = [
        [
            each.method, score_cell(each.difference, metric, sign=True), f"{each.wins:.0%}", _p(each.p_wilcoxon),
            _p(each.p_permutation), _p(each.p_places), _p(each.p_holm), each.verdict,
        ]
        for each in mine
    ]  # fmt: skip
    heading = [
        "method", "difference", "items won", "p Wilcoxon", "p items", f"p places ({mine[0].places})", "p Holm", "so",
    ]  # fmt: skip
    return ["", f"{head} ({about}):", "", *table_lines(heading, rows)]


def cost_lines(results: Results) -> list[str]:
    """Return the lines of the table of costs; none where costs were not counted."""
    if not results.costs:
        return []
    about = f"Cost (GMAC: 10^9 multiply-accumulates, {CASE}; memory: growth during the first image):"
    lines = table_lines(["method", *COST_HEADING], [[name, *cost_cells(results, name)] for name in results.methods])
    return ["", about, "", *lines]


def cost_cells(results: Results, method: str) -> list[str]:
    """Return parameters, GMACs per forward and per sample, evaluations, seconds per megapixel and memory as text."""
    cost = results.costs[method]
    network = (cost.parameters / 1e6, 2), (cost.gmacs_forward, 2), (cost.gmacs_sample, 2), (cost.evaluations, 0)
    cells = [number_cell(value if cost.parameters else None, digits) for value, digits in network]
    return [*cells, number_cell(results.seconds_per_megapixel(method), 2), number_cell(cost.peak_memory_mb, 0)]


def pareto_points(report: Report) -> list[Point]:
    """Return the measured methods as points, without the control that is given the truth."""
    costs = report.results.costs
    return [
        Point(
            name=m.method,
            quality=m.overall[report.metric].mean,
            parameters=costs[m.method].parameters / 1e6,
            gmacs=costs[m.method].gmacs_sample,
        )
        for m in report.summary.methods
        if m.method in costs and m.method != CONTROL and report.metric in m.overall
    ]


def report_json(report: Report, *, published: Sequence[Point] = ()) -> dict[str, Any]:
    """Return everything but the single items as plain values."""
    results = report.results
    content: dict[str, Any] = {**results.facts, **asdict(report.summary)}
    if results.costs:
        points = pareto_points(report)
        content["costs"] = {
            name: {**asdict(cost), "seconds_per_megapixel": results.seconds_per_megapixel(name)}
            for name, cost in results.costs.items()
        }
        content["comparisons"] = [{**asdict(each), "verdict": each.verdict} for each in report.comparisons]
        content["pareto"] = {
            "points": [asdict(point) for point in (*points, *published)],
            "front_parameters": [point.name for point in pareto_front(points)],
            "front_gmacs": [point.name for point in pareto_front(points, cost="gmacs")],
        }
    return dict(plain(content))


def write_report(
    folder: Path | str,
    report: Report,
    *,
    text: str | None = None,
    published: Sequence[Point] = (),
    shown: Collection[str] | None = None,
) -> list[Path]:
    """Write table.md, summary.json and items.csv, for a comparison also pareto.png and qualitative.png.

    text: the content of table.md; None = `markdown`. published: points of the paper in the Pareto figure. shown:
    methods in the figures; None = all.
    """
    folder = Path(folder)
    table, summary, items = files = [folder / name for name in ("table.md", "summary.json", "items.csv")]
    content = {"title": report.title, **report_json(report, published=published)}
    rows = io.StringIO()
    csv.writer(rows).writerows(_item_lines(report.results.rows))
    write_atomically(table, (text or markdown(report)).encode())
    write_atomically(summary, json.dumps(content, indent=2, ensure_ascii=False).encode())
    write_atomically(items, rows.getvalue().encode())
    return files + _write_figures(folder, report, published, shown)


def _write_figures(
    folder: Path, report: Report, published: Sequence[Point], shown: Collection[str] | None
) -> list[Path]:
    try:
        from sader.figures.picture import save_png
    except ImportError:  # a training machine may lack Pillow; --report-only draws the figures elsewhere
        return []
    files, results, label = [], report.results, HEADINGS.get(report.metric, report.metric)
    points = [*(p for p in pareto_points(report) if shown is None or p.name in shown), *published]
    if results.costs and any(np.isfinite(point.quality) for point in points):
        figure = draw_pareto(points, title=f"{report.title}: {label} against parameters and cost", quality=label)
        files.append(save_png(figure, folder / "pareto.png"))
    if results.examples:
        scores = {(row.item, row.method): row.scores["psnr"] for row in results.rows}
        pictures = {
            name: images
            for name, images in results.predictions.items()
            if name != CONTROL and (shown is None or name in shown)
        }
        figure = draw_gallery(results.examples, pictures, title=report.title, scores=scores)
        files.append(save_png(figure, folder / "qualitative.png"))
    return files


def _item_lines(rows: Sequence[Row]) -> list[list[object]]:
    metrics = list(dict.fromkeys(name for row in rows for name in row.scores))
    lines: list[list[object]] = [["item", "group", "task", "method", "dates", "cover", "pixels", *metrics]]
    for row in rows:
        about = [row.item, row.group, row.task, row.method, row.dates, f"{row.cover:.4f}", row.pixels]
        lines.append([*about, *(f"{row.scores.get(name, np.nan):.6g}" for name in metrics)])
    return lines


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

    extremes = extreme_items(rows, shown, count=count)
    wanted = [name for names in extremes.values() for name in names]
    # Items of a public dataset are read from disk: read those few only.
    chosen = items.named(wanted) if isinstance(items, DatasetItems) else items
    by_name = {item.name: item for item in chosen}
    values = {(row.item, row.method): row.scores for row in rows}
    paths = []
    for kind, names in extremes.items():
        for number, name in enumerate(names, 1):
            item = by_name[name]
            result, spread = with_spread(methods[shown], item)
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
            paths.append(save_png(figure, Path(folder) / f"{safe}-{kind}{number}.png"))
    return paths


def table_lines(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def number_cell(value: float | None, digits: int, *, sign: bool = False) -> str:
    """Return a number with so many digits after the point, "-" where there is none."""
    if value is None or not np.isfinite(value):
        return "-"
    return f"{value:{'+' if sign else ''}.{digits}f}"


def _number(value: float, metric: str, *, sign: bool = False) -> str:
    return number_cell(value, _DIGITS.get(metric, 3), sign=sign)


def score_cell(interval: Interval, metric: str, *, sign: bool = False) -> str:
    """Return "mean [low, high]" with the digits of the metric, or "-"; one item has no interval."""
    if interval.count <= 1:
        return _number(interval.mean, metric, sign=sign)
    mean, low, high = (_number(value, metric, sign=sign) for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else number_cell(value, 3)
