"""Radiometric matching: it undoes what it should undo, leaves alone what it must, and never looks under clouds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sader.model.matching import heavy_tailed_blur, match_dates, solve_positive, spread_from_clear


def ground(bands: int = 3, height: int = 48, width: int = 40, seed: int = 0) -> Tensor:
    """Return a patchy scene (bands, H, W) in model units whose bands are not copies of each other."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, bands, height // 4 + 1, width // 4 + 1, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, scale_factor=4, mode="bilinear")[0, :, :height, :width]
    return -0.7 + 0.1 * smooth + 0.03 * torch.randn(bands, height, width, generator=generator)


MIX = torch.tensor([[1.1, 0.1, -0.05], [-0.05, 0.8, 0.1], [0.02, 0.1, 0.9]])
SHIFT = torch.tensor([0.03, -0.05, 0.08])


def mixed(anchor: Tensor) -> Tensor:
    return torch.einsum("ij,jhw->ihw", MIX, anchor) + SHIFT[:, None, None]


def pair(height: int = 48, width: int = 40) -> tuple[Tensor, Tensor]:
    anchor = ground(height=height, width=width)
    cloudy = torch.stack([mixed(anchor), anchor])[None]
    return cloudy, torch.ones(1, 2, height, width)


LAST = torch.tensor([1])


@pytest.mark.parametrize("size", [(48, 40), (45, 37)])
def test_a_linear_mix_of_the_bands_is_undone(size):
    cloudy, clear = pair(*size)
    before = (cloudy[0, 0] - cloudy[0, 1]).square().mean().sqrt()
    after = (match_dates(cloudy, clear, LAST)[0, 0] - cloudy[0, 1]).square().mean().sqrt()
    assert after < before / 10, (before, after)


def test_the_anchor_comes_back_bit_for_bit():
    cloudy, clear = pair()
    clear[0, 1, :20] = 0.3
    for anchor in (0, 1):
        matched = match_dates(cloudy, clear, torch.tensor([anchor]))
        assert torch.equal(matched[0, anchor], cloudy[0, anchor])
        assert not torch.equal(matched[0, 1 - anchor], cloudy[0, 1 - anchor])


def test_each_sample_has_its_own_anchor():
    cloudy, clear = pair()
    both = match_dates(cloudy.repeat(2, 1, 1, 1, 1), clear.repeat(2, 1, 1, 1), torch.tensor([0, 1]))
    torch.testing.assert_close(both[0], match_dates(cloudy, clear, torch.tensor([0]))[0])
    torch.testing.assert_close(both[1], match_dates(cloudy, clear, LAST)[0])


@pytest.mark.parametrize("cloudy_date", [0, 1])
def test_cloudy_pixels_do_not_touch_the_fit(cloudy_date):
    cloudy, clear = pair()
    clear[0, cloudy_date, 5:25, 10:30] = 0.0
    clouded = cloudy.clone()
    clouded[0, cloudy_date, :, 5:25, 10:30] = 3.0
    plain, other = match_dates(cloudy, clear, LAST), match_dates(clouded, clear, LAST)
    outside = torch.ones(48, 40, dtype=torch.bool)
    outside[5:25, 10:30] = False
    assert torch.equal(plain[0, 0][:, outside], other[0, 0][:, outside])
    # and under the anchor's cloud the other date is matched all the same: that is what it is for
    if cloudy_date == 1:
        error = (other[0, 0] - cloudy[0, 1])[:, ~outside].square().mean().sqrt()
        assert error < (cloudy[0, 0] - cloudy[0, 1])[:, ~outside].square().mean().sqrt() / 10


