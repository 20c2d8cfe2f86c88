"""The process: coefficients of both datasets as a table, the forward formula, and unit variances."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from sader.errors import ConfigError
from sader.method.diffusion import (
    Denoiser,
    DiffusionConfig,
    MeanReverting,
    karras_sigmas,
    median_of_dates,
    sample,
)
from sader.models import get_preset

# sigma, s, c_in, c_skip, c_out, weight, c_noise: computed by hand from docs/method.md#preconditioning (T = 3).
TABLE = {
    "sen2_mtc_new": [
        (40, ".02439", ".01748", ".01677", ".6160", "2.635", ".9222"),
        (4.8616, ".1706", ".1324", ".1303", ".5475", "3.336", ".3953"),
        (0.23499, ".8097", ".8075", ".8095", ".1390", "51.79", "-.3621"),
        (0.001, ".9990", ".9991", ".9991", ".000723", "1.914e6", "-1.727"),
    ],
    "sen12mscrts_ea": [
        (100, ".003322", ".003154", ".002887", ".4665", "4.594", "1.151"),
        (20.656, ".01588", ".01511", ".01386", ".4614", "4.697", ".757"),
        (2.6881, ".1103", ".1067", ".09954", ".4219", "5.619", ".2472"),
        (0.14951, ".6904", ".7017", ".6963", ".1505", "44.14", "-.4751"),
        (0.001, ".9970", ".9973", ".9973", ".001426", "4.92e5", "-1.727"),
    ],
}
ROWS = [(name, *row) for name, rows in TABLE.items() for row in rows]


def printed(text: str) -> float:
    """Return half a unit of the last printed digit, with a little room for the rounded sigma of the table."""
    mantissa, _, exponent = text.lstrip("-").partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.55 * 10.0 ** (int(exponent or 0) - decimals)


@pytest.mark.parametrize(("name", "sigma", "s", "c_in", "c_skip", "c_out", "weight", "c_noise"), ROWS)
def test_coefficients_of_both_datasets(name, sigma, s, c_in, c_skip, c_out, weight, c_noise):
    config = get_preset(name).diffusion
    found = MeanReverting(config).coefficients(torch.tensor([float(sigma)], dtype=torch.float64), 3)
    expected = {"c_in": c_in, "c_skip": c_skip, "c_out": c_out, "weight": weight, "c_noise": c_noise}
    for field, text in expected.items():
        assert getattr(found, field).item() == pytest.approx(float(text), abs=printed(text), rel=0), field
    # s, which scales x to the state between clear and cloudy, is not a coefficient but fixes alpha.
    assert 1 / (1 + config.alpha * sigma) == pytest.approx(float(s), abs=printed(s), rel=0)


def test_forward_formula_has_one_clear_image_and_one_sigma_but_noise_per_date():
    generator = torch.Generator().manual_seed(0)
    clear = torch.randn(2, 3, 4, 5, generator=generator)
    cloudy, noise = torch.randn(2, 2, 4, 3, 4, 5, generator=generator)
    sigma = torch.tensor([0.5, 7.0])
    noised = MeanReverting(DiffusionConfig(alpha=3.0)).noised(clear, cloudy, sigma, noise)
    for b in range(2):
        for t in range(4):
            by_hand = clear[b] + 3.0 * sigma[b] * cloudy[b, t] + sigma[b] * noise[b, t]
            torch.testing.assert_close(noised[b, t], by_hand)


def test_scaled_state_moves_from_clear_to_cloudy():
    clear, cloudy = torch.full((1, 1, 1, 1), 0.3), torch.full((1, 2, 1, 1, 1), -0.8)
    process = MeanReverting()
    for sigma, expected in ((1e-6, 0.3), (1e6, -0.8)):
        noised = process.noised(clear, cloudy, torch.tensor([sigma]), torch.zeros_like(cloudy))
        assert (noised / (1 + sigma)).flatten().tolist() == pytest.approx([expected] * 2, abs=1e-5)


def test_training_noise_is_log_normal():
    sigma = MeanReverting().draw_sigma(200_000, torch.Generator().manual_seed(1))
    assert sigma.log().mean().item() == pytest.approx(-1.4, abs=0.01)
    assert sigma.log().std().item() == pytest.approx(1.4, abs=0.01)


def test_wide_share_draws_log_uniformly_inside_its_range_only():
    config = DiffusionConfig(wide_share=1.0, wide_low=0.002, wide_high=2.0)
    log_sigma = MeanReverting(config).draw_sigma(100_000, torch.Generator().manual_seed(2)).log()
    low, high = math.log(0.002), math.log(2.0)
    assert low <= log_sigma.min() < low + 0.01
    assert high - 0.01 < log_sigma.max() <= high + 1e-6
    assert log_sigma.mean().item() == pytest.approx((low + high) / 2, abs=0.03)
    assert log_sigma.std().item() == pytest.approx((high - low) / 12**0.5, abs=0.03)


def test_wide_share_is_the_share():
    # The log-normal part is far below the wide range, so counting tells them apart.
    config = DiffusionConfig(wide_share=0.3, log_sigma_mean=-20.0, log_sigma_std=0.1, wide_low=1.0, wide_high=100.0)
    sigma = MeanReverting(config).draw_sigma(50_000, torch.Generator().manual_seed(3))
    assert (sigma >= 1.0).double().mean().item() == pytest.approx(0.3, abs=0.01)


def test_same_generator_seed_same_sigma():
    draws = [MeanReverting().draw_sigma(5, torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*draws)
    assert len(draws[0].unique()) == 5


class Zero(nn.Module):
    """A network F that answers a constant and remembers what it saw."""

    def __init__(self, answer: float) -> None:
        super().__init__()
        self.answer = answer
        self.seen: Tensor | None = None
        self.c_noise: Tensor | None = None

    def forward(self, scaled: Tensor, c_noise: Tensor, condition: object) -> Tensor:
        self.seen, self.c_noise = scaled, c_noise
        return torch.full_like(scaled[:, 0], self.answer)


def test_denoiser_counts_only_the_present_dates():
    generator = torch.Generator().manual_seed(5)
    noised = torch.randn(2, 4, 3, 2, 2, generator=generator)
    present = torch.tensor([[True, True, True, False], [False, True, False, False]])
    noised[~present] = float("nan")
    sigma = torch.tensor([0.7, 3.0])
    network = Zero(0.25)
    denoised = Denoiser(network)(noised, sigma, SimpleNamespace(present=present, mean=noised))
    for b, dates in ((0, 3), (1, 1)):
        c = MeanReverting().coefficients(sigma[b : b + 1], dates)
        by_hand = c.c_skip * noised[b][present[b]].mean(dim=0) + c.c_out * 0.25
        torch.testing.assert_close(denoised[b], by_hand)
        torch.testing.assert_close(network.seen[b][present[b]], c.c_in * noised[b][present[b]])
        assert network.c_noise[b].item() == pytest.approx(math.log(sigma[b]) / 4)


def test_number_of_dates_matters_in_the_preconditioning():
    process, sigma = MeanReverting(), torch.tensor([1.0])
    one, three = process.coefficients(sigma, 1), process.coefficients(sigma, 3)
    assert one.c_in == three.c_in  # scales each frame by itself
    assert one.c_skip < three.c_skip  # more dates, less noise in their mean, more trust in it
    assert one.c_out > three.c_out
    both = process.coefficients(sigma.repeat(2), torch.tensor([1, 3]))
    assert both.c_out.tolist() == [one.c_out.item(), three.c_out.item()]


def test_residual_mode_is_the_mean_reverting_process_less_its_known_part():
    """noised - (1 + alpha sigma) m = (clear - m) + sigma noise, and D is EDM on that, with m added back."""
    generator = torch.Generator().manual_seed(6)
    config = DiffusionConfig(alpha=1.5, residual=0.04)
    process = MeanReverting(config)
    clear = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    mean, noise = torch.randn(2, 2, 1, 3, 4, 4, generator=generator, dtype=torch.float64)
    sigma = torch.tensor([0.02, 0.9], dtype=torch.float64)
    level = sigma.view(-1, 1, 1, 1, 1)
    noised = process.noised(clear, mean, sigma, noise)
    residual = (clear[:, None] - mean) + level * noise
    torch.testing.assert_close(noised - (1 + 1.5 * level) * mean, residual)

    network = Zero(-0.5)
    condition = SimpleNamespace(mean=mean, present=torch.ones(2, 1, dtype=torch.bool))
    denoised = Denoiser(network, config)(noised, sigma, condition)
    flat = sigma.view(-1, 1, 1, 1)
    variance = flat**2 + 0.04**2
    edm = 0.04**2 / variance * residual[:, 0] + flat * 0.04 / variance.sqrt() * -0.5
    torch.testing.assert_close(denoised, (mean[:, 0] + edm).to(denoised.dtype), rtol=0, atol=1e-6)
    torch.testing.assert_close(network.seen, residual / variance.sqrt()[:, None], rtol=1e-5, atol=1e-5)


def test_denoiser_crops_a_padded_composite_to_the_state():
    config = DiffusionConfig(residual=0.04)
    mean = torch.arange(64.0).view(1, 1, 1, 8, 8)
    condition = SimpleNamespace(mean=mean, present=torch.ones(1, 1, dtype=torch.bool))
    noised = torch.zeros(1, 1, 1, 5, 6)
    denoised = Denoiser(Zero(0.0), config)(noised, torch.tensor([1e6]), condition)
    torch.testing.assert_close(denoised[0], mean[0, 0, :, :5, :6], atol=1e-3, rtol=0)


@pytest.mark.parametrize("sigma", [0.05, 0.7, 6.0])
@pytest.mark.parametrize(("dates", "alpha"), [(1, 1.0), (3, 1.0), (5, 3.0)])
def test_inputs_and_targets_have_unit_variance(sigma, dates, alpha):
    """What the coefficients are for: with one mu shared by the dates, as V assumes, and y, mu correlated
    Gaussians, every network input has variance 1 and so has the target F = (y - c_skip mean x) / c_out."""
    config = DiffusionConfig(alpha=alpha)
    generator = torch.Generator().manual_seed(7)
    count = 200_000
    first, second = torch.randn(2, count, generator=generator, dtype=torch.float64)
    clear, mu = first, 0.9 * first + (1 - 0.9**2) ** 0.5 * second
    noise = torch.randn(dates, count, generator=generator, dtype=torch.float64)
    noised = MeanReverting(config).noised(
        clear.view(1, 1, 1, -1),
        mu.expand(1, dates, 1, 1, -1),
        torch.tensor([sigma], dtype=torch.float64),
        noise.view(1, dates, 1, 1, -1),
    )
    c = MeanReverting(config).coefficients(torch.tensor([sigma], dtype=torch.float64), dates)
    assert (c.c_in.double() * noised).var().item() == pytest.approx(1.0, rel=0.02)
    average = noised.mean(dim=1).flatten()
    target = (clear - c.c_skip.double() * average) / c.c_out.double()
    assert target.var().item() == pytest.approx(1.0, rel=0.02)
    # c_skip is the least-squares choice: what is left of y is uncorrelated with what was given.
    assert (target * average).mean().abs().item() < 0.02 * average.std().item()
    assert c.weight.item() == pytest.approx(c.c_out.double().item() ** -2, rel=1e-5)


@pytest.mark.parametrize("sigma", [0.005, 0.04, 1.0])
def test_residual_mode_has_unit_variance_too(sigma):
    config = DiffusionConfig(residual=0.04)
    generator = torch.Generator().manual_seed(8)
    residual, noise = torch.randn(2, 200_000, generator=generator, dtype=torch.float64)
    residual = 0.04 * residual
    state = residual + sigma * noise
    c = MeanReverting(config).coefficients(torch.tensor([sigma], dtype=torch.float64), 1)
    assert (c.c_in.double() * state).var().item() == pytest.approx(1.0, rel=0.02)
    assert ((residual - c.c_skip.double() * state) / c.c_out.double()).var().item() == pytest.approx(1.0, rel=0.02)


def test_impossible_constants_are_refused():
    with pytest.raises(ConfigError, match=r"correlation 1\.0 must stay below .* 1\.0"):
        DiffusionConfig(correlation=1.0)
    with pytest.raises(ConfigError, match=r"wide_share is 1\.5; expected"):
        DiffusionConfig(wide_share=1.5)
    with pytest.raises(ConfigError, match="start is 'mean'; expected"):
        DiffusionConfig(start="mean")


def test_the_median_start_is_that_of_the_present_dates_and_the_lower_of_two():
    mean = torch.tensor([[-0.8, 0.9, -0.6], [0.9, -0.7, 5.0]]).view(2, 3, 1, 1, 1)
    present = torch.tensor([[True, True, True], [True, True, False]])
    assert median_of_dates(mean, present).flatten().tolist() == pytest.approx([-0.6, -0.7])
    condition = SimpleNamespace(mean=mean, present=present)
    start = Denoiser(nn.Identity(), DiffusionConfig(start="median")).initial(condition)
    torch.testing.assert_close(start, median_of_dates(mean, present))
    assert Denoiser(nn.Identity(), DiffusionConfig()).initial(condition) == 0.0  # paper


def test_a_start_of_zero_leaves_a_share_of_its_error_and_the_median_does_not():
    """A denoiser that takes the brightness from the state, as a trained one does where the noise averages out."""
    mean, truth = torch.full((1, 3, 1, 8, 8), -0.7), -0.7

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        return (x - sigma.view(-1, 1, 1, 1, 1) * mean).mean(dim=1)

    condition = SimpleNamespace(mean=mean, present=torch.ones(1, 3, dtype=torch.bool))
    results = {}
    for start in ("zero", "median"):
        initial = Denoiser(nn.Identity(), DiffusionConfig(start=start)).initial(condition)
        sigmas = karras_sigmas(4, sigma_min=0.001, sigma_max=40.0)
        results[start] = sample(denoise, mean, lambda _: torch.zeros_like(mean), sigmas, alpha=1.0, initial=initial)
    assert float(results["median"].mean()) == pytest.approx(truth, abs=1e-4)
    assert float(results["zero"].mean()) > truth + 0.5
