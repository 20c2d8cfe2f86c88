"""What every reader of a public dataset returns: `PublicDataset`, a sequence of `PublicSeries` read on demand.

One series is the paper's task: cloudy dates in, one clear image of another date out. Random choices depend on the
index of the series alone, so that workers, read order and resuming change nothing. The readers decide which files form
a series.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from sader.data.batch import CLEAR, UNKNOWN, keyed_generator
from sader.data.public.images import check_files, check_order
from sader.data.public.splits import SplitList
from sader.data.radar import RADAR_BANDS, radar_counts
from sader.data.shards import SeriesRecord
from sader.errors import BandError, ConfigError, DataError
from sader.files import file_digest

if TYPE_CHECKING:
    from sader.data.items import Item


@dataclass(frozen=True)
class ReadOptions:
    """Options of a reader; those that do not apply to its dataset are ignored."""

    lists: str | Path | None = None
    """Origin of the split list: folder, frozen, hash, or the path of a list; None: the default of the dataset."""
    partial: bool = False
    """Use the listed places that are on disk; otherwise a missing place is an error, because it changes the score."""
    inputs: int = 3
    """Cloudy dates T of a series, for datasets with more dates (SEN12MS-CR-TS)."""
    sar: str | None = None
    """Read Sentinel-1 as `aux` under this name of `SAR_SCALINGS`; None reads none."""
    coverage: str | Path = "auto"
    """SEN12MS-CR-TS cloud cover of the dates: masks (`*_mask.npy` beside the images), s2cloudless (the paper's
    detector), rules, auto (masks if every image of the split has one, else rules), or the path of a JSON table."""
    draws: int = 1
    """Series of each patch with the sampler published_random; each draws its own target."""


@dataclass(frozen=True)
class Request:
    """The checked arguments of `open_dataset`."""

    name: str
    split: str
    sampler: str
    protocol: str
    options: ReadOptions


@dataclass(frozen=True)
class Entry:
    """The files of one series."""

    name: str
    """Unique within the dataset."""
    group: str
    """Tile or region: series of one group are not independent."""
    inputs: tuple[Path, ...]
    target: Path | None
    more: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Other files by kind: masks, infrared, Sentinel-1."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0
    """Its index in the split, also within a subset; random choices depend on it alone."""

    @property
    def images(self) -> list[Path]:
        """The target, where it is known before the dates are chosen, and the inputs."""
        return [*self.inputs] if self.target is None else [self.target, *self.inputs]

    @property
    def files(self) -> list[Path]:
        """Every image file of the series."""
        return [*self.images, *(path for paths in self.more.values() for path in paths)]


@dataclass(frozen=True, eq=False)
class PublicSeries:
    """One item of a public dataset. Images are float32 in [0, 1]: reflectance, or value / 255 of 8-bit datasets."""

    name: str
    group: str
    cloudy: np.ndarray
    """(T, C, H, W), 0 where not valid."""
    clear: np.ndarray
    """(C, H, W) the target, 0 where not observed."""
    valid: np.ndarray
    """bool (T, H, W)."""
    clear_valid: np.ndarray
    """bool (H, W): the target was observed, and is clear if the dataset labels it."""
    bands: tuple[str, ...]
    cloud_mask: np.ndarray | None = None
    """bool (T, H, W), the masks of the dataset; None if it has none."""
    days: tuple[float, ...] | None = None
    """Days of the T dates since the earliest of inputs and target."""
    target_day: float | None = None
    aux: np.ndarray | None = None
    """(T, A, H, W) bands of the inputs that the target lacks: scaled Sentinel-1 if requested, infrared."""
    aux_bands: tuple[str, ...] = ()
    """Names of the A bands: VV, VH or B08."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Choices of the sampler, such as the numbers of the dates."""

    @classmethod
    def of(cls, entry: Entry, images: np.ndarray, seen: np.ndarray, bands: Sequence[str], **more: Any) -> PublicSeries:
        """Return the series of images (1 + T, C, H, W) and where they were observed, the target first."""
        return cls(entry.name, entry.group, images[1:], images[0], seen[1:], seen[0], tuple(bands), **more)

    @property
    def leaks(self) -> bool:
        """Whether the target is one of the inputs."""
        return any(
            np.array_equal(date, self.clear) and bool((seen & self.clear_valid).any())
            for date, seen in zip(self.cloudy, self.valid, strict=True)
        )

    def chosen(self, bands: Sequence[str] | None) -> PublicSeries:
        """Return the series with the available ones of `bands`, in that order; None = all."""
        if bands is None:
            return self
        names = tuple(band for band in bands if band in self.bands)
        if not names:
            raise BandError(f"{self.name} has bands {', '.join(self.bands)}; expected some of {', '.join(bands)}.")
        index = [self.bands.index(band) for band in names]
        return replace(self, cloudy=self.cloudy[:, index], clear=self.clear[index], bands=names)

    def item(self, bands: Sequence[str] | None = None, aux_bands: Sequence[str] = ()) -> Item:
        """Return the series as an evaluation item of the paper's task, scored wherever the target is known.

        The masks are the dataset's, else estimated by rules from the inputs alone (never from the target, which would
        reveal the answer). `aux_bands` are inputs that are not scored.
        """
        from sader.data.cloud_rules import estimate_cloud_mask
        from sader.data.items import Item

        mask = self.cloud_mask
        if mask is None and all(band in self.bands for band in ("B02", "B03", "B04")):
            mask = estimate_cloud_mask(self.cloudy, self.bands, valid=self.valid)
        some = self.chosen(None if bands is None else (*bands, *aux_bands))
        item = Item(
            name=self.name,
            group=self.group,
            task="paper",
            cloudy=some.cloudy,
            clear=some.clear,
            scored=self.clear_valid & self.valid.any(0),
            cloud_mask=np.zeros(self.valid.shape, bool) if mask is None else mask & self.valid,
            label_known=self.cloud_mask is not None,
            valid=self.valid,
            reference=None,
            days=self.days,
            bands=some.bands,
            aux=self.aux,
            aux_bands=self.aux_bands,
        )
        scored = [band for band in some.bands if band not in aux_bands]
        if not scored:
            raise BandError(
                f"{self.name} has bands {', '.join(self.bands)}; expected some of {', '.join(bands or ())}."
            )
        return item if len(scored) == len(some.bands) else item.with_aux(scored)

    def record(self, source: str, *, bands: Sequence[str] | None = None, **known: Any) -> SeriesRecord:
        """Return the series for a training shard: the target first, labelled clear, then the inputs.

        Inputs stay unlabelled even if the dataset has masks: a pixel labelled clear may become a target, and these
        masks miss shadows and cloud edges. Radar is packed where it was read; the target, which is no input of this
        task, gets that of the first input. Other auxiliary bands are not packed.
        known: `level`, `resolution` and `extra` of the record.
        """
        some = self.chosen(bands)
        seen = np.concatenate([self.clear_valid[None], self.valid])
        reflectance = np.concatenate([some.clear[None], some.cloudy]).astype(np.float64)
        # 0 is nodata: a black pixel becomes 1.
        counts = np.clip(np.rint(reflectance * 10000), 1, 65535)
        dn, names = np.where(seen[:, None], counts, 0).astype(np.uint16), some.bands
        if self.aux is not None and self.aux_bands == RADAR_BANDS:
            radar = radar_counts(np.concatenate([self.aux[:1], self.aux]))
            dn, names = np.concatenate([dn, radar], axis=1), (*names, *RADAR_BANDS)
        labels = np.full(seen.shape, UNKNOWN, np.uint8)
        labels[0][self.clear_valid] = CLEAR
        days = None
        if self.days is not None and self.target_day is not None:
            days = (self.target_day, *self.days)
        extra = {"target": 0, **known.pop("extra", {})}
        return SeriesRecord(dn, self.name, source, names, labels, days=days, group=self.group, extra=extra, **known)


