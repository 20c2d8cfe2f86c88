"""The bank and the series maker: what a batch promises, on small records with known truths."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.batch import SeriesBatch, turn
from sader.data.clouds import CloudSettings
from sader.data.plan import PAPER, REAL, SINGLE, MakerSettings, Plan
from sader.data.pseudo_dates import PseudoDateSettings, pseudo_dates
from sader.data.shards import SeriesRecord, write_shard
from sader.errors import DataError

RGBN = ("B02", "B03", "B04", "B08")
T, CROP = 4, 32


def textured(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.clip(rng.normal(1500, 250, shape), 200, 4000).astype(np.uint16)


def cloudy_record(seed: int, dates: int = 5, size: int = 72) -> SeriesRecord:
    """Date 0 is clear, the others have bright labelled clouds; a corner of all is nodata."""
    rng = np.random.default_rng(seed)
    dn = textured(rng, dates, 4, size, size + 8)
    labels = np.zeros((dates, size, size + 8), np.uint8)
    for k in range(1, dates):
        top = int(rng.integers(0, size // 2))
        labels[k, top : top + size // 3] = 1 + k % 3
        dn[k][:, labels[k] > 0] = 7000 + 100 * k
    dn[:, :, :6, :9] = 0
    return SeriesRecord(dn, f"place_{seed:02d}", "cloudsen12", RGBN, labels, group=f"train/place_{seed:02d}")


def clear_record(seed: int) -> SeriesRecord:
    dn = textured(np.random.default_rng(seed), 6, 4, 64, 80)
    days = tuple(10.0 * k for k in range(6))
    return SeriesRecord(dn, "area", "rondonia", RGBN, np.zeros((6, 64, 80), np.uint8), "L2A", 20.0, days, "area/west")


def rgb_record(seed: int) -> SeriesRecord:
    dn = textured(np.random.default_rng(seed), 1, 3, 64, 64)
    return SeriesRecord(dn, "Forest_000", "eurosat", ("B04", "B03", "B02"), np.zeros((1, 64, 64), np.uint8))


def pair_record(seed: int) -> SeriesRecord:
    labels = np.zeros((2, 48, 48), np.uint8)
    labels[1] = 255
    return SeriesRecord(textured(np.random.default_rng(seed), 2, 4, 48, 48), "ROI", "sen12mscr", RGBN, labels)


@pytest.fixture(scope="module")
def bank() -> SeriesBank:
    records = [cloudy_record(1), cloudy_record(2), clear_record(3), rgb_record(4), pair_record(5)]
    return SeriesBank(records, bands=RGBN)


SMALL_CLOUDS = CloudSettings(shadow_offset=(2.0, 6.0))
"""Short shadows need a small margin: quick on the CPU."""


def make(bank: SeriesBank, settings: MakerSettings | None = None, seed: int = 0) -> SeriesMaker:
    return SeriesMaker(bank, settings, seed, clouds=SMALL_CLOUDS)


def plain(**changes: object) -> MakerSettings:
    """Settings without the changes of value that would hide what is compared."""
    facts: dict = {"jitter": 0.0, "rescale": 0.0, "band_dropout": ()}
    return MakerSettings(**(facts | changes))


def tensors(batch: SeriesBatch) -> dict[str, torch.Tensor]:
    every = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in every.items() if value is not None}


def test_windows_are_the_records_pixels_turned(bank: SeriesBank) -> None:
    record = cloudy_record(1)
    frame = np.arange(8) % 5
    images, labels = bank.windows(frame, np.full(8, 3), np.full(8, 11), np.arange(8), 20)
    for k in range(8):
        wanted = torch.from_numpy(record.dn[frame[k]][:, 3:23, 11:31].astype(np.float32) / 10000)
        assert torch.allclose(images[k], turn(wanted, k), atol=1e-6)
        seen = turn(torch.from_numpy(record.dn[frame[k]][0, 3:23, 11:31] > 0), k)
        assert torch.equal(labels[k] != 254, seen)
    beyond, beyond_labels = bank.windows(np.array([0]), np.array([-4]), np.array([70]), np.array([0]), 20)
    assert (beyond_labels[0, :4] == 254).all()
    assert (beyond[0, :, :, 10:] == 0).all()


def test_batch_depends_on_seed_and_step_alone(bank: SeriesBank) -> None:
    maker = make(bank, seed=5)
    continued = [maker.batch(step, 3, T, CROP) for step in range(3)]
    resumed = make(bank, seed=5).batch(2, 3, T, CROP)
    for name, value in tensors(continued[2]).items():
        assert torch.equal(value, tensors(resumed)[name]), name
    other = make(bank, seed=6).batch(2, 3, T, CROP)
    assert not torch.equal(other.cloudy, resumed.cloudy)
    assert not torch.equal(continued[1].cloudy, resumed.cloudy)


def test_every_batch_keeps_its_promises(bank: SeriesBank) -> None:
    maker = make(bank, MakerSettings(tasks=(0.4, 0.3, 0.3), rescale=0.5, band_dropout=((("B08",), 0.3),)), seed=1)
    tasks, dropped = set(), 0
    for step in range(4):
        batch, plan = maker.batch(step, 6, T, CROP), maker.plan(step, 6, T, CROP)
        tasks |= set(plan.task.tolist())
        for name, value in tensors(batch).items():
            assert torch.isfinite(value.float()).all(), name
        for image in (batch.cloudy, batch.clear):
            assert image.dtype == torch.float32
            assert 0 <= image.min() <= image.max() <= 1
        # Padding, unobserved pixels and absent bands are zero and not marked.
        absent = ~batch.present
        assert (batch.cloudy[absent] == 0).all()
        assert not batch.valid[absent].any()
        assert (batch.labels[absent] == 255).all()
        assert (batch.cloudy.permute(0, 1, 3, 4, 2)[~batch.valid] == 0).all()
        assert not (batch.cloud_mask & ~batch.valid).any()
        assert (batch.clear[~batch.band_present] == 0).all()
        assert (batch.cloudy.transpose(1, 2)[~batch.band_present] == 0).all()
        dropped += int((~batch.band_present).sum())
        assert batch.present.any(1).all()
        # The reference is a given date; hidden pixels are its clouds.
        refs = batch.reference
        assert torch.equal(refs < 0, torch.from_numpy(plan.task == PAPER))
        rows = (refs >= 0).nonzero()[:, 0]
        assert batch.present[rows, refs[rows]].all()
        assert (batch.cloud_mask[rows, refs[rows]] | ~batch.hidden[rows]).all()
        assert not batch.hidden[refs < 0].any()
        assert set(batch.labels.unique().tolist()) <= {0, 1, 2, 3, 255}
        known = batch.labels != 255
        assert torch.equal(batch.cloud_mask[known], batch.labels[known] != 0)
    assert tasks == {REAL, PAPER, SINGLE}
    assert dropped > 0


def test_truth_is_hidden_and_the_rest_is_kept(bank: SeriesBank) -> None:
    maker = make(bank, plain(tasks=(0.6, 0, 0.4)), seed=2)
    hidden = 0
    for step in range(4):
        batch = maker.batch(step, 6, T, CROP)
        rows = torch.arange(6)
        given = batch.cloudy[rows, batch.reference]
        seen = batch.valid[rows, batch.reference]
        changed = (given != batch.clear).any(1)
        assert torch.equal(changed & seen, (changed & batch.hidden))
        # Everywhere under the added cloud the value is another one, apart from chance equality.
        assert (changed | ~batch.hidden)[batch.hidden].float().mean() > 0.98
        hidden += int(batch.hidden.flatten(1).any(1).sum())
    assert hidden > 16


def test_scored_pixels_are_truly_clear(bank: SeriesBank) -> None:
    maker = make(bank, plain(tasks=(0.7, 0.3, 0)), seed=3)
    unscored = 0
    for step in range(4):
        batch, plan = maker.batch(step, 6, T, CROP), maker.plan(step, 6, T, CROP)
        _, labels = bank.windows(plan.target, plan.y, plan.x, plan.symmetry, plan.side)
        assert torch.equal(batch.scored, labels == 0)
        # Clouds in these records are at least 0.7, nodata is 0, ground lies between.
        value = batch.clear[:, 0][batch.scored]
        assert value.min() > 0.01
        assert value.max() < 0.5
        unscored += int((~batch.scored).sum())
    assert unscored > 0


def test_papers_target_is_never_an_input(bank: SeriesBank) -> None:
    maker = make(bank, plain(tasks=(0, 1, 0)), seed=4)
    for step in range(4):
        batch, plan = maker.batch(step, 6, T, CROP), maker.plan(step, 6, T, CROP)
        assert not (plan.frames == plan.target[:, None])[plan.present].any()
        for b in range(6):
            for t in range(T):
                if batch.present[b, t]:
                    same = (batch.cloudy[b, t] == batch.clear[b]).all(0) & batch.valid[b, t]
                    assert same.float().mean() < 0.05
        assert (batch.reference == -1).all()


def test_inputs_are_different_dates_of_one_place(bank: SeriesBank) -> None:
    maker = make(bank, plain(tasks=(1, 0, 0), paste_same_place=1.0, heavy=0.0), seed=4)
    records = bank.catalogue.record
    same_place = 0
    for step in range(20):
        plan = maker.plan(step, 8, T, CROP)
        for b in range(8):
            given = plan.frames[b][plan.present[b]]
            assert len(set(given.tolist())) == len(given)
            assert (records[given] == records[plan.target[b]]).all()
            assert given[plan.reference[b]] == plan.target[b]
        for slot, frame, symmetry in zip(plan.paste_slot, plan.paste_frame, plan.paste_symmetry, strict=True):
            row = slot // T
            if symmetry < 0:  # clouds of the same window: another date, which is not given as well
                same_place += 1
                assert records[frame] == records[plan.target[row]]
                assert frame not in plan.frames[row][plan.present[row]]
    assert same_place > 10


def test_missing_near_infrared(bank: SeriesBank) -> None:
    settings = plain(tasks=(0, 0, 1), single_sources={"eurosat": 1.0})
    batch = make(bank, settings, seed=0).batch(0, 4, T, CROP)
    assert batch.band_present.tolist() == [[True, True, True, False]] * 4
    assert (batch.cloudy[:, :, 3] == 0).all()
    assert (batch.clear[:, :3] > 0).all()


def test_dates_vary_in_number_and_days_are_relative(bank: SeriesBank) -> None:
    maker = make(bank, plain(tasks=(1, 0, 0), real_sources={"rondonia": 1.0}, days=True), seed=0)
    counts = set()
    for step in range(3):
        batch = maker.batch(step, 12, T, 16)
        counts |= set(batch.present.sum(1).tolist())
        assert batch.days is not None
        assert torch.equal(batch.days.isnan(), ~batch.present)
        assert (batch.days.nan_to_num(nan=1e9).amin(1) == 0).all()
    assert counts == {1, 2, 3, 4}


def test_pseudo_dates_keep_detail_and_absent_bands() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(3, 4, 32, 32, generator=generator) * 0.1 + 0.1
    image[:, 3] = 0
    quiet = PseudoDateSettings(noise=(0.0, 0.0), bright=0.0)
    series = pseudo_dates(image, 5, torch.tensor([0, 2, 4]), generator=generator, settings=quiet)
    assert series.shape == (3, 5, 4, 32, 32)
    assert (series[:, :, 3] == 0).all()
    for b, kept in enumerate((0, 2, 4)):
        a, z = image[b, 0].diff(dim=-1).flatten(), series[b, kept, 0].diff(dim=-1).flatten()
        assert torch.corrcoef(torch.stack([a, z]))[0, 1] > 0.9
    assert (series[:, 0] - series[:, 1]).abs().mean() > 0.002


def recoloured(bank: SeriesBank, images: torch.Tensor, present: torch.Tensor, **settings: float) -> torch.Tensor:
    """Return B * T dates and B targets (here T = 1) in other colours."""
    generator = torch.Generator().manual_seed(3)
    return make(bank, plain(**settings))._recoloured(images, present, 1, generator)


def test_other_colours_leave_grey_grey_and_are_the_same_for_all_dates(bank: SeriesBank) -> None:
    ground = torch.rand(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    images = torch.cat([ground, ground])
    present = torch.ones(2, 4, dtype=torch.bool)
    made = recoloured(bank, images, present, mixed=1.0, mixing=0.8)
    assert (made - images).abs().amax() > 0.03
    torch.testing.assert_close(made[:2], made[2:])
    white = torch.full((4, 4, 8, 8), 0.9)
    torch.testing.assert_close(recoloured(bank, white, present, mixed=1.0, mixing=0.8), white)
    torch.testing.assert_close(recoloured(bank, images, present), images)


def test_a_missing_band_is_mixed_into_nothing(bank: SeriesBank) -> None:
    images = torch.full((4, 4, 8, 8), 0.5)
    images[:, 3] = 0
    present = torch.tensor([[True, True, True, False]] * 2)
    torch.testing.assert_close(recoloured(bank, images, present, mixed=1.0, mixing=0.8), images)


def test_nothing_clear_is_an_error(tmp_path: Path) -> None:
    record = dataclasses.replace(cloudy_record(1), labels=None)
    write_shard(tmp_path / "a.shard", [record])
    bank = SeriesBank.load(tmp_path, bands=RGBN)
    with pytest.raises(DataError, match="--clear"):
        SeriesMaker(bank)
    with pytest.raises(DataError, match="no series"):
        SeriesBank([], bands=RGBN)


def test_dates_keep_their_order_where_the_network_has_an_index(bank: SeriesBank) -> None:
    shuffled, ordered = (make(bank, plain(time_order=order, symmetries=False)).plan(0, 64, T, CROP) for order in (0, 1))

    def in_order(plan: Plan) -> np.ndarray:
        steps = np.diff(plan.frames, axis=1) >= 0
        return (steps | ~plan.present[:, 1:]).all(1)

    assert not in_order(shuffled).all()
    assert in_order(ordered).all()
    rows = np.flatnonzero(ordered.reference >= 0)
    assert np.array_equal(ordered.frames[rows, ordered.reference[rows]], ordered.target[rows])
    assert np.array_equal(np.sort(ordered.frames, 1), np.sort(shuffled.frames, 1))
    assert not ordered.symmetry.any()


@pytest.mark.parametrize("time_order", [False, True])
def test_pseudo_dates_fill_the_papers_task(bank: SeriesBank, time_order: bool) -> None:
    sources = {"cloudsen12": 0.3, "rondonia": 0.2, "sen12mscr": 0.3, "eurosat": 0.2}
    settings = plain(
        tasks=(0, 1, 0), fill=True, fewer_dates=0.0, clear_date=1.0, extra_clouds=0.0, heavy=0.0, overcast=0.0,
        real_sources=sources, time_order=time_order,
    )  # fmt: skip
    maker = make(bank, settings, seed=3)
    record, dates = bank.catalogue.record, bank.catalogue.dates
    batch, plan = maker.batch(0, 24, T, CROP), maker.plan(0, 24, T, CROP)
    assert plan.present.all()
    assert batch.present.all()
    others = np.minimum(dates[record[plan.target]] - 1, T)
    assert np.array_equal(plan.derived.sum(1), T - others)
    assert (record[plan.frames] == record[plan.target][:, None]).all()
    given = ~plan.derived
    assert not (plan.frames == plan.target[:, None])[given].any()
    assert {0, T - 1, T} <= set(plan.derived.sum(1).tolist())
    for b, t in zip(*np.nonzero(plan.derived), strict=True):
        seen = batch.valid[b, t] & batch.band_present[b, :, None, None].any(0)
        difference = (batch.cloudy[b, t] - batch.clear[b]).abs()[:, seen]
        # Another date than the target, of the same ground: the pair's other date is not known to be clear.
        assert (plan.frames[b, t] == plan.target[b]) == (
            others[b] == 0 or bank.names[record[plan.target[b]]] == "sen12mscr/ROI"
        )
        assert 0 < difference.mean() < 0.1


def test_clouds_are_pasted_from_chosen_sources_alone(bank: SeriesBank) -> None:
    other = cloudy_record(7)
    both = SeriesBank([cloudy_record(1), dataclasses.replace(other, source="folder", name="more")], bands=RGBN)
    sources = np.array([name.split("/")[0] for name in both.names])

    def pasted(**changes: object) -> set[str]:
        maker = make(both, plain(paste=1.0, paste_same_place=0.0, **changes))
        plans = [maker.plan(step, 32, T, CROP) for step in range(4)]
        return set(sources[both.catalogue.record[np.concatenate([plan.paste_frame for plan in plans])]].tolist())

    assert pasted() == {"cloudsen12", "folder"}
    assert pasted(donors=("folder",)) == {"folder"}
