"""Random choices of a training batch, drawn on the CPU from (seed, step) alone.

Place, window, dates, target and clouds of each series are small NumPy arrays, drawn before any pixel is read, so that
the host never waits for the device. `bank.py` composes the batch from a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sader.errors import ConfigError, DataError

CELL = 8
"""Side in pixels of the cells in which clear and cloudy pixels are counted."""
REAL, PAPER, SINGLE = 0, 1, 2
"""Tasks: clean a real date; predict a date that is not given; clean a pseudo-date derived from one clear image."""


Array = np.ndarray
Rng = np.random.Generator
Judge = Callable[[Array, Array], tuple[Array, Array]]


PUBLIC_SOURCES = (
    "sen2_mtc_new", "sen2_mtc_old", "sen12mscrts", "sen12mscrts_africa", "sen12mscrts_america", "sen12mscrts_ea",
    "sen12mscrts_ea_published", "sen12mscrts_asia_west", "sen12mscrts_europa", "rice1", "rice2", "cuhk_cr1", "cuhk_cr2",
    "allclear",
)  # fmt: skip
"""Public datasets that `sader data pack --dataset` writes; each has the weight of a user's own folder."""


_REAL = {"cloudsen12": 0.62, "rondonia": 0.26, "sen12mscr": 0.12, "folder": 0.6}
_SINGLE = {"eurosat": 0.3, "cloudsen12": 0.25, "rondonia": 0.15, "sen12mscr": 0.3, "folder": 0.3, "synthetic": 0.15}


@dataclass(frozen=True)
class MakerSettings:
    """Composition of batches. Weights need not sum to 1; names that the bank lacks are ignored."""

    tasks: tuple[float, float, float] = (0.6, 0.12, 0.28)
    """Weights of three tasks: clean a real date, the paper's task, clean a pseudo-date of one clear image."""
    real_sources: dict[str, float] = field(default_factory=lambda: _REAL | dict.fromkeys(PUBLIC_SOURCES, 0.6))
    """Weight of each source in the two tasks on real series; all sources that are not named share that of "folder"."""
    single_sources: dict[str, float] = field(default_factory=lambda: _SINGLE | dict.fromkeys(PUBLIC_SOURCES, 0.3))
    """Weight of each source in the task on pseudo-dates."""
    fewer_dates: float = 0.45
    """Probability of fewer dates than the batch has slots (uniform from 1); the rest is padding."""
    paste: float = 0.6
    """Probability that the reference date is covered by real clouds, not simulated ones."""
    paste_same_place: float = 0.35
    """Chance that pasted clouds come from another date of the same window, as in the evaluation."""
    paste_other_dates: float = 0.35
    """Chance that an added cloud on another date is real."""
    extra_clouds: float = 0.25
    """Chance that a real date of a place with real clouds gets simulated ones on top."""
    heavy: float = 0.12
    """Probability that all dates of a series are mostly covered, so that only the surroundings inform the network."""
    donors: tuple[str, ...] = ()
    """Sources whose labelled clouds may be pasted into other places; empty: all."""
    clear_date: float = 0.25
    """Chance that an added-cloud date stays without cloud."""
    overcast: float = 0.07
    """Probability that such a date is fully covered."""
    wanted_clear: float = 0.4
    """Minimum share of the target window that should be labelled clear."""
    rescale: float = 0.25
    """Probability that a batch has coarser pixels, by a factor from `coarser`."""
    coarser: tuple[float, float] = (1.05, 1.5)
    """Range of that factor; finer pixels are not offered, because interpolation would teach blur."""
    jitter: float = 0.06
    """Standard deviation of the log gain of a whole series; a third of it for each band."""
    mixed: float = 0.0
    """Probability that the bands of a series are mixed with each other, the same for all dates."""
    mixing: float = 0.4
    """Largest share of the other bands in such a mixture."""
    feather: tuple[float, float] = (0.0, 3.0)
    """Range in pixels of the soft edge of pasted clouds."""
    band_dropout: tuple[tuple[tuple[str, ...], float], ...] = (
        (("B08",), 0.12), (("B10",), 0.25), (("B01", "B09", "B10"), 0.15),
    )  # fmt: skip
    """Groups of bands that are removed together, with their probabilities; groups that the bank lacks are ignored."""
    radar_dropout: float = 0.3
    """Probability that a series is shown without its radar, so that a network also works where it is missing."""
    days: bool = False
    """Give `days` (NaN where unknown) instead of None; always for networks with days as input."""
    time_order: bool = False
    """Keep the order of the dates instead of shuffling them; always for networks with the index as input."""
    symmetries: bool = True
    """Flip and rotate the series."""
    fill: bool = False
    """Give every series of the paper's task all dates: pseudo-dates of a clear other date, or of the target where there
    is none, take the slots for which the place has no date."""

    @classmethod
    def paper(cls, *, symmetries: bool = True) -> MakerSettings:
        """Return the settings of the paper's task: the dataset's own series, with nothing added or removed."""
        return cls(
            tasks=(0.0, 1.0, 0.0),
            fewer_dates=0.0,
            extra_clouds=0.0,
            heavy=0.0,
            wanted_clear=0.0,
            rescale=0.0,
            jitter=0.0,
            band_dropout=(),
            symmetries=symmetries,
        )

    def __post_init__(self) -> None:
        if min(self.tasks) < 0 or sum(self.tasks) <= 0:
            raise ConfigError(f"tasks is {self.tasks}; expected three weights >= 0, not all 0.")


