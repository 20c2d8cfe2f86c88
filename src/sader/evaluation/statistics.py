"""Means, intervals, paired differences and paired tests of scored rows.

Intervals are seeded bootstraps over items. Tests, in NumPy alone: the Wilcoxon signed-rank test, a sign-flip
permutation test over items and over places (items of one place are not independent, and places are few), and Holm's
correction for the number of comparisons.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from sader.baselines.classical import CLASSICAL
from sader.errors import ConfigError, did_you_mean
from sader.evaluation.scoring import LOWER_IS_BETTER, Row

BOOTSTRAP_DRAWS = 2000
PERMUTATION_DRAWS = 10_000
EXACT = 12
"""Largest number of differences for which all sign patterns are enumerated; beyond that they are drawn."""


@dataclass(frozen=True)
class Interval:
    """A mean over items with its 95 % bootstrap interval; NaN without any value."""

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
    """Metric -> mean of the places' means, independent of the number of items of each place."""
    against: dict[str, Interval]
    """Metric -> this method minus the best classical one, paired by item; empty for that one itself."""


@dataclass(frozen=True)
class Summary:
    """All methods, and which classical one they are compared with."""

    methods: list[MethodSummary]
    best_classical: str | None
    items: int
    groups: int


def bootstrap(values: Sequence[float] | np.ndarray, *, seed: int = 0, draws: int = BOOTSTRAP_DRAWS) -> Interval:
    """Return the mean of the finite values and its 95 % percentile interval; the same for the same seed."""
    finite = _finite(values)
    if len(finite) == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    picks = np.random.default_rng(seed).integers(0, len(finite), (draws, len(finite)))
    low, high = np.percentile(finite[picks].mean(1), [2.5, 97.5])
    return Interval(float(finite.mean()), float(low), float(high), len(finite))


def summarise(rows: Sequence[Row], *, metric: str = "psnr", seed: int = 0) -> Summary:
    """Return the summary of `rows`, methods in their order; the others are compared with the best classical one.

    The best is that with the best mean of `metric`; flat colours are left out.
    """
    by_method = _by_method(rows)
    candidates = [name for name in by_method if name in CLASSICAL and not name.startswith("flat")]
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


@dataclass(frozen=True)
class Comparison:
    """One method against another on the items both were scored on."""

    method: str
    against: str
    metric: str
    difference: Interval
    """Mean of method - against, with its 95 % bootstrap interval over items."""
    wins: float
    """Share of the items on which `method` is better; a tie is half a win."""
    p_wilcoxon: float
    p_permutation: float
    p_places: float
    """The permutation test on the mean difference of each place; with few places it is seldom significant."""
    places: int
    p_holm: float
    """`p_wilcoxon`, corrected for all comparisons of the metric."""

    @property
    def verdict(self) -> str:
        """better, worse, or no difference shown (corrected p of at least 0.05)."""
        if not self.p_holm < 0.05:
            return "no difference shown"
        sign = -1 if self.metric in LOWER_IS_BETTER else 1
        return "better" if sign * self.difference.mean > 0 else "worse"


def wilcoxon(differences: Sequence[float] | np.ndarray) -> float:
    """Return the two-sided p of the signed-rank test; 1 where all differences are zero, NaN without any.

    Zeros are dropped. Up to `EXACT` differences the distribution is enumerated (ties share their mean rank); beyond
    that the normal approximation with tie and continuity correction is used.
    """
    values = _finite(differences)
    if len(values) == 0:
        return float("nan")
    values = values[values != 0]
    count = len(values)
    if count == 0:
        return 1.0
    ranks, ties = _ranks(np.abs(values))
    positive = float(ranks[values > 0].sum())
    centre = count * (count + 1) / 4
    if count <= EXACT:
        sums = _signs(count) @ ranks
        return float(np.mean(np.abs(sums - centre) >= abs(positive - centre) - 1e-9))
    variance = count * (count + 1) * (2 * count + 1) / 24 - float((ties**3 - ties).sum()) / 48
    z = max(abs(positive - centre) - 0.5, 0.0) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def permutation(differences: Sequence[float] | np.ndarray, *, seed: int = 0, draws: int = PERMUTATION_DRAWS) -> float:
    """Return the two-sided p of the mean under random signs; NaN without differences.

    Exact up to `EXACT` values; beyond that from `draws` seeded draws, the observed signs included.
    """
    values = _finite(differences)
    if len(values) == 0:
        return float("nan")
    observed = abs(float(values.sum())) - 1e-12 * float(np.abs(values).sum())
    if len(values) <= EXACT:
        sums = (2 * _signs(len(values)) - 1) @ values
        return float(np.mean(np.abs(sums) >= observed))
    rng = np.random.default_rng(seed)
    signs = rng.integers(0, 2, (draws, len(values))) * 2.0 - 1
    return float((1 + np.sum(np.abs(signs @ values) >= observed)) / (draws + 1))


