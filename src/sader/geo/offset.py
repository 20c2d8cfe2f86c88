"""Which offset the values of a file carry: user's word, product metadata, STAC, tags, processing baseline; and a check.

Since processing baseline 04.00 (25 January 2022, and older dates reprocessed as Collection 1) Sentinel-2 counts are
shifted by 1000: reflectance = (DN + offset) / 10000 with offset = -1000, and DN 0 is still nodata. Providers differ in
whether they have taken the shift off again. Here it is decided once per file; the values are computed in
`sader.geo.values`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import ConfigError
from sader.geo.stack import DateSource
from sader.inference.tiling import Window

QUANTIFICATION = 10000.0
"""Counts per unit of reflectance, unless the metadata define another number."""
OFFSET = -1000.0
"""In counts, added before dividing."""
FIRST_SHIFTED = (4, 0)
"""The first processing baseline whose counts are shifted."""
FIRST_SHIFTED_DAY = date(2022, 1, 25)

DARK, DARK_LIMIT = 950.0, 1300.0
"""Shifted scenes have their darkest pixels just above 1000; above the limit they are cloud, snow or desert. The test
is not complete: of 158 unshifted scenes with all bands none was taken for shifted, of the same scenes shifted 142 were;
of deserts with four bands at the top of the atmosphere one in three was taken for shifted."""
BRIGHT = 4500.0
"""No land is as bright as this everywhere, but Landsat's counts of black are: 5000 at level 1, 7273 at level 2."""
NEGATIVE, NEGATIVE_SHARE = -0.01, 0.05
"""More than this share of pixels below this reflectance: an offset was taken off twice."""
CLIPPED_SHARE = 0.1
"""More than this share of pixels at the lowest count in one band, though another band sees them."""
SURE_BANDS = ("B02", "B03", "B04")
"""Bands in which clear water and shadow are not black; infrared ones were cut off at 1 even in good old products."""
ENOUGH = 500
"""Fewer valid pixels than this are no evidence."""


@dataclass(frozen=True)
class Radiometry:
    """How the counts of one band become reflectance: DN * scale + offset."""

    scale: float
    offset: float
    """In reflectance: -0.1 for the -1000 of baseline 04.00."""
    reason: str
    """What decided, for the log and the result's metadata."""
    doubt: str | None = None
    """A warning: evidence is missing or contradicts itself."""

    @property
    def counts(self) -> float:
        """The offset in counts, rounded to a thousandth."""
        return round(self.offset / self.scale, 3) + 0.0


def parse_offset(choice: str | float | None) -> float | None:
    """Return the offset in counts that the user chose, or None for "auto".

    "none" and 0 mean: the values are corrected already. Anything else is a negative number of counts such as -1000.
    """
    if choice is None or (isinstance(choice, str) and choice.strip().lower() == "auto"):
        return None
    if isinstance(choice, str) and choice.strip().lower() == "none":
        return 0.0
    try:
        counts = float(choice)
    except ValueError as error:
        raise ConfigError(f"offset is {choice!r}; expected auto, none or counts such as -1000.") from error
    if counts == 0:
        return 0.0
    if not np.isfinite(counts) or counts > 0:
        raise ConfigError(
            f"offset is {choice}; expected auto, none or a negative number of counts: reflectance = (DN + offset) / "
            "10000, so baseline 04.00 is -1000."
        )
    if counts > -1:
        raise ConfigError(
            f"offset is {choice}; expected counts, not reflectance. Write {round(counts * QUANTIFICATION)}."
        )
    return counts


def parse_baseline(text: object) -> tuple[int, int] | None:
    """Return (4, 0) from "04.00", "4.0", "0400" or a product name with _N0400_; None where there is none.

    99.99 is written by Sen2Cor when run by the user and carries no information.
    """
    words = str(text).strip() if text is not None else ""
    found = re.fullmatch(r"N?(\d{1,2})\.(\d{1,2})", words) or re.fullmatch(r"N?(\d{2})(\d{2})", words)
    found = found or re.search(r"_N(\d{2})\.?(\d{2})(?=_|\.|$)", words)
    if found is None:
        return None
    baseline = int(found[1]), int(found[2])
    return None if baseline[0] >= 90 else baseline


