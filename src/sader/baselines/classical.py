"""Classical cloud removal without any training: composites, mosaics, and regressions between dates.

LESSONS (tables, 10): what a learned method has to beat, and the controls that say what a score is worth. All work on
numpy reflectance, (T, C, H, W) in [0, 1] -> (C, H, W); none reads files or runs a network.

Common signature, `Classical`: `method(cloudy, *, cloud_mask=None, reference=None, days=None, valid=None) -> clear`.

- cloud_mask: bool (T, H, W), True = cloud or shadow; None is estimated by `estimate_cloud_mask`. Pass true masks where
  they are known: poor masks make every method look worse than it is.
- reference: the date to clean; its clear pixels come out as they are. None: the result takes the state of the clearest
  date where a method follows a date at all.
- days: (T,) acquisition days; valid: bool (T, H, W), False where a date has no data.
- A pixel that no usable date shows is filled smoothly from its neighbours; a scene without any clear pixel, from the
  median of all dates. The result is always finite. The order of the dates matters only to break exact ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from sader.baselines.filling import fill_smoothly, local_share
from sader.baselines.rules import estimate_cloud_mask
from sader.errors import ConfigError, ShapeError, ValueRangeError, did_you_mean

FEWEST_PIXELS = 64
"""Fewer pixels clear in both dates than this: no regression is trusted, only the difference of the means."""

UNMATCHED_ERROR = 0.1**2
"""Squared error assumed for a date that shares no clear pixel with the reference: used only where no other date is."""


class Classical(Protocol):
    """Any function of `CLASSICAL`: (T, C, H, W) reflectance -> (C, H, W)."""

    __name__: str

    def __call__(
        self,
        cloudy: np.ndarray,
        *,
        cloud_mask: np.ndarray | None = None,
        reference: int | None = None,
        days: Sequence[float] | np.ndarray | None = None,
        valid: np.ndarray | None = None,
    ) -> np.ndarray: ...


@dataclass(frozen=True)
class Scene:
    """Checked input of one method: `images` (T, C, H, W) finite float32, `valid` bool (T, H, W) observed pixels."""

    images: np.ndarray
    valid: np.ndarray
    cloud_mask: np.ndarray | None
    reference: int | None
    days: np.ndarray | None

    @cached_property
    def seen(self) -> np.ndarray:
        """Bool (T, H, W): observed and neither cloud nor shadow."""
        clouds = self.cloud_mask
        if clouds is None:
            clouds = estimate_cloud_mask(self.images, valid=self.valid)
        return self.valid & ~clouds

    @property
    def order(self) -> list[int]:
        """Dates from the clearest to the cloudiest."""
        return sorted(range(len(self.images)), key=lambda date: -int(self.seen[date].sum()))

    @property
    def others(self) -> list[int]:
        """Dates that can fill the reference date, clearest first; all dates where there is no reference."""
        return [date for date in self.order if date != self.reference]

    @property
    def anchor(self) -> int:
        """The date whose state the result takes: the reference, else the clearest."""
        return self.order[0] if self.reference is None else self.reference


Composed = tuple[np.ndarray, np.ndarray]
"""An image (C, H, W) and where it is known (H, W); the rest is filled."""


def _classical(compose: Callable[[Scene], Composed]) -> Classical:
    """Return the public function of a method: input checked, clear pixels of the reference kept, holes filled."""

    def clean(
        cloudy: np.ndarray,
        *,
        cloud_mask: np.ndarray | None = None,
        reference: int | None = None,
        days: Sequence[float] | np.ndarray | None = None,
        valid: np.ndarray | None = None,
    ) -> np.ndarray:
        scene = check_scene(cloudy, cloud_mask=cloud_mask, reference=reference, days=days, valid=valid)
        image, known = compose(scene)
        if scene.reference is not None:
            kept = scene.seen[scene.reference]
            image, known = np.where(kept, scene.images[scene.reference], image), known | kept
        if not known.any():
            image, known = _over_dates(np.median, scene.images, scene.valid), scene.valid.any(0)
        return np.clip(fill_smoothly(image, known), 0, 1)

    clean.__name__ = clean.__qualname__ = compose.__name__
    clean.__doc__ = compose.__doc__
    return clean


@_classical
def least_cloudy(scene: Scene) -> Composed:
    """Return the clearest date as it is, clouds included; with a reference, the clearest other one behind its clouds."""
    best = (scene.others or scene.order)[0]
    return scene.images[best], scene.valid[best]


@_classical
def mean(scene: Scene) -> Composed:
    """Return the mean of all observed values, clouds included."""
    return _over_dates(np.mean, scene.images, scene.valid), scene.valid.any(0)


@_classical
def median(scene: Scene) -> Composed:
    """Return the median of all observed values, clouds included."""
    return _over_dates(np.median, scene.images, scene.valid), scene.valid.any(0)


@_classical
def masked_median(scene: Scene) -> Composed:
    """Return the median of the clear values of each pixel."""
    return _over_dates(np.median, scene.images, scene.seen), scene.seen.any(0)


@_classical
def mosaic(scene: Scene) -> Composed:
    """Return the clear pixels of the clearest date, holes filled from the next clearest, and so on, as they are."""
    return _first_seen(scene.images, scene.seen, scene.order)


@_classical
def best_available_pixel(scene: Scene) -> Composed:
    """Return each pixel from the clear date that scores best there.

    Score: the share of clear pixels in the 31x31 window around (far from cloud edges, whose haze masks miss), plus half
    the date's clear share, less the distance in time to the date wanted (one per 60 days) where days are known.
    """
    score = local_share(scene.seen, 15) + 0.5 * scene.seen.mean((1, 2))[:, None, None]
    if scene.days is not None:
        score = score - (np.abs(scene.days - scene.days[scene.anchor]) / 60)[:, None, None]
    best = np.where(scene.seen, score, -np.inf).argmax(0)
    return np.take_along_axis(scene.images, best[None, None], axis=0)[0], scene.seen.any(0)


@_classical
def linear_in_time(scene: Scene) -> Composed:
    """Return each pixel interpolated linearly between its nearest clear dates before and after the day wanted.

    The day wanted is that of the reference, else of the clearest date; with clear dates on one side only, the nearest
    is taken as it is. Needs `days`.
    """
    if scene.days is None:
        raise ConfigError("linear_in_time got days=None; expected the acquisition day of each date. Pass days=[0, 12, ...].")
    offset = scene.days - scene.days[scene.anchor]
    gaps, values = [], []
    for side in (offset <= 0, offset >= 0):
        distance = np.where(scene.seen & side[:, None, None], np.abs(offset)[:, None, None], np.inf)
        nearest = distance.argmin(0)[None]
        gaps.append(np.take_along_axis(distance, nearest, axis=0)[0])
        values.append(np.take_along_axis(scene.images, nearest[:, None], axis=0)[0])
    before, after = gaps
    with np.errstate(invalid="ignore"):
        share = np.where(np.isinf(before), 1.0, np.where(np.isinf(after), 0.0, before / np.maximum(before + after, 1e-9)))
    return values[0] * (1 - share) + values[1] * share, scene.seen.any(0)


@_classical
def matched_mosaic(scene: Scene) -> Composed:
    """Return the mosaic of the dates, each first matched to the date wanted by a gain and an offset per band.

    The gains are least squares on the pixels that both dates show clear.
    """
    matched = scene.images.copy()
    for date in scene.others:
        both = scene.seen[date] & scene.seen[scene.anchor]
        for band in range(matched.shape[1]):
            matched[date, band] = _regress(scene.images[date, [band]], scene.images[scene.anchor, [band]], both)[0]
    return _first_seen(matched, scene.seen, scene.others or scene.order)


@_classical
def ridge_blend(scene: Scene) -> Composed:
    """Return the dates blended by how well each explains the date wanted: the strongest classical method (LESSONS).

    All bands of a date are regressed with a ridge penalty onto each band of the date wanted, over the pixels that both
    show clear; where several dates are clear, their predictions are weighted by a power of the inverse squared error.
    """
    return blend_regressions(scene)


@_classical
def flat_colour(scene: Scene) -> Composed:
    """Return one colour: the mean of the clear pixels of the date wanted. A control: a method below it shows nothing."""
    seen = scene.seen[scene.anchor]
    if not seen.any():
        return scene.images[scene.anchor], seen
    colour = scene.images[scene.anchor][:, seen].mean(1)
    return np.broadcast_to(colour[:, None, None], scene.images.shape[1:]), np.ones_like(seen)


def flat_truth(target: np.ndarray, *, pixels: np.ndarray | None = None) -> np.ndarray:
    """Return the target's own mean colour, (C, H, W): what a score owes to the mean colour alone (LESSONS 1).

    target: (C, H, W); pixels: bool (H, W), over which the mean is taken; all if None. This control looks at the truth.
    """
    pixels = np.ones(target.shape[1:], bool) if pixels is None else pixels
    if not pixels.any():
        raise ValueRangeError("flat_truth got no scored pixel; expected at least one True in pixels")
    return np.broadcast_to(target[:, pixels].mean(1)[:, None, None], target.shape).astype(np.float32)


CLASSICAL: dict[str, Classical] = {
    method.__name__: method
    for method in (
        least_cloudy,
        mean,
        median,
        masked_median,
        mosaic,
        best_available_pixel,
        linear_in_time,
        matched_mosaic,
        ridge_blend,
        flat_colour,
    )
}
"""Every classical method by name."""


def get_classical(name: str) -> Classical:
    """Return the method called `name`."""
    if name not in CLASSICAL:
        raise ConfigError(f"unknown classical method {name!r}{did_you_mean(name, CLASSICAL)}")
    return CLASSICAL[name]


def blend_regressions(scene: Scene, *, ridge: float = 1e-3, power: float = 2.0, local: bool = False) -> Composed:
    target = scene.images[scene.anchor]
    wanted = scene.seen[scene.anchor]
    total = np.zeros_like(target)
    weights = np.zeros_like(target)
    for date in scene.others:
        both = scene.seen[date] & wanted
        predicted, error = _regress(scene.images[date], target, both, ridge=ridge)
        weight = scene.seen[date] * (error[:, None, None] + 1e-6) ** -power
        total += weight * predicted
        weights += weight
    known = weights[0] > 0
    out = total / np.where(known, weights, 1)
    if local:
        both = known & wanted
        out = out + fill_smoothly(target - out, both)
    return out, known


def _regress(source: np.ndarray, target: np.ndarray, both: np.ndarray, *, ridge: float = 1e-3) -> Composed:
    """Return the prediction (D, H, W) of `target` from `source` (C, H, W), and its squared error (D,) where both are clear."""
    if int(both.sum()) == 0:
        image = source if len(source) == len(target) else np.repeat(source.mean(0, keepdims=True), len(target), 0)
        return image, np.full(len(target), UNMATCHED_ERROR)
    x, y = source[:, both].astype(np.float64), target[:, both].astype(np.float64)
    centre, level = x.mean(1), y.mean(1)
    x, y = x - centre[:, None], y - level[:, None]
    count = x.shape[1]
    gram = x @ x.T / count
    penalty = ridge * max(np.trace(gram) / len(gram), 1e-10) * np.eye(len(gram))
    slope = np.linalg.solve(gram + penalty, x @ y.T / count).T
    error = np.square(y - slope @ x).mean(1)
    image = np.tensordot(slope, source - centre[:, None, None], axes=1) + level[:, None, None]
    return image.astype(np.float32), error


def _first_seen(images: np.ndarray, seen: np.ndarray, order: Sequence[int]) -> Composed:
    """Return each pixel from the first date in `order` that shows it."""
    image, known = np.zeros_like(images[0]), np.zeros_like(seen[0])
    for date in order:
        image = np.where(~known & seen[date], images[date], image)
        known = known | seen[date]
    return image, known


def _over_dates(reduce: Callable[..., Any], images: np.ndarray, use: np.ndarray) -> np.ndarray:
    """Return `reduce` over the used dates of each pixel (C, H, W); zero where there is none."""
    hidden = np.broadcast_to(~use[:, None], images.shape)
    return np.ma.filled(getattr(np.ma, reduce.__name__)(np.ma.array(images, mask=hidden), axis=0), 0).astype(np.float32)


def check_scene(
    cloudy: np.ndarray,
    *,
    cloud_mask: np.ndarray | None,
    reference: int | None,
    days: Sequence[float] | np.ndarray | None,
    valid: np.ndarray | None,
) -> Scene:
    images = np.asarray(cloudy, np.float32)
    T = len(images)
    valid = np.ones(images[:, 0].shape, bool) if valid is None else valid
    images = np.where(valid[:, None], images, 0)
    return Scene(images, valid, cloud_mask, reference, None if days is None else np.asarray(days, float))
