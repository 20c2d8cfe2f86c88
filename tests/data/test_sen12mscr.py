"""SEN12MS-CR in its published layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sader.data.public.dataset import ReadOptions
from sader.data.public.registry import open_dataset
from sader.errors import BandError, DataError

PARTIAL = ReadOptions(partial=True)
REGIONS = (("ROIs1158_spring", 1), ("ROIs1158_spring", 106), ("ROIs1158_spring", 17), ("ROIs1868_summer", 73))


def image(seed: int, bands: int = 13) -> np.ndarray:
    return np.random.default_rng(seed).integers(100, 4000, (bands, 8, 8)).astype(np.uint16)


@pytest.fixture
def root(tmp_path: Path, write_tif) -> Path:
    for season, number in REGIONS:
        for patch in (30, 407):
            for kind in ("s1", "s2", "s2_cloudy"):
                name = f"{season}_{kind}_{number}_p{patch}.tif"
                values = image(patch) if kind != "s1" else np.full((2, 8, 8), -12.5, np.float32)
                if kind == "s2_cloudy":
                    values[:, :3] = 12000
                write_tif(tmp_path / f"{season}_{kind}" / f"{kind}_{number}" / name, values)
    return tmp_path


def names(dataset) -> list[str]:
    return [entry.name for entry in dataset.entries]


def test_exact_regions_and_the_published_leak(root: Path):
    test = names(open_dataset(root, split="test", options=PARTIAL))
    assert test == [f"{region}_p{k}" for region in ("ROIs1158_spring_106", "ROIs1868_summer_73") for k in (30, 407)]
    train = names(open_dataset(root, split="train", options=PARTIAL))
    assert train == ["ROIs1158_spring_1_p30", "ROIs1158_spring_1_p407"]
    # The training names s1_1 (spring) and s1_7 (summer) are substrings of the test regions s1_106 and s1_73.
    published = names(open_dataset(root, split="train", sampler="published", options=PARTIAL))
    assert set(published) & set(test) == set(test)
    assert not set(train) & set(test)


def test_values(root: Path):
    series = open_dataset(root, split="test", options=PARTIAL)[0]
    assert series.cloudy.shape == (1, 13, 8, 8)
    assert series.bands[3] == "B04"
    assert series.group == "ROIs1158_spring_106"
    np.testing.assert_allclose(series.clear, image(30) / 10000, atol=1e-7)
    np.testing.assert_allclose(series.cloudy[0, :, :3], 1.0)  # cut at 10000
    assert series.aux is None


def test_sentinel_1_on_demand(root: Path):
    series = open_dataset(root, split="test", options=ReadOptions(partial=True, sar="default"))[0]
    np.testing.assert_allclose(series.aux, 0.5)
    series = open_dataset(root, split="test", options=ReadOptions(partial=True, sar="resnet"))[0]
    assert series.aux is not None
    np.testing.assert_allclose(series.aux[0, :, 0, 0], (1.0, 2 * 20 / 32.5), rtol=1e-6)
    item = series.item()
    assert item.aux_bands == ("VV", "VH")


def test_missing_regions_are_an_error_unless_asked(root: Path):
    with pytest.raises(DataError, match=r"8 of 10 regions of split test .*--partial"):
        open_dataset(root, split="test")
    facts = open_dataset(root, split="test", options=PARTIAL).facts
    assert len(facts["missing_places"]) == 8


def test_a_folder_per_season_works_too(root: Path):
    for season in ("ROIs1158_spring", "ROIs1868_summer"):
        (root / season).mkdir()
        for kind in ("s1", "s2", "s2_cloudy"):
            for folder in (root / f"{season}_{kind}").iterdir():
                folder.rename(root / season / folder.name)
            (root / f"{season}_{kind}").rmdir()
    dataset = open_dataset(root, dataset="sen12mscr", split="test", options=PARTIAL)
    assert len(dataset) == 4
    assert dataset[0].clear.shape == (13, 8, 8)


def test_errors(root: Path, write_tif):
    clear = root / "ROIs1868_summer_s2" / "s2_73" / "ROIs1868_summer_s2_73_p30.tif"
    write_tif(clear, image(0, bands=12))
    dataset = open_dataset(root, split="test", options=PARTIAL)
    with pytest.raises(BandError, match=r"s2_73_p30\.tif has 12 bands; expected 13"):
        dataset[2]
    clear.unlink()
    with pytest.raises(DataError, match=r"s2_73_p30\.tif does not exist"):
        open_dataset(root, split="test", options=PARTIAL)
    with pytest.raises(DataError, match="holds no SEN12MS-CR region; expected"):
        open_dataset(root / "ROIs1868_summer_s2", dataset="sen12mscr", split="test")
    with pytest.raises(DataError, match="has no lists of kind hash"):
        open_dataset(root, split="test", options=ReadOptions(lists="hash"))