def _by_baseline(baseline: tuple[int, int], where: str, scale: float) -> Radiometry:
    shifted = baseline >= FIRST_SHIFTED
    text = f"{baseline[0]:02d}.{baseline[1]:02d}"
    reason = f"processing baseline {text} ({where}) {'has' if shifted else 'is older than'} the offset of 04.00"
    return Radiometry(scale, OFFSET / QUANTIFICATION if shifted else 0.0, reason)


def decide_product(
    choice: str | float | None,
    *,
    listed: float | None,
    baseline: object,
    quantification: float = QUANTIFICATION,
    where: str = "the product's metadata",
) -> Radiometry:
    """Return how the counts of one band of a .SAFE product become reflectance.

    listed: the band's BOA_ADD_OFFSET or RADIO_ADD_OFFSET, None where the list is missing (before 04.00).
    baseline: PROCESSING_BASELINE or, in its absence, the product's name.
    """
    scale = 1.0 / quantification
    chosen = parse_offset(choice)
    if chosen is not None:
        return Radiometry(scale, chosen * scale, "the user's choice")
    if listed is not None:
        return Radiometry(scale, listed * scale, f"{listed:g} listed in {where}")
    number = parse_baseline(baseline)
    if number is None:
        return Radiometry(scale, 0.0, f"no offset listed in {where}", "neither offset nor processing baseline found")
    decided = _by_baseline(number, where, scale)
    if not decided.offset:
        return decided
    doubt = f"baseline {number[0]:02d}.{number[1]:02d} without an offset in {where}; -1000 is assumed"
    return Radiometry(scale, OFFSET * scale, decided.reason, doubt)


def decide_stac(
    choice: str | float | None,
    *,
    properties: Mapping[str, Any],
    scale: float | None,
    offset: float | None,
    item: str = "",
    integer: bool = True,
) -> Radiometry:
    """Return how the counts of one asset of a STAC item become reflectance.

    The order, because providers contradict themselves: the user; `earthsearch:boa_offset_applied` true (then an offset
    in `raster:bands` is a leftover); the asset's own offset; the processing baseline; the date, which is only a doubt.
    scale, offset: of `raster:bands` (STAC 1.0) or `bands` / `raster:offset` (1.1), None where absent.
    integer: whether the asset holds counts; reflectance in floats needs neither.
    """
    known = scale is not None and scale > 0
    factor = float(scale) if scale is not None and known else (1.0 / QUANTIFICATION if integer else 1.0)
    chosen = parse_offset(choice)
    if chosen is not None:
        return Radiometry(factor, chosen / QUANTIFICATION, "the user's choice")
    baseline, where = _stac_baseline(properties, item)
    applied = _applied(properties)
    if applied:
        return Radiometry(factor, 0.0, "earthsearch:boa_offset_applied is true")
    if not integer and not offset:
        return Radiometry(factor, 0.0, "the asset holds reflectance")
    if offset:
        if baseline is not None and baseline < FIRST_SHIFTED:
            text = f"{baseline[0]:02d}.{baseline[1]:02d}"
            leftover = f"the item lists an offset of {offset:g}, but its baseline {text} has none; it is not applied"
            return Radiometry(factor, 0.0, f"processing baseline {text} ({where})", leftover)
        flag = " (earthsearch:boa_offset_applied is false)" if applied is False else ""
        return Radiometry(factor, float(offset), f"raster:offset {offset:g} of the asset{flag}")
    decided = _by_baseline(baseline, where, factor) if baseline is not None else None
    if offset is None or applied is False:
        doubt = _doubt_by_date(properties)
        return decided or Radiometry(factor, 0.0, "no metadata about an offset", doubt)
    # An explicit 0 beside a new baseline: providers that harmonise their files write this.
    new = decided is not None and decided.offset
    doubt = f"the asset lists offset 0, though {decided.reason}; none is applied" if decided and new else None
    return Radiometry(factor, 0.0, "raster:offset 0 of the asset", doubt)


