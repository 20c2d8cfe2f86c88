"""Cloud masks of tiles: the estimate of the mask network with any bands, and the mask that is used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sader.bands import BANDS_13, BANDS_RGBN
from sader.data.synthetic.scene import make_series
from sader.errors import ConfigError
from sader.inference.masks import (
    AROUND,
    BESIDE_NODATA,
    SURE,
    SURELY_HIDDEN,
    WATER,
    MaskSettings,
    TileMasks,
    cloud_remnants,
    grown,
)
from sader.inference.remover import CloudRemover
from sader.inference.scene import AGREEMENT, LARGEST_AGREEMENT
from sader.inference.tile import TileInputs
from sader.model.heads import HIDDEN_CLASSES, MASK_CLASSES

SIZE = 40
SIX = (*BANDS_RGBN, "B11", "B12")


def masked(probability: Tensor, valid: Tensor, given: Tensor | None = None, *, growth: int = 0) -> Tensor:
    given = torch.full_like(probability, torch.nan) if given is None else given
    return MaskSettings(mask_growth=growth).used(probability, valid, given)


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


@pytest.fixture(scope="module")
def many():
    return CloudRemover.from_pretrained("sader-s2-msi", device="cpu")


@pytest.fixture(scope="module")
def series():
    return make_series(5, size=(72, 80), dates=3, bands=BANDS_13)


def chosen_bands(series, bands):
    return series.cloudy[:, [BANDS_13.index(band) for band in bands]]


def recall_and_alarms(found, series):
    true = series.cloud_mask
    return (found[true] > 0.5).mean(), (found[~true] > 0.5).mean()


@pytest.mark.parametrize("bands", [BANDS_RGBN[:3], BANDS_RGBN, SIX, BANDS_13], ids=len)
def test_clouds_are_found_with_any_bands(many, series, bands):
    cloudy = chosen_bands(series, bands)
    found = many.estimate_cloud(cloudy, bands=bands, reference=0)
    recall, alarms = recall_and_alarms(found, series)
    assert recall > (0.6 if len(bands) == 3 else 0.7)  # shadows are hard to find without near infrared
    assert alarms < 0.1
    made = many.predict(cloudy, bands=bands, reference=0)
    assert np.array_equal(made.cloud, found)


def test_the_masks_do_not_depend_on_the_model(many, series):
    """The weights of `sader-s2-rgbn` decide on the reference date; the paper's network has no cloud head."""
    cloudy = chosen_bands(series, BANDS_RGBN)
    other, paper = (CloudRemover.from_pretrained(name, device="cpu") for name in ("sader-s2-rgbn", "sader-paper"))
    found = other.estimate_cloud(cloudy, reference=0)
    assert np.array_equal(found, many.estimate_cloud(cloudy, bands=BANDS_RGBN, reference=0))
    assert np.array_equal(found, paper.estimate_cloud(cloudy, reference=0))
    assert not np.array_equal(found[0], other.estimate_cloud(cloudy)[0])


@pytest.mark.parametrize("says", [0.0, 1.0])
def test_what_the_mask_network_is_sure_of_stands(many, series, monkeypatch, says):
    """The heads say that every pixel of the reference date is clear, or that every one is hidden."""
    cloudy = torch.from_numpy(chosen_bands(series, BANDS_RGBN)[None, ..., :64, :64]).clone()
    cloudy[:, 0, :, :24] = cloudy[:, 0, :, :24] * 0.2 + 0.6  # an opaque cloud
    valid = torch.ones(1, 3, 64, 64, dtype=torch.bool)
    known = torch.full(valid.shape, torch.nan)
    inputs = TileInputs(cloudy, valid, known, torch.tensor([0]), torch.ones(1, 4, dtype=torch.bool))
    tile = TileMasks(BANDS_RGBN, None, MaskSettings(mask_growth=0))
    scores = tile.class_scores(inputs).softmax(dim=2)
    hidden, water = scores[:, 0, list(HIDDEN_CLASSES)].sum(dim=1), scores[:, 0, MASK_CLASSES.index("water")]
    heads = lambda images, observed, bands, *, given, **more: torch.where(given.isnan(), says, given)  # noqa: E731
    monkeypatch.setattr("sader.inference.masks.date_heads", lambda device: heads)
    found = tile(inputs)[:, 0] > 0.5
    assert torch.equal(tile(inputs)[:, 1:] > 0.5, scores[:, 1:, list(HIDDEN_CLASSES)].sum(dim=2) >= 0.5)
    if says:
        assert torch.equal(found, ~((grown(hidden[:, None], AROUND)[:, 0] < SURE) | (water > WATER)))
    else:
        assert torch.equal(found, hidden > SURELY_HIDDEN)
    assert 0.02 < found.float().mean() < 0.98
    given = tile(replace(inputs, cloud=torch.zeros_like(known)))
    assert not given.any()


