"""Where the cloud masks come from: the product's classification, a file, a detector that is installed, or the model.

`with_masks` wraps sources so that `read_mask` returns the chosen mask: True = cloud or shadow. With the choice "own" it
returns None, and the model estimates the clouds itself. The detectors (s2cloudless, OmniCloudMask) work on fixed blocks
of the grid with a margin around each, so that a mask does not depend on the window that is read.
`sader.geo.read.quality` holds the meaning of classes and bits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.data.cloud_rules import S2CLOUDLESS_BANDS, detect_s2cloudless
from sader.errors import BandError, ConfigError, DataError, did_you_mean, require
from sader.geo.grid import Grid
from sader.geo.offset import sample_windows
from sader.geo.read.quality import LAYOUTS, Quality, kind_in, parse_numbers, parse_quality
from sader.geo.read.raster import BandFile, grid_of, opened, read_band, reading
from sader.geo.stack import DateSource, WrappedSource
from sader.inference.tiling import Notice, Window, copy_common
from sader.inference.values import UNKNOWN, ValueCoding
from sader.model.heads import HIDDEN_CLASSES

CHOICES = ("auto", "own", "head", "none", *LAYOUTS, "s2cloudless", "omnicloudmask")
OUTSIDE = ValueCoding("uint8", 1.0, 0.0, UNKNOWN)
CLASSES_TAG = "SADER_CLASSES"
"""Metadata by which the classes that `sader mask` writes are recognised."""
QUALITY_ENDINGS = ("_scl", "_fmask", ".fmask", "_qa_pixel", "_qa60", "_udm2", "_udm2_clip")
MASK_ENDINGS = ("_mask", "_cloudmask", "_label", "_cld", *QUALITY_ENDINGS)
"""Endings of the names of mask files."""


@dataclass(frozen=True)
class Unmasked(WrappedSource):
    """A source without a cloud mask: the model estimates the clouds."""

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        return None


@dataclass(frozen=True)
class QualityMasked(WrappedSource):
    """A source masked by the classification or the quality band of the product; not where it has no such band."""

    quality: Quality

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        found = self.source.read_classes(window, grid=grid, kind=self.quality.kind)
        return None if found is None else self.quality.mask(found, unknown=False)


@dataclass(frozen=True)
class FileMasked(WrappedSource):
    """A source masked by a file of its own, on any grid; beyond the file's edge nothing is known to be clear."""

    file: BandFile
    quality: Quality | None = None
    """What its numbers mean; None = a mask of 0 (clear) and other values (cloud)."""
    values: tuple[int, ...] = ()
    """Values that count as cloud, where the user names them."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.source.paths, self.file.path)))

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return the cloud pixels of the file; True outside the file, so that the model fills them in."""
        if self.quality is not None:
            coding = LAYOUTS[self.quality.kind].coding
            numbers = read_band(self.file, window, grid=grid, coding=coding, categories=True)
            return self.quality.mask(numbers, unknown=True)
        numbers = read_band(self.file, window, grid=grid, coding=OUTSIDE, categories=True)
        return np.isin(numbers, (*self.values, UNKNOWN)) if self.values else numbers != 0


Detector = Callable[[NDArray[np.float32]], NDArray[np.bool_]]
"""Reflectance (C, h, w) -> cloud (h, w). Module level, so that it can be sent to another process."""
BLOCK, MARGIN = 512, 64
"""Edge in pixels of the blocks of a detector, and of the margin around them."""
CACHED_BLOCKS = 8192
"""Blocks that are kept, packed into bits: 32 KiB each, so that a series of sixteen whole tiles is detected once."""


