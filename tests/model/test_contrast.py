"""Contrast: measured where both images are known, given back within bounds."""

from __future__ import annotations

import torch

from sader.model.composite import MOST_GAIN, contrast_gain, with_contrast

SIZE = 96


def image(seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


KNOWN = torch.ones(1, SIZE, SIZE)


def test_what_is_a_fifth_too_pale_gets_half_of_it_back():
    own = image()
    gain = contrast_gain(own / 1.21, own, KNOWN)
    assert abs(float(gain) - 1.1) < 0.03  # a little less, for the evidence is finite


def test_the_gain_is_never_below_one_and_never_beyond_its_bound():
    own = image()
    assert float(contrast_gain(2 * own, own, KNOWN)) == 1.0
    assert 1.1 < float(contrast_gain(0.1 * own, own, KNOWN)) <= MOST_GAIN


def test_only_known_pixels_are_looked_at():
    own = image()
    said = own / 1.1
    known = KNOWN.clone()
    known[:, :, SIZE // 2 :] = 0
    lied = said.clone()
    lied[..., SIZE // 2 :] = 7 * image(1)[..., SIZE // 2 :]
    torch.testing.assert_close(contrast_gain(lied, own, known), contrast_gain(said, own, known))
    assert float(contrast_gain(lied, own, KNOWN)) == 1.0


def test_nothing_known_changes_nothing():
    own = image()
    gain = contrast_gain(0.5 * own, own, 0 * KNOWN)
    assert float(gain) == 1.0
    assert torch.equal(with_contrast(own, gain), own)


def test_details_grow_and_the_mean_stays():
    flat = torch.full((1, 3, SIZE, SIZE), 0.3)
    gain = torch.tensor([1.15])
    torch.testing.assert_close(with_contrast(flat, gain), flat)
    own = image() + 0.3
    made = with_contrast(own, gain)
    assert abs(float(made.mean() - own.mean())) < 1e-3
    assert 1.10 < float(made.diff().abs().mean() / own.diff().abs().mean()) < 1.16