@dataclass(frozen=True)
class Catalogue:
    """Facts about each frame (one date of one record) for the planner; arrays over F frames or R records."""

    record: np.ndarray
    """(F,) record of the frame."""
    base: np.ndarray
    """(F,) first pixel of the frame in the bank."""
    height: np.ndarray
    """(F,)"""
    width: np.ndarray
    """(F,)"""
    clear_count: np.ndarray
    """(F,) number of pixels labelled clear."""
    cloud_count: np.ndarray
    """(F,) labelled cloud and shadow pixels."""
    table_at: np.ndarray
    """(F,) offset of the frame's summed-area tables in `clear_table` and `cloud_table`."""
    clear_table: np.ndarray
    """Flat summed-area tables of clear pixels over cells, (rows + 1) x (columns + 1) for each frame."""
    cloud_table: np.ndarray
    """The same for labelled clouds and shadows."""
    first: np.ndarray
    """(R,) first frame of the record."""
    dates: np.ndarray
    """(R,) frames of the record."""
    source: np.ndarray
    """(R,) name of the source."""
    donor: np.ndarray
    """(R,) bool: the record has every band of the bank, so that its clouds may be pasted anywhere."""

    def fraction(self, table: np.ndarray, frame: np.ndarray, y: np.ndarray, x: np.ndarray, side: int) -> np.ndarray:
        """Return the part of the window at y, x that `table` counts, to the nearest cells. All arrays broadcast."""
        rows, columns = -(-self.height[frame] // CELL), -(-self.width[frame] // CELL)
        top, left = np.clip((y + CELL // 2) // CELL, 0, rows), np.clip((x + CELL // 2) // CELL, 0, columns)
        bottom = np.clip((y + side + CELL // 2) // CELL, 0, rows)
        right = np.clip((x + side + CELL // 2) // CELL, 0, columns)
        at, pitch = self.table_at[frame], columns + 1
        total = (
            table[at + bottom * pitch + right] - table[at + top * pitch + right]
            - table[at + bottom * pitch + left] + table[at + top * pitch + left]
        )  # fmt: skip
        return total / float(side * side)


@dataclass(frozen=True)
class Plan:
    """The choices of one batch. Frames are indices into the catalogue; B series, T slots, P pastes, S simulations."""

    task: np.ndarray
    target: np.ndarray
    """(B,) frame of the target."""
    frames: np.ndarray
    """(B, T) frame of each slot; padding repeats the target's frame and is blanked."""
    present: np.ndarray
    """(B, T) bool."""
    derived: np.ndarray
    """(B, T) bool: the slot holds a pseudo-date of its frame."""
    reference: np.ndarray
    """(B,) slot, or -1."""
    y: np.ndarray
    x: np.ndarray
    symmetry: np.ndarray
    """(B,) window corner and symmetry 0 to 7."""
    side: int
    """Side of the window in pixels; larger than the crop if the batch is rescaled."""
    paste_slot: np.ndarray
    """(P,) b * T + t."""
    paste_frame: np.ndarray
    paste_y: np.ndarray
    paste_x: np.ndarray
    paste_symmetry: np.ndarray
    paste_side: np.ndarray
    """(P,) pixels of the donor's window: the batch's side for the same place, the crop elsewhere."""
    feather: float
    cloud_slot: np.ndarray
    """(S,) b * T + t."""
    coverage: np.ndarray
    """(S,)"""
    dropped: np.ndarray
    """(B, G) bool, which groups of bands are removed."""


class Planner:
    """Draws plans from a catalogue; its state never changes."""

    def __init__(self, catalogue: Catalogue, settings: MakerSettings) -> None:
        self.catalogue, self.settings = catalogue, settings
        c = catalogue
        several = c.dates[c.record] > 1
        self.chances = [
            self._chances(settings.real_sources, several),
            self._chances(settings.real_sources, several | settings.fill),
            self._chances(settings.single_sources, np.ones(len(c.record), bool)),
        ]
        usable = [chance is not None for chance in self.chances]
        weights = np.array(settings.tasks, float) * usable
        if weights.sum() == 0:
            raise DataError(
                f"none of {len(c.record)} dates in the shards is known to be clear and fit for tasks {settings.tasks}. "
                "Pack with labels or with --clear, or change maker.tasks."
            )
        self.task_chances = np.cumsum(weights / weights.sum())
        donor = c.donor & (np.isin(c.source, settings.donors) if settings.donors else True)
        enough = donor[c.record] & (c.cloud_count > 0.03 * c.height * c.width)
        cloudy = np.where(enough, c.cloud_count, 0).astype(float)
        self.donor_chances = np.cumsum(cloudy) / cloudy.sum() if cloudy.sum() else None
        has_clouds = np.zeros(len(c.first), bool)
        np.logical_or.at(has_clouds, c.record, c.cloud_count > 0)
        unlabelled = (c.clear_count + c.cloud_count) == 0
        self.has_clouds = has_clouds[c.record] | unlabelled

    def _chances(self, sources: dict[str, float], usable: Array) -> Array | None:
        """Return cumulative probabilities over frames: the source's weight, shared by truly clear pixels."""
        c = self.catalogue
        weight = np.zeros(len(c.record))
        named = np.where(np.isin(c.source, list(sources)), c.source, "folder")
        for name, share in sources.items():
            mine = usable & (named[c.record] == name) & (c.clear_count > 0.05 * c.height * c.width)
            if mine.any():
                weight[mine] = share * c.clear_count[mine] / c.clear_count[mine].sum()
        return np.cumsum(weight) / weight.sum() if weight.sum() else None

    def draw(self, rng: Rng, batch: int, dates: int, crop: int, groups: Array) -> Plan:
        """Return a plan for `batch` series; `groups` are the chances of the bank's groups of bands to be dropped."""
        c, s = self.catalogue, self.settings
        task = np.searchsorted(self.task_chances, rng.random(batch)).clip(0, 2)
        picks = rng.random(batch)
        target = np.zeros(batch, np.int64)
        for kind, chances in enumerate(self.chances):
            if chances is not None:
                mine = task == kind
                target[mine] = np.searchsorted(chances, picks[mine], side="right").clip(0, len(chances) - 1)
        factor = rng.uniform(*s.coarser) if rng.random() < s.rescale else 1.0
        side = round(crop * factor)
        y, x = self._window(rng, target, side, lambda clear, cloud: (clear >= s.wanted_clear, clear))

        # Slots: number of dates, slot of the reference, other dates of the record in the remaining slots.
        record = c.record[target]
        others = np.minimum(c.dates[record] - (task == PAPER), dates)
        filled = (task == PAPER) & s.fill
        most = np.where((task == SINGLE) | filled, dates, others)
        count = np.where(rng.random(batch) < s.fewer_dates, rng.integers(1, dates + 1, batch), dates)
        count = np.maximum(np.minimum(count, most), 1)
        reference = np.where(task == PAPER, -1, (rng.random(batch) * count).astype(np.int64))
        donor_date, has_twin = self._same_place(rng, target, y, x, side)
        own = has_twin & (task == REAL) & (rng.random(batch) < s.paste_same_place)
        # The donor of the pasted clouds is not an input: its clouds would be in the same pixels.
        count = np.where(own, np.minimum(count, np.maximum(c.dates[record] - 1, 1)), count)
        reference = np.minimum(reference, count - 1)
        frames = self._others(rng, target, np.where(own, donor_date, -1), dates, reference, task)
        slot = np.arange(dates)[None]
        present = slot < count[:, None]
        derived = present & filled[:, None] & (slot >= others[:, None])
        if s.fill:
            frames = np.where(derived, self._clear_other(rng, frames, target, others), frames)
        frames = np.where(present, frames, target[:, None])
        if s.time_order:
            order = np.where(present, frames, np.iinfo(frames.dtype).max).argsort(1, kind="stable")
            frames, derived = (np.take_along_axis(values, order, 1) for values in (frames, derived))
            reference = np.where(reference >= 0, (order == reference[:, None]).argmax(1), -1)

        # Clouds: cover the reference date, and dates without clouds of their own.
        is_reference = slot == reference[:, None]
        heavy = rng.random((batch, 1)) < s.heavy
        clean = (task[:, None] == SINGLE) | derived | ~self.has_clouds[frames]
        cover = self._coverage(rng, (batch, dates), heavy)
        fate = rng.random((batch, dates))
        bare = (fate < s.clear_date) & ~heavy
        cover = np.where((fate > 1 - s.overcast), 1.0, cover)
        wanted = np.where(clean, ~bare, rng.random((batch, dates)) < np.where(heavy, 0.8, s.extra_clouds))
        wanted = (wanted | is_reference) & present
        cover = np.where(is_reference, self._coverage(rng, (batch, dates), heavy), cover)
        paste = wanted & (rng.random((batch, dates)) < np.where(is_reference, s.paste, s.paste_other_dates)) & ~heavy
        paste |= wanted & is_reference & own[:, None]
        if self.donor_chances is None:
            paste &= is_reference & own[:, None]
        return Plan(
            task=task, target=target, frames=frames, present=present, derived=derived, reference=reference, y=y, x=x,
            symmetry=rng.integers(0, 8 if s.symmetries else 1, batch), side=side,
            **self._pastes(rng, paste, paste & is_reference & own[:, None], donor_date, y, x, side, crop),
            feather=float(rng.uniform(*s.feather)), cloud_slot=np.flatnonzero(wanted & ~paste),
            coverage=cover[wanted & ~paste].astype(np.float32), dropped=rng.random((batch, len(groups))) < groups[None],
        )  # fmt: skip

    def _window(self, rng: Rng, frame: Array, side: int, judge: Judge, tries: int = 12) -> tuple[Array, Array]:
        """Return corners y, x (N,) of windows in `frame` (N,): the first acceptable one of `tries`, or the best.

        `judge` gets the clear and the cloudy share of the windows; it returns which are acceptable, and their scores.
        """
        c = self.catalogue
        spot = rng.random((2, len(frame), tries))
        y = _corner(spot[0], c.height[frame][:, None], side)
        x = _corner(spot[1], c.width[frame][:, None], side)
        parts = [c.fraction(table, frame[:, None], y, x, side) for table in (c.clear_table, c.cloud_table)]
        good, score = judge(*parts)
        best = np.where(good.any(1), good.argmax(1), score.argmax(1))[:, None]
        return np.take_along_axis(y, best, 1)[:, 0], np.take_along_axis(x, best, 1)[:, 0]

    def _same_place(self, rng: Rng, target: Array, y: Array, x: Array, side: int) -> tuple[Array, Array]:
        """Return for each target a date of its record (frame) with clouds in the window, and whether there is one."""
        c = self.catalogue
        record = c.record[target]
        most = int(c.dates.max())
        candidates = c.first[record][:, None] + np.arange(most)[None]
        exists = (np.arange(most)[None] < c.dates[record][:, None]) & (candidates != target[:, None])
        candidates = np.where(exists, candidates, target[:, None])
        part = c.fraction(c.cloud_table, candidates, y[:, None], x[:, None], side)
        score = np.where(exists & (part > 0.08) & (part < 0.97), rng.random(part.shape), -1.0)
        best = score.argmax(1)
        return candidates[np.arange(len(target)), best], score.max(1) > 0

    def _others(self, rng: Rng, target: Array, donor: Array, dates: int, reference: Array, task: Array) -> Array:
        """Return (B, T) frames: the target at its slot, other dates of the record in random order elsewhere."""
        c = self.catalogue
        record = c.record[target]
        most = max(int(c.dates.max()), dates)
        candidates = c.first[record][:, None] + np.arange(most)[None]
        key = rng.random(candidates.shape)
        taken = (candidates == target[:, None]) | (candidates == donor[:, None])
        key += 2.0 * taken + 4.0 * (np.arange(most)[None] >= c.dates[record][:, None])
        order = np.take_along_axis(candidates, key.argsort(1), 1)[:, :dates]
        slot = np.arange(dates)[None]
        after = (slot > reference[:, None]) & (reference[:, None] >= 0)
        frames = np.take_along_axis(order, np.clip(slot - after, 0, order.shape[1] - 1), 1)
        frames = np.where(slot == reference[:, None], target[:, None], frames)
        return np.where((task == SINGLE)[:, None], target[:, None], frames)

    def _clear_other(self, rng: Rng, frames: Array, target: Array, others: Array) -> Array:
        """Return (B, T): an almost clear frame among the first `others` (B,) of `frames`, or the target."""
        c = self.catalogue
        real = np.arange(frames.shape[1])[None] < others[:, None]
        frames = np.where(real, frames, target[:, None])
        usable = real & (c.clear_count[frames] > 0.9 * c.height[frames] * c.width[frames])
        score = np.where(usable[:, None], rng.random((*frames.shape, frames.shape[1])), -1.0)
        chosen = np.take_along_axis(frames, score.argmax(2), 1)
        return np.where(usable.any(1)[:, None], chosen, target[:, None])

    def _coverage(self, rng: Rng, shape: tuple[int, int], heavy: Array) -> Array:
        usual = np.where(rng.random(shape) < 0.85, rng.uniform(0.05, 0.55, shape), rng.uniform(0.55, 1.0, shape))
        return np.where(heavy, rng.uniform(0.75, 1.0, shape), usual)

    def _pastes(
        self, rng: Rng, paste: Array, same_place: Array, donor_date: Array, y: Array, x: Array, side: int, crop: int
    ) -> dict[str, Array]:
        """Return where the clouds of each pasted slot come from; `paste` and `same_place` are bool (B, T)."""
        slot = np.flatnonzero(paste)
        row = slot // paste.shape[1]
        mine = same_place.ravel()[slot]
        if self.donor_chances is None:
            frame = np.zeros(len(slot), np.int64)
        else:
            frame = np.searchsorted(self.donor_chances, rng.random(len(slot)), side="right")
            frame = frame.clip(0, len(self.donor_chances) - 1)
        top, left = self._window(rng, frame, crop, _good_donor)
        return {
            "paste_slot": slot,
            "paste_frame": np.where(mine, donor_date[row], frame),
            "paste_y": np.where(mine, y[row], top),
            "paste_x": np.where(mine, x[row], left),
            # -1: the symmetry of the series it is pasted into, so that clouds stay in place.
            "paste_symmetry": np.where(mine, -1, rng.integers(0, 8, len(slot))),
            "paste_side": np.where(mine, side, crop),
        }


def _good_donor(clear: Array, cloud: Array) -> tuple[Array, Array]:
    """Judge donor windows: partly cloudy, and without nodata, so that clouds do not end in straight lines."""
    whole = clear + cloud
    return (cloud > 0.1) & (cloud < 0.75) & (whole > 0.97), whole + np.minimum(cloud, 0.4)


def _corner(spot: Array, size: Array, side: int) -> Array:
    """Return window corners; a frame smaller than the window is centred in it."""
    return np.where(size >= side, (spot * (size - side + 1)).astype(np.int64), -((side - size) // 2))
