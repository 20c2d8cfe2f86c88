"""DiffCR: size and cost, any number of dates, the sampler, thresholding, learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sader.baselines.baseline import BaselineInputs
from sader.baselines.systems.diffcr import SYSTEM, DiffCR, DiffCRConfig, NafBlock, thresholded
from sader.errors import ConfigError
from sader.evaluation.costs import count_macs, count_parameters, on_meta

RGB = ("B04", "B03", "B02")
TINY = DiffCRConfig(width=8, levels=2, emb_width=16, sampling_steps=3)


def test_size_and_cost_are_those_of_the_structure() -> None:
    """The table prints 22.19 M for what counts 22.91 M without norms and scales: see the header of diffcr.py."""
    with torch.device("meta"):
        network = DiffCR(DiffCRConfig(bands=RGB)).eval()
    assert count_parameters(network.counted) == 22_937_731
    with torch.device("meta"):
        assert count_parameters(DiffCR(DiffCRConfig()).counted) == 22_939_460
    bare = sum(
        parameter.numel()
        for name, parameter in network.named_parameters()
        if ".norm." not in name and not name.endswith("_scale")
    )
    assert abs(bare / 1e6 / 22.91 - 1) < 0.001
    inputs = BaselineInputs(
        cloudy=on_meta(1, 3, 3, 256, 256),
        aux=None,
        observed=on_meta(1, 3, 256, 256, dtype=torch.bool),
        cloud=on_meta(1, 3, 256, 256),
        present=on_meta(1, 3, dtype=torch.bool),
        reference=on_meta(1, dtype=torch.long),
        days=None,
    )
    forward = count_macs(network, inputs)["total"] / 1e9
    assert SYSTEM.printed[1] is not None
    assert abs(forward / SYSTEM.printed[1] - 1) < 0.01
    # The dates are looked at once per sample, the noised image 21 times.
    sample = count_macs(network.predict, inputs, lambda draw, channels: on_meta(1, channels, 256, 256))["total"] / 1e9
    dates = count_macs(network.condition, inputs)["total"] / 1e9
    assert network.evaluations == 21
    assert sample == pytest.approx(dates + 21 * (forward - dates), rel=1e-6)


@pytest.mark.parametrize("dates", [1, 2, 3, 5])
def test_any_number_of_dates_and_odd_sizes(series, noise_for, stirred, dates: int) -> None:
    inputs = series(dates, height=17, width=23)
    image = stirred(DiffCR(TINY)).predict(inputs, noise_for(inputs))
    assert image.shape == (2, 4, 17, 23)
    assert bool((image.abs() <= 1).all())


def _kept(inputs: BaselineInputs, order: list[int]) -> BaselineInputs:
    moved = {name: getattr(inputs, name)[:, order] for name in ("cloudy", "observed", "cloud", "present")}
    return replace(inputs, **moved)


def test_order_and_repetition_of_dates_do_not_matter(series, noise_for, stirred) -> None:
    network, inputs = stirred(DiffCR(TINY)), series(3)
    noise = noise_for(inputs)
    whole = network.predict(inputs, noise)
    torch.testing.assert_close(network.predict(_kept(inputs, [2, 0, 1]), noise), whole, atol=1e-4, rtol=1e-4)
    twice = network.predict(_kept(inputs, [0, 1, 2, 0, 1, 2]), noise)
    torch.testing.assert_close(twice, whole, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(network.predict(_kept(inputs, [0, 1]), noise), whole, atol=1e-3)


def test_a_missing_date_has_no_part(series, stirred) -> None:
    inputs: BaselineInputs = series(3)
    network = stirred(DiffCR(TINY))
    present = inputs.present.clone()
    present[:, 1] = False
    torch.testing.assert_close(network(replace(inputs, present=present)), network(_kept(inputs, [0, 2])))


def test_sampling_is_fixed_by_its_noise(series, noise_for, stirred) -> None:
    network, inputs = stirred(DiffCR(TINY)), series()
    first = network.predict(inputs, noise_for(inputs, 1))
    assert torch.equal(first, network.predict(inputs, noise_for(inputs, 1)))
    assert not torch.allclose(first, network.predict(inputs, noise_for(inputs, 2)), atol=1e-3)
    assert not torch.allclose(first, network.predict(inputs, noise_for(inputs, 1), steps=6), atol=1e-4)


def test_the_answer_of_a_perfect_network_comes_back(series, noise_for, monkeypatch) -> None:
    network, inputs = DiffCR(replace(TINY, sampling_steps=20)), series()
    truth = inputs.cloudy.mean(dim=1)
    levels: list[float] = []

    def perfect(noised: Tensor, level: Tensor, condition: object) -> Tensor:
        levels.append(float(level[0]))
        if len(levels) == 1:  # the state starts as plain noise of unit variance
            assert float(noised.std()) == pytest.approx(1, abs=0.05)
        return truth

    monkeypatch.setattr(network.network, "forward", perfect)
    torch.testing.assert_close(network.predict(inputs, noise_for(inputs)), truth)
    assert len(levels) == 21
    assert levels[0] < 1e-8
    assert levels[-1] > 0.999
    assert levels == sorted(levels)


def test_training_noise_has_the_variance_that_sampling_shows(series, batch, monkeypatch) -> None:
    network = DiffCR(TINY)
    seen: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(network.network, "forward", lambda noised, level, dates: seen.append((noised, level)) or noised)
    example = network.example(batch(size=64))
    for seed in range(20):
        next(network.phases_of(example, torch.Generator().manual_seed(seed)))
    for noised, level in seen:
        residual = noised - level.view(-1, 1, 1, 1) * example.known(example.inputs.cloudy.mean(dim=1))
        wanted = (1 - level**2).sqrt()
        torch.testing.assert_close(residual.flatten(1).std(dim=1), wanted, atol=0.02, rtol=0.05)


def test_thresholding_shrinks_only_what_leaves_the_range() -> None:
    inside = torch.linspace(-1, 1, 1000).view(1, 1, 20, 50)
    assert torch.equal(thresholded(inside, 0.995), inside)
    wide = 3 * inside
    found = thresholded(wide, 0.995)
    assert float(found.abs().max()) == 1
    torch.testing.assert_close(found[0, 0, 10], wide[0, 0, 10] / (3 * 0.995), atol=2e-3, rtol=1e-2)
    assert torch.equal(thresholded(wide, 1.0), wide)


def test_a_new_block_passes_its_input_through() -> None:
    x = torch.randn(1, 8, 5, 6)
    assert torch.equal(NafBlock(8, emb_width=4)(x, torch.randn(1, 4)), x)


def test_one_step_lowers_the_loss(one_step) -> None:
    before, after = one_step(DiffCR(TINY))
    assert after < before


def test_what_is_learned_is_what_is_sampled(batch, noise_for) -> None:
    """Trained on one batch with one schedule, sampled with the other: the clouds are gone."""
    network = DiffCR(TINY).train()
    example = batch(size=16)
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    for step in range(60):
        optimizer.zero_grad()
        next(network.losses(example, torch.Generator().manual_seed(step))).loss.backward()
        optimizer.step()
    inputs, clear, _ = network.example(example)
    image = network.eval().predict(inputs, noise_for(inputs), steps=8)
    clouds = (inputs.cloudy.mean(dim=1) - clear).abs().mean()
    assert bool((image - clear).abs().mean() < 0.25 * clouds)


def test_checkpoint_round_trip(series, stirred, round_trip) -> None:
    network, inputs = stirred(DiffCR(TINY)), series()
    assert torch.equal(round_trip(SYSTEM, network)(inputs), network(inputs))


def test_mistakes_are_named(series, noise_for) -> None:
    with pytest.raises(ConfigError, match=r"threshold is 1.5 and network.sampling_steps 20"):
        DiffCRConfig(threshold=1.5)
    inputs = series()
    with pytest.raises(ConfigError, match="steps is 2000; expected 1 to 1000"):
        DiffCR(TINY).predict(inputs, noise_for(inputs), steps=2000)
