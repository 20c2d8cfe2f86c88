"""On a GPU: the accelerated backend gives what float32 gives on a CPU. Skipped without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sader.checkpoint import Checkpoint
from sader.data.synthetic.scene import make_series
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.models import build_model, get_preset

pytestmark = pytest.mark.gpu


def rmse(a, b):
    return float(np.sqrt(np.mean((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2)))


@pytest.mark.parametrize("name", ["sader-s2-rgbn", "sader-s2-msi"])
def test_shipped_weights_give_what_they_give_on_a_cpu(name):
    bands = CloudRemover.from_pretrained(name, device="cpu").bands
    # A scene of several tiles, with a smaller last batch.
    series = make_series(3, size=(160, 224), dates=3, bands=bands)
    settings = RemoverOptions(tile=96, overlap=16, batch_size=4)
    ways = {
        "cpu": ("cpu", settings),
        "torch": ("cuda", settings),
        "accelerated": ("cuda", replace(settings, backend="accelerated")),
    }
    results = {
        way: CloudRemover.from_pretrained(name, device=device, options=options).predict(
            series.cloudy, reference=0, cloud_mask=series.cloud_mask, seed=5
        )
        for way, (device, options) in ways.items()
    }
    hidden = ~results["cpu"].kept
    assert 0.05 < hidden.mean() < 0.95
    for way in ("torch", "accelerated"):
        assert np.array_equal(results[way].kept, results["cpu"].kept)
        assert np.array_equal(results[way].clear[:, ~hidden], results["cpu"].clear[:, ~hidden])
        assert rmse(results[way].clear, results["cpu"].clear) < (1e-4 if way == "torch" else 1e-3), way
        assert rmse(results[way].spread, results["cpu"].spread) < 1e-3, way


@pytest.mark.parametrize("compiled", [False, True])
def test_the_papers_network_with_resampling(compiled):
    small = {"widths": (16, 16, 32), "blocks": (2, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 16}
    config = get_preset("sen2_mtc_new").replace(network=small)
    torch.manual_seed(0)
    checkpoint = Checkpoint(build_model(config), config)
    generator = np.random.default_rng(0)
    cloudy = generator.random((3, 3, 64, 64), dtype=np.float32)
    aux = generator.random((3, 1, 64, 64), dtype=np.float32)
    options = RemoverOptions(tile=32, overlap=8, batch_size=2)
    plain, other = (
        CloudRemover(checkpoint, device="cuda", options=one)(cloudy, aux=aux, steps="4+1")
        for one in (options, replace(options, backend="accelerated", compile=compiled))
    )
    assert rmse(plain, other) < 1e-2
