"""Synthetic data and tiny networks: `sader reproduce TABLE --tiny` runs a whole plan in minutes on a CPU.

The folders have the layouts of the public datasets, so that reading, packing, training and scoring are the real ones.
The scores mean nothing.
"""

from __future__ import annotations

import warnings
from datetime import date, timedelta
from pathlib import Path

import numpy as np

from sader.bands import BANDS_13, BANDS_RGBN
from sader.data.batch import CLEAR, THICK
from sader.data.shards import SeriesRecord, write_shard
from sader.data.synthetic.scene import SyntheticSeries, make_series
from sader.errors import require
from sader.evaluation.reproduce import published as paper
from sader.files import write_atomically

SIDE = 32
DONE = "complete"
_JUDGE = "judge_widths=[4,4]"
_MTCDN = (
    "widths=[8, 16]", "blocks=[1, 1]", "fusion_width=8", "key_width=8", "head_width=8", "kernel=3", "emb_width=16",
    "stem=1",
)  # fmt: skip
_SYSTEMS: dict[str, tuple[str, ...]] = {
    "mcgan": ("width=4", "widths=[4,8,8]", "judge_stem=4", "judge_widths=[4,8]"),
    "pix2pix": ("width=4", "blocks=1", _JUDGE),
    "ae": ("widths=[4,8]",),
    "cyclegan": ("width=4", "blocks=1", _JUDGE, "pool=3"),
    "stgan": ("width=4", "blocks=1", _JUDGE),
    "ctgan": ("size=32", "width=4", "hidden=4", "heads=2", "head_width=8", "kernel=3", "reach=8", _JUDGE),
    "pmaa": ("width=4", "hidden=4", "block_width=8", "blocks=2", "scales=2", "kernel=3", "groups=4", _JUDGE),
    "crtsnet": ("width=8", "date_blocks=1", "series_blocks=1"),
    "uncrtaints": ("width=16", "decoder_blocks=1", "heads=4", "model_width=16"),
    "ddpmcr": ("extractor.width=8", "extractor.multipliers=[1,2]", "extractor.emb_width=16", "head_blocks=[1,1]"),
    "diffcr": ("width=8", "levels=2", "emb_width=16", "sampling_steps=2"),
    "seqdms": ("unet.width=8", "unet.multipliers=[1,2]", "unet.blocks=1", "unet.emb_width=16", "sampling_steps=2"),
    "emrdm": (
        "widths=[16,32]", "depths=[1,1]", "feed_widths=[16,32]", "head_width=16", "kernel=3", "mapping_width=16",
        "mapping_feed=32", "fusion_heads=4", "fusion_key_width=8", "diffusion.steps=2",
    ),
    "sen2_mtc_new": _MTCDN,
    "sen12mscrts_ea": _MTCDN,
    "small": (*_MTCDN, "cloud_widths=[8, 8]", "refinement_widths=[8]"),
}  # fmt: skip
"""Base of a run -> changes to its network."""
TRAIN = tuple(
    f"train.{text}"
    for text in (
        "device=cpu",
        "batch_size=2",
        "accumulate=1",
        "dates=3",
        f"crop={SIDE}",
        "log_every=1",
        "checkpoint_every=1",
    )
)


def tiny_overrides(base: str) -> tuple[str, ...]:
    """Return the changes that make the network and the run of `base` tiny, without the number of steps."""
    return (*(f"model.network.{text}" for text in _SYSTEMS[base]), *TRAIN)


def write_data(dataset: str, folder: Path) -> Path:
    """Write synthetic data of the dataset (or shards, for any other name) into `folder` once; return the folder."""
    if (folder / DONE).is_file():
        return folder
    writer = {paper.SEN2: _write_sen2, paper.TS: _write_ts, "eurosat_ms": _write_eurosat}.get(dataset, _write_shards)
    writer(folder)
    write_atomically(folder / DONE, b"synthetic data of sader reproduce --tiny\n")
    return folder


def _write_sen2(folder: Path) -> None:
    bands = ("B04", "B03", "B02", "B08")
    for part, tiles in (("train", ("T01AAA", "T02AAA")), ("val", ("T03AAA",)), ("test", ("T04AAA", "T05AAA"))):
        for tile in tiles:
            for number in range(2):
                series = _series(10 * int(tile[1:3]) + number, dates=4, bands=bands)
                place = folder / "Sen2_MTC" / tile
                _write_tif(place / "cloudless" / f"{tile}_{number}.tif", series.clear)
                for k in range(3):
                    _write_tif(place / "cloud" / f"{tile}_{number}_{k}.tif", series.cloudy[k + 1])
        write_atomically(folder / f"{part}.txt", ("\n".join(tiles) + "\n").encode())


def _write_ts(folder: Path) -> None:
    for seed, roi in enumerate(("ROIs1868/114", "ROIs2017/117", "ROIs1868/73")):
        # The reader needs thirty dates, one of them clear: a few images are repeated.
        series = _series(seed, dates=4, bands=BANDS_13)
        for number in range(30):
            k = 0 if number == 9 else 1 + number % 3
            day = date(2018, 1, 3) + timedelta(days=12 * number)
            name = f"s2_{roi.replace('/', '_')}_ImgNo_{number}_{day}_patch_0.tif"
            path = folder / roi / "S2" / str(number) / name
            _write_tif(path, series.clear if k == 0 else series.cloudy[k])
            np.save(path.with_name(f"{path.stem}_mask.npy"), np.zeros_like(series.cloud_mask[0]) if k == 0
                    else series.cloud_mask[k])  # fmt: skip


def _write_eurosat(folder: Path) -> None:
    for seed, name in enumerate(("Forest", "River")):
        for number in (1, 2):
            image = _series(10 * seed + number, dates=1, bands=BANDS_13, side=64).clear
            _write_tif(folder / name / f"{name}_{number}.tif", image)


def _write_shards(folder: Path) -> None:
    for part, seeds in (("train", (1, 2)), ("validation", (3, 4))):
        records = []
        for seed in seeds:
            series = _series(seed, dates=4, bands=BANDS_RGBN, side=2 * SIDE)
            labels = np.where(series.cloud_mask, THICK, CLEAR).astype(np.uint8)
            dn = np.clip(series.cloudy * 10000, 1, 10000).astype(np.uint16)
            records.append(
                SeriesRecord(dn, f"place_{seed}", "cloudsen12", BANDS_RGBN, labels, group=f"val/place_{seed}")
            )
        write_shard(folder / part / "tiny-000.shard", records)


def _series(seed: int, *, dates: int, bands: tuple[str, ...], side: int = SIDE) -> SyntheticSeries:
    return make_series(seed, size=(side, side), dates=dates, bands=bands, coverage=[0.0] + [0.35] * (dates - 1))


def _write_tif(path: Path, image: np.ndarray) -> None:
    rasterio = require("rasterio", extra="geo", purpose="writing GeoTIFFs")
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = np.clip(np.rint(image * 10000), 1, 10000).astype(np.uint16)
    profile = {"driver": "GTiff", "count": len(counts), "height": counts.shape[1], "width": counts.shape[2]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path, "w", dtype="uint16", **profile) as file:
            file.write(counts)
