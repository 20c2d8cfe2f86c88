"""`remove_files`: files in, one file out, for a loaded remover.

`sader remove` (`geo.remove`) also chooses the model and writes previews and reports.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sader.bands import parse_bands
from sader.errors import ConfigError, DataError, did_you_mean
from sader.geo.align import build_stack
from sader.geo.offset import check_source
from sader.geo.read.arrays import LoadFunction, source_from
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.scene.run import SceneOptions, SceneReport, check_output, clear_scene
from sader.geo.stack import DateSource

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover
    from sader.inference.tiling import Progress


def remove_files(
    remover: CloudRemover,
    files: Sequence[str | Path],
    out: str | Path,
    *,
    bands: str | Sequence[str] | None = None,
    offset: str | float | None = "auto",
    mask: str | Path | Sequence[str | Path] | None = None,
    grid: str | Path | None = None,
    load: LoadFunction | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> SceneReport:
    """Write one clear image of several files as a Cloud Optimized GeoTIFF and return the report.

    files: GeoTIFFs, folders, .SAFE products or STAC items of one place; read and written window by window.
    bands: names where the files have none. offset: "auto", None, or counts such as -1000 (baseline 04.00).
    mask: "scl", "s2cloudless", "omnicloudmask", or mask files; None: those of the files, else the model's own.
    grid: the output's, as a raster file or "EPSG:32632/20"; None = that of the first file.
    load: a function path -> (array (C, H, W), rasterio profile) for files of another kind.
    options: the fields of `sader.geo.scene.run.SceneOptions`: reference, seed, samples, uncertainty, overwrite ...
    Notes of `sader remove` are warnings here.

    >>> remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn")                   # doctest: +SKIP
    >>> report = sader.remove_files(remover, ["march.tif", "may.tif"], "clear.tif")     # doctest: +SKIP
    >>> print(report.reference, report.pixels)                                          # doctest: +SKIP
    """
    unknown = [key for key in options if key not in SceneOptions.__dataclass_fields__]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}{did_you_mean(unknown[0], SceneOptions.__dataclass_fields__)}")
    wanted = SceneOptions(**options)

    def say(text: str) -> None:
        warnings.warn(text, stacklevel=4)

    if isinstance(files, str | Path):
        raise DataError(f"files is one path ({files}); expected a list of them, one for each date or folder.")
    check_output(out, overwrite=wanted.overwrite)
    names = None if bands is None else parse_bands(bands)
    if load is None:
        sources = open_sources(files, bands=bands, offset=offset, mask=mask, notice=say)
    else:
        made: list[DateSource] = [source_from(path, load, bands=names) for path in files]
        sources = made if mask is None else list(with_masks(made, mask))
    stack = build_stack(sources, remover.config.network, bands=names, grid=grid, notice=say)
    for source in stack.sources:
        warning = check_source(source)
        if warning:
            say(warning)
    return clear_scene(stack, remover, out, wanted, progress=progress, notice=say)
