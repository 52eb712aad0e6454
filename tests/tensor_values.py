"""Tensors of every datatype and size, and whether one is exactly what another was.

Owns what the tests put into tensors: all bit patterns, so that nothing which only looks
right is taken for right. Refuses to know models and servers.
"""

from __future__ import annotations

import math
import zlib
from itertools import pairwise

import numpy as np

from tests.sessions import Array

Shape = tuple[int, ...]

# NumPy's types of the same memory format; BF16 as bit patterns, BYTES as objects.
STORED: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(np.uint16),
}
SHAPES: dict[str, Shape] = {
    "one element": (1, 1, 1),
    "odd size": (3, 5, 7),
    "empty": (2, 0, 3),
    "large": (4, 101, 251),
}
_LONGEST_TEXT = 60


def tensor(datatype: str, shape: Shape, *, seed: object = 0) -> Array:
    """Values that differ from seed to seed, NaNs, NULs and empty strings among them."""
    random = np.random.default_rng(zlib.crc32(repr((datatype, seed)).encode()))
    count = math.prod(shape)
    if datatype == "BYTES":
        ends = random.integers(0, _LONGEST_TEXT, count).cumsum().tolist()
        data = random.bytes(ends[-1] if ends else 0)
        array = np.empty(count, np.object_)
        for i, (start, end) in enumerate(pairwise([0, *ends])):
            array[i] = data[start:end] + b"\0" * (i % 3)
        return array.reshape(shape)
    if datatype == "BOOL":
        return random.random(shape) < 0.5
    dtype = STORED[datatype]
    data = random.bytes(count * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def nbytes(array: Array) -> int:
    """Bytes of a tensor as the server has it."""
    if array.dtype != np.object_:
        return array.nbytes
    return sum(4 + len(element) for element in array.flat)


def assert_same(received: Array, sent: Array) -> None:
    """Shape, datatype and every bit are those of `sent`."""
    assert received.shape == sent.shape
    if sent.dtype == np.object_:
        assert received.dtype == np.object_
        assert all(type(element) is bytes for element in received.flat)
        assert received.tolist() == sent.tolist()
        return
    is_bfloat16 = received.dtype.name == "bfloat16" and sent.dtype == np.uint16
    assert received.dtype == sent.dtype or is_bfloat16
    # Compared as bytes: a NaN is not equal to itself.
    assert received.tobytes() == sent.tobytes()
