"""What can be scored: classical methods with true or estimated masks, flat-colour controls, and any `CloudRemover`.

A method appears once for each kind of mask it is given: masks change PSNR by several dB. Predictions of a system that
runs elsewhere are read from a file (`StoredMethod`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from sader.baselines.classical import CLASSICAL, flat_truth, get_classical
from sader.data.cloud_rules import S2CLOUDLESS_BANDS, detect_s2cloudless, estimate_cloud_mask
from sader.data.items import Item
from sader.errors import BandError, DataError, check_known
from sader.evaluation.scoring import Method, write_arrays
from sader.inference.remover import CloudRemover, Removal, RemoverOptions

MASKS = ("true", "reference", "own")
"""true: every date's; reference: that of the reference date alone; own: none, the method estimates its own."""
CONTROL = "flat_colour_of_truth"
"""A control that is given the truth; flat_colour, without the truth, is a classical method."""
ESTIMATED = RULES, S2CLOUDLESS = " (rules)", " (s2cloudless)"
"""Ends of the names of classical methods with masks by rules and by the detector s2cloudless."""
STANDARD = (
    "ridge_blend", "local_ridge_blend", "matched_mosaic", "masked_median", "mosaic", "least_cloudy", "median",
    "flat_colour",
)  # fmt: skip
"""The classical methods of every table."""


def given_masks(item: Item, mask: str) -> list[np.ndarray | None]:
    """Return for each date its mask, or None where the method estimates it."""
    check_known("mask", mask, MASKS)
    return [
        item.cloud_mask[date] if mask == "true" or (mask == "reference" and date == item.reference) else None
        for date in range(len(item.cloudy))
    ]


@dataclass(frozen=True)
class ClassicalMethod:
    """One of `CLASSICAL`; masks that are not given are estimated by rules or by s2cloudless."""

    name: str
    mask: str = "true"
    detector: str = RULES

    def __post_init__(self) -> None:
        get_classical(self.name)

    def __call__(self, item: Item) -> np.ndarray:
        masks = given_masks(item, self.mask)
        if any(mask is None for mask in masks):
            estimated = _estimated(item, self.detector)
            masks = [estimate if mask is None else mask for mask, estimate in zip(masks, estimated, strict=True)]
        return get_classical(self.name)(
            item.cloudy,
            cloud_mask=np.stack(masks),  # type: ignore[arg-type]
            reference=item.reference,
            days=item.days,
            valid=item.valid,
        )


def _estimated(item: Item, detector: str) -> np.ndarray:
    if detector == RULES:
        return estimate_cloud_mask(item.cloudy, item.bands, valid=item.valid)
    if missing := set(S2CLOUDLESS_BANDS) - set(item.bands):
        raise BandError(f"s2cloudless needs bands that are missing: {', '.join(sorted(missing))}. Use a NAME (rules).")
    chosen = [item.bands.index(band) for band in S2CLOUDLESS_BANDS]
    return np.stack([detect_s2cloudless(date[chosen]) for date in item.cloudy])


def flat_colour_of_truth(item: Item) -> np.ndarray:
    """Return the mean colour of the scored truth: the score of the mean colour alone. A control, given the truth."""
    return flat_truth(item.clear, pixels=item.scored)


@dataclass(frozen=True)
class RemoverMethod:
    """A `CloudRemover` as a method."""

    remover: CloudRemover
    mask: str = "true"
    """One of `MASKS`."""
    steps: int | str | None = None
    """As in `CloudRemover.predict`; None = the checkpoint's own."""
    samples: int = 1
    """Results averaged."""
    reference: str = "item"
    """"item": the item's; "auto": the item's, else the date with most clear pixels by the true masks."""
    seed: int = 0

    def __post_init__(self) -> None:
        for value, known in ((self.mask, MASKS), (self.reference, ("item", "auto"))):
            check_known("choice", value, known)

    def __call__(self, item: Item) -> np.ndarray:
        return self.predict(item).clear

    def predict(self, item: Item) -> Removal:
        """Return the whole result, with the masks used and the spread."""
        reference = item.reference
        if reference is None and self.reference == "auto":
            reference = int((item.valid & ~item.cloud_mask).sum((1, 2)).argmax())
        own = [band for band in item.aux_bands if band in self.remover.bands]
        rest = item.some_aux(own)
        cloudy = item.cloudy if rest is None else np.concatenate([item.cloudy, rest], axis=1)
        result = self.remover.predict(
            cloudy,
            reference=reference,
            cloud_mask=None if self.mask == "own" else given_masks(item, self.mask),
            days=item.days,
            aux=None if item.aux is None else item.some_aux(self.remover.config.network.aux_bands),
            valid=item.valid,
            bands=(*item.bands, *own),
            steps=self.steps,
            samples=self.samples,
            seed=self.seed,
        )
        count = len(item.bands)
        if not own:
            return result
        return replace(  # the scored bands come first
            result, clear=result.clear[:count], spread=None if result.spread is None else result.spread[:count]
        )


