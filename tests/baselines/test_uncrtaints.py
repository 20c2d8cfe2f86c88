"""UnCRtainTS: size, any number of dates, missing dates, the predicted variance, learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sader.baselines.baseline import BaselineInputs
from sader.baselines.parts.ddpm import date_weights, sinusoid, weigh_dates
from sader.baselines.systems.uncrtaints import SYSTEM, UnCRtainTS, UnCRtainTSConfig
from sader.data.cloud_rules import USUAL_BANDS
from sader.errors import ConfigError
from sader.evaluation.costs import count_macs, count_parameters

B13 = USUAL_BANDS[13]
TINY = UnCRtainTSConfig(width=16, decoder_blocks=1, heads=4, model_width=32, dropout=0.0)


@pytest.mark.parametrize(("config", "count"), [(UnCRtainTSConfig(), 566_280), (UnCRtainTSConfig(bands=B13), 569_754)])
def test_size_is_that_of_the_table(config: UnCRtainTSConfig, count: int) -> None:
    with torch.device("meta"):
        found = count_parameters(UnCRtainTS(config).counted)
    assert found == count
    assert SYSTEM.printed[0] is not None
    assert abs(found / 1e6 / SYSTEM.printed[0] - 1) < 0.02


def test_cost_is_that_of_the_table(series) -> None:
    inputs: BaselineInputs = series(3, 13, 64, 64, batch=1)
    macs = count_macs(UnCRtainTS(UnCRtainTSConfig(bands=B13)).eval(), inputs)["total"] * 16 / 1e9
    assert SYSTEM.printed[1] is not None
    assert abs(macs / SYSTEM.printed[1] - 1) < 0.05


@pytest.mark.parametrize("dates", [1, 2, 3, 5])
def test_any_number_of_dates_and_odd_sizes(series, noise_for, dates: int) -> None:
    inputs = series(dates, height=17, width=23)
    network = UnCRtainTS(TINY).eval()
    image = network.predict(inputs, noise_for(inputs))
    assert image.shape == (2, 4, 17, 23)
    assert bool((image.abs() < 1).all())
    spread = network.uncertainty(inputs)
    assert spread.shape == image.shape
    assert bool((spread > 0).all())


def _with_days(inputs: BaselineInputs, days: list[float]) -> BaselineInputs:
    return replace(inputs, days=torch.tensor([days, days]))


def _ordered(inputs: BaselineInputs, order: list[int]) -> BaselineInputs:
    moved = {name: getattr(inputs, name)[:, order] for name in ("cloudy", "observed", "cloud", "present")}
    return replace(inputs, **moved, days=None if inputs.days is None else inputs.days[:, order])


def test_order_of_dates_does_not_matter_but_their_days_do(series) -> None:
    network, inputs = UnCRtainTS(TINY).eval(), _with_days(series(3), [0.0, 20.0, 70.0])
    torch.testing.assert_close(network(_ordered(inputs, [2, 0, 1])), network(inputs))
    assert not torch.allclose(network(_with_days(inputs, [0.0, 5.0, 6.0])), network(inputs), atol=1e-6)
    unknown = _with_days(inputs, [float("nan")] * 3)
    torch.testing.assert_close(network(unknown), network(replace(inputs, days=None)))


def test_a_missing_date_has_no_part(series) -> None:
    inputs: BaselineInputs = series(3)
    network = UnCRtainTS(TINY).eval()
    present, observed = inputs.present.clone(), inputs.observed.clone()
    present[:, 1], observed[:, 1] = False, False
    gone = replace(inputs, present=present, observed=observed)
    torch.testing.assert_close(network(gone), network(_ordered(inputs, [0, 2])))


def test_without_any_data_the_result_is_finite(series) -> None:
    inputs: BaselineInputs = series(2)
    empty = replace(inputs, observed=torch.zeros_like(inputs.observed), present=torch.zeros_like(inputs.present))
    assert UnCRtainTS(TINY).eval()(empty).isfinite().all()


def test_the_marked_date_counts_only_where_it_is_asked_for(series) -> None:
    inputs: BaselineInputs = series(3)
    marked = replace(inputs, reference=torch.tensor([1, 1]))
    plain, flagged = UnCRtainTS(TINY).eval(), UnCRtainTS(replace(TINY, reference_input=True)).eval()
    assert torch.equal(plain(marked), plain(inputs))
    assert not torch.equal(flagged(marked), flagged(inputs))


def test_the_spread_learned_is_the_spread_of_the_truth(batch) -> None:
    """The likelihood is greatest where the predicted standard deviation is the real one."""
    torch.manual_seed(0)
    network = UnCRtainTS(replace(TINY, bands=("B04",))).train()
    example = batch(channels=1, size=32)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        truth = 0.4 + 0.05 * torch.randn(example.clear.shape, generator=generator)
        phase = next(network.losses(replace(example, clear=truth), generator))
        optimizer.zero_grad()
        phase.loss.backward()
        optimizer.step()
    network.eval()
    inputs = network.example(example).inputs
    with torch.no_grad():
        assert float(network.uncertainty(inputs).mean()) == pytest.approx(0.05, rel=0.2)
        assert float((network(inputs) + 1).mean() / 2) == pytest.approx(0.4, abs=0.02)


def test_weights_of_dates_sum_to_one_and_weigh_their_own_channels() -> None:
    keys = torch.randn(2, 3, 4, 5, 6, 7)
    available = torch.ones(2, 3, 6, 7, dtype=torch.bool)
    available[:, 2, :3] = False
    weights = date_weights(torch.randn(1, 4, 5, 1, 1), keys, available)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(2, 4, 6, 7))
    assert not weights[:, 2, :, :3].any()
    one_head = torch.zeros(1, 2, 2, 1, 1)
    one_head[:, 0, 0], one_head[:, 1, 1] = 1, 1  # head 0 takes date 0, head 1 date 1
    frames = torch.arange(8.0).view(1, 2, 4, 1, 1)
    assert weigh_dates(frames, one_head).flatten().tolist() == [0, 1, 6, 7]


def test_sinusoid_of_zero_is_one_and_zero() -> None:
    assert sinusoid(torch.zeros(1), 6).tolist() == [[1, 1, 1, 0, 0, 0]]
    assert float(sinusoid(torch.tensor([0.5]), 6)[0, 3]) == pytest.approx(0.479425538604203)


def test_one_step_lowers_the_loss(one_step) -> None:
    before, after = one_step(UnCRtainTS(TINY))
    assert after < before


def test_checkpoint_round_trip_keeps_the_running_statistics(series, one_step, round_trip) -> None:
    network = UnCRtainTS(TINY)
    one_step(network)
    network.eval()
    inputs = series()
    assert torch.equal(round_trip(SYSTEM, network)(inputs), network(inputs))


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="width 20 and model_width 256 with 16 heads"):
        UnCRtainTSConfig(width=20)
