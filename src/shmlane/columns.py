"""Columns of a batch as the inputs and outputs of a model, row by row.

Owns how the rows of a column become a tensor, which rows fit into one request, and how
tensors become rows again. Refuses to send anything, and to know whose columns they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import InferFailed, TensorMismatch, UsageError
from .leases import BaseLease, Result
from .metadata import Array, Shape, TensorSpec

_SHOWN_ROWS = 8


class Column:
    """One column of a batch, as the rows of one input.

    is_batch: whether rows are joined along the first dimension of the input; else one
    row is a tensor of its own, with a first dimension of 1 put before it if the input
    has that (`is_lone`).
    """

    def __init__(self, name: str, values: Any, spec: TensorSpec) -> None:
        self.name = name
        self.spec = spec
        array = values if isinstance(values, np.ndarray) else _objects(values)
        # Elements of an array of objects are rows, unless they are strings.
        self._items: list[Any] | None = None
        is_text = spec.is_bytes and not (array.size and _is_nested(array))
        if array.dtype == object and array.ndim == 1 and not is_text:
            self._items = [_row(each, spec) for each in array]
            self.shapes: list[Shape] = [each.shape for each in self._items]
        else:
            self._array = array
            self.shapes = [array.shape[1:]] * len(array)
        rank = len(spec.shape) - 1
        ranks = {len(shape) for shape in self.shapes}
        # A number or a text for each row of an input of one.
        self._is_scalar = ranks == {0} and rank == 1
        has_batch = spec.max_batch > 0 or spec.shape[:1] == (-1,)
        self.is_lone = not has_batch and spec.shape[:1] == (1,) and ranks == {rank}
        is_whole = not spec.max_batch and ranks == {rank + 1}
        self.is_batch = not (self.is_lone or is_whole)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def is_ragged(self) -> bool:
        return self._items is not None and len(set(self.shapes)) > 1

    def write(self, lease: BaseLease, places: Sequence[int], *, cast: bool) -> None:
        """These rows, all of one shape, into the input."""
        try:
            if self._items is None:
                lease.write(self.spec.name, self._part(places), cast=cast)
            else:
                self._write_items(lease, [self._items[place] for place in places], cast)
        except TensorMismatch as error:
            shape = list(self.shapes[places[0]])
            told = TensorMismatch(
                f"column {self.name!r}, with rows of shape {shape}, does not suit input"
                f" {self.spec.name!r}: {error.message}",
                hint=error.hint,
                column=self.name,
            )
            told.context |= error.context
            raise told from error

    def _part(self, places: Sequence[int]) -> Array:
        part: Array = self._array[_index(places)]
        if self._is_scalar:
            part = part[:, None]
        return part if self.is_batch or self.is_lone else part[0]

    def _write_items(self, lease: BaseLease, rows: list[Array], cast: bool) -> None:
        name, dtype = self.spec.name, self.spec.dtype
        shape = rows[0].shape
        if self._is_scalar:
            shape, rows = (1,), [row[None] for row in rows]
        if self.spec.is_bytes or any(row.dtype != dtype for row in rows):
            joined = np.stack(rows)
            whole = joined if self.is_batch or self.is_lone else joined[0]
            lease.write(name, whole, cast=cast)
        elif self.is_batch or self.is_lone:
            # Each into its place, without an array of all of them in between.
            np.stack(rows, out=lease.view(name, (len(rows), *shape)))
        else:
            lease.write(name, rows[0])


class RowRequest:
    """Some rows that make one request; their outputs go to the same places."""

    def __init__(
        self, columns: Sequence[Column], places: Sequence[int], *, cast: bool
    ) -> None:
        self._columns = columns
        self._places = places
        self._cast = cast

    @property
    def rows(self) -> str:
        """Which ones, in words."""
        first, last = self._places[0], self._places[-1]
        if first == last:
            return f"row {first} of the batch"
        if last - first == len(self._places) - 1:
            return f"rows {first} to {last} of the batch"
        some = ", ".join(map(str, self._places[:_SHOWN_ROWS]))
        more = ", …" if len(self._places) > _SHOWN_ROWS else ""
        return f"rows {some}{more} of the batch"

    def write(self, lease: BaseLease) -> None:
        for column in self._columns:
            column.write(lease, self._places, cast=self._cast)

    def read(self, result: Result, gathered: Mapping[str, Gathered]) -> None:
        is_batch = all(column.is_batch for column in self._columns)
        for name, column in gathered.items():
            values = result[name]
            if is_batch:
                self._check(name, values)
            elif column.spec.shape[:1] != (1,):
                # The tensor is what belongs to the row.
                values = values[None]
            column.put(self._places, values)

    def _check(self, name: str, values: Array) -> None:
        rows = len(self._places)
        if values.shape[:1] != (rows,):
            raise InferFailed(
                f"output {name!r} came with shape {list(values.shape)} for {rows} rows:"
                " its first dimension does not tell what belongs to which row.",
                hint="Ask for other outputs with outputs=[...], or use a Session.",
                output=name,
                shape=values.shape,
            )


class Gathered:
    """The rows of one output, put where they belong as they come."""

    def __init__(self, spec: TensorSpec, rows: int) -> None:
        self.spec = spec
        self._rows = rows
        self._whole: Array | None = None
        self._items: list[Any] | None = [None] * rows if spec.is_bytes else None

    def put(self, places: Sequence[int], values: Array) -> None:
        """`values` are copied: they may lie in shared memory."""
        if self._items is None:
            if self._whole is None:
                shape = (self._rows, *values.shape[1:])
                self._whole = np.empty(shape, values.dtype)
            if self._whole.shape[1:] == values.shape[1:]:
                self._whole[_index(places)] = values
                return
            # Rows of one shape were all that came until now.
            self._items = list(self._whole)
        for place, value in zip(places, values, strict=True):
            self._items[place] = self._row(value)

    def _row(self, value: Any) -> Any:
        if not self.spec.is_bytes:
            return value.copy()
        # One text for each row, or a list of them.
        value = np.asarray(value, object)
        return value.item() if self.spec.shape[1:] in ((), (1,)) else value.tolist()

    def array(self) -> Array:
        if self._items is not None:
            return _objects(self._items)
        if self._whole is None:
            open_shape = (max(size, 0) for size in self.spec.shape[1:])
            empty: Array = np.empty((0, *open_shape), self.spec.dtype)
            return empty
        return self._whole


def _index(places: Sequence[int]) -> slice | list[int]:
    """A range finds its rows without copying them."""
    if isinstance(places, range):
        return slice(places.start, places.stop)
    return list(places)


def _objects(items: Iterable[Any]) -> Array:
    """Anything as elements, which NumPy does not look into."""
    items = list(items)
    array: Array = np.empty(len(items), object)
    for place, item in enumerate(items):
        array[place] = item
    return array


def _is_nested(array: Array) -> bool:
    return not isinstance(array.flat[0], (str, bytes, bytearray, memoryview))


def _row(item: Any, spec: TensorSpec) -> Array:
    row: Array = np.asarray(item, object) if spec.is_bytes else np.asarray(item)
    return row


def rows_together(columns: Sequence[Column], rows: int) -> Iterator[Sequence[int]]:
    """Which rows can go together: all of them, unless shapes differ."""
    if not any(column.is_ragged for column in columns):
        yield range(rows)
        return
    groups: dict[tuple[Shape, ...], list[int]] = {}
    for row in range(rows):
        shapes = tuple(column.shapes[row] for column in columns)
        groups.setdefault(shapes, []).append(row)
    yield from groups.values()


def count_rows(columns: Sequence[Column], kept: Mapping[str, Any]) -> int:
    """How many rows all of them have, those that are only kept too."""
    if not columns:
        raise UsageError("no column of the batch feeds an input of the model.")
    lengths = {column.name: len(column) for column in columns}
    for name, values in kept.items():
        if name not in lengths:
            lengths[name] = _length(name, values)
    # One column of each length tells enough.
    firsts: dict[int, str] = {}
    for name, rows in lengths.items():
        firsts.setdefault(rows, name)
    if len(firsts) == 1:
        return firsts.popitem()[0]
    counts = ", ".join(
        f"{name!r} has {rows}{'' if place else ' rows'}"
        for place, (rows, name) in enumerate(firsts.items())
    )
    raise UsageError(
        f"column {counts}. All columns of a batch must be of one length.",
        lengths=lengths,
    )


def _length(name: str, values: Any) -> int:
    try:
        return len(values)
    except TypeError:
        raise UsageError(
            f"column {name!r} is a {type(values).__name__} without a length.",
            hint="Give an array or a list with a value for each row.",
            column=name,
        ) from None
