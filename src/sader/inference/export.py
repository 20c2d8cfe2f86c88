"""A model as one file that runs without sader: ONNX for any runtime, or PyTorch's own exported program.

The graph is `TileGraph`: everything `CloudRemover` does to one tile, for any number of tiles, dates and pixels. Cutting
a scene into tiles, blending them and putting kept pixels back stays outside. Height and width must be multiples of
8: reflect up to one (`numpy.pad(..., mode="reflect")`) and cut the result.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sader._version import __version__
from sader.checkpoint import Checkpoint, build_model, find_checkpoint, load_checkpoint
from sader.config import ModelConfig
from sader.errors import ConfigError, OutputError, did_you_mean, require
from sader.inference.tile import TileGraph
from sader.method.diffusion import Denoiser
from sader.model.matching import CELL
from sader.presets import PRESETS, get_preset

Format = Literal["onnx", "torch-export"]
FORMATS = ("onnx", "torch-export")
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}
OPSET = 17
LARGEST = 2048
"""Most pixels along an edge: the halvings of the smooth fill are counted when the graph is made."""
INPUTS = ("cloudy", "valid", "cloud", "reference", "noise", "band_present")
OUTPUTS = ("clear", "cloud_used", "error")
_PIXELS = {"cloudy": (3, 4), "valid": (2, 3), "cloud": (2, 3), "noise": (3, 4), "change": (3, 4), "shown": (1, 2)}
_PIXELS |= {"clear": (2, 3), "cloud_used": (2, 3), "error": (2, 3)}
_DATED = ("cloudy", "valid", "cloud", "change", "cloud_used")


def export_model(
    name_or_path: str | Path, out: str | Path, *, format: Format = "onnx", steps: int | None = None
) -> dict[str, Any]:
    """Write the model to `out` and return what the file says about itself.

    name_or_path: shipped weights, a checkpoint file, or a preset (untrained). steps: Euler steps; None = its own.
    """
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}{did_you_mean(format, FORMATS)}")
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


def load_any(name_or_path: str | Path) -> Checkpoint:
    """Return the checkpoint of a shipped name, a file or a preset (untrained)."""
    if str(name_or_path) in PRESETS:
        config = get_preset(str(name_or_path))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Checkpoint(build_model(config).eval(), config, {"trained": False})
    return load_checkpoint(find_checkpoint(name_or_path))


def make_graph(checkpoint: Checkpoint, *, steps: int | None = None, **options: Any) -> TileGraph:
    """Return the graph of a checkpoint; options as in `TileGraph`."""
    if steps is not None and steps < 1:
        raise ConfigError(f"steps is {steps}; expected at least 1.")
    model, config = checkpoint.model, checkpoint.config
    if not isinstance(model, Denoiser) or not isinstance(config, ModelConfig):
        raise ConfigError(f"the model {config.name!r} is not one of SADER's own networks; only those can be exported.")
    if steps is None and config.sampling.resample_steps:
        raise ConfigError("this model resamples by default, which is not part of the graph. Give steps, such as 4.")
    return TileGraph(model, config, steps=steps, **options).eval()


def unit_of(graph: TileGraph) -> int:
    """Return what height and width must be multiples of: the network's own unit and whole statistics cells."""
    unit = graph.config.network.multiple
    return unit if unit % CELL == 0 else unit * CELL


def facts_of(graph: TileGraph, name: str) -> dict[str, Any]:
    """Return what a user of the file needs to know, as plain values; stored inside it."""
    return {
        "sader": __version__,
        "model": Path(name).stem if Path(name).suffix else name,
        "bands": list(graph.config.network.bands),
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
    height, width = height or 11 * unit, width or 13 * unit
    bands = len(graph.config.network.bands)
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


def write_onnx(graph: TileGraph, path: str | Path, facts: dict[str, Any]) -> None:
    """Write the graph as ONNX (opset 17), with free batch, dates, height and width."""
    import onnx

    inputs, outputs = names_of(graph)
    axes: dict[str, dict[int, str]] = {}
    for name in (*inputs, *outputs):
        axes[name] = {0: "batch"}
        if name in _DATED:
            axes[name][1] = "dates"
        if name in _PIXELS:
            axes[name] |= dict(zip(_PIXELS[name], ("height", "width"), strict=True))
    with torch.no_grad(), warnings.catch_warnings():
        # The tracing exporter warns about every Python number it meets; that those are right is what tests show. The
        # newer one takes minutes for this graph, most of them on the symbolic sizes of the smooth fill.
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
    """Return the exported program. Run it with `program.module(check_guards=False)`: it also takes a single date, which
    the tracer excludes only because it tells 1 from all other sizes."""
    from torch.fx.experimental import _config as shape_config

    unit = unit_of(graph)
    batch, dates = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("dates", min=2, max=4096)
    height = unit * torch.export.Dim("rows", min=2, max=LARGEST // unit)
    width = unit * torch.export.Dim("columns", min=2, max=LARGEST // unit)
    shapes: dict[str, dict[int, Any]] = {}
    for name in names_of(graph)[0]:
        shapes[name] = {0: batch}
        if name in _DATED:
            shapes[name][1] = dates
        if name in _PIXELS:
            shapes[name] |= dict(zip(_PIXELS[name], (height, width), strict=True))
    patch: Callable[..., Any] = getattr(shape_config, "patch")  # noqa: B009 - added at import, unknown to mypy
    with torch.no_grad(), patch(backed_size_oblivious=True):  # sizes of 1 are as good as any
        return torch.export.export(graph, example_inputs(graph), dynamic_shapes=shapes, strict=False)


def load_program(path: str | Path) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function stored by `write_program`."""
    module: Callable[..., tuple[Tensor, ...]] = torch.export.load(str(path)).module(check_guards=False)
    return module
