"""Damaged files, bands in another order and other layouts are errors with a path, before anything is trained."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from sader.bands import BANDS_13
from sader.cli.main import main
from sader.data.public.dataset import PublicDataset
from sader.data.public.images import check_order, read_counts
from sader.data.public.registry import DATASETS, open_dataset
from sader.errors import BandError, DataError, SaderError, ValueRangeError
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.run import run_reproduce
from sader.evaluation.reproduce.setting import write_data
from sader.evaluation.request import ReproduceRequest

rasterio = pytest.importorskip("rasterio")


@pytest.fixture
def sen2(tmp_path: Path) -> Path:
    """Sen2_MTC_New in its layout, 32 pixels a side."""
    return write_data(paper.SEN2, tmp_path / "sen2")


def opened(root: Path, split: str = "test") -> PublicDataset:
    return open_dataset(root, dataset="sen2_mtc_new", split=split)


def cut(path: Path, share: float = 0.6) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    return path


@pytest.mark.parametrize("share", [0.0, 0.01, 0.6, 0.97])
def test_a_file_cut_short_is_found_without_decoding(sen2: Path, share: float):
    opened(sen2).check()
    path = cut(next(sen2.glob("Sen2_MTC/T05AAA/cloud/*_2.tif")), share)
    with pytest.raises(DataError, match=rf"1 of 16 files cannot be read: {re.escape(str(path))}: .*Copy them again"):
        opened(sen2).check()


def test_a_damaged_test_image_is_an_error_before_training(sen2: Path, tmp_path: Path):
    """The last image of the scored split: it would be read only after all systems are trained."""
    path = cut(sorted(sen2.glob("Sen2_MTC/T05AAA/cloud/*.tif"))[-1])
    request = ReproduceRequest(("table1",), data=(f"sen2_mtc_new:{sen2}",), out=tmp_path / "out")
    with pytest.raises(DataError, match=re.escape(str(path))):
        run_reproduce(request)
    assert not (tmp_path / "out" / "runs").exists()


def test_pictures_are_checked_too(tmp_path: Path, write_picture):
    for kind in ("cloud", "label"):
        for number in range(4):
            image = np.random.default_rng(number).integers(0, 255, (32, 32, 3)).astype(np.uint8)
            write_picture(tmp_path / "RICE1" / kind / f"{number}.png", image)
    dataset = open_dataset(tmp_path, dataset="rice1", split="all")
    dataset.check()
    cut(tmp_path / "RICE1" / "cloud" / "2.png")
    with pytest.raises(DataError, match=r"1 of 8 files cannot be read: .*2\.png"):
        dataset.check()


def test_four_bands_in_another_order(sen2: Path, tmp_path: Path):
    for path in sen2.glob("Sen2_MTC/*/*/*.tif"):
        with rasterio.open(path) as file:
            values, profile = file.read(), file.profile
        with rasterio.open(path, "w", **profile) as file:
            file.write(values[[3, 0, 1, 2]])  # near infrared first
    with pytest.raises(BandError, match="band 1 is the brightest; expected near infrared as band 4"):
        opened(sen2, "train").check()
    with pytest.raises(SystemExit) as done:
        main(["data", "pack", str(sen2), "--dataset", "sen2_mtc_new", "-o", str(tmp_path / "shards")])
    assert done.value.code == 2
    assert not (tmp_path / "shards").exists()


def test_thirteen_bands_in_another_order(tmp_path: Path):
    root = write_data(paper.TS, tmp_path)
    dataset = open_dataset(root, dataset=paper.TS, split="test")
    clear = dataset[0].clear
    check_order([clear], BANDS_13, root)
    by_text = [BANDS_13.index(band) for band in sorted(BANDS_13)]  # B10 after B09, B8A at the end
    with pytest.raises(BandError, match=r"band 11 has .* of the median brightness; expected cirrus, near 0"):
        check_order([clear[by_text]], BANDS_13, root)


def test_named_bands_in_another_order(tmp_path: Path, write_tif):
    path = write_tif(tmp_path / "image.tif", np.full((4, 8, 8), 900, np.uint16))
    with rasterio.open(path, "r+") as file:
        file.descriptions = ("B2", "B3", "B4", "B8")
    with pytest.raises(BandError, match=r"image\.tif has bands B02, .*; expected the order B04, B03, B02, B08"):
        read_counts(path, ("B04", "B03", "B02", "B08"))
    assert read_counts(path, ("B02", "B03", "B04", "B08"))[0].shape == (4, 8, 8)


def test_another_layout_is_named(tmp_path: Path, sen2: Path):
    with pytest.raises(DataError, match=r"has the layout of sen2_mtc_new \(Sen2_MTC\); expected that of sen12mscr "):
        open_dataset(sen2, dataset="sen12mscr", split="test")
    with pytest.raises(DataError, match=rf"holds no Sen2_MTC, but {sen2} does.*Give {sen2}"):
        opened(sen2.parent)
    with pytest.raises(DataError, match=r"does not exist; expected the folder of allclear.*download it: https://"):
        open_dataset(tmp_path / "none", dataset="allclear", split="test")


def test_values_of_eight_bits_are_no_reflectance(sen2: Path):
    """A preview written with the names of the dataset would otherwise be black."""
    path = next(sen2.glob("Sen2_MTC/T01AAA/cloudless/*.tif"))
    with rasterio.open(path) as file:
        values, profile = file.read(), file.profile
    with rasterio.open(path, "w", **(profile | {"dtype": "uint8"})) as file:
        file.write((values // 40).clip(0, 255).astype(np.uint8))
    with pytest.raises(
        ValueRangeError, match=rf"{re.escape(str(path))} holds 8-bit values; expected reflectance x 100"
    ):
        opened(sen2, "train").check()


def test_a_tile_in_two_lists(sen2: Path):
    """The score of a tile that was trained on would mean nothing."""
    (sen2 / "test.txt").write_text("T05AAA\nT01AAA\n")
    with pytest.raises(DataError, match=r"test\.txt and train\.txt share 1 names \(T01AAA\); expected none in two"):
        opened(sen2)
    with pytest.raises(DataError, match=r"train\.txt and test\.txt share"):
        opened(sen2, "train")


def test_cloudy_dates_without_their_clear_image_are_reported(sen2: Path):
    whole = len(opened(sen2))
    path = sen2 / "Sen2_MTC" / "T05AAA" / "cloudless" / "T05AAA_1.tif"
    path.unlink()
    (sen2 / "Sen2_MTC" / "T05AAA" / "cloud" / "._T05AAA_9_0.tif").touch()  # a file of macOS is none of the dataset
    with pytest.warns(
        UserWarning, match=rf"1 series in .*T05AAA/cloud have no clear .* {re.escape(str(path))} was pub"
    ):
        assert len(opened(sen2)) == whole - 1


@pytest.mark.parametrize("damage", ["short", "bands", "order"])
def test_images_of_the_guide_are_checked_before_anything_is_trained(sen2: Path, tmp_path: Path, damage: str):
    """They are needed after the network is trained, which takes hours."""
    images = write_data("eurosat_ms", tmp_path / "eurosat")
    changed = sorted(images.glob("*/*.tif"))[-1 if damage == "bands" else 0 :]
    for path in changed if damage != "short" else ():
        with rasterio.open(path) as file:
            values, profile = file.read(), file.profile
        values = values[:4] if damage == "bands" else np.concatenate([values[:8], values[12:], values[8:12]])
        with rasterio.open(path, "w", **(profile | {"count": len(values)})) as file:
            file.write(values)
    texts = {"short": "River_2.tif: it ends after", "bands": "River_2.tif has 4 bands; expected 13",
             "order": "band 10 has .* of the median brightness; expected cirrus"}  # fmt: skip
    if damage == "short":
        cut(images / "River" / "River_2.tif")
    data = (f"sen2_mtc_new:{sen2}", f"eurosat_ms:{images}")
    request = ReproduceRequest(("table6",), data=data, only=("mae-guided",), out=tmp_path / "out")
    with pytest.raises(SaderError, match=texts[damage]):
        run_reproduce(request)
    assert not (tmp_path / "out" / "runs").exists()


def test_another_folder_as_images_of_the_guide(sen2: Path, tmp_path: Path):
    for folder, wrong in ((tmp_path / "none", "is no folder"), (sen2, r"holds no CLASS/CLASS_1\.tif")):
        data = (f"sen2_mtc_new:{sen2}", f"eurosat_ms:{folder}")
        with pytest.raises(DataError, match=rf"{folder} {wrong}; expected EuroSAT-MS.*Get it at https://"):
            run_reproduce(ReproduceRequest(("table6",), data=data, out=tmp_path / "out"))


def test_a_table_without_its_dataset_says_where_to_get_it(tmp_path: Path, capsys):
    for table, name in (("table1", paper.SEN2), ("table2", paper.TS)):
        with pytest.raises(SystemExit) as done:
            main(["reproduce", table, "-o", str(tmp_path)])
        assert done.value.code == 2
        text = " ".join(capsys.readouterr().err.split())
        assert f"{table} needs {name}" in text
        assert DATASETS[name].source.split()[-1] in text
