"""The tasks of a scene that is cleared by many processes: one tile, one finished rectangle, one look for the reference.

Not from the paper. Plain functions on arrays, the same for dask and for any other way to spread work; a tile's bits do
not depend on who computes it, and a rectangle blends its tiles in the order of `plan_windows`, as `predict` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sader.geo.scene.rows import NODATA, OBSERVED, RECONSTRUCTED
from sader.geo.stack import StackWindow, ValueCoding
from sader.geo.values import for_network
from sader.geo.xarray.cube import decoded, look_from_afar
from sader.geo.xarray.shipment import Shipment
from sader.inference.scene_match import SceneMatch
from sader.inference.tiling import Window, blend_weights

if TYPE_CHECKING:
    from sader.inference.remover import CloudRemover


@dataclass(frozen=True)
class Job:
    """What every task of one scene knows."""

    height: int
    width: int
    overlap: int
    bands: tuple[str, ...]
    days: tuple[float, ...] | None = None
    steps: int | str | None = None
    seed: int = 0
    samples: int = 1
    spread: bool = False
    """Whether the result has a standard deviation: of the samples, or stated by the network."""
    extras: bool = True
    """Whether all dates' clouds are kept, to be counted; else the reference date's."""


class RawTile(NamedTuple):
    """One tile before blending, cut from the scene at `window`; dask knows the size of a tuple of arrays."""

    clear: NDArray[np.float32]
    """(C, h, w)"""
    spread: NDArray[np.float32] | None
    """(C, h, w), if the job has one"""
    cloud: NDArray[np.float32]
    """(T, h, w) probability that was used, NaN where nobody knows; without extras only the reference date's, if any"""
    own: NDArray[np.float32] | None
    """(C, h, w), the reference date"""
    valid: NDArray[np.bool_]
    """(T, h, w)"""


class Guidance(NamedTuple):
    """What the look at the whole scene tells every tile."""

    reference: int | None
    match: SceneMatch | None = None


def hand_over(shipment: Shipment) -> Shipment:
    """Return the shipment: the one task whose result every tile needs."""
    return shipment


def tile_of_array(
    model: Shipment,
    job: Job,
    window: Window,
    guidance: Guidance,
    coding: ValueCoding,
    raw: NDArray[Any],
    mask: NDArray[Any] | None,
) -> RawTile | None:
    """Return one tile of an array, from its stored numbers (T, C, h, w) and its mask (T, h, w)."""
    return predict_window(model, job, window, guidance, decoded_window(raw, mask, coding))


def predict_window(model: Shipment, job: Job, window: Window, guidance: Guidance, dates: StackWindow) -> RawTile | None:
    """Return what the model makes of one window; None where no date has data."""
    if not dates.valid.any():
        return None
    remover, reference = model.remover(), guidance.reference
    with model.turn():
        made = remover.predict_tile(
            for_network(dates.cloudy),
            window=window,
            valid=dates.valid,
            cloud_mask=dates.masks,
            reference=reference,
            bands=job.bands,
            steps=job.steps,
            seed=job.seed,
            samples=job.samples,
            days=job.days,
            match=guidance.match,
        )
    cloud = made.cloud
    if cloud is None:
        unknown = np.full(dates.valid.shape[1:], np.nan, np.float32)
        cloud = np.stack([unknown if mask is None else mask.astype(np.float32) for mask in dates.masks])
    if not job.extras:
        cloud = cloud[[] if reference is None else [reference]]
    return RawTile(
        clear=made.clear,
        spread=made.spread if job.spread else None,
        cloud=cloud,
        own=None if reference is None else dates.cloudy[reference].copy(),  # a view would keep all dates
        valid=dates.valid,
    )


