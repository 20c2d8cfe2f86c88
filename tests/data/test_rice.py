"""RICE and CUHK-CR: pairs of pictures, lists, and repeated images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sader.data.public.dataset import ReadOptions
from sader.data.public.registry import open_dataset
from sader.errors import BandError, ConfigError, DataError, ShapeError


def colour(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (12, 12, 3)).astype(np.uint8)


@pytest.fixture
def rice(tmp_path: Path, write_picture) -> Path:
    for number in range(12):
        seed = 3 if number == 11 else number  # 11 repeats 3
        write_picture(tmp_path / "RICE1/label" / f"{number}.png", colour(seed))
        write_picture(tmp_path / "RICE1/cloud" / f"{number}.png", colour(100 + seed))
    for number in range(3):
        write_picture(tmp_path / "RICE2/label" / f"{number}.png", colour(number))
        write_picture(tmp_path / "RICE2/cloud" / f"{number}.png", colour(200 + number))
        mask = np.zeros((12, 12), np.uint8)
        mask[:4] = 255
        write_picture(tmp_path / "RICE2/mask" / f"{number}.png", mask)
    return tmp_path


def test_rice_values_and_masks(rice: Path):
    series = open_dataset(rice, dataset="rice1", split="all")[10]
    assert series.name == "RICE1_10"
    assert series.bands == ("B04", "B03", "B02")
    np.testing.assert_allclose(series.clear, colour(10).transpose(2, 0, 1) / 255, atol=1e-7)
    np.testing.assert_allclose(series.cloudy[0], colour(110).transpose(2, 0, 1) / 255, atol=1e-7)
    assert series.cloud_mask is None
    second = open_dataset(rice, dataset="rice2", split="all")[0]
    assert second.cloud_mask is not None
    assert second.cloud_mask.sum() == 48
    assert second.item().label_known


def test_rice_lists_and_repeated_images(rice: Path):
    (rice / "RICE1" / "train_list.txt").write_text("".join(f"{k}.png\n" for k in range(9)))
    (rice / "RICE1" / "test.txt").write_text("9\n10\n11\n")
    published = open_dataset(rice, dataset="rice1", split="test", sampler="published")
    ours = open_dataset(rice, dataset="rice1", split="test")
    assert [entry.name for entry in published.entries] == ["RICE1_9", "RICE1_10", "RICE1_11"]
    assert [entry.name for entry in ours.entries] == ["RICE1_9", "RICE1_10"]  # 11 is image 3 of the training
    assert ours.facts["left_out"] == 1
    assert len(open_dataset(rice, dataset="rice1", split="train")) == 9


def test_our_own_split_keeps_equal_images_together(rice: Path):
    options = ReadOptions(lists="hash")
    parts = [
        {
            entry.name
            for entry in open_dataset(rice, dataset="rice1", split=s, sampler="published", options=options).entries
        }
        for s in ("train", "val", "test")
    ]
    assert sum(map(len, parts)) == 12
    assert any({"RICE1_3", "RICE1_11"} <= part for part in parts)


def test_rice_errors(rice: Path, write_picture):
    with pytest.raises(
        DataError, match=r"no split file .*expected test\.txt or test_list\.txt.*RICE comes without lists"
    ):
        open_dataset(rice, dataset="rice1", split="test")
    (rice / "test.txt").write_text("99\n")
    with pytest.raises(DataError, match=r"label/99\.png does not exist, but test\.txt of the folder lists it"):
        open_dataset(rice, dataset="rice1", split="test", sampler="published")
    dataset = open_dataset(rice, dataset="rice1", split="all")
    write_picture(rice / "RICE1/cloud/0.png", np.zeros((12, 12), np.uint8))
    with pytest.raises(BandError, match=r"cloud/0\.png has 1 channels \(L\); expected 3"):
        dataset[0]
    write_picture(rice / "RICE1/cloud/1.png", np.zeros((10, 12, 3), np.uint8))
    with pytest.raises(ShapeError, match=r"cloud/1\.png is 10x12 pixels, but 1\.png is 12x12"):
        dataset[1]
    broken = rice / "RICE1/cloud/2.png"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(DataError, match=r"cannot read .*cloud/2\.png"):
        dataset[2]
    (rice / "RICE1/cloud/5.png").unlink()
    with pytest.raises(DataError, match=r"cloud/5\.png does not exist"):
        open_dataset(rice, dataset="rice1", split="all")
    with pytest.raises(DataError, match="has no RICE2/cloud and RICE2/label"):
        open_dataset(rice / "RICE1" / "label", dataset="rice2", split="all")


# ---------------------------------------------------------------- CUHK-CR


@pytest.fixture
def cuhk(tmp_path: Path, write_picture) -> Path:
    top = tmp_path / "数据集"  # the archive's top folder is not ASCII
    for part, numbers in (("train", (1, 2)), ("test", (3, 4, 5))):
        for number in numbers:
            seed = {4: 1, 5: 3}.get(number, number)  # 4 repeats a training image, 5 a test image
            for kind, shift in (("label", 0), ("cloud", 100)):
                write_picture(top / "C-CUHK/CUHK-CR1" / part / kind / f"{number}.png", colour(seed + shift))
                grey = np.full((12, 12), number * 10 + shift, np.uint8)
                write_picture(top / "nir/CUHK-CR1" / part / kind / f"{number}.png", grey)
    return tmp_path


def test_cuhk_bands_and_repeated_images(cuhk: Path):
    published = open_dataset(cuhk, dataset="cuhk_cr1", split="test", sampler="published")
    ours = open_dataset(cuhk, dataset="cuhk_cr1", split="test")
    assert len(published) == 3
    assert [entry.name for entry in ours.entries] == ["CUHK-CR1_test_3"]
    assert ours.facts["left_out"] == 2
    series = published[0]
    assert series.bands == ("B04", "B03", "B02", "B08")
    np.testing.assert_allclose(series.clear[:3], colour(3).transpose(2, 0, 1) / 255, atol=1e-7)
    np.testing.assert_allclose(series.clear[3], 30 / 255, atol=1e-7)
    np.testing.assert_allclose(series.cloudy[0, 3], 130 / 255, atol=1e-7)
    assert len(open_dataset(cuhk / "数据集" / "C-CUHK", dataset="cuhk_cr1", split="all")[0].bands) == 4


def test_cuhk_without_infrared_is_three_bands(cuhk: Path):
    (cuhk / "数据集" / "nir").rename(cuhk / "elsewhere")
    dataset = open_dataset(cuhk, dataset="cuhk_cr1", split="train")
    assert dataset.bands == dataset[0].bands == ("B04", "B03", "B02")
    assert dataset.facts["infrared"] is False


def test_cuhk_errors(cuhk: Path):
    with pytest.raises(DataError, match="has no CUHK-CR2/train"):
        open_dataset(cuhk, dataset="cuhk_cr2", split="test")
    with pytest.raises(ConfigError, match="cuhk_cr1 has no split 'val'; it has train, test, all"):
        open_dataset(cuhk, dataset="cuhk_cr1", split="val")
    (cuhk / "数据集/nir/CUHK-CR1/test/cloud/3.png").unlink()
    with pytest.raises(DataError, match=r"nir/CUHK-CR1/test/cloud/3\.png does not exist"):
        open_dataset(cuhk, dataset="cuhk_cr1", split="test")
