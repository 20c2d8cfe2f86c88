"""Classical cloud removal without any training: composites, mosaics, and regressions between dates.

Learned methods are compared with these methods and with two controls of a flat colour. All take NumPy reflectance,
(T, C, H, W) in [0, 1] -> (C, H, W); none reads files or runs a network.

Common signature, `Classical`: `method(cloudy, *, cloud_mask=None, reference=None, days=None, valid=None) -> clear`.

- cloud_mask: bool (T, H, W), True = cloud or shadow; None is estimated by `estimate_cloud_mask`. Pass true masks if
  they are known: poor masks lower the score of every method.
- reference: the date to clean; its clear pixels are kept. None: methods that follow a date follow the clearest.
- days: (T,) acquisition days; valid: bool (T, H, W), False where a date has no data.
- A pixel without a usable date is filled smoothly from its neighbours; a scene without any clear pixel, from the
  median of all dates. The result is always finite. The order of the dates matters only to break exact ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from sader.data.cloud_rules import estimate_cloud_mask, fill_smoothly, local_share
from sader.errors import ConfigError, ShapeError, ValueRangeError, check_known

Mask = np.ndarray | None
Days = Sequence[float] | np.ndarray | None


class Classical(Protocol):
    """Any function of `CLASSICAL`: (T, C, H, W) reflectance -> (C, H, W)."""

    __name__: str

    def __call__(
        self,
        cloudy: np.ndarray,
        *,
        cloud_mask: Mask = None,
        reference: int | None = None,
        days: Days = None,
        valid: Mask = None,
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
    def anchor(self) -> int:
        """The date that the result follows: the reference, else the clearest."""
        return self.order[0] if self.reference is None else self.reference

    @property
    def fillers(self) -> list[int]:
        """The other dates, which fill the holes of the anchor, clearest first."""
        return [date for date in self.order if date != self.anchor]


Composed = tuple[np.ndarray, np.ndarray]
"""An image (C, H, W) and where it is known (H, W); the rest is filled."""


CLASSICAL: dict[str, Classical] = {}
"""Every classical method by name."""


def classical_method(compose: Callable[[Scene], Composed]) -> Classical:
    """Return the public function of a method, also in `CLASSICAL`: input checked, the reference kept, holes filled."""

    def clean(
        cloudy: np.ndarray,
        *,
        cloud_mask: Mask = None,
        reference: int | None = None,
        days: Days = None,
        valid: Mask = None,
    ) -> np.ndarray:
        scene = check_scene(cloudy, cloud_mask, reference, days, valid)
        image, known = compose(scene)
        kept = np.zeros_like(known) if scene.reference is None else scene.seen[scene.reference]
        image = np.where(kept, scene.images[scene.anchor], image) if kept.any() else image
        known = known | kept
        if not known.any():
            image, known = over_dates(np.ma.median, scene.images, scene.valid), some_date(scene.valid)
        filled = fill_smoothly(image, known).clip(0, 1)
        # Clipped before the clear pixels are copied, which are kept bit for bit.
        return np.where(kept, scene.images[scene.anchor], filled) if kept.any() else filled

    clean.__name__ = clean.__qualname__ = compose.__name__
    clean.__doc__ = compose.__doc__
    return CLASSICAL.setdefault(compose.__name__, clean)


def some_date(mask: np.ndarray) -> np.ndarray:
    """Return the pixels where at least one date is True, (T, H, W) -> (H, W)."""
    return np.logical_or.reduce(mask, axis=0)


def over_dates(reduce: Callable[..., np.ma.MaskedArray], images: np.ndarray, use: np.ndarray) -> np.ndarray:
    """Return `reduce` (np.ma.mean, np.ma.median) over the used dates of each pixel, (C, H, W); zero without any."""
    hidden = np.broadcast_to(~use[:, None], images.shape)
    return np.ma.filled(reduce(np.ma.array(images, mask=hidden), axis=0), 0).astype(np.float32)


def check_scene(cloudy: np.ndarray, cloud_mask: Mask, reference: int | None, days: Days, valid: Mask) -> Scene:
    """Return the checked input as a `Scene`."""
    images = np.asarray(cloudy)
    if images.ndim != 4 or 0 in images.shape:
        raise ShapeError(
            f"cloudy is {images.shape}; expected (T, C, H, W), none of them zero. For one date use x[None]."
        )
    dates, size = len(images), (len(images), *images.shape[2:])
    for name, mask in (("cloud_mask", cloud_mask), ("valid", valid)):
        if mask is not None and (np.asarray(mask).dtype != np.bool_ or np.shape(mask) != size):
            found = f"{np.asarray(mask).dtype} {np.shape(mask)}"
            raise ShapeError(f"{name} is {found}; expected bool (T, H, W) = {size}. Use {name}=mask.astype(bool).")
    if reference is not None and not 0 <= reference < dates:
        raise ConfigError(f"reference is {reference} but there are {dates} dates; expected 0 to {dates - 1}, or None.")
    if days is not None and np.shape(days) != (dates,):
        raise ShapeError(f"days has shape {np.shape(days)}; expected one number per date, ({dates},).")
    observed = np.ones(size, bool) if valid is None else np.asarray(valid)
    if not observed.any():
        raise ValueRangeError("no pixel is valid in any date; expected some data. Check valid= or the nodata value.")
    if not np.isfinite(images).all(1)[observed].all():
        raise ValueRangeError(
            "cloudy holds NaN or infinity; expected reflectance. Mark such pixels in valid= as False."
        )
    return Scene(
        images=np.where(observed[:, None], images, 0).astype(np.float32),
        valid=observed,
        cloud_mask=None if cloud_mask is None else np.asarray(cloud_mask),
        reference=reference,
        days=None if days is None else np.asarray(days, np.float64),
    )


RIDGE = 1e-4
"""Ridge penalty, relative to the mean variance of the bands."""

BLEND_POWER = 2.0
"""Power of the inverse squared error in the blend of dates: higher values favour the best date."""

FEW_PIXELS = 8
"""Number of common pixels at which a regression has weight 1/2; with fewer it shrinks towards the mean colour."""

UNMATCHED_ERROR = 0.1**2
"""Squared error assumed for a date without common clear pixels: it is used only where no other date is clear."""


@classical_method
def least_cloudy(scene: Scene) -> Composed:
    """Return the clearest date unchanged, clouds included; with a reference, the clearest other one."""
    best = next((date for date in scene.order if date != scene.reference), scene.anchor)
    return scene.images[best], scene.valid[best]


@classical_method
def mean(scene: Scene) -> Composed:
    """Return the mean of all observed values, clouds included."""
    return over_dates(np.ma.mean, scene.images, scene.valid), some_date(scene.valid)


@classical_method
def median(scene: Scene) -> Composed:
    """Return the median of all observed values, clouds included."""
    return over_dates(np.ma.median, scene.images, scene.valid), some_date(scene.valid)


@classical_method
def masked_median(scene: Scene) -> Composed:
    """Return the median of the clear values of each pixel."""
    return over_dates(np.ma.median, scene.images, scene.seen), some_date(scene.seen)


@classical_method
def mosaic(scene: Scene) -> Composed:
    """Return the clear pixels of the clearest date, holes filled from the next clearest, and so on, unchanged."""
    return _first_seen(scene.images, scene.seen, scene.order)


@classical_method
def best_available_pixel(scene: Scene) -> Composed:
    """Return each pixel from the clear date that scores best there.

    Score: the share of clear pixels in the 31x31 window around (far from cloud edges, where masks miss haze), plus half
    the date's clear share, less the distance in time to the date wanted (one per 60 days) where days are known.
    """
    score = local_share(scene.seen, 15) + 0.5 * scene.seen.mean((1, 2))[:, None, None]
    if scene.days is not None:
        score = score - (np.abs(scene.days - scene.days[scene.anchor]) / 60)[:, None, None]
    best = np.where(scene.seen, score, -np.inf).argmax(0)
    return np.take_along_axis(scene.images, best[None, None], axis=0)[0], some_date(scene.seen)


@classical_method
def linear_in_time(scene: Scene) -> Composed:
    """Return each pixel interpolated linearly between its nearest clear dates before and after the day wanted.

    The day wanted is that of the reference, else of the clearest date; with clear dates on one side only, the nearest
    is taken as it is. Needs `days`.
    """
    if scene.days is None:
        raise ConfigError(
            "linear_in_time got days=None; expected the acquisition day of each date. Pass days=[0, 12, ...]."
        )
    offset = scene.days - scene.days[scene.anchor]
    gaps, values = [], []
    for side in (offset <= 0, offset >= 0):
        distance = np.where(scene.seen & side[:, None, None], np.abs(offset)[:, None, None], np.inf)
        nearest = distance.argmin(0)[None]
        gaps.append(np.take_along_axis(distance, nearest, axis=0)[0])
        values.append(np.take_along_axis(scene.images, nearest[:, None], axis=0)[0])
    before, after = gaps
    with np.errstate(invalid="ignore"):
        share = np.where(
            np.isinf(before), 1.0, np.where(np.isinf(after), 0.0, before / np.maximum(before + after, 1e-9))
        )
    return values[0] * (1 - share) + values[1] * share, some_date(scene.seen)


@classical_method
def matched_mosaic(scene: Scene) -> Composed:
    """Return the mosaic of the dates, each first matched to the wanted date by a gain and an offset per band.

    The gains are a least-squares fit on the pixels that are clear on both dates.
    """
    matched = scene.images.copy()
    for date in scene.fillers:
        both = scene.seen[date] & scene.seen[scene.anchor]
        for band in range(matched.shape[1]):
            matched[date, band] = _regress(scene.images[date, [band]], scene.images[scene.anchor, [band]], both)[0]
    return _first_seen(matched, scene.seen, [scene.anchor, *scene.fillers])


@classical_method
def ridge_blend(scene: Scene) -> Composed:
    """Return the dates blended by how well each predicts the wanted date.

    All bands of a date are regressed with a ridge penalty onto each band of the date wanted, over the pixels that are
    clear on both; where several dates are clear, their predictions are weighted by a power of the inverse squared
    error.
    """
    image, known = _blend_regressions(scene)
    return _keep_anchor(scene, image, known)


@classical_method
def local_ridge_blend(scene: Scene) -> Composed:
    """Return `ridge_blend` minus its error at clear pixels, interpolated smoothly into the clouds.

    The strongest classical method: about 1 dB better than `ridge_blend` on the CloudSEN12 places.
    """
    image, known = _blend_regressions(scene)
    both = known & scene.seen[scene.anchor]
    return _keep_anchor(scene, image + fill_smoothly(scene.images[scene.anchor] - image, both), known)


@classical_method
def flat_colour(scene: Scene) -> Composed:
    """Return one colour, the mean of the clear pixels of the date wanted: a control for every method."""
    seen = scene.seen[scene.anchor]
    if not seen.any():
        return scene.images[scene.anchor], seen
    colour = scene.images[scene.anchor][:, seen].mean(1)
    return np.broadcast_to(colour[:, None, None], scene.images.shape[1:]), np.ones_like(seen)


def flat_truth(target: np.ndarray, *, pixels: np.ndarray | None = None) -> np.ndarray:
    """Return the target's own mean colour, (C, H, W): the score of the mean colour alone.

    target: (C, H, W); pixels: bool (H, W), over which the mean is taken; all if None. This control uses the truth.
    """
    pixels = np.ones(target.shape[1:], bool) if pixels is None else pixels
    if not pixels.any():
        raise ValueRangeError("flat_truth got no scored pixel; expected at least one True in pixels")
    return np.broadcast_to(target[:, pixels].mean(1)[:, None, None], target.shape).astype(np.float32)


def get_classical(name: str) -> Classical:
    """Return the method called `name`."""
    check_known("classical method", name, CLASSICAL)
    return CLASSICAL[name]


def _blend_regressions(scene: Scene) -> Composed:
    """Return the prediction of the date wanted from the other dates, blended by fit, and where some date is clear."""
    target = scene.images[scene.anchor]
    total, weights = np.zeros(target.shape, np.float64), np.zeros(target.shape, np.float64)
    for date in scene.fillers:
        both = scene.seen[date] & scene.seen[scene.anchor]
        predicted, error = _regress(scene.images[date], target, both)
        weight = scene.seen[date] * (error[:, None, None] + 1e-6) ** -BLEND_POWER
        total += weight * predicted
        weights += weight
    known = weights[0] > 0
    return (total / np.where(known, weights, 1)).astype(np.float32), known


def _regress(source: np.ndarray, target: np.ndarray, both: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ridge prediction of `target` from `source` (C, H, W), and its squared error per band (C,).

    The fit is over the pixels `both` (H, W); without any, the source is returned as it is, with a large error.
    """
    count = int(both.sum())
    if count == 0:
        return source, np.full(len(target), UNMATCHED_ERROR)
    x, y = source[:, both].astype(np.float64), target[:, both].astype(np.float64)
    centre, level = x.mean(1), y.mean(1)
    x, y = x - centre[:, None], y - level[:, None]
    gram = x @ x.T / count
    scale = max(float(np.trace(gram)) / len(gram), 1e-12)
    # A fit to few pixels is unreliable: the second penalty falls as 1 / count^2.
    penalty = (RIDGE + (FEW_PIXELS / count) ** 2) * scale
    slope = np.linalg.solve(gram + penalty * np.eye(len(gram)), x @ y.T / count).T
    # Degrees of freedom: without the correction a few pixels would appear as a perfect fit.
    error = np.square(y - slope @ x).mean(1) * (count + len(gram) + 1) / max(count - len(gram) - 1, 1)
    image = np.tensordot(slope, source - centre[:, None, None], axes=1) + level[:, None, None]
    return image.astype(np.float32), error


def _keep_anchor(scene: Scene, image: np.ndarray, known: np.ndarray) -> Composed:
    """Return `image` with the clear pixels of the wanted date."""
    seen = scene.seen[scene.anchor]
    return np.where(seen, scene.images[scene.anchor], image), known | seen


def _first_seen(images: np.ndarray, seen: np.ndarray, order: list[int]) -> Composed:
    """Return each pixel from the first date in `order`, which lists every date, that has it."""
    first = seen[order].argmax(axis=0)
    return np.take_along_axis(images[order], first[None, None], axis=0)[0], some_date(seen)
