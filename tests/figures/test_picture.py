"""Pictures: which band is red, one stretch for all panels, nodata, the layout and its errors."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pytest
from PIL import Image

from sader.errors import OutputError, ShapeError, ValueRangeError
from sader.figures.picture import (
    ACCENT,
    BACKGROUND,
    GREEN,
    NODATA_GREY,
    Curve,
    Panel,
    before_after,
    clear_limits,
    compose,
    draw_curves,
    error_picture,
    mask_picture,
    save_png,
    stretch_limits,
    true_colour,
)

RGBN = ("B02", "B03", "B04", "B08")


def flat(*values: float, size: tuple[int, int] = (6, 9)) -> np.ndarray:
    """An image (C, H, W) with one value per band."""
    return np.broadcast_to(np.array(values, np.float32)[:, None, None], (len(values), *size)).copy()


def test_red_is_found_by_name_not_by_position():
    image = flat(0.0, 0.0, 0.3, 1.0)  # only B04 (and near infrared, which must not show)
    picture = true_colour(image, bands=RGBN, limits=(0.0, 0.3))
    assert picture.shape == (6, 9, 3)
    assert picture[0, 0].tolist() == [255, 0, 0]
    swapped = true_colour(image[::-1], bands=RGBN[::-1], limits=(0.0, 0.3))
    np.testing.assert_array_equal(picture, swapped)


def test_without_names_the_first_bands_are_used():
    assert true_colour(flat(1.0, 0.0, 0.0, 0.5), limits=(0, 1))[0, 0].tolist() == [255, 0, 0]
    assert true_colour(flat(0.2), limits=(0, 1))[0, 0].tolist() == [51, 51, 51]


def test_one_stretch_for_all_panels_keeps_their_difference():
    dark, bright = flat(0.1, 0.1, 0.1), flat(0.2, 0.2, 0.2)
    limits = stretch_limits([dark, bright])
    assert true_colour(dark, limits=limits).mean() < true_colour(bright, limits=limits).mean()
    assert limits == pytest.approx((0.1, 0.2))


def test_percentiles_ignore_nan_and_a_few_bright_pixels():
    image = np.random.default_rng(0).uniform(0.05, 0.15, (3, 64, 64)).astype(np.float32)
    image[:, 0, 0] = 50.0
    image[:, 1, 1] = np.nan
    low, high = stretch_limits([image])
    assert 0.05 <= low < high <= 0.15
    picture = true_colour(image, limits=(low, high))
    assert picture[0, 0].tolist() == [255, 255, 255]
    assert picture[1, 1].tolist() == [NODATA_GREY] * 3


def test_a_flat_image_and_one_without_values():
    assert np.isfinite(true_colour(flat(0.2, 0.2, 0.2))).all()
    with pytest.raises(ValueRangeError, match="no finite value"):
        stretch_limits([flat(np.nan)])


def test_error_map_is_dark_where_right_and_bright_where_wrong():
    truth = flat(0.1, 0.1, 0.1)
    image = truth.copy()
    image[:, 0, 0] += 0.02
    image[:, 0, 1] -= 0.3
    heat = error_picture(image, truth).astype(int).sum(axis=-1)
    assert heat[3, 3] < 10
    assert heat[3, 3] < heat[0, 0] < heat[0, 1]
    with pytest.raises(ShapeError, match="must be equal"):
        error_picture(image, truth[:, 1:])


def test_mask_white_is_cloud():
    mask = np.zeros((4, 5), bool)
    mask[1, 2] = True
    picture = mask_picture(mask)
    assert picture.dtype == np.uint8
    assert picture[1, 2].min() > 200
    assert picture[0, 0].max() < 100


def test_panels_keep_their_shape_and_never_overlap():
    wide = Panel(np.zeros((10, 40, 3), np.uint8), "a caption that is much too long for so narrow a panel, so it is cut")
    tall = Panel(np.zeros((40, 20, 3), np.uint8), "b", marked=True)
    figure = compose([[wide, tall], [tall]], title="title", note="note", panel_width=80)
    assert figure.width == 10 + 2 * 90
    pixels = np.asarray(figure).astype(int)
    gap = pixels[32:, 92:98]  # between the columns, clear of the frames
    assert (gap.sum(axis=-1) > 3 * 200).all(), "a caption or panel runs into the gap"
    with pytest.raises(ShapeError, match="at least one panel"):
        compose([[]])


def test_before_after_shows_every_part(tmp_path):
    rng = np.random.default_rng(1)
    truth = rng.uniform(0.02, 0.2, (4, 32, 48)).astype(np.float32)
    cloudy = np.repeat(truth[None], 5, axis=0)
    mask = np.zeros((5, 32, 48), bool)
    mask[1, :10] = True
    cloudy[mask[:, None].repeat(4, axis=1)] = 0.7
    before = cloudy.copy()
    figure = before_after(
        cloudy,
        truth,
        bands=RGBN,
        truth=truth,
        cloud_mask=mask,
        reference=1,
        days=[0, 5, 10, 15, 20],
        baselines=[("r", truth)],
    )
    np.testing.assert_array_equal(cloudy, before)
    assert figure.width == 10 + 6 * 330  # five dates and the mask
    path = save_png(figure, tmp_path / "figure.png")
    with Image.open(path) as again:
        assert again.size == figure.size
    with pytest.raises(ShapeError, match=r"\(T, C, H, W\)"):
        before_after(truth, truth)


def test_a_figure_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        save_png(Image.new("RGB", (4, 4)), tmp_path / "file" / "figure.png")


def test_band_names_must_fit():
    with pytest.raises(ShapeError, match="3 bands but 4 names"):
        true_colour(flat(0.1, 0.1, 0.1), bands=RGBN)
    with pytest.raises(ShapeError, match=r"expected \(C, H, W\)"):
        true_colour(np.zeros((4, 4), np.float32))


def test_no_date_is_black_under_the_shared_stretch():
    rng = np.random.default_rng(0)
    result = rng.uniform(0.10, 0.30, (3, 40, 40)).astype(np.float32)
    dark = result / 4
    cloudy = result.copy()
    cloudy[:, :30] = 0.9
    alone = true_colour(dark, limits=stretch_limits([result]))
    assert alone.max() == 0, "the stretch of the result alone"
    limits = clear_limits([result], [dark, cloudy])
    assert true_colour(dark, limits=limits).mean() > 5
    assert true_colour(dark, limits=limits).max() > 20
    assert limits[1] < 0.31, "clouds do not take the range"


def test_curves_tell_observed_values_from_reconstructed_ones():
    times = [datetime(2022, month, 1) for month in (1, 6, 12)]
    curve = Curve("here", times, [0.2, 0.1, 0.4], [0.2, 0.3, 0.4], [False, True, False])
    picture = np.asarray(draw_curves([curve], label="NDVI"))
    chart = picture[30:270]

    def marks(colour: tuple[int, int, int], x: int) -> bool:
        return bool((chart[:, x - 2 : x + 3] == colour).all(axis=2).any())

    first, middle, last = 60, 60 + round(820 * 151 / 334), 880
    assert marks(GREEN, first)
    assert marks(ACCENT, middle), "the value of the cloud"
    assert not marks(ACCENT, first)
    assert not marks(ACCENT, last)
    heights = np.flatnonzero((chart[:, middle] == GREEN).all(axis=1))
    inside = chart[heights.min() : heights.max(), middle]
    assert (inside == BACKGROUND).all(axis=1).any(), "a reconstructed value is an open circle"
    heights = np.flatnonzero((chart[:, first] == GREEN).all(axis=1))
    assert (chart[heights.min() : heights.max(), first] == GREEN).all(), "an observed value is filled"


def test_curves_of_any_period_have_ticks():
    for times in ([datetime(2022, 5, 1)], [datetime(1985, 1, 1), datetime(2024, 1, 1)]):
        curve = Curve("here", times, [np.nan] * len(times), [0.5] * len(times), [False] * len(times))
        assert draw_curves([curve, curve], label="NDVI").size == (900, 600)
