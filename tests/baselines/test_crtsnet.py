"""CR-TS Net: size, shapes, what the order of the dates does, learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sader.baselines.baseline import BaselineInputs
from sader.baselines.systems.crtsnet import SYSTEM, CrTsNet, CrTsNetConfig, ScaledResidual
from sader.data.cloud_rules import USUAL_BANDS
from sader.errors import ConfigError, ShapeError
from sader.evaluation.costs import count_parameters

B13 = USUAL_BANDS[13]
TINY = CrTsNetConfig(width=16, date_blocks=2, series_blocks=1)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (CrTsNetConfig(), 38_386_692),
        (CrTsNetConfig(bands=B13), 38_469_645),
        (CrTsNetConfig(bands=B13, aux_bands=("VV", "VH")), 38_474_253),
    ],
)
def test_size_is_that_of_the_table(config: CrTsNetConfig, count: int) -> None:
    with torch.device("meta"):
        found = count_parameters(CrTsNet(config).counted)
    assert found == count
    assert SYSTEM.printed[0] is not None
    assert abs(found / 1e6 / SYSTEM.printed[0] - 1) < 0.02


@pytest.mark.parametrize("dates", [1, 2, 3, 5])
def test_any_number_of_dates_and_odd_sizes(series, noise_for, dates: int) -> None:
    inputs = series(dates, height=17, width=23)
    image = CrTsNet(TINY).eval().predict(inputs, noise_for(inputs))
    assert image.shape == (2, 4, 17, 23)
    assert bool((image.abs() <= 1).all())


def test_auxiliary_bands_go_in_and_do_not_come_out(series, noise_for) -> None:
    config = replace(TINY, bands=("B04", "B03", "B02"), aux_bands=("B08",))
    inputs = series(3, 3, aux=1)
    network = CrTsNet(config).eval()
    assert network.predict(inputs, noise_for(inputs)).shape == (2, 3, 32, 32)
    changed = replace(inputs, aux=-inputs.aux)
    assert not torch.equal(network(inputs), network(changed))


def test_the_order_of_the_dates_matters(series) -> None:
    inputs: BaselineInputs = series(3)
    network = CrTsNet(TINY).eval()
    turned = replace(inputs, cloudy=inputs.cloudy.flip(1), observed=inputs.observed.flip(1), cloud=inputs.cloud.flip(1))
    assert not torch.allclose(network(inputs), network(turned), atol=1e-4)


def test_the_reference_date_goes_first_wherever_it_stands(series) -> None:
    inputs: BaselineInputs = series(3)
    first = replace(inputs, reference=torch.tensor([0, 0]))
    order = [1, 0, 2]
    moved = replace(
        inputs, cloudy=inputs.cloudy[:, order], cloud=inputs.cloud[:, order], reference=torch.tensor([1, 1])
    )
    network = CrTsNet(TINY).eval()
    torch.testing.assert_close(network(first), network(moved))


def test_a_block_adds_a_tenth_of_its_branch() -> None:
    block = ScaledResidual(torch.nn.Conv2d, 4, scale=0.1)
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close((block(x) - x) * 10, block.second(block.first(x).relu()), atol=1e-5, rtol=1e-5)


def test_one_step_lowers_the_loss(one_step) -> None:
    before, after = one_step(CrTsNet(TINY))
    assert after < before


def test_checkpoint_round_trip(series, round_trip) -> None:
    network = CrTsNet(TINY).eval()
    inputs = series()
    assert torch.equal(round_trip(SYSTEM, network)(inputs), network(inputs))


def test_mistakes_are_named(series, noise_for) -> None:
    with pytest.raises(ConfigError, match="the last kernel of CR-TS Net spans the dates"):
        CrTsNetConfig(dates=None)
    inputs = series(channels=3)
    with pytest.raises(ShapeError, match=r"C = 4 bands: B02, B03, B04, B08"):
        CrTsNet(TINY).predict(inputs, noise_for(inputs))
    inputs = series()
    with pytest.raises(ConfigError, match="runs in one pass"):
        CrTsNet(TINY).predict(inputs, noise_for(inputs), steps=4)
