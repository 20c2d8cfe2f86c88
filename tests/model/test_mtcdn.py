"""The whole network: its size and cost, any T and any H x W, and who may influence whom.

Every network here is tiny and has noise on all its parameters: as built, most branches start at zero and would hide an
influence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sader.errors import BandError, ConfigError, ShapeError
from sader.evaluation.costs import count_macs, count_parameters, on_meta
from sader.method.diffusion import Denoiser, DiffusionConfig, generator_noise, karras_sigmas, sample
from sader.model.blocks import reflect_pad
from sader.model.mtcdn import MTCDN, Condition, MTCDNConfig
from sader.models import get_preset

PAPER = MTCDNConfig(
    widths=(16, 32),
    blocks=(1, 2),
    fusion_width=16,
    key_width=8,
    kernel=3,
    emb_width=16,
    date_input="none",
)
COMPOSITE = replace(
    PAPER, stem=2, fusion_patches="pool", composite=True, cloud_widths=(8, 16), refinement_widths=(8,), error_head=True
)
KINDS = pytest.mark.parametrize("config", [PAPER, COMPOSITE], ids=["paper", "composite"])
NAN = float("nan")


def network(config: MTCDNConfig, seed: int = 0, scale: float = 0.1) -> MTCDN:
    torch.manual_seed(seed)
    net = MTCDN(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return net


def denoiser(config: MTCDNConfig, seed: int = 0) -> Denoiser:
    diffusion = DiffusionConfig(residual=0.04, sigma_max=1.0) if config.composite else DiffusionConfig()
    return Denoiser(network(config, seed), diffusion).eval()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def series(
    batch: int = 1, dates: int = 3, height: int = 16, width: int = 24, *, seed: int = 0, cloud: bool = True
) -> dict[str, Tensor]:
    """Return arguments of `condition`: dates that differ, a mask, auxiliary bands and days."""
    given = {
        "cloudy": -0.5 + 0.3 * draw(batch, dates, 3, height, width, seed=seed),
        "aux": 0.3 * draw(batch, dates, 1, height, width, seed=seed + 1),
        "days": torch.arange(float(dates)).mul(20).expand(batch, -1).clone(),
    }
    if cloud:
        given["cloud"] = (draw(batch, dates, height, width, seed=seed + 2) > 0.5).float()
    return given


@torch.no_grad()
def evaluate(net: MTCDN, given: dict[str, Any], *, c_noise: float = -0.3, seed: int = 9) -> Tensor:
    """Return F for one fixed state; with a state frame per date, the state of date t depends on t's first pixel only
    through the date, so that permuted dates carry their state along."""
    condition = net.condition(**given)
    cloudy = given["cloudy"]
    batch, dates, _, height, width = cloudy.shape
    if net.config.composite:
        state = draw(1, 1, 3, height, width, seed=seed).expand(batch, -1, -1, -1, -1)
    else:
        state = torch.stack([cloudy.nan_to_num(0.0, 0.0, 0.0)[:, t] * 0.7 + 0.1 for t in range(dates)], dim=1)
    return net(state, torch.full((batch,), c_noise), condition)


def sampled(model: Denoiser, condition: Condition, *, steps: int = 2, solver: str = "euler") -> Tensor:
    config, mean = model.config, condition.mean
    seeds = list(range(mean.shape[0]))
    return sample(
        lambda x, sigma: model(x, sigma, condition),
        mean,
        generator_noise(tuple(mean.shape[1:]), seeds),
        karras_sigmas(steps, sigma_min=config.sigma_min, sigma_max=config.sigma_max),
        alpha=config.alpha,
        initial=mean if config.residual is not None else 0.0,
        solver=solver,
    )


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    scale = expected.abs().max().clamp(min=1e-3).item()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)


def far(found: Tensor, other: Tensor, share: float = 1e-3) -> None:
    assert (found - other).abs().max() > share * other.abs().max(), "these must differ"


# ------------------------------------------------------------------------------------------------ size and cost


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [("sen2_mtc_new", 27.1e6, 27.7e6), ("sen12mscrts_ea", 105e6, 115e6), ("small", 1e6, 8e6), ("small_msi", 1e6, 8e6)],
)
def test_parameter_counts(preset, low, high):
    with torch.device("meta"):
        net = MTCDN(get_preset(preset).network)
    assert low <= count_parameters(net) <= high
    if preset == "sen2_mtc_new":
        # The condition network of the public code has 12.38 M with its own date embedding.
        condition = count_parameters(net.condition_net) + count_parameters(net.date_embedding)
        assert condition == pytest.approx(12_376_516, rel=0.01)


def macs(preset: str) -> tuple[int, int]:
    """Return multiply-accumulates of the condition and of one evaluation, T = 3, 256 x 256."""
    config = get_preset(preset)
    with torch.device("meta"):
        net = MTCDN(config.network).eval()
        net.to("meta")
    kept: list[Condition] = []
    cloudy = on_meta(1, 3, len(config.network.bands), 256, 256)
    once = count_macs(lambda: kept.append(net.condition(cloudy)))["total"]
    state = on_meta(*kept[0].mean.shape)
    return once, count_macs(lambda: net(state, on_meta(1), kept[0]))["total"]


def test_cost_of_the_papers_network():
    condition, evaluation = macs("sen2_mtc_new")
    assert 340e9 <= condition + evaluation <= 365e9
    assert condition == pytest.approx(208.4e9, rel=0.02)  # counted in the public code


def test_cost_of_the_small_network():
    config = get_preset("small")
    condition, evaluation = macs("small")
    assert condition + config.diffusion.steps * evaluation <= 100e9
    assert config.sampling.resample_steps == 0, "else the evaluations of the default sampling are more"


# ------------------------------------------------------------------------------------------------ shapes


@KINDS
@pytest.mark.parametrize("dates", [1, 2, 5])
def test_any_number_of_dates(config, dates):
    model, given = denoiser(config), series(2, dates)
    condition = model.network.condition(**given)
    assert condition.mean.shape == (2, 1 if config.composite else dates, 3, 16, 24)
    assert condition.features.keys.shape[:2] == (2, dates)
    found = model(condition.mean, torch.tensor([0.1, 2.0]), condition)
    assert found.shape == (2, 3, 16, 24)
    assert found.isfinite().all()


@KINDS
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (13, 16), (2, 31)])
def test_any_size_equals_its_reflection_cropped(config, size):
    height, width = size
    multiple = config.multiple
    padded = [-(-n // multiple) * multiple for n in size]
    net, given = network(config), series(1, 3, height, width)
    bigger = {k: reflect_pad(v, *padded) if v.ndim > 2 else v for k, v in given.items()}
    state = draw(1, 1 if config.composite else 3, 3, height, width, seed=4)
    c_noise = torch.tensor([0.2])
    with torch.no_grad():
        small, big = net.condition(**given), net.condition(**bigger)
        assert small.size == size
        assert torch.equal(small.mean, big.mean)
        found = net(state, c_noise, small)
        assert found.shape == (1, 3, height, width)
        assert torch.equal(found, net(reflect_pad(state, *padded), c_noise, big)[..., :height, :width])


def test_default_network_has_the_reference_multiple():
    assert MTCDNConfig().multiple == 4
    assert COMPOSITE.multiple == 4


# ------------------------------------------------------------------------------------------------ dates


def permuted(given: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """Return the series with its dates in another order, the reference following its date."""
    moved = {k: v if k in ("reference", "band_present") else v[:, order] for k, v in given.items()}
    if "reference" in given:
        moved["reference"] = torch.tensor([order.index(int(r)) for r in given["reference"]])
    return moved


ORDER = [2, 0, 3, 1]


@KINDS
@pytest.mark.parametrize("cloud", [True, False])
def test_order_of_dates_does_not_matter(config, cloud):
    net, given = network(config), series(2, 4, cloud=cloud)
    if config.composite:
        given["reference"] = torch.tensor([1, 3])
    close(evaluate(net, permuted(given, ORDER)), evaluate(net, given))
    if config.composite:
        anywhere = {k: v for k, v in given.items() if k != "reference"}
        close(evaluate(net, permuted(anywhere, ORDER)), evaluate(net, anywhere))


def test_order_does_not_matter_even_when_dates_are_equally_clear():
    """Nobody asked for a date and all are equally clear (or all overcast): the anchor is still found by content."""
    net = network(COMPOSITE)
    for cover in (0.0, 1.0):
        given = series(1, 4)
        given["cloud"] = torch.full_like(given["cloud"], cover)
        close(evaluate(net, permuted(given, ORDER)), evaluate(net, given))


@KINDS
@pytest.mark.parametrize("what", ["index", "days"])
def test_order_matters_where_it_is_an_input(config, what):
    net, given = network(replace(config, date_input=what)), series(1, 4)
    moved = permuted(given, ORDER)
    if what == "days":
        close(evaluate(net, moved), evaluate(net, given))  # each date took its day along
        moved["days"] = given["days"]
    far(evaluate(net, moved), evaluate(net, given))


def test_days_are_ignored_unless_they_are_an_input():
    net, given = network(PAPER), series()
    assert torch.equal(evaluate(net, {**given, "days": None}), evaluate(net, given))


@KINDS
@pytest.mark.parametrize("what", ["none", "days"])
@pytest.mark.parametrize("garbage", [NAN, float("inf")])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_masked_date_has_no_influence_at_all(config, what, garbage, place):
    config = replace(config, date_input=what)
    model, given = denoiser(config), series(2, 4)
    present = torch.ones(2, 4, dtype=torch.bool)
    present[:, place] = False
    other = {k: v.clone() for k, v in given.items()}
    for value in other.values():
        value[:, place] = garbage
    with torch.no_grad():
        conditions = [model.network.condition(**g, present=present) for g in (given, other)]
        results = [sampled(model, condition) for condition in conditions]
        assert results[0].isfinite().all()
        assert torch.equal(*results)
        # A state frame of an absent date is not read either.
        states = [draw(*conditions[0].mean.shape, seed=5) for _ in range(2)]
        if not config.composite:
            states[1][:, place] = garbage
        sigma = torch.tensor([0.5, 3.0])
        assert torch.equal(*(model(state, sigma, conditions[0]) for state in states))
        everyone = sampled(model, model.network.condition(**given))
        far(everyone, results[0])


@KINDS
@pytest.mark.parametrize("cloud", [True, False])
@pytest.mark.parametrize("front", [True, False], ids=["front", "back"])
def test_padding_a_series_with_masked_dates_changes_nothing(config, cloud, front):
    """A series of two dates in a batch with one of four; the fillers may come first or last."""
    model, given, long = denoiser(config), series(1, 2, cloud=cloud), series(1, 4, seed=20, cloud=cloud)
    order = [2, 3, 0, 1] if front else [0, 1, 2, 3]

    def filled(key: str) -> Tensor:
        short = torch.cat([given[key], torch.full_like(long[key][:, :2], NAN)], dim=1)
        return torch.cat([short[:, order], long[key]])

    batch = {key: filled(key) for key in given}
    present = torch.tensor([[True, True, False, False], [True] * 4])
    present[0] = present[0, order]
    with torch.no_grad():
        alone, together = model.network.condition(**given), model.network.condition(**batch, present=present)
        sigma, state = torch.tensor([0.7]), draw(*together.mean.shape, seed=3)
        if config.composite:
            close(together.mean[:1], alone.mean)
            own = state[:1]
        else:
            own = state[:1, present[0]]
        close(model(state, sigma.expand(2), together)[:1], model(own, sigma, alone))


def test_all_overcast_series_is_not_anchored_to_a_filler():
    net, given = network(COMPOSITE), series(1, 2)
    given["cloudy"] += 1.2  # bright, as clouds are: a filler's zeros are darker
    given["cloud"] = torch.ones_like(given["cloud"])
    padded = {k: torch.cat([torch.full_like(v, NAN), v], dim=1) for k, v in given.items()}
    present = torch.tensor([[False, False, True, True]])
    with torch.no_grad():
        close(net.condition(**padded, present=present).mean, net.condition(**given).mean)


# ------------------------------------------------------------------------------------------------ once per scene


@KINDS
@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_condition_made_once_equals_condition_made_at_every_step(config, solver):
    model, given = denoiser(config), series(2, 3)
    with torch.no_grad():
        condition = model.network.condition(**given)
        cached = sampled(model, condition, steps=4, solver=solver)
        calls = []

        def afresh(x: Tensor, sigma: Tensor) -> Tensor:
            calls.append(1)
            return model(x, sigma, model.network.condition(**given))

        diffusion, mean = model.config, condition.mean
        again = sample(
            afresh,
            mean,
            generator_noise(tuple(mean.shape[1:]), [0, 1]),
            karras_sigmas(4, sigma_min=diffusion.sigma_min, sigma_max=diffusion.sigma_max),
            alpha=diffusion.alpha,
            initial=mean if config.composite else 0.0,
            solver=solver,
        )
    assert len(calls) == (4 if solver == "euler" else 7)
    assert torch.equal(cached, again)


# ------------------------------------------------------------------------------------------------ what is given


def test_reference_changes_the_composite_and_the_answer():
    net, given = network(COMPOSITE), series(1, 3)
    answers = [evaluate(net, {**given, "reference": torch.tensor([r])}) for r in (-1, 0, 1, 2)]
    for i in range(4):
        for j in range(i):
            far(answers[i], answers[j])


def test_untrained_composite_shows_the_reference_where_it_is_clear():
    torch.manual_seed(0)
    net, given = MTCDN(COMPOSITE), series(1, 3)
    given["cloud"] = torch.zeros_like(given["cloud"])
    given["cloud"][:, 1, :8] = 1.0
    condition = net.condition(**given, reference=torch.tensor([1]))
    weights = condition.weights[0]
    assert weights.shape == (4, 16, 24)
    torch.testing.assert_close(weights.sum(dim=0), torch.ones(16, 24))
    assert weights[1, 8:].min() > 0.8
    assert weights[1, :8].max() < 0.01
    assert condition.matched.flag.tolist() == [[0, 1, 0]]
    assert net.condition(**given).matched.flag.sum() == 0.5


def test_reference_is_not_read_by_the_papers_network():
    net, given = network(PAPER), series()
    assert torch.equal(evaluate(net, {**given, "reference": torch.tensor([1])}), evaluate(net, given))


@KINDS
def test_auxiliary_bands_missing_or_zero_is_the_same(config):
    net, given = network(config), series(2, 3)
    none = evaluate(net, {**given, "aux": None})
    assert torch.equal(none, evaluate(net, {**given, "aux": torch.zeros_like(given["aux"])}))
    far(none, evaluate(net, given))
    # One item of a batch may lack them.
    half = given["aux"].clone()
    half[1] = 0
    mixed = evaluate(net, {**given, "aux": half})
    close(mixed[:1], evaluate(net, given)[:1])
    close(mixed[1:], none[1:])


@KINDS
def test_content_of_a_missing_band_has_no_influence(config):
    net, given = network(config), series(1, 3)
    given["band_present"] = torch.tensor([[True, False, True]])
    state = draw(1, 1 if config.composite else 3, 3, 16, 24)
    results = []
    for content in (0.0, 7.0, NAN):
        given["cloudy"][:, :, 1] = content
        with torch.no_grad():
            results.append(net(state, torch.tensor([0.1]), net.condition(**given)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    given["cloudy"][:, :, 1] = 0.0
    present = {**given, "band_present": None}
    with torch.no_grad():
        far(net(state, torch.tensor([0.1]), net.condition(**present)), results[0])


@KINDS
@pytest.mark.parametrize("cloud", [True, False])
def test_content_of_a_pixel_without_data_has_no_influence(config, cloud):
    model, given = denoiser(config), series(2, 3, cloud=cloud)
    valid = draw(2, 3, 16, 24, seed=8) > -0.8
    valid[0, :, 3, 4:9] = False  # no date at all shows these
    results = []
    for content in (0.0, NAN, 5.0):
        for key in ("cloudy", "aux"):
            given[key] = torch.where(valid[:, :, None], given[key], content)
        if cloud:
            given["cloud"] = torch.where(valid, given["cloud"], content)
        with torch.no_grad():
            results.append(sampled(model, model.network.condition(**given, valid=valid)))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_keys_are_in_the_order_of_the_dates():
    net, given = network(PAPER), series(1, 3)
    changed = {k: v.clone() for k, v in given.items()}
    changed["cloudy"][:, 1] += 0.3
    with torch.no_grad():
        before, after = (net.condition(**g).features for g in (given, changed))
    for a, b in ((before.keys, after.keys), (before.values, after.values), (before.dates_fine, after.dates_fine)):
        assert [bool((a[:, t] != b[:, t]).any()) for t in range(3)] == [False, True, False]


def test_batch_items_do_not_mix():
    for config in (PAPER, COMPOSITE):
        net, given = network(config), series(3, 2)
        whole = evaluate(net, given)
        for item in range(3):
            close(evaluate(net, {k: v[item : item + 1] for k, v in given.items()}), whole[item : item + 1])


@KINDS
def test_noise_level_and_state_matter(config):
    net, given = network(config), series()
    base = evaluate(net, given)
    far(evaluate(net, given, c_noise=0.6), base)
    if config.composite:
        far(evaluate(net, given, seed=10), base)


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        (
            (3, 3, 8, 8),
            ShapeError,
            r"cloudy has 4 dimensions \(3, 3, 8, 8\); expected \(B, T, C, H, W\).*cloudy\[:, None",
        ),
        ((1, 0, 3, 8, 8), ShapeError, r"no date \(T = 0\); expected at least one"),
        ((1, 2, 4, 8, 8), BandError, r"has 4 bands; this network works on 3: B04, B03, B02\. Select"),
    ],
)
def test_wrong_shapes_say_so(shape, error, text):
    with pytest.raises(error, match=text):
        network(PAPER).condition(torch.zeros(shape))


@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        (
            (1, 2, 1, 8, 9),
            ShapeError,
            r"aux is \(1, 2, 1, 8, 9\) and cloudy \(1, 2, 3, 8, 8\); B, T, H and W must agree",
        ),
        ((1, 2, 2, 8, 8), BandError, r"aux has 2 bands; this network takes 1: B08\. Leave aux out"),
    ],
)
def test_wrong_aux_says_so(shape, error, text):
    with pytest.raises(error, match=text):
        network(PAPER).condition(torch.zeros(1, 2, 3, 8, 8), aux=torch.zeros(shape))


def test_cloud_estimate_needs_a_head():
    with pytest.raises(ConfigError, match="no cloud head; give cloud_mask, or build it with cloud_widths"):
        network(PAPER).cloud_estimate(
            torch.zeros(1, 1, 3, 4, 4), torch.ones(1, 1, 4, 4, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool)
        )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"blocks": (1,)}, "widths has 2 levels and blocks 1; give one per level"),
        ({"kernel": 4}, "kernel is 4; .* odd"),
        ({"head_width": 24}, "head_width 24 does not divide the last width 32"),
        ({"cloud_widths": (8, 8, 8)}, "cloud_widths has 3 levels; at most 2"),
        ({"composite": True}, "composite=True needs a cloud head"),
    ],
)
def test_impossible_networks_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        replace(PAPER, **changes)


# ------------------------------------------------------------------------------------------------ ablations, learning


@KINDS
@pytest.mark.parametrize("changes", [{"use_fusion": False}, {"use_hybrid": False}])
def test_ablations_run_are_smaller_and_differ(config, changes):
    smaller, given = network(replace(config, **changes)), series()
    assert count_parameters(smaller) < count_parameters(network(config))
    found = evaluate(smaller, given)
    assert found.isfinite().all()
    assert found.shape == (1, 3, 16, 24)
    # Still no order of dates.
    close(evaluate(smaller, permuted(given, [2, 0, 1])), found)


@KINDS
def test_gradients_reach_every_parameter(config):
    """One loss as in training: the denoised image, and with a cloud head its class scores."""
    model, given = denoiser(replace(config, date_input="days")), series(2, 3)
    model.train()
    given["aux"][1] = 0  # modality dropout, and a band that one sample lacks: their flags must learn too
    given["band_present"] = torch.tensor([[True, True, False], [True, True, True]])
    net = model.network
    condition = net.condition(**given, reference=torch.tensor([0, -1]))
    clear = draw(2, 3, 16, 24, seed=11)
    sigma = torch.tensor([0.1, 0.6])
    noised = model.process.noised(clear, condition.mean, sigma, draw(*condition.mean.shape, seed=12))
    loss = (model(noised, sigma, condition) - clear).square().mean()
    if net.cloud_head is not None:
        observed = torch.ones(2, 3, 16, 24, dtype=torch.bool)
        logits = net.cloud_logits(given["cloudy"], observed, given["band_present"])
        labels = torch.randint(0, 4, (2, 3, 16, 24), generator=torch.Generator().manual_seed(13))
        loss = loss + torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        cloud, reference = torch.full((2, 3, 16, 24), 0.2), torch.tensor([0, -1])
        present = given["band_present"]
        anchor, second = net.mask_refinement(given["cloudy"], observed, present, logits, cloud, reference)
        loss = loss + torch.nn.functional.cross_entropy(second, labels[torch.arange(2), anchor])
        loss = loss + condition.log_error.square().mean()
    loss.backward()
    silent = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_a_new_network_answers_zero():
    """The output starts at zero, so an untrained denoiser is c_skip times the mean of its state."""
    torch.manual_seed(0)
    net = MTCDN(PAPER)
    assert not evaluate(net, series()).any()


def test_paper_network_takes_the_other_dates_where_one_has_no_data():
    """Grey (0) at a pixel without data would pull the diffusion's average over the dates towards grey."""
    network = MTCDN(MTCDNConfig(widths=(16, 32), blocks=(1, 1), head_width=16, aux_bands=()))
    cloudy = torch.rand(1, 3, 3, 16, 16) - 1
    valid = torch.ones(1, 3, 16, 16, dtype=torch.bool)
    valid[0, 1, :, 8:] = False
    mean = network.condition(cloudy, valid=valid).mean
    torch.testing.assert_close(mean[0, 1, :, :, 8:], (cloudy[0, 0, :, :, 8:] + cloudy[0, 2, :, :, 8:]) / 2)
    torch.testing.assert_close(mean[0, 1, :, :, :8], cloudy[0, 1, :, :, :8])


def test_a_gap_of_a_date_is_that_date_with_the_mean_of_the_others():
    """The noise of all dates is in the state: the network removes that of a gap only if it sees it."""
    model = denoiser(PAPER)
    given = series(dates=3, cloud=False)
    valid = torch.ones(1, 3, 16, 24, dtype=torch.bool)
    valid[0, 1, 4:12, 6:18] = False
    filled = {**given, "cloudy": given["cloudy"].clone(), "aux": given["aux"].clone()}
    for key in ("cloudy", "aux"):
        filled[key][0, 1, :, 4:12, 6:18] = given[key][0, [0, 2], :, 4:12, 6:18].mean(dim=0)
    gap = model.network.condition(**given, valid=valid)
    whole = model.network.condition(**filled)
    state = draw(*gap.mean.shape, seed=3)
    level = torch.tensor([0.2])
    torch.testing.assert_close(model(state, level, gap), model(state, level, whole))
    state_of_gap = state.clone()
    state_of_gap[0, 1, :, 8, 12] += 1  # inside the gap
    network_alone = [model.network(x, level, gap)[0, :, 8, 12].detach() for x in (state, state_of_gap)]
    assert float((network_alone[0] - network_alone[1]).abs().max()) > 1e-4
