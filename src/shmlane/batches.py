"""Columns in, columns out: a model as a function of batches, such as Ray Data maps.

Owns which column feeds which input, how rows are cut into requests, and how outputs
become columns. Refuses to know what calls it: a dictionary of arrays is all that it
takes and gives, so that nothing of Ray is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from .columns import Column, Gathered, RowRequest, count_rows, rows_together
from .errors import PoolClosed, UsageError
from .metadata import Array, ModelMetadata, lookup
from .session import Session

Batch = dict[str, Array]


class BatchInfer:
    """A model for `Dataset.map_batches`: takes a batch of columns, adds its outputs.

        dataset.map_batches(
            BatchInfer,
            fn_constructor_kwargs={"url": "localhost:8000", "model": "yolov8"},
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=2),
        )

    url: where the server is, as for `Session`; "localhost:8000" is the one of the node
        on which an actor runs. Or a function without arguments that tells it there.
    inputs: the column that feeds each input, by input; those of the same name if not
        given. An optional input without a column is left out.
    outputs: the column for each output, by output; or their names. All if not given.
    keep: the columns that go on beside the outputs; all if not given.
    batch_size: the most rows of one request; the model's max_batch_size if not given,
        and all rows where it has none.
    cast: allow any conversion of datatypes that NumPy knows.
    session: further options of `Session`.

    A batch of more rows becomes several requests. Rows of one column may differ in
    shape, as an array of dtype object; rows of one shape go together. An output whose
    rows differ comes as such an array too. A model without a batch dimension gets a
    request for each row.

    The first call opens the session, in the process that calls. Can be pickled, without
    its session. Use `with` or `close` outside of Ray; an actor that ends closes it.
    After `close` the next call opens another session; after the end of a `with` block
    calls are refused.
    """

    def __init__(
        self,
        url: str | Callable[[], str],
        model: str,
        *,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | Iterable[str] | None = None,
        keep: Iterable[str] | None = None,
        batch_size: int | None = None,
        cast: bool = False,
        **session: Any,
    ) -> None:
        self.url = url
        self.model = model
        self._inputs = dict(inputs or {})
        self._outputs = _named_outputs(outputs)
        self._keep = None if keep is None else _names("keep", keep)
        self._batch_size = _checked_batch_size(batch_size)
        self._cast = cast
        self._options = session
        self._session: Session | None = None
        # Its block has ended.
        self._is_over = False
        self._opening = threading.Lock()

    def __call__(self, batch: Mapping[str, Any]) -> Batch:
        """The columns of `batch` and those of the outputs, row by row.

        Raises `UsageError` for columns that are not there or not of one length,
        `TensorMismatch` for such as the model does not take, `PoolClosed` after the end
        of its block, and what `Session.open` and `Lease.infer` raise.
        """
        if not isinstance(batch, Mapping):
            raise UsageError(
                f"the batch is a {type(batch).__name__}, not a mapping from columns to"
                " arrays.",
                hint='With Ray, give map_batches(batch_format="numpy").',
            )
        session = self._open()
        metadata = session.metadata
        columns = self._columns(batch, metadata)
        kept = self._kept(batch)
        rows = count_rows(columns, kept)
        outputs = self._outputs or {name: name for name in metadata.outputs}
        gathered = {name: Gathered(metadata.outputs[name], rows) for name in outputs}
        _send(session, list(self._requests(columns, rows, metadata)), gathered)
        return kept | {
            column: gathered[name].array() for name, column in outputs.items()
        }

    # --- the session ------------------------------------------------------------------

    def _open(self) -> Session:
        with self._opening:
            if self._is_over:
                raise PoolClosed(
                    "this BatchInfer was closed at the end of its `with` block.",
                    hint="Call it inside the block, or make another.",
                )
            if self._session is None:
                url = self.url() if callable(self.url) else self.url
                options = dict(self._options)
                if self._outputs:
                    options["outputs"] = list(self._outputs)
                self._session = Session(url, self.model, **options)
            return self._session.open()

    def close(self) -> None:
        """Close the session; the next call opens another."""
        with self._opening:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> Self:
        with self._opening:
            self._is_over = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._opening:
            self._is_over = True
        self.close()

    def __del__(self) -> None:
        # Nobody can close what an actor made: it drops it.
        session: Session | None = getattr(self, "_session", None)
        if session is not None:
            session.close(wait=False)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_session": None, "_opening": None, "_is_over": False}
        return self.__dict__ | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opening = threading.Lock()

    # --- columns ----------------------------------------------------------------------

    def _columns(
        self, batch: Mapping[str, Any], metadata: ModelMetadata
    ) -> list[Column]:
        """What feeds each input."""
        for name in self._inputs:
            lookup(metadata.inputs, name, "input")
        columns = []
        for name, spec in metadata.inputs.items():
            column = self._inputs.get(name, name)
            if column in batch:
                columns.append(Column(column, batch[column], spec))
            elif not spec.optional or name in self._inputs:
                what = f"that feeds input {name!r}"
                raise _no_column(column, what, batch, hint=_FEED)
        return columns

    def _kept(self, batch: Mapping[str, Any]) -> Batch:
        names = batch if self._keep is None else self._keep
        for name in names:
            if name not in batch:
                raise _no_column(name, "that is to be kept", batch, hint=_KEEP)
        return {name: batch[name] for name in names}

    def _requests(
        self, columns: Sequence[Column], rows: int, metadata: ModelMetadata
    ) -> Iterator[RowRequest]:
        """The rows, cut into requests; rows of one shape go together."""
        limit = self._batch_size or metadata.max_batch_size or max(rows, 1)
        # One row is one tensor of such an input.
        if any(not column.is_batch for column in columns):
            limit = 1
        for places in rows_together(columns, rows):
            for start in range(0, len(places), limit):
                part = places[start : start + limit]
                yield RowRequest(columns, part, cast=self._cast)

    def __repr__(self) -> str:
        url = "…" if callable(self.url) else self.url
        unopened = "closed" if self._is_over else "not open"
        state = unopened if self._session is None else repr(self._session)
        return f"<BatchInfer {self.model!r} at {url}, {state}>"


def _send(
    session: Session, requests: Sequence[RowRequest], gathered: Mapping[str, Gathered]
) -> None:
    """All requests; the first error in their order ends it."""
    with session.stream(
        requests,
        write=lambda lease, request: request.write(lease),
        read=lambda request, result: request.read(result, gathered),
        return_exceptions=True,
    ) as stream:
        for request, outcome in zip(requests, stream, strict=False):
            if isinstance(outcome, Exception):
                # The stream noted which item it was; callers know rows.
                outcome.__notes__[-1] = f"This is what became of {request.rows}."
                try:
                    raise outcome
                finally:
                    # The error holds this frame, which is not to hold it in turn.
                    del outcome


_FEED = 'Say which column feeds an input: inputs={"input": "column"}.'
_KEEP = "Name one of them in keep=, or leave it out."


def _no_column(
    column: str, what: str, batch: Mapping[str, Any], *, hint: str
) -> UsageError:
    there = ", ".join(map(repr, batch)) or "none"
    return UsageError(
        f"the batch has no column {column!r} {what}; its columns: {there}.",
        hint=hint,
        column=column,
    )


def _named_outputs(outputs: Mapping[str, str] | Iterable[str] | None) -> dict[str, str]:
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return {name: name for name in _names("outputs", outputs or ())}


def _names(option: str, names: Iterable[str]) -> list[str]:
    # A lone name is also an iterable, of its letters.
    if isinstance(names, str):
        raise UsageError(f"{option}={names!r}: give a list of names.", option=option)
    return list(names)


def _checked_batch_size(size: int | None) -> int | None:
    if size is None or (type(size) is int and size > 0):
        return size
    raise UsageError(
        f"batch_size={size!r}: give a whole number above 0, or None for the model's.",
        option="batch_size",
    )
