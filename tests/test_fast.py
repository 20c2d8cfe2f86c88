"""The short cuts of `accelerate`: what they compute is what the plain path computes, and what fails is done without."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from sader.checkpoint import Checkpoint, build_model
from sader.data.synthetic.scene import make_series
from sader.errors import ConfigError
from sader.inference.accelerate import FastOptions, FastSampler
from sader.inference.quicktiles import QuickTiles
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.method.guides import make_guide
from sader.method.sampling import generator_noise
from sader.model.fused import half_network
from sader.presets import get_preset

SMALL = {"widths": (16, 16, 32), "blocks": (1, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 32}


def made(name, **network):
    config = get_preset(name).replace(network={**SMALL, **network})
    torch.manual_seed(0)
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model, config


@pytest.fixture(scope="module")
def paper():
    return made("sen2_mtc_new")


@pytest.fixture(scope="module")
def product():
    return made("small", cloud_widths=(8, 8), look_widths=(8,))


def inputs(model):
    generator = torch.Generator().manual_seed(1)
    cloudy = torch.rand(2, 3, 3, 32, 32, generator=generator) - 0.6
    aux = torch.rand(2, 3, 1, 32, 32, generator=generator) - 0.6
    return cloudy, generator_noise((3, 3, 32, 32), [0, 1]), aux


def sampled(paper, options, **more):
    model, config = paper
    cloudy, noise, aux = inputs(model)
    sampler = FastSampler(model, config, options, guide=make_guide("lowpass", bands=3))
    return sampler(cloudy, noise, aux=aux, steps=4, resamplings=0, **more), sampler


def rmse(a, b):
    return float((a - b).square().mean().sqrt())


def test_half_precision_keeps_everything_but_convolutions_in_float32(paper):
    model, _ = paper
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    made = half_network(model.network, torch.float16)
    kinds = {type(module).__name__: next(module.parameters(recurse=False)).dtype for module in made.modules()
             if next(module.parameters(recurse=False), None) is not None}  # fmt: skip
    assert kinds["Conv2d"] == torch.float16
    assert kinds["Linear"] == kinds["GroupNorm32"] == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.network.state_dict().items())


def test_float16_is_finer_than_bfloat16(paper):
    plain, _ = sampled(paper, FastOptions())
    half, _ = sampled(paper, FastOptions(precision="float16"))
    brain, _ = sampled(paper, FastOptions(precision="bfloat16"))
    assert 0 < rmse(half, plain) < 3e-3
    assert rmse(half, plain) < 0.5 * rmse(brain, plain)


def test_fused_needs_half_precision_and_a_gpu(paper):
    with pytest.raises(ConfigError, match="half precision"):
        FastOptions(fused=True)
    with pytest.raises(ConfigError, match="precision is 'half'"):
        FastOptions(precision="half")
    with pytest.raises(ConfigError, match="Triton and a CUDA device"):
        sampled(paper, FastOptions(precision="float16", fused=True, strict=True))


def test_what_does_not_work_is_done_without(paper):
    half, _ = sampled(paper, FastOptions(precision="float16"))
    with pytest.warns(UserWarning, match="going on without it"):
        result, sampler = sampled(paper, FastOptions(precision="float16", fused=True))
    assert not sampler.options.fused
    assert torch.equal(result, half)


def test_numbers_too_large_for_float16_are_computed_in_float32():
    big = made("sen2_mtc_new")
    plain, _ = sampled(big, FastOptions())
    with torch.no_grad():  # the same network, but a map inside it is beyond 65504
        big[0].network.stem.weight.mul_(1e6)
        big[0].network.stem.bias.mul_(1e6)
    plain, _ = sampled(big, FastOptions())
    result, _ = sampled(big, FastOptions(precision="float16"))
    assert torch.isfinite(plain).all()
    assert torch.equal(result, plain)


@pytest.mark.parametrize("given", [True, False])
def test_the_quick_backend_gives_what_torch_gives(product, given):
    series = make_series(3, size=(64, 80), dates=3, coverage=0.3)
    checkpoint = Checkpoint(*product)
    options = RemoverOptions(tile=64, overlap=16)
    made = [
        CloudRemover(checkpoint, device="cpu", options=replace(options, backend=backend)).predict(
            series.cloudy, reference=0, cloud_mask=series.cloud_mask if given else None, samples=2
        )
        for backend in ("torch", "quick")
    ]
    same = (made[0].cloud >= 0.5) == (made[1].cloud >= 0.5)
    assert same.mean() > 0.99
    everywhere = same.all(axis=0)
    assert np.abs(made[0].clear - made[1].clear)[:, everywhere].max() < (2e-3 if given else 2e-2)
    assert not np.array_equal(made[0].clear, made[1].clear)  # it was the other one


def test_the_quick_backend_runs_the_papers_network(paper):
    checkpoint = Checkpoint(*paper)
    generator = np.random.default_rng(0)
    cloudy = generator.random((3, 3, 40, 40), dtype=np.float32)
    aux = generator.random((3, 1, 40, 40), dtype=np.float32)
    valid = np.ones((3, 40, 40), bool)
    valid[1, :8] = False
    plain, quick = (
        CloudRemover(checkpoint, device="cpu", options=RemoverOptions(tile=32, overlap=8, backend=backend)).predict(
            cloudy, aux=aux, valid=valid, steps="2+0"
        )
        for backend in ("torch", "quick")
    )
    assert 0 < np.sqrt(np.mean((plain.clear - quick.clear) ** 2)) < 3e-3


def test_a_solver_that_the_graph_lacks_falls_back_to_torch(product):
    series = make_series(3, size=(32, 32), dates=2)
    checkpoint = Checkpoint(*product)
    plain, quick = (
        CloudRemover(checkpoint, device="cpu", options=RemoverOptions(backend=backend, solver="heun"))(
            series.cloudy, reference=0, cloud_mask=series.cloud_mask, steps=2
        )
        for backend in ("torch", "quick")
    )
    assert np.array_equal(plain, quick)


def test_tiles_wait_for_their_turn(product):
    tiles = QuickTiles(*product, FastOptions(), threshold=0.5, growth=2)
    cloudy = torch.rand(1, 2, 4, 32, 32)
    given = {"valid": torch.ones(1, 2, 32, 32, dtype=torch.bool), "cloud": torch.zeros(1, 2, 32, 32),
             "reference": torch.zeros(1, dtype=torch.long), "noises": [torch.randn(1, 1, 4, 32, 32)],
             "band_present": torch.ones(1, 4, dtype=torch.bool), "change": None, "steps": 1}  # fmt: skip
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        results = [future.result()[0][0] for future in [pool.submit(tiles, cloudy=cloudy, **given) for _ in range(6)]]
    assert all(torch.equal(result, results[0]) for result in results)
    assert not tiles._turn.locked()


def test_samplers_wait_for_their_turn(paper, monkeypatch):
    """Tiles of a scene come from several threads, and a recording has one place for what it reads."""
    model, config = paper
    sampler = FastSampler(model, config, FastOptions())
    compute, inside, most = FastSampler._sampled, [], []

    def watched(self, work):
        inside.append(1)
        most.append(len(inside))
        result = compute(self, work)
        inside.pop()
        return result

    monkeypatch.setattr(FastSampler, "_sampled", watched)
    cloudy, noise, aux = inputs(model)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: sampler(cloudy, noise, aux=aux, steps=1), range(4)))
    assert max(most) == 1
    assert all(torch.equal(result, results[0]) for result in results)
    assert not sampler._turn.locked()


@pytest.mark.parametrize("given", [True, False])
def test_tiles_in_float16_without_fused_blocks_are_the_tiles(product, given):
    """What a scene on a GPU computes where building kernels does not pay."""
    options = replace(FastOptions.all_on(), fused=False, strict=True)
    series = make_series(3, size=(64, 64), dates=3, coverage=0.3)
    cloudy = torch.from_numpy(series.cloudy)[None]
    masks = torch.from_numpy(series.cloud_mask).float()[None]
    inputs = {
        "cloudy": cloudy, "valid": torch.ones(masks.shape, dtype=torch.bool),
        "cloud": masks if given else torch.full_like(masks, torch.nan), "reference": torch.zeros(1, dtype=torch.long),
        "noises": [torch.randn(1, 1, 4, 64, 64, generator=torch.Generator().manual_seed(0))],
        "band_present": torch.ones(1, 4, dtype=torch.bool), "change": torch.zeros_like(cloudy), "steps": 1,
    }  # fmt: skip
    (wanted,), plain = QuickTiles(*product, FastOptions(), threshold=0.5, growth=2)(**inputs)
    (found,), half = QuickTiles(*product, options, threshold=0.5, growth=2)(**inputs)
    assert found.dtype == half.cloud.dtype == half.error.dtype == torch.float32
    same = (plain.cloud == half.cloud).all(dim=1)
    assert same.float().mean() > 0.98
    assert 0 < rmse(found[:, :, same[0]], wanted[:, :, same[0]]) < (1e-3 if given else 5e-3)


@pytest.mark.parametrize("more", [{"date_input": "days"}, {"aux_bands": ("VV",)}])
def test_what_the_graph_has_no_input_for_is_not_made_a_graph(more):
    checkpoint = Checkpoint(*made("small", cloud_widths=(8, 8), **more))
    series = make_series(3, size=(32, 32), dates=2)
    plain, quick = (
        CloudRemover(checkpoint, device="cpu", options=RemoverOptions(backend=backend))(
            series.cloudy, reference=0, cloud_mask=series.cloud_mask, steps=1
        )
        for backend in ("torch", "quick")
    )
    assert np.array_equal(plain, quick)


def test_the_newest_short_cut_is_given_up_first():
    options, given_up = FastOptions.all_on(), []
    assert options.fused
    assert options.joined
    while (fewer := options.fewer()) is not None:
        given_up.append([name for name in ("folded", "joined", "fused", "record") if getattr(options, name)])
        options = fewer
    assert given_up == [
        ["folded", "joined", "fused", "record"], ["joined", "fused", "record"], ["fused", "record"], ["record"],
    ]  # fmt: skip
    alone = replace(FastOptions.all_on(), fused=False)  # where the kernels cannot be had
    assert not alone.fewer().record


def interpreted(code):
    """Return what a program prints that runs Triton's kernels on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("errors", ["kernel_errors", "join_errors", "fold_errors", "double_errors"])
