"""A model of many bands that sees few of them leaves the clouds to the network of four bands."""

from __future__ import annotations

import numpy as np
import pytest

from sader.bands import BANDS_13, BANDS_RGBN
from sader.data.synthetic.scene import make_series
from sader.inference.masks import sees_too_little
from sader.inference.remover import CloudRemover, RemoverOptions

SIX = (*BANDS_RGBN, "B11", "B12")


@pytest.mark.parametrize(
    ("there", "wanted"),
    [(BANDS_13, False), (SIX, True), (BANDS_RGBN, True), (BANDS_13[:9], True), (BANDS_13[:10], False),
     (tuple(band for band in BANDS_13[:9] if band != "B02"), False), (("B11", "B12"), False)],
)  # fmt: skip
def test_when_it_is_needed(there, wanted):
    assert sees_too_little(BANDS_13, [band in there for band in BANDS_13]) == wanted


def test_a_network_of_its_own_bands_never_needs_it():
    assert not sees_too_little(BANDS_RGBN, [True] * 4)
    assert not sees_too_little(SIX, [True] * 6)


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


def test_many_bands_have_their_own(many, series):
    chosen = [BANDS_13.index(band) for band in BANDS_13 if band != "B10"]
    names = [BANDS_13[index] for index in chosen]
    four = CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    theirs = four.estimate_cloud(series.cloudy[:, [BANDS_13.index(band) for band in BANDS_RGBN]], bands=BANDS_RGBN)
    assert not np.array_equal(many.estimate_cloud(series.cloudy[:, chosen], bands=names), theirs)


def test_given_masks_are_used_as_they_are(many, series):
    chosen = [BANDS_13.index(band) for band in SIX]
    made = many.predict(series.cloudy[:, chosen], bands=SIX, reference=0, cloud_mask=series.cloud_mask)
    assert np.array_equal(made.cloud, series.cloud_mask.astype(np.float32))


def test_the_quick_way_has_the_same_masks(many, series):
    chosen = [BANDS_13.index(band) for band in SIX]
    quick = CloudRemover.from_pretrained("sader-s2-msi", device="cpu", options=RemoverOptions(backend="quick"))
    plain, other = (one.predict(series.cloudy[:, chosen], bands=SIX, reference=0) for one in (many, quick))
    assert np.array_equal(plain.cloud, other.cloud)
