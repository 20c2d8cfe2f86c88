"""Means, intervals and paired differences of scored rows, and the Markdown tables that show them.

Intervals are seeded bootstraps over items; places are few, so the means of each place stand beside them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from sader.evaluation.scoring import LOWER_IS_BETTER, REGION_METRICS, REGIONS, Row

DRAWS = 2000
HEADINGS = {
    "psnr": "PSNR dB", "psnr_unbiased": "PSNR, bias removed", "ssim": "SSIM", "sam": "SAM °", "rmse": "RMSE",
    "mae": "MAE",
    "lpips": "LPIPS", "sharpness": "sharpness", "unchanged": "clear pixels unchanged", "clear_mae": "their change",
    "seconds": "s / item", "mtc_psnr": "PSNR dB, mtc_stretch", "mtc_ssim": "SSIM, mtc_stretch",
    "mtc_lpips": "LPIPS, mtc_stretch", "seconds_per_megapixel": "s / megapixel",
}  # fmt: skip
_BY_REGION = tuple(f"{name}_{region}" for region in REGIONS for name in REGION_METRICS)
_ONLY_IN_FILES = ("rmse", "mae", "clear_mae", "seconds", "seconds_per_megapixel", "mtc_rmse", "mtc_mae", *_BY_REGION)
"""Left out of the Markdown tables unless asked for: they are in the JSON and the CSV."""
_DIGITS = {
    "mtc_psnr": 3,
    "psnr": 2,
    "psnr_unbiased": 2,
    "sam": 2,
    "sharpness": 2,
    "rmse": 4,
    "mae": 4,
    "clear_mae": 5,
    "seconds": 2,
    "seconds_per_megapixel": 2,
    "mtc_rmse": 4,
    "mtc_mae": 4,
}


@dataclass(frozen=True)
class Interval:
    """A mean over items with its 95 % bootstrap interval; NaN where there is nothing to average."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class MethodSummary:
    """One method over all items."""

    method: str
    overall: dict[str, Interval]
    """Metric -> mean over items."""
    groups: dict[str, dict[str, float]]
    """Place -> metric -> mean over its items."""
    over_groups: dict[str, float]
    """Metric -> mean of the places' means, which does not favour the place with most items."""
    against: dict[str, Interval]
    """Metric -> this method minus the best classical one, paired by item; empty for that one itself."""


@dataclass(frozen=True)
class Summary:
    """All methods, and which classical one they are compared with."""

    methods: list[MethodSummary]
    best_classical: str | None
    items: int
    groups: int

    def as_dict(self) -> dict[str, object]:
        """Return the summary as plain JSON values; NaN becomes None."""
        values = plain(asdict(self))
        assert isinstance(values, dict)
        return values


