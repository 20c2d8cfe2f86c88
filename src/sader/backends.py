"""Who computes the tiles of a `CloudRemover`: PyTorch as it is, `sader.fast`, or the exported graph in ONNX Runtime.

The plain path is always there. The other one is chosen by name, or by "auto" where measuring says that it pays
(benchmarks/RESULTS.md, issue 6): making the graph takes half a minute, and each tile then takes a little less time.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sader.checkpoint import Checkpoint
from sader.errors import ConfigError, did_you_mean, require
from sader.tilegraph import TileResult

BACKENDS = ("torch", "quick", "onnx", "auto")
PAYS_FROM = 100
"""Tiles of a scene from which the half minute for making the graph is won back."""


def choose_backend(asked: str | None, *, device: torch.device, tiles: int) -> str:
    """Return "torch", "quick" or "onnx".

    None: "quick" on a GPU, else "torch". "auto" takes ONNX Runtime for large scenes on a CPU where it is installed.
    """
    if asked is None or (asked == "auto" and device.type == "cuda"):
        return "quick" if device.type == "cuda" else "torch"
    if asked not in BACKENDS:
        raise ConfigError(f"unknown backend {asked!r}{did_you_mean(asked, BACKENDS)}")
    if asked == "onnx" and device.type != "cpu":
        raise ConfigError(f"backend onnx computes on the CPU, but the device is {device}. Use --device cpu.")
    if asked != "auto":
        return asked
    installed = all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))
    return "onnx" if installed and device.type == "cpu" and tiles >= PAYS_FROM else "torch"


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
            from sader.export import facts_of, make_graph, write_onnx

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
