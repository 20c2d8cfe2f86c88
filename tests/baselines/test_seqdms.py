"""SeqDMs: size, any number of dates, the reverse chain, what training shows, learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sader.baselines.baseline import BaselineInputs
from sader.baselines.parts.unet import UNetConfig
from sader.baselines.systems.seqdms import SYSTEM, SeqDMs, SeqDMsConfig
from sader.errors import ConfigError
from sader.evaluation.costs import count_parameters

TINY = SeqDMsConfig(
    unet=UNetConfig(width=8, multipliers=(1, 2), blocks=1, attention_from=1, emb_width=16), sampling_steps=4
)


def test_size_is_known_and_labelled_as_assumed() -> None:
    with torch.device("meta"):
        assert count_parameters(SeqDMs(SeqDMsConfig()).counted) == 71_467_908
    assert SYSTEM.printed[0] is None
    assert SYSTEM.label == "SeqDMs (method simplified, sizes assumed)"


@pytest.mark.parametrize("dates", [1, 2, 3, 5])
def test_any_number_of_dates_and_odd_sizes(series, noise_for, stirred, dates: int) -> None:
    inputs = series(dates, height=17, width=23)
    image = stirred(SeqDMs(TINY)).predict(inputs, noise_for(inputs))
    assert image.shape == (2, 4, 17, 23)
    assert bool((image.abs() <= 1).all())


def _kept(inputs: BaselineInputs, order: list[int]) -> BaselineInputs:
    moved = {name: getattr(inputs, name)[:, order] for name in ("cloudy", "observed", "cloud", "present")}
    return replace(inputs, **moved)


def test_order_and_repetition_of_dates_do_not_matter(series, stirred) -> None:
    network, inputs = stirred(SeqDMs(TINY)), series(3)
    state = torch.randn(2, 4, 32, 32) * 0.3

    def denoised(order: list[int]) -> Tensor:
        kept = _kept(inputs, order)
        return network.denoise(state, torch.full((2,), 0.5), network.frames(kept), kept.observed)

    torch.testing.assert_close(denoised([2, 0, 1]), denoised([0, 1, 2]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(denoised([0, 1, 2, 0, 1, 2]), denoised([0, 1, 2]), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(denoised([0]), denoised([0, 1, 2]), atol=1e-3)


def test_a_date_counts_only_where_it_was_observed(series, stirred) -> None:
    network, inputs = stirred(SeqDMs(TINY)), series(2)
    observed = inputs.observed.clone()
    observed[:, 1, :16] = False
    state, sigma = torch.randn(2, 4, 32, 32) * 0.3, torch.full((2,), 0.5)
    frames = network.frames(inputs)
    mixed = network.denoise(state, sigma, frames, observed)
    alone = network.denoise(state, sigma, frames[:, :1], inputs.observed[:, :1])
    both = network.denoise(state, sigma, frames, inputs.observed)
    torch.testing.assert_close(mixed[..., :16, :], alone[..., :16, :], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[..., 16:, :], both[..., 16:, :], atol=1e-5, rtol=1e-5)
    assert network.denoise(state, sigma, frames, torch.zeros_like(observed)).isfinite().all()


def test_auxiliary_bands_help(series, stirred) -> None:
    network = stirred(SeqDMs(replace(TINY, aux_bands=("VV", "VH"))))
    inputs: BaselineInputs = series(2, aux=2)
    assert inputs.aux is not None
    assert not torch.allclose(network(inputs), network(replace(inputs, aux=-inputs.aux)), atol=1e-4)


def test_sampling_is_fixed_by_its_noise(series, noise_for, stirred) -> None:
    network, inputs = stirred(SeqDMs(TINY)), series()
    first = network.predict(inputs, noise_for(inputs, 1))
    assert torch.equal(first, network.predict(inputs, noise_for(inputs, 1)))
    assert not torch.allclose(first, network.predict(inputs, noise_for(inputs, 2)), atol=1e-3)


def test_the_answer_of_a_perfect_network_comes_back(series, noise_for, monkeypatch) -> None:
    """Dates that are wrong by as much in both directions: their mean is the truth, at every step of the chain."""
    network, inputs = SeqDMs(TINY), series(2)
    truth = 0.5 * inputs.cloudy.mean(dim=1)
    seen: list[tuple[float, float]] = []

    def perfect(noised: Tensor, sigma: Tensor, frame: Tensor) -> Tensor:
        seen.append((float(sigma[0]), float((noised - truth.repeat_interleave(2, dim=0)).std())))
        return truth.repeat_interleave(2, dim=0) + torch.tensor([0.1, -0.1]).repeat(2).view(-1, 1, 1, 1)

    monkeypatch.setattr(network, "clear_by", perfect)
    torch.testing.assert_close(network.predict(inputs, noise_for(inputs), steps=10), truth, atol=1e-5, rtol=0)
    assert len(seen) == 10
    for sigma, spread in seen:  # what the network sees in the chain is what it was trained on
        assert spread == pytest.approx(sigma, rel=0.05)


def test_training_shows_every_present_date_and_no_other(batch, monkeypatch) -> None:
    network = SeqDMs(TINY)
    example = batch(dates=3)
    for date in range(3):
        example.cloudy[:, date] = 0.1 * (date + 1)
    present = example.present.clone()
    present[:, 1] = False
    made = network.example(replace(example, present=present))
    shown: set[float] = set()

    def spy(noised: Tensor, sigma: Tensor, frame: Tensor) -> Tensor:
        shown.update(round(float(value), 3) for value in frame[:, 0, 0, 0])
        return noised

    monkeypatch.setattr(network, "clear_by", spy)
    for seed in range(12):
        next(network.phases_of(made, torch.Generator().manual_seed(seed)))
    assert shown == {-0.8, -0.4}  # 0.1 and 0.3 in the model's range


def test_the_loss_counts_known_pixels_alone(batch, monkeypatch) -> None:
    network = SeqDMs(TINY)
    example = network.example(batch())
    wrong = torch.where(example.weight > 0, example.clear, 5.0)
    assert bool((wrong == 5).any())
    monkeypatch.setattr(network, "clear_by", lambda noised, sigma, frame: wrong)
    assert float(next(network.phases_of(example, torch.Generator().manual_seed(0))).loss) == 0
    monkeypatch.setattr(network, "clear_by", lambda noised, sigma, frame: example.clear + 0.1)
    loss = next(network.phases_of(example, torch.Generator().manual_seed(0))).loss
    assert float(loss) == pytest.approx(0.01, rel=1e-4)


def test_one_step_lowers_the_loss(one_step) -> None:
    before, after = one_step(SeqDMs(TINY))
    assert after < before


def test_checkpoint_round_trip(series, stirred, round_trip) -> None:
    network, inputs = stirred(SeqDMs(TINY)), series()
    assert torch.equal(round_trip(SYSTEM, network)(inputs), network(inputs))


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="sampling_steps is 0; expected 1 to 1000"):
        SeqDMsConfig(sampling_steps=0)
