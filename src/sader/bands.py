"""Band names: sets of bands, and the canonical name of each spelling that files use.

Bands are selected by name, never by position: a file whose bands have no names needs `--bands`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sader.errors import BandError, did_you_mean

BANDS_13 = ("B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B10", "B11", "B12")
"""Sentinel-2 L1C, in the order of SEN12MS-CR-TS."""
BANDS_12 = tuple(band for band in BANDS_13 if band != "B10")
"""Sentinel-2 L2A: no cirrus band."""
BANDS_10 = tuple(band for band in BANDS_13 if band not in ("B01", "B09", "B10"))
"""Without the 60 m bands."""
BANDS_RGBN = ("B02", "B03", "B04", "B08")
BANDS_LISS4 = ("B03", "B04", "B08")
"""Green, red, near infrared: LISS-IV."""
RGB = ("B04", "B03", "B02")
"""Red, green, blue: the order of a picture."""


def rgb_indices(bands: Sequence[str]) -> tuple[int, int, int]:
    """Return the positions of red, green and blue among `bands`; false colour where one of them is missing."""
    if all(band in bands for band in RGB):
        red, green, blue = (list(bands).index(band) for band in RGB)
        return red, green, blue
    if all(band in bands for band in BANDS_LISS4):
        nir, red, green = (list(bands).index(band) for band in ("B08", "B04", "B03"))
        return nir, red, green
    if not bands:
        raise BandError("no bands given; a picture needs at least one.")
    last = len(bands) - 1
    return min(2, last), min(1, last), 0


WORDS: dict[str, tuple[str, ...]] = {
    "B01": ("coastal", "coastalaerosol", "coastalblue", "aerosol", "ultrablue"),
    "B02": ("blue", "b"),
    "B03": ("green", "g"),
    "B04": ("red", "r"),
    "B05": ("rededge1", "rededge", "vegetationrededge1", "re1", "vre1"),
    "B06": ("rededge2", "vegetationrededge2", "re2", "vre2"),
    "B07": ("rededge3", "vegetationrededge3", "re3", "vre3"),
    "B08": ("nir", "nir1", "nearinfrared", "nirbroad", "widenir", "infrared", "n"),
    "B8A": ("nir08", "nir2", "nirnarrow", "narrownir", "nirn", "rededge4"),
    "B09": ("nir09", "watervapor", "watervapour", "wv"),
    "B10": ("cirrus",),
    "B11": ("swir16", "swir1", "shortwaveinfrared1"),
    "B12": ("swir22", "swir2", "shortwaveinfrared2"),
}
"""Canonical name -> its other names, in lower case, letters and digits only. STAC common names are included, with
nir08 and nir09 as Earth Search defines them."""

_BY_WORD = {word: band for band, words in WORDS.items() for word in words}
_NUMBER = re.compile(
    r"(?:(?:s2[abc]?|sentinel[-_ ]?2[abc]?)[-_ .:]+)?(?:band|b)[ _-]*0*(8a|1[0-2]|[1-9])(?![0-9a-z])", re.IGNORECASE
)

BAND_LISTS: dict[str, tuple[str, ...]] = {
    "rgb": ("B04", "B03", "B02"),
    "bgr": ("B02", "B03", "B04"),
    "grn": BANDS_LISS4,
    "10-band": BANDS_10,
    "12-band": BANDS_12,
    "l2a": BANDS_12,
    "13-band": BANDS_13,
    "l1c": BANDS_13,
}
"""Named band lists for `--bands`, in the order of the file's bands. grn is LISS-IV: green, red, near infrared."""
AMBIGUOUS = ("rgbn", "bgrn")
"""Words that are refused: users of one mean the other."""


def canonical(name: str) -> str | None:
    """Return "B02" for "B2", "B02", "Band 2", "blue", "B02_10m", "S2_B02", "B2 (blue)"; None for other text."""
    text = name.strip()
    word = re.sub(r"[^a-z0-9]", "", text.lower())
    if word in _BY_WORD:
        return _BY_WORD[word]
    found = _NUMBER.match(text)
    if found is None:
        return None
    number = found.group(1).upper()
    return "B8A" if number == "8A" else f"B{int(number):02d}"


