"""The joint correction: what several dates explain together, and that it never makes things up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sader.model.composite import MOST_CORRECTION, joint_correction

SIZE = 64
HIDDEN = (slice(16, 40), slice(20, 44))


def ground(seed: int, bands: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.1 * torch.randn(1, bands, SIZE, SIZE, generator=generator)


def correction(own: Tensor, others: list[Tensor], *, clear: Tensor | None = None, used: list[bool] | None = None):
    """Return (blend, correction) for an anchor (date 0) hidden at HIDDEN; the blend is the mean of the others."""
    dates = torch.stack([own, *others], dim=1)
    count = dates.shape[1]
    clear = torch.ones(1, count, SIZE, SIZE) if clear is None else clear
    clear[:, 0][:, *HIDDEN] = 0
    used = [True] * (count - 1) if used is None else used
    image = torch.stack(others).mean(dim=0)
    variance = torch.full((1, count, SIZE, SIZE), 0.01)
    which = torch.tensor([[False, *used]])
    made = joint_correction(image, dates, clear, variance, torch.tensor([0]), others=which)
    return image, made


def error(image: Tensor, truth: Tensor) -> float:
    return float((image - truth)[..., *HIDDEN].square().mean().sqrt())


def test_two_dates_that_err_against_each_other_are_told_apart():
    # The mean of both says a third of the truth; only together, one against the other, do they say all of it.
    a, b = ground(1), ground(2)
    own = 0.8 * a - 0.5 * b
    image, made = correction(own, [a, b])
    assert error(image + made, own) < 0.2 * error(image, own)


def test_nothing_is_learned_from_hidden_pixels():
    a, b = ground(1), ground(2)
    own = 0.7 * a + 0.3 * b
    clouded = own.clone()
    clouded[..., *HIDDEN] = 0.9
    torch.testing.assert_close(correction(own, [a, b])[1], correction(clouded, [a, b])[1])


def test_a_date_that_is_not_there_counts_for_nothing():
    a, b = ground(1), ground(2)
    own = 0.7 * a + 0.2 * b
    rubbish = 5 * ground(9)
    dates = torch.stack([own, a, b, rubbish], dim=1)
    clear = torch.ones(1, 4, SIZE, SIZE)
    clear[:, 0][:, *HIDDEN] = 0
    variance = torch.full((1, 4, SIZE, SIZE), 0.01)
    image, first = torch.stack([a, b]).mean(dim=0), torch.tensor([0])
    with_it = joint_correction(image, dates, clear, variance, first, others=torch.tensor([[False, True, True, False]]))
    without = joint_correction(
        image, dates[:, :3], clear[:, :3], variance[:, :3], first, others=torch.tensor([[False, True, True]])
    )
    torch.testing.assert_close(with_it, without)


def test_the_order_of_the_dates_changes_nothing():
    a, b, c = ground(1), ground(2), ground(3)
    own = 0.5 * a + 0.4 * b + 0.1 * c
    dates = torch.stack([own, a, b, c], dim=1)
    clear = torch.ones(1, 4, SIZE, SIZE)
    clear[:, 0][:, *HIDDEN] = 0
    variance = torch.rand(1, 4, 1, 1, generator=torch.Generator().manual_seed(5)).expand(1, 4, SIZE, SIZE) + 0.01
    image = torch.stack([a, b, c]).mean(dim=0)

    def made(order: list[int]) -> Tensor:
        anchor = torch.tensor([order.index(0)])
        others = torch.tensor([[k != 0 for k in order]])
        return joint_correction(image, dates[:, order], clear[:, order], variance[:, order], anchor, others=others)

    torch.testing.assert_close(made([0, 1, 2, 3]), made([3, 1, 0, 2]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("evidence", [0, 20])
def test_without_evidence_the_blend_stays(evidence):
    a, b = ground(1), ground(2)
    clear = torch.ones(1, 3, SIZE, SIZE)
    clear[:, 0] = 0
    clear[:, 0].view(-1)[:evidence] = 1
    _, made = correction(0.8 * a - 0.5 * b, [a, b], clear=clear)
    assert made.abs().max() < 0.02


def test_what_no_other_date_shows_is_not_touched():
    a, b = ground(1), ground(2)
    clear = torch.ones(1, 3, SIZE, SIZE)
    clear[:, 1:, *HIDDEN] = 0
    _, made = correction(0.8 * a - 0.5 * b, [a, b], clear=clear)
    assert (made[..., *HIDDEN] == 0).all()


def test_a_missed_cloud_on_another_date_moves_a_pixel_only_so_far():
    a, b = ground(1), ground(2)
    own = 0.8 * a - 0.5 * b
    _, made = correction(own, [a, b])
    bad = a.clone()
    bad[..., 30, 30] = 2.0
    _, moved = correction(own, [bad, b])
    assert moved.abs().max() <= MOST_CORRECTION
    far = torch.ones(SIZE, SIZE, dtype=torch.bool)
    far[26:35, 26:35] = False
    assert (moved - made)[..., far].abs().max() < 0.01


@pytest.mark.parametrize("size", [(64, 64), (61, 50)])
def test_a_series_in_a_batch_is_as_alone(size):
    height, width = size
    a, b = (torch.cat([ground(k), ground(k + 10)]) for k in (1, 2))
    own = 0.7 * a + 0.2 * b
    dates = torch.stack([own, a, b], dim=1)[..., :height, :width]
    clear = torch.ones(2, 3, height, width)
    clear[:, 0, 10:30, 10:30] = 0
    variance = torch.full_like(clear, 0.01)
    others = torch.tensor([[False, True, True]] * 2)
    image = dates[:, 1:].mean(dim=1)
    together = joint_correction(image, dates, clear, variance, torch.zeros(2, dtype=torch.long), others=others)
    for k in range(2):
        one = slice(k, k + 1)
        alone = joint_correction(
            image[one], dates[one], clear[one], variance[one], torch.tensor([0]), others=others[one]
        )
        torch.testing.assert_close(together[one], alone, rtol=1e-4, atol=1e-5)
