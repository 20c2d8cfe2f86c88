"""The cloud-aware loss, step by step by hand, against a literal transcription, and what must not influence it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sader.errors import BandError, ConfigError, ShapeError
from sader.method.losses import CloudAwareLoss, CloudAwareLossConfig, cloud_thickness, to_yuv


def batch(
    seed: int = 0, *, b: int = 2, t: int = 3, c: int = 3, h: int = 6, w: int = 9
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return denoised, clear, cloudy and weight with clouds in a corner."""
    generator = torch.Generator().manual_seed(seed)
    clear = -0.9 + 0.3 * torch.rand(b, c, h, w, generator=generator)
    cloudy = clear[:, None] + 0.02 * torch.rand(b, t, c, h, w, generator=generator)
    cloudy[:, :, :, :3, :4] += torch.rand(b, t, 1, 3, 4, generator=generator)
    denoised = clear + 0.1 * torch.randn(clear.shape, generator=generator)
    return denoised, clear, cloudy, 1 + torch.rand(b, generator=generator)


# ---- thickness -------------------------------------------------------------------------------------------------------


def test_thickness_by_hand() -> None:
    # One band, four pixels; 1 - clear = 2, 1, 2, 1 and |cloudy - clear| = 0, .5, 1, 1 -> ratios 0, .5, .5, 1.
    clear = torch.tensor([-1.0, 0.0, -1.0, 0.0]).view(1, 1, 1, 4)
    first = torch.tensor([-1.0, 0.5, 0.0, 1.0]).view(1, 1, 1, 4)
    # Second date: ratios .25, .5, 0, .25 -> scaled by its own range .5, 1, 0, .5.
    second = torch.tensor([-0.5, 0.5, -1.0, 0.25]).view(1, 1, 1, 4)
    cloudy = torch.stack([first, second], dim=1)
    expected = torch.tensor([(0 + 0.5) / 2, (0.5 + 1) / 2, (0.5 + 0) / 2, (1 + 0.5) / 2]).view(1, 1, 1, 4)
    torch.testing.assert_close(cloud_thickness(cloudy, clear, robust=False), expected)


def test_thickness_is_one_map_for_all_bands() -> None:
    _, clear, cloudy, _ = batch(1)
    found = cloud_thickness(cloudy, clear, robust=False)
    ratio = ((cloudy - clear[:, None]).abs() / (1 - clear[:, None])).mean(2)  # alpha_c of Eq. (16), (B, T, H, W)
    low, high = ratio.amin((2, 3), keepdim=True), ratio.amax((2, 3), keepdim=True)
    torch.testing.assert_close(found, ((ratio - low) / (high - low)).mean(1, keepdim=True))
    strength, free = CloudAwareLoss().pixel_weights(cloudy, clear)
    assert strength.shape == free.shape == (2, 1, 6, 9)


def test_thickness_is_scaled_per_sample_date_and_band() -> None:
    _, clear, cloudy, _ = batch(1)
    together = cloud_thickness(cloudy, clear, masks="band")
    for b in range(2):
        for c in range(3):
            dates = [
                cloud_thickness(cloudy[b : b + 1, t : t + 1, c : c + 1], clear[b : b + 1, c : c + 1]) for t in range(3)
            ]
            torch.testing.assert_close(together[b, c], torch.stack(dates).mean(0)[0, 0])


def test_a_bright_pixel_does_not_squash_the_rest() -> None:
    _, clear, cloudy, _ = batch(2, h=20, w=20)
    plain = cloud_thickness(cloudy, clear)
    bright = clear.clone()
    bright[:, :, 19, 19] = 0.9999
    shown = cloud_thickness(cloudy, bright)
    torch.testing.assert_close(shown[..., :3, :4], plain[..., :3, :4], atol=0.1, rtol=0)
    assert shown.max() <= 1
    squashed = cloud_thickness(cloudy, bright, robust=False)
    assert squashed[..., :3, :4].max() < 0.01  # what the public code does