def holm(values: Sequence[float]) -> list[float]:
    """Return the p values corrected by Holm's step-down rule, in their order; NaN stays NaN and is not counted."""
    p = np.asarray(values, np.float64)
    corrected = np.full(len(p), np.nan)
    order = np.argsort(p)[: np.isfinite(p).sum()]  # NaN comes last
    corrected[order] = np.maximum.accumulate(np.minimum(np.arange(len(order), 0, -1) * p[order], 1))
    return [float(value) for value in corrected]


def _by_method(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return method -> item -> row."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.method, {})[row.item] = row
    return found


def compare_rows(
    rows: Sequence[Row], *, against: str, metrics: Sequence[str] = ("psnr",), seed: int = 0
) -> list[Comparison]:
    """Return the comparisons of every method with `against` for each metric, with Holm's correction over a metric."""
    by_method = _by_method(rows)
    if against not in by_method:
        raise ConfigError(f"nothing called {against!r} was scored{did_you_mean(against, by_method)}")
    pairs = [(name, against) for name in by_method if name != against]
    result: list[Comparison] = []
    for metric in metrics:
        found = [_compare(by_method, pair, metric, seed) for pair in pairs]
        corrected = holm([each.p_wilcoxon for each in found])
        result += [replace(each, p_holm=p) for each, p in zip(found, corrected, strict=True)]
    return result


def _compare(by_method: Mapping[str, Mapping[str, Row]], pair: tuple[str, str], metric: str, seed: int) -> Comparison:
    mine, theirs = by_method[pair[0]], by_method[pair[1]]
    nan = float("nan")
    shared = [item for item in mine if item in theirs]
    both = [(mine[item].scores.get(metric, nan), theirs[item].scores.get(metric, nan)) for item in shared]
    kept = [(item, a - b) for item, (a, b) in zip(shared, both, strict=True) if math.isfinite(a) and math.isfinite(b)]
    values = np.array([difference for _, difference in kept], np.float64)
    places: dict[str, list[float]] = {}
    for item, difference in kept:
        places.setdefault(mine[item].group, []).append(difference)
    key = zlib.crc32(f"{seed}/{metric}/{pair[0]}/{pair[1]}".encode())
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return Comparison(
        method=pair[0],
        against=pair[1],
        metric=metric,
        difference=bootstrap(values, seed=key),
        wins=float(np.mean((sign * values > 0) + 0.5 * (values == 0))) if len(values) else nan,
        p_wilcoxon=wilcoxon(values),
        p_permutation=permutation(values, seed=key),
        p_places=permutation([float(np.mean(group)) for group in places.values()], seed=key),
        places=len(places),
        p_holm=nan,
    )


def _seed(seed: int, metric: str) -> int:
    return zlib.crc32(f"{seed}/{metric}".encode())


def _mean(values: Sequence[float]) -> float:
    finite = _finite(values)
    return float(finite.mean()) if len(finite) else float("nan")


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, np.float64)
    return array[np.isfinite(array)]


def _signs(count: int) -> np.ndarray:
    """Return all patterns of 0 and 1, (2^count, count)."""
    return np.array(list(product((0.0, 1.0), repeat=count)))


def _ranks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks from 1, ties sharing their mean, and how many values each tie has."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse], counts.astype(np.float64)
