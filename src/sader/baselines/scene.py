"""What every classical method is given: one scene with its masks, checked, and the frame around each method.

LESSONS 2: the clear pixels of the reference date are kept; what no date shows is filled, never left empty. numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from sader.data.cloud_rules import estimate_cloud_mask
from sader.data.filling import fill_smoothly
from sader.errors import ConfigError, ShapeError, ValueRangeError


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
    def anchor(self) -> int:
        """The date whose state the result takes: the reference, else the clearest."""
        return self.order[0] if self.reference is None else self.reference

    @property
    def fillers(self) -> list[int]:
        """The dates that can fill the holes of the anchor, clearest first."""
        return [date for date in self.order if date != self.anchor]


Composed = tuple[np.ndarray, np.ndarray]
"""An image (C, H, W) and where it is known (H, W); the rest is filled."""


def classical_method(compose: Callable[[Scene], Composed]) -> Classical:
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
        kept = np.zeros_like(known) if scene.reference is None else scene.seen[scene.reference]
        image = np.where(kept, scene.images[scene.anchor], image) if kept.any() else image
        known = known | kept
        if not known.any():
            image, known = over_dates(np.ma.median, scene.images, scene.valid), some_date(scene.valid)
        filled = fill_smoothly(image, known).clip(0, 1)
        # Clipped before, not after: a clear pixel of the reference is kept bit for bit.
        return np.where(kept, scene.images[scene.anchor], filled) if kept.any() else filled

    clean.__name__ = clean.__qualname__ = compose.__name__
    clean.__doc__ = compose.__doc__
    return clean


def some_date(mask: np.ndarray) -> np.ndarray:
    """Return where at least one date is True, (T, H, W) -> (H, W)."""
    return np.logical_or.reduce(mask, axis=0)


def over_dates(reduce: Callable[..., np.ma.MaskedArray], images: np.ndarray, use: np.ndarray) -> np.ndarray:
    """Return `reduce` (np.ma.mean, np.ma.median) over the used dates of each pixel, (C, H, W); zero where none is."""
    hidden = np.broadcast_to(~use[:, None], images.shape)
    return np.ma.filled(reduce(np.ma.array(images, mask=hidden), axis=0), 0).astype(np.float32)


def check_scene(
    cloudy: np.ndarray,
    *,
    cloud_mask: np.ndarray | None = None,
    reference: int | None = None,
    days: Sequence[float] | np.ndarray | None = None,
    valid: np.ndarray | None = None,
) -> Scene:
    """Return the checked input as a `Scene`, or raise saying what is wrong with it."""
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
