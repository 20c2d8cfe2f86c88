"""The error head: untrained it repeats what the candidates got wrong nearby, and it never disturbs the image."""

from __future__ import annotations

from dataclasses import replace

import torch

from sader.model.composite import prepare_dates
from sader.model.heads import LARGEST_FACTOR, ErrorHead, error_terms, seen_error


def matched():
    generator = torch.Generator().manual_seed(0)
    cloudy = torch.rand(1, 3, 2, 16, 24, generator=generator) * 0.2
    cloudy[:, 1] = cloudy[:, 0] + 0.01 * torch.rand(1, 2, 16, 24, generator=generator)  # date 2 explains far less
    observed = torch.ones(1, 3, 16, 24, dtype=torch.bool)
    return prepare_dates(cloudy, cloud=torch.zeros(1, 3, 16, 24), observed=observed, reference=torch.tensor([0]))


def weights_on(date: int):
    weights = torch.zeros(1, 4, 16, 24)
    weights[:, date] = 1.0
    return weights


def test_untrained_it_is_the_usual_error_of_what_was_blended() -> None:
    torch.manual_seed(0)
    head, dates = ErrorHead(8, 2, stem=2), matched()
    found = head(torch.randn(1, 8, 8, 12), dates, weights_on(1))
    torch.testing.assert_close(found, 0.5 * dates.variance[:, 1:2].log().expand(-1, 2, -1, -1))
    worse = head(torch.randn(1, 8, 8, 12), dates, weights_on(2))
    assert worse.mean() > found.mean() + 0.3


def test_features_and_weights_get_no_gradient_and_the_factor_is_bounded() -> None:
    torch.manual_seed(0)
    head, dates = ErrorHead(8, 2, stem=2), matched()
    with torch.no_grad():
        head.out.weight.normal_(0, 100.0)
    features = torch.randn(1, 8, 8, 12, requires_grad=True)
    weights = weights_on(1).requires_grad_()
    found = head(features, dates, weights)
    found.sum().backward()
    assert features.grad is None
    assert weights.grad is None
    assert head.hidden.weight.grad is not None
    usual = 0.5 * dates.variance[:, 1:2].log()
    assert (found - usual).abs().max() <= LARGEST_FACTOR + 1e-4


def changed_fields(*, seen: bool = True):
    """A date whose bright fields changed since the other one, hidden in its lower half; what the head says is flat."""
    generator = torch.Generator().manual_seed(1)
    field = (torch.rand(1, 1, 16, 16, generator=generator) < 0.5).repeat_interleave(6, -1).repeat_interleave(6, -2)
    ground = torch.where(field, 0.2, -0.6) + 0.02 * torch.randn(1, 4, 96, 96, generator=generator)
    change = torch.where(field, 0.2, 0.01) * torch.randn(1, 4, 96, 96, generator=generator)
    cloudy = torch.stack([ground + change, ground], dim=1)
    cloud = torch.zeros(1, 2, 96, 96)
    cloud[:, 0, 48 if seen else 0 :] = 1.0
    observed = torch.ones(1, 2, 96, 96, dtype=torch.bool)
    dates = prepare_dates(cloudy, cloud=cloud, observed=observed, reference=torch.tensor([0]))
    weights = torch.zeros(1, 3, 96, 96)
    weights[:, 1] = 1.0
    return field[0, 0], dates, weights, ground


def corrected(stated, dates, weights, others, bands, images=None):
    terms = error_terms(stated, dates, weights, others, images or (others, others), bands)
    return seen_error(stated, terms)


def test_land_that_changed_where_it_is_seen_is_less_certain_where_it_is_hidden() -> None:
    field, dates, weights, others = changed_fields()
    flat = torch.full((1, 4, 96, 96), -4.0)
    found = corrected(flat, dates, weights, others, ("B02", "B03", "B04", "B08"))[0, :, 48:].exp()
    assert found[:, field[48:]].mean() > 2 * found[:, ~field[48:]].mean()
    torch.testing.assert_close(found[0], found[3])  # the bands keep the proportions that the network stated


def test_dates_without_a_common_clear_pixel_have_a_large_error() -> None:
    flat, bands = torch.full((1, 4, 96, 96), -4.0), ("red", "green", "blue", "nir")
    seen = corrected(flat, *changed_fields()[1:], bands)[0, :, 48:]
    unseen = corrected(flat, *changed_fields(seen=False)[1:], bands)[0, :, 48:]
    assert unseen.isfinite().all()
    assert unseen.exp().mean() > 1.5 * seen.exp().mean()


def test_a_missing_band_does_not_change_what_is_stated_for_the_others() -> None:
    _, dates, weights, others = changed_fields()
    stated = torch.full((1, 4, 96, 96), -4.0)
    bands = ("B02", "B03", "B04", "B05")
    whole = corrected(stated[:, :3], _without(dates, 3), weights, others[:, :3], bands[:3])
    padded = _without(dates, 3, fill=True)
    shown = others.clone()
    shown[:, 3] = 0.0
    found = corrected(stated, padded, weights, shown, bands)
    torch.testing.assert_close(found[:, :3], whole)


def test_detail_and_what_the_network_changed_are_less_certain() -> None:
    _, dates, weights, others = changed_fields()
    flat, bands = torch.full((1, 4, 96, 96), -4.0), ("B02", "B03", "B04", "B08")
    smooth = torch.zeros_like(others)
    plain = corrected(flat, dates, weights, others, bands, (smooth, smooth))
    changed = corrected(flat, dates, weights, others, bands, (smooth, smooth + 0.05))
    detailed = smooth.clone()
    detailed[..., ::2] = 0.1
    rough = corrected(flat, dates, weights, others, bands, (detailed, detailed))
    assert (changed > plain + 0.3).all()
    assert (rough > plain + 0.1).all()


def _without(dates, band: int, *, fill: bool = False):
    kept = dates.dates.clone()
    kept[:, :, band] = 0.0
    return replace(dates, dates=kept if fill else kept[:, :, :band])