def test_the_denominator_is_protected_by_hand() -> None:
    # Half the pixels nearly white: no percentile helps, the floor of the denominator does: .2 / .05 = 4, not 200.
    clear = torch.tensor([0.0, 0.0, 0.999, 0.999]).view(1, 1, 1, 4)
    cloudy = clear[:, None] + torch.tensor([0.0, 0.5, -0.2, -0.2])
    torch.testing.assert_close(cloud_thickness(cloudy, clear).flatten(), torch.tensor([0, 0.125, 1, 1]))
    assert cloud_thickness(cloudy, clear, robust=False).flatten()[1] < 0.003


def test_robust_maximum_is_the_99th_percentile_with_or_without_pixels() -> None:
    generator = torch.Generator().manual_seed(3)
    clear = torch.full((1, 1, 10, 20), -1.0)
    cloudy = clear[:, None] + torch.rand(1, 1, 1, 10, 20, generator=generator)
    ratio = ((cloudy - clear[:, None]) / 2).flatten()
    low, high = ratio.min(), torch.from_numpy(np.quantile(ratio.numpy(), 0.99, method="lower", keepdims=True))
    expected = ((ratio - low) / (high - low + 1e-8)).clamp(0, 1).view(1, 1, 10, 20)
    torch.testing.assert_close(cloud_thickness(cloudy, clear), expected)
    everything = torch.ones(1, 10, 20, dtype=torch.bool)
    torch.testing.assert_close(cloud_thickness(cloudy, clear, pixels=everything), expected)


@pytest.mark.parametrize("robust", [True, False])
def test_missing_dates_have_no_influence(robust: bool) -> None:
    denoised, clear, cloudy, weight = batch(4)
    present = torch.tensor([[True, True, False], [True, True, False]])
    garbage = cloudy.clone()
    garbage[:, 2] = torch.nan
    loss = CloudAwareLoss(CloudAwareLossConfig(robust=robust))
    for terms, expected in zip(
        loss(denoised, clear, garbage, weight, present=present),
        loss(denoised, clear, cloudy[:, :2], weight),
        strict=True,
    ):
        torch.testing.assert_close(terms, expected, atol=0, rtol=0)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert (cloud_thickness(cloudy, clear, nothing, robust=robust) == 0).all()


# ---- the terms -------------------------------------------------------------------------------------------------------


def hand_case() -> tuple[Tensor, Tensor, Tensor]:
    """Return denoised, clear, cloudy of one date whose thickness is 0, .04, .5, 1 in each of three bands."""
    clear = torch.zeros(1, 3, 1, 4)
    cloudy = torch.tensor([0.0, 0.04, 0.5, 1.0]).expand(1, 1, 3, 1, 4)
    denoised = clear + torch.tensor([0.1, 0.2, 0.3, 0.4])
    return denoised, clear, cloudy


def test_every_term_by_hand() -> None:
    denoised, clear, cloudy = hand_case()
    weight = torch.tensor([2.0])
    plain = CloudAwareLossConfig(robust=False)
    linear = CloudAwareLoss(plain)(denoised, clear, cloudy, weight)
    assert linear.cloud.item() == pytest.approx(2 * 3 * (0.5 * 0.09 + 1 * 0.16) / 4)
    assert linear.clear.item() == pytest.approx(2 * 1 * (0.01 + 0.04) / 4)
    # A grey difference d changes Y by d and neither U nor V: the mean over three channels is d^2 / 3.
    assert linear.brightness.item() == pytest.approx(2 * 2 * (0.01 + 0.04 + 0.09 + 0.16) / 4 / 3)
    assert linear.total.item() == pytest.approx((linear.cloud + linear.clear + linear.brightness).item())

    def strength(thickness: float) -> float:
        return (1 / (1 + math.exp(-thickness))) / (1 / (1 + math.exp(-1)))

    code = CloudAwareLoss(replace(plain, weight_form="sigmoid"))(denoised, clear, cloudy, weight)
    assert code.cloud.item() == pytest.approx(2 * 3 * (strength(0.5) * 0.09 + strength(1) * 0.16) / 4)
    absolute = CloudAwareLoss(replace(plain, norm="l1"))(denoised, clear, cloudy, weight)
    assert absolute.clear.item() == pytest.approx(2 * 1 * (0.1 + 0.2) / 4)


