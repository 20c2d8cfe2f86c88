"""Checkpoints: one safetensors file with the model's config and card inside; strict loading, nothing unpickled.

Shipped weights live in the package folder `weights/`. Names are resolved in the order: file, shipped name, hub
repository (`owner/name`, only with huggingface_hub installed).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sader.bands import BANDS_RGBN
from sader.baselines.baseline import Baseline, BaselineModelConfig
from sader.config import ModelConfig, to_dict
from sader.errors import CheckpointError, did_you_mean
from sader.files import write_atomically
from sader.method.diffusion import Denoiser
from sader.model.mtcdn import MTCDN
from sader.models import AnyModelConfig, build_baseline, model_from_dict

FORMAT = 1
WEIGHTS_DIR = Path(__file__).parent / "weights"
HUB_FILE = "model.safetensors"
CHECKSUM_FILE = "SHA256SUMS"


@dataclass(frozen=True)
class Checkpoint:
    """A model with what is known about it."""

    model: Denoiser | Baseline
    config: AnyModelConfig
    card: dict[str, Any] = field(default_factory=dict)
    """Training data, licence, command, commit, figures: free keys, plain values."""


@overload
def build_model(config: ModelConfig) -> Denoiser: ...
@overload
def build_model(config: BaselineModelConfig) -> Baseline: ...
@overload
def build_model(config: AnyModelConfig) -> Denoiser | Baseline: ...
def build_model(config: AnyModelConfig) -> Denoiser | Baseline:
    """Return the untrained model that `config` describes: SADER's denoiser, or a baseline system."""
    if isinstance(config, BaselineModelConfig):
        return build_baseline(config)
    return Denoiser(MTCDN(config.network), config.diffusion)


def save_checkpoint(
    path: str | Path,
    model: Denoiser | Baseline,
    config: AnyModelConfig,
    *,
    card: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the model to `path` as a whole or not at all. dtype=torch.float16 halves the file."""
    # Buffers (the embeddings' frequencies) keep their precision: an angle is a frequency times a large number.
    learned = {name for name, _ in model.named_parameters()}
    tensors = {
        name: value.detach().to("cpu", dtype if name in learned else value.dtype).contiguous()
        for name, value in model.state_dict().items()
    }
    header = {"format": FORMAT, "config": to_dict(config), "card": card or {}}
    write_atomically(Path(path), save(tensors, metadata={"sader": json.dumps(header)}))


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint stored at `path`, in float32 on the CPU and in evaluation mode."""
    path = Path(path)
    header, tensors = _read(path)
    config = model_from_dict(header["config"], where=f"{path.name}: config")
    model = build_model(config)
    wanted, found = model.state_dict(), tensors
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    wrong = sorted(name for name in wanted.keys() & found.keys() if wanted[name].shape != found[name].shape)
    if missing or extra or wrong:
        first = (missing + extra + wrong)[0]
        raise CheckpointError(
            f"{path} does not fit its own config: {len(missing)} tensors missing, {len(extra)} unknown, "
            f"{len(wrong)} of another shape (first: {first}). It was written by another version; get the file again."
        )
    model.load_state_dict({name: found[name].to(wanted[name].dtype) for name in wanted}, strict=True)
    return Checkpoint(model=model.eval(), config=config, card=header.get("card", {}))


def read_header(path: str | Path) -> dict[str, Any]:
    """Return config and card of a checkpoint as dictionaries, without loading its tensors."""
    return _read(Path(path), tensors=False)[0]


def _read(path: Path, *, tensors: bool = True) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; expected a .safetensors file.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file ({error}). "
            "It may be truncated or of another kind: copy or download it again."
        ) from error
    if "sader" not in metadata:
        raise CheckpointError(f"{path} is a safetensors file without a sader config; expected one written by sader.")
    try:
        header = json.loads(metadata["sader"])
        known = header["format"] == FORMAT and isinstance(header["config"], dict)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has an unreadable sader header ({error}); download it again.") from error
    if not known:
        raise CheckpointError(
            f"{path} has checkpoint format {header.get('format')}; this version reads {FORMAT}. Update sader."
        )
    return header, values


def shipped() -> dict[str, Path]:
    """Return the weights inside the package, name -> file."""
    return {path.stem: path for path in sorted(WEIGHTS_DIR.glob("*.safetensors"))}


def checksums() -> dict[str, str]:
    """Return the SHA-256 of every file of the weights folder, by its path in there (as `sha256sum` writes it)."""
    listing = WEIGHTS_DIR / CHECKSUM_FILE
    if not listing.is_file():
        return {}
    pairs = (line.split(maxsplit=1) for line in listing.read_text().splitlines() if line.strip())
    return {name.strip().lstrip("*"): digest for digest, name in pairs}


def verified(path: Path) -> Path:
    """Return the path of a shipped file after checking that it holds what was shipped."""
    known = checksums().get(path.relative_to(WEIGHTS_DIR).as_posix())
    found = hashlib.sha256(path.read_bytes()).hexdigest()
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


def find_checkpoint(name_or_path: str | Path) -> Path:
    """Return the file for a path, a run's folder, a shipped name or a hub repository; say where it looked for none."""
    text = str(name_or_path)
    path = Path(name_or_path)
    if path.is_file():
        return path
    names = shipped()
    if text in names:
        return verified(names[text])
    if path.is_dir() and text:
        if not (path / HUB_FILE).is_file():
            raise CheckpointError(f"the folder {text} holds no {HUB_FILE}; a run writes it when it ends.")
        return path / HUB_FILE
    looked = [f"the file {text}", f"the shipped weights ({', '.join(names) or 'none yet'})"]
    if text.count("/") == 1 and not path.suffix and not path.is_absolute():
        try:
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
        except ImportError:
            looked.append("the hub (skipped: huggingface_hub is not installed)")
        else:
            try:
                return Path(hf_hub_download(text, HUB_FILE))
            except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
                looked.append(f"the hub repository {text} ({type(error).__name__})")
    hint = did_you_mean(text, names) if names else ""
    raise CheckpointError(f"no weights called {text!r}; looked at {'; '.join(looked)}{hint}")
