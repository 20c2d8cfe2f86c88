"""Count the water that a model keeps and the shadow and cloud that it finds on the date it cleans, without masks.

    python tools/masks/kept.py --data SHARDS/val [--data MORE] [--clouds LABELLED/val] [--limit 4] [--split all]

Items and pasted clouds are those of `sader evaluate --task clean --mask own`. Water: pixels without cloud whose NDWI is
above 0.15 and whose B08 is below 0.1. Shadow and cloud: pixels under the pasted clouds that are darker or brighter than
the truth by more than 0.015 on the mean of the bands.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from sader.bands import BANDS_RGBN
from sader.evaluation.data import open_data
from sader.evaluation.request import DataRequest
from sader.inference.remover import CloudRemover

NDWI, NIR, VISIBLE = 0.15, 0.1, 0.015


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--clouds", type=Path, action="append", default=[])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--split", default="val")
    parser.add_argument("--model", default="sader-s2-rgbn")
    given = parser.parse_args()
    remover = CloudRemover.from_pretrained(given.model)
    for path in given.data:
        request = DataRequest((path,), split=given.split, clouds=tuple(given.clouds), limit=given.limit)
        counts = np.zeros((3, 2), np.int64)
        for item in open_data(request).items("clean", BANDS_RGBN):
            assert item.reference is not None
            own = item.cloudy[item.reference]
            result = remover.predict(item.cloudy, bands=item.bands, valid=item.valid, reference=item.reference)
            index = (own[1] - own[3]) / np.maximum(own[1] + own[3], 1e-3)
            water = item.kept & (index > NDWI) & (own[3] < NIR)
            known = item.valid[item.reference] & np.isfinite(item.clear).all(axis=0)
            hidden = known & (item.cloud_mask[item.reference] > 0.5)
            change = (own - np.nan_to_num(item.clear)).mean(axis=0)
            right = (result.kept, ~result.kept, ~result.kept)
            for row, pixels in enumerate((water, hidden & (change < -VISIBLE), hidden & (change > VISIBLE))):
                counts[row] += pixels.sum(), (pixels & right[row]).sum()
        names = ("water kept", "shadow found", "cloud found")
        shares = [
            f"{name} {found / max(all_, 1):.3f} of {all_}" for name, (all_, found) in zip(names, counts, strict=True)
        ]
        print(f"{path}: {', '.join(shares)} pixels", flush=True)


if __name__ == "__main__":
    main()
