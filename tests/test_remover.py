"""`CloudRemover` on arrays: what it promises about seeds, tiles, batches, dates and kept pixels, and every bad input.

The networks are tiny, with noise on all parameters, so that whatever should have an influence has one.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sader.checkpoint import Checkpoint, save_checkpoint
from sader.errors import BandError, CheckpointError, ConfigError, SaderError, ShapeError, ValueRangeError
from sader.inference.inputs import parse_steps, prepare_series
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.inference.scene import whole_inputs
from sader.models import ModelConfig, build_model, get_preset

TINY = {"widths": (16, 32), "blocks": (1, 1), "fusion_width": 16, "key_width": 8, "emb_width": 16, "kernel": 3}
TILES = RemoverOptions(tile=16, overlap=8)


def checkpoint(config: ModelConfig, seed: int = 0) -> Checkpoint:
    torch.manual_seed(seed)
    model = build_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return Checkpoint(model.eval(), config, {})


SMALL = get_preset("small").replace(name="tiny", network={**TINY, "cloud_widths": (8,), "refinement_widths": (8,)})
PAPER = get_preset("sen2_mtc_new").replace(name="tiny-paper", network=TINY)


@pytest.fixture(scope="module")
def small() -> CloudRemover:
    """Four bands, composite, cloud head."""
    return CloudRemover(checkpoint(SMALL), device="cpu")


@pytest.fixture(scope="module")
def paper() -> CloudRemover:
    """Three bands and one auxiliary band, one state frame per date."""
    return CloudRemover(checkpoint(PAPER), device="cpu")


def scene(dates: int = 3, bands: int = 4, height: int = 16, width: int = 24, seed: int = 0) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    return generator.uniform(0.02, 0.6, (dates, bands, height, width)).astype(np.float32)


def masks(dates: int = 3, height: int = 16, width: int = 24, seed: int = 1) -> NDArray[np.bool_]:
    return np.random.default_rng(seed).random((dates, height, width)) < 0.3


# ------------------------------------------------------------------------------------------------ what comes out


def hidden_dates(height: int = 32, width: int = 48) -> NDArray[np.bool_]:
    """Masks of three dates: the first is hidden in three blocks, which two, one and none of the others show."""
    mask = np.zeros((3, height, width), bool)
    mask[0, 8:24, :36] = True
    mask[1, :, 12:36] = True
    mask[2, :, 24:36] = True
    return mask


def test_pixels_that_too_few_dates_show_have_no_value(small):
    series, mask = scene(3, 4, 32, 48), hidden_dates()
    filled = small.predict(series, reference=0, cloud_mask=mask)
    assert np.isfinite(filled.clear).all()
    count = (~mask).sum(axis=0)
    for least in (1, 2):
        made = small.with_options(min_count=least).predict(series, reference=0, cloud_mask=mask)
        np.testing.assert_array_equal(np.isnan(made.clear[0]), ~made.kept & (count < least))
        shown = np.isfinite(made.clear)
        np.testing.assert_array_equal(made.clear[shown], filled.clear[shown])
        assert (made.source_date[~shown[0]] == 0).all()
        assert shown[:, made.kept].all(), "observed pixels stay, however few dates show them"


def test_pixels_of_large_expected_error_have_no_value(small):
    series, mask = scene(3, 4, 32, 48), hidden_dates()
    limit = float(np.median(small.predict(series, reference=0, cloud_mask=mask).spread[:, mask[0]].max(axis=0)))
    made = small.with_options(max_uncertainty=limit).predict(series, reference=0, cloud_mask=mask)
    np.testing.assert_array_equal(np.isnan(made.clear).any(axis=0), (made.spread > limit).any(axis=0))
    assert 0.3 < np.isnan(made.clear[0, mask[0]]).mean() < 0.7


@pytest.mark.parametrize("options", [RemoverOptions(), RemoverOptions(tile=32, overlap=8)])
def test_every_pixel_names_the_date_it_comes_from(options):
    """Untrained, the weights follow the masks: each block comes from the only date that shows it."""
    remover = CloudRemover.from_preset("small", device="cpu", options=options)
    ground = np.linspace(0.05, 0.3, 64, dtype=np.float32)[None, None, :, None] * np.ones((3, 4, 1, 96), np.float32)
    series = ground + np.random.default_rng(0).normal(0, 0.003, ground.shape).astype(np.float32)
    mask = np.zeros((3, 64, 96), bool)
    mask[0, 8:56] = True
    mask[1, :, :32] = True
    mask[2, :, 32:64] = True
    mask[1:, :, 80:] = True
    valid = np.ones_like(mask)
    valid[:, :2] = False
    made = remover.predict(series, reference=0, cloud_mask=mask, valid=valid)
    assert (made.source_date[:2] == 0).all(), "no data"
    assert (made.source_date[made.kept] == 1).all()
    np.testing.assert_array_equal(made.source_date[30, [5, 20, 40, 60]], [3, 3, 2, 2])
    assert (made.source_date[8:56, 84:] == 255).all(), "no date shows it"


def test_the_source_date_needs_weights(paper):
    assert not paper.states_source
    assert paper.predict(scene(3, 3), steps=1).source_date is None
    with pytest.raises(ConfigError, match=r"max_uncertainty needs an expected error.*samples=4"):
        paper.with_options(max_uncertainty=0.01).predict(scene(3, 3), steps=1)


@pytest.mark.parametrize(("name", "value"), [("min_count", -1), ("max_uncertainty", 0.0), ("max_uncertainty", np.nan)])
def test_limits_of_what_is_written_are_checked(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; expected"):
        RemoverOptions(**{name: value})


@pytest.mark.parametrize(("dates", "height", "width"), [(1, 16, 16), (3, 9, 21), (5, 4, 30), (2, 1, 1)])
def test_shape_and_type_for_any_number_of_dates_and_any_size(small, dates, height, width):
    result = small.predict(scene(dates, 4, height, width), steps=1)
    assert result.clear.shape == (4, height, width)
    assert result.clear.dtype == np.float32
    assert np.isfinite(result.clear).all()
    assert (result.clear >= 0).all()
    assert result.cloud.shape == (dates, height, width)
    assert result.kept.shape == (height, width)
    assert not result.kept.any()
    assert result.spread.shape == result.clear.shape  # this network says how far off it may be


def test_call_is_predict(small):
    cloudy = scene()
    np.testing.assert_array_equal(
        small(cloudy, reference=1, steps=1), small.predict(cloudy, reference=1, steps=1).clear
    )


def test_inputs_are_left_alone(small):
    cloudy, cloud = scene(), masks()
    before, cloud_before = cloudy.copy(), cloud.copy()
    small(cloudy, cloud_mask=cloud, reference=0, steps=1)
    np.testing.assert_array_equal(cloudy, before)
    np.testing.assert_array_equal(cloud, cloud_before)


@pytest.mark.parametrize("steps", [4, "2+1"])
def test_seed_decides(small, paper, steps):
    for remover, bands in ((small, 4), (paper, 3)):
        cloudy = scene(bands=bands)
        first, again, other = (remover(cloudy, seed=seed, steps=steps) for seed in (5, 5, 6))
        np.testing.assert_array_equal(first, again)
        assert np.abs(first - other).max() > 1e-4


def test_global_random_state_is_neither_used_nor_changed(small):
    cloudy = scene()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = small(cloudy, steps=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    np.testing.assert_array_equal(small(cloudy, steps=1), first)


@pytest.mark.parametrize("kind", ["small", "paper"])
def test_batch_size_changes_no_bit(kind, request):
    remover = request.getfixturevalue(kind).with_options(tile=16, overlap=8)
    cloudy = scene(bands=4 if kind == "small" else 3, height=33, width=24)
    one = remover.predict(cloudy, steps=2)
    for size in (2, 3, 100):
        many = remover.with_options(batch_size=size).predict(cloudy, steps=2)
        np.testing.assert_array_equal(many.clear, one.clear)
        if kind == "small":
            np.testing.assert_array_equal(many.cloud, one.cloud)


def test_one_tile_whatever_the_tile_size(small):
    cloudy = scene()
    first = small(cloudy, steps=2)
    for tile in (24, 64, 1024):
        np.testing.assert_array_equal(small.with_options(tile=tile, overlap=12)(cloudy, steps=2), first)


def test_tiles_agree_on_what_every_tile_can_see(small):
    """A constant scene has one answer: tiles must not show as seams (their noise is one field over the image)."""
    cloudy = np.full((2, 4, 40, 40), 0.25, dtype=np.float32)
    zero = torch.no_grad()
    plain = CloudRemover(Checkpoint(build_model(SMALL), SMALL, {}), device="cpu", options=TILES)
    with zero:
        whole = plain.with_options(tile=64)(cloudy, steps=2, cloud_mask=np.zeros((2, 40, 40), bool))
        tiled = plain(cloudy, steps=2, cloud_mask=np.zeros((2, 40, 40), bool))
    assert np.abs(whole - tiled).max() < 1e-3


def test_every_tile_is_counted(small):
    calls: list[tuple[int, int]] = []
    remover = small.with_options(tile=16, overlap=8, batch_size=4)
    remover.predict(scene(height=32, width=32), steps=2, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(n, 9) for n in range(1, 10)]


def test_odd_size_is_the_reflected_image_cropped(small):
    cloudy, cloud = scene(height=13, width=18), masks(height=13, width=18)
    bigger = np.pad(cloudy, ((0, 0), (0, 0), (0, 3), (0, 2)), mode="reflect")
    bigger_cloud = np.pad(cloud, ((0, 0), (0, 3), (0, 2)), mode="reflect")
    for given in ({}, {"reference": 1}):
        small_result = small(cloudy, cloud_mask=cloud, steps=2, **given)
        big_result = small(bigger, cloud_mask=bigger_cloud, steps=2, **given)
        np.testing.assert_array_equal(small_result, big_result[:, :13, :18])


def test_order_of_dates_does_not_matter(small):
    cloudy, cloud, order = scene(4), masks(4), [2, 0, 3, 1]
    for reference in (None, 0, 3):
        moved = None if reference is None else order.index(reference)
        before = small.predict(cloudy, cloud_mask=cloud, reference=reference, steps=2)
        after = small.predict(cloudy[order], cloud_mask=cloud[order], reference=moved, steps=2)
        np.testing.assert_allclose(after.clear, before.clear, atol=2e-5)
        np.testing.assert_array_equal(after.kept, before.kept)


# ------------------------------------------------------------------------------------------------ the reference date


def test_clear_pixels_of_the_reference_keep_their_bits(small):
    cloudy, cloud = scene(), masks()
    for reference in (0, 2, -1):
        result = small.predict(cloudy, cloud_mask=cloud, reference=reference, steps=1)
        np.testing.assert_array_equal(result.kept, ~cloud[reference])
        np.testing.assert_array_equal(result.clear[:, result.kept], cloudy[reference][:, result.kept])
        hidden = ~result.kept
        assert (result.clear[:, hidden] != cloudy[reference][:, hidden]).any(axis=0).mean() > 0.9


def test_pixels_without_data_are_not_kept(small):
    cloudy, cloud = scene(), np.zeros((3, 16, 24), bool)
    valid = np.ones((3, 16, 24), bool)
    valid[1, 3:6] = False
    result = small.predict(cloudy, cloud_mask=cloud, reference=1, valid=valid, steps=1)
    np.testing.assert_array_equal(result.kept, valid[1])
    assert np.isfinite(result.clear).all()


def test_unknown_masks_are_estimated_and_known_ones_used(small):
    cloudy, cloud = scene(), masks()
    result = small.predict(cloudy, cloud_mask=[cloud[0], None, cloud[2]], steps=1)
    np.testing.assert_array_equal(result.cloud[[0, 2]], cloud[[0, 2]].astype(np.float32))
    estimate = small.predict(cloudy, steps=1).cloud
    np.testing.assert_array_equal(result.cloud[1], estimate[1])
    assert np.isin(estimate, (0, 1)).all()  # cut to a mask, like those that are given
    wider = small.with_options(mask_growth=4).predict(cloudy, steps=1).cloud
    assert (wider >= estimate).all()


def test_estimated_mask_decides_what_is_kept(small):
    cloudy = scene()
    result = small.predict(cloudy, reference=0, steps=1)
    np.testing.assert_array_equal(result.kept, result.cloud[0] < 0.5)
    untrained = small.with_options(masks="head")  # probability 0.75 everywhere
    more = untrained.with_options(cloud_threshold=0.99999).predict(cloudy, reference=0, steps=1)
    less = untrained.predict(cloudy, reference=0, steps=1)
    assert more.kept.mean() > 0.9 > less.kept.mean()
    np.testing.assert_array_equal(more.clear[:, more.kept], cloudy[0][:, more.kept])


def test_mask_may_be_zeros_and_ones(small):
    cloudy, cloud = scene(), masks()
    for kind in (np.uint8, np.float32):
        np.testing.assert_array_equal(
            small(cloudy, cloud_mask=cloud.astype(kind), steps=1), small(cloudy, cloud_mask=cloud, steps=1)
        )


def test_bands_may_have_common_names(small):
    cloudy = scene()[:, [2, 1, 0, 3]]
    named = small.predict(cloudy, reference=0, bands=("B04", "B03", "B02", "B08"))
    common = small.predict(cloudy, reference=0, bands=("red", "green", "blue", "nir"))
    np.testing.assert_array_equal(common.clear, named.clear)


@pytest.mark.parametrize("options", [{}, {"tile": 16, "overlap": 8}])
def test_a_wholly_hidden_reference_does_not_lead(small, options):
    cloudy, hidden = scene(), masks()
    hidden[0] = True
    remover = small.with_options(**options)
    result = remover.predict(cloudy, reference=0, cloud_mask=hidden, seed=2)
    new = remover.predict(cloudy, reference=None, cloud_mask=hidden, seed=2)
    np.testing.assert_array_equal(result.clear, new.clear)
    hidden[0, :4] = False
    assert not np.array_equal(remover.predict(cloudy, reference=0, cloud_mask=hidden, seed=2).clear, new.clear)


@pytest.mark.parametrize("options", [{}, {"tile": 16, "overlap": 8}])
def test_the_error_of_a_wholly_hidden_reference_includes_the_difference_of_the_dates(small, options):
    cloudy, hidden = scene(), np.zeros((3, 16, 24), bool)
    hidden[0] = True
    cloudy[2] = cloudy[1] + 0.1
    remover = small.with_options(**options)
    stated = remover.predict(cloudy, reference=0, cloud_mask=hidden).spread
    alone = remover.predict(cloudy, reference=None, cloud_mask=hidden).spread
    usual = 0.03
    np.testing.assert_allclose(stated, np.hypot(alone, np.sqrt((0.1**2 + usual**2) / 2)), rtol=5e-2)


def test_papers_network_follows_the_reference_when_its_mask_is_given(paper):
    cloudy, cloud = scene(bands=3), masks()
    result = paper.predict(cloudy, cloud_mask=[None, cloud[1], None], reference=1, steps=1)
    np.testing.assert_array_equal(result.clear[:, ~cloud[1]], cloudy[1][:, ~cloud[1]])
    assert result.cloud is None
    estimated = paper.predict(cloudy, cloud_mask=[None, cloud[1], None], reference=0, steps=1)
    np.testing.assert_array_equal(estimated.clear[:, estimated.kept], cloudy[0][:, estimated.kept])


# ------------------------------------------------------------------------------------------------ nodata, bands, aux


def test_pixels_no_date_shows_are_nan(small, paper):
    valid = np.ones((3, 16, 24), bool)
    valid[:, 2:5, 3:9] = False
    valid[0, 10] = False
    for remover, bands in ((small, 4), (paper, 3)):
        results = []
        for content in (0.0, np.nan, -9999.0):
            cloudy = np.where(valid[:, None], scene(bands=bands), content).astype(np.float32)
            results.append(remover(cloudy, valid=valid, steps=2))
        np.testing.assert_array_equal(np.isnan(results[0]), np.broadcast_to(~valid.any(axis=0), results[0].shape))
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def test_prepared_series_holds_the_models_zero_where_there_is_nothing(small):
    valid = masks()
    cloudy = np.where(valid[:, None], scene()[:, :3], np.nan)
    series = prepare_series(small.config.network, cloudy, valid=valid, bands=["B08", "B02", "B04"])
    assert series.bands == ("B08", "B02", "B04")
    inputs = whole_inputs(small, series)
    filled = inputs.cloudy[0].numpy()
    assert (filled[:, 1] == 0.5).all()  # B03 was not given
    for given, place in ((0, 3), (1, 0), (2, 2)):
        np.testing.assert_array_equal(filled[:, place], np.where(valid, cloudy[:, given], 0.5).astype(np.float32))
    assert inputs.band_present.tolist() == [[True, False, True, True]]


def test_bands_by_name_in_any_order_and_some_missing(small):
    cloudy, cloud = scene(), masks()
    names = list(small.bands)
    order = [3, 1, 0, 2]
    whole = small(cloudy, cloud_mask=cloud, steps=1)
    moved = small(cloudy[:, order], cloud_mask=cloud, steps=1, bands=[names[i] for i in order])
    np.testing.assert_array_equal(moved, whole[order])
    fewer = small(cloudy[:, 1:], cloud_mask=cloud, steps=1, bands=names[1:])
    assert fewer.shape == (3, 16, 24)
    assert np.isfinite(fewer).all()


def test_auxiliary_bands_may_be_missing_and_help_when_given(paper):
    cloudy, aux = scene(bands=3), scene(bands=1, seed=7)
    without, given = paper(cloudy, steps=1), paper(cloudy, aux=aux, steps=1)
    assert np.abs(without - given).max() > 1e-4
    nothing = np.full((3, 1, 16, 24), 0.5, dtype=np.float32)  # the model's zero
    np.testing.assert_array_equal(paper(cloudy, aux=nothing, steps=1), without)


def test_days_count_only_as_differences():
    config = SMALL.replace(network={"date_input": "days"})
    remover = CloudRemover(checkpoint(config), device="cpu")
    cloudy = scene()
    base = remover(cloudy, days=[0, 30, 90], steps=1)
    np.testing.assert_array_equal(remover(cloudy, days=[1000, 1030, 1090], steps=1), base)
    assert np.abs(remover(cloudy, days=[0, 30, 300], steps=1) - base).max() > 1e-5


# ------------------------------------------------------------------------------------------------ samples, resampling


def test_samples_are_averaged_and_their_spread_is_told(small):
    cloudy, cloud = scene(), masks()
    result = small.predict(cloudy, cloud_mask=cloud, reference=0, samples=3, steps=4)
    assert result.spread.shape == (4, 16, 24)
    assert (result.spread[:, result.kept] == 0).all()
    assert (result.spread[:, ~result.kept] > 0).mean() > 0.95
    singles = [small(cloudy, cloud_mask=cloud, reference=0, steps=4, seed=7919 * n) for n in range(3)]
    # The mean is taken before values below 0 are cut off, so compare where no single result was cut.
    inside = (np.stack(singles) > 0).all(axis=0) & ~result.kept
    np.testing.assert_allclose(result.clear[inside], np.mean(singles, axis=0)[inside], atol=1e-6)
    stated = small.predict(cloudy, reference=0, cloud_mask=masks(), steps=4).spread  # that of the first sample
    together = np.hypot(stated, np.std(singles, axis=0))
    np.testing.assert_allclose(result.spread[inside], together[inside], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["small", "paper"])
@pytest.mark.parametrize("guide", ["lowpass", "mean", "none"])
def test_resampling_runs_with_every_guide_without_weights(kind, guide, request):
    remover = request.getfixturevalue(kind).with_options(guide=guide)
    cloudy = scene(bands=4 if kind == "small" else 3)
    resampled = remover(cloudy, steps="4+1")
    assert np.isfinite(resampled).all()
    assert np.abs(resampled - remover(cloudy, steps="4")).max() > 1e-6
    np.testing.assert_array_equal(resampled, remover(cloudy, steps="4+1"))


@pytest.mark.parametrize("guide", ["mae", "conv"])
def test_learned_guides_without_weights_warn_once_and_repeat(small, guide, monkeypatch):
    monkeypatch.setattr("sader.inference.remover.shipped_guide", lambda name, bands: None)
    remover = small.with_options(guide=guide, tile=16, overlap=8)
    cloudy = scene(dates=2, height=16, width=24)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="WITHOUT trained weights") as warned:
        first = remover(cloudy, steps="2+1")
    assert len(warned) == 1
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match="WITHOUT trained weights"):
        again = remover.with_options(batch_size=2)(cloudy, steps="2+1")
    np.testing.assert_array_equal(first, again)


def test_heun_is_another_way_to_the_answer(small):
    cloudy = scene()
    heun = small.with_options(solver="heun")(cloudy, steps=3)
    assert np.isfinite(heun).all()
    assert np.abs(heun - small(cloudy, steps=3)).max() > 1e-6
    with pytest.raises(ConfigError, match="solver is 'rk4'"):
        small.with_options(solver="rk4")(cloudy)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (4, (4, 0)),
        ("4", (4, 0)),
        ("4+1", (4, 1)),
        ("6+2", (6, 2)),
        ("3+0", (3, 0)),
        (None, (4, 1)),
        (np.int64(2), (2, 0)),
    ],
)
def test_steps_are_read(steps, expected):
    assert parse_steps(steps, get_preset("sen2_mtc_new").default_steps) == expected


# ------------------------------------------------------------------------------------------------ weights


def test_from_pretrained_reads_a_file(tmp_path):
    made = checkpoint(SMALL)
    save_checkpoint(tmp_path / "m.safetensors", made.model, made.config, card={"licence": "CC0"})
    remover = CloudRemover.from_pretrained(tmp_path / "m.safetensors", device="cpu", options=TILES)
    assert remover.card == {"licence": "CC0"}
    assert remover.options is TILES
    cloudy = scene(height=16, width=16)
    np.testing.assert_array_equal(
        remover(cloudy, steps=1), CloudRemover(made, device="cpu", options=TILES)(cloudy, steps=1)
    )
    with pytest.raises(CheckpointError, match="no weights called 'nothing-like-it'"):
        CloudRemover.from_pretrained("nothing-like-it")


def test_from_preset_is_untrained_and_says_so_and_repeats():
    torch.manual_seed(3)
    first, second = (CloudRemover.from_preset("small", device="cpu") for _ in range(2))
    assert first.card == {"trained": False}
    for a, b in zip(first.denoiser.parameters(), second.denoiser.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match=r"unknown preset 'smal'; did you mean small\?"):
        CloudRemover.from_preset("smal")


# ------------------------------------------------------------------------------------------------ bad input


def ragged() -> list[NDArray[np.float32]]:
    return [scene(1)[0], scene(1, height=12)[0]]


def spoiled(value: float, where: Any = (0, 0, 0, 0)) -> NDArray[np.float32]:
    cloudy = scene()
    cloudy[where] = value
    return cloudy


GOOD = scene()
BAD: list[tuple[str, dict[str, Any], type[SaderError], str]] = [
    (
        "rank 3",
        {"cloudy": GOOD[0]},
        ShapeError,
        r"has 3 dimensions \(4, 16, 24\); expected \(T, C, H, W\)\. .*cloudy\[None\]",
    ),
    ("rank 5", {"cloudy": GOOD[None]}, ShapeError, r"has 5 dimensions .*; expected \(T, C, H, W\)\. Stack"),
    ("no date", {"cloudy": GOOD[:0]}, ShapeError, r"no date \(T = 0\); give at least one"),
    ("no pixel", {"cloudy": GOOD[..., :0]}, ShapeError, r"holds no pixel\. Give .* at least 1"),
    ("bands", {"cloudy": GOOD[:, :3]}, BandError, r"has 3 bands; this model works on 4: B02, B03, B04, B08\. Select"),
    ("band names", {"bands": ["B02", "B03"]}, BandError, r"bands names 2 .* but cloudy has 4; give one name each"),
    ("unknown band", {"bands": ["B02", "B03", "B04", "B99"]}, BandError, r"this model has .*Leave out B99"),
    ("same band", {"bands": ["B02", "B03", "B04", "B04"]}, BandError, r"each once\. Leave out the duplicates"),
    ("sizes", {"cloudy": ragged()}, ShapeError, r"expected one size for every date"),
    ("text", {"cloudy": [["a"]]}, ShapeError, r"of type <U1; expected one numeric array"),
    ("complex", {"cloudy": GOOD.astype(complex)}, ValueRangeError, r"is complex .*; expected real reflectance"),
    (
        "nan",
        {"cloudy": spoiled(np.nan)},
        ValueRangeError,
        r"holds 1 values that are NaN or infinite; .*valid=np\.isfinite",
    ),
    ("inf", {"cloudy": spoiled(-np.inf)}, ValueRangeError, r"holds 1 values that are NaN or infinite"),
    ("nodata", {"valid": np.zeros((3, 16, 24), bool)}, ValueRangeError, r"no date has a valid pixel\. Check nodata"),
    ("zeros", {"cloudy": 0 * GOOD}, ValueRangeError, r"0 everywhere: that is nodata.* Check the files"),
    (
        "negative",
        {"cloudy": spoiled(-0.5)},
        ValueRangeError,
        r"goes down to -0\.5; expected reflectance in \[0, 1\]\. Check",
    ),
    (
        "absurd",
        {"cloudy": spoiled(7.0)},
        ValueRangeError,
        r"goes up to 7; expected reflectance in \[0, 1\]\. Check scale",
    ),
    ("numbers", {"cloudy": GOOD * 10000}, ValueRangeError, r"look like digital numbers: divide by 10000"),
    ("valid", {"valid": np.ones((3, 16, 23), bool)}, ShapeError, r"valid is \(3, 16, 23\); expected .* \(3, 16, 24\)"),
    ("mask dates", {"cloud_mask": masks(2)}, ShapeError, r"cloud_mask is for 2 dates; cloudy has 3"),
    (
        "mask size",
        {"cloud_mask": masks(width=23)},
        ShapeError,
        r"cloud_mask of date 0 is \(16, 23\); expected .*\(16, 24\)",
    ),
    ("mask number", {"cloud_mask": 1}, ShapeError, r"cloud_mask is 1; expected \(T, H, W\) = \(3, 16, 24\)"),
    (
        "mask classes",
        {"cloud_mask": 3 * masks()},
        ValueRangeError,
        r"values other than 0 and 1; expected True = cloud .*Turn",
    ),
    ("mask share", {"cloud_mask": 0.4 * masks()}, ValueRangeError, r"values other than 0 and 1"),
    ("reference", {"reference": 3}, ConfigError, r"reference is 3; there are 3 dates, so it goes from 0 to 2"),
    (
        "reference name",
        {"reference": "first"},
        ConfigError,
        r"reference is 'first'; expected the index of a date \(0 to 2\)",
    ),
    ("reference bool", {"reference": True}, ConfigError, r"reference is True; expected the index"),
    ("days count", {"days": [0, 1]}, ShapeError, r"days is .*; expected one finite number for each of 3 dates"),
    ("days nan", {"days": [0, 1, np.nan]}, ShapeError, r"expected one finite number for each of 3 dates"),
    ("days text", {"days": ["2020-01-01"] * 3}, ShapeError, r"days is .*2020-01-01.*; expected one number per date"),
    ("aux", {"aux": scene(bands=1)}, BandError, r"takes no auxiliary bands\. Leave aux out"),
    ("steps 0", {"steps": 0}, ConfigError, r"steps is 0; expected a number from 1 to 1000 such as 4, or '4\+1'"),
    ("steps text", {"steps": "many"}, ConfigError, r"steps is 'many'; expected a number"),
    ("steps half", {"steps": "4+"}, ConfigError, r"steps is '4\+'; expected a number"),
    ("steps power", {"steps": "4²"}, ConfigError, r"steps is '4²'; expected a number"),
    ("steps float", {"steps": 4.5}, ConfigError, r"steps is 4\.5; expected a number"),
    ("resamplings", {"steps": "4+99"}, ConfigError, r"steps is '4\+99'; .* at most 63 resamplings"),
    ("samples", {"samples": 0}, ConfigError, r"samples is 0; expected a whole number of at least 1"),
    ("steps without end", {"steps": 10**9}, ConfigError, r"steps is 1000000000; expected a number from 1 to 1000"),
    ("seed fraction", {"seed": 1.5}, ConfigError, r"seed is 1\.5; expected a whole number"),
    ("samples fraction", {"samples": 2.0}, ConfigError, r"samples is 2\.0; expected a whole number"),
    ("bool", {"cloudy": GOOD > 0.3}, ValueRangeError, r"cloudy is boolean; expected reflectance"),
    ("seed", {"seed": -1}, ConfigError, r"seed is -1; expected a whole number of at least 0"),
]


@pytest.mark.parametrize(("given", "error", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_refused_with_what_was_found_wanted_and_to_do(small, given, error, text):
    arguments = {"cloudy": GOOD, "steps": 1, **given}
    with pytest.raises(error, match=text):
        small.predict(**arguments)


@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        ((3, 2, 16, 24), ShapeError, r"aux is \(3, 2, 16, 24\); expected \(T, A, H, W\) = \(3, 1, 16, 24\) for B08"),
        ((2, 1, 16, 24), ShapeError, r"aux is \(2, 1, 16, 24\); expected"),
    ],
)
def test_bad_aux(paper, shape, error, text):
    with pytest.raises(error, match=text):
        paper(scene(bands=3), aux=np.zeros(shape, dtype=np.float32))
    broken = np.full((3, 1, 16, 24), np.nan, dtype=np.float32)
    with pytest.raises(ValueRangeError, match="aux holds NaN or infinite values; expected numbers"):
        paper(scene(bands=3), aux=broken)


def test_missing_bands_need_a_network_that_knows_how(paper):
    with pytest.raises(BandError, match=r"bands B02 are missing; this model needs all of B04, B03, B02"):
        paper(scene(bands=2), bands=["B04", "B03"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tile": 1}, r"tile is 1; this network needs at least 4 pixels"),
        ({"tile": 16, "overlap": 9}, r"overlap 9 with tile 16"),
        ({"batch_size": 0}, r"batch_size is 0; expected at least 1"),
        ({"guide": "magic"}, r"magic"),
    ],
)
def test_bad_options(small, changes, text):
    with pytest.raises(ConfigError, match=text):
        small.with_options(**changes)(GOOD, steps="2+1")


def test_slightly_negative_reflectance_is_reflectance(small):
    """Offsets of processing baseline 04.00 give values just below 0: kept where clear, cut off where filled."""
    cloudy = spoiled(-0.01, (slice(None), slice(None), slice(0, 8)))
    cloud = np.zeros((3, 16, 24), bool)
    cloud[0, :, :12] = True
    result = small.predict(cloudy, cloud_mask=cloud, reference=0, steps=1)
    np.testing.assert_array_equal(result.clear[:, :8, 12:], cloudy[0, :, :8, 12:])
    assert (result.clear[:, :, :12] >= 0).all()


# ------------------------------------------------------------------------------------------------ other kinds of arrays


def test_the_mask_of_a_masked_array_marks_nodata(small):
    cloudy, valid = scene(), ~masks(seed=5)
    masked = np.ma.MaskedArray(cloudy, mask=np.broadcast_to(~valid[:, None], cloudy.shape).copy())
    masked.mask[0, 1:, 3, 3] = True  # one masked band makes the pixel nodata
    masked.mask[0, :1, 3, 3] = False
    valid[0, 3, 3] = False
    masked.data[0, :, 3, 3] = -9999.0
    wanted = small(np.where(valid[:, None], cloudy, 0.1), valid=valid, reference=0, steps=1)
    np.testing.assert_array_equal(small(masked, reference=0, steps=1), wanted)
    both = small(masked, reference=0, steps=1, valid=np.ones_like(valid))
    np.testing.assert_array_equal(both, wanted)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_are_read_whatever_their_type_or_gradient(small, kind):
    cloudy = torch.from_numpy(scene()).to(kind).requires_grad_()
    np.testing.assert_array_equal(small(cloudy, steps=1), small(cloudy.detach().float().numpy(), steps=1))


def test_a_network_that_returns_nan_is_an_error(small):
    broken = CloudRemover(checkpoint(SMALL), device="cpu")
    with torch.no_grad():
        broken.denoiser.network.out.weight[0, 0, 0, 0] = torch.nan
    for reference in (None, 0):
        with pytest.raises(CheckpointError, match=r"'tiny' returned NaN or infinite values"):
            broken(scene(), reference=reference, steps=1)


# ------------------------------------------------------------------------------------------------ options and pickling


def test_other_options_share_the_model(small):
    assert small.with_options(tile=small.options.tile) is small
    other = small.with_options(tile=16, overlap=8)
    assert other.model is small.model
    assert (other.options.tile, small.options.tile) == (16, 512)


@pytest.mark.parametrize(
    ("kind", "capable"),
    [("small", True), ("sen2_mtc_new", False), ("pix2pix", False)],
    ids=["SADER", "paper", "baseline"],
)
def test_capabilities_follow_from_the_network(kind, capable):
    remover = CloudRemover.from_preset(kind, device="cpu")
    assert remover.states_error == remover.matches_dates == capable
    assert remover.needs_all_bands != capable


def test_a_pickled_remover_gives_the_same_bits_and_is_built_once(small):
    cloudy = scene()
    arrived = pickle.loads(pickle.dumps(small))
    assert arrived is not small
    np.testing.assert_array_equal(arrived(cloudy, steps=1), small(cloudy, steps=1))
    assert pickle.loads(pickle.dumps(small)) is arrived
    assert arrived.checksum == small.checksum
    assert pickle.loads(pickle.dumps(small.with_options(tile=16, overlap=8))).options.tile == 16


def test_threads_give_the_same_bits(small):
    cloudy = [scene(seed=seed) for seed in range(4)]
    alone = [small(one, steps=1, reference=0) for one in cloudy]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda one: small(one, steps=1, reference=0), cloudy))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_importing_the_remover_imports_no_baseline():
    code = "import sys, sader.inference.remover; print([m for m in sys.modules if m.startswith('sader.baselines')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_threads_compute_a_shared_value_once():
    from concurrent.futures import ThreadPoolExecutor
    from time import sleep

    from sader.inference.scene import computed_once

    class Shared:
        calls = 0

        @computed_once
        def value(self):
            self.calls += 1
            sleep(0.05)
            return object()

    shared = Shared()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: shared.value, range(4)))
    assert shared.calls == 1
    assert len(set(map(id, found))) == 1