def test_networks_without_a_reference_date_clean_a_date_too(series):
    paper = CloudRemover.from_preset("pix2pix", device="cpu")
    cloudy = chosen_bands(series, paper.bands)
    made = paper.predict(cloudy, reference=1)
    clear = made.kept & ~series.cloud_mask[1]
    assert clear.mean() > 0.5 * (~series.cloud_mask[1]).mean()
    assert np.array_equal(made.clear[:, made.kept], cloudy[1][:, made.kept])


def test_classes_are_probabilities(many, series):
    valid = np.ones(series.cloudy[:, 0].shape, bool)
    valid[0, :10] = False
    found = many.classify(series.cloudy, valid=valid)
    assert found.shape == (3, len(MASK_CLASSES), 72, 80)
    assert np.allclose(found.sum(axis=1)[valid], 1, atol=1e-5)
    assert np.isnan(found[0, :, :10]).all()
    hidden = found[:, list(HIDDEN_CLASSES)].sum(axis=1)
    truth = series.cloud_mask & valid
    assert hidden[truth].mean() > hidden[valid & ~truth].mean() + 0.4


def test_haze_can_be_kept(many, series):
    kept = many.with_options(haze="keep").estimate_cloud(series.cloudy)
    removed = many.estimate_cloud(series.cloudy)
    assert (kept <= removed).mean() > 0.99
    with pytest.raises(ConfigError, match="haze is 'some'; expected remove or keep"):
        many.with_options(haze="some")


def test_the_cloud_head_of_the_model_can_be_used(many, series):
    own = many.with_options(masks="head").estimate_cloud(series.cloudy, reference=0)
    assert not np.array_equal(own, many.estimate_cloud(series.cloudy, reference=0))
    without = CloudRemover.from_preset("pix2pix", device="cpu").with_options(masks="head")
    with pytest.raises(ConfigError, match="has no cloud head"):
        without.estimate_cloud(chosen_bands(series, without.bands))


def test_given_masks_are_used_as_they_are(many, series):
    made = many.predict(chosen_bands(series, SIX), bands=SIX, reference=0, cloud_mask=series.cloud_mask)
    assert np.array_equal(made.cloud, series.cloud_mask.astype(np.float32))


def test_the_accelerated_backend_has_the_same_masks(many, series):
    other = many.with_options(backend="accelerated")
    plain, other = (one.predict(chosen_bands(series, SIX), bands=SIX, reference=0) for one in (many, other))
    assert np.array_equal(plain.cloud, other.cloud)


def test_water_that_only_the_reference_date_shows_stays_visible():
    """A flood in the colour of the river, painted into the real scene of the demo; without the rule a third is lost."""
    from sader.demo import demo_scene

    scene, part = demo_scene(), (..., slice(96, 224), slice(110, 238))
    cloudy, hidden = scene.cloudy[part].copy(), scene.cloud_mask[part][0]
    index = (cloudy[0, 1] - cloudy[0, 3]) / (cloudy[0, 1] + cloudy[0, 3])
    river, flood = (index > 0.1) & ~hidden, np.zeros(hidden.shape, bool)
    flood[52:92, 8:80] = True
    flood &= ~hidden
    cloudy[0][:, flood] = np.median(cloudy[0][:, river], axis=1, keepdims=True)
    remover = CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    found = remover.estimate_cloud(cloudy, reference=0)[0] > 0.5
    assert found[flood].mean() < 0.05
    assert found[hidden].mean() > 0.75  # 0.80: the weights keep more clear land than those before, and miss more cloud
    cautious = remover.with_options(cloud_threshold=0.25).estimate_cloud(cloudy, reference=0)[0] > 0.5
    assert cautious[flood].mean() < 0.15
    assert cautious[hidden].mean() > 0.9


def test_pixels_that_agree_with_the_result_are_kept_under_an_estimated_mask():
    from sader.demo import demo_scene

    cloudy = demo_scene().cloudy[..., 96:192, 110:206]
    remover = CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    found = remover.predict(cloudy, reference=0)
    hidden = found.cloud > 0.5
    given = remover.predict(cloudy, reference=0, cloud_mask=hidden)
    assert np.array_equal(given.kept, ~hidden[0])  # a given mask stands
    difference = np.abs(cloudy[0] - given.clear)
    agrees = (difference <= np.minimum(AGREEMENT * given.spread, LARGEST_AGREEMENT)).all(axis=0)
    assert 0.05 < agrees[hidden[0]].mean() < 0.95
    assert np.array_equal(found.kept, ~hidden[0] | agrees)
    assert np.array_equal(found.clear, np.where(found.kept, cloudy[0], given.clear))
    assert np.array_equal(found.spread, given.spread)  # 0 only where the mask is clear
    assert not found.spread[:, ~hidden[0]].any()
