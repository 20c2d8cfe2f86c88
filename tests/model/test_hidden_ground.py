"""Ground through thin cloud and shadow: recovered where no date is clear, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sader.model import composite
from sader.model.composite import classical_blend, hidden_ground, prepare_dates

SIZE = 96
HOLE = (slice(24, 80), slice(16, 72))
BOTH = (slice(24, 80), slice(44, 72))
"""The part of the hole that the other date hides too."""
FIRST = torch.tensor([0])


def ground(bands: int = 3) -> Tensor:
    """Return a scene (bands, H, W) in model units with small fields, which a smooth fill cannot know."""
    generator = torch.Generator().manual_seed(0)
    fields = torch.randn(1, bands, SIZE // 6, SIZE // 6, generator=generator).repeat_interleave(6, 2)
    return -0.6 + 0.06 * fields.repeat_interleave(6, 3)[0]


def blob(seed: int) -> Tensor:
    """Return something smooth (H, W) of mean 0, such as the thickness of a cloud."""
    coarse = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic")[0, 0]


def pair(let_through: float, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dates (1, 2, C, H, W), clear (1, 2, H, W), truth (C, H, W)).

    The first date has a veil over the hole, `level` and a share of the ground; the second an opaque cloud over `BOTH`.
    """
    truth = ground()
    first, second = truth.clone(), 0.9 * truth - 0.02
    veil = level + 0.05 * blob(1)
    first[:, *HOLE] = (let_through * truth + (1 - let_through) * veil)[:, *HOLE]
    second[:, *BOTH] = 0.6 + 0.05 * blob(2)[BOTH]
    clear = torch.ones(1, 2, SIZE, SIZE)
    clear[0, 0][HOLE], clear[0, 1][BOTH] = 0.0, 0.0
    return torch.stack([first, second])[None], clear, truth


def composed(dates: Tensor, clear: Tensor) -> Tensor:
    observed = torch.ones_like(clear, dtype=torch.bool)
    matched = prepare_dates(dates, cloud=1 - clear, observed=observed, reference=FIRST)
    return classical_blend(matched, observed)[0]


def errors(image: Tensor, truth: Tensor) -> float:
    return float((image - truth)[:, *BOTH].square().mean().sqrt())


def without_recovery(dates: Tensor, clear: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr("sader.model.composite.hidden_ground", lambda image, *_: torch.zeros_like(image))
        return composed(dates, clear)


@pytest.mark.parametrize(("let_through", "level"), [(0.5, 0.5), (0.3, -0.95)], ids=["haze", "shadow"])
def test_ground_under_haze_and_shadow_is_recovered(let_through, level, monkeypatch):
    dates, clear, truth = pair(let_through, level)
    smooth, made = without_recovery(dates, clear, monkeypatch), composed(dates, clear)
    assert errors(made, truth) < 0.7 * errors(smooth, truth)
    elsewhere = torch.ones(SIZE, SIZE, dtype=torch.bool)
    elsewhere[BOTH] = False
    assert torch.equal(made[:, elsewhere], smooth[:, elsewhere])


def test_an_opaque_cloud_adds_nothing(monkeypatch):
    dates, clear, truth = pair(0.0, 0.6)
    smooth, made = without_recovery(dates, clear, monkeypatch), composed(dates, clear)
    assert errors(made, truth) < 1.03 * errors(smooth, truth)


def test_the_correction_is_zero_where_a_date_is_clear_and_where_nothing_can_be_learned():
    dates, clear, truth = pair(0.5, 0.5)
    observed = torch.ones_like(clear, dtype=torch.bool)
    correction = hidden_ground(truth[None], dates, clear, observed)[0]
    shown = clear[0].amax(0) > 0
    assert bool((correction[:, shown] == 0).all())
    assert float(correction[:, ~shown].abs().max()) > 0.01
    nothing = torch.zeros_like(clear)  # no pixel is clear on any date
    assert not hidden_ground(truth[None], dates, nothing, observed).any()
    missing = observed & (clear > 0)  # nodata in place of the clouds
    assert not hidden_ground(truth[None], dates, clear, missing).any()


def test_series_of_a_batch_and_the_order_of_dates_do_not_matter():
    hazy, shady = pair(0.5, 0.5), pair(0.3, -0.95)
    images = torch.stack([hazy[2], shady[2]])
    dates, clear = torch.cat([hazy[0], shady[0]]), torch.cat([hazy[1], shady[1]])
    observed = torch.ones_like(clear, dtype=torch.bool)
    together = hidden_ground(images, dates, clear, observed)
    for number in range(2):
        one = slice(number, number + 1)
        alone = hidden_ground(images[one], dates[one], clear[one], observed[one])
        torch.testing.assert_close(together[one], alone, rtol=0, atol=1e-6)
    laid_out = dates.transpose(0, 1).contiguous().transpose(0, 1)  # the same values, other strides
    torch.testing.assert_close(hidden_ground(images, laid_out, clear, observed), together, rtol=0, atol=1e-6)
    turned = hidden_ground(images, dates.flip(1), clear.flip(1), observed)
    torch.testing.assert_close(together, turned, rtol=0, atol=1e-6)


def test_a_graph_without_branches_gives_the_same(monkeypatch):
    dates, clear, truth = pair(0.5, 0.5)
    observed = torch.ones_like(clear, dtype=torch.bool)
    eager = hidden_ground(truth[None], dates, clear, observed)
    monkeypatch.setattr(composite, "is_exporting", lambda: True)
    torch.testing.assert_close(hidden_ground(truth[None], dates, clear, observed), eager, rtol=0, atol=1e-6)
