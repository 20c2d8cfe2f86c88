"""The setting of `sader reproduce` on one dataset: data, budget and scored items.

`--tiny` runs a whole plan in minutes on a CPU with synthetic data and tiny networks. Its folders have the layouts of
the public datasets, so that reading, packing, training and scoring are the real ones. The scores mean nothing.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sader.bands import BANDS_13, BANDS_RGBN
from sader.data.batch import CLEAR, THICK
from sader.data.items import Item
from sader.data.pack import EUROSAT_BANDS
from sader.data.public.dataset import PublicDataset, ReadOptions
from sader.data.public.registry import open_dataset, training_sampler
from sader.data.shards import SeriesRecord, fingerprint, write_shard
from sader.data.synthetic.scene import SyntheticSeries, make_series
from sader.errors import DataError, require
from sader.evaluation.data import load_records, open_data
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import HELPING_BANDS, HERE, SCORED_BANDS
from sader.evaluation.request import DataOptions, DataRequest, ReproduceRequest
from sader.files import locked, write_atomically

EUROSAT = "eurosat_ms"
"""Name in --data of the images on which the guides of the paper's tables are trained."""


@dataclass(frozen=True)
class Setting:
    """A request on one dataset: everything that its rows share."""

    request: ReproduceRequest
    dataset: str
    """A public dataset, or `plans.HERE`."""
    root: Path | None = None
    """Folder of the public dataset."""
    guide_root: Path | None = None
    """Folder of EuroSAT-MS; None: guides are trained on the targets of the dataset."""

    @property
    def out(self) -> Path:
        """The folder of runs, rows and tables."""
        return Path(self.request.out)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that are scored."""
        return ("clean", "paper") if self.dataset == HERE else ("paper",)

    @property
    def label(self) -> str:
        """The name of the dataset's folder; each sampler has its own."""
        sampler = self.request.sampler
        return self.dataset if self.dataset == HERE or sampler == "leak_free" else f"{self.dataset}-{sampler}"

    @property
    def budget(self) -> str:
        """The budget of every system, in words."""
        request = self.request
        parts = [f"{request.seconds:g} s of training"] if request.seconds else []
        parts += [f"{request.steps} steps"] if request.steps else []
        return " and at most ".join(parts) + " for each system" if parts else "each system's own number of epochs"

    @property
    def scored(self) -> DataRequest:
        """The data that is scored."""
        request = self.request
        if self.dataset == HERE:
            paths = tuple(map(Path, request.validation))
            return DataRequest(paths, split="all", limit=request.limit, seed=request.seed)
        assert self.root is not None
        options = {option.name: getattr(request, option.name) for option in fields(DataOptions)}
        return DataRequest((self.root,), split=request.split, dataset=self.dataset, **options)

    @property
    def scored_key(self) -> dict[str, Any]:
        """Everything the scores of a row depend on besides its weights."""
        request, data = self.request, asdict(self.scored)
        if self.dataset == HERE:
            data["data"] = fingerprint(request.validation)
        else:
            # Of a coverage table the values, of a partial dataset the places on disk.
            data |= {"data": [self.root and self.root.name], "coverage": None, "facts": open_data(self.scored).facts}
        return {**data, "examples": request.examples, "tiny": request.tiny, "lpips": request.lpips}


def tiny_setting(setting: Setting) -> Setting:
    """Return the setting on synthetic data, with two training steps unless another budget is given."""
    request, folder = setting.request, write_data(setting.dataset, setting.out / "data" / setting.dataset)
    request = replace(request, steps=request.steps if request.seconds or request.steps else 2)
    if setting.dataset == HERE:
        shards, validation = (str(folder / "train"),), (str(folder / "validation"),)
        return replace(setting, request=replace(request, limit=2, data=shards, validation=validation))
    images = write_data(EUROSAT, setting.out / "data" / EUROSAT)
    request = replace(request, partial=True, examples=min(request.examples, 2))
    return replace(setting, request=request, root=folder, guide_root=images)


