"""`carried_inward` with soft weights: what is known stays, constants stay, and it is linear."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sader.model.matching import carried_inward

SIZES = [(1, 1), (5, 8), (16, 16), (23, 37)]


def soft_weights(height: int, width: int, *, seed: int = 0) -> Tensor:
    """Return (2, 1, H, W): a third known, a third unknown, a third in between."""
    drawn = torch.rand(2, 1, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    known = (3 * drawn - 1).clamp(0, 1)
    known[..., 0, 0] = 1  # never nothing at all
    return known


def values(height: int, width: int, *, seed: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES)
def test_known_pixels_are_kept_exactly(size):
    known, image = soft_weights(*size), values(*size, seed=1)
    found = carried_inward(image, known)
    keep = (known == 1).expand_as(image)
    assert keep.any()
    assert torch.equal(found[keep], image[keep])


@pytest.mark.parametrize("size", SIZES)
def test_a_constant_stays_constant(size):
    known = soft_weights(*size)
    found = carried_inward(torch.full((2, 3, *size), 0.37, dtype=torch.float64), known)
    torch.testing.assert_close(found, torch.full_like(found, 0.37), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_linear_in_the_values(size):
    known, a, b = soft_weights(*size), values(*size, seed=1), values(*size, seed=2)
    together = carried_inward(2.0 * a - 0.5 * b, known)
    torch.testing.assert_close(together, 2.0 * carried_inward(a, known) - 0.5 * carried_inward(b, known))


def test_unknown_pixels_have_no_say():
    known, image = soft_weights(16, 16), values(16, 16, seed=1)
    other = torch.where(known == 0, 1e3, image)
    assert torch.equal(carried_inward(image, known), carried_inward(other, known))


def test_nothing_known_gives_zero_and_finite_gradients():
    image = values(16, 16, seed=1).requires_grad_()
    found = carried_inward(image, torch.zeros(2, 1, 16, 16, dtype=torch.float64))
    assert (found == 0).all()
    found.sum().backward()
    assert image.grad is not None
    assert image.grad.isfinite().all()
