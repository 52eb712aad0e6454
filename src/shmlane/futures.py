"""Requests whose callers hold a future in place of a thread that waits.

Owns a slot on its way from a lease through a future to its result, and what becomes of
the future. Refuses to read replies; that is the `receiver`'s.

A future waits, for the world, until its reply is there: cancelling it then always
works. The slot of a cancelled future comes back when its late reply has been read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from .exchange import Answer
from .flights import Flight
from .leases import LeaseHost, Result
from .options import RequestOptions
from .slots import Holder, Slot
from .tensors import NOTHING


class Kept(Holder):
    """A slot that left its lease; whoever drops this gives it back, in silence."""

    __slots__ = ("_host",)

    def __init__(self, host: LeaseHost) -> None:
        self._hold = [None]
        self._host = host

    def release(self) -> None:
        """Give the slot back; doing so again does nothing."""
        if self.held is not None:
            self._host._give_back(self)

    def __del__(self) -> None:
        # Ctrl-C may have come before there was anything to hold.
        if getattr(self, "held", None) is not None:
            self.release()


class OwnedResult(Result):
    """A result that has its slot: released with it, or when it is dropped.

    Arrays taken from it stay readable after that, as those of any result do.
    """

    __slots__ = ("_kept",)

    def __init__(self, slot: Slot, epoch: int, answer: Answer, kept: Kept) -> None:
        super().__init__(slot, epoch, answer)
        self._kept = kept

    def release(self) -> None:
        """Give the slot back; the result expires. Doing so again does nothing."""
        self._kept.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Submission(Flight):
    """A request in flight that a future stands for.

    make: what the future gets, of the answer and the slot that it came to.
    """

    __slots__ = ("future", "kept", "make")
    is_left_to_others = True

    def __init__(
        self,
        kept: Kept,
        slot: Slot,
        given: int,
        limit: float | None,
        options: RequestOptions | None,
        *,
        make: Callable[[Answer, Kept], object],
    ) -> None:
        super().__init__(slot, given, limit, options)
        self.kept = kept
        self.make = make
        self.future: Future[Any] = Future()

    def succeed(self, answer: Answer) -> None:
        """The reply is there: nobody can cancel any more."""
        future, kept = self._let_go()
        if not future.set_running_or_notify_cancel():
            kept.release()
            return
        try:
            result = self.make(answer, kept)
        except Exception as error:
            kept.release()
            _set_error(future, error)
        else:
            future.set_result(result)

    def fail(self, error: BaseException) -> None:
        future, kept = self._let_go()
        kept.release()
        if future.set_running_or_notify_cancel():
            _set_error(future, error)

    def give_up(self) -> None:
        """The future was cancelled, or nobody has it, with the request in flight."""
        future, kept = self._let_go()
        kept.release()
        if future.cancelled():
            future.set_running_or_notify_cancel()

    def _let_go(self) -> tuple[Future[Any], Kept]:
        # Whoever still has this, and the future that tells it of being cancelled, would
        # keep a result alive that its caller has dropped, and the slot with it.
        future, kept = self.future, self.kept
        self.future = self.kept = NOTHING
        self.is_over = True
        return future, kept


def _set_error(future: Future[Any], error: BaseException) -> None:
    # The frames that it came through have memory of the slot, and one of them the
    # future itself: the slot would be pinned for as long as the future lives.
    future.set_exception(error.with_traceback(None))