def training_set(setting: Setting) -> PublicDataset:
    """Return the training split of the setting's public dataset."""
    request = setting.request
    assert setting.root is not None
    options = ReadOptions(lists=request.lists, partial=request.partial, coverage=request.coverage, draws=request.draws)
    sampler = training_sampler(setting.dataset, request.sampler)
    return open_dataset(setting.root, dataset=setting.dataset, split="train", sampler=sampler, options=options)


@lru_cache(maxsize=4)
def scored_items(setting: Setting, task: str) -> tuple[Sequence[Item], str, dict[str, Any]]:
    """Return the items of a task, the protocol and the facts of the data."""
    data = open_data(setting.scored)
    items = data.items(task, SCORED_BANDS[setting.dataset], HELPING_BANDS[setting.dataset])
    return items, data.protocol, {**data.facts, "items": len(items)}


def check_data(setting: Setting) -> None:
    """Raise for data that cannot be used, before anything is trained."""
    if setting.dataset != HERE:
        training_set(setting).check()
        dataset = open_data(setting.scored).dataset
        assert dataset is not None
        dataset.check()
        return
    request = setting.request
    if not request.data or not request.validation:
        missing = "--data" if not request.data else "--validation"
        raise DataError(f"no {missing} given; the plan here trains on --data SHARDS and scores on --validation SHARDS.")
    for path in (*request.data, *request.validation):
        if not Path(path).exists():
            raise DataError(f"{path} does not exist; expected shards (write them with: sader data pack).")
    train = {(record.source, record.name) for record in load_records(request.data, split="all")}
    held = load_records(request.validation, split="all")
    both = sorted(f"{r.source}/{r.name}" for r in held if (r.source, r.name) in train)
    if both:
        raise DataError(f"{len(both)} places are in both --data and --validation ({both[0]}); expected none in both.")


def digest(values: dict[str, Any]) -> str:
    """Return a key of `values`."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


TINY_SIDE = 32
COMPLETE = "complete"
_JUDGE = "judge_widths=[4,4]"
_MTCDN = (
    "widths=[8, 16]", "blocks=[1, 1]", "fusion_width=8", "key_width=8", "head_width=8", "kernel=3", "emb_width=16",
    "stem=1",
)  # fmt: skip
_TINY_NETWORKS: dict[str, tuple[str, ...]] = {
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
_TINY_TRAIN = f"device=cpu batch_size=2 accumulate=1 dates=3 crop={TINY_SIDE} log_every=1 checkpoint_every=1"
TINY_TRAIN = tuple(f"train.{text}" for text in _TINY_TRAIN.split())


def tiny_overrides(base: str) -> tuple[str, ...]:
    """Return the changes that make the network and the run of `base` tiny, without the number of steps."""
    return (*(f"model.network.{text}" for text in _TINY_NETWORKS[base]), *TINY_TRAIN)


def write_data(dataset: str, folder: Path) -> Path:
    """Write synthetic data of the dataset (or shards, for any other name) into `folder` once; return the folder."""
    writer = {paper.SEN2: _write_sen2, paper.TS: _write_ts, EUROSAT: _write_eurosat}.get(dataset, _write_shards)
    with locked(folder.with_suffix(".lock"), wait=True):
        if not (folder / COMPLETE).is_file():
            writer(folder)
            write_atomically(folder / COMPLETE, b"synthetic data of sader reproduce --tiny\n")
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
            image = _series(10 * seed + number, dates=1, bands=EUROSAT_BANDS, side=64).clear
            _write_tif(folder / name / f"{name}_{number}.tif", image)


def _write_shards(folder: Path) -> None:
    for part, seeds in (("train", (1, 2)), ("validation", (3, 4))):
        records = []
        for seed in seeds:
            series = _series(seed, dates=4, bands=BANDS_RGBN, side=2 * TINY_SIDE)
            labels = np.where(series.cloud_mask, THICK, CLEAR).astype(np.uint8)
            dn = np.clip(series.cloudy * 10000, 1, 10000).astype(np.uint16)
            records.append(
                SeriesRecord(dn, f"place_{seed}", "cloudsen12", BANDS_RGBN, labels, group=f"val/place_{seed}")
            )
        write_shard(folder / part / "tiny-000.shard", records)


def _series(seed: int, *, dates: int, bands: tuple[str, ...], side: int = TINY_SIDE) -> SyntheticSeries:
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
