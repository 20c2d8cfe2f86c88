"""The evaluation items: truths that no input gives away, scored pixels that are truly clear, the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from sader.data.items import LEAST_SCORED, Item, clean_this_date, paper_task, simulated, with_dates
from sader.data.shards import SeriesRecord
from sader.errors import ConfigError, DataError

RGBN = ("B02", "B03", "B04", "B08")
SIZE = 80


def labelled_place(seed: int = 1, dates: int = 5) -> SeriesRecord:
    """Date k has values near 1000 (k + 1); date 0 is clear, the others have labelled clouds; an edge is nodata."""
    rng = np.random.default_rng(seed)
    dn = (1000 * (np.arange(dates) + 1)[:, None, None, None] + rng.integers(0, 300, (dates, 4, SIZE, SIZE))).astype(
        "u2"
    )
    labels = np.zeros((dates, SIZE, SIZE), np.uint8)
    for k in range(1, dates):
        labels[k, 10 * k : 10 * k + 25, 10:60] = 1 + k % 3
        dn[k][:, labels[k] > 0] = 8000 + k
    dn[..., :4] = 0
    labels[..., :4] = 255
    return SeriesRecord(dn, f"place_{seed:02d}", "cloudsen12", RGBN, labels, group=f"val/place_{seed:02d}")


def unlabelled_pair() -> SeriesRecord:
    rng = np.random.default_rng(7)
    dn = rng.integers(800, 1200, (2, 4, 48, 48)).astype("u2")
    dn[1, :, :20, :20] = 9000
    labels = np.zeros((2, 48, 48), np.uint8)
    labels[1] = 255
    return SeriesRecord(dn, "pair", "sen12mscr", RGBN, labels, group="roi")


def clear_series(width: int = 64) -> SeriesRecord:
    rng = np.random.default_rng(9)
    dn = rng.integers(800, 1200, (6, 4, 64, width)).astype("u2")
    labels = np.zeros((6, 64, width), np.uint8)
    days = tuple(10.0 * k for k in range(6))
    return SeriesRecord(dn, "area", "rondonia", RGBN, labels, "L2A", 20.0, days, "area/east")


def counts_of(item: Item, pixels: np.ndarray, date: int) -> np.ndarray:
    return np.rint(item.cloudy[date][:, pixels] * 10000)


def test_the_truth_under_pasted_clouds_is_in_no_input() -> None:
    items = list(clean_this_date([labelled_place()]))
    assert len(items) > 8
    for item in items:
        assert item.reference is not None
        assert item.scored.sum() >= LEAST_SCORED
        assert item.cloud_mask[item.reference][item.scored].all()
        # Clouds have values from 8001, truths below 6000: what the reference shows there is the donor's cloud.
        assert (counts_of(item, item.scored, item.reference) > 8000).all()
        assert (item.clear[:, item.scored] < 0.6).all()
        for date in range(len(item.cloudy)):
            same = (item.cloudy[date] == item.clear).all(0) & item.scored
            assert not same.any()


def test_scored_pixels_are_clear_in_the_record_and_the_rest_of_the_reference_is_untouched() -> None:
    record = labelled_place()
    for item in clean_this_date([record]):
        date, donor = (int(part[-1]) for part in item.name.split("/")[1:])
        box = (slice(None), slice(4, None))  # the bounding box of what is observed
        assert item.scored.shape == record.labels[date][box].shape
        assert (record.labels[date][box][item.scored] == 0).all()
        assert (record.labels[donor][box][item.scored] > 0).all()
        truth = record.dn[date][:, *box] / np.float32(10000)
        np.testing.assert_allclose(item.clear, truth, atol=1e-6)
        np.testing.assert_array_equal(item.cloudy[item.reference][:, ~item.scored], item.clear[:, ~item.scored])
        assert item.kept.sum() + item.cloud_mask[item.reference].sum() == item.valid[item.reference].sum()


def test_the_donor_is_left_out_unless_too_few_dates_remain() -> None:
    assert {len(item.cloudy) for item in clean_this_date([labelled_place(dates=5)])} == {4}
    assert {len(item.cloudy) for item in clean_this_date([labelled_place(dates=3)])} == {3}
    # Donor and reference have their own levels: the donor's clear ground must be in no input.
    for item in clean_this_date([labelled_place()]):
        donor = int(item.name[-1])
        clear = item.valid & ~item.cloud_mask
        levels = {int(item.cloudy[k][:, clear[k]].mean() * 10) for k in range(len(item.cloudy))}
        assert donor + 1 not in levels


def test_unlabelled_places_get_foreign_clouds() -> None:
    records = [unlabelled_pair(), clear_series()]
    made = list(clean_this_date(records, donors=[big_donor()], others=3, per_reference=2))
    pairs = [item for item in made if item.group == "roi"]
    areas = [item for item in made if item.group == "area/east"]
    assert len(areas) == 12
    assert {len(item.cloudy) for item in areas} == {4}
    assert all(item.label_known and item.days is not None for item in areas)
    assert pairs
    assert all(not item.label_known and item.reference == 0 for item in pairs)
    for item in pairs:
        assert item.cloud_mask[1][:15, :15].all(), "the bright square of the unlabelled date is found"
    assert len({item.name for item in made}) == len(made)
    with pytest.raises(DataError, match="no other place has any to paste"):
        list(clean_this_date([clear_series()]))


def test_long_strips_are_cut_into_windows() -> None:
    wide = clear_series(width=700)
    names = {item.name.split("/")[1] for item in clean_this_date([wide], donors=[big_donor()])}
    assert names == {"0", "1"}


def big_donor() -> SeriesRecord:
    rng = np.random.default_rng(3)
    dn = rng.integers(800, 1200, (1, 4, 70, 360)).astype("u2")
    labels = np.zeros((1, 70, 360), np.uint8)
    labels[0, 20:60, 50:300] = 1
    return SeriesRecord(dn, "place_03", "cloudsen12", RGBN, labels, group="val/place_03")


def test_the_papers_task_takes_every_choice_of_inputs() -> None:
    items = list(paper_task([labelled_place()]))
    targets = {item.name.split("/")[1] for item in items}
    assert targets == {f"date{k}" for k in range(5)}
    assert len(items) == 5 * 4
    for item in items:
        assert item.reference is None
        target = int(item.name.split("/")[1][-1])
        assert (np.floor(item.clear[:, item.scored] * 10) == target + 1).all()
        assert not item.kept.any()
    assert len(list(paper_task([labelled_place()], limit=3))) == 3
    assert not list(paper_task([clear_series()]))


def test_simulated_clouds_have_the_coverage_asked_for() -> None:
    items = list(simulated([clear_series()], coverages=(0.2, 0.8), side=64, per_record=2, dates=3))
    assert len(items) == 4
    covers = {0.2: [], 0.8: []}
    for item in items:
        assert item.cloudy.shape == (3, 4, 64, 64)
        assert item.reference == 0
        np.testing.assert_array_equal(item.scored, item.cloud_mask[0])
        np.testing.assert_array_equal(item.cloudy[0][:, item.kept], item.clear[:, item.kept])
        covers[int(item.name[-2:]) / 100].append(item.cover)
    for coverage, found in covers.items():
        assert coverage - 0.05 < np.mean(found) < coverage + 0.25, "shadows add to the cover"


def test_fewer_dates_are_nested_and_keep_the_reference() -> None:
    items = list(clean_this_date([labelled_place()]))
    before: dict[str, set[bytes]] = {}
    for dates in (1, 2, 3, 4):
        for item in with_dates(items, dates):
            assert len(item.cloudy) == dates
            assert item.reference is not None
            assert item.cloud_mask[item.reference][item.scored].all()
            now = {image.tobytes() for image in item.cloudy}
            assert before.get(item.name, set()) <= now
            before[item.name] = now
    assert not list(with_dates(items, 6))
    with pytest.raises(ConfigError, match="at least 1"):
        list(with_dates(items, 0))


def test_the_same_seed_gives_the_same_items() -> None:
    def all_items(seed: int) -> list[Item]:
        donors = [big_donor()]
        return [
            *clean_this_date([clear_series(), unlabelled_pair()], donors=donors, seed=seed),
            *simulated([clear_series()], coverages=(0.5,), side=64, seed=seed),
        ]

    for a, b in zip(all_items(3), all_items(3), strict=True):
        assert a.name == b.name
        np.testing.assert_array_equal(a.cloudy, b.cloudy)
    assert [item.scored.sum() for item in all_items(3)] != [item.scored.sum() for item in all_items(4)]


def test_bands_are_chosen_by_name() -> None:
    record = labelled_place()
    whole = next(clean_this_date([record]))
    part = next(clean_this_date([record], bands=("B08", "B02")))
    np.testing.assert_array_equal(part.clear, whole.clear[[3, 0]])
    with pytest.raises(DataError, match="B11"):
        list(clean_this_date([record], bands=("B11",)))
