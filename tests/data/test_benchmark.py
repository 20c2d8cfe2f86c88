"""The benchmark: the same bits everywhere, no leak between parts, truths that no input shows, and frozen checksums."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sader.bands import BANDS_13
from sader.cli.main import app
from sader.data.batch import CLEAR, SHADOW, THICK, THIN, UNKNOWN
from sader.data.benchmark import build
from sader.data.benchmark.compose import LEAST_HIDDEN, Place, compose
from sader.data.benchmark.exact import Draw, noise, paste_clouds, pseudo_date, simulate_clouds, whole_counts
from sader.data.benchmark.places import SOURCES, part_of, read_benchmark_places
from sader.data.items import clean_this_date, paper_task
from sader.data.shards import SeriesRecord, read_shards
from sader.errors import BandError, DataError

RGBN = ("B02", "B03", "B04", "B08")
FIRE, FINLAND = (*RGBN, "B12"), (*RGBN, "B11", "B12")
SIDE = 72


def digest(image: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()[:12]


def ground(seed: int = 0, side: int = SIDE) -> np.ndarray:
    return np.rint(1500 + 600 * noise(Draw(f"ground{seed}"), side, side, 12.0, 3))[None] * np.ones((4, 1, 1))


def place(dates: int, *, group: str = "oscd/bordeaux", labels: np.ndarray | None = None) -> SeriesRecord:
    dn = np.stack([whole_counts(pseudo_date(ground(), Draw(f"{group}{k}")), 4) for k in range(dates)])
    known = np.zeros((dates, SIDE, SIDE), np.uint8) if labels is None else labels
    return SeriesRecord(dn, group.split("/")[1], "oscd", RGBN, known, group=group, extra={"items": 4})


def cloudy_place() -> SeriesRecord:
    """A labelled place of five dates; all but the first have clouds."""
    record = place(5, group="cloudsen12/place_17")
    skies = [simulate_clouds(image.astype(float), 0.4, Draw(f"sky{k}")) for k, image in enumerate(record.dn)]
    dn = np.stack([record.dn[0], *(whole_counts(image, 4) for image, _ in skies[1:])])
    labels = np.stack([np.zeros((SIDE, SIDE), np.uint8), *(label for _, label in skies[1:])])
    return SeriesRecord(dn, "place_17", "cloudsen12", RGBN, labels, group=record.group, extra={"items": 4})


def test_the_bits_of_every_step_are_fixed() -> None:
    """Values from this machine: any change of arithmetic changes the checksums of the benchmark."""
    image = ground()
    cloudy, labels = simulate_clouds(image, 0.5, Draw("a"))
    pasted, _ = paste_clouds(image, whole_counts(cloudy, 4).astype(float), labels)
    found = [
        digest(part) for part in (Draw("x").array(5), image, cloudy, labels, pasted, pseudo_date(image, Draw("b")))
    ]
    assert found == FIXED


def test_simulated_clouds_cover_what_is_asked_and_change_nothing_else() -> None:
    image = ground(side=128)
    for number, coverage in enumerate((0.2, 0.5, 0.9)):
        cloudy, labels = simulate_clouds(image, coverage, Draw(f"{number}"))
        assert set(np.unique(labels)) <= {CLEAR, THICK, THIN, SHADOW}
        cloud = ((labels == THICK) | (labels == THIN)).mean()
        assert coverage - 0.12 < cloud <= coverage + 0.01
        assert np.array_equal(cloudy[:, labels == CLEAR], image[:, labels == CLEAR])
        assert (cloudy[:, labels == SHADOW] < image[:, labels == SHADOW]).all()


def test_the_ground_of_a_donor_is_not_pasted_with_its_thin_clouds() -> None:
    image, labels = np.full((4, SIDE, SIDE), 1000.0), np.zeros((SIDE, SIDE), np.uint8)
    labels[20:50, 20:50] = THIN
    donor = np.full((4, SIDE, SIDE), 2000.0)
    donor[:, 20:50, 20:50] = 3000 + 900 * (np.indices((30, 30)).sum(0) % 2)
    pasted, mask = paste_clouds(image, donor, labels)
    assert np.array_equal(pasted[:, mask == CLEAR], image[:, mask == CLEAR])
    inside = pasted[0, 30:40, 30:40]
    assert inside.min() > 1200
    assert np.ptp(inside) < 60  # the donor's own contrast is 900


def test_whole_counts_never_turn_data_into_nodata() -> None:
    assert whole_counts(np.array([0.0, 0.4, 1, 5, 7, 10_003, 20_000]), 4).tolist() == [0, 4, 4, 4, 8, 10_000, 10_000]


def test_a_place_of_two_dates_is_filled_from_the_other_date() -> None:
    item = compose(Place(place(2)), Draw("i"), task="paper", sky="simulated", window=(1, 0, 0), side=64)
    assert item is not None
    assert item.dn.shape == (4, 4, 64, 64)
    assert item.extra["ground"] == "filled"
    assert [one["date"] for one in item.extra["inputs"]] == [0, 0, 0]  # type: ignore[attr-defined]
    assert [one["derived"] for one in item.extra["inputs"]] == [False, True, True]  # type: ignore[attr-defined]


def test_a_single_date_is_marked_as_pseudo() -> None:
    item = compose(Place(place(1)), Draw("i"), task="paper", sky="simulated", window=(0, 0, 0), side=64)
    assert item is not None
    assert item.extra["ground"] == "pseudo"
    assert item.days is None
    for date in range(1, 4):  # no input repeats the target
        both = item.labels[date] == CLEAR  # type: ignore[index]
        assert (item.dn[date] != item.dn[0])[:, both].mean() > 0.5


def test_the_reference_is_the_truth_under_clouds() -> None:
    donors = [Place(cloudy_place())]
    for sky in ("pasted", "simulated"):
        record = compose(Place(place(4), donors), Draw("r"), task="clean", sky=sky, window=(2, 0, 0), side=64)
        assert record is not None
        assert record.extra["sky"] == sky
        (item,) = clean_this_date([record])
        assert item.reference is not None
        cleaned = item.cloudy[item.reference]
        assert item.scored.mean() >= LEAST_HIDDEN
        assert np.array_equal(item.scored, item.cloud_mask[item.reference])
        assert (np.abs(cleaned - item.clear).max(0) > 0)[item.scored].mean() > 0.9
        assert np.array_equal(cleaned[:, item.kept], item.clear[:, item.kept])
        assert not list(paper_task([record]))


def test_own_clouds_and_labels_reach_the_item() -> None:
    source = cloudy_place()
    record = compose(Place(source), Draw("o1"), task="paper", sky="pasted", window=(0, 0, 0), side=64)
    assert record is not None
    assert record.extra["sky"] == "real"
    (item,) = paper_task([record])
    assert item.label_known
    used = [one["date"] for one in record.extra["inputs"]]  # type: ignore[attr-defined]
    assert 0 not in used
    assert source.labels is not None
    assert np.array_equal(item.cloud_mask, (source.labels[used, :64, :64] != CLEAR))
    assert np.array_equal(np.rint(item.clear * 10000), source.dn[0, :, :64, :64])


def test_places_are_in_one_part_only() -> None:
    assert part_of("oscd/mumbai") == "test"
    assert part_of("oscd/montpellier") == "val"
    assert part_of("oscd/paris") == "train"
    frozen = build.frozen()
    held: dict[str, str] = {}
    for name, entry in frozen["sets"].items():
        part = name.split("/")[0]
        for item in entry["items"]:
            group = "/".join(item.split("/")[:2])
            assert held.setdefault(group, part) == part
            assert group not in frozen["train"]


def test_frozen_list_is_complete() -> None:
    frozen = build.frozen()
    assert (frozen["name"], frozen["version"]) == (build.NAME, build.VERSION)
    assert set(frozen["sets"]) == {which.name for which in build.SETS}
    assert 150 <= len(frozen["sets"]["test/paper-128"]["items"]) <= 250
    assert all(len(value) == build.DIGITS for entry in frozen["sets"].values() for value in entry["items"].values())


# ------------------------------------------------------------------------------------------------ source folders


def write(path: Path, image: np.ndarray, names: tuple[str, ...] | None = RGBN) -> None:
    rasterio = pytest.importorskip("rasterio")
    path.parent.mkdir(parents=True, exist_ok=True)
    count, height, width = image.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        profile = {"driver": "GTiff", "count": count, "height": height, "width": width, "dtype": image.dtype.name}
        with rasterio.open(path, "w", **profile) as file:
            file.write(image)
            if names:
                file.descriptions = names


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny folders of five sources: CloudSEN12, OSCD, California (with B12), BioMassters (B11 and B12), Belgium."""
    root = tmp_path_factory.mktemp("sources")
    for name in ("place_16", "place_17"):
        record = cloudy_place()
        for k in range(5):
            write(root / "cloudsen12" / "val" / name / f"date_{k}.tif", record.dn[k])
            write(root / "cloudsen12" / "val" / name / f"date_{k}_label.tif", record.labels[k][None], None)  # type: ignore[index]
    for city in ("bordeaux", "montpellier", "paris"):
        for k, image in enumerate(place(2, group=f"oscd/{city}").dn):
            write(root / "oscd" / city / f"date_{k}.tif", image)
    before = place(1, group="fire/x").dn[0]
    after = before + np.uint16(40)
    after[0, :20] += 600  # smoke is blue
    for fire in ("DOVE_20241019", "BEAR_20200817"):
        for name, image in (("pre", before), ("post", after)):
            write(root / "california_fires" / fire / f"{name}.tif", np.concatenate([image, image[3:] // 2]), FIRE)
    for k, image in enumerate(place(3, group="finland/y").dn):
        percent = np.zeros((1, SIDE, SIDE), np.uint8)
        percent[0, :10], percent[0, 10:20] = 90, 40
        for name in ("000aa810", "0a1b2c3d"):
            month = root / "biomassters" / name / f"month_{k:02d}.tif"
            write(month, np.concatenate([image, image[2:] // 2]), FINLAND)
            write(month.with_name(f"month_{k:02d}_cloudprob.tif"), percent, None)
    (root / "belgium").mkdir()
    series = np.stack([place(1, group=f"be/{k}").dn[0] for k in range(55)])
    classes = np.full((55, SIDE, SIDE), 4, np.uint8)
    classes[52] = 11
    days = [f"2018-{1 + k // 28:02d}-{1 + k % 28:02d}" for k in range(55)]
    np.savez(root / "belgium" / "belgium_x.npz", img=series, scl=classes, date=np.array(days))
    return root


def test_readers_label_the_sources(sources: Path) -> None:
    found = {record.group: record for record in read_benchmark_places(sources, "test", partial=True)}
    assert set(found) == {
        "cloudsen12/place_17", "oscd/bordeaux", "california_fires/DOVE_20241019", "biomassters/000aa810",
        "belgium/field_test",
    }  # fmt: skip
    smoke = found["california_fires/DOVE_20241019"].labels
    assert smoke is not None
    assert (smoke[0, :20] == THIN).mean() > 0.9
    assert (smoke[0, 20:] == THIN).mean() < 0.1
    assert (smoke[1] == CLEAR).all()
    months = found["biomassters/000aa810"].labels
    assert months is not None
    assert [int(months[0, row, 0]) for row in (0, 15, 30)] == [THICK, THIN, CLEAR]
    field = found["belgium/field_test"]
    assert field.dn.shape[0] == 4
    assert (field.labels[1] == THICK).all()  # type: ignore[index]
    trained = {record.group: record for record in read_benchmark_places(sources, "train", partial=True)}
    assert set(trained) == TRAINED
    assert {record.bands for record in (*found.values(), *trained.values())} == {RGBN}


@pytest.mark.parametrize("bands", [BANDS_13, BANDS_13[::-1]])
def test_other_bands_are_added_where_a_source_has_them(sources: Path, bands: tuple[str, ...]) -> None:
    four = {record.group: record for record in read_benchmark_places(sources, "train", partial=True)}
    found = {record.group: record for record in read_benchmark_places(sources, "train", partial=True, bands=bands)}
    assert set(found) == set(four)
    assert set(found["california_fires/BEAR_20200817"].bands) == set(FIRE)
    assert set(found["biomassters/0a1b2c3d"].bands) == set(FINLAND)
    assert set(found["oscd/paris"].bands) == set(found["belgium/field_train"].bands) == set(RGBN)
    for group, record in found.items():
        assert np.array_equal(record.labels, four[group].labels)  # type: ignore[arg-type]
        assert np.array_equal(record.dn[:, [record.bands.index(name) for name in RGBN]], four[group].dn)
    assert THIN in np.unique(four["california_fires/BEAR_20200817"].labels)  # type: ignore[arg-type]


def test_bands_that_the_places_need_are_named(sources: Path) -> None:
    with pytest.raises(BandError, match="without B08"):
        read_benchmark_places(sources, "train", partial=True, bands=("B02", "B03", "B04", "B12"))
    with pytest.raises(BandError, match="B8"):
        build.build(sources, sources / "out", train=True, partial=True, bands=("B02", "B03", "B04", "B8"))
    assert not (sources / "out").exists()


def test_paris_has_an_unlabelled_date(sources: Path) -> None:
    (paris,) = (r for r in read_benchmark_places(sources, "train", partial=True) if r.group == "oscd/paris")
    assert paris.labels is not None
    assert (paris.labels[1] == UNKNOWN).all()


def test_a_missing_source_is_named(sources: Path) -> None:
    with pytest.raises(DataError, match="sen12mscr"):
        list(read_benchmark_places(sources, "test"))
    with pytest.raises(DataError, match="lacks"):
        list(read_benchmark_places(sources / "oscd", "test", partial=True))
    assert set(SOURCES) > {"oscd"}


@pytest.fixture(scope="module")
def built(
    request: pytest.FixtureRequest, sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict]]:
    """The folder and the list of a build: of the sets that the tests name, of all sets with --slow."""
    out, named = tmp_path_factory.mktemp("built"), ("val/clean-128", "test/paper-128", "test/paper-256")
    with pytest.MonkeyPatch.context() as patch:
        if not request.config.getoption("--slow"):
            patch.setattr(build, "SETS", tuple(which for which in build.SETS if which.name in named))
        yield out, build.build(sources, out, train=True, partial=True)


def test_a_second_build_gives_the_same_checksums(sources: Path, built: tuple[Path, dict]) -> None:
    _, listing = built
    which = next(which for which in build.SETS if which.name == "val/clean-128")
    items = list(build.set_items(which, build.load_places(sources, which.part, partial=True)))
    assert build.list_items(items) == listing["sets"][which.name]
    assert len(items) > 10


def test_shards_hold_the_listed_items(built: tuple[Path, dict]) -> None:
    out, listing = built
    items = listing["sets"]["test/paper-128"]["items"]
    assert len(items) > 20
    assert listing["sets"]["test/paper-256"]["items"] == {}  # the places are smaller
    records = list(read_shards(out / "test" / "paper-128"))
    assert {record.name: build.checksum(record)[:16] for record in records} == items
    for record in records:
        assert record.extra["target"] == 0
        assert part_of(record.group) == "test" or record.group == "belgium/field_test"
    assert listing["train"] == sorted(TRAINED)
    trained = list(read_shards(out / "train"))
    assert {record.group for record in trained} == TRAINED
    assert {record.bands for record in trained} == {RGBN}
    assert build.read_listing(out)["sets"] == listing["sets"]
    few = [item.name for item in paper_task(records, limit=1)]
    assert len(few) == listing["sets"]["test/paper-128"]["places"]
    assert set(few) < set(items)


def test_differences_name_the_items(built: tuple[Path, dict]) -> None:
    _, listing = built
    name, items = "test/paper-128", listing["sets"]["test/paper-128"]["items"]
    first, second, *_ = items
    found = {key: value for key, value in items.items() if key != second} | {first: "0" * 16, "new": "1"}
    changed = {**listing, "sets": {**listing["sets"], name: {"items": found}}}
    assert build.differences(listing, listing) == []
    assert build.differences(changed, listing) == [
        f"{name} {first}: different", f"{name} {second}: missing", f"{name} new: not in the list",
    ]  # fmt: skip


def test_the_command_compares_with_the_frozen_list(built: tuple[Path, dict], tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["data", "benchmark", str(built[0]), "--check", "--list", str(tmp_path / "list.json")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert "differences from TriClear 1" in result.output
    assert json.loads((tmp_path / "list.json").read_text())["sets"] == built[1]["sets"]
    assert runner.invoke(app, ["data", "benchmark", str(built[0])]).exit_code != 0
    with pytest.raises(DataError, match="no items"):
        build.read_listing(tmp_path)


def test_the_command_takes_the_bands_of_the_training_places(
    sources: Path, built: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = next(which for which in build.SETS if which.name == "val/clean-128")
    monkeypatch.setattr(build, "SETS", (which,))
    arguments = ["data", "benchmark", str(sources), "--out", str(tmp_path), "--partial", "--train"]
    result = CliRunner().invoke(app, [*arguments, "--bands", "msi"])
    assert "train: 4" in result.output
    assert build.read_listing(tmp_path)["sets"] == {which.name: built[1]["sets"][which.name]}
    found = {record.group: record for record in read_shards(tmp_path / "train")}
    assert found["california_fires/BEAR_20200817"].bands == FIRE
    assert found["biomassters/0a1b2c3d"].bands == FINLAND
    assert found["oscd/paris"].bands == RGBN


TRAINED = {"belgium/field_train", "biomassters/0a1b2c3d", "california_fires/BEAR_20200817", "oscd/paris"}
FIXED = ["6f193add63bb", "a4e3353642ba", "c572b195d30d", "3de6cfb58782", "5d5f97cb1e15", "f743dab6a0f5"]
