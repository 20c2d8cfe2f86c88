"""Checkpoints: one safetensors file with the model's config and card; strict loading, nothing is unpickled.

Shipped weights are in the package folder `weights/`. Names are resolved in this order: file, run folder, shipped name,
hub repository `owner/name@revision` (needs huggingface_hub).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sader.bands import BANDS_RGBN
from sader.config import to_dict
from sader.errors import CheckpointError, did_you_mean
from sader.files import file_digest, write_atomically
from sader.models import PRESETS, build_model, find_config, model_from_dict

if TYPE_CHECKING:
    from sader.models import AnyModel, AnyModelConfig

FORMAT = 1
WEIGHTS_DIR = Path(__file__).parent / "weights"
HUB_FILE = "model.safetensors"
CHECKSUM_FILE = "SHA256SUMS"
REVISION_LENGTH = 40
"""Hexadecimal digits of a commit: a hub download names one, because branches and tags can move."""
RENAMED_KEYS = {"look_widths": "refinement_widths"}
RENAMED_TENSORS = {"network.second_look.": "network.mask_refinement."}
"""Names in older files -> names in this version."""


@dataclass(frozen=True)
class Checkpoint:
    """A model with its config and card."""

    model: AnyModel
    config: AnyModelConfig
    card: dict[str, Any] = field(default_factory=dict)
    """Training data, licence, command, commit, figures: free keys, plain values."""
    sha256: str | None = None
    """Checksum of the file that the model was loaded from, as in SHA256SUMS; None for a model from no file."""


def save_checkpoint(
    path: str | Path,
    model: AnyModel,
    config: AnyModelConfig,
    *,
    card: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the model to `path`, complete or not at all. dtype=torch.float16 halves the file."""
    # Buffers (the frequencies of the embeddings) keep their precision: they are multiplied by large numbers.
    learned = {name for name, _ in model.named_parameters()}
    tensors = {
        name: value.detach().to("cpu", dtype if name in learned else value.dtype).contiguous()
        for name, value in model.state_dict().items()
    }
    header = {"format": FORMAT, "config": to_dict(config), "card": card or {}}
    write_atomically(Path(path), save(tensors, metadata={"sader": json.dumps(header)}))


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint stored at `path`, in float32 on the CPU and in evaluation mode.

    The tensors in the file are compared with the config before memory is allocated for the model.
    """
    path = Path(path)
    with _opened(path) as file:
        header = _header(path, file)
        config = model_from_dict(header["config"], where=f"{path.name}: config")
        doubled = sorted({band for band in config.network.bands if config.network.bands.count(band) > 1})
        if doubled:
            raise CheckpointError(f"{path}: its config lists {', '.join(doubled)} more than once. Get the file again.")
        stored = {_current_name(name): name for name in file.keys()}  # noqa: SIM118 - safe_open is no dictionary
        _check_count(path, config, len(stored))
        try:
            with torch.device("meta"):
                model = build_model(config)
        except RuntimeError as error:  # sizes that overflow
            raise CheckpointError(f"{path}: its config describes no network ({error}). Get the file again.") from error
        expected = {name: value.shape for name, value in model.state_dict().items()}
        _check_shapes(path, expected, {new: file.get_slice(old).get_shape() for new, old in stored.items()})
        tensors = {new: file.get_tensor(old) for new, old in stored.items()}
    bad = sorted(name for name, value in tensors.items() if not bool(value.isfinite().all()))
    if bad:
        raise CheckpointError(
            f"{path}: {len(bad)} tensors hold NaN or infinite values (first: {bad[0]}). The training diverged or the "
            "file is damaged; use an earlier checkpoint or get the file again."
        )
    fill_model(model, tensors)
    return Checkpoint(model=model.eval(), config=config, card=header["card"], sha256=file_digest(path))


def fill_model(model: AnyModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a model that was built on the meta device its weights, converted to its own types."""
    own = model.state_dict()
    copies = {name: value.to(own[name].dtype, copy=True) for name, value in tensors.items()}
    model.load_state_dict(copies, strict=True, assign=True)


def _check_count(path: Path, config: AnyModelConfig, found: int) -> None:
    """Refuse a config with more blocks than the file has tensors, before a network is built from it."""
    for name, value in asdict(config.network).items():
        layers = sum(value) if isinstance(value, tuple) and all(isinstance(one, int) for one in value) else value
        if any(word in name for word in ("block", "depth", "layer")) and isinstance(layers, int) and layers > found:
            raise CheckpointError(
                f"{path} does not fit its own config: {name} is {layers}, but it holds {found} tensors. Get the file "
                "again."
            )


def _check_shapes(path: Path, expected: dict[str, torch.Size], found: dict[str, list[int]]) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = sorted(name for name in expected.keys() & found.keys() if list(expected[name]) != list(found[name]))
    if missing or extra or wrong:
        raise CheckpointError(
            f"{path} does not fit its own config: {len(missing)} tensors missing, {len(extra)} unknown, {len(wrong)} "
            f"of another shape (first: {(missing + extra + wrong)[0]}). It was written by another version; get the "
            "file again."
        )


