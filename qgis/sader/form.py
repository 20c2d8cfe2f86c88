"""The fields of the forms, and the command line of what was entered. QGIS is not imported here."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .command import CommandError


@dataclass(frozen=True)
class Field:
    """One field of a form."""

    name: str
    kind: str
    """"files", "folder", "file", "text", "choice", "number", "whole", "flag", "extent", "point", "raster_out",
    "folder_out" or "gif_out"."""
    label: str
    option: str | None = None
    """Option of the command line; None: the field is used by `command_line` in another way."""
    default: Any = None
    choices: tuple[tuple[str, str], ...] = ()
    """Value of the option ("" = the option is left out) and its text in the form."""
    advanced: bool = False
    optional: bool = True
    help: str = ""


MASKS = (
    ("", "Automatic: masks of the product, else of the mask network"),
    ("own", "Mask network of sader"),
    ("head", "Cloud head of the model"),
    ("scl", "SCL: scene classification of Sentinel-2 L2A"),
    ("fmask", "Fmask (HLS)"),
    ("qa_pixel", "QA_PIXEL (Landsat Collection 2)"),
    ("qa60", "QA60 (Earth Engine)"),
    ("s2cloudless", "s2cloudless (must be installed beside sader)"),
    ("omnicloudmask", "OmniCloudMask (must be installed beside sader)"),
)
MODELS = (
    ("", "Automatic: by the bands of the files"),
    ("sader-s2-rgbn", "sader-s2-rgbn: blue, green, red, near infrared"),
    ("sader-s2-msi", "sader-s2-msi: all bands of Sentinel-2"),
    ("sader-paper", "sader-paper: the network of the paper, four bands, much slower"),
)

INPUTS = (
    Field("INPUT", "files", "Images of one place, one for each date"),
    Field(
        "FOLDER",
        "folder",
        "Or a folder: dates, a .SAFE product, a Landsat or HLS product",
        help="May be given together with images.",
    ),
    Field(
        "BANDS",
        "text",
        "Band names, where the files have none",
        "--bands",
        help="In the order of the file, such as blue,green,red,nir; or 10-band, 12-band, 13-band.",
    ),
    Field("EXTENT", "extent", "Area (empty: all of it)", "--bbox"),
)
CLOUDS = (
    Field("MASK", "choice", "Cloud masks", "--mask", choices=MASKS),
    Field(
        "MASK_FOLDER",
        "folder",
        "Folder of mask files",
        advanced=True,
        help="One file for each date, such as those that Mask clouds writes. Replaces the choice above.",
    ),
    Field(
        "MASK_VALUES",
        "text",
        "Classes, bits or values that count as cloud or shadow",
        advanced=True,
        help="For SCL, Fmask, QA_PIXEL, QA60 or mask files, such as 3,8,9,10.",
    ),
    Field(
        "HAZE",
        "choice",
        "Thin cloud and haze",
        "--haze",
        choices=(("", "Remove"), ("keep", "Keep")),
        advanced=True,
    ),
    Field(
        "CLOUD_THRESHOLD",
        "number",
        "Probability that counts as cloud in estimated masks",
        "--cloud-threshold",
        advanced=True,
        help="0 to 1; default 0.5.",
    ),
    Field(
        "MASK_GROWTH",
        "whole",
        "Pixels by which estimated masks are widened",
        "--mask-growth",
        advanced=True,
        help="Default 1.",
    ),
)
LAYERS = (
    Field(
        "PROVENANCE",
        "flag",
        "Also write provenance (observed or reconstructed)",
        "--provenance",
        True,
    ),
    Field("UNCERTAINTY", "flag", "Also write the expected error", "--uncertainty", False),
    Field("COUNT", "flag", "Also write the number of clear observations", "--count", False, advanced=True),
    Field(
        "SOURCE_DATE", "flag", "Also write the date that each pixel comes from", "--source-date", False, advanced=True
    ),
    Field("SAVE_MASKS", "flag", "Also write the masks that were used", "--save-masks", False, advanced=True),
    Field(
        "MIN_COUNT",
        "whole",
        "No value where fewer dates than this show the ground",
        "--min-count",
        advanced=True,
        help="Default 0: such pixels are filled from their surroundings.",
    ),
    Field(
        "MAX_UNCERTAINTY",
        "number",
        "No value where the expected error in reflectance is larger",
        "--max-uncertainty",
        advanced=True,
        help="Such as 0.05; empty: all pixels get a value.",
    ),
)
MODEL = (
    Field("MODEL", "choice", "Model", "--model", choices=MODELS, advanced=True),
    Field(
        "WEIGHTS",
        "file",
        "Own weights (.safetensors)",
        "--model",
        advanced=True,
        help="A checkpoint of sader train. Replaces the choice above.",
    ),
)
MACHINE = (
    Field(
        "DEVICE",
        "text",
        "Device",
        "--device",
        advanced=True,
        help="cpu, cuda or cuda:1; empty: a GPU if there is one.",
    ),
    Field(
        "EXTRA",
        "text",
        "Further options of the command line",
        advanced=True,
        help="For example --offset=-1000 --threads 4; `sader remove --help` lists them.",
    ),
)
FOLDER_OUT = (
    Field(
        "OVERWRITE",
        "flag",
        "Replace existing files",
        "--overwrite",
        False,
        advanced=True,
    ),
    Field("LOAD", "flag", "Load the results", None, True),
)

FORMS: dict[str, tuple[Field, ...]] = {
    "remove": (
        *INPUTS,
        Field(
            "REFERENCE",
            "text",
            "Date to clean",
            "--reference",
            "auto",
            optional=False,
            help="auto: the clearest; a date such as 2022-05-13; a file name; none: a new image from all dates.",
        ),
        *CLOUDS,
        *LAYERS,
        *MODEL,
        *MACHINE,
        Field("OUTPUT", "raster_out", "Clear image", "--out", optional=False),
    ),
    "series": (
        *INPUTS,
        Field(
            "NEAREST",
            "whole",
            "Number of nearest dates used to clean each date (empty: all; 6 for a long series)",
            "--nearest",
        ),
        Field("POINT", "point", "NDVI before and after at a point", "--point"),
        *CLOUDS,
        *LAYERS,
        *MODEL,
        *MACHINE,
        *FOLDER_OUT,
        Field("ANIMATION", "gif_out", "Animation before and after", "--animation"),
        Field("OUTPUT", "folder_out", "Folder of clear images", "--out", optional=False),
    ),
    "mask": (
        *INPUTS,
        *MACHINE,
        *FOLDER_OUT,
        Field("OUTPUT", "folder_out", "Folder of masks", "--out", optional=False),
    ),
}
"""Subcommand -> fields of its form."""


def command_line(operation: str, values: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `sader` for the values of a form; empty values are left out.

    values: by field; paths and texts as str, INPUT as a list, EXTENT and POINT in degrees as tuples.
    """
    inputs = [*(values.get("INPUT") or ()), *([values["FOLDER"]] if values.get("FOLDER") else ())]
    if not inputs:
        raise CommandError("No input was chosen. Add the images of one place, or choose a folder.")
    words = [operation, *inputs, "--json"]
    # The file chooser of QGIS asks before it names an existing file; for a folder there is a field.
    words += ["--overwrite"] if operation == "remove" else []
    values = {**values, "MASK": _mask(values), "MODEL": None if values.get("WEIGHTS") else values.get("MODEL")}
    if values.get("MASK_FOLDER") and values.get("MASK_VALUES"):
        words.append(f"--mask-values={values['MASK_VALUES'].strip()}")
    for field in FORMS[operation]:
        value = values.get(field.name)
        if field.option is None or value is None or value == "" or value is False:
            continue
        if value is True:
            words.append(field.option)
            continue
        # With =, because a value may begin with a minus: --bbox=-3.2,51.0,...
        text = ",".join(f"{part:.8f}" for part in value) if isinstance(value, tuple) else str(value).strip()
        words.append(f"{field.option}={text}")
    return words + further_options(values.get("EXTRA") or "")