def test_sigmoid_weights_are_nearly_constant() -> None:
    clear = torch.zeros(1, 1, 1, 3)
    cloudy = torch.tensor([0.0, 0.0501, 1.0]).expand(1, 3, 1, 1, 3)
    config = CloudAwareLossConfig(robust=False, weight_form="sigmoid")
    strength, free = CloudAwareLoss(config).pixel_weights(cloudy, clear)
    torch.testing.assert_close(strength.flatten(), torch.tensor([0.0, 0.735, 1.303]), atol=1e-3, rtol=0)
    assert free.flatten().tolist() == [1, 0, 0]


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_public_code_equals_a_literal_transcription(norm: str) -> None:
    denoised, clear, cloudy, weight = batch(5, c=13)
    y, mu, yhat = clear.double(), cloudy.double(), denoised.double()
    total = 0.0
    for b in range(2):
        r = torch.zeros(3, 13, 6, 9, dtype=torch.float64)
        for t in range(3):
            for c in range(13):
                plane = (mu[b, t, c] - y[b, c]).abs() / (1 - y[b, c] + 1e-8)
                r[t, c] = (plane - plane.min()) / (plane.max() - plane.min() + 1e-8)
        a = r.mean(0)
        m_a = torch.where(a > 1 - 0.999, torch.sigmoid(3 * a) / torch.sigmoid(torch.tensor(1.0).double()), 0.0)
        m_u = torch.where(1 - a > 0.999, 1.0, 0.0)
        power = 2 if norm == "l2" else 1
        error = (yhat[b] - y[b]).abs() ** power

        def yuv(x: Tensor) -> Tensor:
            red, green, blue = x[3], x[2], x[1]
            luma = 0.299 * red + 0.587 * green + 0.114 * blue
            return torch.stack([luma, 0.492 * (blue - luma), 0.877 * (red - luma)])

        colour = (yuv(yhat[b]) - yuv(y[b])).abs() ** power
        w = weight[b].double()
        total += ((w * (3 * m_a * error + 2 * m_u * error)).mean() + (w * 1 * colour).mean()).item() / 2
    config = replace(CloudAwareLossConfig.public_code(), norm=norm)
    assert CloudAwareLoss(config, rgb=(3, 2, 1))(denoised, clear, cloudy, weight).total.item() == pytest.approx(
        total, rel=1e-5
    )


def test_loss_configs_are_the_published_numbers() -> None:
    def numbers(config: CloudAwareLossConfig) -> tuple[float, float, float, float]:
        return config.cloud, config.clear, config.brightness, config.threshold

    code = CloudAwareLossConfig.public_code()
    assert numbers(CloudAwareLossConfig()) == (3, 1, 2, 0.95)
    assert (CloudAwareLossConfig().weight_form, CloudAwareLossConfig().masks) == ("linear", "pixel")
    assert numbers(code) == (3, 2, 1, 0.999)
    assert (code.weight_form, code.masks, code.robust) == ("sigmoid", "band", False)


@pytest.mark.parametrize("term", ["cloud", "clear", "brightness"])
def test_each_term_switches_off(term: str) -> None:
    inputs = batch(6)
    full = CloudAwareLoss(CloudAwareLossConfig())(*inputs)
    without = CloudAwareLoss(replace(CloudAwareLossConfig(), **{term: 0.0}))(*inputs)
    assert getattr(without, term).item() == 0
    assert getattr(full, term).item() > 0
    torch.testing.assert_close(without.total, full.total - getattr(full, term))


def test_brightness_off_needs_no_rgb() -> None:
    denoised, clear, cloudy, weight = batch(7, c=2)
    CloudAwareLoss(CloudAwareLossConfig(brightness=0))(denoised, clear, cloudy, weight)
    with pytest.raises(BandError, match="2 bands"):
        CloudAwareLoss()(denoised, clear, cloudy, weight)