def parse_bands(text: str | Sequence[str]) -> tuple[str, ...]:
    """Return the bands of `--bands`: a named list, or band names separated by commas."""
    names = text.split(",") if isinstance(text, str) else list(text)
    names = [name.strip() for name in names if name.strip()]
    if len(names) == 1 and names[0].lower() in BAND_LISTS:
        return BAND_LISTS[names[0].lower()]
    if not names:
        raise BandError("--bands is empty; give names such as B02,B03,B04,B08, or a list such as 12-band.")
    if len(names) == 1 and names[0].lower() in AMBIGUOUS:
        raise BandError(
            f"--bands is {names[0]!r}, which is read in two ways: the weights sader-s2-rgbn have blue first. Name the "
            "bands in the order of the file: red,green,blue,nir or blue,green,red,nir."
        )
    bands = [canonical(name) or name for name in names]
    unknown = [name for name in names if canonical(name) is None]
    if len(names) == 1 and unknown:
        raise BandError(
            f"--bands is {names[0]!r}, which is no named list and no band name"
            f"{did_you_mean(names[0].lower(), BAND_LISTS)}"
        )
    doubled = sorted({band for band in bands if bands.count(band) > 1})
    if doubled:
        raise BandError(f"--bands names {', '.join(doubled)} more than once; give each band of the file its own name.")
    return tuple(bands)


def names_of_file(descriptions: Sequence[str | None]) -> tuple[str, ...] | None:
    """Return the names of a file's bands, canonical where possible; None where the file has no band names.

    Some programs name any bands "Band 1", "Band 2" ... or B1, B2 ...; for other sensors B1 is blue. Such names are
    positions. B1, B2 ... count as Sentinel-2 names only from eight bands on.
    """
    texts = [(text or "").strip() for text in descriptions]
    if not any(texts):
        return None
    if all(re.fullmatch(rf"band[ _]?{number}", text, re.IGNORECASE) for number, text in enumerate(texts, start=1)):
        return None
    if len(texts) < 8 and all(text.upper() == f"B{number}" for number, text in enumerate(texts, start=1)):
        return None
    names = [canonical(text) or text or f"unnamed {number}" for number, text in enumerate(texts, start=1)]
    # Two names of one band (B02 and "blue") are ambiguous: the first band gets the name.
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            names[number] = f"{texts[number]} (band {number + 1})"
        seen.add(names[number])
    return tuple(names)


def planetscope_names(title: str, count: int) -> tuple[str, ...] | None:
    """Return the names of the bands of a PlanetScope file (..._AnalyticMS_SR.tif), which has none; else None."""
    if "_analyticms" not in title.lower():
        return None
    if "_sr" not in title.lower():
        raise BandError(
            f"{title} holds radiance at the sensor; expected surface reflectance, a file named ..._AnalyticMS_SR.tif."
        )
    eight = ("B01", "B02", "green_i", "B03", "yellow", "B04", "B05", "B08")
    return {4: BANDS_RGBN, 8: eight}.get(count)


def band_in_filename(stem: str) -> tuple[str, str] | None:
    """Return (band, rest of the name) for a file that holds one band: "S2_2022-03-10_B02" -> ("B02", "S2_2022-03-10").

    Separators must surround the band, so that a tile name such as T32UB0 does not match.
    """
    found = list(re.finditer(r"(?:^|[_.\- ])(B(?:8A|0?[1-9]|1[0-2]))(?=$|[_.\- ])(?:_\d{2}m)?", stem, re.IGNORECASE))
    if not found:
        return None
    last = found[-1]
    band = canonical(last.group(1))
    assert band is not None
    return band, (stem[: last.start()] + stem[last.end() :]).strip("_.- ")
