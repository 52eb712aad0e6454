"""How a stream is to run: what callers say of it, checked.

Owns the arguments that blocking and asynchronous streams take, and what holds where one
is left out. Refuses to begin anything.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from .errors import UsageError
from .leases import BaseLease, Result
from .metadata import Array
from .options import RequestOptions
from .outcomes import Outcomes, Progress
from .timing import Timeout

L = TypeVar("L", bound=BaseLease)
I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")


class StreamPlan(Generic[L, I, R]):
    """How a stream is to run: its arguments, checked.

    is_plain: items are {name: array}, and `write` does nothing but write all of them.
    """

    def __init__(
        self,
        items: object,
        *,
        slots: int,
        write: Callable[[L, I], object] | None,
        read: Callable[[I, Result], R] | None,
        in_flight: int | None,
        ordered: bool,
        return_exceptions: bool,
        workers: int,
        progress: Progress | None,
        timeout: Timeout,
        options: RequestOptions | None,
    ) -> None:
        _check_function("write", write, called="with a lease and an item")
        _check_function("read", read, called="with an item and its Result")
        _check_function("progress", progress, called="as progress(done, total)")
        self.is_plain = write is None
        self.write: Callable[[L, Any], object] = write or _write_all
        self.read: Callable[[Any, Result], Any] = read or _copy
        self.in_flight = _checked_in_flight(in_flight, slots)
        self.workers = _checked_count("workers", workers, least=0)
        self.timeout = timeout
        self.options = options
        self.outcomes: Outcomes[R] = Outcomes(
            self.in_flight,
            ordered=ordered,
            return_exceptions=return_exceptions,
            progress=progress,
            total=_length(items),
        )
        if options is not None and not isinstance(options, RequestOptions):
            raise UsageError(
                f"options is a {type(options).__name__}: give RequestOptions(...)."
            )
        if options is not None and options.has_sequence:
            raise UsageError(
                "the steps of a sequence cannot be a stream: each has to wait for the"
                " one before.",
                hint="Use lease.infer(options=...) for each step.",
            )

    def threads(self) -> ThreadPoolExecutor | None:
        """Threads to run `write` and `read` in, if there are to be some."""
        if not self.workers:
            return None
        return ThreadPoolExecutor(self.workers, thread_name_prefix="shmlane-stream")


def checked_item(item: Any) -> Mapping[str, Any]:
    """An item that nobody said how to write: it has names, or this raises."""
    if not hasattr(item, "items"):
        raise UsageError(
            f"an item of the stream is a {type(item).__name__}, not {{name: array}}.",
            hint="Say how it fills the inputs: stream(items, write=function), called"
            " with a lease and the item.",
        )
    named: Mapping[str, Any] = item
    return named


def _write_all(lease: BaseLease, item: object) -> None:
    for name, array in checked_item(item).items():
        lease.write(name, array)


def _copy(_item: object, result: Result) -> dict[str, Array]:
    return result._take()


def _check_function(name: str, function: object, *, called: str) -> None:
    if function is None:
        return
    if not callable(function):
        raise UsageError(
            f"{name} is a {type(function).__name__}: give a function, which is called"
            f" {called}."
        )
    if inspect.iscoroutinefunction(function):
        raise UsageError(
            f"{name} is a coroutine function, whose result nobody would await.",
            hint="Give a plain function; stream(..., workers=n) runs write and read in"
            " threads, where they may wait.",
        )


def _length(items: object) -> int | None:
    if not isinstance(items, Sized):
        return None
    try:
        return len(items)
    except TypeError:
        # As a progress bar, or another stream, over a generator says it.
        return None


def _checked_in_flight(in_flight: int | None, slots: int) -> int:
    if not slots:
        raise UsageError(
            "this session has claimed no slots, which a stream needs.",
            hint="Claim some: Session.attach(handle, slots=1).",
        )
    count = slots if in_flight is None else _checked_count("in_flight", in_flight)
    if count > slots:
        raise UsageError(
            f"in_flight={count}: the session has {slots} slots, and each request in"
            " flight needs one.",
            hint=f"Give the session more: Session(..., slots={count}).",
            in_flight=count,
            slots=slots,
        )
    return count


def _checked_count(name: str, value: int, *, least: int = 1) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise UsageError(f"{name}={value!r}: give a whole number, {least} or more.")
    return count
