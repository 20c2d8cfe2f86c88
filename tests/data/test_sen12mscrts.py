"""SEN12MS-CR-TS: layout, regions, and samplers with and without the leak."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from sader.bands import BANDS_13
from sader.cli.main import main
from sader.data.public.dataset import ReadOptions
from sader.data.public.registry import open_dataset, training_sampler
from sader.data.public.sen12mscrts import coverage_table
from sader.data.public.splits import choose_dates
from sader.data.shards import read_shards
from sader.data.synthetic.scene import make_series
from sader.errors import BandError, ConfigError, DataError

SIDE = 8


def patch_file(root: Path, roi: str, kind: str, number: int, patch: int) -> Path:
    day = date(2018, 1, 3) + timedelta(days=12 * number)
    name = f"{kind.lower()}_{roi.replace('/', '_')}_ImgNo_{number}_{day}_patch_{patch}.tif"
    return root / roi / kind / str(number) / name


def write_roi(root: Path, write_tif, roi: str, *, clearest: int, patches=(0,), masks=True, sar=False) -> None:
    """Write 30 dates; the mean of date k is 1000 + 10 k counts, its mask covers half, that of `clearest` nothing."""
    for number in range(30):
        for patch in patches:
            path = patch_file(root, roi, "S2", number, patch)
            write_tif(path, np.full((13, SIDE, SIDE), 1000 + 10 * number + patch, np.uint16))
            if sar:
                echo = np.full((2, SIDE, SIDE), -25 + number / 2, np.float32)
                write_tif(patch_file(root, roi, "S1", number, patch), echo)
            if masks:
                mask = np.zeros((SIDE, SIDE), bool)
                mask[: 0 if number == clearest else SIDE // 2] = True
                np.save(path.with_name(f"{path.stem}_mask.npy"), mask)


@pytest.fixture
def east_asia(tmp_path: Path, write_tif) -> Path:
    write_roi(tmp_path, write_tif, "ROIs1868/73", clearest=1, patches=(0, 2, 10), sar=True)
    write_roi(tmp_path, write_tif, "ROIs1868/119", clearest=20)
    write_roi(tmp_path, write_tif, "ROIs1970/139", clearest=0)
    return tmp_path


def test_east_asia_as_published_is_one_region(east_asia: Path):
    assert len(open_dataset(east_asia, dataset="sen12mscrts_ea", split="test")) == 5
    one = open_dataset(east_asia, dataset="sen12mscrts_ea_published", split="test")
    assert [entry.name for entry in one.entries] == [f"ROIs1868_73_patch_{k}" for k in (0, 2, 10)]
    assert {entry.group for entry in one.entries} == {"ROIs1868/73"}
    whole = open_dataset(east_asia, split="test", options=ReadOptions(partial=True))
    assert whole.request.name == "sen12mscrts"
    assert len(whole.facts["missing_places"]) == 10


def test_regions_missing_on_disk_change_the_score_and_are_an_error(east_asia: Path):
    with pytest.raises(DataError, match=r"6 of 6 regions of split train .*ROIs1868/114"):
        open_dataset(east_asia, dataset="sen12mscrts_ea", split="train")
    with pytest.raises(DataError, match=r"10 of 13 regions of split test"):
        open_dataset(east_asia, dataset="sen12mscrts", split="test")


def test_the_published_sampler_leaks_and_ours_does_not(east_asia: Path):
    name = "sen12mscrts_ea"
    published = open_dataset(east_asia, dataset=name, split="test", sampler="published")
    ours = open_dataset(east_asia, dataset=name, split="test")
    leaks = {series.group: series.leaks for series in published}
    assert leaks == {"ROIs1868/73": True, "ROIs1868/119": False, "ROIs1970/139": True}
    assert not any(series.leaks for series in ours)
    given, mine = published[0], ours[0]
    assert given.facts["target"] == mine.facts["target"] == 1
    assert given.facts["inputs"] == (0, 1, 2)
    assert given.facts["target_is_input"]
    assert mine.facts["inputs"] == (0, 2, 3)
    # By the pixels, not by the book-keeping.
    np.testing.assert_allclose(mine.cloudy[:, 0, 0, 0], (0.1, 0.102, 0.103), atol=1e-6)
    np.testing.assert_allclose(mine.clear[0, 0, 0], 0.101, atol=1e-6)
    assert mine.days == (0.0, 24.0, 36.0)
    assert mine.target_day == 12.0


def test_masks_and_radar_belong_to_the_chosen_dates(east_asia: Path):
    options = ReadOptions(sar="default")
    series = open_dataset(east_asia, dataset="sen12mscrts_ea_published", split="test", options=options)[0]
    assert series.cloud_mask is not None
    assert series.aux is not None
    assert series.cloud_mask.mean() == 0.5
    half = patch_file(east_asia, "ROIs1868/73", "S2", 9, 2)
    half.with_name(f"{half.stem}_mask.npy").unlink()  # one mask less: no mixture of two detectors
    assert open_dataset(east_asia, dataset="sen12mscrts_ea", split="test").facts["coverage"] == "rules"
    np.testing.assert_allclose(series.aux[:, 0, 0, 0], np.array((0, 2, 3)) / 50, atol=1e-6)
    item = series.item(("B02", "B03"))
    assert item.label_known
    assert item.cloudy.shape == (3, 2, SIDE, SIDE)


def test_the_random_sampler_is_keyed_and_never_leaks():
    cover = np.full(30, 0.5)
    cover[[4, 17, 29]] = 0
    drawn = [choose_dates("published_random", cover, number=number) for number in range(40)]
    assert {dates.target for dates in drawn} == {4, 17, 29}
    for dates in drawn:
        assert not dates.leaks
        assert len(dates.inputs) == 3
        around = sorted((*dates.inputs, dates.target))
        assert around == list(range(around[0], around[0] + 4))  # consecutive dates
    assert drawn == [choose_dates("published_random", cover, number=number) for number in range(40)]
    assert choose_dates("published_random", np.linspace(0.2, 0.9, 30)).inputs == (1, 2, 3)
    # The middle one of the windows that hold date 17: 14..17, 15..18, 16..19, 17..20.
    assert next(dates for dates in drawn if dates.target == 17).inputs == (16, 18, 19)


def test_leak_free_takes_no_second_image_of_the_target_day():
    days = [0.0, 0.0, 5.0, 10.0, 15.0]
    assert choose_dates("leak_free", [0.0, 0.9, 0.9, 0.9, 0.9], days=days).inputs == (2, 3, 4)
    assert choose_dates("leak_free", [0.9, 0.0, 0.9, 0.9, 0.9]).inputs == (0, 2, 3)  # nor the target, without days
    with pytest.raises(DataError, match="a patch has 2 dates of other days"):
        choose_dates("leak_free", [0.0, 0.9, 0.9, 0.9], days=[0, 0, 5, 6])
    with pytest.raises(DataError, match="a patch has 3 dates; expected at least 4"):
        choose_dates("published", [0.1, 0.2, 0.3])


def test_cover_by_rules_and_a_table_of_it(tmp_path: Path, write_tif):
    root = tmp_path / "data"
    write_roi(root, write_tif, "ROIs1868/73", clearest=0, masks=False)
    for number in range(30):  # white clouds that move, on every date but 6; date 3 is blank
        image = np.full((13, 32, 32), 900, np.uint16)
        if number != 6:
            image[:, :, (np.arange(10) + 7 * number) % 32] = 7000
        write_tif(patch_file(root, "ROIs1868/73", "S2", number, 0), image * (number != 3))
    name = "sen12mscrts_ea_published"
    dataset = open_dataset(root, dataset=name, split="test")
    assert dataset[0].facts["target"] == 6
    assert dataset[0].facts["target_cover"] == 0
    assert dataset.facts["coverage"] == "rules"
    table = tmp_path / "cover.json"
    with pytest.raises(SystemExit) as done:
        main(["data", "cover", str(root), "--dataset", name, "--out", str(table)])
    assert done.value.code == 0
    values = json.loads(table.read_text())["coverage"]["ROIs1868_73_patch_0"]
    assert len(values) == 30
    assert values[3] == 1  # blank counts as covered
    again = open_dataset(root, dataset=name, split="test", options=ReadOptions(coverage=table))
    assert again.facts["coverage"] == "table"
    np.testing.assert_array_equal(again[0].cloudy, dataset[0].cloudy)
    with pytest.raises(ConfigError, match="already uses a coverage table"):
        coverage_table(again, table)
    table.write_text('{"coverage": {"ROIs1868_73_patch_0": [0, 1]}}')
    with pytest.raises(DataError, match="has 2 values for ROIs1868_73_patch_0; expected 30"):
        open_dataset(root, dataset=name, split="test", options=ReadOptions(coverage=table))[0]
    with pytest.raises(DataError, match=r"_mask\.npy does not exist; expected a mask beside every image"):
        open_dataset(root, dataset=name, split="test", options=ReadOptions(coverage="masks"))[0]


def test_cover_by_s2cloudless_chooses_the_target(tmp_path: Path, write_tif):
    """With the real detector: snow-free land with a cloud on every date except one."""
    bright = make_series(3, size=(64, 64), dates=4, bands=BANDS_13, coverage=[0.0, 0.35, 0.35, 0.6])
    for number in range(30):
        image = bright.cloudy[0 if number == 7 else 3][:, 16:48, 16:48]
        path = patch_file(tmp_path, "ROIs1868/73", "S2", number, 0)
        write_tif(path, np.clip(np.rint(image * 10000), 1, 10000).astype(np.uint16))
    options = ReadOptions(coverage="s2cloudless")
    dataset = open_dataset(tmp_path, dataset="sen12mscrts_ea_published", split="test", options=options)
    series = dataset[0]
    assert dataset.facts["coverage"] == "s2cloudless"
    assert series.facts["target"] == 7
    assert series.facts["target_cover"] == 0
    assert series.cloud_mask is not None
    found, truth = series.cloud_mask[0], bright.cloud_mask[3][16:48, 16:48]
    assert found.mean() > 0.1
    assert truth[found].mean() > 0.9


def test_training_never_uses_the_sampler_of_the_test(east_asia: Path, write_tif):
    for roi in ("ROIs1868/114", "ROIs1868/126", "ROIs1868/143", "ROIs1868/14", "ROIs1970/131", "ROIs2017/117"):
        write_roi(east_asia, write_tif, roi, clearest=1)
    name, options = "sen12mscrts_ea", ReadOptions(partial=True, draws=3)
    with pytest.raises(ConfigError, match=r"published of sen12mscrts_ea is for val and test.*Use published_random"):
        open_dataset(east_asia, dataset=name, split="train", sampler="published", options=options)
    assert training_sampler(name, "published") == training_sampler(name, "leak_free") == "published_random"
    assert training_sampler("sen2_mtc_new", "published") == "published"
    mask = next(east_asia.glob("ROIs1868/114/S2/20/*_mask.npy"))
    np.save(mask, np.zeros((SIDE, SIDE), bool))  # a second clear date
    train = open_dataset(east_asia, dataset=name, split="train", sampler="published_random", options=options)
    places = {entry.group for entry in train.entries}
    assert len(train) == 3 * len(places)
    assert len({entry.name for entry in train.entries}) == len(train)
    assert not any(series.leaks for series in train)
    targets = {series.facts["target"] for series in train if series.group == "ROIs1868/114"}
    assert targets <= {1, 20}


def test_pack_draws_the_training_dates_at_random(east_asia: Path, tmp_path: Path, write_tif):
    write_roi(east_asia, write_tif, "ROIs1868/114", clearest=1)
    write_roi(east_asia, write_tif, "ROIs2017/117", clearest=1)
    out = tmp_path / "shards"
    with pytest.raises(SystemExit) as done:
        main(["data", "pack", str(east_asia), "--dataset", "sen12mscrts_ea", "--sampler", "published", "--partial",
              "--bands", "msi", "--draws", "2", "--out", str(out)])  # fmt: skip
    assert done.value.code == 0
    train, val = (list(read_shards(out / part)) for part in ("train", "val"))
    assert {record.extra["sampler"] for record in train} == {"published_random"}
    assert {record.extra["sampler"] for record in val} == {"published"}
    assert [record.name for record in train] == ["ROIs1868_114_patch_0", "ROIs1868_114_patch_0_draw_1"]


def test_nothing_is_unpickled(east_asia: Path, tmp_path: Path):
    path = patch_file(east_asia, "ROIs1868/73", "S2", 4, 0)
    fired = tmp_path / "fired"

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (fired,))

    np.save(path.with_name(f"{path.stem}_mask.npy"), np.array([Bomb()], dtype=object), allow_pickle=True)
    dataset = open_dataset(east_asia, dataset="sen12mscrts_ea_published", split="test")
    with pytest.raises(DataError, match=r"_mask\.npy holds pickled objects"):
        dataset[0]
    published_table = tmp_path / "generic_3_test_asiaEast_s2cloudless_mask.npy"
    published_table.touch()
    with pytest.raises(DataError, match=r"generic_3_.* is no JSON table.*nothing is unpickled"):
        open_dataset(east_asia, dataset="sen12mscrts_ea", split="test", options=ReadOptions(coverage=published_table))
    assert not fired.exists()


def test_errors_name_file_or_folder(east_asia: Path, write_tif):
    name = "sen12mscrts_ea_published"
    write_tif(patch_file(east_asia, "ROIs1868/73", "S2", 2, 0), np.ones((12, SIDE, SIDE), np.uint16))
    with pytest.raises(BandError, match=r"_2_2018-01-27_patch_0\.tif has 12 bands; expected 13"):
        open_dataset(east_asia, dataset=name, split="test")[0]
    with pytest.raises(DataError, match=r"holds no ROIs\*/NUMBER/S2; expected"):
        open_dataset(east_asia / "ROIs1868", dataset=name, split="test")
    lost = east_asia / "ROIs1970/139/S2/29"
    for file in lost.iterdir():
        file.unlink()
    lost.rmdir()
    with pytest.raises(DataError, match=r"139/S2/29 does not exist; expected dates 0 to 29"):
        open_dataset(east_asia, dataset="sen12mscrts_ea", split="test", options=ReadOptions(partial=True))
    patch_file(east_asia, "ROIs1868/73", "S2", 5, 2).unlink()
    with pytest.raises(DataError, match=r"S2/5 has no patch 2"):
        open_dataset(east_asia, dataset=name, split="test")


def test_a_name_without_date(east_asia: Path):
    path = patch_file(east_asia, "ROIs1868/73", "S2", 9, 0)
    path.rename(path.with_name("s2_nodate_patch_0.tif"))
    with pytest.raises(DataError, match=r"s2_nodate_patch_0\.tif has no date"):
        open_dataset(east_asia, dataset="sen12mscrts_ea_published", split="test")[0]
