"""A remover on its way to other processes: its weights as bytes, and one model per process at the other end.

Not from the paper. In a dask graph a `Shipment` is the result of ONE task that every tile depends on, so dask moves it
to a worker once, and can make it again when the worker that held it is lost; a process builds the model once and finds
it again by its checksum. A cluster's processes already trust each other with code; the weights themselves still travel
as safetensors.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from sader.baselines.baseline import BaselineModelConfig
from sader.checkpoint import Checkpoint
from sader.errors import ConfigError
from sader.models import build_model

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover, RemoverOptions
    from sader.presets import ModelConfig

MODELS_PER_PROCESS = 2
"""Models that a worker keeps; one job needs one."""

_lock = threading.Lock()
_models: OrderedDict[str, CloudRemover] = OrderedDict()
_turns: dict[str, threading.Lock] = {}
counts = {"arrived": 0, "built": 0}
"""How many shipments this process has received and how many models it has built; tests and reports read it."""


class Shipment:
    """A remover that can be sent: in its own process it is that remover, elsewhere a copy with the same bits."""

    def __init__(self, remover: CloudRemover) -> None:
        self.config: ModelConfig | BaselineModelConfig = remover.config
        self.options: RemoverOptions = remover.options
        self.device = remover.device.type
        self.weights = pack(remover.model)
        digest = hashlib.sha256(self.weights)
        digest.update(repr((self.config, self.options, self.device)).encode())
        self.checksum = digest.hexdigest()
        self._own: CloudRemover | None = remover

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        counts["arrived"] += 1

    def __sizeof__(self) -> int:
        return len(self.weights)

    def __repr__(self) -> str:
        return f"Shipment({self.config.name}, {len(self.weights) / 2**20:.1f} MiB, {self.checksum[:12]})"

    def __dask_tokenize__(self) -> str:
        return self.checksum

    def remover(self) -> CloudRemover:
        """Return the remover, built the first time this process asks for it."""
        if self._own is not None:
            return self._own
        with _lock:
            if self.checksum not in _models:
                _models[self.checksum] = self._build()
                counts["built"] += 1
                while len(_models) > MODELS_PER_PROCESS:
                    _models.popitem(last=False)
            _models.move_to_end(self.checksum)
            return _models[self.checksum]

    def turn(self) -> AbstractContextManager[Any]:
        """Return what a task holds while it uses the model: on a GPU its turn, as tiles side by side would not fit."""
        if self.device == "cpu":
            return nullcontext()
        with _lock:
            return _turns.setdefault(self.device, threading.Lock())

    def _build(self) -> CloudRemover:
        from sader.inference.remover import CloudRemover

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "the remover is on a GPU (cuda), but this worker has none; expected one kind of device everywhere. "
                "Make the remover with device='cpu', or start the workers on machines with a GPU."
            )
        model = unpack(self.weights, self.config)
        return CloudRemover(Checkpoint(model, self.config, {}), device=self.device, options=self.options)


def pack(model: torch.nn.Module) -> bytes:
    """Return the state of a model as safetensors bytes, without loss.

    Shipped weights are float16 numbers in float32: those travel as float16, half the bytes.
    """

    def smallest(value: torch.Tensor) -> torch.Tensor:
        value = value.detach().cpu().contiguous()
        half = value.to(torch.float16)
        exact = value.dtype == torch.float32 and torch.equal(half.to(torch.float32), value)
        return half if exact else value

    return save({name: smallest(value) for name, value in model.state_dict().items()})


def unpack(weights: bytes, config: ModelConfig | BaselineModelConfig) -> Any:
    """Return the model of `config` with the weights that `pack` wrote, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):  # building draws random weights; the process's own generator stays put
        model = build_model(config)
    wanted, found = model.state_dict(), load(weights)
    model.load_state_dict({name: found[name].to(wanted[name].dtype) for name in wanted}, strict=True)
    return model.eval()
