"""What is done to values: the formulas of `sader.inference.values`, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from sader.errors import DataError
from sader.inference.values import ValueCoding, coding_of, decode_array, encode_array

COUNTS = ValueCoding("uint16", 1e-4, 0.0, 0.0)
SHIFTED = ValueCoding("uint16", 1e-4, -0.1, 0.0)


def test_decode_is_scale_and_offset_and_zero_is_nothing():
    numbers = np.array([[[0, 1, 1000, 10000, 65535]]], np.uint16)
    values, valid = decode_array(numbers, [SHIFTED])
    assert valid.tolist() == [[False, True, True, True, True]]
    np.testing.assert_allclose(values[0, 0, 1:], [-0.0999, 0.0, 0.9, 6.4535], atol=1e-6)
    assert values.dtype == np.float32
    assert values[0, 0, 0] == 0


def test_a_pixel_needs_all_its_bands_and_each_band_has_its_coding():
    numbers = np.array([[[0, 2000, 3000]], [[2000, 7, 3000]]], np.uint16)
    values, valid = decode_array(numbers, [SHIFTED, ValueCoding("uint16", 2e-4, 0.0, 7.0)])
    assert valid.tolist() == [[False, False, True]]
    assert values[:, 0, :2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(values[:, 0, 2], [0.2, 0.6], rtol=1e-6)


def test_decoding_leaves_the_stored_numbers_alone():
    numbers = np.full((2, 3, 3), 0.5)  # float64, the type that is computed in
    decode_array(numbers, [ValueCoding("float64", 2.0, 0.1, None)] * 2)
    assert (numbers == 0.5).all()


@pytest.mark.parametrize("coding", [COUNTS, SHIFTED, ValueCoding("int16", 1e-4, 0.0, -9999.0)])
def test_every_count_survives_the_round_trip(coding):
    limits = np.iinfo(coding.dtype)
    numbers = np.arange(limits.min, limits.max + 1).astype(coding.dtype)[None, None]
    values, valid = decode_array(numbers, [coding])
    again = encode_array(values, valid, coding)
    np.testing.assert_array_equal(again, numbers)


def test_a_valid_result_never_becomes_nodata_and_never_wraps():
    image = np.array([[[-0.5, 0.0, 0.00004, 7.0, np.nan]]], np.float32)
    valid = np.array([[True, True, True, True, False]])
    assert encode_array(image, valid, COUNTS).ravel().tolist() == [1, 1, 1, 65535, 0]
    top = ValueCoding("uint16", 1e-4, 0.0, 65535.0)
    assert encode_array(image, valid, top).ravel().tolist() == [0, 0, 0, 65534, 65535]
    signed = ValueCoding("int16", 1e-4, 0.0, -1.0)
    assert encode_array(np.full((1, 1, 1), -1e-4, np.float32), np.ones((1, 1), bool), signed).item() == 0
    floats = ValueCoding("float32", 1.0, 0.0, 0.0)
    made = encode_array(np.zeros((1, 1, 1), np.float32), np.ones((1, 1), bool), floats)
    assert made.item() != 0.0
    assert abs(made.item()) < 1e-30


def test_not_finite_is_never_data():
    for nodata in (None, float("nan"), -9999.0):
        coding = ValueCoding("float32", 1.0, 0.0, nodata)
        _, valid = decode_array(np.array([[[np.nan, np.inf, -np.inf, 0.2]]], np.float32), [coding])
        assert valid.tolist() == [[False, False, False, True]]


def coding(**changes):
    return coding_of("a.tif", **{"dtype": "uint16", "scale": None, "offset": None, "nodata": None} | changes)


def test_what_a_file_does_not_say():
    assert coding() == ValueCoding("uint16", 1e-4, 0.0, 0.0)
    assert coding(scale=2e-4, offset=-0.2, nodata=65535) == ValueCoding("uint16", 2e-4, -0.2, 65535.0)
    floats = coding(dtype="float64", highest=0.8)
    assert (floats.scale, np.isnan(floats.nodata)) == (1.0, True)
    assert coding(dtype="float32", highest=4000.0).scale == 1e-4
    assert coding(nodata=-9999).nodata == 0.0, "no unsigned count can be -9999"
    assert coding(nodata=float("nan")).nodata == 0.0
    assert coding(dtype="int16", nodata=-9999).nodata == -9999.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "complex64"}, "a.tif holds complex64 values; expected real reflectance"),
        ({"dtype": "int8"}, "a.tif holds int8 values without a scale"),
        ({"dtype": "uint8"}, "Eight bits are a picture"),
        ({"dtype": "uint64", "scale": 1e-4}, "a.tif holds uint64 values; expected uint16"),
        ({"scale": -1.0}, "scale -1; expected a positive number"),
        ({"scale": 1e-4, "offset": float("nan")}, "offset nan; expected a finite number"),
    ],
)
def test_types_that_hold_no_reflectance_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        coding(**changes)


def test_eight_bits_with_a_scale_are_taken():
    assert coding(dtype="int8", scale=0.004).scale == 0.004
