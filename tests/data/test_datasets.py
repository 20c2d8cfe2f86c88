"""`open_dataset`, augmentation, read-only storage, and the way into shards and scores."""

from __future__ import annotations

import csv
import json
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sader.bands import BANDS_RGBN as RGBN
from sader.cli.main import main
from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.items import paper_task
from sader.data.pack import pack_dataset
from sader.data.plan import PUBLIC_SOURCES, MakerSettings
from sader.data.public.dataset import PublicSeries, ReadOptions
from sader.data.public.registry import DATASETS, DatasetItems, open_dataset, recognise
from sader.data.radar import SAR_SCALINGS, scale_sar
from sader.data.shards import ShardWriter, read_shards, split_of
from sader.errors import BandError, ConfigError, DataError
from sader.evaluation.evaluate import run_evaluation
from sader.evaluation.request import DataRequest, EvaluationRequest
from sader.method.metrics import evaluate

SIDE = 32


@pytest.fixture
def root(tmp_path: Path, write_tif) -> Path:
    """Three tiles of Sen2_MTC_New with moving clouds over ground that tells up from down."""
    rng = np.random.default_rng(5)
    folder = tmp_path / "CTGAN"
    for part, tile in (("train", "T49SCC_R018"), ("val", "T22MCT_R024"), ("test", "T41VMJ_R006")):
        folder.mkdir(exist_ok=True)
        (folder / f"{part}.txt").write_text(f"{tile}\n")
        for number in range(4):
            ground = np.linspace(400, 1600, SIDE * SIDE).reshape(SIDE, SIDE) + 100 * number
            clear = (ground * np.array([1, 0.9, 0.8, 2])[:, None, None] + rng.normal(0, 30, (4, SIDE, SIDE))).clip(1)
            write_tif(folder / "Sen2_MTC" / tile / "cloudless" / f"{tile}_{number}.tif", clear.astype(np.uint16))
            for date in range(3):
                cloudy = clear * (1 + 0.08 * date)
                cloudy[:, :, 10 * date : 10 * date + 10] = 7000
                name = f"{tile}_{number}_{date}.tif"
                write_tif(folder / "Sen2_MTC" / tile / "cloud" / name, cloudy.astype(np.uint16))
    return folder


# ---------------------------------------------------------------- asking


