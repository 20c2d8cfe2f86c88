"""Options that several commands share, each declared once: as a type, or as a field of the options of a scene."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from sader.geo.scene.options import BatchSettings, RemoveRequest, SceneOptions

DATA = "Data"


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

Dataset = Annotated[str | None, option("Public dataset in its published layout, by name (sader data list).", DATA)]
Sampler = Annotated[str, option("How dates of a public dataset are chosen: leak_free or published.", DATA)]
Lists = Annotated[str | None, option("Split lists of a public dataset: folder, frozen, hash, or a file.", DATA)]
Partial = Annotated[bool, option("Accept an incomplete dataset: use the places on disk.", DATA, "--partial")]
Coverage = Annotated[
    str, option("SEN12MS-CR-TS: cloud cover by auto, masks, s2cloudless, rules or a table (sader data cover).", DATA)
]

# ------------------------------------------------------------------------------------------------ scenes

BATCH = ("scenes", "workers", "retries", "price", "summary")


def takes(
    *groups: Callable[..., None] | Sequence[inspect.Parameter],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the command also takes parameters, or those of functions, and gets them as keywords."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)
        given = [list(inspect.signature(one).parameters.values()) if callable(one) else one for one in groups]
        found = [one for group in given for one in group]
        found += [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        found.sort(key=lambda one: one.default is not one.empty)
        vars(command)["__signature__"] = own.replace(parameters=found)  # Typer reads it
        return command

    return decorate


def declared(*names: str) -> list[inspect.Parameter]:
    """Return parameters of a command for options that `sader.geo.scene.options` declares."""
    known = {one.name: one for kind in (SceneOptions, RemoveRequest, BatchSettings) for one in fields(kind)}
    found = []
    for one in (known[name] for name in names):
        facts = one.metadata
        kind, default = facts["kind"] or one.type, (one.default or None) if facts["kind"] else one.default
        flags = [f"--{one.name.replace('_', '-')}"] if kind is bool else []
        shown = typer.Option(default, *flags, help=facts["help"], rich_help_panel=facts["panel"], **facts["limits"])
        if one.name == "inputs":
            shown = typer.Argument(default, help=facts["help"])
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        found.append(inspect.Parameter(one.name, place, default=shown, annotation=kind))
    return found


READ = declared("inputs", "overwrite", "bands", "offset", "scale", "grid", "stac", "bbox", "aoi", "dates", "collection")
RUN = declared(
    "mask", "aux", "mask_values", "cloud_threshold", "mask_growth", "haze", "tile", "overlap", "uncertainty", "count",
    "save_masks", "provenance", "source_date", "min_count", "max_uncertainty", "model", "steps", "resampling", "guide",
    "guide_weights", "samples", "seed", "device", "threads", "batch_size", "backend", "dask", *BATCH,
)  # fmt: skip
"""In the order of the help page: masks and tiles, further outputs, model and machine, many scenes."""
