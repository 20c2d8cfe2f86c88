"""Evaluation items with known truth, the same on every machine: clean this date, the paper's task, simulated clouds.

Each builder yields `Item`s from `SeriesRecord`s (shards need no rasterio) and depends on its arguments alone. Scores
are computed in `sader.evaluation`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import Any, TypeVar

import numpy as np
import torch

from sader.data.bank import carried_over
from sader.data.batch import CLEAR, SHADOW, THICK, UNKNOWN, keyed_generator, turn
from sader.data.cloud_rules import estimate_cloud_mask
from sader.data.clouds import apply_clouds, cloud_fields
from sader.data.pseudo_dates import pseudo_dates
from sader.data.radar import RADAR_BANDS
from sader.data.shards import SeriesRecord, observed
from sader.errors import ConfigError, DataError

CLEAR_SHARE = 0.5
"""Minimum share of the frame that must be labelled clear for a date to be a target."""
WINDOW = 300
"""Frames longer than twice this are cut into windows of about this many pixels a side."""
SMALLEST_WINDOW = 64
"""Side of the smallest image for simulated clouds."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Frames:
    """A record (or a window of it) as arrays; `labels` keeps UNKNOWN only on dates without any label."""

    name: str
    group: str
    images: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    days: tuple[float, ...] | None
    bands: tuple[str, ...]
    radar: np.ndarray | None = None
    """(T, 2, H, W) VV and VH in [0, 1], where the record has them and they are wanted."""

    def item(
        self, name: str, dates: Sequence[int], *, clear: np.ndarray, scored: np.ndarray, reference: int | None,
        masks: np.ndarray, images: np.ndarray | None = None,
    ) -> Item:  # fmt: skip
        """Return the item of some dates. masks, images: of all dates; images: None = the record's own."""
        used = list(dates)
        return Item(
            name=name,
            group=self.group,
            task="paper" if reference is None else "clean",
            cloudy=(self.images if images is None else images)[used],
            clear=clear,
            scored=scored,
            cloud_mask=masks[used],
            label_known=all(self.labelled(date) for date in used),
            valid=self.valid[used],
            reference=reference,
            days=None if self.days is None else tuple(self.days[date] for date in used),
            bands=self.bands,
            aux=None if self.radar is None else self.radar[used],
            aux_bands=() if self.radar is None else RADAR_BANDS,
        )

    def labelled(self, date: int) -> bool:
        """Return whether every observed pixel of the date has a label."""
        return not bool((self.labels[date][self.valid[date]] == UNKNOWN).any())

    def clear(self, date: int) -> np.ndarray:
        """Return bool (H, W): labelled clear and observed."""
        return (self.labels[date] == CLEAR) & self.valid[date]

    def cloud(self, date: int) -> np.ndarray:
        """Return bool (H, W): labelled cloud, thick or thin, or shadow, and observed."""
        return (self.labels[date] >= THICK) & (self.labels[date] <= SHADOW) & self.valid[date]

    @property
    def clouds(self) -> np.ndarray:
        """Bool (T, H, W): `cloud` of every date."""
        return np.stack([self.cloud(date) for date in self.dates])

    @property
    def dates(self) -> range:
        """Numbers of the dates."""
        return range(len(self.images))

    @property
    def truths(self) -> list[int]:
        """Dates clear enough to be a target."""
        return [date for date in self.dates if self.clear(date).mean() >= CLEAR_SHARE]

    @property
    def has_clouds(self) -> bool:
        """Whether any date has labelled clouds."""
        return bool(self.clouds.any())


def read_frames(records: Iterable[SeriesRecord], bands: Sequence[str] | None, *, cut: bool = True) -> Iterator[Frames]:
    """Yield the records that have all `bands`, long ones cut into windows of about `WINDOW` pixels.

    Radar is optional: it is read where a record has it and `bands` (None: all) names it.
    """
    found = False
    for record in records:
        names = tuple(band for band in bands or record.bands if band not in RADAR_BANDS)
        with_radar = set(RADAR_BANDS) <= set(record.bands) & set(bands or record.bands)
        if any(name not in record.bands for name in names):
            continue
        found = True
        dn = record.dn[:, [record.bands.index(name) for name in names]]
        valid = observed(dn, names)
        labels = np.full(valid.shape, UNKNOWN, np.uint8) if record.labels is None else record.labels
        # On a date with labels, an unlabelled pixel is nodata; on a date without labels it is unknown.
        some = ((labels != UNKNOWN) & valid).any((1, 2))
        valid = valid & ((labels != UNKNOWN) | ~some[:, None, None])
        images = np.minimum(dn.astype(np.float32) / 10000, 1) * valid[:, None]
        group = record.group or record.name
        radar = None
        if with_radar:
            radar = record.dn[:, [record.bands.index(name) for name in RADAR_BANDS]].astype(np.float32) / 10000
        whole = Frames(record.name, group, images, labels, valid, record.days, names, radar)
        if not cut or max(valid.shape[1:]) <= 2 * WINDOW:
            yield whole
            continue
        for number, (rows, columns) in enumerate(_pieces(*valid.shape[1:])):
            yield replace(
                whole,
                name=f"{record.name}/{number}",
                images=images[..., rows, columns],
                labels=labels[..., rows, columns],
                valid=valid[..., rows, columns],
                radar=None if radar is None else radar[..., rows, columns],
            )
    if not found:
        wanted = "series" if bands is None else f"series with bands {', '.join(bands)}"
        raise DataError(f"the data holds no {wanted}. Check it with: sader data show SHARDS")