def _current_name(name: str) -> str:
    for old, new in RENAMED_TENSORS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def read_header(path: str | Path) -> dict[str, Any]:
    """Return config and card of a checkpoint as dictionaries, without loading its tensors."""
    path = Path(path)
    with _opened(path) as file:
        return _header(path, file)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; expected a .safetensors file.")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a complete safetensors file ({error}). "
            "It may be truncated or of another kind: copy or download it again."
        ) from error


def _header(path: Path, file: Any) -> dict[str, Any]:
    metadata = file.metadata() or {}
    if "sader" not in metadata:
        raise CheckpointError(f"{path} is a safetensors file without a sader config; expected one written by sader.")
    try:
        header = json.loads(metadata["sader"])
        known = header["format"] == FORMAT and isinstance(header["config"], dict)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} has an unreadable sader header ({error}); download it again.") from error
    if not known:
        raise CheckpointError(
            f"{path} has checkpoint format {header.get('format')}; this version reads {FORMAT}. Update sader."
        )
    card = header.setdefault("card", {})
    if not isinstance(card, dict):
        raise CheckpointError(f"{path} has a card of type {type(card).__name__}; expected a mapping. Get it again.")
    network = header["config"].get("network")
    if isinstance(network, dict):
        header["config"]["network"] = {RENAMED_KEYS.get(key, key): value for key, value in network.items()}
    return header


def shipped() -> dict[str, Path]:
    """Return the weights in the package, name -> file."""
    return {path.stem: path for path in sorted(WEIGHTS_DIR.glob("*.safetensors"))}


def checksums() -> dict[str, str]:
    """Return the SHA-256 of every file in the weights folder, by its relative path (the format of `sha256sum`)."""
    listing = WEIGHTS_DIR / CHECKSUM_FILE
    if not listing.is_file():
        return {}
    pairs = (line.split(maxsplit=1) for line in listing.read_text().splitlines() if line.strip())
    return {name.strip().lstrip("*"): digest for digest, name in pairs}


def verified(path: Path) -> Path:
    """Return the path of a shipped file after checking its SHA-256."""
    known = checksums().get(path.relative_to(WEIGHTS_DIR).as_posix())
    found = file_digest(path)
    if known != found:
        wanted = f"{known[:12]}..." if known else f"one in {CHECKSUM_FILE}"
        raise CheckpointError(
            f"{path} has checksum {found[:12]}..., expected {wanted}. The installation is damaged: install sader again."
        )
    return path


def shipped_guide(name: str, bands: Sequence[str]) -> Path | None:
    """Return the shipped weights of a learned guide for these bands, or None."""
    path = WEIGHTS_DIR / "guides" / "sader-guide-rgbn.safetensors"
    return verified(path) if name == "mae" and tuple(bands) == BANDS_RGBN and path.is_file() else None


def untrained(name: str, *, seed: int = 0) -> Checkpoint:
    """Return the checkpoint of a preset or baseline with random weights."""
    config = find_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Checkpoint(build_model(config), config, {"trained": False})


def load_any(name_or_path: str | Path) -> Checkpoint:
    """Return the checkpoint of a shipped name, a file or a preset (untrained)."""
    if str(name_or_path) in PRESETS:
        return untrained(str(name_or_path))
    return load_checkpoint(find_checkpoint(name_or_path))


def find_checkpoint(name_or_path: str | Path) -> Path:
    """Return the file for a path, a run's folder, a shipped name or a hub repository "owner/name@commit".

    The error for an unknown name lists where it was looked for.
    """
    text = str(name_or_path)
    path = Path(name_or_path)
    if path.is_file():
        return path
    names = shipped()
    if text in names:
        return verified(names[text])
    if path.is_dir() and text:
        if not (path / HUB_FILE).is_file():
            raise CheckpointError(f"the folder {text} holds no {HUB_FILE}; a training run writes it at its end.")
        return path / HUB_FILE
    looked = [f"the file {text}", f"the shipped weights ({', '.join(names) or 'none yet'})"]
    if text.count("/") == 1 and not path.is_absolute() and not path.suffix.startswith((".safetensors", ".pt")):
        found, note = _from_hub(text)
        if found is not None:
            return found
        looked.append(note)
    hint = did_you_mean(text, names) if names else ""
    raise CheckpointError(f"no weights called {text!r}; looked at {'; '.join(looked)}{hint}")


def _from_hub(text: str) -> tuple[Path | None, str]:
    """Return (the downloaded file or None, what was tried). The revision is a full commit hash."""
    name, _, revision = text.partition("@")
    if len(revision) != REVISION_LENGTH or not all(digit in "0123456789abcdef" for digit in revision):
        return None, (
            f"the hub (skipped: {text!r} names no commit; write owner/name@ and the {REVISION_LENGTH} digits of one)"
        )
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        return None, "the hub (skipped: huggingface_hub is not installed)"
    try:
        return Path(hf_hub_download(name, HUB_FILE, revision=revision)), ""
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        return None, f"the hub repository {name} at {revision[:12]} ({type(error).__name__})"