def further_options(text: str, posix: bool = os.name == "posix") -> list[str]:
    """Return the words of a command line. posix: a backslash escapes the next character; else it is part of a path."""
    try:
        words = shlex.split(text, posix=posix)
    except ValueError as error:
        raise CommandError(f"Further options are {text!r}, in which a quotation mark has no partner.") from error
    return words if posix else [word.replace('"', "") for word in words]


def _mask(values: Mapping[str, Any]) -> str:
    source, folder, chosen = (values.get(name) or "" for name in ("MASK", "MASK_FOLDER", "MASK_VALUES"))
    if folder:
        if source:
            raise CommandError(f"Cloud masks are {source} and a folder of mask files is given; choose one of them.")
        return str(folder)
    if chosen and source not in ("scl", "fmask", "qa_pixel", "qa60"):
        raise CommandError(
            f"Classes {chosen} are given, which belong to SCL, Fmask, QA_PIXEL, QA60 or a folder of mask files. Choose "
            "one of these as cloud masks."
        )
    return f"{source}:{chosen.replace(' ', '')}" if chosen else str(source)


# ------------------------------------------------------------------------------------------------ results


class Result(NamedTuple):
    """A raster that was written."""

    path: str
    kind: str
    """"result", or the name of a style: "provenance", "uncertainty", "count", "masks", "classes", "probability"."""
    title: str
    """Name of the layer."""
    date: str | None = None
    """Day of a cleaned date, such as 2022-05-13."""


