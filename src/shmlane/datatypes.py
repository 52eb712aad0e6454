"""KServe v2 datatypes and the NumPy types of the same memory format.

Owns the table of them, and bfloat16, which NumPy does not have: where `ml_dtypes` is
installed BF16 is its `bfloat16`, else the bit patterns as uint16. Everywhere, uint16
given for BF16 means bit patterns: installing a package changes no program. Refuses to
decide what may be converted into what.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    # 4 ms. Looked for at once, so that a datatype means one thing while a process runs.
    from ml_dtypes import bfloat16 as _bfloat16
except ImportError:
    _BF16: np.dtype[Any] = np.dtype(np.uint16)
else:
    _BF16 = np.dtype(_bfloat16)

# The datatype whose elements differ in size; `elements` has its format.
BYTES = "BYTES"

# Datatypes whose elements all have the same size.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "UINT8": np.dtype(np.uint8),
        "UINT16": np.dtype(np.uint16),
        "UINT32": np.dtype(np.uint32),
        "UINT64": np.dtype(np.uint64),
        "INT8": np.dtype(np.int8),
        "INT16": np.dtype(np.int16),
        "INT32": np.dtype(np.int32),
        "INT64": np.dtype(np.int64),
        "FP16": np.dtype(np.float16),
        "FP32": np.dtype(np.float32),
        "FP64": np.dtype(np.float64),
        "BF16": _BF16,
    }
)

# float64 holds all whole numbers up to here; what is larger loses bits of these.
_EXACT_IN_FLOAT64 = 1 << 53
_LOST_BITS = (1 << 12) - 1


def bfloat16_bits(array: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """The numbers of `array` as bfloat16 bit patterns, of the same shape.

    Each is rounded once, to the nearest, ties to even. NaN stays NaN; what is too large
    becomes an infinity. Raises `TypeError` or `ValueError` for what is no number.
    """
    bits = _float32_rounded_to_odd(np.asarray(array)).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Of a NaN only the upper half is kept, made quiet: the lower could be all it has.
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _float32_rounded_to_odd(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """An array of its own to round further as if nothing had been rounded yet.

    Where float32 lacks the bits, its last bit says that something follows (rounding to
    odd), so that no number just beside a tie is taken for the tie.
    """
    if np.can_cast(numbers.dtype, np.float32):
        return np.array(numbers, np.float32, order="C")
    wide = _as_float64(numbers)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = np.array(wide, np.float32, order="C")
    bits = narrow.view(np.uint32)
    bits -= np.abs(narrow) > np.abs(wide)
    bits |= (narrow != wide) & ~np.isnan(wide)
    return narrow


def _as_float64(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if numbers.dtype.kind in "iu" and numbers.dtype.itemsize == 8:
        is_large = (numbers >= _EXACT_IN_FLOAT64) | (numbers <= -_EXACT_IN_FLOAT64)
        one = numbers.dtype.type(_LOST_BITS + 1)
        lost = numbers.dtype.type(_LOST_BITS)
        odd = (numbers & ~lost) | (((numbers & lost) != 0) * one)
        numbers = np.where(is_large, odd, numbers)
    return np.asarray(numbers, np.float64)
