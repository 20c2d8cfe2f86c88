"""Files of a comparison: the one table with scores, tests and costs, JSON, CSV, and the two figures."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sader.errors import OutputError
from sader.evaluation.bench import Bench
from sader.evaluation.figures import Point, draw_pareto, pareto_front
from sader.evaluation.gallery import draw_gallery
from sader.evaluation.report import write_report
from sader.evaluation.statistics import Comparison
from sader.evaluation.summary import HEADINGS, Summary, counted, plain, region_table, score_cell, table_lines

CASE = "T = 3, 256x256"


def comparison_markdown(
    bench: Bench,
    summary: Summary,
    comparisons: Sequence[Comparison],
    *,
    title: str,
    metric: str = "psnr",
    notes: Sequence[str] = (),
) -> str:
    """Return the tables: scores with intervals, regions, paired differences with tests, costs."""
    known = list(summary.methods[0].overall) if summary.methods else []
    shown = [name for name in ("psnr", "ssim", "sam", "lpips", "mtc_psnr", "mtc_ssim", "mtc_lpips") if name in known]
    lines = [f"## {title}", "", *notes, *([""] if notes else [])]
    lines += [counted(summary), ""]
    lines += table_lines(
        ["method", *(HEADINGS.get(name, name) for name in shown)],
        [[m.method, *(score_cell(m.overall[name], name) for name in shown)] for m in summary.methods],
    )
    lines += region_table(summary)
    lines += difference_lines(comparisons, metric)
    lines += ["", f"Cost (GMAC: 10^9 multiply-accumulates, {CASE}; memory: growth during the first image):", ""]
    lines += cost_lines(bench)
    return "\n".join(lines) + "\n"


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


def cost_lines(bench: Bench) -> list[str]:
    """Return the lines of the table of costs."""
    heading = [
        "method", "parameters M", "GMAC per forward", "GMAC per sample", "evaluations", "s / megapixel", "peak MiB",
    ]  # fmt: skip
    return table_lines(heading, [[name, *cost_cells(bench, name)] for name in bench.methods])


def cost_cells(bench: Bench, method: str) -> list[str]:
    """Return parameters, GMACs per forward and per sample, evaluations, seconds per megapixel and memory as text."""
    cost = bench.costs[method]
    network = bool(cost.parameters)
    return [
        f"{(cost.parameters or 0) / 1e6:.2f}" if network else "-",
        _number(cost.gmacs_forward) if network else "-",
        _number(cost.gmacs_sample) if network else "-",
        str(cost.evaluations) if network else "-",
        _number(bench.seconds_per_megapixel(method)),
        _number(cost.peak_memory_mb, 0),
    ]


def pareto_points(bench: Bench, summary: Summary, metric: str) -> list[Point]:
    """Return the measured methods as points; controls that see the truth are no methods."""
    return [
        Point(
            name=m.method,
            quality=m.overall[metric].mean,
            parameters=(bench.costs[m.method].parameters or 0) / 1e6,
            gmacs=bench.costs[m.method].gmacs_sample or 0.0,
        )
        for m in summary.methods
        if m.method != "flat_colour_of_truth" and metric in m.overall
    ]


def write_comparison(
    folder: Path,
    bench: Bench,
    summary: Summary,
    comparisons: Sequence[Comparison],
    *,
    title: str,
    facts: Mapping[str, Any],
    notes: Sequence[str] = (),
    text: str | None = None,
    published: Sequence[Point] = (),
    shown: Collection[str] | None = None,
) -> list[Path]:
    """Write table.md, summary.json, items.csv, pareto.png and qualitative.png; return their paths.

    text: the table, where it is not the usual one. published: points of the paper for the Pareto figure.
    shown: methods in the figures; None = all.
    """
    metric = str(facts.get("metric", "psnr"))
    points = pareto_points(bench, summary, metric)
    every = [*(point for point in points if shown is None or point.name in shown), *published]
    files = write_report(folder, bench.rows, summary, title=title, facts=facts)
    extra = _more_facts(bench, comparisons, points, published)
    text = text or comparison_markdown(bench, summary, comparisons, title=title, metric=metric, notes=notes)
    try:
        files[0].write_text(text, encoding="utf-8")
        content = {**json.loads(files[1].read_text(encoding="utf-8")), **_plain_dict(extra)}
        files[1].write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error
    try:
        from sader.figures.picture import save_png
    except ImportError:  # a training machine may lack Pillow; the figures can be drawn later from the same files
        return files
    label = HEADINGS.get(metric, metric)
    if any(np.isfinite(point.quality) for point in every):
        figure = draw_pareto(every, title=f"{title}: {label} against parameters and cost", quality=label)
        files.append(save_png(figure, folder / "pareto.png"))
    if bench.examples:
        scores = {(row.item, row.method): row.scores["psnr"] for row in bench.rows}
        pictures = {
            name: images
            for name, images in bench.predictions.items()
            if name != "flat_colour_of_truth" and (shown is None or name in shown)
        }
        figure = draw_gallery(bench.examples, pictures, title=title, scores=scores)
        files.append(save_png(figure, folder / "qualitative.png"))
    return files


def comparison_json(
    bench: Bench, summary: Summary, comparisons: Sequence[Comparison], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything but the single items as plain values."""
    points = pareto_points(bench, summary, str(facts.get("metric", "psnr")))
    return _plain_dict({**facts, **summary.as_dict(), **_more_facts(bench, comparisons, points, ())})


def _more_facts(
    bench: Bench, comparisons: Sequence[Comparison], points: Sequence[Point], published: Sequence[Point]
) -> dict[str, Any]:
    return {
        "costs": {
            name: {**cost.as_dict(), "seconds_per_megapixel": bench.seconds_per_megapixel(name)}
            for name, cost in bench.costs.items()
        },
        "comparisons": [{**asdict(each), "verdict": each.verdict} for each in comparisons],
        "pareto": {
            "points": [asdict(point) for point in (*points, *published)],
            "front_parameters": [point.name for point in pareto_front(points)],
            "front_gmacs": [point.name for point in pareto_front(points, cost="gmacs")],
        },
    }


def _plain_dict(values: dict[str, Any]) -> dict[str, Any]:
    result = plain(values)
    assert isinstance(result, dict)
    return result


def _p(value: float) -> str:
    if not np.isfinite(value):
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.{digits}f}"
