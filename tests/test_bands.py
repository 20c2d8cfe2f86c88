"""Names as files write them."""

from __future__ import annotations

import pytest

from sader.bands import BAND_LISTS, band_in_filename, canonical, names_of_file, parse_bands
from sader.errors import BandError


@pytest.mark.parametrize(
    ("text", "band"),
    [
        ("B2", "B02"), ("B02", "B02"), ("b02", "B02"), ("Band 2", "B02"), ("band_02", "B02"), ("blue", "B02"),
        ("Blue", "B02"), ("Red", "B04"), ("nir", "B08"), ("NIR", "B08"), ("B8A", "B8A"), ("b8a", "B8A"), ("B8", "B08"),
        ("nir08", "B8A"), ("B11", "B11"), ("swir16", "B11"), ("B02_10m", "B02"), ("B4 (red)", "B04"),
        ("B4, central wavelength 665 nm", "B04"), ("Red edge 2", "B06"), ("Coastal aerosol", "B01"),
        ("NDVI", None), ("", None), ("B13", None), ("B123", None), ("Bx", None), ("8", None), ("infrared thing", None),
    ],
)  # fmt: skip
def test_one_name_for_all_spellings(text, band):
    assert canonical(text) == band


def test_presets_and_lists():
    assert parse_bands("red,green,blue,nir") == ("B04", "B03", "B02", "B08")
    for word in ("rgbn", "BGRN"):
        with pytest.raises(BandError, match=r"which is read in two ways.*red,green,blue,nir or blue,green,red,nir"):
            parse_bands(word)
    assert parse_bands("GRN") == ("B03", "B04", "B08")
    assert parse_bands("12-band") == BAND_LISTS["l2a"]
    assert "B10" not in parse_bands("l2a")
    assert len(parse_bands("13-band")) == 13
    assert parse_bands("blue, B3,Red , nir") == ("B02", "B03", "B04", "B08")
    assert parse_bands(["B02", "thermal"]) == ("B02", "thermal")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rgbm", r"--bands is 'rgbm', which is no named list and no band name; did you mean rgb"),
        ("", "--bands is empty"),
        ("B02,blue,B04", "names B02 more than once"),
    ],
)
def test_wrong_lists_are_refused(text, message):
    with pytest.raises(BandError, match=message):
        parse_bands(text)


def test_positions_are_no_names():
    assert names_of_file(["Band 1", "Band 2", "Band 3"]) is None
    assert names_of_file([None, None]) is None
    assert names_of_file(["Band 2", "Band 3", "Band 4", "Band 8"]) == ("B02", "B03", "B04", "B08")
    assert names_of_file(["B02", None, "slope"]) == ("B02", "unnamed 2", "slope")
    assert names_of_file(["B02", "blue"]) == ("B02", "blue (band 2)")


@pytest.mark.parametrize(
    ("stem", "found"),
    [
        ("S2_20LMR_2022-03-10_B02", ("B02", "S2_20LMR_2022-03-10")),
        ("T32TMS_20220310T101021_B8A_20m", ("B8A", "T32TMS_20220310T101021")),
        ("B04", ("B04", "")),
        ("2022-03-10.B3", ("B03", "2022-03-10")),
        ("S2B_20220310", None),
        ("T32UB02", None),
    ],
)
def test_the_band_in_a_file_name(stem, found):
    assert band_in_filename(stem) == found
