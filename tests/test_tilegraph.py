"""`used_cloud`: from the network's estimate to the mask that is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sader.inference.tile import BESIDE_NODATA, grown, shreds, used_cloud

SIZE = 40


class Estimate:
    """Stands for a network whose cloud head has spoken."""

    def __init__(self, probability: Tensor) -> None:
        self.probability = probability

    def cloud_estimate(self, *given: Any, **more: Any) -> Tensor:
        return self.probability


def masked(probability: Tensor, valid: Tensor, given: Tensor | None = None, *, growth: int = 0) -> Tensor:
    given = torch.full_like(probability, torch.nan) if given is None else given
    network: Any = Estimate(probability)
    cloudy = torch.zeros(1, 1, 3, SIZE, SIZE)
    return used_cloud(
        network, cloudy, valid, given, torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, dtype=torch.long),
        threshold=0.5, growth=growth,
    )  # fmt: skip


def cloud_and_gap(columns: int) -> tuple[Tensor, Tensor]:
    """Return the estimate and validity (1, 1, H, W) of a cloud on the left and nodata on the right, so far apart."""
    probability, valid = torch.zeros(1, 1, SIZE, SIZE), torch.ones(1, 1, SIZE, SIZE, dtype=torch.bool)
    probability[..., :10] = 0.9
    valid[..., 10 + columns :] = False
    return probability, valid


def test_what_lies_between_a_cloud_and_missing_data_is_hidden():
    probability, valid = cloud_and_gap(BESIDE_NODATA)
    assert masked(probability, valid)[..., : 10 + BESIDE_NODATA].all()
    assert not masked(probability, torch.ones_like(valid))[..., 10:].any()  # no data missing
    assert not masked(torch.zeros_like(probability), valid)[valid].any()  # no cloud


def test_clear_land_farther_from_both_is_kept():
    probability, valid = cloud_and_gap(2 * BESIDE_NODATA)
    assert not masked(probability, valid)[..., 10 : 10 + 2 * BESIDE_NODATA].any()


def test_single_pixels_without_data_hide_nothing():
    probability, valid = cloud_and_gap(SIZE)
    valid[..., ::4, 14:16] = False
    assert not masked(probability, valid)[..., 10:].any()
    valid[..., 10:13, 14:17] = False  # a gap of three by three is one
    assert masked(probability, valid)[..., 11, 13] == 1


def test_slivers_of_data_among_gaps_are_hidden_and_broad_land_beside_a_gap_is_not():
    nothing, valid = torch.zeros(1, 1, SIZE, SIZE), torch.ones(1, 1, SIZE, SIZE, dtype=torch.bool)
    valid[..., 20:] = False
    assert not masked(nothing, valid)[valid].any()
    valid[..., 10:13, 24:36] = True  # three rows of pixels in the gap
    mask = masked(nothing, valid)
    assert mask[..., 10:13, 24:36].all()
    assert not mask[..., :20].any()
    valid[..., 20:32, 24:36] = True  # twelve rows: as wide as land may be
    assert not masked(nothing, valid)[..., 20:32, 24:36].any()


def test_given_masks_stand():
    probability, valid = cloud_and_gap(4)
    given = torch.zeros_like(probability)
    assert torch.equal(masked(probability, valid, given), given)


def test_growth_is_a_square():
    probability = torch.zeros(1, 1, SIZE, SIZE)
    probability[..., 20, 20] = 0.7
    mask = masked(probability, torch.ones(1, 1, SIZE, SIZE, dtype=torch.bool), growth=2)
    assert mask.sum() == 25
    assert mask[..., 18:23, 18:23].all()
    assert torch.equal(grown(probability, 0), probability)


def test_a_whole_tile_is_not_searched_and_the_search_would_find_nothing():
    mask = (torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) > 0.7).float()
    assert not shreds(mask, torch.ones(1, 3, SIZE, SIZE, dtype=torch.bool)).any()
