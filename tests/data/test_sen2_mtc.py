"""Sen2_MTC_New and Sen2_MTC_Old in their published layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sader.data.public.dataset import ReadOptions
from sader.data.public.registry import open_dataset
from sader.data.public.splits import frozen_list, list_hash
from sader.errors import BandError, DataError, SaderError, ShapeError, ValueRangeError
from sader.method.metrics import mtc_stretch

TILES = {"train": ["T49SCC_R018", "T47NQA_R018"], "val": ["T22MCT_R024"], "test": ["T41VMJ_R006"]}


def scene(seed: int, side: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(200, 3000, (4, side, side)).astype(np.uint16)


@pytest.fixture
def new_root(tmp_path: Path, write_tif) -> Path:
    for part, tiles in TILES.items():
        (tmp_path / f"{part}.txt").write_text("\ufeff" + "\n".join(tiles) + "\r\n\n", encoding="utf-8")
        for t, tile in enumerate(tiles):
            for n in (0, 2, 10):
                clear = scene(n + 100 * t)
                write_tif(tmp_path / "Sen2_MTC" / tile / "cloudless" / f"{tile}_{n}.tif", clear)
                for date in range(3):
                    cloudy = clear.copy()
                    cloudy[:, 4 * date : 4 * date + 4] = 9000 + 1000 * date
                    write_tif(tmp_path / "Sen2_MTC" / tile / "cloud" / f"{tile}_{n}_{date}.tif", cloudy)
    return tmp_path


def test_splits_counts_and_order(new_root: Path):
    sizes = {split: len(open_dataset(new_root, split=split)) for split in ("train", "val", "test", "all")}
    assert sizes == {"train": 6, "val": 3, "test": 3, "all": 12}
    names = [entry.name for entry in open_dataset(new_root, split="test").entries]
    assert names == ["T41VMJ_R006_0", "T41VMJ_R006_2", "T41VMJ_R006_10"]  # not the order of the platform's listing


def test_files_a_mac_leaves_behind_are_no_images(new_root: Path):
    (new_root / "Sen2_MTC/T41VMJ_R006/cloudless/._T41VMJ_R006_0.tif").write_bytes(b"x")
    assert len(open_dataset(new_root, split="test")) == 3


def test_values_and_bands(new_root: Path):
    series = open_dataset(new_root, split="test")[1]
    assert series.bands == ("B04", "B03", "B02", "B08")
    assert series.cloudy.shape == (3, 4, 16, 16)
    np.testing.assert_allclose(series.clear, scene(2) / 10000, atol=1e-7)
    # Each date has its cloud where it was written: dates are not mixed up; above reflectance 1 is cut.
    np.testing.assert_allclose(series.cloudy[1][:, 4:8], 1.0)
    np.testing.assert_allclose(series.cloudy[0][:, :4], 0.9)
    np.testing.assert_allclose(series.cloudy[2][:, :8], series.clear[:, :8])
    assert series.valid.all()
    assert not series.leaks


def test_the_published_protocol_stretches_red_green_and_blue_by_one_range(new_root: Path):
    import torch

    dataset = open_dataset(new_root, split="test")
    assert dataset.request.protocol == "mtc_stretch"
    assert open_dataset(new_root, split="test", protocol="reflectance").request.protocol == "reflectance"
    stretched = mtc_stretch(torch.from_numpy(dataset[0].clear[:3])[None])[0].numpy()
    # By hand: counts cut to 2000, minus the image's minimum, by its maximum, over red, green, blue.
    counts = np.clip(scene(0)[:3].astype(float), 0, 2000)
    counts -= counts.min()
    np.testing.assert_allclose(stretched, counts / counts.max(), atol=1e-6)


def test_the_shipped_list_is_the_published_one_and_disjoint():
    lists = {split: frozen_list("sen2_mtc_new", split) for split in ("train", "val", "test")}
    assert [len(each.names) for each in lists.values()] == [34, 5, 10]
    tiles = [name.split("_")[0] for each in lists.values() for name in each.names]
    assert len(set(tiles)) == 49  # no tile on two sides, whatever its orbit
    assert lists["test"].sha256 == list_hash(reversed(lists["test"].names))


def test_facts_say_whether_the_lists_are_the_published_ones(new_root: Path):
    facts = open_dataset(new_root, split="test").facts
    assert facts["published_lists"] is False
    assert facts["lists"] == "test.txt of the folder"
    assert facts["lists_sha256"] == list_hash(TILES["test"])
    (new_root / "test.txt").write_text("\n".join(frozen_list("sen2_mtc_new", "test").names))
    options = ReadOptions(partial=True)
    facts = open_dataset(new_root, split="test", options=options).facts
    assert facts["published_lists"] is True
    assert len(facts["missing_places"]) == 9
    frozen = open_dataset(new_root, split="test", options=ReadOptions(lists="frozen", partial=True))
    assert len(frozen) == 3


def test_a_missing_split_file_is_named_with_a_way_out(new_root: Path):
    (new_root / "val.txt").unlink()
    with pytest.raises(
        DataError, match=r"no split file .*expected val\.txt, found test\.txt, train\.txt.*lists='frozen'"
    ):
        open_dataset(new_root, split="val")


def test_a_listed_tile_that_is_not_there(new_root: Path):
    (new_root / "test.txt").write_text("T41VMJ_R006\nT31TBG_R051\n")
    with pytest.raises(DataError, match=r"1 of 2 tiles .*T31TBG_R051.*--partial"):
        open_dataset(new_root, split="test")


def test_a_wrong_folder(tmp_path: Path):
    with pytest.raises(DataError, match="has no folder Sen2_MTC; expected"):
        open_dataset(tmp_path, dataset="sen2_mtc_new", split="test")
    with pytest.raises(DataError, match="does not exist; expected the folder of sen2_mtc_new"):
        open_dataset(tmp_path / "nowhere", dataset="sen2_mtc_new", split="test")


def test_a_missing_date_is_named_when_opening(new_root: Path):
    (new_root / "Sen2_MTC/T41VMJ_R006/cloud/T41VMJ_R006_2_1.tif").unlink()
    with pytest.raises(DataError, match=r"T41VMJ_R006_2_1\.tif does not exist"):
        open_dataset(new_root, split="test")


def break_bands(path: Path, write_tif) -> None:
    write_tif(path, scene(0)[:3])


def break_size(path: Path, write_tif) -> None:
    write_tif(path, scene(0, side=20))


def break_scale(path: Path, write_tif) -> None:
    write_tif(path, (scene(0) / 10000).astype(np.float32))


def break_bytes(path: Path, write_tif) -> None:
    path.write_bytes(path.read_bytes()[:300])


def break_all(path: Path, write_tif) -> None:
    path.write_bytes(b"not an image")


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (break_bands, BandError, r"has 3 bands; expected 4: B04, B03, B02, B08"),
        (break_size, ShapeError, r"is 20x20 pixels, but T41VMJ_R006_0\.tif is 16x16"),
        (break_scale, ValueRangeError, r"values up to 0\.\d+; expected counts"),
        (break_bytes, DataError, r"cannot read .*T41VMJ_R006_0_1\.tif: .*Copy it again"),
        (break_all, DataError, r"cannot read .*T41VMJ_R006_0_1\.tif: .*12 bytes"),
    ],
)
def test_a_broken_image_is_named(new_root: Path, write_tif, spoil, error: type[SaderError], text: str):
    path = new_root / "Sen2_MTC/T41VMJ_R006/cloud/T41VMJ_R006_0_1.tif"
    spoil(path, write_tif)
    dataset = open_dataset(new_root, split="test")
    with pytest.raises(error, match=text) as raised:
        dataset[0]
    assert "T41VMJ_R006_0_1.tif" in str(raised.value)
    assert dataset[1].clear.shape == (4, 16, 16)  # the others still can be read


def test_a_channel_last_tiff_of_pages_is_understood(new_root: Path):
    from PIL import Image

    path = new_root / "Sen2_MTC/T41VMJ_R006/cloudless/T41VMJ_R006_0.tif"
    rows = [Image.fromarray(row) for row in scene(5).transpose(1, 2, 0)]  # 16 pages of 16 x 4
    rows[0].save(path, save_all=True, append_images=rows[1:])
    np.testing.assert_allclose(open_dataset(new_root, split="test")[0].clear, scene(5) / 10000, atol=1e-7)


def test_pixels_of_zero_in_every_band_are_not_observed(new_root: Path, write_tif):
    image = scene(3)
    image[:, 0, :5] = 0
    image[0, 1, :] = 0  # black in one band is a value
    write_tif(new_root / "Sen2_MTC/T41VMJ_R006/cloudless/T41VMJ_R006_0.tif", image)
    series = open_dataset(new_root, split="test")[0]
    assert (~series.clear_valid).sum() == 5
    np.testing.assert_array_equal(series.item().scored, series.clear_valid)  # no truth, no question
    record = series.record("sen2_mtc_new")
    assert (record.dn[0] == 0).all(0).sum() == 5
    assert record.dn[0][0, 1].min() == 1


# ---------------------------------------------------------------- Sen2_MTC_Old

IDS = ["15RTN_70002000", "15RTN_0", "14RNQ_50009000", "14SQB_20006000", "12TUR_1000"]


@pytest.fixture
def old_root(tmp_path: Path, write_picture) -> Path:
    base = tmp_path / "multipleImage"
    for k, name in enumerate(IDS):
        write_picture(base / "clear" / f"{name}.jpg", np.full((16, 24, 3), (40 + k, 80, 120), np.uint8))
        for date in range(3):
            write_picture(base / "cloudy" / f"{name}_{date}.jpg", np.full((16, 24, 3), 100 + 40 * date, np.uint8))
            write_picture(base / "cloudy" / f"{name}_{date}_ir.jpg", np.full((16, 24), 60 + 10 * date, np.uint8))
    return tmp_path


def test_old_values_and_infrared(old_root: Path):
    dataset = open_dataset(old_root, split="all")
    assert dataset.request.name == "sen2_mtc_old"
    assert len(dataset) == 5
    series = next(each for each in dataset if each.name == "15RTN_70002000")
    assert series.group == "15RTN"
    assert series.cloudy.shape == (3, 3, 16, 24)
    np.testing.assert_allclose(series.clear.mean((1, 2)) * 255, (40, 80, 120), atol=2)
    np.testing.assert_allclose(series.cloudy.mean((1, 2, 3)) * 255, (100, 140, 180), atol=2)
    assert series.aux is not None
    assert series.aux_bands == ("B08",)
    np.testing.assert_allclose(series.aux.mean((1, 2, 3)) * 255, (60, 70, 80), atol=2)
    item = series.item(("B02", "B03", "B04"), ("B08",))
    assert item.bands == ("B02", "B03", "B04")
    assert item.aux_bands == ("B08",)


def test_old_has_no_official_split(old_root: Path):
    with pytest.raises(DataError, match=r"no split file .*no official split.*lists='hash'"):
        open_dataset(old_root, split="test")
    with pytest.raises(DataError, match="no published list to ship"):
        open_dataset(old_root, split="test", options=ReadOptions(lists="frozen"))


def test_old_by_tile_keeps_tiles_together(old_root: Path):
    options = ReadOptions(lists="hash")
    parts = {s: open_dataset(old_root, split=s, sampler="published", options=options) for s in ("train", "val", "test")}
    groups = [{entry.group for entry in part.entries} for part in parts.values()]
    assert sum(len(part) for part in parts.values()) == 5
    assert not groups[0] & groups[1] | groups[0] & groups[2] | groups[1] & groups[2]
    assert "not published" in parts["test"].facts["lists"]


def test_old_leak_free_training_leaves_out_test_tiles_of_the_new_set(old_root: Path):
    (old_root / "multipleImage" / "train.txt").write_text("15RTN\n12TUR\n14RNQ_50009000\n")
    published = open_dataset(old_root, split="train", sampler="published")
    ours = open_dataset(old_root, split="train")
    assert "12TUR_1000" in [entry.name for entry in published.entries]  # T12TUR_R027 tests in Sen2_MTC_New
    assert [entry.name for entry in ours.entries] == ["14RNQ_50009000", "15RTN_0", "15RTN_70002000"]
    assert ours.facts["left_out"] == 1


def test_old_errors_name_the_file(old_root: Path, write_picture):
    base = old_root / "multipleImage"
    write_picture(base / "cloudy" / "15RTN_0_1.jpg", np.full((16, 24), 9, np.uint8))
    dataset = open_dataset(old_root, split="all")
    index = [entry.name for entry in dataset.entries].index("15RTN_0")
    with pytest.raises(BandError, match=r"15RTN_0_1\.jpg has 1 channels"):
        dataset[index]
    (base / "cloudy" / "15RTN_0_1.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(DataError, match=r"cannot read .*15RTN_0_1\.jpg"):
        dataset[index]
    (base / "cloudy" / "15RTN_0_2_ir.jpg").unlink()
    with pytest.raises(DataError, match=r"15RTN_0_2_ir\.jpg does not exist"):
        open_dataset(old_root, split="all")
    with pytest.raises(DataError, match="has no folders clear and cloudy"):
        open_dataset(base / "clear", dataset="sen2_mtc_old", split="all")