def halves(size: int = 96, light: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return two dates of one land in another light, the upper half of one hidden and the lower half of the other."""
    anchor = ground(height=size, width=size)
    clear = torch.ones(1, 2, size, size)
    clear[0, 0, : size // 2] = 0.0
    clear[0, 1, size // 2 :] = 0.0
    return torch.stack([anchor + light, anchor])[None], clear


def test_without_a_pixel_clear_in_both_the_level_is_matched_unless_the_light_is_known_to_be_the_same():
    cloudy, clear = halves()
    assert torch.equal(match_dates(cloudy, clear, LAST, already_matched=True), cloudy)
    before = (cloudy[0, 0] - cloudy[0, 1]).mean(dim=(-2, -1))
    after = (match_dates(cloudy, clear, LAST)[0, 0] - cloudy[0, 1]).mean(dim=(-2, -1))
    assert (after.abs() < 0.6 * before.abs()).all(), (before, after)
    change = match_dates(cloudy, clear, LAST)[0, 0] - cloudy[0, 0]
    assert float(change.std(dim=(-2, -1)).max()) < 1e-6  # the level alone: no slope is known


def test_the_less_two_dates_show_the_less_their_levels_say():
    cloudy, clear = halves()
    few = torch.zeros_like(clear)
    few[0, 0, -4:, :4] = 1.0
    few[0, 1, :4, :4] = 1.0
    far, near = (match_dates(cloudy, seen, LAST) - cloudy for seen in (few, clear))
    # Sixteen pixels say next to nothing about a place, whatever their values.
    assert float(far[0, 0].abs().max()) < 0.2 * float(near[0, 0].abs().max())


def test_a_date_that_shows_nothing_stays_as_it_is_and_moves_no_other():
    cloudy, clear = halves()
    three = torch.cat([cloudy, torch.full_like(cloudy[:, :1], 0.3)], dim=1)
    shown = torch.cat([clear, torch.zeros_like(clear[:, :1])], dim=1)
    matched = match_dates(three, shown, LAST)
    assert torch.equal(matched[0, 2], three[0, 2])
    assert torch.equal(matched[:, :2], match_dates(cloudy, clear, LAST))
    assert torch.equal(match_dates(three, shown, torch.tensor([2])), three)


def test_where_dates_share_much_their_levels_do_not_matter():
    cloudy, clear = halves()
    clear[0, 0] = 1.0
    both, known = match_dates(cloudy, clear, LAST), match_dates(cloudy, clear, LAST, already_matched=True)
    torch.testing.assert_close(both, known, atol=2e-3, rtol=0)


def test_few_clear_pixels_mean_a_small_and_finite_change():
    cloudy, clear = pair()
    clear[:] = 0.0
    clear[0, :, 3, 4] = 1.0
    matched = match_dates(cloudy, clear, LAST)
    assert matched.isfinite().all()
    assert (matched - cloudy).abs().max() < 0.5


def test_a_missing_band_stays_at_zero():
    cloudy, clear = pair()
    cloudy[:, :, 1] = 0.0
    matched = match_dates(cloudy, clear, LAST)
    assert matched[:, :, 1].abs().max() < 1e-6


def test_a_change_of_light_across_the_image_is_followed():
    """One half of the other date lies under a haze: away from its edge the local fit removes what one linear map for
    the whole image cannot."""
    anchor = ground(height=64, width=192)
    other = anchor.clone()
    other[:, :, 96:] += 0.2
    matched = match_dates(torch.stack([other, anchor])[None], torch.ones(1, 2, 64, 192), LAST)[0, 0]
    inputs = torch.cat([other.flatten(1), torch.ones(1, 64 * 192)]).T
    best_global = (inputs @ torch.linalg.lstsq(inputs, anchor.flatten(1).T).solution).T.view_as(anchor)
    away = torch.cat([torch.arange(48), torch.arange(144, 192)])
    local, globally = ((x - anchor)[:, :, away].abs().mean() for x in (matched, best_global))
    assert local < 0.5 * globally, (local, globally)


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (8, 17)])
def test_any_size(size):
    cloudy = torch.randn(2, 3, 2, *size, generator=torch.Generator().manual_seed(1))
    matched = match_dates(cloudy, torch.ones(2, 3, *size), torch.tensor([2, 0]))
    assert matched.shape == cloudy.shape
    assert matched.isfinite().all()


def test_solve_positive_is_a_solver():
    generator = torch.Generator().manual_seed(2)
    root = torch.randn(5, 3, 6, 6, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT + 0.1 * torch.eye(6, dtype=torch.float64)
    right = torch.randn(5, 3, 6, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(solve_positive(matrix, right), torch.linalg.solve(matrix, right), rtol=1e-8, atol=1e-8)


def test_spread_from_clear_keeps_a_constant_and_looks_only_at_clear_pixels():
    image = torch.tensor([0.3, -0.6]).view(1, 2, 1, 1).expand(1, 2, 43, 61).clone()
    clear = torch.ones(1, 43, 61)
    clear[0, 10:35, 20:50] = 0
    image[:, :, 10:35, 20:50] = 1.0  # the cloud
    filled = spread_from_clear(image, clear)
    assert filled.shape == image.shape
    torch.testing.assert_close(filled[0, :, 0, 0], torch.tensor([0.3, -0.6]), atol=2e-3, rtol=0)
    torch.testing.assert_close(filled[0, :, 22, 35], torch.tensor([0.3, -0.6]), atol=1e-2, rtol=0)


def test_spread_from_clear_follows_a_ramp():
    ramp = torch.linspace(-1, 1, 128).expand(1, 1, 64, 128)
    clear = torch.ones(1, 64, 128)
    clear[0, :, 56:72] = 0
    filled = spread_from_clear(ramp, clear)[0, 0]
    row = filled[32]
    assert (row[24:105] - ramp[0, 0, 0, 24:105]).abs().max() < 0.15  # borders pull towards the inside
    assert (row[1:] - row[:-1]).min() > -1e-4
    assert row[64].abs() < 0.05


def test_spread_from_clear_without_clear_pixels_is_a_local_mean_and_never_nan():
    image = torch.full((1, 1, 9, 20), 0.4)
    filled = spread_from_clear(image, torch.zeros(1, 9, 20))
    torch.testing.assert_close(filled, image, atol=1e-4, rtol=0)
    lonely = torch.zeros(1, 200, 200)
    lonely[0, 0, 0] = 1
    one = spread_from_clear(torch.full((1, 1, 200, 200), 0.1), lonely)
    assert one.isfinite().all()


def test_blur_is_symmetric_and_positive():
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 4] = 1
    blurred = heavy_tailed_blur(x)[0, 0]
    assert (blurred > 0).all()
    for other in (blurred.T, blurred.flip(0), blurred.flip(1)):
        torch.testing.assert_close(blurred, other)
