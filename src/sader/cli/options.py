"""Options that several commands share, each declared once: as a type, or as a field of a request."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_args

import typer

from sader.geo.scene.options import BatchSettings, RemoveRequest, SceneOptions


def option(help: str, panel: str | None = None, *names: str, **more: Any) -> Any:
    """Return an option with its panel of the help page."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: a GPU if there is one.")]
Model = Annotated[
    str | None, typer.Option(help="Shipped weights, a preset or a checkpoint file; default: the shipped weights.")
]
Seed = Annotated[int, typer.Option(help="Seed of the noise: the same seed gives the same image.")]
Steps = Annotated[str | None, typer.Option(help="Sampling steps: 4, or 4+1 with resampling; default: the model's own.")]

# ------------------------------------------------------------------------------------------------ scenes

BATCH = ("scenes", "workers", "retries", "price", "summary")


def takes(*groups: Sequence[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the command also takes these parameters, and gets them as keywords."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        found = [one for group in groups for one in group]
        found += [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        found.sort(key=lambda one: one.default is not one.empty)
        vars(command)["__signature__"] = own.replace(parameters=found)  # Typer reads it
        return command

    return decorate


def declared(*names: str, of: Sequence[type] = (SceneOptions, RemoveRequest, BatchSettings)) -> list[inspect.Parameter]:
    """Return parameters of a command for fields of these dataclasses that `config.option` declares."""
    known = {one.name: one for kind in of for one in fields(kind) if one.metadata}
    found = []
    for one in (known[name] for name in names):
        facts = one.metadata
        kind, default = facts["kind"] or one.type, one.default
        if facts["kind"] and not default:
            default = None if type(None) in get_args(kind) else ...  # required
        flags = facts["names"] or ([f"--{one.name.replace('_', '-')}"] if kind is bool and not default else [])
        shown = typer.Option(default, *flags, help=facts["help"], rich_help_panel=facts["panel"], **facts["limits"])
        if facts["argument"]:
            shown = typer.Argument(default, help=facts["help"])
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        found.append(inspect.Parameter(one.name, place, default=shown, annotation=kind))
    return found


def filled(kind: type, given: Mapping[str, Any]) -> Any:
    """Return a request from the options of a command, by name; None is replaced by the default of the field."""
    names = [one.name for one in fields(kind)]
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()})


READ = declared("inputs", "overwrite", "bands", "offset", "scale", "grid", "stac", "bbox", "aoi", "dates", "collection")
RUN = declared(
    "mask", "aux", "mask_values", "cloud_threshold", "mask_growth", "haze", "tile", "overlap", "uncertainty", "count",
    "save_masks", "provenance", "source_date", "min_count", "max_uncertainty", "model", "steps", "resampling", "guide",
    "guide_weights", "samples", "seed", "device", "threads", "batch_size", "backend", "dask", *BATCH,
)  # fmt: skip
"""In the order of the help page: masks and tiles, further outputs, model and machine, many scenes."""
