"""Draw items of `sader evaluate`: dates, true mask, result, a classical method, truth, true and expected error.

    python tools/show_items.py SHARDS... [--clouds CLOUDSEN12_SHARDS] --item NAME=FILE.jpg ... [--mask own]

NAME is the start of the name of an item (column `item` of items.csv); its date to be cleaned has a red frame.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from sader.bands import BANDS_RGBN
from sader.data.items import Item
from sader.evaluation.data import open_data
from sader.evaluation.methods import RemoverMethod, make_method
from sader.evaluation.request import DataRequest
from sader.figures.picture import (
    Panel,
    compose,
    error_picture,
    heat_picture,
    mask_picture,
    stretch_limits,
    true_colour,
)

CLASSICAL = "local_ridge_blend"


def picture(item: Item, method: RemoverMethod, *, full_scale: float) -> Image.Image:
    """Return the dates and the true mask above; the result, the classical method, truth and errors below."""
    assert item.reference is not None
    removal = method.predict(item)
    assert removal.spread is not None
    truth = np.where(item.scored | item.kept, item.clear, np.nan)
    covered = item.valid.any(axis=0)
    draw = partial(true_colour, bands=item.bands, limits=stretch_limits([truth], bands=item.bands))

    def result(name: str, image: np.ndarray) -> Panel:
        error = float(np.mean((image - item.clear)[:, item.scored].astype(np.float64) ** 2))
        return Panel(draw(np.where(covered, image, np.nan)), f"{name}: {-10 * np.log10(error):.1f} dB")

    above = [
        Panel(
            draw(np.where(valid, image, np.nan)),
            f"date {number + 1}" + (", to be cleaned" if number == item.reference else ""),
            marked=number == item.reference,
        )
        for number, (image, valid) in enumerate(zip(item.cloudy, item.valid, strict=True))
    ]
    stated = np.where(covered, removal.spread[:3].mean(axis=0), np.nan)
    below = [
        result(f"result, {method.mask} masks", removal.clear),
        result(CLASSICAL.replace("_", " "), make_method(CLASSICAL)(item)),
        Panel(draw(truth), "truth"),
        Panel(error_picture(removal.clear, truth, bands=item.bands, full_scale=full_scale), "true error"),
        Panel(heat_picture(stated, full_scale=full_scale), "expected error"),
    ]
    above.append(Panel(mask_picture(item.cloud_mask[item.reference]), "true mask (white: hidden)"))
    note = f"Errors: black 0, pale yellow {full_scale:g} of reflectance. Grey: no data. PSNR of the hidden pixels."
    return compose([above, below], note=note, panel_width=210)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, nargs="+")
    parser.add_argument("--clouds", type=Path, help="shards whose clouds are pasted into data without labels")
    parser.add_argument("--item", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--model", default="sader-s2-rgbn")
    parser.add_argument("--mask", default="true", choices=("true", "own"), help="masks given to the model, or its own")
    parser.add_argument("--full-scale", type=float, default=0.05, help="reflectance of the brightest colour of errors")
    given = parser.parse_args()
    method = make_method(given.model, mask=given.mask)
    assert isinstance(method, RemoverMethod)
    clouds = () if given.clouds is None else (given.clouds,)
    items = open_data(DataRequest(tuple(given.shards), clouds=clouds)).items("clean", BANDS_RGBN)
    for name, file in (text.rsplit("=", 1) for text in given.item):
        item = next((item for item in items if item.name.startswith(name)), None)
        if item is None:
            parser.error(f"no item starts with {name}; the data has {items[0].name} and {len(items) - 1} others")
        picture(item, method, full_scale=given.full_scale).save(file, quality=88)
        print(f"wrote {file}: {Path(file).stat().st_size / 1000:.0f} kB, {item.name}", flush=True)


if __name__ == "__main__":
    main()