def _pieces(height: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns) of the windows of about `WINDOW` pixels that a frame is cut into."""
    rows = np.linspace(0, height, max(round(height / WINDOW), 1) + 1).astype(int)
    columns = np.linspace(0, width, max(round(width / WINDOW), 1) + 1).astype(int)
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            yield slice(int(top), int(bottom)), slice(int(left), int(right))


Window = tuple[int, slice, slice]
"""Date, rows and columns."""


def _windows(dates: Iterable[int], shape: Sequence[int], size: Sequence[int], step: int) -> Iterator[Window]:
    """Yield the windows of `size` pixels at every `step` pixels of each date of frames of `shape` pixels."""
    for date, top, left in product(dates, *(range(0, shape[axis] - size[axis] + 1, step) for axis in (0, 1))):
        yield date, slice(top, top + size[0]), slice(left, left + size[1])


def cloudy_windows(place: Frames, size: tuple[int, ...]) -> Iterator[Window]:
    """Yield the partly cloudy windows without nodata, where clouds would end in lines."""
    clouds, labelled = place.clouds, [date for date in place.dates if place.labelled(date)]
    for window in _windows(labelled, place.valid.shape[1:], size, 32):
        if 0.12 < clouds[window].mean() < 0.85 and place.valid[window].mean() > 0.97:
            yield window


def clear_windows(place: Frames, side: int) -> list[Window]:
    """Return the windows of `side` pixels (fewer in a smaller frame) that are nearly all clear."""
    shape = place.valid.shape[1:]
    side = min(side, *shape)
    clear = np.stack([place.clear(date) for date in place.dates])
    dates = place.dates if side >= SMALLEST_WINDOW else ()
    return [window for window in _windows(dates, shape, (side, side), 16) if clear[window].mean() > 0.995]


LEAST_SCORED = 500
"""Items with fewer scored pixels are left out."""
CLOUD_SHARE = 0.05
"""Minimum share of the reference's clear area that a donor's cloud and shadow must cover."""


@dataclass(frozen=True, eq=False)
class Item:
    """One evaluation item: cloudy dates, the target, and the pixels to compare."""

    name: str
    """Unique within a task: place, reference date, donor."""
    group: str
    """The place: items of one group are not independent."""
    task: str
    """clean, paper or simulated."""
    cloudy: np.ndarray
    """float32 (T, C, H, W) reflectance in [0, 1], 0 where not valid."""
    clear: np.ndarray
    """float32 (C, H, W), true on the scored pixels."""
    scored: np.ndarray
    """bool (H, W): the target is known and scored."""
    cloud_mask: np.ndarray
    """bool (T, H, W), true cloud or shadow; an estimate on dates without labels."""
    label_known: bool
    """Whether the masks of all dates are true; False: some were estimated by rules."""
    valid: np.ndarray
    """bool (T, H, W), the pixel was observed."""
    reference: int | None
    """The date to clean; None in the paper's task."""
    days: tuple[float, ...] | None
    """Days since the first date of the series."""
    bands: tuple[str, ...]
    """Names of the C bands."""
    aux: np.ndarray | None = None
    """float32 (T, A, H, W), auxiliary input bands, not scored."""
    aux_bands: tuple[str, ...] = ()
    """Names of the A auxiliary bands."""

    def with_aux(self, bands: Sequence[str]) -> Item:
        """Return the item with only `bands` to be scored; its other bands become the first auxiliary ones."""
        kept = [self.bands.index(band) for band in bands]
        rest = [index for index in range(len(self.bands)) if index not in kept]
        parts = [self.cloudy[:, rest]] * bool(rest) + ([] if self.aux is None else [self.aux])
        return replace(
            self,
            cloudy=self.cloudy[:, kept],
            clear=self.clear[kept],
            bands=tuple(bands),
            aux=np.concatenate(parts, axis=1) if parts else None,
            aux_bands=(*(self.bands[index] for index in rest), *self.aux_bands),
        )

    def some_aux(self, bands: Sequence[str]) -> np.ndarray | None:
        """Return the auxiliary bands (T, A, H, W) of these names; None where the item lacks one, or without names."""
        if self.aux is None or not bands or not set(bands) <= set(self.aux_bands):
            return None
        return self.aux[:, [self.aux_bands.index(band) for band in bands]]

    @property
    def cover(self) -> float:
        """Share of the observed input pixels under cloud or shadow."""
        return float((self.cloud_mask & self.valid).sum() / max(int(self.valid.sum()), 1))

    @property
    def kept(self) -> np.ndarray:
        """Bool (H, W): clear pixels of the reference date, which must stay unchanged; all False without one."""
        if self.reference is None:
            return np.zeros(self.scored.shape, bool)
        return self.valid[self.reference] & ~self.cloud_mask[self.reference]


