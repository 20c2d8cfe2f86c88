"""Fit the factors of the expected error (`heads.ERROR_TERMS`), and measure how much a rule of this kind can tell.

    python benchmarks/stated_error.py collect OUT.npz SHARDS... --clouds SHARDS [--only NAME...] [--without NAME...]
    python benchmarks/stated_error.py fit TRAIN.npz... --check VALIDATION.npz...

`collect` predicts "clean this date" on crops, and stores for a sample of the scored, reconstructed pixels of each item
the terms of the rule, the true error and the expected one. Names are parts of the names of places. `fit` prints the
factors, fitted on training places, and scores them on others: rank correlation of expected and true error over the
pixels of an item, mean over the items of a source. With scikit-learn, boosted trees on the same terms give a bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from sader.data.batch import SHADOW, THICK, THIN
from sader.data.items import Item, clean_this_date
from sader.data.shards import SeriesRecord, observed
from sader.evaluation.data import load_records
from sader.evaluation.methods import RemoverMethod
from sader.inference import tile
from sader.inference.remover import CloudRemover, RemoverOptions

BANDS = ("B02", "B03", "B04", "B08")
BETWEEN = 0.3
"""Weight of the differences between items, relative to those between the pixels of an item."""
RIDGE = 0.005
TERMS = ("network", "usual misfit", "clear pixels nearby", "similar land", "change by the network", "contrast")


class Sample(NamedTuple):
    """Pixels of one item."""

    source: str
    terms: np.ndarray
    """(N, 6)"""
    error: np.ndarray
    """(N,): absolute error, mean over the bands."""
    stated: np.ndarray
    """(N,)"""


# ------------------------------------------------------------------------------------------------ collect


def collect(given: argparse.Namespace) -> None:
    """Write the samples of all items to a file."""
    kept: dict[str, np.ndarray] = {}
    captured: list[torch.Tensor] = []
    plain = tile.error_terms

    def capture(*arguments: object) -> torch.Tensor:
        captured.append(plain(*arguments))  # type: ignore[arg-type]
        return captured[-1]

    tile.error_terms = capture  # type: ignore[assignment]
    remover = CloudRemover.from_pretrained(given.model, device="cpu", options=RemoverOptions(tile=1024))
    method = RemoverMethod(remover, given.mask)
    records = [record for record in load_records(given.shards, split="all") if chosen(record.name, given)]
    donors = list(load_records(given.clouds, split="all")) if given.clouds else records
    donors = [record for record in donors if chosen(record.name, given)]
    items = clean_this_date(
        [cut(record, given.crop) for record in records], donors=donors, bands=BANDS, limit=given.limit
    )
    for number, item in enumerate(windows(items, given.crop)):
        captured.clear()
        result = method.predict(item)
        height, width = item.scored.shape
        pixels = np.flatnonzero(item.scored & ~result.kept)
        if len(captured) != 1 or len(pixels) < given.least:
            continue
        pixels = np.random.default_rng(number).permutation(pixels)[: given.pixels]
        terms = captured[0][0, :, :height, :width].flatten(1).numpy()[:, pixels].T
        error = np.abs(result.clear - item.clear).mean(axis=0).ravel()[pixels]
        stated = result.spread.mean(axis=0).ravel()[pixels]
        name = f"{number:03d} {item.name}"
        kept[name] = np.c_[terms, error, stated].astype(np.float32)
        print(
            f"{name}: true {error.mean():.4f}, stated {stated.mean():.4f}, rank {rank(stated, error):.2f}", flush=True
        )
    np.savez_compressed(given.out, **kept)


def chosen(name: str, given: argparse.Namespace) -> bool:
    """Whether a place is used."""
    return (not given.only or any(part in name for part in given.only)) and not any(p in name for p in given.without)


def cut(record: SeriesRecord, crop: int) -> SeriesRecord:
    """Return the corner of a place without labels, which may be larger than every cloud to be pasted."""
    if np.isin(record.labels, (THICK, THIN, SHADOW)).any():
        return record
    numbers = record.dn[..., :crop, :crop].copy()
    labels = np.where(observed(numbers, record.bands), 0, 255).astype(np.uint8)
    return replace(record, dn=numbers, labels=labels)


def windows(items: Iterator[Item], crop: int) -> Iterator[Item]:
    """Return the part of each item that has most of both: scored pixels and clear ones of the reference date."""
    for item in items:
        height, width = item.scored.shape
        clear = item.valid[item.reference] & ~(item.cloud_mask[item.reference] > 0.5)
        corners = [
            (slice(y, y + crop), slice(x, x + crop))
            for y in sorted({0, max(height - crop, 0) // 2, max(height - crop, 0)})
            for x in sorted({0, max(width - crop, 0)})
        ]
        part = max(corners, key=lambda part: float(item.scored[part].mean() * clear[part].mean()))
        yield replace(
            item,
            cloudy=item.cloudy[..., part[0], part[1]],
            clear=item.clear[..., part[0], part[1]],
            scored=item.scored[part],
            cloud_mask=item.cloud_mask[..., part[0], part[1]],
            valid=item.valid[..., part[0], part[1]],
        )


# ------------------------------------------------------------------------------------------------ fit


def read(paths: Sequence[Path]) -> list[Sample]:
    """Return the samples of all items; the source is the name of the file."""
    found = []
    for path in paths:
        for values in np.load(path).values():
            values = values[np.isfinite(values).all(axis=1)].astype(np.float64)
            found.append(Sample(path.stem, values[:, :-2], values[:, -2], values[:, -1]))
    return found


def fit(samples: Sequence[Sample]) -> np.ndarray:
    """Return the factors and the constant, such that 95 % of the errors lie within two stated ones."""
    rows, wanted, weight = [], [], []
    for one in samples:
        share = 1 / sum(other.source == one.source for other in samples) ** 0.5
        y = np.log(one.error + 1e-3)
        rows += [np.c_[one.terms - one.terms.mean(axis=0), np.zeros(len(y))], np.r_[one.terms.mean(axis=0), 1.0][None]]
        wanted += [y - y.mean(), y.mean(keepdims=True)]
        weight += [np.full(len(y), share / len(y)), np.array([BETWEEN * share])]
    x, y, w = np.concatenate(rows), np.concatenate(wanted), np.concatenate(weight)
    scale = np.sqrt((w[:, None] * x**2).sum(axis=0) / w.sum())
    x = x / scale
    ridge = RIDGE * w.sum() * np.diag([1.0] * (len(scale) - 1) + [0.0])
    factors = np.linalg.solve((x * w[:, None]).T @ x + ridge, (x * w[:, None]).T @ y) / scale
    over = np.concatenate([one.error / (2 * predicted(factors, one)) for one in samples])
    weights = np.concatenate(
        [np.full(len(s.error), 1 / len(s.error) / sum(t.source == s.source for t in samples)) for s in samples]
    )
    order = np.argsort(over)
    factors[-1] += np.log(over[order][np.searchsorted(weights[order].cumsum() / weights.sum(), 0.95)])
    return factors


def predicted(factors: np.ndarray, sample: Sample) -> np.ndarray:
    """Return the expected error (N,), in reflectance."""
    return np.exp(sample.terms @ factors[:-1] + factors[-1])


def rank(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation."""
    places = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (a, b)]
    return float(np.corrcoef(*places)[0, 1])


