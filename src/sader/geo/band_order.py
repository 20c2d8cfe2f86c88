"""Doubts about the order of the bands of one date, where its spectra contradict those of the other dates.

Band names come from the file, and nothing in its header shows that they are wrong. The spectra do: vegetation is bright
in the near infrared and dark in blue, and the same ground keeps the order of its bands from date to date.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sader.inference.scene_match import Overview

SAMPLES = 20_000
"""Pixels compared, at most."""
ENOUGH = 100
"""Fewer common pixels than this are no evidence."""
SHADOW, LEAST = 0.65, 0.3
"""Below this part of the other dates' brightness a pixel is in shadow, whose light is blue; a date with fewer than 30 %
of its pixels outside is not judged."""
DARKEST = 0.01
"""Reflectance below this is noise to the ratios between bands."""
DIFFERENT = 0.15
"""Mean difference of two spectra, relative to their means, from which they count as different."""
ORDERS = {"reversed": 0.4, "with red and blue exchanged": 0.12}
"""Other order -> share of the pixels that must fit it. Of 266 dates in 81 real series none is taken for another order;
237 and 142 of them are noticed when their bands are put into it."""
MARGIN = 3.0
"""Times as many pixels must fit the other order as fit the given one."""


def check_order(names: Sequence[str], bands: Sequence[str], overview: Overview) -> list[str]:
    """Return a warning for each date whose spectra fit the other dates better with its bands in another order."""
    if len(names) < 2:
        return []
    step = max(1, int(np.sqrt(overview.valid[0].size / SAMPLES)))
    values, valid = overview.cloudy[..., ::step, ::step], overview.valid[:, ::step, ::step]
    clear = valid & ~(overview.cloud[:, ::step, ::step] >= 0.5)
    found = []
    for date, name in enumerate(names):
        others = [other for other in range(len(names)) if other != date]
        # The own mask of a date with exchanged bands is wrong; spectra of clouds are flat and fit any order.
        common = valid[date] & clear[others].any(axis=0)
        rest = np.where(clear[others][:, None, common], values[others][..., common], np.nan)
        rest, own = np.nanmedian(rest, axis=0), values[date][:, common]
        lit = own.mean(axis=0) > SHADOW * rest.mean(axis=0)
        if lit.sum() < max(ENOUGH, LEAST * common.sum()):
            continue
        wanted, own = _shape(rest[:, lit]), _shape(own[:, lit])
        for text, order in _orders(bands).items():
            given, changed = np.abs(own - wanted).mean(axis=0), np.abs(own[order] - wanted).mean(axis=0)
            other = float(((changed < given / 2) & (given > DIFFERENT)).mean())
            same = float(((given < changed / 2) & (changed > DIFFERENT)).mean())
            if other > ORDERS[text] and other > MARGIN * same:
                found.append(
                    f"{name}: the spectra of {other:.0%} of its pixels fit the other dates better with its bands "
                    f"{text}. Check its band names; --bands names the bands of files that have none."
                )
                break
    return found[:1] if len(names) == 2 else found  # of two dates either may be wrong


def _shape(spectra: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return spectra (C, n) relative to their mean."""
    spectra = spectra.clip(DARKEST)
    return spectra / spectra.mean(axis=0)


def _orders(bands: Sequence[str]) -> dict[str, list[int]]:
    """Return the orders that are tried."""
    count = len(bands)
    orders = {"reversed": list(range(count))[::-1]}
    if "B02" in bands and "B04" in bands:
        swapped, blue, red = list(range(count)), list(bands).index("B02"), list(bands).index("B04")
        swapped[blue], swapped[red] = red, blue
        orders["with red and blue exchanged"] = swapped
    return {text: order for text, order in orders.items() if order != list(range(count))}