def clean_this_date(
    records: Iterable[SeriesRecord],
    *,
    donors: Iterable[SeriesRecord] | None = None,
    bands: Sequence[str] | None = None,
    others: int = 3,
    per_reference: int = 1,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[Item]:
    """Yield clear dates with the real clouds and shadows of another date pasted in, scored on those pixels.

    In a record with labelled clouds each clear date is a reference and each cloudy date a donor, which is then left out
    of the inputs (unless fewer than two would remain). A record without labelled clouds (Rondonia, SEN12MS-CR) gets
    `per_reference` clouds from `donors` (default: the labelled ones among `records`), thick cloud unchanged, shadow and
    thin cloud transferred to the new ground, and a seeded choice of `others` other dates. `limit`: items per place.
    A record that names its target and its date to clean (an item of the benchmark) is one item as it is.
    """
    records = list(records)
    own = [record for record in records if record.extra.get("reference") is not None]
    yield from _given_items(own, bands, limit, seed)
    records = [record for record in records if "reference" not in record.extra]
    frames = list(read_frames(records, bands)) if records else []
    sources = frames if donors is None else list(read_frames(donors, bands))
    sources = [place for place in sources if place.has_clouds]
    for place in frames:
        items = _own_clouds(place) if place.has_clouds else _foreign_clouds(place, sources, others, per_reference, seed)
        yield from _capped(items, limit, seed, place.name)


def paper_task(
    records: Iterable[SeriesRecord],
    *,
    bands: Sequence[str] | None = None,
    inputs: int = 3,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[Item]:
    """Yield the paper's task: a clear date is the target, each choice of `inputs` other dates the input.

    Scored where the target is clear and some input observed. Only records with labelled clouds and those of public
    datasets, which name their target: all their other dates are then the input. `limit`: items per place, chosen by
    `seed`.
    """
    own: list[SeriesRecord] = []
    rest: list[SeriesRecord] = []
    for record in records:
        (own if isinstance(record.extra.get("target"), int) else rest).append(record)
    yield from _given_items([record for record in own if record.extra.get("reference") is None], bands, limit, seed)
    for place in read_frames(rest, bands) if rest or not own else ():
        if place.has_clouds:
            yield from _capped(_other_dates(place, inputs), limit, seed, place.name)


def simulated(
    records: Iterable[SeriesRecord],
    *,
    coverages: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    bands: Sequence[str] | None = None,
    dates: int = 4,
    side: int = 256,
    per_record: int = 2,
    seed: int = 0,
) -> Iterator[Item]:
    """Yield clear windows as `dates` pseudo-dates under simulated clouds of each coverage on every date.

    The first date is the reference; its hidden pixels are scored. Windows must be clear except for a few pixels, which
    become nodata on every date, and have at least `SMALLEST_WINDOW` pixels a side.
    """
    for place in read_frames(records, bands, cut=False):
        spots = clear_windows(place, side)
        rng = _rng(seed, place.name)
        chosen = rng.permutation(len(spots))[:per_record]
        for number, (date, rows, columns) in enumerate(spots[k] for k in sorted(chosen)):
            clear = place.clear(date)[rows, columns]
            image = place.images[date][:, rows, columns] * clear
            radar = None if place.radar is None else place.radar[date][:, rows, columns]
            for coverage in coverages:
                name = f"{place.name}/window{number}/cover{round(coverage * 100)}"
                item = _simulate(place, name, image, clear, dates, coverage, int(rng.integers(2**31)))
                if radar is not None:  # the same on every date, as the ground
                    item = replace(item, aux=np.repeat(radar[None], dates, axis=0), aux_bands=RADAR_BANDS)
                if item.scored.sum() >= LEAST_SCORED:
                    yield item


def with_dates(items: Iterable[Item], dates: int, *, seed: int = 0) -> Iterator[Item]:
    """Yield the items with `dates` dates, the reference among them; items with fewer are left out.

    The dates kept for a smaller number are among those kept for a larger one, so that curves over T are paired.
    """
    if dates < 1:
        raise ConfigError(f"dates is {dates}; expected at least 1.")
    for item in items:
        count = len(item.cloudy)
        if count < dates:
            continue
        order = [int(k) for k in _rng(seed, item.name).permutation(count)]
        if item.reference is not None:
            order.remove(item.reference)
            order.insert(0, item.reference)
        keep = sorted(order[:dates])
        fewer = replace(
            item,
            cloudy=item.cloudy[keep],
            cloud_mask=item.cloud_mask[keep],
            valid=item.valid[keep],
            reference=None if item.reference is None else keep.index(item.reference),
            days=None if item.days is None else tuple(item.days[k] for k in keep),
            aux=None if item.aux is None else item.aux[keep],
        )
        # Pixels that none of these dates observed are not scored in the paper's task.
        if item.reference is None:
            fewer = replace(fewer, scored=item.scored & fewer.valid.any(0))
        if fewer.scored.sum() >= LEAST_SCORED:
            yield fewer


def _rng(seed: int, name: str) -> np.random.Generator:
    return keyed_generator(seed, zlib.crc32(name.encode()))


def _capped(items: Iterable[T], limit: int | None, seed: int, name: str) -> Iterator[T]:
    """Yield at most `limit` of the items, chosen by the seed, in their order."""
    if limit is None:
        yield from items
        return
    every = list(items)
    for k in sorted(_rng(seed, name).permutation(len(every))[:limit]):
        yield every[k]


# ---------------------------------------------------------------- clean this date


def _own_clouds(place: Frames) -> Iterator[Item]:
    for reference in place.truths:
        clear = place.clear(reference)
        for donor in place.dates:
            pasted = place.cloud(donor) & clear
            if donor == reference or pasted.sum() < CLOUD_SHARE * clear.sum():
                continue
            others = [date for date in place.dates if date not in (reference, donor)]
            used = sorted([reference, *others] if len(others) >= 2 else [reference, donor, *others])
            name = f"{place.name}/date{reference}/clouds{donor}"
            yield from _pasted(place, name, reference, place.images[donor], pasted, used)


def _foreign_clouds(
    place: Frames, sources: Sequence[Frames], others: int, per_reference: int, seed: int
) -> Iterator[Item]:
    if place.truths and not sources:
        raise DataError(
            f"{place.name} has no labelled clouds, and no other place has any to paste. "
            "Give labelled places as well, such as CloudSEN12 (donors=, --clouds)."
        )
    size = place.valid.shape[1:]
    spots = [(source, *spot) for source in sources for spot in cloudy_windows(source, size)]
    if place.truths and not spots:
        raise DataError(
            f"{place.name} is {size[0]}x{size[1]} pixels and no labelled place has a partly cloudy window like it. "
            "Give larger labelled places (donors=, --clouds)."
        )
    for reference in place.truths:
        for number in range(per_reference):
            rng = _rng(seed, f"{place.name}/{reference}/{number}")
            rest = [date for date in place.dates if date != reference]
            used = sorted([reference, *(int(k) for k in rng.permutation(rest)[:others])])
            source, date, rows, columns = spots[int(rng.integers(len(spots)))]
            symmetry = int(rng.integers(8 if size[0] == size[1] else 4))
            image, labels, seen = (
                turn(torch.from_numpy(np.ascontiguousarray(part[date][..., rows, columns])), symmetry)[None]
                for part in (source.images, source.labels, source.valid)
            )
            ground = torch.from_numpy(place.images[reference])[None]
            moved = carried_over(image, torch.where(seen, labels, UNKNOWN), ground, torch.ones(1, dtype=torch.bool))
            cloud = ((labels >= THICK) & (labels <= SHADOW) & seen)[0].numpy()
            pasted = cloud & place.clear(reference)
            name = f"{place.name}/date{reference}/{number}-{source.name}.{date}"
            yield from _pasted(place, name, reference, moved[0].clamp(0, 1).numpy(), pasted, used)


def _pasted(
    place: Frames, name: str, reference: int, donor: np.ndarray, pasted: np.ndarray, used: Sequence[int]
) -> Iterator[Item]:
    """Yield the item (none if too little is scored): `donor` (C, H, W) replaces the reference where `pasted`."""
    truth = place.images[reference]
    images = place.images.copy()
    images[reference] = np.where(pasted, donor, truth)
    masks = place.clouds
    masks[reference] |= pasted
    for date in used:
        if not place.labelled(date):
            # With the true target among the dates, the rules give their most accurate mask.
            pair = np.stack([truth, images[date]])
            masks[date] = estimate_cloud_mask(pair, place.bands, valid=place.valid[[reference, date]])[1]
    scored, number = pasted & place.clear(reference), list(used).index(reference)
    item = place.item(name, used, clear=truth, scored=scored, reference=number, masks=masks, images=images)
    yield from _cropped(item, place.valid[reference])


# ---------------------------------------------------------------- the paper's task


def _other_dates(place: Frames, inputs: int) -> Iterator[Item]:
    clear, masks = place.images, place.clouds
    for target in place.truths:
        rest = [date for date in place.dates if date != target]
        for used in combinations(rest, min(inputs, len(rest))):
            name = f"{place.name}/date{target}/from{''.join(map(str, used))}"
            scored = place.clear(target) & place.valid[list(used)].any(0)
            item = place.item(name, used, clear=clear[target], scored=scored, reference=None, masks=masks)
            yield from _cropped(item, place.valid[target])


def _given_items(
    records: Sequence[SeriesRecord], bands: Sequence[str] | None, limit: int | None, seed: int
) -> Iterator[Item]:
    """Yield the items of records that name their target: all other dates are inputs, one may be the reference.

    Masks of dates without labels are estimated from the inputs alone.
    """
    groups: dict[str, list[SeriesRecord]] = {}
    for record in records:
        groups.setdefault(record.group or record.name, []).append(record)
    for group, every in groups.items():
        for record in _capped(every, limit, seed, group):
            for place in read_frames([record], bands, cut=False):
                yield _given_item(place, int(str(record.extra["target"])), record.extra.get("reference"))


def _given_item(place: Frames, target: int, reference: object) -> Item:
    used = [date for date in place.dates if date != target]
    images, valid, masks = place.images[used], place.valid[used], place.clouds
    unlabelled = [date for date in used if not place.labelled(date)]
    if unlabelled and all(band in place.bands for band in ("B02", "B03", "B04")):
        found = estimate_cloud_mask(images, place.bands, valid=valid)
        masks[unlabelled] = found[[used.index(date) for date in unlabelled]]
    scored, date = place.clear(target) & valid.any(0), reference if isinstance(reference, int) else None
    if date is not None:
        scored &= masks[used[date]]
    return place.item(place.name, used, clear=place.images[target], scored=scored, reference=date, masks=masks)


# ---------------------------------------------------------------- simulated clouds


def _simulate(
    place: Frames, name: str, image: np.ndarray, clear: np.ndarray, dates: int, coverage: float, seed: int
) -> Item:
    generator = torch.Generator().manual_seed(seed)
    ground = torch.from_numpy(image)[None]
    series = pseudo_dates(ground, dates, torch.zeros(1, dtype=torch.long), generator=generator)[0]
    sky = cloud_fields(dates, *clear.shape, coverage=torch.full((dates,), float(coverage)), generator=generator)
    cloudy, cloud, shadow, _ = apply_clouds(series, sky, bands=place.bands, generator=generator)
    hidden = (cloud | shadow).numpy() & clear
    return Item(
        name=name,
        group=place.group,
        task="simulated",
        cloudy=cloudy.numpy() * clear,
        clear=series[0].numpy(),
        scored=hidden[0],
        cloud_mask=hidden,
        label_known=True,
        valid=np.broadcast_to(clear, hidden.shape).copy(),
        reference=0,
        days=None,
        bands=place.bands,
    )


def _cropped(item: Item, observed: np.ndarray) -> Iterator[Item]:
    """Yield the item cut to the bounding box of `observed` (H, W); nothing if too few pixels are scored."""
    if item.scored.sum() < LEAST_SCORED:
        return
    rows, columns = np.flatnonzero(observed.any(1)), np.flatnonzero(observed.any(0))
    box = (..., slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))

    names = ("cloudy", "clear", "scored", "cloud_mask", "valid", *(() if item.aux is None else ("aux",)))
    cut: dict[str, Any] = {name: np.ascontiguousarray(getattr(item, name)[box]) for name in names}
    yield replace(item, **cut)
