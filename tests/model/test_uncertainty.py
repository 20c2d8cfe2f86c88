"""The error head: untrained it repeats what the candidates got wrong nearby, and it never disturbs the image."""

from __future__ import annotations

import torch

from sader.model.composite import prepare_dates
from sader.model.heads import LARGEST_FACTOR, ErrorHead


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
