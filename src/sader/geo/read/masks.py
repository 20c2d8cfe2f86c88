"""Where the cloud masks come from: the product's classification, a file, a detector that is installed, or the model.

`with_masks` wraps sources so that `read_mask` returns the chosen mask: True = cloud or shadow. With the choice "own" it
returns None, and the model estimates the clouds itself. The detectors (s2cloudless, OmniCloudMask) work on fixed blocks
of the grid with a margin around each, so that a mask does not depend on the window that is read.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sader.data.cloud_rules import S2CLOUDLESS_BANDS, detect_s2cloudless
from sader.errors import BandError, ConfigError, DataError, did_you_mean, require
from sader.geo.grid import Grid
from sader.geo.offset import sample_windows
from sader.geo.read.products import CLASSES, SCL_CLOUD
from sader.geo.read.raster import BandFile, grid_of, opened, read_band, reading
from sader.geo.stack import DateSource
from sader.inference.tiling import Notice, Window
from sader.inference.values import ValueCoding

SCL_NAMES: dict[int, str] = {
    0: "no data",
    1: "saturated or defective",
    2: "dark area",
    3: "cloud shadow",
    4: "vegetation",
    5: "bare soil",
    6: "water",
    7: "unclassified",
    8: "cloud, medium probability",
    9: "cloud, high probability",
    10: "thin cirrus",
    11: "snow or ice",
}
"""Classes of Sen2Cor's scene classification."""
SCL_CHOICES: dict[str, tuple[int, ...]] = {
    "thick": (8, 9),
    "clouds": (8, 9, 10),
    "standard": SCL_CLOUD,
    "strict": (1, 2, 3, 7, 8, 9, 10),
}
"""Name -> classes that count as cloud or shadow."""
CHOICES = ("auto", "own", "none", "scl", "s2cloudless", "omnicloudmask")
NO_CLASS = 0
"""Of a scene classification: no data, and what lies outside the file."""
OUTSIDE = ValueCoding("uint8", 1.0, 0.0, 255.0)
MASK_ENDINGS = ("_mask", "_cloudmask", "_label", "_scl", "_cld")


class MaskProvider(Protocol):
    """Returns the cloud mask of an acquisition."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The mask files, if any."""

    def mask(self, source: DateSource, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return (h, w), True = cloud or shadow; None where it is not known."""


@dataclass(frozen=True)
class MaskedSource(DateSource):
    """A source whose cloud mask comes from a provider; everything else is that of the source."""

    source: DateSource
    provider: MaskProvider
    name: str = field(init=False)
    date: datetime | None = field(init=False)
    bands: tuple[str, ...] = field(init=False)
    grid: Grid = field(init=False)
    coding: ValueCoding = field(init=False)

    def __post_init__(self) -> None:
        source = self.source
        facts = {"name": source.name, "date": source.date, "bands": source.bands, "grid": source.grid}
        for attribute, value in {**facts, "coding": source.coding}.items():
            object.__setattr__(self, attribute, value)

    def read_numbers(self, window: Window, *, bands: Sequence[str], grid: Grid) -> NDArray[Any]:
        return self.source.read_numbers(window, bands=bands, grid=grid)

    def codings(self, bands: Sequence[str]) -> tuple[ValueCoding, ...]:
        return self.source.codings(bands)

    def block_shape(self, bands: Sequence[str], grid: Grid) -> tuple[int, int] | None:
        return self.source.block_shape(bands, grid)

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return the mask (h, w) of the provider."""
        return self.provider.mask(self.source, window, grid=grid)

    def read_classes(self, window: Window, *, grid: Grid) -> NDArray[np.uint8] | None:
        return self.source.read_classes(window, grid=grid)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.source.paths, *self.provider.paths)))

    @property
    def origins(self) -> tuple[tuple[str, str], ...]:
        return self.source.origins


@dataclass(frozen=True)
class OwnMask:
    """No mask: the model estimates the clouds."""

    paths: tuple[str, ...] = ()

    def mask(self, source: DateSource, window: Window, *, grid: Grid) -> None:
        """Return None."""


