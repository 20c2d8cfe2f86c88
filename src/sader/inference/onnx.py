"""Export of a model as ONNX or as a `torch.export` program, and the backend that runs tiles in ONNX Runtime.

The exported graph is `SaderTile` for any number of tiles, dates and pixels. Cutting a scene into tiles, blending and
copying kept pixels are not part of it. Height and width must be multiples of 8: pad by reflection
(`numpy.pad(..., mode="reflect")`) and cut the result.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sader._version import __version__
from sader.checkpoint import Checkpoint, load_any
from sader.errors import ConfigError, OutputError, check_known, require
from sader.inference.masks import date_heads, mask_network
from sader.inference.noise import NoiseOf
from sader.inference.tile import SaderTile, TileInputs, TileOutput, TileSettings
from sader.method.diffusion import Denoiser
from sader.model.heads import MaskNetworkConfig
from sader.model.matching import CELL
from sader.models import ModelConfig

Format = Literal["onnx", "torch-export"]
FORMATS = ("onnx", "torch-export")
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}
OPSET = 17
LARGEST = 2048
"""Largest edge in pixels: the number of halvings of the smooth fill is fixed in the graph."""
INPUTS = ("cloudy", "valid", "cloud", "reference", "noise", "band_present")
OUTPUTS = ("clear", "cloud_used", "error")
_PIXELS = {"cloudy": (3, 4), "valid": (2, 3), "cloud": (2, 3), "noise": (3, 4), "change": (3, 4), "shown": (1, 2)}
_PIXELS |= {"clear": (2, 3), "cloud_used": (2, 3), "error": (2, 3)}
_DATED = ("cloudy", "valid", "cloud", "change", "cloud_used")


def export_model(
    name_or_path: str | Path, out: str | Path, *, format: Format = "onnx", steps: int | None = None
) -> dict[str, Any]:
    """Write the model to `out` and return the facts stored in the file.

    name_or_path: shipped weights, a checkpoint file, or a preset (untrained). steps: Euler steps; None = its own.
    """
    check_known("format", format, FORMATS)
    target = Path(out)
    if target.suffix != SUFFIXES[format]:
        raise OutputError(f"the output is {target}; a file of format {format} is called *{SUFFIXES[format]}.")
    if format == "onnx":
        require("onnx", extra="onnx", purpose="writing ONNX")
    graph = make_graph(load_any(name_or_path), steps=steps)
    facts = facts_of(graph, str(name_or_path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        (write_onnx if format == "onnx" else write_program)(graph, partial, facts)
        os.replace(partial, target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}. Choose another folder.") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return facts


class TileGraph(nn.Module):
    """`SaderTile` with plain tensors as inputs and outputs and everything else fixed.

    steps: Euler steps without resampling. estimate: False leaves mask network and cloud head out, for tiles with given
    masks. scene: True adds the input `change` of the scene match and the output `shown`.
    """

    def __init__(self, tile: SaderTile, *, steps: int, estimate: bool = True, scene: bool = False) -> None:
        super().__init__()
        network = tile.network.config
        if not network.matches_dates:
            raise ConfigError(
                "this model makes no composite; only such networks (the shipped ones, presets small and small_msi) can "
                "be exported. Use the torch backend."
            )
        if network.date_input == "days" or network.aux_bands:
            raise ConfigError(
                "this model reads days or auxiliary bands, for which the exported graph has no input. Use the torch "
                "backend."
            )
        if tile.settings.solver != "euler":
            raise ConfigError(f"the exported graph takes Euler steps; the solver is {tile.settings.solver}.")
        tile.denoiser.sigmas(steps)  # cached before the graph is traced
        self.tile, self.steps, self.estimate, self.scene = tile, steps, estimate, scene

    def forward(
        self,
        cloudy: Tensor,
        valid: Tensor,
        cloud: Tensor,
        reference: Tensor,
        noise: Tensor,
        band_present: Tensor,
        change: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return (clear, mask, error), and `shown` with a scene match; H and W are multiples of the network's.

        cloudy: (B, T, C, H, W) reflectance, 0.5 for nodata; valid: bool (B, T, H, W).
        cloud: (B, T, H, W), 1 cloud or shadow, 0 clear, NaN unknown. reference: (B,) long, -1 for none.
        noise: (B, 1, C, H, W) standard normal. band_present: bool (B, C). change: (B, T, C, H, W) reflectance.
        """
        known = not self.estimate
        inputs = TileInputs(cloudy, valid, cloud, reference, band_present, change=change, known_masks=known)
        images, used, error, shown, _ = self.tile(inputs, [lambda draw, channels: noise[:, 0]], steps=self.steps)
        assert used is not None
        clear = images[0]
        result = (clear, used, torch.zeros_like(clear) if error is None else error)
        return result if shown is None else (*result, shown)


