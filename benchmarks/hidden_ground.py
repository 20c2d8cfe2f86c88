"""What thin cloud and shadow let through: PSNR at pixels that no date shows, with and without `hidden_ground`.

    python benchmarks/hidden_ground.py SHARDS... [--clouds CLOUDSEN12_SHARDS] [--limit 4] [--mask own]
        [--item NAME=FILE.jpg ...]

Items as in `sader evaluate --task clean`. Pixels are those that the masks, given or estimated, hide on every date. An
item counts where they are at least 100; means over items. NAME is the start of the name of an item that is drawn.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from sader.bands import BANDS_RGBN
from sader.data.items import Item
from sader.evaluation.data import open_data
from sader.evaluation.methods import MASKS, RemoverMethod
from sader.evaluation.request import DataRequest
from sader.figures.picture import Panel, compose, mask_picture, stretch_limits, true_colour
from sader.inference.remover import CloudRemover, Removal

LEAST = 100


def predicted(item: Item, method: RemoverMethod) -> tuple[Removal, Removal]:
    """Return the result without and with what thin cloud and shadow let through."""
    with patch("sader.model.composite.hidden_ground", lambda image, *_: torch.zeros_like(image)):
        without = method.predict(item)
    return without, method.predict(item)


def unseen(item: Item, removal: Removal) -> np.ndarray:
    """Return bool (H, W): scored pixels that the masks hide on every date."""
    assert removal.cloud is not None
    return item.scored & ~(item.valid & (removal.cloud < 0.5)).any(axis=0)


def psnr(item: Item, image: np.ndarray, pixels: np.ndarray) -> float:
    """Return the PSNR in dB over some pixels."""
    return -10 * np.log10(np.square((image - item.clear)[:, pixels], dtype=np.float64).mean())


def picture(item: Item, removals: tuple[Removal, Removal], pixels: np.ndarray) -> Image.Image:
    """Return the dates and the pixels above, both results and the truth below, each with its PSNR there."""
    truth = np.where(item.scored | item.kept, item.clear, np.nan)
    draw = partial(true_colour, bands=item.bands, limits=stretch_limits([truth], bands=item.bands))
    above = [
        Panel(
            draw(np.where(valid, image, np.nan)),
            f"date {number + 1}" + (", to be cleaned" if number == item.reference else ""),
            marked=number == item.reference,
        )
        for number, (image, valid) in enumerate(zip(item.cloudy, item.valid, strict=True))
    ]
    below = [
        Panel(draw(removal.clear), f"{name}: {psnr(item, removal.clear, pixels):.1f} dB there")
        for name, removal in zip(("smooth fill", "result"), removals, strict=True)
    ]
    above.append(Panel(mask_picture(pixels), "no date shows it (white)"))
    return compose([above, [*below, Panel(draw(truth), "truth")]], panel_width=256)


def main() -> None:
    """Print the table and draw the items."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--clouds", type=Path, action="append", default=[])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--split", default="all")
    parser.add_argument("--mask", choices=MASKS, default="true")
    parser.add_argument("--item", action="append", default=[], metavar="NAME=FILE")
    given = parser.parse_args()
    wanted = dict(one.rsplit("=", 1) for one in given.item)
    method = RemoverMethod(CloudRemover.from_pretrained(), mask=given.mask)
    headings = ("data", "items", "smooth fill", "with what shows through", "better in", "all scored pixels")
    print(f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|")
    for path in given.data:
        request = DataRequest((path,), split=given.split, clouds=tuple(given.clouds), limit=given.limit)
        rows = []
        for item in open_data(request).items("clean", BANDS_RGBN):
            removals = predicted(item, method)
            pixels = unseen(item, removals[1])
            scores = [psnr(item, removal.clear, item.scored) for removal in removals]
            few = pixels.sum() < LEAST
            rows.append([*([np.nan] * 2 if few else [psnr(item, each.clear, pixels) for each in removals]), *scores])
            for name, file in wanted.items():
                if item.name.startswith(name):
                    picture(item, removals, pixels).save(file, quality=88)
        table = np.array(rows)
        before, after, every, of_all = np.nanmean(table, axis=0)
        better, count = (table[:, 1] > table[:, 0]).sum(), np.isfinite(table[:, 0]).sum()
        cells = [
            path,
            f"{count} of {len(rows)}",
            f"{before:.2f}",
            f"{after:.2f}",
            better,
            f"{every:.2f} to {of_all:.2f}",
        ]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
