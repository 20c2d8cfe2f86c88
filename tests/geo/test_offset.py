"""The offset of baseline 04.00: every rule that decides it, and the check of the values."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

import numpy as np
import pytest

from sader.errors import ConfigError
from sader.geo.grid import Grid
from sader.geo.offset import (
    check_counts,
    check_source,
    decide_product,
    decide_stac,
    decide_tags,
    parse_baseline,
    parse_offset,
    sample_windows,
)
from sader.inference.values import ValueCoding

rng = np.random.default_rng(3)


def land(shift: int = 0) -> dict[str, np.ndarray]:
    """Counts of fields and forest: dark in the visible, some water."""
    return {
        "B02": rng.integers(250, 900, 5000) + shift,
        "B04": rng.integers(200, 1500, 5000) + shift,
        "B08": rng.integers(300, 4000, 5000) + shift,
    }


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("auto", None), (None, None), ("AUTO ", None), ("none", 0.0), (0, 0.0), ("-1000", -1000.0), (-1000, -1000.0)],
)
def test_what_the_user_may_say(text, wanted):
    assert parse_offset(text) == wanted


@pytest.mark.parametrize(
    ("text", "hint"),
    [("maybe", "expected auto, none"), (1000, "negative number of counts"), ("-0.1", "Write -1000"), ("nan", "counts")],
)
def test_what_the_user_may_not_say(text, hint):
    with pytest.raises(ConfigError, match=hint):
        parse_offset(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("03.01", (3, 1)),
        ("04.00", (4, 0)),
        ("0510", (5, 10)),
        ("S2B_MSIL2A_20231217T135659_N0510_R067_T21JUK_20231217T175625.SAFE", (5, 10)),
        ("S2A_OPER_MSI_L1C_TL_SGS__20160905T073438_A006291_T53HLA_N02.04", (2, 4)),
        ("S2B_10SGF_20250808_0_L2A", None),
        ("99.99", None),
        (None, None),
    ],
)
def test_baselines(text, wanted):
    assert parse_baseline(text) == wanted


def test_product_before_the_offset():
    found = decide_product("auto", listed=None, baseline="03.01")
    assert (found.scale, found.offset, found.doubt) == (1e-4, 0.0, None)


def test_product_with_the_offset():
    found = decide_product("auto", listed=-1000, baseline="04.00")
    assert found.offset == pytest.approx(-0.1)
    assert found.counts == -1000
    assert found.doubt is None
    odd = decide_product("auto", listed=-900, baseline="04.00", quantification=20000)
    assert (odd.scale, odd.offset) == (1 / 20000, pytest.approx(-0.045)), "the metadata's own numbers count"


def test_product_with_a_new_baseline_and_no_list():
    found = decide_product("auto", listed=None, baseline="S2A_MSIL2A_20220310T103749_N0400_R008_T32TMS_X.SAFE")
    assert found.counts == -1000
    assert "assumed" in found.doubt
    assert "neither offset nor" in decide_product("auto", listed=None, baseline=None).doubt


@pytest.mark.parametrize(("choice", "offset"), [("none", 0.0), ("-1000", -0.1), (-500, -0.05)])
def test_the_user_overrides_everything(choice, offset):
    product = decide_product(choice, listed=-1000 if choice == "none" else None, baseline="04.00")
    assert product.offset == pytest.approx(offset)
    properties = {"earthsearch:boa_offset_applied": True, "s2:processing_baseline": "05.10"}
    assert decide_stac(choice, properties=properties, scale=1e-4, offset=-0.1).offset == pytest.approx(offset)
    assert decide_tags(choice, scale=1e-4, offset=-0.1, integer=True).offset == pytest.approx(offset)
    assert decide_tags(choice, scale=1.0, offset=0.0, integer=False).offset == pytest.approx(offset)


@pytest.mark.parametrize(
    ("properties", "offset", "wanted", "doubtful"),
    [
        # Earth Search: the flag is the truth, the offset of the asset may be a leftover.
        ({"earthsearch:boa_offset_applied": True, "s2:processing_baseline": "05.10"}, -0.1, 0.0, False),
        ({"earthsearch:boa_offset_applied": False, "s2:processing_baseline": "05.10"}, -0.1, -0.1, False),
        ({"earthsearch:boa_offset_applied": False, "s2:processing_baseline": "04.00"}, None, -0.1, False),
        ({"earthsearch:boa_offset_applied": False, "s2:processing_baseline": "04.00"}, 0, -0.1, False),
        ({"earthsearch:boa_offset_applied": False, "s2:processing_baseline": "03.01"}, 0, 0.0, False),
        ({"earthsearch:boa_offset_applied": False, "s2:processing_baseline": "03.01"}, -0.1, 0.0, True),
        ({"sentinel:boa_offset_applied": True}, -0.1, 0.0, False),
        # The asset's own offset.
        ({}, -0.1, -0.1, False),
        ({}, 0.0, 0.0, False),
        ({"s2:processing_baseline": "05.10"}, 0.0, 0.0, True),
        # Planetary Computer: raw counts, the baseline alone.
        ({"s2:processing_baseline": "04.00", "datetime": "2022-03-10T10:37:49Z"}, None, -0.1, False),
        ({"s2:processing_baseline": "03.01", "datetime": "2021-03-10T10:37:49Z"}, None, 0.0, False),
        # Collection 1: old dates with a new baseline carry the offset.
        ({"s2:processing_baseline": "05.00", "datetime": "2018-03-10T10:37:49Z"}, None, -0.1, False),
        ({"processing:version": "05.11"}, None, -0.1, False),
        ({"s2:product_uri": "S2A_MSIL2A_20220310T103749_N0400_R008_T32TMS_X.SAFE"}, None, -0.1, False),
        # Nothing but a date: never applied on a guess.
        ({"datetime": "2021-03-10T10:37:49Z"}, None, 0.0, False),
        ({"datetime": "2022-03-10T10:37:49Z"}, None, 0.0, True),
        ({}, None, 0.0, False),
    ],
)
def test_stac_rules(properties, offset, wanted, doubtful):
    found = decide_stac("auto", properties=properties, scale=1e-4, offset=offset)
    assert found.scale == 1e-4
    assert found.offset == pytest.approx(wanted)
    assert (found.doubt is not None) == doubtful, found


def test_stac_baseline_in_the_item_name_and_floats():
    name = "S2B_MSIL2A_20250302T095029_N0511_R079_T33UXP_20250302T104753"
    assert decide_stac("auto", properties={}, scale=None, offset=None, item=name).counts == -1000
    floats = decide_stac("auto", properties={}, scale=None, offset=None, item=name, integer=False)
    assert (floats.scale, floats.offset) == (1.0, 0.0)


def test_geotiff_rules():
    tagged = decide_tags("auto", scale=1e-4, offset=-0.1, integer=True)
    assert (tagged.scale, tagged.offset) == (1e-4, -0.1)
    bare = decide_tags("auto", scale=1.0, offset=0.0, integer=True)
    assert (bare.scale, bare.offset, bare.doubt) == (1e-4, 0.0, None)
    assert decide_tags("auto", scale=1.0, offset=0.0, integer=False).scale == 1.0
    assert decide_tags("auto", scale=1.0, offset=0.0, integer=True, baseline="04.00").counts == -1000
    named = decide_tags("auto", scale=1.0, offset=0.0, integer=True, name="S2A_MSIL2A_20220310T103749_N0400_B02.tif")
    assert named.offset == 0
    assert "04.00" in named.doubt


def test_good_values_pass():
    assert check_counts(land(), offset=0) is None
    assert check_counts(land(1000), offset=-1000) is None
    assert check_counts({}, offset=0) is None
    assert check_counts({"B02": np.zeros(5000)}, offset=0) is None, "nothing but nodata says nothing"
    cloud = {band: rng.integers(3000, 9000, 5000) for band in ("B02", "B04")}
    assert check_counts(cloud, offset=0) is None, "all cloud is not an offset"


def test_values_that_look_shifted():
    warning = check_counts(land(1000), offset=0)
    assert "--offset -1000" in warning
    with_nodata = land(1000)
    for band in with_nodata.values():
        band[:2000] = 0
    assert "--offset -1000" in check_counts(with_nodata, offset=0), "nodata must not hide it"


def test_values_corrected_twice():
    warning = check_counts(land(), offset=-1000)
    assert "become negative" in warning
    assert "--offset none" in warning


def test_the_cirrus_band_tells_in_a_desert():
    """Nothing dark on the ground, as at the top of the atmosphere over sand: B10 alone knows."""
    desert = {"B02": rng.integers(1100, 1800, 5000), "B12": rng.integers(3000, 6000, 5000)}
    cirrus = rng.integers(5, 30, 5000)
    assert "--offset -1000" in check_counts(desert, offset=0)
    assert check_counts({**desert, "B10": cirrus}, offset=0) is None
    assert check_counts(desert, offset=-1000) is None
    assert "--offset none" in check_counts({**desert, "B10": cirrus}, offset=-1000)
    assert check_counts({**{b: a + 1000 for b, a in desert.items()}, "B10": cirrus + 1000}, offset=-1000) is None


@pytest.mark.parametrize("floor", [0, 1])
def test_values_corrected_twice_and_clipped(floor):
    clipped = {band: np.maximum(array - 1000, floor) for band, array in land().items()}
    assert "subtracted twice" in check_counts(clipped, offset=0)


def test_black_water_in_the_infrared_is_no_clipping():
    water = land()
    water["B12"] = np.ones(5000)
    assert check_counts(water, offset=0) is None


@dataclass(frozen=True)
class Fixed:
    """A source that holds counts."""

    counts: np.ndarray
    coding: ValueCoding
    bands: tuple[str, ...] = ("B02", "B04")
    name: str = "scene"
    date: datetime | None = None
    reads: list[int] = field(default_factory=list)

    @property
    def grid(self) -> Grid:
        return Grid("", (1, 0, 0, 0, -1, 0), self.counts.shape[2], self.counts.shape[1])

    def read(self, window, *, bands, grid):
        self.reads.append(window.height * window.width)
        part = self.counts[[self.bands.index(band) for band in bands]][:, *window.slices]
        valid = (part != 0).all(0)
        return np.where(valid, part * self.coding.scale + self.coding.offset, 0).astype(np.float32), valid

    def read_mask(self, window, *, grid):
        return None


def test_a_source_is_checked_on_a_sample():
    counts = rng.integers(1100, 2500, (2, 900, 700))
    counts[:, :300] = 0
    raw = Fixed(counts, ValueCoding("uint16", 1e-4, 0.0, 0))
    assert check_source(raw).startswith("scene: no value is below 11")
    assert sum(raw.reads) < 0.2 * counts.size, "a sample, not the scene"
    assert check_source(Fixed(counts, ValueCoding("uint16", 1e-4, -0.1, 0))) is None
    assert "negative" in check_source(Fixed(counts - 1000 * (counts > 0), ValueCoding("uint16", 1e-4, -0.1, 0)))
    clipped = counts.copy()
    clipped[0, 300:, ::2] = 0
    assert "subtracted twice" in check_source(Fixed(clipped, ValueCoding("uint16", 1e-4, 0.0, 0)))
    assert check_source(Fixed(counts, ValueCoding("float32", 1.0, 0.0, 0))) is None


def test_sample_windows_stay_inside():
    for height, width in ((1, 1), (10, 500), (64, 64), (10980, 10980)):
        windows = sample_windows(height, width)
        assert 1 <= len(windows) <= 9
        assert all(w.row + w.height <= height and w.col + w.width <= width and w.height and w.width for w in windows)