def _applied(properties: Mapping[str, Any]) -> bool | None:
    for key in ("earthsearch:boa_offset_applied", "sentinel:boa_offset_applied"):
        value = properties.get(key)
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    return None


def _stac_baseline(properties: Mapping[str, Any], item: str) -> tuple[tuple[int, int] | None, str]:
    for key in ("s2:processing_baseline", "sentinel:processing_baseline", "processing:version", "s2:product_uri"):
        baseline = parse_baseline(properties.get(key))
        if baseline is not None:
            return baseline, key
    return parse_baseline(item), "the item's name"


def _doubt_by_date(properties: Mapping[str, Any]) -> str | None:
    text = str(properties.get("datetime") or properties.get("start_datetime") or "")
    try:
        day = datetime.fromisoformat(text.replace("Z", "+00:00")).date()
    except ValueError:
        return None
    if day < FIRST_SHIFTED_DAY:
        return None
    return f"taken on {day}, after baseline 04.00 began; the item lists neither offset nor baseline: none is applied"


def decide_tags(
    choice: str | float | None, *, scale: float, offset: float, integer: bool, baseline: object = None, name: str = ""
) -> Radiometry:
    """Return how the values of a GeoTIFF band become reflectance.

    scale, offset: the band's tags, (1, 0) where there are none. Counts without tags are taken as 1/10000; floats as
    reflectance. baseline: a PROCESSING_BASELINE tag. A baseline in the name of the
    file is a doubt only: the program that exported the file may have removed the offset.
    """
    tagged = scale != 1.0 or offset != 0.0
    factor = scale if tagged else (1.0 / QUANTIFICATION if integer else 1.0)
    chosen = parse_offset(choice)
    if chosen is not None:
        return Radiometry(factor, chosen / QUANTIFICATION, "the user's choice")
    if tagged:
        return Radiometry(factor, offset, f"scale {scale:g} and offset {offset:g} in the file's tags")
    if not integer:
        return Radiometry(factor, 0.0, "floating point values are taken as reflectance")
    number = parse_baseline(baseline)
    if number is not None:
        return _by_baseline(number, "a tag of the file", factor)
    number = parse_baseline(name)
    doubt = None
    if number is not None and number >= FIRST_SHIFTED:
        text = f"{number[0]:02d}.{number[1]:02d}"
        doubt = f"the name contains baseline {text}, whose counts are shifted by 1000, but the file has no offset tag"
    return Radiometry(factor, 0.0, "no tag about an offset", doubt)


