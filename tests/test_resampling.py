"""Resampling: which pixels may be replaced, how the guide decides, and the variants by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from sader.checkpoint import Checkpoint
from sader.cli.main import app
from sader.errors import ConfigError, ShapeError
from sader.evaluation.reproduce.setting import tiny_overrides
from sader.geo.scene.run import scene_remover
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.inference.tiling import Window
from sader.method.diffusion import generator_noise, karras_sigmas, sample
from sader.method.guides import LowPassGuide, MeanGuide
from sader.method.resampling import (
    Resampler,
    ResamplerConfig,
    cloud_cover,
    guide_view,
    guided_correction,
    mean_over_frames,
    outlier_mask,
    top_fraction,
)
from sader.model.blocks import to_model_range
from sader.models import build_model, get_preset
from sader.training.config import resolve

SETTINGS = [
    ResamplerConfig(),
    ResamplerConfig.named("paper"),
    ResamplerConfig.named("public_code", threshold=0.5),
    ResamplerConfig(criterion="top-fraction", fusion="band", fraction=0.25, guide_input="denoised"),
]


def random(*shape: int, seed: int = 0, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shaky(noised: Tensor, sigma: Tensor) -> Tensor:
    """A denoiser whose answer depends on its noise, unevenly over space and bands."""
    slope = torch.linspace(0.02, 0.2, noised.shape[-1]) * torch.linspace(1, 2, noised.shape[2])[:, None, None]
    level = sigma[:, None, None, None]
    return torch.tanh(noised.mean(dim=1) / (1 + level)) * 0.5 + slope * (noised[:, 0] / (1 + level)).sin()


class Constant:
    """A guide that answers with one given image, and remembers what it was asked."""

    def __init__(self, answer: Tensor) -> None:
        self.answer = answer
        self.asked: list[tuple[Tensor, Tensor]] = []

    def __call__(self, image: Tensor, missing: Tensor, *, mean: Tensor) -> Tensor:
        self.asked.append((image, missing))
        return self.answer.expand_as(image)


class Blend:
    """A guide in the style of the public code: input at visible pixels, something else at missing ones."""

    def __call__(self, image: Tensor, missing: Tensor, *, mean: Tensor) -> Tensor:
        return torch.where(missing, 0.7 * image.roll(1, dims=-1) - 0.1, image)


def correct(
    config: ResamplerConfig, guide, mean: Tensor, *, seed: int = 5, sigma: float = 2.0, denoise=shaky, **kwargs
):
    batch, frames, bands, height, width = mean.shape
    noise = generator_noise((frames, bands, height, width), [seed + b for b in range(batch)])
    denoised = denoise(mean + sigma * (mean + noise(0)), torch.full((batch,), sigma))
    resampler = Resampler(config, guide, **kwargs)
    result = resampler(denoise, denoised, mean=mean, sigma=sigma, alpha=1.0, step=1, noise=noise)
    assert result is not None
    return denoised, *result


@pytest.mark.parametrize("config", SETTINGS)
@pytest.mark.parametrize("guide", [None, LowPassGuide(), MeanGuide(), Constant(torch.zeros(()))])
def test_agreeing_candidates_change_no_bit(config: ResamplerConfig, guide) -> None:
    fixed = random(2, 3, 12, 10)
    before, fused, _ = correct(config, guide, random(2, 3, 3, 12, 10, seed=1), denoise=lambda x, s: fixed)
    assert torch.equal(before, fused)


@pytest.mark.parametrize("criterion", ["disagreement", "top-fraction"])
def test_differences_under_the_floor_are_agreement(criterion) -> None:
    previous, mean = random(1, 3, 12, 10), random(1, 3, 12, 10, seed=1)
    candidate = previous + 5e-4 * torch.sign(random(1, 3, 12, 10, seed=2))
    assert not outlier_mask(previous, candidate, mean, criterion=criterion, fraction=1.0).any()
    assert outlier_mask(previous, candidate, mean, criterion=criterion, fraction=1.0, floor=0.0).any()


@pytest.mark.parametrize("fusion", ["pixel", "band"])
def test_nearest_to_the_guide_wins_at_outliers_and_only_there(fusion) -> None:
    previous, candidate, guide = (random(2, 3, 9, 11, seed=s) for s in range(3))
    outliers = random(2, 1 if fusion == "pixel" else 3, 9, 11, seed=3) > 0
    fused = guided_correction(previous, candidate, guide, outliers, fusion=fusion)
    everywhere = outliers.expand_as(previous)
    assert torch.equal(fused[~everywhere], previous[~everywhere])
    near = torch.minimum((previous - guide).abs(), (candidate - guide).abs())
    if fusion == "band":
        assert torch.equal((fused - guide).abs()[everywhere], near[everywhere])
    else:
        sums = torch.minimum((previous - guide).abs().sum(1), (candidate - guide).abs().sum(1))
        assert torch.allclose((fused - guide).abs().sum(1)[outliers[:, 0]], sums[outliers[:, 0]])
    taken = fused != previous
    assert 0 < taken.float().mean() < 1


def test_pixel_fusion_never_mixes_candidates_and_band_fusion_does() -> None:
    mean = random(1, 2, 4, 24, 24, seed=7)
    mixed = {}
    for fusion in ("pixel", "band"):
        before, fused, state = correct(ResamplerConfig(fusion=fusion, skip_first=False), LowPassGuide(), mean)
        candidate = shaky(state, torch.full((1,), 2.0))
        taken = fused == candidate
        assert torch.equal(fused, torch.where(taken, candidate, before))
        mixed[fusion] = (taken.any(dim=1) & ~taken.all(dim=1)).sum()
        assert taken.any()
    assert mixed["pixel"] == 0
    assert mixed["band"] > 0


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("fusion", ["pixel", "band"])
def test_top_fraction_selects_exactly_that_many(fraction: float, fusion) -> None:
    previous, candidate, mean = (random(2, 3, 13, 17, seed=s) for s in range(3))
    mask = outlier_mask(
        previous, candidate, mean, criterion="top-fraction", fraction=fraction, fusion=fusion, floor=0.0
    )
    assert (mask.sum(dim=(-2, -1)) == round(fraction * 13 * 17)).all()
    if 0 < fraction < 1 and fusion == "band":
        score = (previous - mean).abs()
        assert score[mask].view(-1).min() > 0
        for b, c in ((0, 0), (1, 2)):
            assert score[b, c][mask[b, c]].min() >= score[b, c][~mask[b, c]].max()


def test_top_fraction_breaks_ties_in_reading_order_and_takes_one_share_per_sample() -> None:
    mask = top_fraction(torch.zeros(2, 1, 4, 5), torch.tensor([0.25, 0.5]))
    assert mask.flatten(1).sum(dim=1).tolist() == [5, 10]
    assert mask[0].flatten()[:5].all()


def test_cloud_cover_is_the_papers_fraction() -> None:
    mean = random(2, 3, 3, 16, 16, seed=2)
    guide = Constant(torch.zeros(()))
    correct(ResamplerConfig.named("paper"), guide, mean, cloud_cover=torch.tensor([0.5, 0.125]))
    assert guide.asked[0][1].sum(dim=(1, 2, 3)).tolist() == [128, 32]
    assert Resampler(ResamplerConfig.named("paper")).fraction == 0.3
    assert Resampler(replace(ResamplerConfig.named("paper"), fraction=0.4), cloud_cover=0.9).fraction == 0.4


def test_public_code_settings_equal_a_literal_transcription() -> None:
    """One resampling with T copies of everything, as the public code has them (docs/method.md#resampling)."""
    batch, dates, bands, height, width, sigma, alpha, tau = 1, 3, 3, 20, 18, 0.9, 1.0, 0.2
    mean = random(batch, dates, bands, height, width, seed=11)
    noise = generator_noise((dates, bands, height, width), [9])
    level = torch.full((batch,), sigma)
    first = shaky(mean + sigma * (alpha * mean + noise(0)), level)

    def min_max(x: Tensor, dims) -> Tensor:
        low, high = x.amin(dim=dims, keepdim=True), x.amax(dim=dims, keepdim=True)
        return (x - low) / (high - low + 1e-8)

    copies = first[:, None].repeat(1, dates, 1, 1, 1)
    shifted = copies + alpha * sigma * mean
    x = shifted + sigma * noise(1)
    second = shaky(x, level)[:, None].repeat(1, dates, 1, 1, 1)
    delta = min_max((copies - second).abs(), (-2, -1))
    total = min_max(delta.sum(dim=(1, 2)), (-2, -1))
    missing = (total > tau)[:, None]
    seen = ((shifted.mean(dim=1) + 1) / 2).clamp(0, 1)
    guide = (Blend()(2 * seen - 1, missing, mean=mean)).clamp(-1, 1)[:, None]
    take = (delta > tau) & ((second - guide).abs() < (copies - guide).abs())
    fused = torch.where(take, second, copies)[:, 0]

    config = ResamplerConfig.named("public_code")
    result = Resampler(config, Blend())(shaky, first, mean=mean, sigma=sigma, alpha=alpha, step=1, noise=noise)
    assert result is not None
    assert take.any()
    assert missing.any()
    assert torch.allclose(result[0], fused, atol=1e-6)
    assert torch.allclose(result[1], x, atol=1e-6)


def algorithm_1(denoise, mean: Tensor, noise, sigmas, *, resamplings: int, alpha: float, share: float, guide) -> Tensor:
    """The paper's Algorithm 1, line by line, for one series: `share` is T_h; every x_t is kept for each date."""
    x = sigmas[0] * (alpha * mean + noise(0))  # line 1
    average = mean.mean(dim=1)
    for i in range(len(sigmas) - 1):
        sigma = float(sigmas[i])
        level = torch.full((len(mean),), sigma)
        fused = denoise(x, level)  # line 3
        previous = fused
        for j in range(1, resamplings + 1):
            shifted = fused[:, None] + alpha * sigma * mean  # line 6
            x = shifted + sigma * noise(1 + 64 * i + j)
            candidate = denoise(x, level)  # line 7
            deviation = (previous - average).abs().sum(dim=1)
            count = round(share * deviation[0].numel())
            top = torch.zeros(deviation[0].numel(), dtype=torch.bool)
            top[deviation[0].flatten().argsort(descending=True, stable=True)[:count]] = True  # line 8
            top = top.view(1, 1, *deviation.shape[1:])
            image = guide(shifted.mean(dim=1).clamp(-1, 1), top, mean=average).clamp(-1, 1)
            nearer = (candidate - image).abs().sum(1, True) < (previous - image).abs().sum(1, True)  # line 9
            fused = torch.where(top & nearer, candidate, previous)  # line 11
            previous = candidate
        slope = (x - fused[:, None]) / sigma  # lines 13, 14
        x = x + (float(sigmas[i + 1]) - sigma) * slope
    return x.mean(dim=1)  # line 16


@pytest.mark.parametrize("resamplings", [1, 2, 3])
def test_the_paper_variant_is_algorithm_1_line_by_line(resamplings: int) -> None:
    mean = random(1, 3, 3, 18, 15, seed=21)
    noise = generator_noise((3, 3, 18, 15), [4])
    sigmas = karras_sigmas(4, sigma_min=0.001, sigma_max=40)
    share = 0.35
    literal = algorithm_1(shaky, mean, noise, sigmas, resamplings=resamplings, alpha=1.0, share=share, guide=Blend())
    config = replace(ResamplerConfig.named("paper"), steps=resamplings)
    resampler = Resampler(config, Blend(), cloud_cover=share)
    found = sample(shaky, mean, noise, sigmas, alpha=1.0, correction=resampler)
    assert torch.allclose(found, literal, atol=1e-5)
    for name in ("default", "public_code"):
        other = Resampler(replace(ResamplerConfig.named(name), steps=resamplings), Blend(), cloud_cover=share)
        assert not torch.allclose(sample(shaky, mean, noise, sigmas, alpha=1.0, correction=other), literal, atol=1e-3)


@pytest.fixture(scope="module")
def paper_remover() -> CloudRemover:
    """The preset sen2_mtc_new at a tiny size, with random weights in all layers."""
    config = resolve("sen2_mtc_new", tiny_overrides("sen2_mtc_new")).model
    torch.manual_seed(3)
    model = build_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return CloudRemover(Checkpoint(model, config, {}), device="cpu", options=RemoverOptions(guide="lowpass"))


@pytest.mark.parametrize("masks", [True, False])
def test_a_remover_of_a_paper_preset_runs_algorithm_1(paper_remover: CloudRemover, masks: bool) -> None:
    cloudy = 0.5 + random(3, 3, 32, 32, seed=30, scale=0.15)
    aux = 0.5 + random(3, 1, 32, 32, seed=31, scale=0.15)
    cloud = random(3, 32, 32, seed=32) > 0.3
    share = float(cloud.float().mean()) if masks else 0.3
    given = {"aux": aux.numpy(), "steps": "4+2", "seed": 7, "cloud_mask": cloud.numpy() if masks else None}
    found = paper_remover.predict(cloudy.numpy(), **given)

    denoiser = paper_remover.denoiser
    with torch.inference_mode():
        condition = denoiser.network.condition(to_model_range(cloudy)[None], aux=to_model_range(aux)[None])
        source = paper_remover.noise_field(7, 4).of([Window(0, 0, 32, 32)], torch.device("cpu"))
        literal = algorithm_1(
            lambda x, sigma: denoiser(x, sigma, condition),
            condition.mean,
            lambda draw: source(draw, 9).view(condition.mean.shape),
            karras_sigmas(4, sigma_min=0.001, sigma_max=40),
            resamplings=2,
            alpha=1.0,
            share=share,
            guide=LowPassGuide(),
        )
    expected = ((literal[0] + 1) / 2).clamp(min=0).numpy()
    assert np.abs(found.clear - expected).max() < 1e-4
    for name in ("default", "public_code"):
        other = paper_remover.with_options(resampling=name).predict(cloudy.numpy(), **given)
        assert np.abs(other.clear - expected).max() > 1e-3


def test_resampling_is_chosen_by_name_everywhere(monkeypatch) -> None:
    asked = {}

    def remember(request, **_):
        asked["options"] = request.options
        raise ConfigError("enough")

    monkeypatch.setattr("sader.geo.remove.run_remove", remember)
    command = ["remove", "a.tif", "--resampling", "paper", "--guide", "mae", "--guide-weights", "guide.safetensors"]
    assert CliRunner().invoke(app, command).exit_code != 0
    made = scene_remover(CloudRemover.from_preset("small", device="cpu"), asked["options"]).options
    assert (made.resampling, made.guide, made.guide_weights) == ("paper", "mae", "guide.safetensors")
    for command in ("evaluate", "compare"):
        result = CliRunner().invoke(app, [command, "sader-s2-rgbn", "--data", ".", "--resampling", "papers"])
        assert "did you mean paper" in str(result.exception) + result.output
    with pytest.raises(ConfigError, match="did you mean lowpass"):
        RemoverOptions(guide="lowpas")
    for name in ("sen2_mtc_new", "sen12mscrts_ea"):
        assert get_preset(name).sampling.resampler() == ResamplerConfig.named("paper", threshold=0.2)


def test_without_a_guide_the_new_candidate_is_always_taken() -> None:
    mean = random(1, 3, 3, 12, 12, seed=6)
    for config in SETTINGS:
        before, fused, state = correct(config, None, mean)
        assert torch.equal(fused, shaky(state, torch.full((1,), 2.0)))
        assert (fused != before).all()


def test_cloud_cover_is_the_mean_of_known_masks() -> None:
    cloud = torch.zeros(3, 2, 4, 4)
    cloud[0, 0, :2] = 1.0
    cloud[1, 1] = torch.nan  # one date unknown
    cloud[1, 0, :1] = 1.0
    cloud[2] = torch.nan
    valid = torch.ones(3, 2, 4, 4, dtype=torch.bool)
    assert cloud_cover(cloud, valid).tolist() == pytest.approx([0.25, 0.25, 0.3])
    valid[0, 1] = False
    assert cloud_cover(cloud, valid)[0] == 0.5


@pytest.mark.parametrize("config", SETTINGS)
def test_same_seed_same_bits_and_another_seed_differs(config: ResamplerConfig) -> None:
    mean = random(1, 3, 3, 17, 19, seed=3)
    runs = [correct(config, LowPassGuide(), mean, seed=s)[1] for s in (5, 5, 6)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("config", SETTINGS)
@pytest.mark.parametrize("guide", [None, LowPassGuide(), MeanGuide()])
def test_batch_of_two_equals_two_batches_of_one(config: ResamplerConfig, guide) -> None:
    mean = random(2, 3, 3, 17, 19, seed=4) * torch.tensor([1.0, 0.2])[:, None, None, None, None]
    cover = torch.tensor([0.2, 0.6])
    _, both, state = correct(config, guide, mean, cloud_cover=cover)
    for b in range(2):
        _, one, one_state = correct(config, guide, mean[b : b + 1], seed=5 + b, cloud_cover=cover[b : b + 1])
        assert torch.equal(both[b : b + 1], one)
        assert torch.equal(state[b : b + 1], one_state)


def test_absent_frames_have_no_influence() -> None:
    mean = random(2, 2, 3, 8, 8)
    padded = torch.cat([mean, torch.full((2, 3, 3, 8, 8), torch.nan)], dim=1)
    present = torch.tensor([[True, True, False, False, False]] * 2)
    assert torch.equal(mean_over_frames(padded, present), mean_over_frames(mean))
    assert torch.allclose(mean_over_frames(mean), mean.mean(dim=1))
    with pytest.raises(ShapeError, match=r"present has shape \(2, 3\); expected \(B, S\) = \(2, 5\)"):
        mean_over_frames(padded, present[:, :3])


def test_absent_frames_do_not_reach_the_guide() -> None:
    mean = random(1, 3, 3, 16, 16)
    other = mean.clone()
    other[:, 2] = 0.9
    present = torch.tensor([[True, True, False]])

    def two_dates(x: Tensor, sigma: Tensor) -> Tensor:
        return shaky(x[:, :2], sigma)

    for config in SETTINGS:
        runs = [correct(config, LowPassGuide(), m, denoise=two_dates, present=present)[1] for m in (mean, other)]
        assert torch.equal(*runs)


def test_guide_view_is_in_range_where_the_public_code_saturates() -> None:
    land, mu = torch.full((1, 3, 2, 2), -0.7), torch.full((1, 3, 2, 2), -0.8)
    assert torch.allclose(guide_view(land, mu, noise_mean=4.86), torch.full_like(land, (-0.7 - 0.8 * 4.86) / 5.86))
    assert torch.equal(guide_view(land, mu, noise_mean=4.86, kind="denoised"), land)
    assert torch.equal(guide_view(land, mu, noise_mean=4.86, kind="reference-code"), torch.full_like(land, -1.0))


@pytest.mark.parametrize(("config", "calls"), [(ResamplerConfig(), 7), (ResamplerConfig.named("paper"), 8)])
def test_the_sampler_takes_it(config: ResamplerConfig, calls: int) -> None:
    mean = random(2, 3, 3, 16, 12, seed=8)
    sigmas = karras_sigmas(4, sigma_min=0.001, sigma_max=40)
    count = 0

    def counted(x: Tensor, sigma: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return shaky(x, sigma)

    resampler = Resampler(config, LowPassGuide())
    both = sample(counted, mean, generator_noise((3, 3, 16, 12), [1, 2]), sigmas, alpha=1.0, correction=resampler)
    assert count == calls == 4 + config.evaluations(4)
    alone = sample(shaky, mean[1:], generator_noise((3, 3, 16, 12), [2]), sigmas, alpha=1.0, correction=resampler)
    assert torch.equal(both[1:], alone)
    plain = sample(shaky, mean, generator_noise((3, 3, 16, 12), [1, 2]), sigmas, alpha=1.0)
    assert not torch.equal(both, plain)


def test_several_resamplings_use_their_own_draws() -> None:
    mean = random(1, 2, 3, 8, 8)
    drawn: list[int] = []

    def noise(j: int) -> Tensor:
        drawn.append(j)
        return random(1, 2, 3, 8, 8, seed=j, scale=1.0)

    resampler = Resampler(ResamplerConfig(steps=3, threshold=0.0), None)
    result = resampler(shaky, random(1, 3, 8, 8), mean=mean, sigma=1.0, alpha=1.0, step=2, noise=noise)
    assert drawn == [1, 2, 3]
    assert result is not None
    assert resampler(shaky, mean[:, 0], mean=mean, sigma=1.0, alpha=1.0, step=0, noise=noise) is None


def test_a_better_informed_guide_gives_a_better_image() -> None:
    """Two noisy estimates of a known truth: with the truth as guide every replaced pixel gets nearer to it."""
    truth = random(1, 3, 32, 32, scale=0.2)

    def noisy(x: Tensor, sigma: Tensor) -> Tensor:
        return truth + 0.1 * x.mean(dim=1)

    config = ResamplerConfig(threshold=0.0, floor=0.0, fusion="band")
    before, fused, _ = correct(config, Constant(truth), random(1, 2, 3, 32, 32, seed=1), denoise=noisy)
    assert ((fused - truth).abs() <= (before - truth).abs()).all()
    assert (fused - truth).abs().mean() < 0.8 * (before - truth).abs().mean()


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"criterion": "disagrement"}, "did you mean disagreement"),
        ({"fusion": "both"}, "known: band, pixel"),
        ({"guide_input": "denoise"}, "did you mean denoised"),
        ({"steps": 0}, "expected 1 to 63"),
        ({"threshold": 1.5}, "expected 0 to 1"),
        ({"fraction": -0.1}, "expected 0 to 1, or None"),
        ({"floor": -1.0}, "expected 0 or more"),
        ({"previous": "candidates"}, "did you mean candidate"),
    ],
)
def test_bad_settings_say_what_is_wanted(kwargs, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ResamplerConfig(**kwargs)
    with pytest.raises(ConfigError, match="did you mean public_code"):
        ResamplerConfig.named("public-code")
