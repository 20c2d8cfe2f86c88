"""Score cloud masks on the labelled dates of the validation places, beside rules and s2cloudless.

    python tools/masks/score.py DATA [--only cloudsen12 --only oscd] [--places]

Labels are those of `pack_data.py`: human labels of CloudSEN12, scene classes of Belgium, the cloud probability of
BioMassters, smoke by the rise of the blue band; all other places are clear, with water and snow named by spectral
rules. All dates of a place are classified together, with four bands and with all. No mask is widened. Prints one row
for each source and method: IoU, recall and precision of hidden pixels, the share of each hidden class that is found,
and the share of each visible surface that is hidden.
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pack_data
import rasterio
from pack_data import CLEAR, HIDDEN, LAND, SHADOW, SNOW, THICK, THIN, WATER, Image

from sader import CloudRemover, RemoverOptions
from sader.bands import BANDS_RGBN
from sader.data.cloud_rules import S2CLOUDLESS_BANDS, detect_s2cloudless, estimate_cloud_mask
from sader.model.heads import HIDDEN_CLASSES

Series = list[Image]
Masks = Callable[[Series], np.ndarray | None]
"""(dates of a place) -> masks bool (T, H, W); None where the method cannot be used."""
FOUND, ALARMS = {"thick": THICK, "thin": THIN, "shadow": SHADOW}, {"land": LAND, "water": WATER, "snow": SNOW}
LEAST = 1000
"""Pixels of a class below which no share is printed."""


def validation_series(root: Path, only: list[str]) -> Iterator[Series]:
    """Yield the dates of each validation place that have the same bands and size."""
    names = ("cloudsen12", "oscd", "california", "sen12mscr", "rondonia", "belgium", "biomassters", "others")
    places: dict[tuple[object, ...], Series] = defaultdict(list)
    for image in chain.from_iterable(getattr(pack_data, name)(root) for name in names):
        if image.split == "val" and (not only or image.source in only):
            places[image.source, image.place, image.bands, image.labels.shape].append(image)
    yield from places.values()


def values(series: Series, bands: tuple[str, ...] | None = None) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return reflectance (T, C, H, W), validity (T, H, W) and the bands: those of `bands` that there are, or all."""
    kept = tuple(band for band in series[0].bands if bands is None or band in bands)
    counts = np.stack([image.counts[[image.bands.index(band) for band in kept]] for image in series])
    return counts.astype(np.float32) / 1e4, (counts > 0).all(axis=1), kept


def by_network(remover: CloudRemover, *, more: bool) -> Masks:
    """Return the masks of `sader-masks` with the bands of the remover; more: only where they are more than four."""

    def masks(series: Series) -> np.ndarray | None:
        cloudy, valid, bands = values(series, remover.bands)
        if more and len(bands) <= len(BANDS_RGBN):
            return None
        scores = remover.classify(cloudy, valid=valid, bands=bands)
        return np.asarray(scores[:, list(HIDDEN_CLASSES)].sum(axis=1) >= 0.5)

    return masks


def by_head(remover: CloudRemover) -> Masks:
    """Return the masks of the model's cloud head, without a reference date."""

    def masks(series: Series) -> np.ndarray:
        cloudy, valid, bands = values(series, BANDS_RGBN)
        return remover.estimate_cloud(cloudy, valid=valid, bands=bands) > 0.5

    return masks


def by_rules(series: Series) -> np.ndarray:
    """Return the masks of `sader.data.cloud_rules`."""
    cloudy, valid, bands = values(series, BANDS_RGBN)
    return estimate_cloud_mask(cloudy, bands, valid=valid)


def by_s2cloudless(series: Series) -> np.ndarray | None:
    """Return the clouds of s2cloudless, where its ten bands are present and the dates are L1C."""
    if set(S2CLOUDLESS_BANDS) - set(series[0].bands) or series[0].level != "L1C":
        return None
    cloudy, _, bands = values(series)
    chosen = [bands.index(band) for band in S2CLOUDLESS_BANDS]
    return np.stack([detect_s2cloudless(date[chosen]) for date in cloudy])


def counts(series: Series, masks: np.ndarray) -> np.ndarray:
    """Return the pixels (label, visible or hidden by the mask) of all dates."""
    table = np.zeros((256, 2), np.int64)
    for image, mask in zip(series, masks, strict=True):
        known = (image.counts > 0).all(axis=0)
        np.add.at(table, (image.labels[known], mask[known].astype(np.int64)), 1)
    return table


def row(table: np.ndarray) -> str:
    """Return the figures of one method on one source."""
    hidden = table[[THICK, THIN, SHADOW, HIDDEN]].sum(axis=0)
    visible = table[[LAND, WATER, SNOW, CLEAR]].sum(axis=0)

    def share(part: float, whole: float) -> str:
        return f"{part / whole:.3f}" if whole >= LEAST else "-"

    enough = hidden.sum() if hidden.sum() >= LEAST else 0
    cells = [
        share(hidden[1], (hidden.sum() + visible[1]) * (enough > 0)),
        share(hidden[1], enough),
        share(hidden[1], (hidden[1] + visible[1]) * (enough > 0)),
    ]
    cells += [share(table[code][1], table[code].sum()) for code in (*FOUND.values(), *ALARMS.values())]
    return " | ".join([*cells, share(visible[1], visible.sum())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the source folders")
    parser.add_argument("--only", action="append", default=[], help="a source; may be repeated")
    parser.add_argument("--places", action="store_true", help="one row for each place")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=rasterio.errors.NotGeoreferencedWarning)
    four, many = (CloudRemover.from_pretrained(name, device="cpu") for name in ("sader-s2-rgbn", "sader-s2-msi"))
    head = CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu", options=RemoverOptions(masks="head"))
    methods: dict[str, Masks] = {
        "sader-masks, four bands": by_network(four, more=False),
        "sader-masks, all bands": by_network(many, more=True),
        "cloud head of sader-s2-rgbn": by_head(head),
        "rules": by_rules,
        "s2cloudless": by_s2cloudless,
    }
    totals: dict[tuple[str, str], np.ndarray] = {}
    for series in validation_series(given.data, given.only):
        source = f"{series[0].source} {series[0].place}" if given.places else series[0].source
        for name, method in methods.items():
            masks = method(series)
            if masks is not None:
                totals[source, name] = totals.get((source, name), 0) + counts(series, masks)
    print("| source | method | IoU | recall | precision |", " | ".join((*FOUND, *ALARMS)), "| visible |")
    print("|" + "---|" * (6 + len(FOUND) + len(ALARMS)))
    for (source, name), table in totals.items():
        print(f"| {source} | {name} | {row(table)} |")


if __name__ == "__main__":
    main()