def check_counts(counts: Mapping[str, NDArray[Any]], *, offset: float, nodata: float | None = 0.0) -> str | None:
    """Return a warning where the counts do not fit the offset, else None.

    counts: DN of the same pixels for each band (any shape). offset: in counts, as decided. Three signs: nothing is
    darker than about 1000 though no offset is applied; reflectance is negative in many pixels once it is applied; one
    band sits at its lowest count where another sees something, so that values were cut off before.
    """
    values = {band: np.asarray(array, dtype=np.float64).ravel() for band, array in counts.items()}
    if not values:
        return None
    seen = {band: np.isfinite(array) & (array != nodata) for band, array in values.items()}
    anywhere = np.any(list(seen.values()), axis=0)
    if anywhere.sum() < ENOUGH:
        return None
    sure = [band for band in values if band in SURE_BANDS] or list(values)
    for band in sure:
        array = values[band]
        # Zero where another band is not zero was a dark pixel, not a missing one; some providers clip to 1 instead.
        share = float((anywhere & np.isfinite(array) & ((array == nodata) | (array <= 1))).sum() / anywhere.sum())
        if CLIPPED_SHARE < share < 1 and len(values) > 1:
            return (
                f"{share:.0%} of the pixels of {band} have the lowest count, but not in other bands. Either the date "
                "is in deep shadow, or an offset was subtracted twice before: then use the original files."
            )
    for band in [*sure, *(band for band in values if band == "B10")]:
        # Nothing but high cloud shines in B10: unshifted it holds a few counts, far below any offset.
        valid = values[band][seen[band]]
        share = float(((valid + offset) / QUANTIFICATION < NEGATIVE).mean()) if valid.size >= ENOUGH else 0.0
        if offset < 0 and share > NEGATIVE_SHARE:
            return (
                f"{share:.0%} of the pixels of {band} become negative with the offset {offset:g}: it was probably "
                "subtracted before. If so, use --offset none."
            )
    if offset == 0:
        darkest = min(
            (float(np.quantile(values[band][seen[band]], 0.001)) for band in values if seen[band].sum() >= ENOUGH),
            default=np.inf,
        )
        if DARK <= darkest < DARK_LIMIT:
            return (
                f"no value is below {darkest:.0f} counts: they look shifted by the offset of processing baseline "
                "04.00. If so, use --offset -1000; ignore this note if the date shows only cloud, haze or desert."
            )
        if BRIGHT <= darkest < np.inf:
            return (
                f"no value is below {darkest:.0f} counts, reflectance {darkest / QUANTIFICATION:.2f}: they look like "
                "those of another sensor. For Landsat Collection 2 use --scale 0.0000275 --offset -2000 (level 1: "
                "--scale 0.00002 --offset -1000). Ignore this note if the date shows only thick cloud or snow."
            )
    return None


def sample_windows(height: int, width: int, *, size: int = 64, per_side: int = 3) -> list[Window]:
    """Return a few small windows spread over an image: cheap to read even from a file without overviews."""
    h, w = min(size, height), min(size, width)
    rows = sorted({round(at) for at in np.linspace(0, height - h, per_side)})
    cols = sorted({round(at) for at in np.linspace(0, width - w, per_side)})
    return [Window(row, col, h, w) for row in rows for col in cols]


def check_source(source: DateSource, *, bands: Sequence[str] | None = None) -> str | None:
    """Return a warning where a sample of the source's values does not fit its offset, with its name, else None.

    Only Sentinel-2 counts are checked: a source that holds reflectance has no offset to be wrong about.
    bands: those that are read; three by default, because every window is slow over a network.
    """
    coding = source.coding
    counted = np.issubdtype(np.dtype(coding.dtype), np.integer)
    if not counted or not 0.5 < coding.scale * QUANTIFICATION < 2:  # other sensors have other counts and offsets
        return None
    looked = tuple(bands) if bands is not None else _telling_bands(source.bands)
    counts: dict[str, list[NDArray[np.float64]]] = {band: [] for band in looked}
    for window in sample_windows(source.grid.height, source.grid.width):
        for band in looked:
            # Band by band, since a pixel missing in one band may be there in another.
            values, valid = source.read(window, bands=(band,), grid=source.grid)
            stored = np.rint((values[0].astype(np.float64) - coding.offset) / coding.scale)
            # Invalid pixels get the nodata count, 0 for Sentinel-2.
            counts[band].append(np.where(valid, stored, 0.0).ravel())
    joined = {band: np.concatenate(parts) for band, parts in counts.items()}
    warning = check_counts(joined, offset=coding.offset / coding.scale)
    return None if warning is None else f"{source.name}: {warning}"


def _telling_bands(bands: Sequence[str]) -> tuple[str, ...]:
    """Return two visible bands, in which nothing is quite black, the one of the longest waves, in which water is, and
    the cirrus band, in which all land is."""
    visible = [band for band in ("B02", "B04", "B03") if band in bands][:2]
    others = [band for band in bands if band not in visible]
    return tuple(dict.fromkeys([*visible, *others[-1:], *(b for b in others if b == "B10")]) if visible else bands[:3])
