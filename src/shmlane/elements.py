"""BYTES tensors: strings and bytes, one after another, each behind its length.

Owns that format, which is the server's in shared memory and over the wire: for each
element its length as a little-endian uint32, then its bytes; str is UTF-8. Every byte
arrives as given, NUL too. Refuses to guess: where NumPy has hidden what was meant, and
where a length leads out of its memory.
"""

from __future__ import annotations

import math
from itertools import chain
from struct import Struct
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .errors import ProtocolError, TensorMismatch

Shape = tuple[int, ...]

_LENGTH = Struct("<I")
_MAX_LENGTH = 0xFFFFFFFF
_KINDS = (str, bytes, bytearray, memoryview)
# As many as NumPy ever allowed; a list that contains itself has no end.
_MAX_DIMENSIONS = 64


class Elements:
    """What is to be written into one BYTES tensor: checked, measured, not yet copied.

    nbytes: bytes of all elements with their lengths. What was given must not change
    before it is written.
    """

    __slots__ = ("_items", "_rows", "nbytes", "shape")

    def __init__(
        self,
        shape: Shape,
        items: list[Any],
        *,
        nbytes: int,
        rows: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.shape = shape
        self.nbytes = nbytes
        self._items = items
        # Instead of items: elements of one length, one a row.
        self._rows = rows

    @classmethod
    def of(cls, source: object, *, name: str, cast: bool = False) -> Elements:
        """The elements of a str, of bytes, of nested lists of them, or of an array.

        name: the input, for errors. cast: take NumPy's `S` and `U` elements as NumPy
        shows them, even where zeros at their ends may have been data. Raises
        `TensorMismatch`.
        """
        if isinstance(source, (*_KINDS, list, tuple)):
            return cls._of_items(*_flat(source, name), name)
        if isinstance(source, np.ma.MaskedArray) and np.ma.is_masked(source):
            # As a list it has None in the places that are masked.
            return cls._of_items(*_flat(source.tolist(), name), name)
        if hasattr(source, "__array__"):
            return cls._of_array(np.asarray(source), name, cast=cast)
        raise _mismatch(name, f"given was {type(source).__name__}.")

    @classmethod
    def _of_array(cls, array: npt.NDArray[Any], name: str, *, cast: bool) -> Elements:
        kind = array.dtype.kind
        if kind not in "SUOT":
            raise _mismatch(name, f"given was {array.dtype}.")
        if kind in "SU" and array.size:
            lengths = np.char.str_len(array)
            width = array.dtype.itemsize // (4 if kind == "U" else 1)
            if not cast and lengths.max() < width:
                raise _hidden(name, array, int(lengths.max()))
            if kind == "S" and lengths.min() == width > 0:
                return cls._of_rows(array, width)
        return cls._of_items(array.reshape(-1).tolist(), array.shape, name)

    @classmethod
    def _of_rows(cls, array: npt.NDArray[np.bytes_], width: int) -> Elements:
        flat = np.ascontiguousarray(array).reshape(-1)
        rows = flat.view(np.uint8).reshape(array.size, width)
        nbytes = array.size * (_LENGTH.size + width)
        return cls(array.shape, [], nbytes=nbytes, rows=rows)

    @classmethod
    def _of_items(cls, items: list[Any], shape: Shape, name: str) -> Elements:
        if not set(map(type, items)) <= {bytes}:
            items = [
                _as_bytes(item, index, shape, name) for index, item in enumerate(items)
            ]
        lengths = list(map(len, items))
        if max(lengths, default=0) > _MAX_LENGTH:
            longest = lengths.index(max(lengths))
            raise _too_long(name, _place(longest, shape), lengths[longest])
        return cls(shape, items, nbytes=_LENGTH.size * len(items) + sum(lengths))

    def write_into(self, view: memoryview) -> None:
        """Write all elements to the start of `view`: writable bytes, `nbytes` or more.

        Nothing is joined first: each element is copied once.
        """
        if self._rows is not None:
            _write_rows(self._rows, view[: self.nbytes])
            return
        put_length = _LENGTH.pack_into
        start = 0
        for item in self._items:
            length = len(item)
            put_length(view, start, length)
            start += 4
            end = start + length
            view[start:end] = item
            start = end

    def __repr__(self) -> str:
        return f"<Elements {list(self.shape)} of {self.nbytes} bytes>"


def _write_rows(rows: npt.NDArray[np.uint8], view: memoryview) -> None:
    count, width = rows.shape
    out = np.frombuffer(view, np.uint8).reshape(count, _LENGTH.size + width)
    out[:, : _LENGTH.size] = np.frombuffer(_LENGTH.pack(width), np.uint8)
    out[:, _LENGTH.size :] = rows


def decode(view: memoryview, shape: Shape) -> npt.NDArray[np.object_]:
    """The elements at the start of `view`, bytes of a server's, as copies.

    Raises `ProtocolError` where there are fewer than the shape says.
    """
    count = math.prod(shape)
    _check_count(view, count)
    get_length = _LENGTH.unpack_from
    end = len(view)
    start = 0
    items = []
    # As `count_bytes`, in one pass: this is most of what a result of strings costs.
    for number in range(count):
        if start + 4 > end:
            _ends_early(view, count, number)
        (length,) = get_length(view, start)
        start += 4
        stop = start + length
        if stop > end:
            _ends_early(view, count, number)
        items.append(bytes(view[start:stop]))
        start = stop
    array = np.empty(count, object)
    array[:] = items
    return array.reshape(shape)


def count_bytes(view: memoryview, count: int) -> int:
    """Bytes of `count` elements, with their lengths, at the start of `view`.

    Raises `ProtocolError` where there are fewer.
    """
    _check_count(view, count)
    get_length = _LENGTH.unpack_from
    end = len(view)
    start = 0
    for number in range(count):
        if start + 4 > end:
            _ends_early(view, count, number)
        start += 4 + get_length(view, start)[0]
        if start > end:
            _ends_early(view, count, number)
    return start


def _check_count(view: memoryview, count: int) -> None:
    """Before any element is looked at: a server may claim any number of them."""
    if count * _LENGTH.size > len(view):
        _ends_early(view, count, len(view) // _LENGTH.size)


def _ends_early(view: memoryview, count: int, number: int) -> NoReturn:
    raise ProtocolError(
        f"a BYTES tensor of {count} elements has only {len(view)} bytes, which end"
        f" before or in element {number}.",
        count=count,
        nbytes=len(view),
    )


def _flat(source: Any, name: str) -> tuple[list[Any], Shape]:
    """All elements of nested lists in C order, and the shape of the nest."""
    items = [source]
    shape: Shape = ()
    while items and isinstance(items[0], (list, tuple)):
        size = len(items[0])
        for index, item in enumerate(items):
            if not isinstance(item, (list, tuple)):
                raise _not_an_element(name, _place(index, shape), item, "a list")
            if len(item) != size:
                raise _ragged(name, _place(index, shape), len(item), size)
        shape = (*shape, size)
        if len(shape) > _MAX_DIMENSIONS:
            limit = f"{_MAX_DIMENSIONS} dimensions"
            raise _mismatch(name, f"given were lists in lists, of more than {limit}.")
        items = list(chain.from_iterable(items))
    return items, shape


def _as_bytes(item: Any, index: int, shape: Shape, name: str) -> bytes | memoryview:
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeEncodeError as error:
            place = _place(index, shape)
            raise _mismatch(name, f"{place} has no UTF-8 form: {error}.") from error
    if isinstance(item, bytes):
        return bytes(item)
    if isinstance(item, (bytearray, memoryview)):
        return _raw(item, index, shape, name)
    raise _not_an_element(name, _place(index, shape), item, "str or bytes")


def _raw(
    item: bytearray | memoryview, index: int, shape: Shape, name: str
) -> bytes | memoryview:
    # A view keeps a bytearray from changing its length before it is written.
    view = memoryview(item)
    if view.nbytes > _MAX_LENGTH:
        raise _too_long(name, _place(index, shape), view.nbytes)
    # Nothing cannot be cast.
    if view.nbytes and view.c_contiguous:
        return view.cast("B")
    return view.tobytes()


def _place(index: int, shape: Shape) -> str:
    """How a message names the element of that number in C order."""
    if not shape:
        return "it"
    place = ", ".join(str(each) for each in np.unravel_index(index, shape))
    return f"element [{place}]"


def _mismatch(name: str, what: str, hint: str = "") -> TensorMismatch:
    return TensorMismatch(
        f"input {name!r} takes BYTES (str or bytes); {what}",
        hint=hint or "Give a str, bytes, or lists or an array of them.",
        tensor=name,
    )


def _not_an_element(name: str, place: str, item: object, wanted: str) -> TensorMismatch:
    return _mismatch(name, f"{place} is of type {type(item).__name__}, not {wanted}.")


def _ragged(name: str, place: str, length: int, first: int) -> TensorMismatch:
    return _mismatch(
        name,
        f"{place} is a list of {length}, while the first of its kind has {first}.",
        "All lists of one depth must have one length.",
    )


def _too_long(name: str, place: str, length: int) -> TensorMismatch:
    return _mismatch(
        name,
        f"{place} has {length} bytes.",
        f"One element can have at most {_MAX_LENGTH} bytes.",
    )


def _hidden(name: str, array: npt.NDArray[Any], longest: int) -> TensorMismatch:
    return _mismatch(
        name,
        f"given was {array.dtype}, whose longest element seems to have {longest}"
        f" {'characters' if array.dtype.kind == 'U' else 'bytes'}: NumPy does not tell"
        " whether zeros at the end are data.",
        "Give a list or an array of dtype object; or drop such zeros with cast=True.",
    )
