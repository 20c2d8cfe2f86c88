"""The exported graph gives what PyTorch gives, for sizes and dates it never saw; the backend gives `predict`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sader.checkpoint import Checkpoint
from sader.data.synthetic.scene import make_series
from sader.errors import ConfigError, OutputError
from sader.inference.noise import NoiseField
from sader.inference.onnx import (
    example_inputs,
    export_model,
    export_program,
    facts_of,
    load_any,
    make_graph,
    names_of,
    open_session,
    write_onnx,
)
from sader.inference.remover import CloudRemover, RemoverOptions, default_backend
from sader.inference.scene import AGREEMENT, LARGEST_AGREEMENT
from sader.inference.tiling import Window
from sader.models import build_model, get_preset

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SMALL = {
    "widths": (16, 16, 32), "blocks": (1, 1, 1), "fusion_width": 16, "key_width": 16, "emb_width": 32,
    "cloud_widths": (8, 8), "refinement_widths": (8, 8),
}  # fmt: skip


def small_checkpoint(preset):
    """A narrow network of a preset with every layer at work."""
    config = get_preset(preset).replace(network=SMALL)
    torch.manual_seed(0)
    model = build_model(config).eval()
    with torch.no_grad():  # layers that start at zero would hide mistakes behind them
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return Checkpoint(model, config, {})


@pytest.fixture(scope="module")
def checkpoint():
    return small_checkpoint("small")


@pytest.fixture(scope="module")
def graph(checkpoint):
    return make_graph(checkpoint)


def session_of(graph, folder):
    """The graph written and opened again."""
    write_onnx(graph, folder / "tile.onnx", facts_of(graph, "tiny"))
    return open_session(folder / "tile.onnx", threads=1)


@pytest.fixture(scope="module")
def session(graph, tmp_path_factory):
    return session_of(graph, tmp_path_factory.mktemp("onnx"))


def both(graph, session, inputs):
    """The outputs of PyTorch and of ONNX Runtime."""
    with torch.no_grad():
        wanted = [value.numpy() for value in graph(*inputs)]
    feed = {name: value.numpy() for name, value in zip(names_of(graph)[0], inputs, strict=True)}
    known = {one.name for one in session.get_inputs()}  # one that changes nothing is left out of the file
    made = session.run(None, {name: value for name, value in feed.items() if name in known})
    return wanted, made


@pytest.mark.slow  # `session`: ONNX Runtime takes 50 s of CPU time to open the graph
@pytest.mark.parametrize(
    ("batch", "dates", "height", "width"), [(1, 3, 64, 64), (1, 1, 64, 96), (2, 2, 64, 64), (1, 4, 128, 64)]
)
def test_equal_to_pytorch_for_other_sizes(graph, session, batch, dates, height, width):
    inputs = example_inputs(graph, batch=batch, dates=dates, height=height, width=width)
    for wanted, made in zip(*both(graph, session, inputs), strict=True):
        assert wanted.shape == made.shape
        np.testing.assert_allclose(made, wanted, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["none", "some", "all"])
@pytest.mark.parametrize("reference", [-1, 1])
def test_equal_with_masks_reference_and_gaps(graph, session, masks, reference):
    cloudy, valid, cloud, _, noise, present = example_inputs(graph, batch=1, dates=3, height=64, width=96)
    valid[:, 2] = False  # a date without any data
    valid[:, :, :8, :8] = False  # a corner that no date shows
    cloud = {"none": torch.full_like(cloud, torch.nan), "some": cloud, "all": cloud.nan_to_num(0.0)}[masks]
    for wanted, made in zip(
        *both(graph, session, (cloudy, valid, cloud, torch.tensor([reference]), noise, present)), strict=True
    ):
        assert np.isfinite(made).all()
        np.testing.assert_allclose(made, wanted, atol=1e-4)


@pytest.mark.slow  # a graph of its own
def test_thirteen_bands_in_a_tile_of_a_scene(tmp_path):
    """One graph for both: all bands, some of them missing, and the match of the whole scene as one more input."""
    graph = make_graph(small_checkpoint("small_msi"), scene=True)
    assert names_of(graph)[0][-1] == "change"
    assert names_of(graph)[1][-1] == "shown"
    session = session_of(graph, tmp_path)
    for batch, dates, height, width, reference in ((1, 3, 64, 96, 0), (2, 2, 64, 64, 1), (1, 1, 64, 64, -1)):
        inputs = list(example_inputs(graph, batch=batch, dates=dates, height=height, width=width))
        inputs[2][:, 0] = torch.nan
        inputs[2][:1, max(reference, 0), :4], inputs[2][:1, max(reference, 0), 4:] = 0.0, 1.0  # hardly a date to follow
        inputs[3] = torch.full((batch,), reference)
        inputs[5][:, [0, 9, 10]] = False
        inputs[6] = 0.02 * torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
        wanted, made = both(graph, session, inputs)
        assert len(made) == 4
        for name, one, other in zip(names_of(graph)[1], wanted, made, strict=True):
            assert one.shape == other.shape, name
            np.testing.assert_allclose(other.astype(float), one.astype(float), atol=1e-4, err_msg=name)
        assert made[3][0].any() == (reference >= 0)  # what is left of the reference date there
        without = list(inputs)
        without[6] = torch.zeros_like(inputs[6])
        assert np.abs(both(graph, session, without)[1][0] - made[0]).max() > 1e-3


@pytest.mark.slow  # the largest graphs there are
@pytest.mark.parametrize("name", ["sader-s2-rgbn", "sader-s2-msi"])
def test_the_shipped_weights_give_the_same_image(name, tmp_path):
    graph = make_graph(load_any(name))
    session = session_of(graph, tmp_path)
    for sizes in ((1, 3, 96, 128), (2, 1, 64, 64), (1, 4, 64, 64)):
        inputs = example_inputs(graph, batch=sizes[0], dates=sizes[1], height=sizes[2], width=sizes[3])
        for wanted, made in zip(*both(graph, session, inputs), strict=True):
            np.testing.assert_allclose(made, wanted, atol=1e-4)
            print(name, sizes, np.abs(made - wanted).max())


@pytest.mark.slow
def test_the_file_says_what_it_is(session):
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["bands"]) == ["B02", "B03", "B04", "B08"]
    assert (facts["multiple"], facts["steps"], facts["model"]) == ("32", "1", "tiny")


@pytest.mark.slow
def test_numpy_alone_gives_the_image_of_predict(checkpoint, session):
    """Odd sizes through the documented padding, and the noise of the scene: the user's way to the same pixels."""
    scene = make_series(1, size=(45, 50), dates=3)
    remover = CloudRemover(checkpoint, device="cpu")
    wanted = remover.predict(scene.cloudy, reference=0, seed=3)
    padded = np.pad(scene.cloudy, [(0, 0), (0, 0), (0, 19), (0, 14)], mode="reflect")[None].astype(np.float32)
    clear, used, error = session.run(None, {
        "cloudy": padded, "valid": np.ones_like(padded[:, :, 0], dtype=bool),
        "cloud": np.full_like(padded[:, :, 0], np.nan), "reference": np.array([0]),
        "noise": NoiseField(3, balanced=True).window(Window(0, 0, 64, 64), channels=4, draw=0).numpy()[None, None],
        "band_present": np.ones((1, 4), dtype=bool),
    })  # fmt: skip
    clear, used, error = clear[0, :, :45, :50], used[0, :, :45, :50], error[0, :, :45, :50]
    visible = used[0] < 0.5
    difference = np.abs(scene.cloudy[0] - clear)
    kept = visible | (difference <= np.minimum(AGREEMENT * error, LARGEST_AGREEMENT)).all(axis=0)
    assert visible[wanted.kept].mean() < 1  # some pixels are kept because they agree
    same = kept == wanted.kept  # which of them may depend on the last digits
    assert same[visible].all()
    assert same.mean() > 0.995
    image = np.where(kept, scene.cloudy[0], clear.clip(0))
    np.testing.assert_allclose(image[:, same], wanted.clear[:, same], atol=1e-4)
    np.testing.assert_allclose(np.where(visible, 0, error), wanted.spread, atol=1e-4)


