"""`sader bench` counts what it says; the fast path equals the plain one; the benchmark scripts run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sader.checkpoint import build_model
from sader.cli.bench import BenchRow, measure, print_table
from sader.errors import ConfigError
from sader.inference.accelerate import FastOptions, FastSampler, naive_sample, shortened
from sader.method.guides import make_guide
from sader.method.sampling import generator_noise, karras_sigmas
from sader.presets import get_preset

SMALL = {"widths": (16, 16, 32), "blocks": (1, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 32}


@pytest.fixture(scope="module")
def paper():
    config = get_preset("sen2_mtc_new").replace(network=SMALL)
    torch.manual_seed(0)
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model, config


def script(name):
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def test_rates_follow_from_the_time():
    row = BenchRow("m", "cpu", "torch", "1", 500, 3, 0.5, 0.0, 1.0)
    assert row.tiles_per_second == 2
    assert row.megapixels_per_second == 0.5


def test_quick_table(capsys):
    rows = measure(steps=["1", "2"], quick=True, size=64)
    assert [(row.backend, row.steps, row.size) for row in rows] == [("torch", "1", 64), ("torch", "2", 64)]
    assert all(row.seconds > 0 and row.memory_mb > 50 for row in rows)
    print_table(rows)
    assert "tiles / s" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean onnx"):
        measure(quick=True, backends=["onxx"])


def sampled(paper, options=None, resamplings=1):
    model, config = paper
    generator = torch.Generator().manual_seed(0)
    cloudy = torch.rand(2, 3, 3, 32, 32, generator=generator) - 0.6
    aux = torch.rand(2, 3, 1, 32, 32, generator=generator) - 0.6
    noise = generator_noise((3, 3, 32, 32), [0, 1])
    guide = make_guide("lowpass", bands=3, weights=None)
    if options is None:
        counted: list[None] = []
        image = naive_sample(
            model, config, cloudy, noise, aux=aux, steps=4, resamplings=resamplings, guide=guide, counted=counted
        )
        return image, len(counted)
    sampler = FastSampler(model, config, options, guide=guide)
    return sampler(cloudy, noise, aux=aux, steps=4, resamplings=resamplings), len(sampler.sigmas(4, 3)) - 1


def test_the_fast_path_is_the_naive_one_to_the_bit_with_all_switches_off(paper):
    naive, evaluations = sampled(paper)
    assert evaluations == 7  # 4 + 1: the first step is not resampled
    made, levels = sampled(paper, FastOptions())
    assert levels == 4
    assert torch.equal(made, naive)


def test_leaving_out_the_last_level_changes_next_to_nothing(paper):
    naive, _ = sampled(paper)
    made, levels = sampled(paper, FastOptions(skip_below=2e-3))
    assert levels == 3
    assert 0 < float((made - naive).square().mean().sqrt()) / 2 < 1e-3


def test_only_levels_that_change_nothing_are_left_out(paper):
    model, config = paper
    levels = karras_sigmas(4, sigma_min=config.diffusion.sigma_min, sigma_max=config.diffusion.sigma_max)
    assert torch.equal(shortened(model.process, levels, frames=3, bound=0.0), levels)
    assert torch.equal(shortened(model.process, levels, frames=3, bound=2e-3), torch.cat([levels[:3], levels[-1:]]))
    assert len(shortened(model.process, levels, frames=3, bound=100.0)) == 2  # the start always stays


def test_a_composite_is_refused(paper):
    config = get_preset("small")
    with pytest.raises(ConfigError, match="paper's networks"):
        FastSampler(build_model(config), config)


def test_paper_tile_runs_in_seconds():
    rows = script("paper_tile").main(["--tiny"])
    assert rows[1].rmse == 0.0  # seeing the dates once changes no bit
    assert all(row.milliseconds > 0 for row in rows)


def test_paper_tile_measures_what_the_goal_is_about_first(monkeypatch):
    paper_tile = script("paper_tile")
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(paper_tile, "ceilings", lambda device: {})
    took = {"+ folded": 8.0, "+ doubled": 9.0}
    for only, good, first in (
        ("", paper_tile.KINDS, ["+ folded 2", "+ doubled 2", "+ folded 16", "+ folded 32"]),
        ("doubled|safe", paper_tile.KINDS, ["+ doubled 2", "+ doubled 16", "+ doubled 32"]),
        ("", ["fused", "joined"], ["+ joined 2", "+ joined 16", "+ joined 32"]),
        ("", [], ["+ recorded 2", "+ recorded 16", "+ recorded 32"]),
    ):
        bench = paper_tile.Bench(paper_tile.parsed(["--tiny", "--cpu", "--only", only]))
        bench.batches, done = [2, 16, 32], []

        def mode(name, options, batch, bench=bench, done=done, **_):
            done.append(f"{name} {batch}")
            bench.rows.append(paper_tile.Row(f"{name}, batch {batch}", took.get(name, 10.0), 0.0))

        monkeypatch.setattr(bench, "mode", mode)
        modes = paper_tile.ladder(gpu, good=set(good))
        bench.goal_first(modes)
        assert done[: len(first)] == first
        assert len(done) == len(set(done))
        if not only:
            assert {name.rsplit(" ", 1)[0] for name in done} == set(modes)
        assert [modes[name].folded for name in modes if name in took] == [True] * (2 if "doubled" in good else 0)


def test_scaling_finds_exponents():
    scaling = script("scaling")
    assert scaling.exponent([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1.0)
    assert scaling.exponent([10, 20], [5.0, 20.0]) == pytest.approx(2.0)
