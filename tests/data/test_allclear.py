"""AllClear: lists as JSON with foreign paths, larger images with empty edges, cloud and shadow masks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sader.data.public.dataset import ReadOptions
from sader.data.public.registry import open_dataset
from sader.errors import BandError, ConfigError, DataError, ShapeError

FOREIGN = "/scratch/allclear/dataset_v3/dataset_30k_v4"
DAYS = (1, 6, 11, 16)  # the last is the target


def file_of(day: int, sensor: str = "s2_toa", roi: str = "roi7") -> str:
    return f"{roi}/2022_1/{sensor}/{roi}_{sensor}_2022_1_{day}_median.tif"


def when(day: int) -> str:
    return f"2022-01-{day:02d} 10:11:12"


def write_list(root: Path, inputs=DAYS[:3], name: str = "test_tx3_s2-s1_100pct_1proi.json") -> Path:
    sample = {
        "roi": ["roi7", [48.1, 11.5]],
        "s2_toa": [[when(day), f"{FOREIGN}/{file_of(day)}"] for day in inputs],
        "target": [[when(DAYS[3]), f"{FOREIGN}/{file_of(DAYS[3])}"]],
    }
    path = root / "metadata" / "datasets" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"0": sample}))
    return path


@pytest.fixture
def root(tmp_path: Path, write_tif) -> Path:
    for day in DAYS:
        image = np.full((13, 260, 262), np.nan, np.float32)  # NaN edges, cut away
        image[:, 2:258, 3:259] = 1000 + day
        image[:, 2, 3] = np.nan  # and one inside
        write_tif(tmp_path / "data" / file_of(day), image)
        masks = np.zeros((5, 260, 262), np.float32)
        masks[1, :42] = 1  # cloud in band 2
        masks[4, -42:] = 1  # shadow in band 5
        masks[2] = 1  # other bands say other things
        write_tif(tmp_path / "data" / file_of(day, "cld_shdw"), masks)
    write_list(tmp_path, inputs=(11, 1, 6))
    return tmp_path


def test_values_dates_and_masks(root: Path):
    dataset = open_dataset(root, split="test")
    assert dataset.request.name == "allclear"
    assert len(dataset) == 1
    series = dataset[0]
    assert series.cloudy.shape == (3, 13, 256, 256)
    np.testing.assert_allclose(series.cloudy[:, 0, 100, 100], (0.1001, 0.1006, 0.1011), atol=1e-6)  # sorted by time
    assert series.days == (0.0, 5.0, 10.0)
    assert series.target_day == 15.0
    assert not series.valid[:, 0, 0].any()
    assert series.valid[:, 1:].all()
    assert series.cloud_mask is not None
    assert series.cloud_mask[0, :40].all()
    assert series.cloud_mask[0, -40:].all()
    assert not series.cloud_mask[0, 40:216].any()
    assert series.clear_valid.sum() == 176 * 256  # a target is scored where it is clear
    assert dataset.facts["list_file_sha256"]


def test_leak_free_leaves_out_inputs_of_the_target_day(root: Path):
    write_list(root, inputs=(1, 6, 16))
    published = open_dataset(root, split="test", sampler="published")[0]
    ours = open_dataset(root, split="test")[0]
    assert published.leaks
    assert len(published.cloudy) == 3
    assert not ours.leaks
    assert len(ours.cloudy) == 2


def test_the_list_must_be_one_and_whole(root: Path):
    with pytest.raises(DataError, match=r"no train_\*\.json"):
        open_dataset(root, split="train")
    second = write_list(root, name="test_tx12_s2-s1_10pct.json")
    with pytest.raises(DataError, match="2 lists of split test"):
        open_dataset(root, split="test")
    assert len(open_dataset(root, split="test", options=ReadOptions(lists=second))) == 1
    second.write_text("{")
    with pytest.raises(DataError, match=r"cannot read the list .*tx12"):
        open_dataset(root, split="test", options=ReadOptions(lists=second))
    second.write_text('{"4": {"roi": ["roi7", [0, 0]], "s2_toa": []}}')
    with pytest.raises(DataError, match=r"series 4 .* has no target"):
        open_dataset(root, split="test", options=ReadOptions(lists=second))


def test_missing_and_broken_files(root: Path, write_tif):
    (root / "data" / file_of(6, "cld_shdw")).unlink()
    with pytest.raises(DataError, match=r"roi7_cld_shdw_2022_1_6_median\.tif does not exist"):
        open_dataset(root, split="test")[0]
    write_tif(root / "data" / file_of(6), np.ones((13, 200, 300), np.float32))
    with pytest.raises(ShapeError, match="is 200x300 pixels; expected at least 256"):
        open_dataset(root, split="test")[0]
    write_tif(root / "data" / file_of(6), np.full((4, 256, 256), 900, np.float32))
    with pytest.raises(BandError, match="has 4 bands; expected 13"):
        open_dataset(root, split="test")[0]
    (root / "data" / file_of(6)).unlink()
    with pytest.raises(DataError, match=r"roi7_s2_toa_2022_1_6_median\.tif does not exist, but .* lists it \(1 of 1"):
        open_dataset(root, split="test")
    with pytest.raises(ConfigError, match="allclear has no split 'all'"):
        open_dataset(root, split="all")
