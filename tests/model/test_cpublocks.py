"""The network as it runs on a CPU: the same numbers in float32, the same masks in any precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sader.checkpoint import build_model
from sader.errors import ConfigError
from sader.inference.accelerate import FastOptions, quick_denoiser
from sader.inference.export import example_inputs
from sader.inference.quicktiles import QuickTiles
from sader.inference.tile import TileGraph
from sader.model.blocks import Gate, ResBlock
from sader.model.cpublocks import CpuResBlock, DoublingConv, SplitGate, cpu_network, gelu
from sader.presets import get_preset

SMALL = {
    "widths": (16, 16, 32), "blocks": (1, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 32,
    "cloud_widths": (8, 8), "look_widths": (8, 8),
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def product():
    config = get_preset("small").replace(network=SMALL)
    torch.manual_seed(0)
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model, config


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (1, 3)])
def test_a_doubling_convolution_is_one_of_the_doubled_image(size):
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 4, 3, padding=1).requires_grad_(False)
    x = torch.randn(2, 6, *size)
    wanted = conv(F.interpolate(x, scale_factor=2, mode="nearest"))
    torch.testing.assert_close(DoublingConv(conv)(x), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_gelu_and_gate_are_the_same_for_both_layouts(memory):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 5, 7).contiguous(memory_format=memory)
    torch.testing.assert_close(gelu(x), F.gelu(x))
    gate = Gate(8).requires_grad_(False)
    torch.testing.assert_close(SplitGate(gate)(x), gate(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("resample", ["none", "down", "up"])
@pytest.mark.parametrize("emb_width", [None, 12])
def test_a_block_is_the_same(resample, emb_width):
    torch.manual_seed(0)
    wide = 8 if resample != "none" else 16
    block = ResBlock(8, wide, emb_width=emb_width, resample=resample).requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(std=0.3)
    x, emb = torch.randn(2, 8, 6, 10), None if emb_width is None else torch.randn(2, 12)
    torch.testing.assert_close(CpuResBlock(block)(x, emb), block(x, emb), atol=2e-5, rtol=1e-5)


def test_the_model_given_stays_as_it_is(product):
    model, _ = product
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    made = cpu_network(model.network, torch.bfloat16)
    assert not any(isinstance(module, ResBlock | Gate) for module in made.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.network.state_dict().items())
    kinds = {value.dtype for name, value in made.named_parameters() if name.startswith(("cloud_head", "second_look"))}
    assert kinds == {torch.float32}
    assert made.condition_net.stem.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("scene", [False, True])
def test_tiles_are_those_of_the_plain_path(product, precision, scene):
    model, config = product
    plain = TileGraph(model, config, scene=scene).eval()
    inputs = example_inputs(plain, batch=1, dates=3, height=64, width=72)
    options = FastOptions(precision=precision, cpu_blocks=True, channels_last=True, strict=True)
    quick = QuickTiles(model, config, options, threshold=0.5, growth=2)
    cloudy, valid, cloud, reference, noise, present, *change = inputs
    images, made = quick(
        cloudy=cloudy, valid=valid, cloud=cloud, reference=reference, noises=[noise], band_present=present,
        change=change[0] if scene else None, steps=1,
    )  # fmt: skip
    with torch.inference_mode():
        wanted = plain(*inputs)
    assert torch.equal(made.cloud, wanted[1])
    difference = (images[0] - wanted[0]).abs()
    if precision == "float32":
        assert float(difference.max()) < 1e-4
    else:  # random weights; the shipped ones give 1.5e-4
        assert 0 < float(difference.square().mean().sqrt()) < 3e-3
    assert made.error.dtype == torch.float32
    assert (made.shown is not None) == scene


def test_what_suits_a_device(monkeypatch):
    monkeypatch.setattr("sader.inference.accelerate.has_bfloat16", lambda: True)
    assert FastOptions.suited(CPU, composite=True) == FastOptions("bfloat16", channels_last=True, cpu_blocks=True)
    assert FastOptions.suited(CPU, composite=False).precision == "float32"
    monkeypatch.setattr("sader.inference.accelerate.has_bfloat16", lambda: False)
    assert FastOptions.suited(CPU, composite=True).precision == "float32"
    assert FastOptions.suited(torch.device("cuda"), composite=True).record
    fewer = FastOptions("bfloat16", cpu_blocks=True).fewer()
    assert fewer == FastOptions()
    assert fewer.fewer() is None


def test_blocks_for_a_cpu_are_refused_elsewhere(product):
    with pytest.raises(ConfigError, match="cpu_blocks are for a CPU"):
        quick_denoiser(product[0], FastOptions(cpu_blocks=True), torch.device("cuda"))
    with pytest.raises(ConfigError, match="one of the two"):
        FastOptions(precision="float16", fused=True, cpu_blocks=True)