def make_graph(
    checkpoint: Checkpoint, *, steps: int | None = None, estimate: bool = True, scene: bool = False
) -> TileGraph:
    """Return the graph of a checkpoint; arguments as in `TileGraph`. steps: None = the checkpoint's own."""
    if steps is not None and steps < 1:
        raise ConfigError(f"steps is {steps}; expected at least 1.")
    model, config = checkpoint.model, checkpoint.config
    if not isinstance(model, Denoiser) or not isinstance(config, ModelConfig):
        raise ConfigError(f"the model {config.name!r} is not one of SADER's own networks; only those can be exported.")
    if steps is None and config.sampling.resample_steps:
        raise ConfigError("this model resamples by default, which is not part of the graph. Give steps, such as 4.")
    count = steps or config.diffusion.steps
    return TileGraph(SaderTile(model, TileSettings()).eval(), steps=count, estimate=estimate, scene=scene).eval()


def unit_of(graph: TileGraph) -> int:
    """Return the number that height and width must be multiples of: units of the networks, whole statistics cells."""
    unit = graph.tile.network.config.multiple
    unit = unit if unit % CELL == 0 else unit * CELL
    return math.lcm(unit, MaskNetworkConfig().multiple) if graph.estimate else unit


def facts_of(graph: TileGraph, name: str) -> dict[str, Any]:
    """Return name, bands, sizes, inputs and outputs as plain values; they are stored in the file."""
    return {
        "sader": __version__,
        "model": Path(name).stem if Path(name).suffix else name,
        "bands": list(graph.tile.network.config.bands),
        "steps": graph.steps,
        "multiple": unit_of(graph),
        "largest": LARGEST,
        "inputs": list(names_of(graph)[0]),
        "outputs": list(names_of(graph)[1]),
    }


def names_of(graph: TileGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the graph's inputs and outputs."""
    return (*INPUTS, "change") if graph.scene else INPUTS, (*OUTPUTS, "shown") if graph.scene else OUTPUTS


def example_inputs(
    graph: TileGraph, *, batch: int = 2, dates: int = 3, height: int | None = None, width: int | None = None
) -> tuple[Tensor, ...]:
    """Return inputs of these sizes, random but fixed; one date without a mask, some pixels without data."""
    unit = unit_of(graph)
    height, width = height or 5 * unit, width or 7 * unit
    bands = len(graph.tile.network.config.bands)
    generator = torch.Generator().manual_seed(0)
    cloudy = 0.4 * torch.rand(batch, dates, bands, height, width, generator=generator)
    valid = torch.rand(batch, dates, height, width, generator=generator) > 0.02
    cloud = (torch.rand(batch, dates, height, width, generator=generator) > 0.7).float()
    if graph.estimate:
        cloud[:, 0] = torch.nan
    noise = torch.randn(batch, 1, bands, height, width, generator=generator)
    present = torch.ones(batch, bands, dtype=torch.bool)
    reference = torch.zeros(batch, dtype=torch.long)
    inputs = (cloudy, valid, cloud, reference, noise, present)
    return (*inputs, torch.zeros_like(cloudy)) if graph.scene else inputs


def _free_axes(names: Sequence[str], batch: Any, dates: Any, height: Any, width: Any) -> dict[str, dict[int, Any]]:
    """Return for each input or output the axes of free size."""
    axes: dict[str, dict[int, Any]] = {}
    for name in names:
        axes[name] = {0: batch} | ({1: dates} if name in _DATED else {})
        axes[name] |= dict(zip(_PIXELS.get(name, ()), (height, width), strict=False))
    return axes


def write_onnx(graph: TileGraph, path: str | Path, facts: dict[str, Any]) -> None:
    """Write the graph as ONNX (opset 17), with free batch, dates, height and width."""
    import onnx

    inputs, outputs = names_of(graph)
    axes = _free_axes((*inputs, *outputs), "batch", "dates", "height", "width")
    for load in (mask_network, date_heads):  # reading a file cannot be traced
        load(torch.device("cpu"))
    with torch.no_grad(), warnings.catch_warnings():
        # The tracing exporter warns about every Python number; tests show that they are right. The newer exporter takes
        # minutes for this graph, mostly for the symbolic sizes of the smooth fill.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph, example_inputs(graph), str(path), dynamo=False, input_names=list(inputs),
            output_names=list(outputs), dynamic_axes=axes, opset_version=OPSET,
        )  # fmt: skip
    model = onnx.load(str(path))
    for key, value in facts.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    onnx.save(model, str(path))


