"""Who computes the tiles of a `CloudRemover`: PyTorch as it is, `accelerate`, or the exported graph in ONNX Runtime.

The plain path is always there. The others are chosen by name, or by "auto", which takes what measuring found fastest
(benchmarks/RESULTS.md, issue 6): "quick", on a GPU and on a CPU alike. ONNX Runtime comes after it on a CPU, and
making its graph takes half a minute; it is for those who want no PyTorch where the model runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sader.checkpoint import Checkpoint
from sader.errors import ConfigError, did_you_mean, require
from sader.inference.tile import TileResult

BACKENDS = ("torch", "quick", "onnx", "auto")


def choose_backend(asked: str | None, *, device: torch.device) -> str:
    """Return "torch", "quick" or "onnx".

    None: "quick" on a GPU, else "torch", which rounds alike on every processor. "auto": the fastest, "quick".
    """
    if asked is None:
        return "quick" if device.type == "cuda" else "torch"
    if asked not in BACKENDS:
        raise ConfigError(f"unknown backend {asked!r}{did_you_mean(asked, BACKENDS)}")
    if asked == "onnx" and device.type != "cpu":
        raise ConfigError(f"backend onnx computes on the CPU, but the device is {device}. Use --device cpu.")
    return "quick" if asked == "auto" else asked


def open_session(path: str | Path, *, threads: int | None = None) -> Any:
    """Return an ONNX Runtime session of a file; threads: None = as many as PyTorch uses."""
    runtime = require("onnxruntime", extra="onnx", purpose="the ONNX backend")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3  # it warns about every buffer that a free size keeps it from reusing
    # Waiting threads that spin take the core from whoever has work, the reader of the next tile for one.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class OnnxTiles:
    """Tiles through ONNX Runtime; a graph is made when it is first needed and lives as long as this object."""

    def __init__(self, checkpoint: Checkpoint, *, threshold: float, growth: int) -> None:
        require("onnx", extra="onnx", purpose="the ONNX backend")
        require("onnxruntime", extra="onnx", purpose="the ONNX backend")
        self.checkpoint, self.threshold, self.growth = checkpoint, threshold, growth
        self._sessions: dict[tuple[int, bool, bool], Any] = {}

    def session(self, *, steps: int, estimate: bool, scene: bool) -> Any:
        """Return the session of one variant of the graph; arguments as in `TileGraph`."""
        key = (steps, estimate, scene)
        if key not in self._sessions:
            from sader.inference.export import facts_of, make_graph, write_onnx

            graph = make_graph(
                self.checkpoint, steps=steps, threshold=self.threshold, growth=self.growth, estimate=estimate,
                scene=scene,
            )  # fmt: skip
            with tempfile.TemporaryDirectory(prefix="sader-onnx-") as folder:
                path = Path(folder) / "tile.onnx"
                write_onnx(graph, path, facts_of(graph, self.checkpoint.config.name))
                self._sessions[key] = open_session(path)
        return self._sessions[key]

    def __call__(
        self,
        *,
        cloudy: Tensor,
        valid: Tensor,
        cloud: Tensor,
        reference: Tensor,
        noises: Sequence[Tensor],
        band_present: Tensor,
        change: Tensor | None,
        steps: int,
    ) -> tuple[list[Tensor], TileResult]:
        """Return (one image per noise, the last result); arguments as in `TileGraph.forward`."""
        estimate = bool(cloud.isnan().any())
        session = self.session(steps=steps, estimate=estimate, scene=change is not None)
        feed = {
            "cloudy": cloudy, "valid": valid, "cloud": cloud, "reference": reference, "band_present": band_present,
        }  # fmt: skip
        if change is not None:
            feed["change"] = change
        arrays = {name: value.numpy() for name, value in feed.items()}
        wanted = {one.name for one in session.get_inputs()}
        arrays = {name: value for name, value in arrays.items() if name in wanted}
        images, made = [], []
        for noise in noises:
            made = [torch.from_numpy(one) for one in session.run(None, arrays | {"noise": noise.numpy()})]
            images.append(made[0])
        return images, TileResult(*made)