Reader = Callable[[Entry], PublicSeries]


@dataclass(frozen=True)
class PublicDataset(Sequence[PublicSeries]):
    """One split of a public dataset. A series is read when it is indexed, and not cached."""

    request: Request
    root: Path
    entries: tuple[Entry, ...]
    read: Reader
    """A function of the module of the reader (or a partial of one), so that it can be pickled for worker processes."""
    bands: tuple[str, ...]
    lists: SplitList
    level: str = "L1C"
    resolution: float | None = 10.0
    notes: dict[str, Any] = field(default_factory=dict)
    """Further facts for a report, such as places missing on disk."""

    def __post_init__(self) -> None:
        numbered = tuple(replace(entry, number=number) for number, entry in enumerate(self.entries))
        if not self.entries:
            lost = self.notes.get("missing_places")
            found = f"all {len(lost)} listed places are missing" if lost else "none of it belongs to the split"
            raise DataError(
                f"{self.root} holds no series of split {self.request.split} of {self.request.name}: {found}. "
                "Download that part of the dataset or choose another split."
            )
        if all(entry.number == 0 for entry in self.entries):
            object.__setattr__(self, "entries", numbered)

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> PublicSeries: ...
    @overload
    def __getitem__(self, index: slice) -> PublicDataset: ...
    def __getitem__(self, index: int | slice) -> PublicSeries | PublicDataset:
        if isinstance(index, slice):
            return self.subset(range(len(self))[index])
        return self.read(self.entries[index])

    def subset(self, indexes: Iterable[int]) -> PublicDataset:
        """Return the dataset with these series only; their random choices do not change."""
        return replace(self, entries=tuple(self.entries[index] for index in indexes))

    def limited(self, per_group: int | None, *, seed: int = 0) -> PublicDataset:
        """Return at most `per_group` series of each group, chosen by the seed."""
        if per_group is None:
            return self
        groups: dict[str, list[int]] = {}
        for index, entry in enumerate(self.entries):
            groups.setdefault(entry.group, []).append(index)
        kept = []
        for members in groups.values():
            picks = keyed_generator(seed, self.entries[members[0]].number, len(members)).permutation(len(members))
            kept += [members[k] for k in picks[:per_group]]
        return self.subset(sorted(kept))

    def check(self, *, samples: int = 8) -> None:
        """Raise for damaged files and, from some clear images, for bands in another order; before a training."""
        check_files(path for entry in self.entries for path in entry.files)
        chosen = range(0, len(self), max(1, len(self) // samples))[:samples]
        check_order([self[index].clear for index in chosen], self.bands, self.root)

    def records(self, bands: Sequence[str] | None = None) -> Iterator[SeriesRecord]:
        """Yield the series as records for training shards."""
        facts = self.facts
        extra = {key: facts[key] for key in ("split", "sampler", "lists", "lists_sha256")}
        for series in self:
            yield series.record(
                self.request.name, bands=bands, level=self.level, resolution=self.resolution, extra=extra
            )

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the data for a report."""
        return {
            "dataset": self.request.name, "split": self.request.split, "sampler": self.request.sampler,
            "protocol": self.request.protocol, "series": len(self), "groups": len({e.group for e in self.entries}),
            "lists": self.lists.origin, "lists_sha256": self.lists.sha256, **self.notes,
        }  # fmt: skip


def missing_places(
    missing: Sequence[str], lists: SplitList, request: Request, where: Path, what: str
) -> dict[str, Any]:
    """Return the note about listed places that are not on disk; raise unless the dataset may be partial."""
    if missing and not request.options.partial:
        raise DataError(
            f"{len(missing)} of {len(lists.names)} {what} of split {request.split} are not in {where}: "
            f"{', '.join(missing[:5])}. Download them, or use the files on disk with partial=True (--partial): the "
            f"{what} on disk decide the score."
        )
    return {"missing_places": list(missing)} if missing else {}


def expect_files(files: Iterable[Path], there: Container[str], beside: Path, expected: str) -> None:
    """Raise for the first of the files of one folder whose name is not `there`."""
    for file in files:
        if file.name not in there:
            raise DataError(f"{file} does not exist, but {beside} does; expected {expected}. Unpack it again.")


def without_twins(entries: Sequence[Entry], others: Iterable[Entry]) -> tuple[list[Entry], int]:
    """Return the entries that share no image with one of `others` or with an earlier one, and how many do."""
    known = {file_digest(path) for entry in others for path in entry.images}
    kept = []
    for entry in entries:
        hashes = {file_digest(path) for path in entry.images}
        if not hashes & known:
            kept.append(entry)
        known |= hashes
    return kept, len(entries) - len(kept)


def check_choice(value: str, known: Iterable[str], what: str, name: str) -> None:
    """Raise unless `value` is one of the `known` choices of the dataset `name`."""
    options = list(known)
    if value not in options:
        raise ConfigError(f"{name} has no {what} {value!r}; it has {', '.join(options)}.")
