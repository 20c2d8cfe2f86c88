"""Classification and quality bands: which of their values or bits mark cloud and shadow.

Scene classifications (SCL of Sen2Cor) hold one class a pixel; QA bands hold flags in bits. `--mask KIND` uses the
default of a kind, `--mask KIND:NUMBERS` other classes or bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.errors import ConfigError, did_you_mean
from sader.inference.values import ValueCoding


@dataclass(frozen=True)
class Layout:
    """What the numbers of a kind of band mean."""

    names: Mapping[int, str]
    """Class, or number of the bit, -> meaning."""
    hidden: tuple[int, ...]
    """Classes or bits that count as cloud or shadow by default."""
    coding: ValueCoding
    """Its nodata value stands for pixels outside the file; of these nothing is known."""
    bits: bool = False
    choices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Names of further sets of classes."""


SCL_CLOUD = (3, 8, 9, 10)
"""Shadow, cloud of medium and of high probability, thin cirrus."""
LAYOUTS: dict[str, Layout] = {
    "scl": Layout(
        {
            0: "no data", 1: "saturated or defective", 2: "dark area", 3: "cloud shadow", 4: "vegetation",
            5: "bare soil", 6: "water", 7: "unclassified", 8: "cloud, medium probability",
            9: "cloud, high probability", 10: "thin cirrus", 11: "snow or ice",
        },
        SCL_CLOUD,
        ValueCoding("uint8", 1.0, 0.0, 0.0),
        choices={"thick": (8, 9), "clouds": (8, 9, 10), "standard": SCL_CLOUD, "strict": (1, 2, 3, 7, 8, 9, 10)},
    ),
    "fmask": Layout(
        {0: "cirrus", 1: "cloud", 2: "adjacent to cloud or shadow", 3: "cloud shadow", 4: "snow or ice", 5: "water"},
        (1, 2, 3),
        ValueCoding("uint8", 1.0, 0.0, 255.0),
        bits=True,
    ),
    "qa_pixel": Layout(
        {
            0: "fill", 1: "dilated cloud", 2: "cirrus", 3: "cloud", 4: "cloud shadow", 5: "snow", 6: "clear",
            7: "water",
        },
        (1, 2, 3, 4),
        ValueCoding("uint16", 1.0, 0.0, 1.0),
        bits=True,
    ),
    "qa60": Layout({10: "opaque cloud", 11: "cirrus"}, (10, 11), ValueCoding("uint16", 1.0, 0.0, 65535.0), bits=True),
    "udm2": Layout({0: "not clear", 1: "clear"}, (0,), ValueCoding("uint8", 1.0, 0.0, 255.0)),
}  # fmt: skip
"""Kind -> layout: Sen2Cor's SCL, Fmask of HLS v2, QA_PIXEL of Landsat Collection 2, QA60 of Sentinel-2 in Earth
Engine, first band of the UDM2 of PlanetScope."""


@dataclass(frozen=True)
class Quality:
    """The classes or bits of a kind that count as cloud or shadow."""

    kind: str
    hidden: tuple[int, ...]

    def mask(self, numbers: NDArray[Any], *, unknown: bool) -> NDArray[np.bool_]:
        """Return where numbers (h, w) mark cloud or shadow. unknown: the value of pixels without data."""
        layout = LAYOUTS[self.kind]
        if layout.bits:
            found = np.bitwise_and(numbers.astype(np.int64), sum(1 << bit for bit in self.hidden)) != 0
        else:
            found = np.isin(numbers, self.hidden)
        nothing = layout.coding.nodata
        return np.where(numbers == nothing, unknown or (not layout.bits and nothing in self.hidden), found)


def parse_quality(text: str) -> Quality:
    """Return what "scl", "scl:strict", "scl:3,8,9" or "qa_pixel:3,4" mean."""
    kind, colon, rest = (part.strip().lower() for part in text.partition(":"))
    layout = LAYOUTS[kind]
    if not colon:
        return Quality(kind, layout.hidden)
    if rest in layout.choices:
        return Quality(kind, layout.choices[rest])
    what = "bits" if layout.bits else "classes"
    numbers = parse_numbers(rest)
    if numbers is None:
        words = did_you_mean(rest, layout.choices) if layout.choices else "; expected"
        example = ",".join(map(str, layout.hidden))
        raise ConfigError(f"mask is {text!r}{words}{', or' if layout.choices else ''} {what} such as {kind}:{example}.")
    wrong = [str(number) for number in numbers if number not in layout.names]
    if wrong:
        known = ", ".join(f"{number} {name}" for number, name in layout.names.items())
        one = "bit" if layout.bits else "class"
        raise ConfigError(f"mask is {text!r}; there is no {one} {', '.join(wrong)}. {what.capitalize()}: {known}.")
    return Quality(kind, numbers)


def parse_numbers(text: str) -> tuple[int, ...] | None:
    """Return the whole numbers of "2,3,4", sorted; None for other text."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        return None
    return tuple(sorted({int(word) for word in words}))


def kind_in(name: str) -> str | None:
    """Return the kind that a file or band name contains as a word: 2022_SCL.tif, HLS.S30.Fmask.tif, _QA_PIXEL.TIF."""
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower())
    return next((kind for kind in LAYOUTS if f" {kind.replace('_', ' ')} " in f" {words} "), None)