@dataclass(frozen=True)
class DetectorMasked(WrappedSource):
    """A source masked by a detector that is run on its values, block by block."""

    detector: Detector
    inputs: tuple[str, ...]
    """Bands of the detector."""
    blocks: DetectorBlocks = field(default_factory=lambda: DetectorBlocks(), compare=False, repr=False)

    def read_mask(self, window: Window, *, grid: Grid) -> NDArray[np.bool_] | None:
        """Return where the detector finds cloud or shadow; False where there is no data."""
        out = np.zeros((window.height, window.width), dtype=bool)
        for top in range(window.row // BLOCK * BLOCK, window.row + window.height, BLOCK):
            for left in range(window.col // BLOCK * BLOCK, window.col + window.width, BLOCK):
                make = partial(self._block, grid, top, left)
                block = self.blocks.get((self.name, id(self.source), grid, top, left), make)
                copy_common(out, window, block, Window(top, left, *block.shape))
        return out

    def _block(self, grid: Grid, top: int, left: int) -> NDArray[np.bool_]:
        height, width = min(BLOCK, grid.height - top), min(BLOCK, grid.width - left)
        row, col = max(0, top - MARGIN), max(0, left - MARGIN)
        around = Window(
            row, col, min(grid.height, top + height + MARGIN) - row, min(grid.width, left + width + MARGIN) - col
        )
        values, valid = self.source.read(around, bands=self.inputs, grid=grid)
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


DETECTORS: dict[str, tuple[str, Detector, tuple[str, ...]]] = {
    "s2cloudless": ("s2cloudless", detect_s2cloudless, S2CLOUDLESS_BANDS),
    "omnicloudmask": ("masks", detect_omnicloudmask, OMNICLOUDMASK_BANDS),
}
"""Package -> extra that installs it, detector and its bands."""


def with_masks(
    sources: Sequence[DateSource],
    mask: str | Path | Sequence[str | Path] | None,
    *,
    values: str | None = None,
    notice: Notice | None = None,
) -> list[DateSource]:
    """Return the sources with the chosen masks.

    mask: "auto" or None (the product's classification where there is one, else the estimate of the mask network), "own"
    or "none" (the mask network), "head" (the cloud head of the model), "scl", "scl:thick|clouds|standard|strict",
    "scl:3,8,9", "fmask", "qa_pixel", "qa60" (also with bits: "qa_pixel:3,4"), "s2cloudless", "omnicloudmask"; a mask
    file, a folder of them, or one file per date.
    In a file 0 is clear and 1 or 255 is cloud; a file with SCL, Fmask, QA_PIXEL or QA60 in its name is read as such,
    and in the classes of `sader mask` thick cloud, thin cloud and shadow count.
    values: "2,4", the values of mask files that count as cloud or shadow.
    """
    if mask is not None and not isinstance(mask, str | Path):
        mask = mask[0] if len(mask) == 1 else list(mask) or None
    chosen = None if values is None else parse_numbers(values)
    words = isinstance(mask, str) and (mask.strip().lower().partition(":")[0] in CHOICES)
    if values is not None and (chosen is None or mask is None or words):
        raise ConfigError(
            f"mask values are {values!r} with the mask {mask!r}; expected whole numbers such as 2,4 and a mask file or "
            "a folder of them."
        )
    if mask is None or mask == "auto":
        return list(sources)
    if isinstance(mask, str):
        word = mask.strip().lower()
        if word in ("own", "head", "none"):
            return [Unmasked(source) for source in sources]
        if word.partition(":")[0] in LAYOUTS:
            return _with_quality(sources, parse_quality(word), notice)
        if word in DETECTORS:
            return _with_detector(sources, word)
        if not Path(mask).exists():
            raise ConfigError(f"mask is {mask!r}, no file{did_you_mean(word, CHOICES)}")
    return _with_files(sources, mask, chosen or ())


def _with_quality(sources: Sequence[DateSource], quality: Quality, notice: Notice | None) -> list[DateSource]:
    kind, first = quality.kind, Window(0, 0, 1, 1)
    what = "scene classification (SCL)" if kind == "scl" else f"{kind.upper()} band"
    without = [source.name for source in sources if source.read_classes(first, grid=source.grid, kind=kind) is None]
    if len(without) == len(sources):
        wanted = "L2A products or STAC items with an scl asset" if kind == "scl" else f"products or files with {kind}"
        raise DataError(
            f"no {what} with {', '.join(without[:3])}; expected {wanted}. Leave --mask out for the model's own "
            "estimate, or give mask files."
        )
    if without and notice:
        notice(f"{', '.join(without)}: no {what.removesuffix(' (SCL)')}; the model estimates the clouds there.")
    return [QualityMasked(source, quality) for source in sources]


def _with_detector(sources: Sequence[DateSource], word: str) -> list[DateSource]:
    extra, detector, bands = DETECTORS[word]
    require(word, extra=extra, purpose=f"the mask {word}")
    for source in sources:
        missing = [band for band in bands if band not in source.bands]
        if missing:
            level = " It works on L1C products." if word == "s2cloudless" else ""
            raise BandError(
                f"{source.name} has no {', '.join(missing)}; the mask {word} needs {', '.join(bands)}.{level} "
                "Leave --mask out for the model's own estimate."
            )
    blocks = DetectorBlocks()
    return [DetectorMasked(source, detector, bands, blocks) for source in sources]


def _with_files(
    sources: Sequence[DateSource], mask: str | Path | Sequence[str | Path], values: tuple[int, ...]
) -> list[DateSource]:
    if isinstance(mask, (str, Path)):
        path = Path(mask)
        if path.is_dir():
            return [_in_folder(path, source, values) for source in sources]
        with reading(str(path)):
            count = int(opened(str(path)).count)
        if count == len(sources):
            return [_checked(source, path, number, values) for number, source in enumerate(sources, start=1)]
        raise DataError(
            f"the mask {path.name} has {count} bands for {len(sources)} dates; expected one band for each date, one "
            "file for each date, or a folder of masks with the dates in their names."
        )
    paths = [Path(entry) for entry in mask]
    if len(paths) != len(sources):
        raise DataError(f"{len(paths)} mask files for {len(sources)} dates; expected one for each, in the same order.")
    return [_checked(source, path, 1, values) for source, path in zip(sources, paths, strict=True)]


def _in_folder(folder: Path, source: DateSource, values: tuple[int, ...]) -> FileMasked:
    """Return a source with its mask: the file of its name, or of its date."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".tif", ".tiff", ".jp2", ".vrt"))
    stem = Path(source.name).stem
    others = [file for file in files if file.name != Path(source.name).name and not file.stem.endswith("_probability")]
    for file in others:
        bare = file.stem.lower()
        for ending in MASK_ENDINGS:
            bare = bare.removesuffix(ending)
        if bare == stem.lower():
            return _checked(source, file, 1, values)
    if source.date is not None:
        days = (f"{source.date:%Y-%m-%d}", f"{source.date:%Y%m%d}", f"{source.date:%Y_%m_%d}")
        dated = [file for file in others if any(day in file.stem for day in days)]
        if len(dated) == 1:
            return _checked(source, dated[0], 1, values)
        if len(dated) > 1:
            names = ", ".join(file.name for file in dated[:4])
            raise DataError(f"{folder} holds {len(dated)} masks for {source.name} ({names}); expected one. Name it.")
    raise DataError(
        f"{folder} holds no mask for {source.name}; expected {stem}_mask.tif or a name with its date. Put one "
        "there, or leave --mask out for the model's own estimate."
    )


def _checked(source: DateSource, path: Path, index: int, chosen: tuple[int, ...]) -> FileMasked:
    """Return a source with the mask of a file, after checking its values. chosen: those that count as cloud."""
    masked = FileMasked(source, BandFile(str(path), index))
    with reading(str(path)):
        dataset = opened(str(path))
        grid = grid_of(dataset)
        if not 1 <= index <= dataset.count:
            raise DataError(f"the mask {path.name} has {dataset.count} bands; expected a band {index}.")
        if chosen:
            return replace(masked, values=chosen)
        if CLASSES_TAG in dataset.tags():
            return replace(masked, values=HIDDEN_CLASSES)
        if (kind := kind_in(path.stem) or kind_in(dataset.descriptions[index - 1] or "")) is not None:
            return replace(masked, quality=parse_quality(kind))
        values: set[float] = set()
        for window in sample_windows(grid.height, grid.width):
            part = read_band(masked.file, window, grid=grid, coding=OUTSIDE, categories=True)
            values |= set(np.unique(part[~np.isnan(part)]).tolist())  # NaN is not known to be clear, like 255
    if not (values <= {0, 1} or values <= {0, 255} or values <= {0, 1, 255}):
        shown = ", ".join(f"{value:g}" for value in sorted(values)[:8])
        raise DataError(
            f"the mask {path.name} holds the values {shown}; expected 0 = clear and 1 or 255 = cloud. Name the values "
            "that count as cloud (--mask-values 2,4). A file with SCL, Fmask, QA_PIXEL or QA60 as a word of its name "
            "(2022-03-10_SCL.tif) is read as such; turn probabilities into a mask first."
        )
    return masked
