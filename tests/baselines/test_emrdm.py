"""EMRDM: the published size to the last parameter, any number of dates, the sampler, the attention, learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sader.baselines.baseline import BaselineInputs
from sader.baselines.systems.emrdm import SYSTEM, DateFusion, Emrdm, EmrdmCondition, EmrdmConfig, TokenBlock, rotated
from sader.errors import ConfigError
from sader.evaluation.costs import count_macs, count_parameters, on_meta
from sader.method.diffusion import DiffusionConfig

TINY = EmrdmConfig(
    patch=2, widths=(16, 32), depths=(1, 2), feed_widths=(16, 32), head_width=8, kernel=3, mapping_width=16,
    mapping_feed=16, fusion_heads=4, fusion_key_width=4,
)  # fmt: skip


def test_size_is_the_published_one() -> None:
    with torch.device("meta"):
        published = Emrdm(EmrdmConfig(bands=("B04", "B03", "B02"), aux_bands=("B08",)))
        usual = Emrdm(EmrdmConfig())
    assert count_parameters(published.counted) == 148_878_322
    assert count_parameters(usual.counted) == 148_886_514
    assert SYSTEM.printed[0] is not None
    assert abs(count_parameters(usual.counted) / 1e6 / SYSTEM.printed[0] - 1) < 0.02


@pytest.mark.slow
def test_a_sample_costs_five_forwards() -> None:
    with torch.device("meta"):
        network = Emrdm(EmrdmConfig()).eval()
    inputs = BaselineInputs(
        cloudy=on_meta(1, 3, 4, 256, 256),
        aux=None,
        observed=on_meta(1, 3, 256, 256, dtype=torch.bool),
        cloud=on_meta(1, 3, 256, 256),
        present=on_meta(1, 3, dtype=torch.bool),
        reference=on_meta(1, dtype=torch.long),
        days=None,
    )
    counts = count_macs(network, inputs)
    assert SYSTEM.printed[1] is not None
    # Above the table's 74.39: keys are taken in whole tiles here (6.5 against 2.8 GMAC), and 8.2 are the fusion's.
    assert counts["total"] == 86_073_081_856
    assert counts["total"] / 1e9 < 1.2 * SYSTEM.printed[1]
    with torch.device("meta"):
        shallow = Emrdm(replace(EmrdmConfig(), depths=(1, 1, 1))).eval()
    sample = count_macs(shallow.predict, inputs, lambda draw, channels: on_meta(1, channels, 256, 256))["total"]
    assert shallow.evaluations == 5
    assert sample == 5 * count_macs(shallow, inputs)["total"]


def test_process_is_the_published_one() -> None:
    config = EmrdmConfig().diffusion
    assert config == DiffusionConfig(
        alpha=1.0, sigma_data=1.0, sigma_mean=1.0, correlation=0.9, sigma_min=0.001, sigma_max=100.0, steps=5,
        log_sigma_mean=-1.4, log_sigma_std=1.4,
    )  # fmt: skip


@pytest.mark.parametrize("dates", [1, 2, 3, 5])
def test_any_number_of_dates_and_odd_sizes(series, noise_for, stirred, dates: int) -> None:
    inputs = series(dates, height=17, width=23)
    image = stirred(Emrdm(TINY)).predict(inputs, noise_for(inputs))
    assert image.shape == (2, 4, 17, 23)
    assert image.isfinite().all()


def _kept(inputs: BaselineInputs, order: list[int]) -> BaselineInputs:
    moved = {name: getattr(inputs, name)[:, order] for name in ("cloudy", "observed", "cloud", "present")}
    return replace(inputs, **moved)


def test_order_of_dates_does_not_matter(series, stirred) -> None:
    """With the noise of a date moving with it."""
    network, inputs = stirred(Emrdm(TINY)), series(3)
    field = torch.randn(2, 3, 4, 32, 32, generator=torch.Generator().manual_seed(0))

    def predicted(order: list[int]) -> Tensor:
        return network.predict(_kept(inputs, order), lambda draw, channels: field[:, order].flatten(1, 2))

    torch.testing.assert_close(predicted([2, 0, 1]), predicted([0, 1, 2]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(predicted([0, 1]), predicted([0, 1, 2]), atol=1e-3)


def test_a_missing_date_has_no_part(series, stirred) -> None:
    inputs: BaselineInputs = series(3)
    network = stirred(Emrdm(TINY))
    present, observed = inputs.present.clone(), inputs.observed.clone()
    present[:, 1], observed[:, 1] = False, False
    gone = replace(inputs, present=present, observed=observed)
    torch.testing.assert_close(network(gone), network(_kept(inputs, [0, 2])), atol=1e-5, rtol=1e-5)


def test_without_any_data_the_result_is_finite(series, noise_for, stirred) -> None:
    inputs: BaselineInputs = series(2)
    empty = replace(inputs, observed=torch.zeros_like(inputs.observed), present=torch.zeros_like(inputs.present))
    assert stirred(Emrdm(TINY)).predict(empty, noise_for(inputs)).isfinite().all()


def test_sampling_is_fixed_by_its_noise(series, noise_for, stirred) -> None:
    network, inputs = stirred(Emrdm(TINY)), series()
    first = network.predict(inputs, noise_for(inputs, 1))
    assert torch.equal(first, network.predict(inputs, noise_for(inputs, 1)))
    assert not torch.allclose(first, network.predict(inputs, noise_for(inputs, 2)), atol=1e-3)


class Perfect(nn.Module):
    """The raw output from which the preconditioning makes the truth, for any state."""

    def __init__(self, network: Emrdm, truth: Tensor) -> None:
        super().__init__()
        self.process, self.truth, self.levels = network.denoiser.process, truth, list[float]()

    def forward(self, scaled: Tensor, c_noise: Tensor, condition: EmrdmCondition) -> Tensor:
        sigma = (4 * c_noise).exp()
        self.levels.append(float(sigma[0]))
        c_in, c_skip, c_out, _, _ = self.process.coefficients(sigma, condition.present.sum(dim=1))
        state = (scaled / c_in.view(-1, 1, 1, 1, 1)).mean(dim=1)
        return (self.truth - c_skip.view(-1, 1, 1, 1) * state) / c_out.view(-1, 1, 1, 1)


def test_the_answer_of_a_perfect_network_comes_back(series, noise_for) -> None:
    network, inputs = Emrdm(TINY), series()
    truth = inputs.cloudy.flip(1).mean(dim=1)
    perfect = Perfect(network, truth)
    network.denoiser.network = perfect
    torch.testing.assert_close(network.predict(inputs, noise_for(inputs)), truth, atol=1e-3, rtol=0)
    assert perfect.levels == pytest.approx([100, 20.656, 2.6881, 0.14951, 0.001], rel=1e-3)


def test_the_loss_of_a_perfect_network_is_zero_and_of_a_wrong_one_weighted(batch) -> None:
    network = Emrdm(TINY)
    example = network.example(batch())
    network.denoiser.network = Perfect(network, example.clear)
    exact = next(network.phases_of(example, torch.Generator().manual_seed(0))).loss
    assert float(exact) < 1e-6
    network.denoiser.network = Perfect(network, example.clear + 0.1)
    generator = torch.Generator().manual_seed(0)
    found = next(network.phases_of(example, generator)).loss
    sigma = network.denoiser.process.draw_sigma(2, torch.Generator().manual_seed(0))
    weights = network.denoiser.process.coefficients(sigma, 3).weight
    assert float(found) == pytest.approx(0.01 * float(weights.mean()), rel=1e-3)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 1, 16), torch.randn(1, 1, 1, 1, 16)
    q, k = (rotated(x.expand(1, 2, 6, 7, 16), 4 / 128) for x in (q, k))

    def product(a: tuple[int, int], b: tuple[int, int]) -> float:
        return float((q[0, 0, *a] * k[0, 0, *b]).sum())

    assert product((0, 1), (2, 4)) == pytest.approx(product((3, 3), (5, 6)), abs=1e-5)
    assert product((0, 1), (2, 4)) != pytest.approx(product((0, 1), (4, 2)), abs=1e-3)
    torch.testing.assert_close(q.norm(dim=-1), q[:, :, :1, :1].norm(dim=-1).expand(1, 2, 6, 7))


def test_a_window_reaches_as_far_as_its_kernel_and_no_kernel_everywhere() -> None:
    emb = torch.zeros(1, 4)
    for kernel, reached in ((3, 9), (None, 80)):
        block = TokenBlock(16, 8, emb_width=4, head_width=8, kernel=kernel, step=0.1)
        nn.init.normal_(block.out.weight)
        x = torch.randn(1, 8, 10, 16)
        changed = x.clone()
        changed[0, 4, 5] += 1
        moved = (block(changed, emb) - block(x, emb)).abs().amax(dim=-1)[0] > 1e-7
        assert int(moved.sum()) == reached


def test_equal_dates_fuse_to_themselves() -> None:
    fusion = DateFusion(16, heads=4, key_width=3)
    tokens = torch.randn(2, 1, 4, 5, 16)
    fused = fusion(tokens.expand(2, 3, 4, 5, 16), torch.ones(2, 3, 4, 5, dtype=torch.bool))
    torch.testing.assert_close(fused, tokens[:, 0])


def test_half_precision_runs(series, stirred) -> None:
    network, inputs = stirred(Emrdm(TINY)), series()
    with torch.autocast("cpu", torch.bfloat16):
        half = network(inputs)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, network(inputs), atol=0.1, rtol=0.1)


def test_one_step_lowers_the_loss(one_step) -> None:
    before, after = one_step(Emrdm(TINY))
    assert after < before


def test_checkpoint_round_trip(series, stirred, round_trip) -> None:
    network, inputs = stirred(Emrdm(TINY)), series()
    assert torch.equal(round_trip(SYSTEM, network)(inputs), network(inputs))


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="differ in length; expected one number per level"):
        EmrdmConfig(depths=(2, 2))
    with pytest.raises(ConfigError, match="has 100 with heads of 64 and 16 fusion heads"):
        EmrdmConfig(widths=(100, 512, 768))
    with pytest.raises(ConfigError, match="EMRDM has no composite"):
        EmrdmConfig(diffusion=DiffusionConfig(residual=0.1))
