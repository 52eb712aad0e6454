"""Datatypes: their NumPy types, and bfloat16 without a package that has it."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane.datatypes import BYTES, DTYPES, bfloat16_bits

# The KServe v2 protocol's own table of datatypes and their sizes.
SIZES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BF16": 2,
}
INFINITY = 0x7F80

# Gives the interpreter another look at what is installed.
WITHOUT_ML_DTYPES = """
import sys
sys.modules["ml_dtypes"] = None
from shmlane.datatypes import DTYPES, bfloat16_bits
print(DTYPES["BF16"].name, bfloat16_bits([1.5, -0.0]).tolist())
"""


def value(bits: int) -> Fraction:
    """The number that a finite bfloat16 is; an infinity is what would follow."""
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    if exponent:
        mantissa |= 0x80
    magnitude = mantissa * Fraction(2) ** (max(exponent, 1) - 134)
    return -magnitude if bits & 0x8000 else magnitude


def nearest(number: Fraction) -> int:
    """The bits of the bfloat16 nearest to a positive number, ties to even."""
    low, high = 0, INFINITY
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= number else (low, middle)
    below, above = number - value(low), value(high) - number
    return low if (below, low % 2) < (above, high % 2) else high


def test_every_datatype_of_fixed_size_has_a_numpy_type_of_that_size() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == SIZES
    assert BYTES not in DTYPES


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        # Half a unit of the last place above an even and above an odd neighbour.
        (1 + 2**-8, 0x3F80),
        (1 + 3 * 2**-8, 0x3F82),
        (float("inf"), INFINITY),
        (float("-inf"), 0xFF80),
        (3.4e38, INFINITY),
        (1e300, INFINITY),
        (-1e300, 0xFF80),
        # The smallest number there is, its half, and what is just more than the half.
        (2.0**-133, 0x0001),
        (2.0**-134, 0x0000),
        (2.0**-134 * (1 + 2**-50), 0x0001),
        (5e-324, 0x0000),
    ],
)
def test_a_number_is_rounded_to_the_nearest_with_ties_to_even(
    number: float, bits: int
) -> None:
    assert bfloat16_bits(number) == bits
    assert bfloat16_bits([[number]]).tolist() == [[bits]]


def test_a_tie_is_told_from_what_float32_would_round_to_it() -> None:
    number = np.float64(1 + 2**-8 + 2**-40)
    assert number.astype(np.float32) == 1 + 2**-8
    assert bfloat16_bits(number) == 0x3F81
    assert bfloat16_bits(1 + 3 * 2**-8 - 2**-40) == 0x3F81


@pytest.mark.parametrize("sign", [1, -1])
def test_a_tie_is_told_from_what_float64_would_round_to_it(sign: int) -> None:
    tie = 2**62 + 2**54
    bits = [int(bfloat16_bits(np.int64(sign * (tie + more)))) for more in (-1, 0, 1)]
    even, above = 0x5E80, 0x5E81
    assert [each & 0x7FFF for each in bits] == [even, even, above]
    assert {each >> 15 for each in bits} == {int(sign < 0)}


@pytest.mark.parametrize(
    "pattern", [0x7FFC0000, 0x7FF00001, 0xFFF00001, 0xFFFFFFFF, 0x7FFFFFFF]
)
def test_no_bits_of_a_nan_make_it_a_number(pattern: int) -> None:
    bits = int(bfloat16_bits(np.uint32(pattern).view(np.float32)))
    assert bits & 0x7FFF > INFINITY
    assert bits >> 15 == pattern >> 31
    wide = np.uint64(pattern << 32 | 1).view(np.float64)
    assert int(bfloat16_bits(wide)) & 0x7FFF > INFINITY


@given(st.floats(min_value=0, max_value=float(value(INFINITY - 1))))
def test_any_float_becomes_its_nearest_neighbour(number: float) -> None:
    assert bfloat16_bits(number) == nearest(Fraction(number))
    assert bfloat16_bits(-number) == nearest(Fraction(number)) | 0x8000


@given(st.integers(min_value=-(2**63), max_value=2**64 - 1))
def test_any_whole_number_becomes_its_nearest_neighbour(number: int) -> None:
    bits = nearest(Fraction(abs(number))) | (0x8000 if number < 0 else 0)
    assert bfloat16_bits(number) == bits


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.float16, ">f4"])
def test_numbers_of_any_type_and_form_are_rounded(dtype: Any) -> None:
    numbers = np.arange(24).astype(dtype).reshape(2, 3, 4).T[::-1]
    same = bfloat16_bits(numbers.astype(np.float64))
    assert bfloat16_bits(numbers).shape == numbers.shape == (4, 3, 2)
    np.testing.assert_array_equal(bfloat16_bits(numbers), same)
    assert bfloat16_bits(numbers[:0]).shape == (0, 3, 2)


def test_what_is_given_is_not_changed() -> None:
    numbers = np.array([1 + 2**-30, -3e38])
    before = numbers.copy()
    bfloat16_bits(numbers)
    np.testing.assert_array_equal(numbers, before)


@pytest.mark.parametrize("given", ["one", [object()], [[1], [2, 3]]])
def test_what_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        bfloat16_bits(given)


def test_the_package_for_bfloat16_agrees() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert DTYPES["BF16"] == bfloat16
    # Every upper half of a float32, with lower halves around the tie.
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    numbers = (
        upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    ).view(np.float32)
    with np.errstate(invalid="ignore"):
        theirs = numbers.astype(bfloat16)
    ours = bfloat16_bits(numbers)
    is_nan = np.isnan(numbers)
    np.testing.assert_array_equal(ours[~is_nan], theirs.view(np.uint16)[~is_nan])
    assert np.isnan(ours.view(bfloat16)).tolist() == is_nan.tolist()


def test_without_the_package_bfloat16_is_its_bit_patterns() -> None:
    command = [sys.executable, "-c", WITHOUT_ML_DTYPES]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told == "uint16 [16320, 32768]\n"