PREDICTIONS = ".npz"
"""Suffix of a file of predictions."""
STORED_SCALE, STORED_NODATA = 50_000, 65_535
"""Counts per unit of reflectance in predictions stored as uint16, and the count of a pixel without a value."""


@dataclass(frozen=True)
class StoredMethod:
    """Predictions in a NumPy archive: one array (C, H, W) for each item, stored under the name of the item."""

    file: Path
    """Float arrays hold reflectance, uint16 arrays reflectance times `STORED_SCALE` and `STORED_NODATA` for NaN."""

    def __call__(self, item: Item) -> np.ndarray:
        try:
            with np.load(self.file, allow_pickle=False) as arrays:
                image = np.asarray(arrays[item.name])
        except KeyError as error:
            raise DataError(
                f"{self.file} holds no prediction of {item.name}; expected one array for each item, stored under its "
                "name. Predict the same items, or score fewer of them."
            ) from error
        except (OSError, ValueError, BadZipFile) as error:
            raise DataError(f"cannot read {self.file} ({error}); expected a file of numpy.savez.") from error
        if image.dtype != np.uint16:
            return image.astype(np.float32)
        return np.where(image == STORED_NODATA, np.nan, image / np.float32(STORED_SCALE)).astype(np.float32)


def store_predictions(file: Path, images: Mapping[str, np.ndarray]) -> None:
    """Write images (C, H, W) by item name as `StoredMethod` reads them, in steps of 1 / `STORED_SCALE`."""

    def counted(image: np.ndarray) -> np.ndarray:
        counts = np.rint(image * STORED_SCALE).clip(0, STORED_NODATA - 1)
        return np.where(np.isnan(image), STORED_NODATA, counts).astype(np.uint16)

    write_arrays(file, {name: counted(image) for name, image in images.items()})


def classical_methods(mask: str = "true", names: Sequence[str] = STANDARD) -> dict[str, Method]:
    """Return the classical methods as "ridge_blend", or "ridge_blend (rules)" with estimated masks."""
    suffix = "" if mask == "true" else RULES
    return {f"{name}{suffix}": ClassicalMethod(name, mask) for name in names}


def with_spread(method: Method, item: Item) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the image of a method and, where it states one, its expected error."""
    if not isinstance(method, RemoverMethod):
        return method(item), None
    removal = method.predict(item)
    return removal.clear, removal.spread


def make_method(
    name: str,
    *,
    mask: str = "true",
    steps: int | str | None = None,
    samples: int = 1,
    options: RemoverOptions | None = None,
) -> Method:
    """Return the method called `name`: a classical one, shipped weights, a checkpoint file or a file of predictions.

    "NAME (rules)" and "NAME (s2cloudless)" are classical methods with such masks, whatever the others are given.
    """
    if (classical := name.removesuffix(RULES).removesuffix(S2CLOUDLESS)) in CLASSICAL:
        detector = S2CLOUDLESS if name.endswith(S2CLOUDLESS) else RULES
        return ClassicalMethod(classical, mask if classical == name else "own", detector)
    if name == CONTROL:
        return flat_colour_of_truth
    if name.endswith(PREDICTIONS):
        return StoredMethod(Path(name))
    remover = CloudRemover.from_pretrained(name, options=options)
    return RemoverMethod(remover, mask=mask, steps=steps, samples=samples)
