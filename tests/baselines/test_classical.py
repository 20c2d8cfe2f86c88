"""Classical methods: what each keeps, fills and never looks at; the mask by rules; the smooth fill."""

from __future__ import annotations

import numpy as np
import pytest

from sader.baselines.classical import CLASSICAL, flat_truth, get_classical
from sader.data.cloud_rules import USUAL_BANDS, estimate_cloud_mask, fill_smoothly, local_share
from sader.errors import BandError, ConfigError, ShapeError, ValueRangeError

DATES, BANDS, HEIGHT, WIDTH = 4, 4, 24, 31
DAYS = [0.0, 12.0, 31.0, 40.0]
MASKED = sorted(set(CLASSICAL) - {"mean", "median", "least_cloudy"})
FOLLOWING = ("matched_mosaic", "ridge_blend", "local_ridge_blend")


def land(seed: int, *, bands: int = BANDS, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    """Return fields and texture, (C, H, W) in about [0.02, 0.35], bands neither equal nor independent."""
    rng = np.random.default_rng(seed)
    fields = rng.random((3, size[0] // 6 + 1, size[1] // 6 + 1)).repeat(6, 1).repeat(6, 2)[:, : size[0], : size[1]]
    mixed = np.tensordot(rng.random((bands, 3)), fields, axes=1) + 0.1 * rng.random((bands, *size))
    return (0.02 + 0.15 * mixed).astype(np.float32)


def series(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return cloudy dates (T, C, H, W), their true masks and clear truths; some pixels no date shows."""
    rng = np.random.default_rng(seed)
    ground = land(seed)
    truth = np.stack([ground * rng.uniform(0.8, 1.2, (BANDS, 1, 1)) + rng.uniform(0, 0.02) for _ in range(DATES)])
    mask = np.zeros((DATES, HEIGHT, WIDTH), bool)
    for date, (top, left) in enumerate([(0, 0), (5, 9), (10, 3), (3, 14)]):
        mask[date, top : top + 9 + date, left : left + 12] = True
    mask[:, 20:22, 25:28] = True
    cloudy = np.where(mask[:, None], 0.6 + 0.2 * rng.random(truth.shape), truth)
    return cloudy.astype(np.float32), mask, truth.astype(np.float32)


@pytest.mark.parametrize("name", CLASSICAL)
def test_clear_pixels_of_the_reference_are_kept_and_all_is_finite(name: str) -> None:
    cloudy, mask, _ = series()
    before = cloudy.copy(), mask.copy()
    for reference in range(DATES):
        clear = CLASSICAL[name](cloudy, cloud_mask=mask, reference=reference, days=DAYS)
        assert clear.shape == cloudy.shape[1:]
        assert clear.dtype == np.float32
        assert np.isfinite(clear).all()
        kept = ~mask[reference]
        np.testing.assert_array_equal(clear[:, kept], cloudy[reference][:, kept])
    np.testing.assert_array_equal(cloudy, before[0])
    np.testing.assert_array_equal(mask, before[1])


@pytest.mark.parametrize("reference", [None, 1])
@pytest.mark.parametrize("name", CLASSICAL)
def test_order_of_dates_does_not_matter(name: str, reference: int | None) -> None:
    cloudy, mask, _ = series(1)
    order = [2, 0, 3, 1]
    moved = None if reference is None else order.index(reference)
    a = CLASSICAL[name](cloudy, cloud_mask=mask, reference=reference, days=DAYS)
    b = CLASSICAL[name](cloudy[order], cloud_mask=mask[order], reference=moved, days=[DAYS[i] for i in order])
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("reference", [None, 2])
@pytest.mark.parametrize("name", MASKED)
def test_masked_pixels_never_leak(name: str, reference: int | None) -> None:
    cloudy, mask, _ = series(2)
    other = np.where(mask[:, None], np.random.default_rng(9).random(cloudy.shape), cloudy).astype(np.float32)
    a, b = (CLASSICAL[name](x, cloud_mask=mask, reference=reference, days=DAYS) for x in (cloudy, other))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CLASSICAL)
def test_pixels_without_data_never_leak(name: str) -> None:
    cloudy, mask, _ = series(3)
    valid = np.ones_like(mask)
    valid[1:, :, :7] = False
    valid[:, 5:9, 2:5] = False
    a = CLASSICAL[name](cloudy, cloud_mask=mask, days=DAYS, valid=valid, reference=0)
    broken = np.where(valid[:, None], cloudy, np.nan)
    np.testing.assert_array_equal(a, CLASSICAL[name](broken, cloud_mask=mask, days=DAYS, valid=valid, reference=0))
    assert np.isfinite(a).all()


@pytest.mark.parametrize("reference", [None, 0])
@pytest.mark.parametrize("name", CLASSICAL)
def test_pixels_without_data_are_not_black_ground(name: str, reference: int | None) -> None:
    cloudy = np.full((3, BANDS, 12, 14), 0.3, np.float32)
    valid = np.ones((3, 12, 14), bool)
    valid[0, :, :5], valid[1, 2:9], valid[:, 4:6, 2:4] = False, False, False
    cloudy[~valid[:, None].repeat(BANDS, 1)] = 0
    clear = CLASSICAL[name](cloudy, cloud_mask=np.zeros_like(valid), valid=valid, days=[0, 4, 9], reference=reference)
    np.testing.assert_allclose(clear, 0.3, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(MASKED) - {"flat_colour"}))
def test_one_clear_date_among_clouds_wins(name: str) -> None:
    ground = land(4)
    cloudy = np.stack([np.full_like(ground, 0.8), ground, np.full_like(ground, 0.7)])
    mask = np.stack(
        [np.ones(ground.shape[1:], bool), np.zeros(ground.shape[1:], bool), np.ones(ground.shape[1:], bool)]
    )
    clear = CLASSICAL[name](cloudy, cloud_mask=mask, days=[0, 5, 9])
    np.testing.assert_allclose(clear, ground, atol=1e-6)
    np.testing.assert_allclose(CLASSICAL["least_cloudy"](cloudy, cloud_mask=mask), ground, atol=1e-6)


@pytest.mark.parametrize("name", CLASSICAL)
def test_without_any_clear_pixel_the_median_stays_finite(name: str) -> None:
    cloudy, mask, _ = series(5)
    clear = CLASSICAL[name](cloudy, cloud_mask=np.ones_like(mask), days=DAYS)
    assert np.isfinite(clear).all()
    if name in MASKED:
        np.testing.assert_allclose(clear, np.median(cloudy, axis=0), atol=1e-6)


@pytest.mark.parametrize("name", CLASSICAL)
@pytest.mark.parametrize("reference", [None, 0])
def test_one_date_of_odd_size(name: str, reference: int | None) -> None:
    image = land(6, size=(7, 13))[None]
    mask = np.zeros((1, 7, 13), bool)
    mask[0, 2:5, 3:6] = True
    clear = CLASSICAL[name](image, cloud_mask=mask, reference=reference, days=[3.0])
    assert clear.shape == (BANDS, 7, 13)
    assert np.isfinite(clear).all()


# ---- each method's own claim -----------------------------------------------------------------------------------------


def test_mean_and_median_are_plain() -> None:
    cloudy, mask, _ = series(7)
    np.testing.assert_allclose(CLASSICAL["mean"](cloudy), cloudy.mean(0), atol=1e-6)
    np.testing.assert_allclose(CLASSICAL["median"](cloudy), np.median(cloudy, 0), atol=1e-6)
    seen = np.where(mask[:, None], np.nan, cloudy)[:, :, ~mask.all(0)]
    np.testing.assert_allclose(
        CLASSICAL["masked_median"](cloudy, cloud_mask=mask)[:, ~mask.all(0)], np.nanmedian(seen, 0), atol=1e-6
    )


def test_mosaic_takes_the_clearest_date_first() -> None:
    images = np.stack([np.full((2, 4, 6), value, np.float32) for value in (0.1, 0.2, 0.3)])
    mask = np.zeros((3, 4, 6), bool)
    mask[0, :, :3], mask[1, :, :2], mask[2, :, :1] = True, True, True  # the last date is the clearest
    mask[2, 0, 5] = True
    clear = CLASSICAL["mosaic"](images, cloud_mask=mask)
    assert (clear[:, :, 1:5] == np.float32(0.3)).all()
    assert (clear[:, 0, 5] == np.float32(0.2)).all()
    np.testing.assert_allclose(clear[:, :, 0], 0.3, atol=0.05)  # no date shows it: filled from beside


def test_matched_mosaic_undoes_a_gain_and_an_offset_per_band() -> None:
    truth = land(8)
    gain, offset = np.array([0.7, 1.1, 1.4, 0.9]), np.array([0.03, 0.0, -0.01, 0.02])
    other = (truth - offset[:, None, None]) / gain[:, None, None]
    mask = np.zeros((2, HEIGHT, WIDTH), bool)
    mask[0, 5:15, 5:20] = True
    cloudy = np.stack([np.where(mask[0], 0.9, truth), other]).astype(np.float32)
    clear = CLASSICAL["matched_mosaic"](cloudy, cloud_mask=mask, reference=0)
    np.testing.assert_allclose(clear, truth, atol=2e-3)
    assert np.abs(CLASSICAL["mosaic"](cloudy, cloud_mask=mask, reference=0) - truth).max() > 0.02


def test_ridge_blend_recovers_an_exact_mixture_of_bands() -> None:
    truth = land(9)
    rng = np.random.default_rng(9)
    mixing = np.eye(BANDS) + 0.3 * rng.standard_normal((BANDS, BANDS))
    related = np.tensordot(np.linalg.inv(mixing), truth - 0.01, axes=1)
    unrelated = land(77)
    mask = np.zeros((3, HEIGHT, WIDTH), bool)
    mask[0, 5:15, 5:20] = True
    cloudy = np.stack([np.where(mask[0], 0.9, truth), related, unrelated]).astype(np.float32)
    for name in ("ridge_blend", "local_ridge_blend"):
        clear = CLASSICAL[name](cloudy, cloud_mask=mask, reference=0)
        assert np.abs(clear - truth).max() < 5e-3  # the unrelated date has no say
    assert np.abs(CLASSICAL["matched_mosaic"](cloudy, cloud_mask=mask, reference=0) - truth).max() > 0.02


def test_local_blend_follows_a_change_around_the_cloud() -> None:
    truth = land(10)
    slope = np.linspace(0, 0.1, WIDTH)[None, None]  # haze that grows across the scene: no mixture of bands tells it
    truth = truth[:1].repeat(BANDS, 0)
    mask = np.zeros((2, HEIGHT, WIDTH), bool)
    mask[0, 8:16, 10:20] = True
    cloudy = np.stack([np.where(mask[0], 0.9, truth + slope), truth]).astype(np.float32)
    errors = {
        name: np.abs(CLASSICAL[name](cloudy, cloud_mask=mask, reference=0) - (truth + slope)).mean()
        for name in ("ridge_blend", "local_ridge_blend")
    }
    assert errors["local_ridge_blend"] < 0.6 * errors["ridge_blend"]


@pytest.mark.parametrize("name", FOLLOWING)
def test_dates_that_share_no_clear_pixel_still_fill(name: str) -> None:
    ground = land(11)
    mask = np.zeros((2, HEIGHT, WIDTH), bool)
    mask[0, :, 10:], mask[1, :, :10] = True, True
    cloudy = np.where(mask[:, None], 0.9, ground).astype(np.float32)
    np.testing.assert_allclose(CLASSICAL[name](cloudy, cloud_mask=mask, reference=0), ground, atol=1e-6)


def test_best_available_pixel_keeps_off_cloud_edges_and_near_in_time() -> None:
    images = np.stack([np.full((1, 9, 60), value, np.float32) for value in (0.1, 0.2)])
    mask = np.zeros((2, 9, 60), bool)
    mask[0, :, :20], mask[1, :, 40:] = True, True
    clear = CLASSICAL["best_available_pixel"](images, cloud_mask=mask)
    assert (clear[:, :, :28] == np.float32(0.2)).all()
    assert (clear[:, :, 32:] == np.float32(0.1)).all()
    none = np.zeros((3, 9, 60), bool)
    none[2] = True
    three = np.concatenate([images, images[:1] + 0.5])
    near = CLASSICAL["best_available_pixel"](three, cloud_mask=none, reference=2, days=[0, 50, 60])
    assert (near == np.float32(0.2)).all()


def test_linear_in_time_is_exact_on_a_line() -> None:
    ground, change = land(12), 0.002
    days = np.array([0.0, 10.0, 25.0, 40.0])
    truth = (ground[None] + change * days[:, None, None, None]).astype(np.float32)
    mask = np.zeros((4, HEIGHT, WIDTH), bool)
    mask[1, 4:12, 4:12] = True
    mask[2, 6:10, 4:12] = True  # there the gap is bridged from day 0 to day 40
    cloudy = np.where(mask[:, None], 0.9, truth).astype(np.float32)
    clear = CLASSICAL["linear_in_time"](cloudy, cloud_mask=mask, reference=1, days=days)
    np.testing.assert_allclose(clear, truth[1], atol=1e-6)
    with pytest.raises(ConfigError, match="Pass days"):
        CLASSICAL["linear_in_time"](cloudy, cloud_mask=mask)


def test_flat_controls() -> None:
    cloudy, mask, _ = series(13)
    flat = CLASSICAL["flat_colour"](cloudy, cloud_mask=mask, reference=2)
    colour = cloudy[2][:, ~mask[2]].mean(1)
    np.testing.assert_allclose(flat[:, mask[2]], colour[:, None].repeat(mask[2].sum(), 1), rtol=1e-5)
    control = flat_truth(cloudy[0], pixels=~mask[0])
    np.testing.assert_allclose(control[:, 3, 4], cloudy[0][:, ~mask[0]].mean(1), rtol=1e-5)
    assert (control == control[:, :1, :1]).all()
    with pytest.raises(ValueRangeError, match="at least one"):
        flat_truth(cloudy[0], pixels=np.zeros_like(mask[0]))


# ---- the mask by rules -----------------------------------------------------------------------------------------------


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


def sky(*, bands: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 13- or 4-band dates with a thick cloud, a haze and a shadow, and the masks of cloud and of shadow."""
    rng = np.random.default_rng(14)
    names = USUAL_BANDS[bands]
    base = np.array([{"B02": 0.10, "B03": 0.10, "B04": 0.11, "B08": 0.28, "B10": 0.002}.get(n, 0.15) for n in names])
    ground = base[:, None, None] * (1 + 0.1 * rng.standard_normal((bands, 60, 60)))
    cloudy = np.stack([ground * (1 + 0.02 * k) for k in range(4)])
    cloud, shadow = np.zeros((4, 60, 60), bool), np.zeros((4, 60, 60), bool)
    cloud[0, 5:30, 5:30], cloud[1, 30:55, 5:25], shadow[2, 10:30, 35:55] = True, True, True
    cloudy[0, :, 5:30, 5:30] = 0.55 + 0.05 * rng.random((1, 25, 25))
    haze = np.array([{"B02": 0.08, "B03": 0.07, "B04": 0.06, "B08": 0.03}.get(n, 0.02) for n in names])
    cloudy[1, :, 30:55, 5:25] += haze[:, None, None]
    cloudy[2, :, 10:30, 35:55] *= 0.5
    return cloudy.astype(np.float32), cloud, shadow


@pytest.mark.parametrize("bands", [4, 13])
def test_rules_find_cloud_haze_and_shadow(bands: int) -> None:
    cloudy, cloud, shadow = sky(bands=bands)
    found = estimate_cloud_mask(cloudy)
    assert overlap(found[0], cloud[0]) > 0.8
    assert overlap(found[1], cloud[1]) > 0.8
    assert overlap(found[2], shadow[2]) > 0.8
    assert found[3].mean() < 0.05
    named = estimate_cloud_mask(cloudy[:, ::-1], USUAL_BANDS[bands][::-1])
    np.testing.assert_array_equal(named, found)


def test_rules_with_one_date_find_white_cloud_only() -> None:
    cloudy, cloud, _ = sky()
    assert overlap(estimate_cloud_mask(cloudy[:1])[0], cloud[0]) > 0.8
    assert not estimate_cloud_mask(cloudy[3:]).any()


def test_rules_ignore_what_is_not_there() -> None:
    cloudy, _, _ = sky()
    valid = np.ones((4, 60, 60), bool)
    valid[0, :, :20] = False
    valid[3] = False
    found = estimate_cloud_mask(cloudy, valid=valid)
    assert not (found & ~valid).any()
    changed = np.where(valid[:, None], cloudy, 0.9).astype(np.float32)
    np.testing.assert_array_equal(estimate_cloud_mask(changed, valid=valid), found)


def test_unknown_masks_are_estimated() -> None:
    cloudy, _, _ = sky()
    estimated = estimate_cloud_mask(cloudy)
    for name in ("mosaic", "ridge_blend"):
        np.testing.assert_array_equal(
            CLASSICAL[name](cloudy, reference=0), CLASSICAL[name](cloudy, reference=0, cloud_mask=estimated)
        )


# ---- filling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (2, 2), (17, 30), (32, 32)])
def test_fill_is_exact_on_constants_and_near_on_planes(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    known = rng.random(size) < 0.6
    known.flat[0] = True
    constant = np.full((2, *size), 0.3, np.float32)
    np.testing.assert_allclose(fill_smoothly(np.where(known, constant, np.nan), known), constant, atol=1e-6)
    plane = (np.add.outer(np.arange(size[0]), np.arange(size[1])) / 60)[None].astype(np.float32)
    filled = fill_smoothly(np.where(known, plane, np.nan), known)
    np.testing.assert_array_equal(filled[:, known], plane[:, known])
    if min(size) > 4:
        assert np.abs(filled - plane).mean() < 0.01
    assert (fill_smoothly(constant, np.zeros(size, bool)) == 0).all()


def test_fill_stays_between_its_borders() -> None:
    image = np.zeros((1, 40, 40), np.float32)
    image[:, :, 20:] = 1
    known = np.ones((40, 40), bool)
    known[5:35, 8:32] = False
    filled = fill_smoothly(image, known)
    assert filled.min() >= 0
    assert filled.max() <= 1
    assert (np.diff(filled[0, 20]) > -0.02).all()  # rises from left to right


def test_local_share_by_hand() -> None:
    mask = np.zeros((1, 5, 6), bool)
    mask[0, 2, 2] = True
    assert local_share(mask, 1)[0, 1, 1] == pytest.approx(1 / 9)
    assert local_share(mask, 2)[0, 0, 0] == pytest.approx(1 / 9)  # cut to 3x3 at the corner


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input_is_named() -> None:
    cloudy, mask, _ = series(15)
    mosaic = CLASSICAL["mosaic"]
    with pytest.raises(ShapeError, match=r"\(T, C, H, W\)"):
        mosaic(cloudy[0])
    with pytest.raises(ShapeError, match="none of them zero"):
        mosaic(cloudy[:0])
    with pytest.raises(ShapeError, match="cloud_mask is float32"):
        mosaic(cloudy, cloud_mask=mask.astype(np.float32))
    with pytest.raises(ShapeError, match="valid is bool"):
        mosaic(cloudy, cloud_mask=mask, valid=mask[:2])
    with pytest.raises(ConfigError, match="expected 0 to 3"):
        mosaic(cloudy, cloud_mask=mask, reference=4)
    with pytest.raises(ShapeError, match="one number per date"):
        mosaic(cloudy, cloud_mask=mask, days=[1, 2])
    with pytest.raises(ValueRangeError, match="NaN"):
        mosaic(np.where(mask[:, None], np.nan, cloudy), cloud_mask=mask)
    with pytest.raises(ValueRangeError, match="no pixel is valid"):
        mosaic(cloudy, cloud_mask=mask, valid=np.zeros_like(mask))
    with pytest.raises(BandError, match="5 bands"):
        mosaic(np.concatenate([cloudy, cloudy[:, :1]], axis=1))
    with pytest.raises(BandError, match="without B02"):
        estimate_cloud_mask(cloudy, ("B01", "B03", "B04", "B08"))
    with pytest.raises(ConfigError, match="did you mean ridge_blend"):
        get_classical("ridge_blent")
