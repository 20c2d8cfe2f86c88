"""DDPM-CR: size, shapes, who gets which gradient, the loss's parts, learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sader.baselines.baseline import BaselineInputs, Example
from sader.baselines.parts.unet import UNet, UNetConfig
from sader.baselines.systems.ddpmcr import SYSTEM, DdpmCr, DdpmCrConfig
from sader.errors import ConfigError
from sader.evaluation.costs import count_macs, count_parameters, on_meta

TINY = DdpmCrConfig(
    extractor=UNetConfig(width=8, multipliers=(1, 2), blocks=1, attention_from=1, emb_width=16), head_blocks=(1, 2)
)


def test_size_is_that_of_the_table_and_labelled_as_assumed() -> None:
    with torch.device("meta"):
        network = DdpmCr(DdpmCrConfig()).eval()
    assert count_parameters(network.counted) == 440_498_967
    assert SYSTEM.printed[0] is not None
    assert abs(count_parameters(network.counted) / 1e6 / SYSTEM.printed[0] - 1) < 0.02
    assert SYSTEM.label == "DDPM-CR (method simplified, sizes assumed)"
    macs = count_macs(lambda: network.removed(on_meta(1, 12, 256, 256), on_meta(1, 12, 256, 256)))["total"] / 1e9
    assert SYSTEM.printed[1] is not None
    assert abs(macs / SYSTEM.printed[1] - 1) < 0.06


@pytest.mark.parametrize("dates", [1, 2, 3, 5])
def test_any_number_of_dates_and_odd_sizes(series, noise_for, stirred, dates: int) -> None:
    inputs = series(dates, height=17, width=23)
    image = stirred(DdpmCr(TINY)).predict(inputs, noise_for(inputs))
    assert image.shape == (2, 4, 17, 23)
    assert bool((image.abs() <= 1).all())


def test_the_order_of_the_dates_matters(series, stirred) -> None:
    inputs: BaselineInputs = series(3)
    network = stirred(DdpmCr(TINY))
    turned = replace(inputs, cloudy=inputs.cloudy.flip(1), cloud=inputs.cloud.flip(1))
    assert not torch.allclose(network(inputs), network(turned), atol=1e-4)


def test_the_answer_is_fixed_by_its_noise(series, noise_for, stirred) -> None:
    network, inputs = stirred(DdpmCr(TINY)), series()
    first = network.predict(inputs, noise_for(inputs, 1))
    assert torch.equal(first, network.predict(inputs, noise_for(inputs, 1)))
    assert not torch.equal(first, network.predict(inputs, noise_for(inputs, 2)))


def test_features_are_those_of_every_level() -> None:
    network = UNet(3, 3, UNetConfig(width=8, multipliers=(1, 2, 4), blocks=2, attention_from=2, emb_width=16))
    found = network.features(torch.randn(2, 3, 16, 24), torch.zeros(2))
    assert [tuple(f.shape) for f in found] == [(2, 8, 16, 24), (2, 16, 8, 12), (2, 32, 4, 6)]


def test_the_head_does_not_train_the_extractor(series, stirred) -> None:
    network = stirred(DdpmCr(TINY))
    stack = network.stack(series())
    network.removed(stack, torch.zeros_like(stack)).sum().backward()
    assert all(parameter.grad is None for parameter in network.extractor.parameters())
    assert all(parameter.grad is not None for parameter in network.head.parameters())


def test_every_parameter_learns_from_the_whole_loss(batch, stirred) -> None:
    network = stirred(DdpmCr(TINY)).train()
    next(network.losses(batch(), torch.Generator().manual_seed(0))).loss.backward()
    assert [name for name, p in network.named_parameters() if p.grad is None] == []


def _errors(network: DdpmCr, example: Example, shift: torch.Tensor) -> list[float]:
    return [float(part) for part in network._errors(example.clear + shift, example)]


def test_frequency_terms_tell_smooth_from_rough(batch) -> None:
    network = DdpmCr(replace(TINY, blur=3))
    example = network.example(batch())
    inputs = replace(example.inputs, cloud=torch.zeros_like(example.inputs.cloud))
    example = example._replace(weight=torch.ones_like(example.weight), inputs=inputs)
    assert _errors(network, example, torch.tensor(0.0)) == [0, 0, 0]
    low, high, cloudy = _errors(network, example, torch.tensor(0.1))
    assert low > 0.09
    assert high < 0.01  # only at the border, where the window leaves the image
    rough = 0.1 * (torch.arange(32)[:, None] + torch.arange(32)).remainder(2).mul(2).sub(1)
    low, high, cloudy = _errors(network, example, rough)
    assert low < 0.03
    assert high > 0.07
    assert cloudy == 0


def test_cloud_term_counts_under_clouds_alone(batch) -> None:
    network = DdpmCr(TINY)
    example = network.example(batch())
    covered = (example.inputs.cloud > 0).any(dim=1)[:, None]
    assert _errors(network, example, torch.where(covered, 0.0, 0.3))[2] == 0
    assert _errors(network, example, torch.where(covered, 0.3, 0.0))[2] > 0


def test_one_step_lowers_the_loss(one_step) -> None:
    before, after = one_step(DdpmCr(TINY))
    assert after < before


def test_checkpoint_round_trip(series, stirred, round_trip) -> None:
    network, inputs = stirred(DdpmCr(TINY)), series()
    assert torch.equal(round_trip(SYSTEM, network)(inputs), network(inputs))


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="DDPM-CR stacks the dates as channels"):
        DdpmCrConfig(dates=None)
    with pytest.raises(ConfigError, match="one number of blocks per level"):
        DdpmCrConfig(head_blocks=(1, 1))
    with pytest.raises(ConfigError, match=r"feature_time is 2000\.0; expected more than 0 and at most 1000"):
        DdpmCrConfig(feature_time=2000.0)
    with pytest.raises(ConfigError, match="a U-Net of 0 levels with 2 blocks each"):
        UNetConfig(multipliers=())