@pytest.mark.slow  # makes a graph of its own: half a minute on two busy cores
@pytest.mark.parametrize("given", [True, False])
def test_the_onnx_backend_gives_what_torch_gives(checkpoint, given):
    scene = make_series(2, size=(72, 90), dates=2)
    options = RemoverOptions(tile=64, overlap=16)
    plain = CloudRemover(checkpoint, device="cpu", options=options)
    other = CloudRemover(checkpoint, device="cpu", options=replace(options, backend="onnx"))
    mask = scene.cloud_mask if given else None
    wanted = plain.predict(scene.cloudy, reference=0, cloud_mask=mask, samples=2)
    made = other.predict(scene.cloudy, reference=0, cloud_mask=mask, samples=2)
    np.testing.assert_allclose(made.clear, wanted.clear, atol=1e-4)
    np.testing.assert_allclose(made.cloud, wanted.cloud, atol=1e-6)
    np.testing.assert_allclose(made.spread, wanted.spread, atol=1e-4)
    with pytest.raises(ConfigError, match="Euler steps without resampling"):
        other.predict(scene.cloudy, steps="2+1")


@pytest.mark.slow
def test_the_torch_program_is_the_same_function(graph):
    module = export_program(graph).module(check_guards=False)
    for sizes in ((1, 1, 64, 96), (2, 4, 96, 64)):
        inputs = example_inputs(graph, batch=sizes[0], dates=sizes[1], height=sizes[2], width=sizes[3])
        with torch.no_grad():
            for wanted, made in zip(graph(*inputs), module(*inputs), strict=True):
                torch.testing.assert_close(made, wanted, atol=1e-4, rtol=0)


def test_what_cannot_be_exported_says_why(tmp_path):
    with pytest.raises(ConfigError, match="makes no composite"):
        export_model("sen2_mtc_new", tmp_path / "a.onnx", steps=4)
    with pytest.raises(OutputError, match=r"called \*\.onnx"):
        export_model("small", tmp_path / "a.pt2")
    with pytest.raises(ConfigError, match="did you mean onnx"):
        export_model("small", tmp_path / "a.onnx", format="onxx")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_gpu_is_accelerated_and_a_cpu_exact_by_default(checkpoint):
    assert default_backend(torch.device("cuda")) == "accelerated"
    assert default_backend(torch.device("cpu")) == "torch"
    with pytest.raises(ConfigError, match="did you mean torch"):
        RemoverOptions(backend="troch")
    remover = CloudRemover(checkpoint, device="cpu", options=RemoverOptions(backend="onnx"))
    remover.device = torch.device("cuda")  # in name alone
    with pytest.raises(ConfigError, match="computes on the CPU"):
        remover.tile  # noqa: B018


@pytest.mark.slow
def test_the_example_needs_neither_sader_nor_torch(graph, tmp_path):
    write_onnx(graph, tmp_path / "tile.onnx", facts_of(graph, "tiny"))
    script = (Path(__file__).parents[1] / "examples" / "onnx_inference.py").read_text()
    blocked = "import sys\nsys.modules['torch'] = sys.modules['sader'] = None\n"
    command = [sys.executable, "-c", blocked + script, str(tmp_path / "tile.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "(1, 4, 100, 90)" in done.stdout
