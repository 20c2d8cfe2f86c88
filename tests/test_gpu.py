"""On a GPU: the short cuts give what the plain way gives on a CPU. Skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sader.checkpoint import build_model
from sader.data.synthetic.scene import make_series
from sader.inference.accelerate import FastOptions, FastSampler, naive_sample
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.method.sampling import generator_noise
from sader.model.fused import can_fuse
from sader.presets import get_preset

pytestmark = pytest.mark.gpu


def rmse(a, b):
    return float(np.sqrt(np.mean((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["sader-s2-rgbn", "sader-s2-msi"])
def test_shipped_weights_give_what_they_give_on_a_cpu(name, fused):
    if fused and not can_fuse(torch.device("cuda")):
        pytest.skip("fused kernels need Triton and a recent GPU")
    bands = CloudRemover.from_pretrained(name, device="cpu").bands
    # A scene of several tiles, the last ones of a batch fewer than the others.
    series = make_series(3, size=(160, 224), dates=3, bands=bands)
    settings = RemoverOptions(tile=96, overlap=16, batch_size=4)
    ways = {
        "cpu": ("cpu", settings),
        "torch": ("cuda", replace(settings, backend="torch")),
        "quick": ("cuda", replace(settings, backend="quick", fused=fused)),
    }
    made = {
        way: CloudRemover.from_pretrained(name, device=device, options=options).predict(
            series.cloudy, reference=0, cloud_mask=series.cloud_mask, seed=5
        )
        for way, (device, options) in ways.items()
    }
    hidden = ~made["cpu"].kept
    assert 0.05 < hidden.mean() < 0.95
    for way in ("torch", "quick"):
        assert np.array_equal(made[way].kept, made["cpu"].kept)
        assert np.array_equal(made[way].clear[:, ~hidden], made["cpu"].clear[:, ~hidden])
        assert rmse(made[way].clear, made["cpu"].clear) < (1e-4 if way == "torch" else 1e-3), way
        assert rmse(made[way].spread, made["cpu"].spread) < 1e-3, way


@pytest.mark.parametrize("which", ["all", "not fused"])
def test_the_papers_network_by_short_cuts(which):
    device = torch.device("cuda")
    if which == "all" and not can_fuse(device):
        pytest.skip("fused kernels need Triton and a recent GPU")
    small = {"widths": (16, 16, 32), "blocks": (2, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 16}
    config = get_preset("sen2_mtc_new").replace(network=small)
    model = build_model(config).eval().to(device)
    cloudy, aux = torch.rand(2, 3, 3, 64, 64, device=device), torch.rand(2, 3, 1, 64, 64, device=device)
    noise = generator_noise((3, 3, 64, 64), [1, 2], device=device)
    options = replace(FastOptions.all_on(), strict=True)
    if which == "not fused":
        options = replace(options, fused=False)
    with torch.inference_mode():
        plain = naive_sample(model, config, cloudy, noise, aux=aux, steps=4, resamplings=0, guide=None)
        quick = FastSampler(model, config, options)(cloudy, noise, aux=aux, steps=4, resamplings=0)
    assert float((plain - quick.float()).norm() / plain.norm()) < 2e-2
