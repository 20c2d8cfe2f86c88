"""Options that several commands share, each declared once."""

from typing import Annotated, Any

import typer

DATA = "Data"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: a GPU if there is one.")]
Model = Annotated[
    str | None, typer.Option(help="Shipped weights, a preset or a checkpoint file; default: the shipped weights.")
]
Seed = Annotated[int, typer.Option(help="Seed of the noise: the same seed gives the same image.")]
Steps = Annotated[str | None, typer.Option(help="Sampling steps: 4, or 4+1 with resampling; default: the model's own.")]

Dataset = Annotated[
    str | None,
    typer.Option(help="The data is this public dataset (sader data list) in its own layout.", rich_help_panel=DATA),
]
Sampler = Annotated[str, typer.Option(help="Dates of a public dataset: leak_free or published.", rich_help_panel=DATA)]
Lists = Annotated[
    str | None,
    typer.Option(help="Split lists of a public dataset: folder, frozen, hash, or a file.", rich_help_panel=DATA),
]
Partial = Annotated[
    bool, typer.Option("--partial", help="Use the places on disk where some are missing.", rich_help_panel=DATA)
]
Coverage = Annotated[
    str,
    typer.Option(
        help="SEN12MS-CR-TS: cloud cover by auto, masks, s2cloudless, rules or a table (sader data cover).",
        rich_help_panel=DATA,
    ),
]

# ------------------------------------------------------------------------------------------------ scenes

READING, TILES, WRITING, WORKING = "Reading the input", "Masks and tiles", "More outputs", "Model and machine"


def option(help: str, panel: str | None = None, *names: str, **more: Any) -> Any:
    """Return an option with its panel of the help page."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


Inputs = Annotated[
    list[str] | None,
    typer.Argument(help="GeoTIFFs, folders, .SAFE products or STAC items of one place, or one Zarr store."),
]
Overwrite = Annotated[bool, option("Replace existing outputs.", None, "--overwrite")]
Bands = Annotated[
    str | None,
    option("Names in the order of the file, or rgb, rgbn, bgrn, grn, 10-band, 12-band, 13-band.", READING),
]
Offset = Annotated[str, option("auto, none, or counts such as -1000 (baseline 04.00).", READING)]
Scale = Annotated[float | None, option("Reflectance per count; default: that of the file.", READING)]
OutputGrid = Annotated[
    str | None,
    option("Output grid: a raster file, EPSG:32632 or EPSG:32632/20; default: the first input.", READING),
]
Stac = Annotated[str | None, option("STAC API to search instead of files.", READING)]
Bbox = Annotated[str | None, option("Area: west,south,east,north in degrees.", READING)]
Aoi = Annotated[str | None, option("Area: the box around the shapes of a GeoJSON file.", READING)]
Dates = Annotated[str | None, option("2022-03-01/2022-05-31, with --stac.", READING)]
Collection = Annotated[str | None, option("STAC collection; default sentinel-2-l2a.", READING)]
Mask = Annotated[
    list[str] | None,
    option(
        "auto, own, scl, fmask, qa_pixel, qa60 (with classes or bits: scl:3,8,9), s2cloudless, omnicloudmask, a "
        "folder, or a mask file for each date (repeat).",
        TILES,
    ),
]
MaskValues = Annotated[str | None, option("Values of mask files that count as cloud or shadow, such as 2,4.", TILES)]
CloudThreshold = Annotated[
    float | None, option("Probability that counts as cloud in masks of the model; default 0.5.", TILES)
]
MaskGrowth = Annotated[int | None, option("Pixels by which masks of the model are widened; default 2.", TILES)]
TileEdge = Annotated[int | None, option("Edge of a tile in pixels; default 512.", TILES)]
Overlap = Annotated[int | None, option("Pixels shared by neighbouring tiles; default 64.", TILES)]
Uncertainty = Annotated[bool, option("NAME_uncertainty.tif: expected error in reflectance.", WRITING, "--uncertainty")]
Count = Annotated[bool, option("NAME_count.tif: number of clear observations.", WRITING, "--count")]
Provenance = Annotated[bool, option("NAME_provenance.tif: 1 observed, 2 reconstructed.", WRITING, "--provenance")]
SceneModel = Annotated[
    str | None,
    option(
        "Shipped weights, a preset or a checkpoint file; default: sader-s2-rgbn, or for files with more bands "
        "sader-s2-msi.",
        WORKING,
    ),
]
SceneSteps = Annotated[str | None, option("Sampling steps: 4, or 4+1; default: those of the model.", WORKING)]
Resampling = Annotated[
    str | None, option("Variant of the resampling: paper (Algorithm 1), public_code or default.", WORKING)
]
Guide = Annotated[str | None, option("Guide of the resampling: mae, conv, mean, lowpass or none.", WORKING)]
GuideWeights = Annotated[str | None, option("Weights of the guide mae or conv (sader pretrain-guide).", WORKING)]
Samples = Annotated[
    int | None,
    option("Results averaged; default 1, or 4 for --uncertainty of a model that states no error.", WORKING, min=1),
]
SceneSeed = Annotated[int, option("The same seed gives the same image.", WORKING)]
SceneDevice = Annotated[str | None, option("cpu, cuda or cuda:1; default: a GPU if there is one.", WORKING)]
Threads = Annotated[
    int | None, option("Processor cores used on a CPU; default: all that are available.", WORKING, min=1)
]
BatchSize = Annotated[int | None, option("Tiles computed together on a GPU; default 8.", WORKING, min=1)]
Backend = Annotated[
    str | None,
    option("torch (default on a CPU), accelerated (half precision, default on a GPU) or onnx.", WORKING),
]
Dask = Annotated[
    str | None,
    option("Compute on a dask cluster: address or file of its scheduler, or local (this process).", WORKING),
]