def test_fused_kernels_equal_pytorch(errors):
    code = f"import torch; from sader.model.kernelchecks import {errors}; print({errors}(torch.device('cpu')))"
    found = ast.literal_eval(interpreted(code))
    assert len(found) > 1
    assert all(value < 1e-3 for value in found.values()), found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("more", "kind"),
    [("", "MTCDN"), (", joined=True", "JoinedMTCDN"), (", joined=True, folded=True, doubled=True", "FoldedMTCDN")],
)
def test_fused_networks_compute_what_the_network_computes(more, kind):
    code = f"""
import torch
from sader.checkpoint import build_model
from sader.inference.accelerate import FastOptions, quick_denoiser, quick_precision
from sader.presets import get_preset
torch.manual_seed(0)
small = {{"widths": (16, 16, 32), "blocks": (2, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 16}}
model = build_model(get_preset("sen2_mtc_new").replace(network=small)).eval()
with torch.no_grad():
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.05)
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
cloudy, aux = torch.rand(2, 2, 3, 22, 22) - 0.6, torch.rand(2, 2, 1, 22, 22) - 0.6
given = {{"aux": aux, "valid": torch.rand(2, 2, 22, 22) > 0.1, "present": torch.tensor([[True, True], [True, False]])}}
x, sigma, cpu = torch.randn(2, 2, 3, 22, 22), torch.tensor([0.3, 0.9]), torch.device("cpu")
options = FastOptions(precision="float16", fused=True{more})
with torch.inference_mode():
    wanted = model(x, sigma, model.network.condition(cloudy, **given))
    quick = quick_denoiser(model, options, cpu)
    with quick_precision(options, cpu):
        found = quick(x, sigma, quick.network.condition(cloudy, **given))
print(type(quick.network).__name__, float((found.float() - wanted).norm() / wanted.norm()))
"""
    name, error = interpreted(code).split()
    assert name == kind
    assert float(error) < 5e-3