def bootstrap(values: Sequence[float] | np.ndarray, *, seed: int = 0, draws: int = DRAWS) -> Interval:
    """Return the mean of the finite values and its 95 % percentile interval; the same for the same seed."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if len(finite) == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    picks = np.random.default_rng(seed).integers(0, len(finite), (draws, len(finite)))
    low, high = np.percentile(finite[picks].mean(1), [2.5, 97.5])
    return Interval(float(finite.mean()), float(low), float(high), len(finite))


def summarise(
    rows: Sequence[Row], *, classical: Sequence[str] | None = None, metric: str = "psnr", seed: int = 0
) -> Summary:
    """Return the summary of `rows`, methods in their order.

    classical: the methods among which the best by the mean of `metric` is what the others are compared with; None:
    those named as in `sader.baselines.classical.CLASSICAL`, flat colour left out.
    """
    by_method: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_method.setdefault(row.method, {})[row.item] = row
    if classical is None:
        from sader.baselines.classical import CLASSICAL

        classical = [name for name in by_method if name in CLASSICAL and not name.startswith("flat")]
    candidates = [name for name in classical if name in by_method]
    sign = -1 if metric in LOWER_IS_BETTER else 1

    def average(name: str) -> float:
        return float(np.mean([row.scores[metric] for row in by_method[name].values()]))

    best = max(candidates, key=lambda name: sign * average(name)) if candidates else None
    methods = []
    for name, mine in by_method.items():
        metrics = list(next(iter(mine.values())).scores)
        groups = {
            group: {each: _mean([row.scores[each] for row in mine.values() if row.group == group]) for each in metrics}
            for group in dict.fromkeys(row.group for row in mine.values())
        }
        against = {}
        if best is not None and name != best:
            theirs = by_method[best]
            for each in metrics:
                differences = [
                    row.scores[each] - theirs[item].scores[each] for item, row in mine.items() if item in theirs
                ]
                against[each] = bootstrap(differences, seed=_seed(seed, each))
        methods.append(
            MethodSummary(
                method=name,
                overall={
                    each: bootstrap([row.scores[each] for row in mine.values()], seed=_seed(seed, each))
                    for each in metrics
                },
                groups=groups,
                over_groups={each: _mean([values[each] for values in groups.values()]) for each in metrics},
                against=against,
            )
        )
    items = {row.item for row in rows}
    return Summary(methods, best, len(items), len({row.group for row in rows}))


def markdown(summary: Summary, *, metrics: Sequence[str] | None = None, title: str = "") -> str:
    """Return three Markdown tables: means with intervals, PSNR by place, differences to the best classical method."""
    if not summary.methods:
        return "no item was scored\n"
    known = list(summary.methods[0].overall)
    shown = [name for name in (metrics or known) if name in known and (metrics or name not in _ONLY_IN_FILES)]
    lines = [f"## {title}", ""] if title else []
    lines += [counted(summary), ""]
    lines += table_lines(
        ["method", *(HEADINGS.get(name, name) for name in shown)],
        [[m.method, *(score_cell(m.overall[name], name) for name in shown)] for m in summary.methods],
    )
    lines += region_table(summary)
    places = list(dict.fromkeys(group for m in summary.methods for group in m.groups))
    if "psnr" in known and places:
        lines += ["", "PSNR by place, and the mean over places:", ""]
        lines += table_lines(
            ["method", *places, "mean over places"],
            [
                [
                    m.method,
                    *(_number(m.groups.get(place, {}).get("psnr", float("nan")), "psnr") for place in places),
                    _number(m.over_groups["psnr"], "psnr"),
                ]
                for m in summary.methods
            ],
        )
    if summary.best_classical is not None and len(summary.methods) > 1:
        lines += ["", f"Difference to {summary.best_classical}, paired by item [95 % interval]:", ""]
        rest = [m for m in summary.methods if m.against]
        compared = [name for name in shown if name != "unchanged"]
        lines += table_lines(
            ["method", *(HEADINGS.get(name, name) for name in compared)],
            [[m.method, *(score_cell(m.against[name], name, sign=True) for name in compared)] for m in rest],
        )
    return "\n".join(lines) + "\n"


def counted(summary: Summary) -> str:
    """Return the sentence that says what the means are over."""
    items = "1 item" if summary.items == 1 else f"{summary.items} items"
    places = "1 place" if summary.groups == 1 else f"{summary.groups} places"
    if summary.items == 1:
        return f"{items} in {places}: too few for intervals, and for any conclusion."
    return f"{items} in {places}; mean over items [95 % bootstrap interval]."


def print_summary(summary: Summary, *, title: str) -> None:
    """Print one table for the width of a terminal: what decides; the rest is in the files of --out."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{title}: {counted(summary)}", highlight=False)
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


def region_table(summary: Summary) -> list[str]:
    """Return the lines of the table of cloudy and clear regions; none where the rows have no such scores."""
    shown = [f"{name}_{region}" for region in REGIONS for name in ("psnr", "ssim", "mae")]
    if not summary.methods or not set(shown) <= set(summary.methods[0].overall):
        return []
    about = "cloudy: hidden in the date to clean, or in some date where there is none; clear: not hidden."
    heading = ["method", *(f"{region} {HEADINGS[name]}" for region in REGIONS for name in ("psnr", "ssim", "mae"))]
    rows = [
        [m.method, *(score_cell(m.overall[name], name.rpartition("_")[0]) for name in shown)] for m in summary.methods
    ]
    return ["", f"By region ({about})", "", *table_lines(heading, rows)]


def _seed(seed: int, metric: str) -> int:
    return zlib.crc32(f"{seed}/{metric}".encode())


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else float("nan")


def table_lines(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _number(value: float, metric: str, *, sign: bool = False) -> str:
    if not np.isfinite(value):
        return "-"
    return f"{value:{'+' if sign else ''}.{_DIGITS.get(metric, 3)}f}"


def score_cell(interval: Interval, metric: str, *, sign: bool = False) -> str:
    """Return "mean [low, high]" with the digits of the metric, or "-"; one item alone has no interval."""
    if not np.isfinite(interval.mean):
        return "-"
    if interval.count == 1:
        return _number(interval.mean, metric, sign=sign)
    mean, low, high = (_number(value, metric, sign=sign) for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def plain(value: object) -> object:
    """Return nested values for JSON: lists for tuples, None for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
