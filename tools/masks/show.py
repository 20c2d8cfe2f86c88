"""Draw what own masks give on chosen items of `sader evaluate`: the date, its masks, the result and the truth.

    python tools/masks/show.py SHARDS... --clouds CLOUDSEN12_SHARDS --item "town: bordeaux/date0" ... --out picture.jpg

In the second picture grey was hidden and found, orange was clear and is reconstructed, red was hidden and is left.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from sader import CloudRemover
from sader.bands import BANDS_RGBN
from sader.data.items import Item, clean_this_date
from sader.data.shards import SeriesRecord, read_shards
from sader.figures.picture import Panel, compose, stretch_limits, true_colour

FOUND, ALARM, MISSED, CLEAR = (150, 150, 150), (255, 150, 0), (230, 0, 0), (20, 20, 40)


def cut_records(paths: list[Path], size: int) -> Iterator[SeriesRecord]:
    """Yield the records cut to the `size` pixels around the middle of what they cover."""
    for record in read_shards(paths):
        rows, columns = (np.flatnonzero((record.dn[:, 0] > 0).any(0).any(axis)) for axis in (1, 0))
        top, left = (max(int(span[0] + span[-1] + 1 - size) // 2, 0) for span in (rows, columns))
        box = (..., slice(top, top + size), slice(left, left + size))
        labels = None if record.labels is None else np.ascontiguousarray(record.labels[box])
        yield replace(record, dn=np.ascontiguousarray(record.dn[box]), labels=labels)


def panels(remover: CloudRemover, item: Item, label: str) -> list[Panel]:
    """Return the four pictures of an item."""
    assert item.reference is not None
    result = remover.predict(item.cloudy, reference=item.reference, valid=item.valid)
    hidden, seen = item.cloud_mask[item.reference], item.valid[item.reference]
    masks = np.full((*hidden.shape, 3), CLEAR, np.uint8)
    for colour, where in ((FOUND, hidden), (ALARM, seen & ~hidden & ~result.kept), (MISSED, hidden & result.kept)):
        masks[where] = colour
    error = float(np.mean((result.clear - item.clear)[:, item.scored].astype(np.float64) ** 2))
    truth = np.where(item.scored | item.kept, item.clear, np.nan)
    limits = stretch_limits([truth], bands=item.bands)

    def colours(image: np.ndarray) -> np.ndarray:
        return true_colour(image, bands=item.bands, limits=limits)

    return [
        Panel(colours(item.cloudy[item.reference]), label),
        Panel(masks, "masks"),
        Panel(colours(result.clear), f"result, {-10 * np.log10(error):.1f} dB"),
        Panel(colours(truth), "truth"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, nargs="+")
    parser.add_argument("--clouds", type=Path, required=True)
    parser.add_argument("--item", action="append", required=True, help='"label: start of the name of an item"')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=320)
    given = parser.parse_args()
    remover = CloudRemover.from_pretrained("sader-s2-rgbn")
    donors = list(read_shards([given.clouds]))
    records = list(cut_records(given.shards, given.size))
    wanted = dict(reversed(text.split(": ", 1)) for text in given.item)
    found: dict[str, list[Panel]] = {}
    for record in records:
        if not any(name.startswith(record.name) for name in wanted):
            continue
        for item in clean_this_date([record], donors=donors, bands=BANDS_RGBN, limit=4):
            for name, label in wanted.items():
                if name not in found and item.name.startswith(name):
                    found[name] = panels(remover, item, label)
    rows = [found[name] for name in wanted if name in found]
    pairs = [first + second for first, second in zip(rows[::2], rows[1::2], strict=False)]
    compose(pairs, panel_width=150).convert("RGB").save(given.out, quality=80)
    print(f"wrote {given.out}: {given.out.stat().st_size / 1000:.0f} kB, {len(rows)} items")


if __name__ == "__main__":
    main()