@dataclass(frozen=True)
class SclMask:
    """The product's scene classification."""

    classes: tuple[int, ...] = SCL_CLOUD
    paths: tuple[str, ...] = ()

    def mask(self, source: DateSource, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return where the class is one of `classes`; None for a source without a classification."""
        found = source.read_classes(window, grid=grid)
        return None if found is None else np.isin(found, self.classes)


@dataclass(frozen=True)
class FileMask:
    """A mask in a file of its own, on any grid; beyond the file's edge nothing is known to be clear."""

    file: BandFile
    classes: tuple[int, ...] | None = None
    """Classes that count as cloud; None = a mask of 0 (clear) and 1 or 255 (cloud)."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.file.path,)

    def mask(self, source: DateSource, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return the cloud pixels of the file; True outside the file, so that the model fills them in."""
        if self.classes is not None:
            found = read_band(self.file, window, grid=grid, coding=CLASSES, categories=True)
            return np.isin(found, (NO_CLASS, *self.classes))  # of what has no class nothing is known either
        return read_band(self.file, window, grid=grid, coding=OUTSIDE, categories=True) != 0


BLOCK, MARGIN = 512, 64
"""Edge in pixels of the blocks of a detector, and of the margin around them."""
CACHED_BLOCKS = 8192
"""Blocks that are kept, packed into bits: 32 KiB each, so that a series of sixteen whole tiles is detected once."""


@dataclass(frozen=True)
class DetectorMask:
    """A detector that is run on the values, block by block."""

    detector: Callable[[NDArray[np.float32]], NDArray[np.bool_]]
    """Reflectance (C, h, w) of `bands` -> cloud (h, w). Module level, so that it can be sent to another process."""
    bands: tuple[str, ...]
    paths: tuple[str, ...] = ()
    blocks: DetectorBlocks = field(default_factory=lambda: DetectorBlocks(), compare=False, repr=False)

    def mask(self, source: DateSource, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return where the detector finds cloud or shadow; False where there is no data."""
        out = np.zeros((window.height, window.width), dtype=bool)
        for top in range(window.row // BLOCK * BLOCK, window.row + window.height, BLOCK):
            for left in range(window.col // BLOCK * BLOCK, window.col + window.width, BLOCK):
                make = partial(self._block, source, grid, top, left)
                block = self.blocks.get((source.name, id(source), grid, top, left), make)
                r0, c0 = max(top, window.row), max(left, window.col)
                r1 = min(top + block.shape[0], window.row + window.height)
                c1 = min(left + block.shape[1], window.col + window.width)
                out[r0 - window.row : r1 - window.row, c0 - window.col : c1 - window.col] = block[
                    r0 - top : r1 - top, c0 - left : c1 - left
                ]
        return out

    def _block(self, source: DateSource, grid: Grid, top: int, left: int) -> NDArray[np.bool_]:
        height, width = min(BLOCK, grid.height - top), min(BLOCK, grid.width - left)
        row, col = max(0, top - MARGIN), max(0, left - MARGIN)
        around = Window(
            row, col, min(grid.height, top + height + MARGIN) - row, min(grid.width, left + width + MARGIN) - col
        )
        values, valid = source.read(around, bands=self.bands, grid=grid)
        found = np.zeros(valid.shape, dtype=bool) if not valid.any() else self.detector(values) & valid
        return found[top - row : top - row + height, left - col : left - col + width]


class DetectorBlocks:
    """The last blocks of a detector; shared by threads, empty after pickling."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Any, tuple[NDArray[np.uint8], int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """Return the block of `key`, computed where it is not cached."""
        with self._lock:
            if key not in self._blocks:
                block = make()
                self._blocks[key] = np.packbits(block, axis=1), block.shape[1]
                while len(self._blocks) > CACHED_BLOCKS:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(key)
            packed, width = self._blocks[key]
        return np.unpackbits(packed, axis=1, count=width).astype(bool)

    def __reduce__(self) -> tuple[type[DetectorBlocks], tuple[()]]:
        return DetectorBlocks, ()


OMNICLOUDMASK_BANDS = ("B04", "B03", "B08")


def detect_omnicloudmask(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return thick and thin cloud and shadow (h, w) in reflectance (3, h, w): red, green, near infrared."""
    package = require("omnicloudmask", extra="masks", purpose="the mask omnicloudmask")
    size = max(32, min(values.shape[1:]))
    found = package.predict_from_array(values, patch_size=min(1000, size), patch_overlap=min(300, size // 2))
    return np.asarray(found).reshape(values.shape[1:]) > 0


def s2cloudless_mask() -> DetectorMask:
    """Return the provider; raise at once, with the install command, where the package is missing."""
    require("s2cloudless", extra="s2cloudless", purpose="the mask s2cloudless")
    return DetectorMask(detect_s2cloudless, S2CLOUDLESS_BANDS)


def omnicloudmask_mask() -> DetectorMask:
    """Return the provider; raise at once, with the install command, where the package is missing."""
    require("omnicloudmask", extra="masks", purpose="the mask omnicloudmask")
    return DetectorMask(detect_omnicloudmask, OMNICLOUDMASK_BANDS)


DETECTORS: dict[str, Callable[[], DetectorMask]] = {
    "s2cloudless": s2cloudless_mask,
    "omnicloudmask": omnicloudmask_mask,
}


def parse_scl(text: str) -> tuple[int, ...]:
    """Return the classes that "scl", "scl:strict" or "scl:3,8,9" mean."""
    _, colon, rest = text.partition(":")
    rest = rest.strip().lower()
    if not colon or rest in SCL_CHOICES:
        return SCL_CHOICES[rest or "standard"]
    words = [word.strip() for word in rest.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"mask is {text!r}{did_you_mean(rest, SCL_CHOICES)}, or classes such as scl:3,8,9,10.")
    wrong = [word for word in words if int(word) not in SCL_NAMES]
    if wrong:
        known = ", ".join(f"{number} {name}" for number, name in SCL_NAMES.items())
        raise ConfigError(f"mask is {text!r}; there is no class {', '.join(wrong)}. Classes: {known}.")
    return tuple(sorted({int(word) for word in words}))


def with_masks(
    sources: Sequence[DateSource],
    mask: str | Path | Sequence[str | Path] | None,
    *,
    notice: Notice | None = None,
) -> list[DateSource]:
    """Return the sources with the chosen masks.

    mask: "auto" or None (the product's classification where there is one, else the model's own estimate), "own" or
    "none" (the model's), "scl", "scl:thick|clouds|standard|strict", "scl:3,8,9", "s2cloudless", "omnicloudmask"; a mask
    file, a folder of them, or one file per date. In a file 0 is clear and 1 or 255 is cloud; a file named ..._SCL is
    read as a classification.
    """
    if mask is None or mask == "auto":
        return list(sources)
    if isinstance(mask, str):
        word = mask.strip().lower()
        if word in ("own", "none"):
            return [MaskedSource(source, OwnMask()) for source in sources]
        if word == "scl" or word.startswith("scl:"):
            return _with_scl(sources, parse_scl(word), notice)
        if word in DETECTORS:
            return _with_detector(sources, word)
        if not Path(mask).exists():
            raise ConfigError(f"mask is {mask!r}, no file{did_you_mean(word, CHOICES)}")
    return [
        MaskedSource(source, provider) for source, provider in zip(sources, _file_masks(sources, mask), strict=True)
    ]


def _with_scl(sources: Sequence[DateSource], classes: tuple[int, ...], notice: Notice | None) -> list[DateSource]:
    without = [source.name for source in sources if not _has_classes(source)]
    if len(without) == len(sources):
        raise DataError(
            f"no scene classification (SCL) with {', '.join(without[:3])}; expected L2A products or STAC items with an "
            "scl asset. Leave --mask out for the model's own estimate, or give mask files."
        )
    if without and notice:
        notice(f"{', '.join(without)}: no scene classification; the model estimates the clouds there.")
    return [MaskedSource(source, SclMask(classes)) for source in sources]


def _has_classes(source: DateSource) -> bool:
    return source.read_classes(Window(0, 0, 1, 1), grid=source.grid) is not None


def _with_detector(sources: Sequence[DateSource], word: str) -> list[DateSource]:
    provider = DETECTORS[word]()
    for source in sources:
        missing = [band for band in provider.bands if band not in source.bands]
        if missing:
            level = " It works on L1C products." if word == "s2cloudless" else ""
            raise BandError(
                f"{source.name} has no {', '.join(missing)}; the mask {word} needs {', '.join(provider.bands)}.{level} "
                "Leave --mask out for the model's own estimate."
            )
    return [MaskedSource(source, provider) for source in sources]


def _file_masks(sources: Sequence[DateSource], mask: str | Path | Sequence[str | Path]) -> list[FileMask | OwnMask]:
    if isinstance(mask, (str, Path)):
        path = Path(mask)
        if path.is_dir():
            return [_in_folder(path, source) for source in sources]
        with reading(str(path)):
            count = int(opened(str(path)).count)
        if count == len(sources):
            return [_checked(path, number) for number in range(1, count + 1)]
        raise DataError(
            f"the mask {path.name} has {count} bands for {len(sources)} dates; expected one band for each date, one "
            "file for each date, or a folder of masks with the dates in their names."
        )
    paths = [Path(entry) for entry in mask]
    if len(paths) == 1:
        return _file_masks(sources, paths[0])
    if len(paths) != len(sources):
        raise DataError(f"{len(paths)} mask files for {len(sources)} dates; expected one for each, in the same order.")
    return [_checked(path, 1) for path in paths]


def _in_folder(folder: Path, source: DateSource) -> FileMask | OwnMask:
    """Return the mask of a source: the file of its name, or of its date; the model's own where there is none."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".tif", ".tiff", ".jp2", ".vrt"))
    stem = Path(source.name).stem
    others = [file for file in files if file.name != Path(source.name).name]
    for file in others:
        bare = file.stem.lower()
        for ending in MASK_ENDINGS:
            bare = bare.removesuffix(ending)
        if bare == stem.lower():
            return _checked(file, 1)
    if source.date is not None:
        days = (f"{source.date:%Y-%m-%d}", f"{source.date:%Y%m%d}", f"{source.date:%Y_%m_%d}")
        dated = [file for file in others if any(day in file.stem for day in days)]
        if len(dated) == 1:
            return _checked(dated[0], 1)
        if len(dated) > 1:
            names = ", ".join(file.name for file in dated[:4])
            raise DataError(f"{folder} holds {len(dated)} masks for {source.name} ({names}); expected one. Name it.")
    raise DataError(
        f"{folder} holds no mask for {source.name}; expected {stem}_mask.tif or a name with its date. Put one "
        "there, or leave --mask out for the model's own estimate."
    )


def _checked(path: Path, index: int) -> FileMask:
    """Return the mask in a file after checking its values."""
    with reading(str(path)):
        dataset = opened(str(path))
        grid = grid_of(dataset)
        if not 1 <= index <= dataset.count:
            raise DataError(f"the mask {path.name} has {dataset.count} bands; expected a band {index}.")
        words = re.split(r"[^a-z0-9]+", path.stem.lower())
        if "scl" in words or "scl" in (dataset.descriptions[index - 1] or "").lower():
            return FileMask(BandFile(str(path), index), SCL_CLOUD)
        values: set[float] = set()
        for window in sample_windows(grid.height, grid.width):
            part = read_band(BandFile(str(path), index), window, grid=grid, coding=OUTSIDE, categories=True)
            values |= set(np.unique(part[~np.isnan(part)]).tolist())  # NaN is not known to be clear, like 255
    if not (values <= {0, 1} or values <= {0, 255} or values <= {0, 1, 255}):
        shown = ", ".join(f"{value:g}" for value in sorted(values)[:8])
        raise DataError(
            f"the mask {path.name} holds the values {shown}; expected 0 = clear and 1 or 255 = cloud. A scene "
            "classification must have SCL as a word of its name (2022-03-10_SCL.tif); turn other classes or "
            "probabilities into a mask first."
        )
    return FileMask(BandFile(str(path), index))
