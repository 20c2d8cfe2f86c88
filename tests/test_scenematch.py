"""One light for a whole scene: found from afar, reaching across holes that no tile can see over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sader.inference.scene_match import Overview, SceneMatch, feather
from sader.inference.tiling import Window

SIZE, FACTOR = 256, 4


def scene() -> tuple[np.ndarray, np.ndarray]:
    """Two dates (2, 3, 1024, 1024), the second in another light; the first under one large cloud; its mask."""
    coarse = np.random.default_rng(0).uniform(0.05, 0.35, (3, SIZE // 4, SIZE // 4)).astype(np.float32)
    land = np.kron(coarse, np.ones((16, 16), np.float32))
    cloudy = np.stack([land, 0.8 * land + 0.03])
    mask = np.zeros((2, 1024, 1024), bool)
    mask[0, 200:900, 200:900] = True
    cloudy[0][:, mask[0]] = 0.7
    return cloudy, mask


def change_of(match: SceneMatch, window: Window, cloudy: np.ndarray) -> np.ndarray:
    return match.change(window, torch.from_numpy(np.ascontiguousarray(cloudy))).numpy()


def look(array: np.ndarray) -> np.ndarray:
    return array[..., FACTOR // 2 :: FACTOR, FACTOR // 2 :: FACTOR]


@pytest.fixture(scope="module")
def matched() -> tuple[np.ndarray, np.ndarray, SceneMatch]:
    cloudy, mask = scene()
    overview = Overview(look(cloudy), np.ones((2, SIZE, SIZE), bool), look(mask).astype(np.float32))
    match = SceneMatch.fit(overview, 0, FACTOR)
    return cloudy, mask, match


def test_the_other_date_gets_the_light_of_the_reference_even_where_that_is_hidden(matched):
    cloudy, mask, match = matched
    land = (cloudy[1] - 0.03) / 0.8
    for window in (Window(0, 0, 128, 128), Window(300, 400, 256, 256)):
        part = cloudy[:, :, *window.slices]
        change = change_of(match, window, part)
        before = np.abs(part[1] - land[:, *window.slices]).mean()
        after = np.abs(part[1] + change[1] - land[:, *window.slices]).mean()
        assert after < 0.15 * before
        assert mask[0][window.slices].all() == (window.row > 0)


def test_the_reference_is_not_touched(matched):
    cloudy, _, match = matched
    window = Window(100, 50, 64, 80)
    assert not change_of(match, window, cloudy[:, :, *window.slices])[0].any()


def test_a_window_is_a_part_of_the_whole(matched):
    cloudy, _, match = matched
    whole = change_of(match, Window(0, 0, 1024, 1024), cloudy)
    for window in (Window(0, 0, 70, 50), Window(333, 801, 91, 223), Window(1000, 1000, 24, 24)):
        part = change_of(match, window, cloudy[:, :, *window.slices])
        np.testing.assert_allclose(part, whole[:, :, *window.slices], atol=2e-6)


def test_dates_in_the_already_matched_are_left_alone():
    cloudy, mask = scene()
    cloudy[1] = (cloudy[1] - 0.03) / 0.8
    overview = Overview(look(cloudy), np.ones((2, SIZE, SIZE), bool), look(mask).astype(np.float32))
    match = SceneMatch.fit(overview, 0, FACTOR)
    assert np.abs(change_of(match, Window(0, 0, 1024, 1024), cloudy)[1]).max() < 1e-4


def test_without_a_reference_the_clearest_date_is_the_measure():
    cloudy, mask = scene()
    overview = Overview(look(cloudy), np.ones((2, SIZE, SIZE), bool), look(mask).astype(np.float32))
    match = SceneMatch.fit(overview, None, FACTOR)
    change = change_of(match, Window(0, 0, 100, 100), cloudy[:, :, :100, :100])
    assert not change[1].any()
    assert change[0].any()


def test_what_nobody_saw_or_knows_does_no_harm():
    cloudy, _ = scene()
    valid = np.zeros((2, SIZE, SIZE), bool)
    valid[1] = True
    unknown = np.full((2, SIZE, SIZE), np.nan, np.float32)
    match = SceneMatch.fit(Overview(look(cloudy), valid, unknown), 0, FACTOR)
    assert np.abs(change_of(match, Window(0, 0, 64, 64), cloudy[:, :, :64, :64])).max() < 1e-6


def test_feather_meets_the_clear_pixels_and_fades():
    image = torch.full((1, 2, 200, 200), 0.2)
    own = torch.full((1, 2, 200, 200), 0.21)
    clear = torch.zeros(1, 200, 200, dtype=torch.bool)
    clear[:, :, :20] = True
    made = feather(image, own, clear)
    assert (made[..., :20] - 0.21).abs().max() < 2e-3
    assert (made[..., 20:24] - 0.21).abs().max() < 3e-3
    assert (made[..., 120:] - 0.2).abs().max() < 1e-6
    steps = made.diff(dim=-1).abs().max()
    assert steps < 1e-3, "no edge around the clear pixels"


def deep_in_a_hole(seen: float, cloud: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the correction of the expected error at a hole's far end, for a tile of which a strip `seen` is clear."""
    from sader.model.composite import prepare_dates
    from sader.model.heads import steady_correction

    land = torch.rand(1, 1, 3, 256, 256, generator=torch.Generator().manual_seed(0)) * 0.1 - 0.8
    cloudy = torch.cat([land, land + 0.02 * torch.randn(land.shape, generator=torch.Generator().manual_seed(1))], dim=1)
    hidden = torch.zeros(1, 2, 256, 256)
    hidden[:, 0, :, round(256 * seen) :] = 1.0
    cloudy[:, 0] = torch.where(hidden[:, :1] > 0, cloud, cloudy[:, 0])
    everywhere = torch.ones(1, 2, 256, 256, dtype=torch.bool)
    matched = prepare_dates(cloudy, cloud=hidden, observed=everywhere, reference=torch.tensor([0]))
    weights = torch.zeros(1, 3, 256, 256)
    weights[:, 1] = 1.0
    return steady_correction(matched, weights)[0, 0, :, -64:], matched.variance[0, 1, :, -64:]


def test_the_stated_error_does_not_come_from_the_cloud_of_the_reference():
    """In a large hole the excess that the cloud's brightness causes is taken off; elsewhere nothing is changed."""
    correction, _ = deep_in_a_hole(0.17)
    assert correction.max() < -0.3
    assert deep_in_a_hole(0.65)[0].abs().max() == 0, "as the network was trained"
    assert (deep_in_a_hole(0.3)[0] > correction).all(), "the less is seen, the more is taken off"
    # Without a cloud's brightness in the hole there is no excess, and nothing to take off.
    nothing, _ = deep_in_a_hole(0.17, cloud=-0.75)
    assert nothing.abs().mean() < 0.2 * correction.abs().mean()
