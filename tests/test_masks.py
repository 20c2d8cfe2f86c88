"""Cloud masks of tiles: from the estimate to the mask that is used, and the fallback for models with few bands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sader.bands import BANDS_13, BANDS_RGBN
from sader.data.synthetic.scene import make_series
from sader.inference.masks import BESIDE_NODATA, cloud_remnants, grown, has_few_bands, used_mask
from sader.inference.remover import CloudRemover

SIZE = 40
SIX = (*BANDS_RGBN, "B11", "B12")


def masked(probability: Tensor, valid: Tensor, given: Tensor | None = None, *, growth: int = 0) -> Tensor:
    given = torch.full_like(probability, torch.nan) if given is None else given
    return used_mask(probability, valid, given, threshold=0.5, growth=growth)


def cloud_and_gap(columns: int) -> tuple[Tensor, Tensor]:
    """Return the estimate and validity (1, 1, H, W) of a cloud on the left and nodata on the right, so far apart."""
    probability, valid = torch.zeros(1, 1, SIZE, SIZE), torch.ones(1, 1, SIZE, SIZE, dtype=torch.bool)
    probability[..., :10] = 0.9
    valid[..., 10 + columns :] = False
    return probability, valid


def test_pixels_between_cloud_and_nodata_are_hidden():
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


def test_thin_strips_of_data_among_gaps_are_hidden_and_broad_land_beside_a_gap_is_not():
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


def test_a_tile_without_nodata_has_no_remnants():
    mask = (torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) > 0.7).float()
    assert not cloud_remnants(mask, torch.ones(1, 3, SIZE, SIZE, dtype=torch.bool)).any()


@pytest.mark.parametrize(
    ("there", "wanted"),
    [(BANDS_13, False), (SIX, True), (BANDS_RGBN, True), (BANDS_13[:9], True), (BANDS_13[:10], False),
     (tuple(band for band in BANDS_13[:9] if band != "B02"), False), (("B11", "B12"), False)],
)  # fmt: skip
def test_when_the_fallback_is_needed(there, wanted):
    assert has_few_bands(BANDS_13, [band in there for band in BANDS_13]) == wanted


def test_a_network_with_all_its_bands_needs_no_fallback():
    assert not has_few_bands(BANDS_RGBN, [True] * 4)
    assert not has_few_bands(SIX, [True] * 6)


@pytest.fixture(scope="module")
def many():
    return CloudRemover.from_pretrained("sader-s2-msi", device="cpu")


@pytest.fixture(scope="module")
def series():
    return make_series(5, size=(72, 80), dates=3, bands=BANDS_13)


def test_few_bands_have_the_masks_of_the_network_of_four(many, series):
    four = CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    chosen = [BANDS_13.index(band) for band in SIX]
    wanted = four.estimate_cloud(series.cloudy[:, chosen[:4]], bands=BANDS_RGBN, reference=0)
    assert 0.02 < wanted.mean() < 0.98
    assert np.array_equal(many.estimate_cloud(series.cloudy[:, chosen], bands=SIX, reference=0), wanted)
    made = many.predict(series.cloudy[:, chosen], bands=SIX, reference=0)
    assert np.array_equal(made.cloud, wanted)
    assert made.clear.shape == (6, 72, 80)


def test_many_bands_have_their_own_masks(many, series):
    chosen = [BANDS_13.index(band) for band in BANDS_13 if band != "B10"]
    names = [BANDS_13[index] for index in chosen]
    four = CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    theirs = four.estimate_cloud(series.cloudy[:, [BANDS_13.index(band) for band in BANDS_RGBN]], bands=BANDS_RGBN)
    assert not np.array_equal(many.estimate_cloud(series.cloudy[:, chosen], bands=names), theirs)


def test_given_masks_are_used_as_they_are(many, series):
    chosen = [BANDS_13.index(band) for band in SIX]
    made = many.predict(series.cloudy[:, chosen], bands=SIX, reference=0, cloud_mask=series.cloud_mask)
    assert np.array_equal(made.cloud, series.cloud_mask.astype(np.float32))


def test_the_accelerated_backend_has_the_same_masks(many, series):
    chosen = [BANDS_13.index(band) for band in SIX]
    other = many.with_options(backend="accelerated")
    plain, other = (one.predict(series.cloudy[:, chosen], bands=SIX, reference=0) for one in (many, other))
    assert np.array_equal(plain.cloud, other.cloud)