TITLES = {
    "result": "Clear image",
    "provenance": "Provenance",
    "uncertainty": "Expected error",
    "count": "Clear observations",
    "source_date": "Source date",
    "masks": "Masks",
    "classes": "Classes",
    "probability": "Probabilities",
}
"""Kind of a raster -> name of its layer, with the date where there are several."""


DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def results_of(operation: str, report: Mapping[str, Any]) -> list[Result]:
    """Return the rasters of a report, those of one date together and its image first."""
    found = []
    if operation == "mask":
        for path in rasters(report["files"]):
            name, _, end = Path(path).stem.rpartition("_")
            kind = "classes" if end == "mask" else end
            found.append(Result(path, kind, f"{name} {TITLES.get(kind, kind).lower()}"))
        return found
    for scene in report["scenes"] if operation == "series" else [report]:
        stem = Path(scene["output"]).stem
        for path in rasters(scene["files"]):
            kind = Path(path).stem[len(stem) + 1 :] or "result"
            title = TITLES.get(kind, kind)
            if operation == "remove":
                found.append(Result(path, kind, title))
            else:
                day = stem if DAY.fullmatch(stem) else None
                found.append(Result(path, kind, stem if kind == "result" else f"{stem} {title.lower()}", day))
    return found


def rasters(files: list[str]) -> list[str]:
    """Return the files that are GeoTIFFs."""
    return [path for path in files if path.lower().endswith((".tif", ".tiff"))]


def summary_of(operation: str, report: Mapping[str, Any]) -> list[str]:
    """Return what was done, a line for each date, and the files of a whole series."""
    lines = []
    if operation == "mask":
        for date, shares in zip(report["dates"], report["shares"]):
            parts = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005]
            lines.append(f"{date}: {', '.join(parts)}")
        return lines
    for scene in report["scenes"] if operation == "series" else [report]:
        total = max(1, sum(scene["pixels"].values()))
        share = scene["pixels"].get("reconstructed", 0) / total
        lines.append(f"{scene['reference'] or 'a new image'}: {share:.1%} of the pixels reconstructed")
    return lines + [f"wrote {path}" for path in report["files"] if operation == "series"]
