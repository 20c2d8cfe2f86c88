"""The accelerated backend computes what `SaderTile` computes within rounding, and falls back where a setting fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from sader.checkpoint import Checkpoint
from sader.data.synthetic.scene import make_series
from sader.inference.accelerate import NEGLIGIBLE, AcceleratedTile, Acceleration, accelerated_network
from sader.inference.noise import NoiseField
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.inference.scene import LARGEST_AGREEMENT
from sader.inference.tile import SaderTile, TileInputs
from sader.inference.tiling import Window
from sader.models import build_model, get_preset

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
    return made("small", cloud_widths=(8, 8), refinement_widths=(8,))


HALF = Acceleration(torch.float16)
BRAIN = Acceleration(torch.bfloat16)


def tile_of(model):
    return SaderTile(model[0]).eval()


def inputs(bands, *, known=True, size=32):
    generator = torch.Generator().manual_seed(1)
    masks = (torch.rand(2, 3, size, size, generator=generator) > 0.7).float()
    return TileInputs(
        cloudy=0.4 * torch.rand(2, 3, bands, size, size, generator=generator),
        valid=torch.ones(2, 3, size, size, dtype=torch.bool),
        cloud=masks if known else torch.full_like(masks, torch.nan),
        reference=torch.tensor([0, -1]),
        band_present=torch.ones(2, bands, dtype=torch.bool),
    )


def noises(size=32, samples=1):
    windows = [Window(0, 0, size, size), Window(0, 40, size, size)]
    return [NoiseField(seed).of(windows) for seed in range(samples)]


@torch.inference_mode()
def images(tile, bands, **given):
    return tile(inputs(bands), noises(), steps=4, **given).images


def rmse(a, b):
    return float((a - b).square().mean().sqrt())


def test_half_precision_keeps_everything_but_convolutions_in_float32(paper):
    model, _ = paper
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    copied = accelerated_network(model.network, torch.float16)
    kinds = {
        type(module).__name__: {one.dtype for one in module.parameters(recurse=False)} for module in copied.modules()
    }
    assert kinds["Conv2d"] == {torch.float16}
    assert kinds["Linear"] == kinds["GroupNorm32"] == {torch.float32}
    assert all(torch.equal(value, before[name]) for name, value in model.network.state_dict().items())


def test_float16_is_finer_than_bfloat16(paper):
    tile = tile_of(paper)
    plain = images(tile, 3)
    half, brain = (rmse(images(AcceleratedTile(tile, one), 3), plain) for one in (HALF, BRAIN))
    assert 0 < half < 2e-3
    assert half < 0.5 * brain


@pytest.mark.parametrize("resamplings", [0, 1])
def test_float32_differs_by_rounding_at_most(paper, product, resamplings):
    for model, bands in ((paper, 3), (product, 4)):
        tile = tile_of(model)
        found = images(AcceleratedTile(tile, Acceleration()), bands, resamplings=resamplings)
        assert rmse(found, images(tile, bands, resamplings=resamplings)) < 1e-5


def test_float16_overflow_is_computed_in_float32():
    model, config = made("sen2_mtc_new")
    with torch.no_grad():  # a map inside the network exceeds 65504
        model.network.stem.weight.mul_(1e6)
        model.network.stem.bias.mul_(1e6)
    remover = CloudRemover(Checkpoint(model, config, {}), device="cpu")
    cloudy = inputs(3).cloudy[0].numpy()
    plain = remover(cloudy, steps=1)
    half = AcceleratedTile(remover.plain_tile, HALF)
    assert not torch.isfinite(images(half, 3)).all()
    vars(remover)["tile"] = half
    assert np.array_equal(remover(cloudy, steps=1), plain)


def test_a_setting_that_fails_is_turned_off_with_a_warning(paper, monkeypatch):
    def broken(*given, **named):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **named: broken)
    tile = tile_of(paper)
    accelerated = AcceleratedTile(tile, replace(HALF, compile=True))
    with pytest.warns(UserWarning, match=r"acceleration failed \(RuntimeError: no compiler\)"):
        found = images(accelerated, 3)
    assert not accelerated.settings.compile
    assert torch.equal(found, images(AcceleratedTile(tile, HALF), 3))


def test_settings_are_given_up_from_the_most_demanding_on():
    settings = Acceleration(torch.float16, capture=True, compile=True)
    order = []
    while (simpler := settings.simpler()) is not None:
        settings = simpler
        order.append((settings.compile, settings.capture, settings.dtype))
    assert order == [
        (False, True, torch.float16), (False, False, torch.float16), (False, False, torch.float32),
    ]  # fmt: skip


def test_bfloat16_is_for_networks_with_a_composite(monkeypatch):
    monkeypatch.setattr("sader.inference.accelerate.has_bfloat16", lambda: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert Acceleration.for_device(cpu, composite=True) == Acceleration(torch.bfloat16)
    assert Acceleration.for_device(cpu, composite=False) == Acceleration(negligible=NEGLIGIBLE)
    assert Acceleration.for_device(cuda, composite=False, compile=True).compile
    monkeypatch.setattr("sader.inference.accelerate.has_bfloat16", lambda: False)
    assert Acceleration.for_device(cpu, composite=True) == Acceleration()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "product"])
def test_the_network_compiles_without_graph_breaks(name, request):
    """Traced without a compiler behind it: a graph break would raise."""
    model, config = request.getfixturevalue(name)
    network = model.network
    given = inputs(len(config.network.bands))
    wanted = network.condition(given.cloudy, cloud=given.cloud, reference=given.reference)
    condition = torch.compile(network.condition, backend="eager", fullgraph=True)(
        given.cloudy, cloud=given.cloud, reference=given.reference
    )
    assert torch.equal(condition.mean, wanted.mean)
    state, level = torch.randn_like(wanted.mean), torch.zeros(2)
    found = torch.compile(network, backend="eager", fullgraph=True)(state, level, condition)
    assert torch.equal(found, network(state, level, wanted))


@pytest.mark.parametrize("given", [True, False])
def test_the_backend_gives_what_torch_gives(product, given):
    series = make_series(3, size=(64, 80), dates=3, coverage=0.3)
    plain = CloudRemover(Checkpoint(*product), device="cpu", options=RemoverOptions(tile=64, overlap=16))
    results = [
        remover.predict(series.cloudy, reference=0, cloud_mask=series.cloud_mask if given else None, samples=2)
        for remover in (plain, plain.with_options(backend="accelerated"))
    ]
    assert np.array_equal(results[0].cloud, results[1].cloud)
    same = results[0].kept == results[1].kept  # whether a pixel agrees with the result may depend on the last digits
    assert same.all() if given else same.mean() > 0.995
    difference = np.abs(results[0].clear - results[1].clear)
    assert difference[:, same].max() < 5e-3
    assert difference.max() < LARGEST_AGREEMENT + 5e-3
    assert not np.array_equal(results[0].clear, results[1].clear)


def test_the_backend_runs_the_papers_network(paper):
    generator = np.random.default_rng(0)
    cloudy = generator.random((3, 3, 40, 40), dtype=np.float32)
    aux = generator.random((3, 1, 40, 40), dtype=np.float32)
    valid = np.ones((3, 40, 40), bool)
    valid[1, :8] = False
    plain = CloudRemover(Checkpoint(*paper), device="cpu", options=RemoverOptions(tile=32, overlap=8))
    first, second = (
        remover.predict(cloudy, aux=aux, valid=valid, steps="2+1")
        for remover in (plain, plain.with_options(backend="accelerated"))
    )
    assert 0 < np.sqrt(np.mean((first.clear - second.clear) ** 2)) < 3e-3


@pytest.mark.parametrize("more", [{"date_input": "days"}, {"aux_bands": ("VV",)}])
def test_days_and_auxiliary_bands_are_accelerated_too(more):
    series = make_series(3, size=(32, 32), dates=2)
    extra = {"days": [0, 40]} if "date_input" in more else {"aux": series.cloudy[:, :1]}
    model = made("small", cloud_widths=(8, 8), **more)
    plain = CloudRemover(Checkpoint(*model), device="cpu", options=RemoverOptions(solver="heun"))
    first, second = (
        remover(series.cloudy, reference=0, cloud_mask=series.cloud_mask, steps=2, **extra)
        for remover in (plain, plain.with_options(backend="accelerated"))
    )
    assert np.sqrt(np.mean((first - second) ** 2)) < 5e-3


def test_threads_may_call_it_at_once(product):
    tile = AcceleratedTile(tile_of(product), BRAIN)
    wanted = images(tile, 4)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(found, wanted) for found in pool.map(lambda _: images(tile, 4), range(4)))
