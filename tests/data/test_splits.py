"""Split lists: shipped, found and made by rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from sader.data.public import splits
from sader.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("dataset", "parts", "sizes"),
    [
        ("sen2_mtc_new", ("train", "val", "test"), (34, 5, 10)),
        ("sen12mscr", ("train", "val", "test"), (155, 10, 10)),
        ("sen12mscrts", ("all/train", "all/val", "all/test"), (35, 5, 13)),
        ("sen12mscrts", ("asiaEast/train", "asiaEast/val", "asiaEast/test"), (6, 1, 3)),
    ],
)
def test_shipped_lists_have_their_sizes_and_are_disjoint(dataset: str, parts: tuple[str, ...], sizes: tuple[int, ...]):
    lists = [splits.frozen_list(dataset, part) for part in parts]
    assert tuple(len(each.names) for each in lists) == sizes
    assert len(set().union(*(each.names for each in lists))) == sum(sizes)


def test_the_regions_of_the_time_series_make_up_the_whole():
    regions = ("africa", "america", "asiaEast", "asiaWest", "europa")
    for part in ("train", "val", "test"):
        together = [name for r in regions for name in splits.frozen_list("sen12mscrts", f"{r}/{part}").names]
        assert sorted(together) == sorted(splits.frozen_list("sen12mscrts", f"all/{part}").names)
    assert splits.frozen_list("sen12mscrts", "asiaEast/test_published").names == ("ROIs1868/73",)


def test_a_changed_shipped_list_is_noticed(monkeypatch: pytest.MonkeyPatch):
    content = {"lists": {"test": ["a", "b"]}, "sha256": {"test": splits.list_hash(["a"])}}
    monkeypatch.setattr(splits, "_shipped", lambda dataset: content)
    with pytest.raises(DataError, match="SHA-256"):
        splits.frozen_list("x", "test")
    with pytest.raises(ConfigError, match="no list tset; did you mean test"):
        splits.frozen_list("x", "tset")


def test_list_hash_is_of_the_set():
    assert splits.list_hash(["b", "a"]) == splits.list_hash(["a", "b"]) != splits.list_hash(["ab"])


def test_reading_a_list(tmp_path: Path):
    path = tmp_path / "train.txt"
    path.write_bytes(b"one\r\n\r\n two \ntwo\n")
    with pytest.warns(UserWarning, match="repeats 1 name"):
        assert splits.read_list(path) == ("one", "two")
    path.write_text("\n\n")
    with pytest.raises(DataError, match="is empty"):
        splits.read_list(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        splits.read_list(path)
    with pytest.raises(
        DataError, match=r"no split file .*expected test\.txt or test_list\.txt, found train\.txt\. Do so"
    ):
        splits.folder_list(tmp_path, "test", file_names=("test.txt", "test_list.txt"), instead="Do so.")


@pytest.mark.parametrize("count", [3, 10, 57, 500])
def test_the_rule_by_hash_covers_all_once(count: int):
    names = [f"tile{k}" for k in range(count)]
    parts = [splits.by_hash(reversed(names), split) for split in ("train", "val", "test")]
    assert sorted(name for part in parts for name in part.names) == sorted(names)
    assert all(part.names for part in parts)
    assert parts == [splits.by_hash(names, split) for split in ("train", "val", "test")]
    if count >= 57:
        assert abs(len(parts[0].names) / count - 0.8) < 0.02
