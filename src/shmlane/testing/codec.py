"""Tensors as bytes, as JSON and as arrays.

Owns the memory format of every datatype that NumPy has too, and of BYTES: per element
four bytes of length, little-endian, then that many bytes. Refuses to know what a model
declares.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..datatypes import DTYPES
from ..metadata import Array, Shape
from ..regions import Bytes
from .http import refused
from .json_fields import U64, is_integer

BYTES = "BYTES"
_LENGTH = struct.Struct("<I")
# Without ml_dtypes, BF16 has the NumPy type of UINT16, which keeps its name.
_NAMES = {dtype: name for name, dtype in reversed(list(DTYPES.items()))}
_NOT_AS_JSON = ("FP16", "BF16")


def is_known(datatype: str) -> bool:
    return datatype == BYTES or datatype in DTYPES


def nbytes(datatype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of fixed size."""
    return math.prod(shape) * DTYPES[datatype].itemsize


def datatype_of(array: Array) -> str | None:
    """The name of an array's datatype, None if there is none."""
    return BYTES if array.dtype.kind in "OSU" else _NAMES.get(array.dtype)


def decode(data: Bytes, datatype: str, shape: Shape) -> Array:
    """A read-only array over `data`, in place unless it is BYTES."""
    if datatype == BYTES:
        elements = np.empty(math.prod(shape), np.object_)
        elements[:] = split_elements(data)[0]
        return elements.reshape(shape)
    array: Array = data[: nbytes(datatype, shape)].view(DTYPES[datatype])
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


def encode(array: Array) -> bytes:
    """The bytes of an array in row-major order."""
    if datatype_of(array) != BYTES:
        return array.tobytes()
    elements = [
        each.encode() if isinstance(each, str) else bytes(each)
        for each in array.ravel().tolist()
    ]
    return b"".join(_LENGTH.pack(len(each)) + each for each in elements)


def split_elements(data: Bytes) -> tuple[list[bytes], int, int | None]:
    """The whole elements of BYTES, the bytes left over, and what the next one wants."""
    raw = data.tobytes()
    elements: list[bytes] = []
    position = 0
    while position + _LENGTH.size <= len(raw):
        (length,) = _LENGTH.unpack_from(raw, position)
        start = position + _LENGTH.size
        if start + length > len(raw):
            return elements, len(raw) - start, length
        elements.append(raw[start : start + length])
        position = start + length
    return elements, len(raw) - position, None


def from_json(data: Any, name: str, datatype: str, shape: Shape) -> Bytes:
    """The bytes of a `data` field, which may be nested like the shape or flat."""
    if math.prod(shape) == 0:
        # Nothing is looked at where nothing can be.
        return np.empty(0, np.uint8)
    if datatype in _NOT_AS_JSON:
        raise refused(
            400,
            f"receiving {datatype} data via JSON is not supported. Please use the"
            f" binary data format for input {name}",
        )
    if not is_known(datatype):
        raise refused(400, f"invalid datatype for input {name}")
    values = _flat(data)
    for value in values:
        _check_value(value, datatype)
    if len(values) != math.prod(shape):
        raise refused(
            500,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        )
    return np.frombuffer(encode(_array(values, datatype)), np.uint8)


def to_json(array: Array, datatype: str) -> list[Any]:
    """The elements of an array as JSON values."""
    if datatype in _NOT_AS_JSON:
        raise refused(
            400,
            f"sending {datatype} data via JSON is not supported. Please use the binary"
            " data format for output",
            plain=True,
        )
    values: list[Any] = array.ravel().tolist()
    return [
        each.decode("utf-8", "replace") if isinstance(each, bytes) else each
        for each in values
    ]


def _flat(data: Any) -> list[Any]:
    if not isinstance(data, list):
        return [data]
    return [value for each in data for value in _flat(each)]


def _array(values: list[Any], datatype: str) -> Array:
    if datatype == BYTES:
        return np.array(values, np.object_)
    # Numbers too large for the datatype lose their upper bits, as they do in Triton.
    wide = np.array(values, DTYPES[datatype] if datatype == "UINT64" else None)
    return wide.astype(DTYPES[datatype])


def _check_value(value: Any, datatype: str) -> None:
    """The first value of a wrong kind ends the request."""
    kind = datatype.rstrip("0123456789")
    if kind == BYTES and not isinstance(value, str):
        raise refused(
            500,
            "Unable to parse JSON bytes array: attempt to access JSON non-string as"
            " string",
        )
    fits, wanted = {
        "BYTES": (True, ""),
        "BOOL": (isinstance(value, bool), "boolean as boolean"),
        "FP": (is_integer(value) or isinstance(value, float), "number as double"),
        "INT": (
            is_integer(value) and -U64 // 2 <= value < U64 // 2,
            "signed-integer as signed-integer",
        ),
        "UINT": (
            is_integer(value) and 0 <= value < U64,
            "unsigned-integer as unsigned-integer",
        ),
    }[kind]
    if not fits:
        raise refused(
            500, f"Unable to parse 'data': attempt to access JSON non-{wanted}"
        )