def test_yuv_of_pure_colours() -> None:
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    torch.testing.assert_close(to_yuv(red).flatten(), torch.tensor([0.299, 0.492 * -0.299, 0.877 * 0.701]))
    blue = torch.tensor([0.0, 0.0, 1.0]).view(1, 3, 1, 1)
    torch.testing.assert_close(to_yuv(blue).flatten(), torch.tensor([0.114, 0.492 * 0.886, 0.877 * -0.114]))
    thirteen = torch.randn(2, 13, 4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(to_yuv(thirteen, rgb=(3, 2, 1)), to_yuv(thirteen[:, [3, 2, 1]]))


# ---- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [CloudAwareLossConfig(), CloudAwareLossConfig(robust=False), CloudAwareLossConfig(masks="band")]
)
def test_pixels_outside_have_no_influence(config: CloudAwareLossConfig) -> None:
    denoised, clear, cloudy, weight = batch(8)
    pixels = torch.zeros(2, 6, 9, dtype=torch.bool)
    pixels[:, :4, 1:8] = True
    loss = CloudAwareLoss(config)
    expected = loss(denoised[..., :4, 1:8], clear[..., :4, 1:8], cloudy[..., :4, 1:8], weight)
    inside = pixels[:, None]
    dirty = denoised.where(inside, 7.0).requires_grad_()
    terms = loss(dirty, clear.where(inside, torch.nan), cloudy.where(inside[:, None], torch.nan), weight, pixels=pixels)
    for value, wanted in zip(terms, expected, strict=True):
        torch.testing.assert_close(value, wanted)
    terms.total.backward()
    assert dirty.grad is not None
    assert dirty.grad.isfinite().all()
    assert (dirty.grad.masked_select(~inside.expand_as(dirty)) == 0).all()
    assert (dirty.grad.masked_select(inside.expand_as(dirty)) != 0).any()


def test_a_sample_without_scored_pixels_adds_nothing() -> None:
    denoised, clear, cloudy, weight = batch(9)
    pixels = torch.ones(2, 6, 9, dtype=torch.bool)
    pixels[1] = False
    terms = CloudAwareLoss()(denoised, clear, cloudy, weight, pixels=pixels)
    alone = CloudAwareLoss()(denoised[:1], clear[:1], cloudy[:1], weight[:1])
    torch.testing.assert_close(terms.total, alone.total / 2)


def test_gradient_flows_to_the_prediction_only_and_points_to_the_target() -> None:
    denoised, clear, cloudy, weight = batch(10)
    inputs = [x.clone().requires_grad_() for x in (denoised, clear, cloudy)]
    kept = [x.detach().clone() for x in inputs]
    CloudAwareLoss()(*inputs, weight).total.backward()
    assert inputs[2].grad is None
    assert inputs[0].grad is not None
    direction = clear - denoised
    assert (inputs[0].grad * direction).sum() < 0
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True))
    assert CloudAwareLoss()(clear, clear, cloudy, weight).total.item() == 0


def test_the_order_of_dates_does_not_matter() -> None:
    denoised, clear, cloudy, weight = batch(11)
    a = CloudAwareLoss()(denoised, clear, cloudy, weight).total
    torch.testing.assert_close(a, CloudAwareLoss()(denoised, clear, cloudy[:, [2, 0, 1]], weight).total)


def test_bad_input_is_named() -> None:
    denoised, clear, cloudy, weight = batch(12)
    with pytest.raises(ShapeError, match=r"\(B, T, C, H, W\)"):
        cloud_thickness(cloudy[:, 0], clear)
    with pytest.raises(ShapeError, match="weight"):
        CloudAwareLoss()(denoised, clear, cloudy, weight[:1])
    with pytest.raises(ShapeError, match="present"):
        cloud_thickness(cloudy, clear, torch.ones(2, 4, dtype=torch.bool))
    for wrong in ({"cloud": -1.0}, {"threshold": 1.0}, {"norm": "huber"}, {"weight_form": "step"}, {"masks": "all"}):
        with pytest.raises(ConfigError, match="expected"):
            CloudAwareLossConfig(**wrong)  # type: ignore[arg-type]
