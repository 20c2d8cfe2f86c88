"""Options that several commands share, each declared once: as a type, or as the signature of a group of options."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

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

READING, TILES, WRITING, WORKING = "Reading the input", "Masks and tiles", "More outputs", "Model and machine"


def takes(*groups: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the command also takes the parameters of these functions, and gets them as keywords."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)
        found = [one for group in groups for one in inspect.signature(group).parameters.values()]
        found += [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        found.sort(key=lambda one: one.default is not one.empty)
        vars(command)["__signature__"] = own.replace(parameters=found)  # Typer reads it
        return command

    return decorate


def reading_options(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="GeoTIFFs, folders, Sentinel-2, Landsat or HLS products, STAC items of one place, or one Zarr store."
        ),
    ] = None,
    overwrite: Annotated[bool, option("Replace existing outputs.", None, "--overwrite")] = False,
    bands: Annotated[
        str | None,
        option("Band names in the order of the file: blue,green,red,nir; or 10-band, 12-band, 13-band.", READING),
    ] = None,
    offset: Annotated[str, option("Added to the counts: auto, none, or -1000 (baseline 04.00).", READING)] = "auto",
    scale: Annotated[float | None, option("Reflectance per count; default: that of the file.", READING)] = None,
    grid: Annotated[
        str | None,
        option("Output grid: a raster file, EPSG:32632 or EPSG:32632/20; default: the first input.", READING),
    ] = None,
    stac: Annotated[str | None, option("STAC API to search instead of files.", READING)] = None,
    bbox: Annotated[str | None, option("Area: west,south,east,north in degrees.", READING)] = None,
    aoi: Annotated[str | None, option("Area: the box around the shapes of a GeoJSON file.", READING)] = None,
    dates: Annotated[str | None, option("Use the dates of this period: 2022-03-01/2022-05-31.", READING)] = None,
    collection: Annotated[str | None, option("STAC collection; default sentinel-2-l2a.", READING)] = None,
) -> None:
    """Options of the commands that read scenes: what is read, and where from."""


def tile_options(
    mask: Annotated[
        list[str] | None,
        option(
            "Cloud masks: auto (of the product, otherwise own), own or head (estimated), scl, fmask, qa_pixel, qa60 "
            "(with classes or bits: scl:3,8,9), s2cloudless, omnicloudmask, a folder, or one file a date (repeat).",
            TILES,
        ),
    ] = None,
    aux: Annotated[
        list[str] | None,
        option("Sentinel-1 VV and VH in dB (GeoTIFF): one file for all dates, or one for each (repeat).", READING),
    ] = None,
    mask_values: Annotated[
        str | None, option("Values of mask files that count as cloud or shadow, such as 2,4.", TILES)
    ] = None,
    cloud_threshold: Annotated[
        float | None, option("Probability from which estimated masks hide a pixel; default 0.5.", TILES)
    ] = None,
    mask_growth: Annotated[int | None, option("Pixels by which estimated masks are widened; default 1.", TILES)] = None,
    haze: Annotated[
        str | None, option("Thin cloud and haze in estimated masks: remove (default) or keep.", TILES)
    ] = None,
    tile: Annotated[int | None, option("Edge of a tile in pixels; default 512.", TILES)] = None,
    overlap: Annotated[int | None, option("Pixels shared by neighbouring tiles; default 64.", TILES)] = None,
) -> None:
    """Options of their masks and tiles."""


def run_options(
    uncertainty: Annotated[
        bool, option("NAME_uncertainty.tif: expected error in reflectance.", WRITING, "--uncertainty")
    ] = False,
    count: Annotated[bool, option("NAME_count.tif: number of clear dates, 255 outside.", WRITING, "--count")] = False,
    save_masks: Annotated[
        bool, option("NAME_masks.tif: the masks that were used, one band for each date.", WRITING, "--save-masks")
    ] = False,
    provenance: Annotated[
        bool, option("NAME_provenance.tif: 1 observed, 2 reconstructed.", WRITING, "--provenance")
    ] = False,
    source_date: Annotated[
        bool, option("NAME_source_date.tif: the date that contributes most to each pixel.", WRITING, "--source-date")
    ] = False,
    min_count: Annotated[
        int | None,
        option("Nodata in hidden pixels with fewer clear dates than this; default 0: filled.", WRITING, min=0),
    ] = None,
    max_uncertainty: Annotated[
        float | None,
        option("Nodata where the expected error of a band is above this reflectance; default: none.", WRITING),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "Shipped weights, a preset or a checkpoint file; default: sader-s2-rgbn, or for files with more bands "
            "sader-s2-msi.",
            WORKING,
        ),
    ] = None,
    steps: Annotated[str | None, option("Sampling steps: 4, or 4+1; default: those of the model.", WORKING)] = None,
    resampling: Annotated[
        str | None, option("Variant of the resampling: paper (Algorithm 1), public_code or default.", WORKING)
    ] = None,
    guide: Annotated[str | None, option("Guide of the resampling: mae, conv, mean, lowpass or none.", WORKING)] = None,
    guide_weights: Annotated[
        str | None, option("Weights of the guide mae or conv (sader pretrain-guide).", WORKING)
    ] = None,
    samples: Annotated[
        int | None,
        option("Number of results averaged; default 1, or 4 for --uncertainty without an error head.", WORKING, min=1),
    ] = None,
    seed: Annotated[int, option("Seed of the noise: the same seed gives the same image.", WORKING)] = 0,
    device: Annotated[str | None, option("cpu, cuda or cuda:1; default: a GPU if there is one.", WORKING)] = None,
    threads: Annotated[
        int | None, option("Processor cores used on a CPU; default: all that are available.", WORKING, min=1)
    ] = None,
    batch_size: Annotated[int | None, option("Tiles computed together on a GPU; default 8.", WORKING, min=1)] = None,
    backend: Annotated[
        str | None, option("torch (default on a CPU), accelerated (half precision, default on a GPU) or onnx.", WORKING)
    ] = None,
    dask: Annotated[
        str | None,
        option("Compute on a dask cluster: address or file of its scheduler, or local (this process).", WORKING),
    ] = None,
) -> None:
    """Options of their further outputs, of the model and of the machine."""


BATCH = ("scenes", "workers", "retries", "price", "summary")
MANY = "Many scenes"


def batch_options(
    scenes: Annotated[
        str | None,
        option("Many scenes: a text file (one a line), a folder of folders, or a STAC catalogue.", MANY),
    ] = None,
    workers: Annotated[
        int | None, option("Processes on this machine, one scene each; default 1. For a cluster: --dask.", MANY, min=1)
    ] = None,
    retries: Annotated[int, option("Further attempts after an error of system, disk or network.", MANY, min=0)] = 2,
    price: Annotated[
        float | None, option("Price of a core hour (or GPU hour), for the cost in the report.", MANY, min=0)
    ] = None,
    summary: Annotated[
        str | None, option("JSON report of the run, with a text beside it; default run.json in the output.", MANY)
    ] = None,
) -> None:
    """Options of runs over many scenes."""
