"""Sentinel-1 beside the dates (`--aux`): one GeoTIFF for each date, or one for all, with VV and VH in dB.

Files may have any grid; they are warped onto that of the scene and scaled to [0, 1] (`sader.data.radar`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.data.radar import RADAR_BANDS, check_decibel, optical_count, scale_sar
from sader.errors import BandError, ConfigError, DataError
from sader.geo.grid import Grid
from sader.geo.read.raster import opened, read_bands, reading
from sader.geo.stack import DateSource, WrappedSource
from sader.inference.tiling import Window
from sader.inference.values import REFLECTANCE, ValueCoding

SAMPLED = 256
"""Pixels a side of the sample whose values are checked."""


@dataclass(frozen=True)
class RadarSource(WrappedSource):
    """A date with radar from a file of its own; everything else is that of the date."""

    file: str
    positions: tuple[int, ...]
    """Numbers of VV and VH in the file, from 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bands", (*self.source.bands, *RADAR_BANDS))

    def read_numbers(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        if (optical := optical_count(bands)) == len(bands):
            return self.source.read_numbers(window, bands=bands, grid=grid)
        decibel = read_bands(self.file, self.positions, window, grid=grid, coding=REFLECTANCE)
        radar = scale_sar(decibel)[[RADAR_BANDS.index(band) for band in bands[optical:]]]
        numbers = [self.source.read_numbers(window, bands=bands[:optical], grid=grid)] if optical else []
        return np.concatenate([*numbers, radar], dtype=np.float32)

    def codings(self, bands: Sequence[str]) -> tuple[ValueCoding, ...]:
        optical = optical_count(bands)
        return (*self.source.codings(bands[:optical]), *(REFLECTANCE,) * (len(bands) - optical))

    def block_shape(self, bands: Sequence[str], grid: Grid) -> tuple[int, int] | None:
        return None if set(bands) & set(RADAR_BANDS) else self.source.block_shape(bands, grid)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.source.paths, self.file)))


def with_radar(sources: Sequence[DateSource], files: Sequence[str | Path]) -> list[DateSource]:
    """Return the dates with radar: one file for all of them, or one for each in the same order."""
    paths = [str(file) for file in files]
    if len(paths) not in (1, len(sources)):
        raise ConfigError(
            f"{len(paths)} radar files for {len(sources)} dates; expected one for all dates, or one for each in the "
            "same order."
        )
    positions = {path: _check(path) for path in dict.fromkeys(paths)}
    paths = paths * len(sources) if len(paths) == 1 else paths
    return [RadarSource(source, path, positions[path]) for source, path in zip(sources, paths, strict=True)]


def check_radar(model: str, aux_bands: Sequence[str]) -> None:
    """Raise for a model that cannot use radar."""
    if not set(RADAR_BANDS) <= set(aux_bands):
        takes = f"{', '.join(aux_bands)} only" if aux_bands else "no auxiliary bands"
        raise BandError(
            f"radar was given, but {model} takes {takes}. Leave out --aux, or use a model trained with "
            "model.network.aux_bands=[VV, VH]."
        )


def _check(path: str) -> tuple[int, ...]:
    """Return the numbers of VV and VH after checking that the file holds decibels."""
    with reading(path):
        dataset = opened(path)
        names = [(text or "").strip().upper() for text in dataset.descriptions]
        if set(RADAR_BANDS) <= set(names):
            positions = tuple(names.index(band) + 1 for band in RADAR_BANDS)
        elif dataset.count == len(RADAR_BANDS) and not any(names):
            positions = (1, 2)
        else:
            raise BandError(
                f"{path} has bands {', '.join(name or 'unnamed' for name in names)}; expected VV and VH, by name, or "
                "two unnamed bands in this order."
            )
        if not np.issubdtype(np.dtype(dataset.dtypes[0]), np.floating):
            raise DataError(
                f"{path} is {dataset.dtypes[0]}; expected decibels as float32. Convert it to dB first, for example "
                "with gdal_calc.py."
            )
        shape = tuple(min(SAMPLED, size) for size in dataset.shape)
        values = dataset.read(list(positions), out_shape=(len(positions), *shape), masked=True)
    check_decibel(np.ma.filled(values.astype(np.float32), np.nan), path)
    return positions
