"""Checkpoints: bit-exact round trips, and every kind of damaged file refused with its path and what to do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sader import checkpoint as module
from sader.checkpoint import (
    build_model,
    find_checkpoint,
    load_checkpoint,
    read_header,
    save_checkpoint,
    write_atomically,
)
from sader.config import ModelConfig, to_dict
from sader.errors import CheckpointError, ConfigError, OutputError
from sader.method.diffusion import Denoiser
from sader.presets import get_preset


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return get_preset("small").replace(
        name="tiny",
        network={
            "widths": (16, 32),
            "blocks": (1, 1),
            "fusion_width": 16,
            "cloud_widths": (8,),
            "look_widths": (8,),
            "emb_width": 16,
        },
        diffusion={"steps": 3},
    )


@pytest.fixture(scope="module")
def model(config: ModelConfig) -> Denoiser:
    torch.manual_seed(0)
    built = build_model(config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return built


@pytest.fixture
def path(tmp_path: Path, model: Denoiser, config: ModelConfig) -> Path:
    file = tmp_path / "sub" / "model.safetensors"
    save_checkpoint(file, model, config, card={"licence": "CC0", "psnr": 31.5, "data": ["a", "b"]})
    return file


def test_round_trip_is_bit_exact(path, model, config):
    loaded = load_checkpoint(path)
    assert loaded.config == config
    assert loaded.card == {"licence": "CC0", "psnr": 31.5, "data": ["a", "b"]}
    assert not loaded.model.training
    before, after = model.state_dict(), loaded.model.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
        assert value.dtype == after[name].dtype
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"], "nothing is left behind"


def test_same_model_same_bytes(path, model, config, tmp_path):
    again = tmp_path / "again.safetensors"
    save_checkpoint(again, model, config, card={"licence": "CC0", "psnr": 31.5, "data": ["a", "b"]})
    assert again.read_bytes() == path.read_bytes()


def test_half_file_is_half_as_large_and_close(path, model, config, tmp_path):
    half = tmp_path / "half.safetensors"
    save_checkpoint(half, model, config, dtype=torch.float16)
    weights = sum(p.numel() for p in model.parameters())
    assert path.stat().st_size - half.stat().st_size > 1.9 * weights
    loaded = load_checkpoint(half).model.state_dict()
    for name, value in model.state_dict().items():
        assert loaded[name].dtype == torch.float32
        torch.testing.assert_close(loaded[name], value, rtol=1e-3, atol=1e-6)
    # Frequencies are multiplied by large numbers: they keep their bits.
    frequencies = "network.date_embedding.features.frequencies"
    assert torch.equal(loaded[frequencies], model.state_dict()[frequencies])


def test_header_is_read_without_the_tensors(path, config, monkeypatch):
    monkeypatch.setattr(module, "build_model", lambda config: pytest.fail("no model is needed"))
    header = read_header(path)
    assert header["config"]["name"] == "tiny"
    assert header["card"]["licence"] == "CC0"
    assert header["config"] == json.loads(json.dumps(to_dict(config)))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_file(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"not a whole safetensors file .*download it again") as error:
        load_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"garbage", b"\x00" * 4096, bytes(range(1, 256)) * 2, b"PK\x03\x04" + b"x" * 100])
def test_file_of_another_kind(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* is not a whole safetensors file"):
        load_checkpoint(file)


def test_missing_file_and_folder(tmp_path):
    for file in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match=r"no checkpoint at .*; expected a .safetensors file") as error:
            load_checkpoint(file)
        assert str(file) in str(error.value)


def rewrite(path: Path, *, metadata: dict[str, str] | None = None, **tensors: torch.Tensor | None) -> None:
    """Write the file again with other metadata, or with tensors replaced (None takes one away)."""
    state = load_file(path)
    header = json.dumps(read_header(path))
    for name, value in tensors.items():
        if value is None:
            del state[name]
        else:
            state[name] = value
    save_file(state, path, metadata={"sader": header} if metadata is None else metadata)


def test_safetensors_without_our_header(path):
    rewrite(path, metadata={"other": "x"})
    with pytest.raises(CheckpointError, match="safetensors file without a sader config; expected one written by sader"):
        load_checkpoint(path)


@pytest.mark.parametrize("header", ["not json", "[]", "{}", '{"format": 1}', "null"])
def test_unreadable_header(path, header):
    rewrite(path, metadata={"sader": header})
    with pytest.raises(CheckpointError, match=r"model\.safetensors has an unreadable sader header"):
        load_checkpoint(path)


def test_format_of_the_future(path):
    rewrite(path, metadata={"sader": json.dumps({**read_header(path), "format": 2})})
    with pytest.raises(CheckpointError, match=r"has checkpoint format 2; this version reads 1\. Update sader"):
        load_checkpoint(path)


OUT = "network.out.weight"


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({OUT: torch.zeros(1, 2, 3, 3)}, "0 tensors missing, 0 unknown, 1 of another shape .first: network.out.weight"),
        ({OUT: None}, "1 tensors missing, 0 unknown, 0 of another shape .first: network.out.weight"),
        ({"network.extra": torch.zeros(1)}, "0 tensors missing, 1 unknown, 0 of another shape .first: network.extra"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(path, tensors, text):
    rewrite(path, **tensors)
    with pytest.raises(CheckpointError, match=text) as error:
        load_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"wdths": [1]}, r"model\.safetensors: config\.network\.wdths; did you mean widths"),
        ({"widths": "wide"}, r"model\.safetensors: config\.network\.widths is 'wide'; expected a list"),
    ],
)
def test_unknown_config_key_is_named(path, changes, text):
    header = read_header(path)
    header["config"]["network"].update(changes)
    rewrite(path, metadata={"sader": json.dumps(header)})
    with pytest.raises(ConfigError, match=text):
        load_checkpoint(path)


# ------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_failing_write_leaves_the_old_file(path, monkeypatch, step):
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"sader.files.os.{step}", full)
    with pytest.raises(OutputError, match=r"cannot write .*: No space left on device\. Free space") as error:
        write_atomically(path, b"new")
    assert str(path) in str(error.value)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no partial file stays"


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(OutputError, match=r"cannot write .*choose another folder"):
        write_atomically(tmp_path / "taken" / "model.safetensors", b"x")


def test_write_makes_folders_and_replaces(tmp_path):
    file = tmp_path / "a" / "b" / "c.bin"
    write_atomically(file, b"one")
    write_atomically(file, b"two")
    assert file.read_bytes() == b"two"


# ------------------------------------------------------------------------------------------------ finding


def test_find_by_path_and_by_shipped_name(path, tmp_path, monkeypatch):
    assert find_checkpoint(path) == path
    assert find_checkpoint(str(path)) == path
    monkeypatch.setattr(module, "WEIGHTS_DIR", path.parent)
    with pytest.raises(CheckpointError, match="expected one in SHA256SUMS"):
        find_checkpoint("model")
    (path.parent / "SHA256SUMS").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  model.safetensors\n")
    assert find_checkpoint("model") == path


def test_the_folder_of_a_run_means_its_weights(path, tmp_path):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"first holds no model.safetensors; a run writes it when it ends"):
        find_checkpoint(run)
    (run / "model.safetensors").write_bytes(path.read_bytes())
    assert find_checkpoint(run) == find_checkpoint(str(run)) == run / "model.safetensors"


def test_find_says_where_it_looked(path, monkeypatch):
    monkeypatch.setattr(module, "WEIGHTS_DIR", path.parent)
    with pytest.raises(CheckpointError, match=r"no weights called 'modle'; looked at .*did you mean model\?") as error:
        find_checkpoint("modle")
    assert "the file modle" in str(error.value)
    assert "the shipped weights (model)" in str(error.value)


def test_find_names_the_hub_it_could_not_ask(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"the hub \(skipped: huggingface_hub is not installed\)"):
        find_checkpoint("owner/name")