def test_names_paths_and_both(root: Path):
    ways = [
        open_dataset(root, split="test"),
        open_dataset(f"sen2_mtc_new:{root}", split="test"),
        open_dataset(root, dataset="sen2_mtc_new", split="test"),
    ]
    assert [len(way) for way in ways] == [4, 4, 4]
    assert {way.request.name for way in ways} == {"sen2_mtc_new"}
    assert recognise(root) == "sen2_mtc_new"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"split": "tset"}, r"has no split 'tset'; it has train, val, test, all"),
        ({"sampler": "leakfree"}, r"has no sampler 'leakfree'; it has published, leak_free"),
        ({"protocol": "mtc"}, r"unknown protocol 'mtc'"),
        ({"dataset": "sen2_mtc"}, r"unknown dataset 'sen2_mtc'; did you mean sen2_mtc"),
        ({"options": ReadOptions(sar="db")}, r"unknown SAR scaling 'db'"),
        ({"options": ReadOptions(inputs=0)}, r"inputs is 0; expected 1 or more"),
    ],
)
def test_wrong_questions(root: Path, changes: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        open_dataset(root, **{"split": "test", "dataset": "sen2_mtc_new", **changes})


def test_a_folder_of_no_known_layout(tmp_path: Path):
    with pytest.raises(DataError, match=r"has the layout of no known dataset for certain.*--dataset"):
        open_dataset(tmp_path, split="test")
    with pytest.raises(ConfigError, match="rice1 is a dataset, not a folder; expected rice1:FOLDER"):
        open_dataset("rice1", split="test")
    path = tmp_path / "x"
    path.touch()
    with pytest.raises(DataError, match="is a file; expected the folder of rice1"):
        open_dataset(f"rice1:{path}", split="test")


def test_every_dataset_explains_itself():
    for kind in DATASETS.values():
        assert {"published", "leak_free"} <= set(kind.samplers)
        assert all(kind.samplers.values())
        assert "test" in kind.splits
    assert DATASETS["sen2_mtc_new"].protocol == "mtc_stretch"
    # SEN12MS-CR keeps the weight it had before; every other source can be trained on as well.
    assert set(PUBLIC_SOURCES) == set(DATASETS) - {"sen12mscr"}


def test_sar_scalings():
    decibel = np.stack([np.array([[-40, -25.0, -12.5, 3.0, np.nan]])] * 2).astype(np.float32)
    np.testing.assert_allclose(scale_sar(decibel)[0, 0], (0, 0, 0.5, 1, 0))
    np.testing.assert_allclose(scale_sar(decibel, scaling="resnet")[1, 0], (0, 15 / 32.5, 40 / 32.5, 2, 0), rtol=1e-6)
    np.testing.assert_allclose(scale_sar(decibel, scaling="allclear")[1, 0, 2], 20 / 32.5, rtol=1e-6)
    assert set(SAR_SCALINGS) == {"default", "resnet", "allclear"}


# ---------------------------------------------------------------- a sequence


def test_it_is_a_sequence(root: Path):
    dataset = open_dataset(root, split="test")
    assert [series.name for series in dataset] == [entry.name for entry in dataset.entries]
    assert dataset[-1].name == "T41VMJ_R006_3"
    assert [series.name for series in dataset[1:3]] == ["T41VMJ_R006_1", "T41VMJ_R006_2"]
    assert len(dataset.limited(2)) == 2
    assert dataset.limited(2, seed=1).entries == dataset.limited(2, seed=1).entries
    with pytest.raises(IndexError):
        dataset[4]


def _clear(batch: list[PublicSeries]) -> list[bytes]:
    return [series.clear.tobytes() + series.cloudy.tobytes() for series in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_order_and_subsets_change_nothing(root: Path, workers: int):
    dataset = open_dataset(root, split="all")
    wanted = [series.clear.tobytes() + series.cloudy.tobytes() for series in dataset]
    loader = DataLoader(dataset, batch_size=3, num_workers=workers, collate_fn=_clear)  # type: ignore[arg-type]
    assert [part for batch in loader for part in batch] == wanted
    backwards = [
        dataset[index].clear.tobytes() + dataset[index].cloudy.tobytes() for index in reversed(range(len(dataset)))
    ]
    assert backwards[::-1] == wanted
    part = dataset.subset([7, 2])
    assert [series.clear.tobytes() + series.cloudy.tobytes() for series in part] == [wanted[7], wanted[2]]
    assert pickle.loads(pickle.dumps(dataset))[5].clear.tobytes() == dataset[5].clear.tobytes()


def test_nothing_is_written_beside_the_data(root: Path, tmp_path: Path, snapshot):
    folders = [path for path in (root, *root.rglob("*")) if path.is_dir()]
    before = snapshot(root)
    for folder in folders:
        folder.chmod(0o555)
    try:
        dataset = open_dataset(root, split="train")
        assert dataset[0].clear.shape == (4, SIDE, SIDE)
        pack_dataset(dataset, tmp_path / "shards")
        data = DataRequest((root,), dataset="sen2_mtc_new", split="test")
        run_evaluation(EvaluationRequest(("median",), data, lpips=False))
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert snapshot(root) == before


# ---------------------------------------------------------------- shards


def test_packed_shards_train_the_papers_task(root: Path, tmp_path: Path):
    with pytest.raises(SystemExit) as done:
        main(["data", "pack", str(root), "--dataset", "sen2_mtc_new", "--split", "all", "--out", str(tmp_path / "out")])
    assert done.value.code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "val"]  # never the test unasked
    records = list(read_shards(tmp_path / "out" / "train"))
    assert len(records) == 4
    first = records[0]
    assert first.bands == RGBN
    assert first.source == "sen2_mtc_new"
    assert first.group == "T49SCC_R018"
    assert first.extra["lists_sha256"]
    assert {split_of(record) for record in records} == {"train"}
    assert {split_of(record) for record in read_shards(tmp_path / "out" / "val")} == {"val"}
    series = open_dataset(root, split="train")[0].chosen(RGBN)
    np.testing.assert_allclose(first.dn[0] / 10000, series.clear, atol=0.00021)
    np.testing.assert_allclose(first.dn[1:] / 10000, series.cloudy, atol=0.00021)
    # A batch of the paper's task: the target is the dataset's, the inputs the three cloudy dates.
    settings = MakerSettings(
        tasks=(0, 1, 0), extra_clouds=0, heavy=0, fewer_dates=0, rescale=0, jitter=0, band_dropout=()
    )
    batch = SeriesMaker(SeriesBank(records, bands=RGBN), settings).batch(0, 4, 3, 16)
    assert (batch.reference == -1).all()
    assert batch.present.all()
    assert batch.scored.all()
    assert float(batch.clear.max()) < 0.5
    assert float(batch.cloudy.amax((1, 2, 3, 4)).min()) > 0.65


def test_packing_again_replaces_what_was_there(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = open_dataset(root, split="train")
    monkeypatch.setattr("sader.data.pack.ShardWriter", partial(ShardWriter, limit=1))  # a shard for each series
    assert len(pack_dataset(dataset, tmp_path)["train"].files) == 4
    other = tmp_path / "train" / "other-000.shard"
    other.touch()
    pack_dataset(dataset[:2], tmp_path)
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [
        "other-000.shard", "sen2_mtc_new-000.shard", "sen2_mtc_new-001.shard",
    ]  # fmt: skip


def test_shards_are_scored_as_the_dataset_is(root: Path, tmp_path: Path):
    dataset = open_dataset(root, split="test")
    pack_dataset(dataset, tmp_path, bands=RGBN, step=1)
    items = list(paper_task(read_shards(tmp_path / "test"), bands=RGBN))
    straight = list(DatasetItems(dataset, RGBN))
    assert [item.name for item in items] == [item.name for item in straight]
    for item, other in zip(items, straight, strict=True):
        np.testing.assert_allclose(item.cloudy, other.cloudy, atol=1e-6)
        np.testing.assert_allclose(item.clear, other.clear, atol=1e-6)
        np.testing.assert_array_equal(item.scored, other.scored)
        np.testing.assert_array_equal(item.cloud_mask, other.cloud_mask)


def test_packing_says_what_is_wrong(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (root / "train.txt").unlink()
    with pytest.raises(SystemExit) as done:
        main(
            ["data", "pack", str(root), "--dataset", "sen2_mtc_new", "--split", "train", "--out", str(tmp_path / "out")]
        )
    assert done.value.code == 2
    assert "no split file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["data", "pack", str(root), "--dataset", "sen2_mtc_now", "--out", str(tmp_path / "out")])
    assert done.value.code == 2
    assert "did you mean sen2_mtc_new" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_list_of_datasets(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["data", "list"])
    text = capsys.readouterr().out
    assert all(f"{name}: " in text for name in DATASETS)
    assert "the answer is then an input" in text


# ---------------------------------------------------------------- scores


def test_evaluate_gives_both_protocols_side_by_side(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "report"
    with pytest.raises(SystemExit) as done:
        main(
            ["evaluate", "median", "--data", str(root), "--dataset", "sen2_mtc_new", "--split", "test", "--no-lpips",
             "--out", str(out), "--pictures", "1"]
        )  # fmt: skip
    assert done.value.code == 0
    assert "PSNR dB, mtc_stretch" in capsys.readouterr().out
    facts = json.loads((out / "summary.json").read_text())
    assert facts["dataset"] == "sen2_mtc_new"
    assert facts["series"] == facts["items"] == 4
    assert facts["sampler"] == "leak_free"
    assert facts["lists_sha256"]
    assert facts["masks"] == "estimated by rules from the inputs"
    with (out / "items.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "median"]
    assert len(rows) == 4
    series = open_dataset(root, split="test")[0]
    image = np.median(series.cloudy, axis=0)
    pair = [torch.from_numpy(x)[None] for x in (image, series.clear)]
    plain, stretched = evaluate(*pair, metrics=("psnr",)), evaluate(*pair, metrics=("psnr",), protocol="mtc_stretch")
    assert float(rows[0]["psnr"]) == pytest.approx(float(plain["psnr"]), abs=1e-3)
    assert float(rows[0]["mtc_psnr"]) == pytest.approx(float(stretched["psnr"]), abs=1e-3)
    assert abs(float(rows[0]["psnr"]) - float(rows[0]["mtc_psnr"])) > 1  # they are not the same question
    assert len(list((out / "pictures").glob("*.png"))) == 2


def test_evaluate_scores_the_bands_of_the_data(root: Path):
    items = DatasetItems(open_dataset(root, split="test"), ("B02", "B03", "B04"), ("B08", "B11"))
    item = items[0]
    assert item.bands == ("B02", "B03", "B04")
    assert item.aux_bands == ("B08",)
    np.testing.assert_array_equal(item.aux[:, 0], open_dataset(root, split="test")[0].cloudy[:, 3])
    assert [each.name for each in items.named(["T41VMJ_R006_2"])] == ["T41VMJ_R006_2"]
    with pytest.raises(BandError, match=r"has bands B04, B03, B02, B08; expected some of B11"):
        items.dataset[0].item(("B11",))


def test_evaluate_without_the_stretch_and_few_per_place(root: Path):
    data = DataRequest((root,), dataset="sen2_mtc_new", split="all", protocol="reflectance", limit=1, dates=2)
    (result,) = run_evaluation(EvaluationRequest(("median",), data, lpips=False))
    assert result.report.summary.items == result.report.summary.groups == 3
    assert "mtc_psnr" not in result.report.results.rows[0].scores
    assert result.report.results.rows[0].dates == 2


def test_evaluate_refuses_what_makes_no_sense(root: Path, tmp_path: Path):
    name = "sen2_mtc_new"
    with pytest.raises(ConfigError, match="2 folders given; expected one"):
        run_evaluation(EvaluationRequest(("median",), DataRequest((root, root), split="test", dataset=name)))
    with pytest.raises(ConfigError, match="task simulated with a public dataset"):
        run_evaluation(EvaluationRequest(("median",), DataRequest((root,), dataset=name), ("simulated",)))
    with pytest.raises(DataError, match=r"holds no Sen2_MTC, but .*CTGAN does"):
        run_evaluation(EvaluationRequest(("median",), DataRequest((tmp_path,), split="test", dataset=name)))