def report(name: str, samples: Sequence[Sample], state: Callable[[Sample], np.ndarray]) -> None:
    """Print how expected and true errors agree, by source."""
    print(name)
    for source in sorted({one.source for one in samples}):
        own = [one for one in samples if one.source == source]
        stated = [state(one) for one in own]
        inside = [np.mean([(one.error <= k * s).mean() for one, s in zip(own, stated, strict=True)]) for k in (1, 2)]
        squares = [[np.square(one.error).mean(), np.square(s).mean()] for one, s in zip(own, stated, strict=True)]
        wrong, told = np.sqrt(np.mean(squares, axis=0))
        within = np.mean([rank(s, one.error) for one, s in zip(own, stated, strict=True)])
        pooled = rank(np.concatenate(stated), np.concatenate([one.error for one in own]))
        width = np.mean([np.log(s).std() for s in stated])
        print(
            f"  {source} ({len(own)} items): rank correlation in an item {within:.2f}, of all pixels {pooled:.2f}; "
            f"true / stated {wrong / told:.2f}; within 1 and 2 stated {inside[0]:.2f} {inside[1]:.2f}; "
            f"standard deviation of the logarithm {width:.2f}"
        )


def score(given: argparse.Namespace) -> None:
    """Print the factors and their scores."""
    train, check = read(given.samples), read(given.check)
    factors = fit(train)
    laplace = np.log(2**0.5 / 2)  # `tile.expected_error` multiplies by this factor
    print("factors", dict(zip(TERMS, factors[:-1].round(3).tolist(), strict=True)))
    print("ERROR_TERMS =", (*factors[:-1].round(3).tolist(), round(float(factors[-1] - laplace), 3)))
    report("shipped", check, lambda one: one.stated)
    report("fitted", check, lambda one: predicted(factors, one))
    if find_spec("sklearn"):
        from sklearn.ensemble import HistGradientBoostingRegressor

        trees = HistGradientBoostingRegressor(max_leaf_nodes=15, learning_rate=0.06, min_samples_leaf=400)
        weights = [np.full(len(one.error), 1 / len(one.error)) for one in train]
        trees.fit(
            np.concatenate([one.terms for one in train]),
            np.concatenate([np.log(one.error + 1e-3) for one in train]),
            sample_weight=np.concatenate(weights),
        )
        report("boosted trees", check, lambda one: np.exp(trees.predict(one.terms)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("collect")
    one.add_argument("out", type=Path)
    one.add_argument("shards", type=Path, nargs="+")
    one.add_argument("--clouds", type=Path, nargs="+", default=[], help="labelled places whose clouds are pasted")
    one.add_argument("--only", nargs="+", default=[], help="parts of the names of the places to use")
    one.add_argument("--without", nargs="+", default=[], help="parts of the names of the places to leave out")
    one.add_argument("--model", default="sader-s2-rgbn")
    one.add_argument("--mask", default="true", choices=("true", "reference", "own"))
    one.add_argument("--limit", type=int, default=2, help="items of a place")
    one.add_argument("--crop", type=int, default=256)
    one.add_argument("--pixels", type=int, default=4000, help="pixels of an item")
    one.add_argument("--least", type=int, default=500, help="least number of scored pixels")
    one.set_defaults(run=collect)
    two = commands.add_parser("fit")
    two.add_argument("samples", type=Path, nargs="+")
    two.add_argument("--check", type=Path, nargs="+", required=True)
    two.set_defaults(run=score)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