def write_program(graph: TileGraph, path: str | Path, facts: dict[str, Any]) -> None:
    """Write the graph as a `torch.export` program; takes about a minute."""
    torch.export.save(export_program(graph), str(path), extra_files={"sader.json": json.dumps(facts)})


def export_program(graph: TileGraph) -> torch.export.ExportedProgram:
    """Return the exported program. Run it with `program.module(check_guards=False)`: the guards exclude a single date,
    which the program also takes."""
    from torch.fx.experimental import _config as shape_config

    unit = unit_of(graph)
    batch, dates = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("dates", min=2, max=4096)
    height = unit * torch.export.Dim("rows", min=2, max=LARGEST // unit)
    width = unit * torch.export.Dim("columns", min=2, max=LARGEST // unit)
    shapes = _free_axes(names_of(graph)[0], batch, dates, height, width)
    patch: Callable[..., Any] = getattr(shape_config, "patch")  # noqa: B009 - added at import, unknown to mypy
    with torch.no_grad(), patch(backed_size_oblivious=True):  # a size of 1 is no special case
        return torch.export.export(graph, example_inputs(graph), dynamic_shapes=shapes, strict=False)


def open_session(path: str | Path, *, threads: int | None = None) -> Any:
    """Return an ONNX Runtime session of a file; threads: None = as many as PyTorch uses."""
    runtime = require("onnxruntime", extra="onnx", purpose="the ONNX backend")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3  # one warning for each buffer of unknown size otherwise
    # Spinning threads take the core from other threads, such as the reader of the next tile.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class OnnxTile:
    """Tiles in ONNX Runtime; see `inference.tile.Tile` for the call. A graph is exported when it is first needed."""

    def __init__(self, tile: SaderTile, name: str) -> None:
        require("onnx", extra="onnx", purpose="the ONNX backend")
        require("onnxruntime", extra="onnx", purpose="the ONNX backend")
        self.tile, self.name = tile, name
        self._sessions: dict[tuple[int, bool, bool], Any] = {}
        self._lock = threading.Lock()

    def session(self, *, steps: int, estimate: bool, scene: bool) -> Any:
        """Return the session of one variant of the graph; arguments as in `TileGraph`."""
        key = (steps, estimate, scene)
        with self._lock:
            if key not in self._sessions:
                graph = TileGraph(self.tile, steps=steps, estimate=estimate, scene=scene).eval()
                with tempfile.TemporaryDirectory(prefix="sader-onnx-") as folder:
                    path = Path(folder) / "tile.onnx"
                    write_onnx(graph, path, facts_of(graph, self.name))
                    self._sessions[key] = open_session(path)
            return self._sessions[key]

    def __call__(
        self, inputs: TileInputs, noises: Sequence[NoiseOf], *, steps: int, resamplings: int = 0
    ) -> TileOutput:
        """Return the images, masks and errors of a batch of tiles."""
        if resamplings or self.tile.settings.solver != "euler":
            raise ConfigError(
                f"backend onnx takes Euler steps without resampling; asked for {steps}+{resamplings} steps and solver "
                f"{self.tile.settings.solver}. Use backend torch."
            )
        session = self.session(steps=steps, estimate=not inputs.known_masks, scene=inputs.change is not None)
        used = {one.name for one in session.get_inputs()}
        given = {name: getattr(inputs, name) for name in (*INPUTS, "change") if name != "noise"}
        feed = {name: value.numpy() for name, value in given.items() if name in used and value is not None}
        images, rest = [], []
        for noise in noises:
            start = noise(0, inputs.cloudy.shape[2])[:, None]
            image, *rest = (torch.from_numpy(one) for one in session.run(None, feed | {"noise": start.numpy()}))
            images.append(image)
        error = rest[1] if self.tile.network.config.states_error else None
        shown = rest[2] if inputs.change is not None else None
        return TileOutput(torch.stack(images), rest[0], error, shown)
