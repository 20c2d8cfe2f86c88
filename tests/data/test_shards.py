"""Shards: exact coding, damage, splits, and the readers on tiny GeoTIFF trees in the layout of each dataset."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from sader.data.shards import SeriesRecord, ShardWriter, encode_record, read_shard, read_shards, split_of, write_shard
from sader.errors import BandError, ConfigError, DataError, ShapeError

RGBN = ("B02", "B03", "B04", "B08")


def smooth(rng: np.random.Generator, *shape: int) -> np.ndarray:
    field = rng.normal(0, 30, shape).cumsum(-1).cumsum(-2) / 4 + 1500
    return np.clip(field + rng.normal(0, 20, shape), 1, 12000).astype(np.uint16)


def make_record(name: str = "place_00", seed: int = 0, **changes: object) -> SeriesRecord:
    rng = np.random.default_rng(seed)
    dn = smooth(rng, 3, 4, 33, 47)
    dn[1, :, :10, 20:] = 0
    labels = rng.integers(0, 4, (3, 33, 47)).astype(np.uint8)
    facts: dict = {"source": "cloudsen12", "bands": RGBN, "labels": labels, "days": (0.0, 5.0, 12.0)}
    return SeriesRecord(dn, name, **(facts | {"group": "train/" + name, "extra": {"note": "x"}} | changes))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 33, 47), (1, 3, 64, 2), (3, 1, 1, 40)])
@pytest.mark.parametrize("largest", [0, 2000, 65535])
def test_coding_is_exact_at_step_one(tmp_path: Path, shape: tuple[int, int, int, int], largest: int) -> None:
    dn = np.random.default_rng(1).integers(0, largest, shape, endpoint=True).astype(np.uint16)
    dn[dn < 300] = 0
    write_shard(tmp_path / "a.shard", [SeriesRecord(dn, "a", "b", RGBN[: shape[1]])], step=1)
    assert np.array_equal(next(read_shard(tmp_path / "a.shard")).dn, dn)


def test_coding_uses_the_smoothness_of_rows() -> None:
    dn = smooth(np.random.default_rng(2), 1, 1, 96, 96)
    assert len(encode_record(SeriesRecord(dn, "a", "b", ("B02",)), step=8)) < 0.6 * dn.nbytes


def test_shards_of_the_old_coding_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.shard"
    write_shard(path, [make_record()])
    old = struct.pack("<HI", 1, 1)
    path.write_bytes(b"SADERSHD" + old + struct.pack("<I", zlib.crc32(old)) + path.read_bytes()[18:])
    with pytest.raises(DataError, match=r"version 1; this sader reads version 2\. Pack it again: sader data pack"):
        list(read_shard(path))


@pytest.mark.parametrize("step", [1, 4, 12])
def test_round_trip_within_the_step(tmp_path: Path, step: int) -> None:
    record = make_record()
    write_shard(tmp_path / "a.shard", [record, make_record("place_01", 1, days=None, labels=None)], step=step)
    first, second = read_shard(tmp_path / "a.shard")
    assert np.array_equal(first.dn == 0, record.dn == 0)
    error = np.abs(first.dn.astype(int) - record.dn)
    assert error[record.dn >= step].max() <= step / 2
    assert np.array_equal(first.labels, record.labels)
    assert second.labels is None
    assert second.days is None
    for key in ("name", "source", "bands", "level", "resolution", "days", "group", "extra"):
        assert getattr(first, key) == getattr(record, key)


def test_small_counts_never_become_nodata(tmp_path: Path) -> None:
    dn = np.array([0, 1, 3, 5, 65535], np.uint16).reshape(1, 1, 1, 5)
    write_shard(tmp_path / "a.shard", [SeriesRecord(dn, "a", "b", ("B02",))], step=12)
    assert next(read_shard(tmp_path / "a.shard")).dn.ravel().tolist() == [0, 12, 12, 12, 65532]


def test_any_damaged_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.shard"
    write_shard(path, [make_record(), make_record("place_01", 1)])
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(18), *rng.integers(0, len(whole), 40)]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(damaged))
        with pytest.raises(DataError, match=r"a\.shard"):
            list(read_shard(path))
    path.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"record 2 of 2 in shard .*a\.shard .*cut short"):
        list(read_shard(path))
    path.write_bytes(whole[: len(whole) // 4])
    with pytest.raises(DataError, match="record 1 of 2"):
        list(read_shard(path))


def test_missing_or_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no shards at"):
        list(read_shards(tmp_path))
    (tmp_path / "x.shard").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(DataError, match="no shard"):
        list(read_shards(tmp_path))
    with pytest.raises(ConfigError, match="step is 0"):
        write_shard(tmp_path / "y.shard", [make_record()], step=0)
    with pytest.raises(ShapeError, match="expected uint16"):
        SeriesRecord(np.zeros((2, 3, 4)), "a", "b", ("B02",))


def test_writer_starts_a_new_shard_when_full(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "s", limit=1)
    writer.add(make_record("place_00"))
    writer.add(make_record("place_01", 1))
    writer.flush()
    assert [file.name for file in writer.files] == ["s-000.shard", "s-001.shard"]
    assert [record.name for record in read_shards(tmp_path)] == ["place_00", "place_01"]


def test_splits_keep_groups_together() -> None:
    assert split_of(make_record(group="train/place_03")) == "train"
    assert split_of(make_record(group="val/place_16")) == "val"
    for roi, side in (("ROIs1970_fall_85", "val"), ("ROIs1970_fall_136", "train"), ("ROIs1868_summer_101", "val")):
        assert split_of(make_record(source="sen12mscr", group=roi)) == side
    assert split_of(make_record(source="rondonia", group="area/west")) == "train"
    assert split_of(make_record(source="rondonia", group="area/east")) == "val"
    sides = [split_of(make_record(source="folder", group=f"place{k}")) for k in range(200)]
    assert 5 < sides.count("val") < 45


# --- readers ---------------------------------------------------------------------------------------------------------


def write_tif(path: Path, values: np.ndarray, names: tuple[str, ...] | None = None, **profile: object) -> None:
    rasterio = pytest.importorskip("rasterio")
    path.parent.mkdir(parents=True, exist_ok=True)
    count, height, width = values.shape
    with rasterio.open(
        path, "w", driver="GTiff", count=count, height=height, width=width, dtype=values.dtype,
        crs="EPSG:32720", transform=rasterio.transform.from_origin(0, 0, 20, 20), **profile,
    ) as file:  # fmt: skip
        file.write(values)
        if names:
            file.descriptions = names


def make_places(root: Path, places: int = 2, dates: int = 3, size: int = 40) -> Path:
    """Write a tree in the layout of cloudsen12, bands in an order of their own."""
    for place in range(places):
        for split in ("train", "val"):
            rng = np.random.default_rng(10 * place + (split == "val"))
            for k in range(dates):
                folder = root / split / f"place_{place:02d}"
                write_tif(folder / f"date_{k}.tif", smooth(rng, 5, size, size + 3), ("B08", "B02", "B03", "B04", "B11"))
                labels = np.zeros((1, size, size + 3), np.uint8)
                labels[:, :, : 10 * k] = k
                write_tif(folder / f"date_{k}_label.tif", labels)
    return root


def test_places_select_bands_by_name(tmp_path: Path) -> None:
    from sader.data.pack import read_dn, read_places

    make_places(tmp_path)
    records = list(read_places(tmp_path))
    assert sorted(split_of(record) for record in records) == ["train", "train", "val", "val"]
    blue, names, _ = read_dn(tmp_path / "train/place_00/date_1.tif", ("B02",))
    assert names == ("B02",)
    assert records[0].bands == RGBN
    assert np.array_equal(records[0].dn[1, 0], blue[0])
    assert (records[0].labels[2, :, :20] == 2).all()
    with pytest.raises(BandError, match="expected some of"):
        read_dn(tmp_path / "train/place_00/date_1.tif", ("B12",))


def test_repeated_dates_are_dropped(tmp_path: Path) -> None:
    from sader.data.pack import drop_repeats

    record = make_record()
    dn = record.dn.copy()
    dn[2] = dn[0]
    dn[2, :, :5] = 0
    kept = drop_repeats(SeriesRecord(dn, "p", "cloudsen12", RGBN, record.labels, days=(0.0, 1.0, 2.0)))
    assert kept.days == (0.0, 1.0)
    assert kept.extra == {"repeats_dropped": [2]}
    assert drop_repeats(record) is record


def test_dated_folder_splits_in_space(tmp_path: Path) -> None:
    from sader.data.pack import read_dated

    rng = np.random.default_rng(0)
    for text, rows, columns in (("2022-06-14", 4, 100), ("2022-03-10", 1, 60)):
        values = smooth(rng, 4, 20, 100)
        values[:, :rows, :columns] = 0
        write_tif(tmp_path / f"S2_{text}.tif", values, RGBN)
    west, east = read_dated(tmp_path, strip=20, gap=6)
    assert (west.dn.shape[-1], east.dn.shape[-1]) == (74, 20)
    assert (split_of(west), split_of(east)) == ("train", "val")
    assert west.days == (0.0, 96.0)
    assert west.resolution == 20
    assert (west.labels[0, :1, :60] == 255).all()
    assert (west.labels[0, 1:] == 0).all()
    assert (west.labels[1] == 255).all(), "a date that is a fifth masked is not believed where its mask says clear"


def test_pairs_and_missing_partner(tmp_path: Path) -> None:
    from sader.data.pack import read_sen12mscr_pairs

    rng = np.random.default_rng(0)
    for name in ("clear", "cloudy"):
        write_tif(tmp_path / f"ROIs1970_fall_s2_85_p492_{name}.tif", smooth(rng, 4, 16, 16), RGBN)
    (record,) = read_sen12mscr_pairs(tmp_path)
    assert record.group == "ROIs1970_fall_85"
    assert (record.labels[0] == 0).all()
    assert (record.labels[1] == 255).all()
    (tmp_path / "ROIs1970_fall_s2_85_p492_cloudy.tif").unlink()
    with pytest.raises(DataError, match=r"has no ROIs1970_fall_s2_85_p492_cloudy\.tif"):
        list(read_sen12mscr_pairs(tmp_path))


def test_eurosat_tar(tmp_path: Path) -> None:
    from PIL import Image

    from sader.data.pack import read_eurosat_tar

    with tarfile.open(tmp_path / "e.tar", "w") as tar:
        for k in range(5):
            data = io.BytesIO()
            Image.new("RGB", (64, 64), (40 * k, 100, 255)).save(data, "JPEG", quality=95)
            info = tarfile.TarInfo(f"Forest/Forest_{k}.jpg")
            info.size = data.tell()
            data.seek(0)
            tar.addfile(info, data)
    (record,) = read_eurosat_tar(tmp_path / "e.tar", side=2)
    assert record.bands == ("B02", "B03", "B04")
    assert record.dn.shape == (1, 3, 128, 128)
    assert abs(int(record.dn[0, 0].mean()) - 2800) < 60
    assert abs(int(record.dn[0, 1].mean()) - 1098) < 60


def test_linked_folders_are_packed(tmp_path: Path) -> None:
    from sader.data.pack import kind_of, read_folder, read_places, read_sen12mscr_pairs

    image = (smooth(np.random.default_rng(0), 4, 24, 30) / 10000).astype(np.float32)
    write_tif(tmp_path / "own" / "place" / "S2_20230101.tif", image, RGBN)
    for name in ("clear", "cloudy"):
        write_tif(tmp_path / "pairs" / "roi" / f"ROIs1158_spring_s2_1_p30_{name}.tif", image, RGBN)
    make_places(tmp_path / "places", places=1)
    for kind, read in (("own", read_folder), ("pairs", read_sen12mscr_pairs), ("places", read_places)):
        linked = tmp_path / "linked" / kind
        linked.mkdir(parents=True)
        for place in (tmp_path / kind).iterdir():
            (linked / place.name).symlink_to(place)
        assert kind_of(linked) == kind_of(tmp_path / kind)
        names = [record.name for record in read(linked)]
        assert names == [record.name for record in read(tmp_path / kind)]
        assert names


def test_own_folder_and_pack(tmp_path: Path) -> None:
    from sader.data.pack import pack_sources, read_folder

    rng = np.random.default_rng(0)
    own = tmp_path / "own"
    for place in ("a", "b"):
        for day in ("20230101", "20230111"):
            write_tif(own / place / f"S2_{day}.tif", (smooth(rng, 4, 24, 30) / 10000).astype(np.float32))
    with pytest.raises(BandError, match="--assume"):
        list(read_folder(own))
    a, b = read_folder(own, assume=RGBN, clear=True)
    assert (a.name, b.name) == ("a", "b")
    assert a.days == (0.0, 10.0)
    assert (a.labels == 0).all()
    assert 500 < a.dn.mean() < 5000
    packed = pack_sources([own], tmp_path / "out", assume=RGBN, split="none", step=8)
    assert packed["."].records == 2
    assert [record.name for record in read_shards(tmp_path / "out")] == ["a", "b"]

    places = make_places(tmp_path / "tree")
    packed = pack_sources([places], tmp_path / "packed", bands=("B04", "B08"))
    assert {name: part.records for name, part in packed.items()} == {"train": 2, "val": 2}
    assert all(record.bands == ("B04", "B08") for record in read_shards(tmp_path / "packed/val"))
    with pytest.raises(ConfigError, match="did you mean places"):
        pack_sources([f"place:{places}"], tmp_path / "x")
    with pytest.raises(BandError, match="unknown band B8"):
        pack_sources([places], tmp_path / "x", bands=("B8",))
    write_tif(own / "a" / "S2_20230121.tif", smooth(rng, 4, 24, 31))
    with pytest.raises(DataError, match="one grid"):
        list(read_folder(own, assume=RGBN))


def test_command_packs_and_shows(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from sader.cli.data import app

    make_places(tmp_path / "tree", places=1)
    runner = CliRunner()
    result = runner.invoke(app, ["pack", str(tmp_path / "tree"), "--out", str(tmp_path / "out"), "--bands", "B02,B04"])
    assert result.exit_code == 0, result.output
    assert "1 series in 1 shards" in result.output
    shown = runner.invoke(app, ["show", str(tmp_path / "out/train")])
    assert "place_00" in shown.output
    assert "2 bands" in shown.output


@pytest.mark.parametrize(
    ("ending", "numbers", "labels"),
    [
        ("label", [[0, 1, 2, 3, 255]], [[0, 1, 2, 3, 255]]),
        ("SCL", [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]], [[255, 255, 255, 3, 0, 0, 0, 255, 1, 1, 2, 0]]),
        ("Fmask", [[0, 1, 2, 4, 8, 2 + 8, 1 + 4, 16, 32 + 64, 255]], [[0, 2, 1, 255, 3, 1, 2, 0, 0, 255]]),
        ("s2cloudless", [[0] * 29 + [1, 255]], [[0] * 29 + [1, 255]]),
        ("s2cloudless", [[0, 0, 0, 1, 255]], [[255, 255, 255, 1, 255]]),  # shadows are likely, and not in the mask
        ("cld", [[0] * 28 + [39, 40]], [[0] * 29 + [1]]),
    ],
)
def test_masks_of_other_programs_are_labels(tmp_path: Path, ending, numbers, labels) -> None:
    from sader.data.labels import label_file, read_labels

    write_tif(tmp_path / f"S2_a_{ending}.tif", np.array([numbers], np.uint8))
    found = label_file(tmp_path / "S2_a.tif")
    assert found == tmp_path / f"S2_a_{ending}.tif"
    assert read_labels(found, np.shape(numbers)).tolist() == labels
    twice = read_labels(found, (2, 2 * len(numbers[0])))  # coarser than the scene
    assert twice.tolist() == np.repeat(np.repeat(labels, 2, 0), 2, 1).tolist()
    with pytest.raises(DataError, match="Warp it first"):
        read_labels(found, (3, 7))


def test_labels_of_a_window_are_those_of_the_whole(tmp_path: Path) -> None:
    from rasterio.windows import Window

    from sader.data.labels import read_labels

    classes = np.random.default_rng(0).integers(3, 11, (1, 20, 30)).astype(np.uint8)
    write_tif(tmp_path / "S2_a_scl.tif", classes)
    whole = read_labels(tmp_path / "S2_a_scl.tif", (40, 60))
    part = read_labels(tmp_path / "S2_a_scl.tif", (40, 60), window=Window(7, 10, 21, 13))
    assert np.array_equal(part, whole[10:23, 7:28])
    write_tif(tmp_path / "S2_a_s2cloudless.tif", classes)
    with pytest.raises(DataError, match=r"expected values from 0 to 1.*NAME_cld\.tif"):
        read_labels(tmp_path / "S2_a_s2cloudless.tif", (20, 30))


def test_few_places_leave_one_for_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sader.cli.main import main

    rng = np.random.default_rng(0)

    def add(name: str, *, labelled: bool = True) -> None:
        for day in ("20230101", "20230111"):
            write_tif(tmp_path / "own" / name / f"S2_{day}.tif", smooth(rng, 4, 24, 30), RGBN)
            if labelled:
                write_tif(tmp_path / "own" / name / f"S2_{day}_SCL.tif", np.full((1, 24, 30), 4, np.uint8))

    def pack() -> dict[str, list[str]]:
        with pytest.raises(SystemExit) as end:
            main(["data", "pack", str(tmp_path / "own"), "-o", str(tmp_path / "out")])
        assert not end.value.code
        folders = {side: tmp_path / "out" / side for side in ("train", "val")}
        return {
            side: sorted(r.name for r in read_shards(folder))
            for side, folder in folders.items()
            if any(folder.glob("*.shard"))
        }

    assert [split_of(make_record(source="folder", group=name)) for name in ("a", "b", "c", "place22")] == [
        *["train"] * 3, "val",
    ]  # fmt: skip
    add("b")
    assert pack() == {"train": ["b"]}
    assert "there is no labelled validation: it needs two places" in capsys.readouterr().err
    add("a", labelled=False)
    add("c")
    assert pack() == {"train": ["a", "c"], "val": ["b"]}
    assert "b was taken and is not trained on" in " ".join(capsys.readouterr().err.split())
    add("place22", labelled=False)
    assert pack() == {"train": ["a", "c"], "val": ["b", "place22"]}
    assert "b was taken and is not trained on" in " ".join(capsys.readouterr().err.split())
    add("place22")
    assert pack() == {"train": ["a", "b", "c"], "val": ["place22"]}
    assert "note" not in capsys.readouterr().err
