"""Checkpoints: bit-exact round trips, and every kind of damaged file refused with its path and what to do."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from sader import checkpoint as module
from sader.checkpoint import find_checkpoint, load_checkpoint, read_header, save_checkpoint
from sader.config import to_dict
from sader.errors import CheckpointError, ConfigError, OutputError
from sader.files import write_atomically
from sader.method.diffusion import Denoiser
from sader.models import ModelConfig, build_model, get_preset


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return get_preset("small").replace(
        name="tiny",
        network={
            "widths": (16, 32),
            "blocks": (1, 1),
            "fusion_width": 16,
            "cloud_widths": (8,),
            "refinement_widths": (8,),
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
    with pytest.raises(CheckpointError, match=r"not a complete safetensors file .*download it again") as error:
        load_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"garbage", b"\x00" * 4096, bytes(range(1, 256)) * 2, b"PK\x03\x04" + b"x" * 100])
def test_file_of_another_kind(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* is not a complete safetensors file"):
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
    with pytest.raises(OutputError, match=r"cannot write .*: the disk is full\. Free some space") as error:
        write_atomically(path, b"new")
    assert str(path) in str(error.value)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no partial file stays"


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(OutputError, match=r"cannot write .*Choose a folder"):
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
    with pytest.raises(CheckpointError, match=r"first holds no model.safetensors; a training run writes it at its end"):
        find_checkpoint(run)
    (run / "model.safetensors").write_bytes(path.read_bytes())
    assert find_checkpoint(run) == find_checkpoint(str(run)) == run / "model.safetensors"


def test_find_says_where_it_looked(path, monkeypatch):
    monkeypatch.setattr(module, "WEIGHTS_DIR", path.parent)
    with pytest.raises(CheckpointError, match=r"no weights called 'modle'; looked at .*did you mean model\?") as error:
        find_checkpoint("modle")
    assert "the file modle" in str(error.value)
    assert "the shipped weights (model)" in str(error.value)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_find_names_the_hub_it_could_not_ask(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"the hub \(skipped: huggingface_hub is not installed\)"):
        find_checkpoint(f"owner/name@{COMMIT}")


@pytest.mark.parametrize("name", ["owner/name", "owner/name@main", f"owner/name@{COMMIT[:-1]}", "owner/name@v1.0"])
def test_hub_downloads_are_pinned_to_a_commit(name, path, monkeypatch):
    asked = []

    def download(*given, **named):
        asked.append((given, named))
        return str(path)

    hub, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
    hub.hf_hub_download = download
    errors.HfHubHTTPError = errors.LocalEntryNotFoundError = OSError
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    with pytest.raises(CheckpointError, match=r"names no commit; write owner/name@ and the 40 digits"):
        find_checkpoint(name)
    assert not asked
    assert find_checkpoint(f"owner/name@{COMMIT}") == path
    assert asked == [(("owner/name", "model.safetensors"), {"revision": COMMIT})]


# ------------------------------------------------------------------------------------------------ hostile files


def rewritten(path, *, tensors=None, **changes):
    """Write the checkpoint again with changes to its header or tensors."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["sader"])
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for key, value in changes.items():
        header[key] = value(header[key]) if callable(value) else value
    path.write_bytes(save(values | (tensors or {}), metadata={"sader": json.dumps(header)}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(path, value):
    with safe_open(path, framework="pt") as file:
        name = next(name for name in file.keys() if name.endswith("stem.weight"))  # noqa: SIM118
        tensor = file.get_tensor(name).clone()
    tensor[0, 0, 0, 0] = value
    rewritten(path, tensors={name: tensor})
    with pytest.raises(CheckpointError, match=rf"1 tensors hold NaN or infinite values \(first: {name}\)"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "network",
    [
        {"widths": [2**20, 2**21], "head_width": 2**20},
        {"widths": [2**40, 2**41], "head_width": 2**40},
        {"blocks": [100_000, 100_000]},
        {"emb_width": 2**30},
    ],
    ids=["widths", "overflow", "blocks", "embedding"],
)
def test_sizes_are_compared_with_the_file_before_memory_is_taken(path, network):
    rewritten(path, config=lambda config: {**config, "network": {**config["network"], **network}})
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError, match=r"does not fit its own config|describes no network"):
        load_checkpoint(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes
    assert time.process_time() - started < 20


@pytest.mark.parametrize("card", [["a", "list"], "text", 3])
def test_a_card_that_is_no_mapping_is_refused(path, card):
    rewritten(path, card=card)
    with pytest.raises(CheckpointError, match=r"card of type \w+; expected a mapping"):
        load_checkpoint(path)


def test_doubled_bands_are_refused(path):
    def doubled(config):
        bands = config["network"]["bands"]
        return {**config, "network": {**config["network"], "bands": [*bands[:-1], bands[0]]}}

    rewritten(path, config=doubled)
    with pytest.raises(CheckpointError, match="more than once"):
        load_checkpoint(path)


def test_names_of_older_files_are_read(path):
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["sader"])
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = load_checkpoint(path)
    network = header["config"]["network"]
    network["look_widths"] = network.pop("refinement_widths")
    old = {name.replace("network.mask_refinement.", "network.second_look."): value for name, value in values.items()}
    assert old.keys() != values.keys()
    path.write_bytes(save(old, metadata={"sader": json.dumps(header)}))
    found = load_checkpoint(path)
    assert found.config == wanted.config
    for name, value in wanted.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value)
