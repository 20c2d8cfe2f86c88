"""Batches made ahead: the right ones, once each, without a search that would halt the device."""

from __future__ import annotations

import pytest
import torch

from sader.data.batch import SeriesBatch
from sader.data.clouds import filled_up
from sader.training.trainer import BatchFeed, no_search


class CountingMaker:
    """Makes batches that hold their number; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def batch(self, step: int, batch_size: int, dates: int, crop: int) -> SeriesBatch:
        self.asked.append((step, batch_size, dates, crop))
        plane, stack = torch.ones(batch_size, crop, crop) > 0, torch.ones(batch_size, dates, crop, crop) > 0
        return SeriesBatch(
            cloudy=torch.full((batch_size, dates, 1, crop, crop), float(step)), clear=torch.zeros(plane.shape)[:, None],
            scored=plane, hidden=plane, cloud_mask=stack, labels=stack.byte(), valid=stack, present=stack[..., 0, 0],
            reference=torch.zeros(batch_size, dtype=torch.long), days=None, band_present=plane[:, :1, 0],
        )  # fmt: skip


def test_a_prepared_batch_is_made_once_and_an_unprepared_one_when_it_is_taken():
    maker = CountingMaker()
    feed = BatchFeed(maker, 2, 3, 4, device=torch.device("cpu"))
    feed.prepare(7)
    feed.prepare(7)
    assert maker.asked == [(7, 2, 3, 4)]
    assert feed.take(7).cloudy.unique().tolist() == [7]
    assert feed.take(9).cloudy.unique().tolist() == [9]
    feed.step_done()
    assert [number for number, *_ in maker.asked] == [7, 9]
    feed.take(7)  # taken before: made anew, not kept for ever
    assert [number for number, *_ in maker.asked] == [7, 9, 7]


@pytest.mark.parametrize("before", [True, False])
def test_the_search_is_off_while_a_batch_is_made_and_as_before_after_it(monkeypatch, before):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    with no_search():
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
    with pytest.raises(ValueError, match="a bad batch"), no_search():
        raise ValueError("a bad batch")
    assert torch.backends.cudnn.benchmark == before


@pytest.mark.parametrize(("count", "wanted"), [(1, 8), (7, 8), (8, 8), (9, 16), (0, 0)])
def test_zeros_fill_a_batch_up_and_change_no_transform(count, wanted):
    images = torch.randn(count, 6, 10)
    more = filled_up(images)
    assert len(more) == wanted
    assert torch.equal(more[:count], images)
    assert not more[count:].any()
    if count:
        torch.testing.assert_close(torch.fft.rfft2(more)[:count], torch.fft.rfft2(images))