def finish_region(
    model: Shipment,
    job: Job,
    place: Window,
    guidance: Guidance,
    windows: Sequence[Window],
    tiles: Sequence[RawTile | None],
) -> dict[str, NDArray[Any]]:
    """Return the finished variables of one rectangle from the tiles that touch it, in the order of `plan_windows`."""
    remover, reference = model.remover(), guidance.reference
    bands = len(job.bands)
    made = [(window, tile) for window, tile in zip(windows, tiles, strict=True) if tile is not None]
    size = (place.height, place.width)
    if not made:
        nothing = np.zeros(size, np.uint8)
        empty = np.full((bands, *size), np.nan, np.float32)
        return {"clear": empty, "uncertainty": empty, "clear_count": nothing, "provenance": nothing + NODATA}
    dates, planes = len(made[0][1].valid), len(made[0][1].cloud)
    weight = np.zeros(size, np.float32)
    image, spread = np.zeros((2, bands, *size), np.float32)
    cloud = np.zeros((planes, *size), np.float32)
    own = np.zeros((bands, *size), np.float32)
    valid = np.zeros((dates, *size), bool)
    for window, tile in made:
        there, here = common(place, window), common(window, place)
        assert there is not None
        assert here is not None
        inner = there.slices
        part = blend_weights(window, height=job.height, width=job.width, overlap=job.overlap)[here.slices]
        weight[inner] += part
        image[:, *inner] += part * tile.clear[:, *here.slices]
        cloud[:, *inner] += part * tile.cloud[:, *here.slices]
        if tile.spread is not None:
            spread[:, *inner] += part * tile.spread[:, *here.slices]
        if tile.own is not None:
            own[:, *inner] = tile.own[:, *here.slices]
        valid[:, *inner] = tile.valid[:, *here.slices]
    with np.errstate(invalid="ignore", divide="ignore"):  # nobody covers what no date has seen
        image, cloud, spread = image / weight, cloud / weight, spread / weight
    if planes < dates:
        known, cloud = cloud, np.full((dates, *size), np.nan, np.float32)
        if reference is not None:
            cloud[reference] = known[0]
    clear, kept = remover.finish(
        image, None if reference is None else own, cloud=cloud, valid=valid, reference=reference
    )
    observed = valid.any(axis=0)
    count = (valid & (cloud < remover.options.cloud_threshold)).sum(axis=0)
    return {
        "clear": clear,
        "uncertainty": np.where(kept, 0.0, np.where(observed, spread, np.nan)).astype(np.float32),
        "clear_count": count.clip(max=255).astype(np.uint8),
        "provenance": np.where(kept, OBSERVED, np.where(observed, RECONSTRUCTED, NODATA)).astype(np.uint8),
    }


def look(
    model: Shipment,
    job: Job,
    coding: ValueCoding,
    date: int | str | None,
    match: bool,
    raw: NDArray[Any],
    mask: NDArray[Any] | None,
) -> Guidance:
    """Return what a decimated scene says: the clearest date where date is "auto", and the one light of all dates."""
    with model.turn():
        return guidance_of(model.remover(), job, date, match, decoded_window(raw, mask, coding))


def guidance_of(remover: CloudRemover, job: Job, date: int | str | None, match: bool, dates: StackWindow) -> Guidance:
    """Return the guidance that the decimated dates of a scene give; arguments as in `look`."""
    shape = job.height, job.width
    afar = look_from_afar(remover, dates, job.bands, shape)
    reference = int(afar.clear_share.argmax()) if date == "auto" else date
    assert not isinstance(reference, str)
    if not match:
        return Guidance(reference)
    seen = for_network(afar.cloudy)
    return Guidance(
        reference, remover.scene_match(seen, valid=afar.valid, cloud=afar.cloud, reference=reference, shape=shape)
    )


def decoded_window(raw: NDArray[Any], mask: NDArray[Any] | None, coding: ValueCoding) -> StackWindow:
    """Return stored numbers (T, C, h, w) and masks (T, h, w) as the dates of a window."""
    cloudy, valid = decoded(np.asarray(raw), coding)
    return StackWindow(cloudy, valid, [None] * len(cloudy) if mask is None else [one != 0 for one in np.asarray(mask)])


def common(window: Window, other: Window) -> Window | None:
    """Return the part of `window` that `other` covers, in the coordinates of `window`; None where they are apart."""
    top, left = max(window.row, other.row), max(window.col, other.col)
    bottom = min(window.row + window.height, other.row + other.height)
    right = min(window.col + window.width, other.col + other.width)
    if bottom <= top or right <= left:
        return None
    return Window(top - window.row, left - window.col, bottom - top, right - left)
