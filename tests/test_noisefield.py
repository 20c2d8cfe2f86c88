"""Noise that belongs to a place of the scene: not to a tile, a batch, a number of bands or a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sader.inference.noise import NoiseField, sample_seeds
from sader.inference.remover import CloudRemover
from sader.inference.tiling import Window

EDGE = 2**31 - 40
"""Where 32-bit arithmetic with places would go wrong."""


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(
    "window", [Window(0, 0, 5, 7), Window(60, 62, 9, 4), Window(17, 100, 111, 30), Window(128, 0, 64, 64)]
)
def test_noise_belongs_to_the_place_not_to_the_window(window, balanced):
    field = NoiseField(3, balanced=balanced)
    whole = field.window(Window(0, 0, 200, 150), channels=3, draw=2)
    part = field.window(window, channels=3, draw=2)
    assert torch.equal(part, whole[(slice(None), *window.slices)])


@pytest.mark.parametrize("balanced", [False, True])
def test_a_batch_of_windows_is_the_windows(balanced):
    windows = [Window(5, 9, 20, 33), Window(70, 0, 20, 33), Window(EDGE, EDGE, 20, 33)]
    field = NoiseField(8, balanced=balanced)
    together = field.windows(windows, channels=3, draw=1)
    assert together.shape == (3, 3, 20, 33)
    for one, window in zip(together, windows, strict=True):
        assert torch.equal(one, field.window(window, channels=3, draw=1))


def test_balanced_noise_is_the_same_grain_without_slow_changes():
    window = Window(3, 5, 256, 256)
    white = NoiseField(6).window(window, channels=2, draw=0)
    noise = NoiseField(6, balanced=True).window(window, channels=2, draw=0)
    blocks = noise[:, 5:-3, 3:-5].unfold(1, 8, 8).unfold(2, 8, 8)  # those of the scene, not of the window
    assert blocks.mean(dim=(-2, -1)).abs().max() < 1e-6
    assert noise.std() == pytest.approx(1, abs=0.01)
    assert np.corrcoef(noise.ravel(), white.ravel())[0, 1] > 0.98
    slow = [torch.nn.functional.avg_pool2d(one[None], 64)[0].std() for one in (white, noise)]
    assert slow[1] < 0.5 * slow[0]


@pytest.mark.parametrize(("steps", "balanced"), [(1, True), (4, False)])
def test_only_one_step_from_a_composite_takes_balanced_noise(steps, balanced):
    assert CloudRemover.from_preset("small", device="cpu").noise_field(0, steps).balanced == balanced
    assert not CloudRemover.from_preset("pix2pix", device="cpu").noise_field(0, steps).balanced


def test_noise_differs_by_seed_and_draw_and_place_and_channel():
    window = Window(0, 0, 64, 64)
    base = NoiseField(0).window(window, channels=2, draw=0)
    others = {
        "seed": NoiseField(1).window(window, channels=2, draw=0),
        "draw": NoiseField(0).window(window, channels=2, draw=1),
        "row": NoiseField(0).window(Window(64, 0, 64, 64), channels=2, draw=0),
        "column": NoiseField(0).window(Window(0, 64, 64, 64), channels=2, draw=0),
        "turned": base.transpose(1, 2),
        "channel": base.flip(0),
        "far away": NoiseField(0).window(Window(EDGE, EDGE, 64, 64), channels=2, draw=0),
        "large seed": NoiseField(2**40).window(window, channels=2, draw=0),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.05, name
    assert torch.equal(base, NoiseField(0).window(window, channels=2, draw=0))


def test_first_channels_do_not_depend_on_how_many_there_are():
    window = Window(30, 40, 50, 60)
    few, many = (NoiseField(9).window(window, channels=c, draw=1) for c in (3, 13))
    assert torch.equal(few, many[:3])


def test_noise_is_standard_normal_and_white():
    noise = NoiseField(5).window(Window(7, 1000, 512, 512), channels=3, draw=0).double()
    assert abs(noise.mean()) < 0.005
    assert abs(noise.std() - 1) < 0.005
    assert abs((noise**3).mean()) < 0.02
    assert abs((noise**4).mean() - 3) < 0.05
    assert noise.abs().max() < 5.8
    assert (noise.abs() > 4).any()
    for values in (noise, noise.square() - 1, noise.sign()):
        for step in (1, 2, 8, 64):
            assert abs((values[:, step:] * values[:, :-step]).mean()) < 0.02
            assert abs((values[:, :, step:] * values[:, :, :-step]).mean()) < 0.02
        assert abs((values[1:] * values[:-1]).mean()) < 0.02
    for axis in (1, 2):  # no line is brighter or rougher than chance has it
        assert noise.mean(axis).std() * 512**0.5 == pytest.approx(1, abs=0.1)
        assert noise.square().mean(axis).std() * (512 / 2) ** 0.5 == pytest.approx(1, abs=0.12)
    spectrum = torch.fft.fft2(noise).abs().square() / 512**2
    assert spectrum.mean() == pytest.approx(1, abs=0.01)
    assert spectrum.max() < 20  # of 786432 exponential values: about 14


def test_seeds_of_samples_begin_with_the_given_one_and_do_not_meet():
    assert sample_seeds(5, 1) == [5]
    assert sample_seeds(5, 3)[:2] == sample_seeds(5, 2)
    assert len(set(sample_seeds(0, 4)) | set(sample_seeds(1, 4))) == 8


@pytest.mark.gpu
def test_a_gpu_makes_the_same_noise():
    windows = [Window(5, 9, 40, 33), Window(EDGE, 7, 40, 33)]
    here, there = (NoiseField(8).windows(windows, channels=5, draw=1, device=device) for device in ("cpu", "cuda"))
    assert (here - there.cpu()).abs().max() < 1e-5
