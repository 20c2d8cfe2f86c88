"""Files in, one file out, for a remover that is already there: what `CloudRemover.remove_files` does.

Not from the paper. `sader remove` (`geo.remove`) is the same with a model chosen by name and more beside the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sader.bandnames import parse_bands
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


def clear_files(
    remover: CloudRemover,
    files: Sequence[str | Path],
    out: str | Path,
    *,
    options: Mapping[str, Any],
    bands: str | Sequence[str] | None = None,
    offset: str | float | None = "auto",
    mask: str | Path | Sequence[str | Path] | None = None,
    grid: str | Path | None = None,
    load: LoadFunction | None = None,
    progress: Progress | None = None,
) -> SceneReport:
    """Write the clear image of files and return the report: `CloudRemover.remove_files`, where the arguments are told.

    What `sader remove` would print as a note is a warning here.
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
