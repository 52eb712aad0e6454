"""Work that a thread of a pool does for somebody who awaits it.

Owns what is to be done, and then what came of it. Refuses to choose the thread. By the
time that its future is done, the thread holds nothing of it any more: what the caller
drops then ends at once, and in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from .tensors import NOTHING

T = TypeVar("T")


class Work(Generic[T]):
    """What a thread is to do, and then what came of it, which is taken once.

    Futures go round in circles with themselves. An error that one kept would keep what
    its callers' frames hold, views of slots too, until the collector comes.
    """

    __slots__ = ("_arguments", "_error", "_value", "_work")
    _value: T

    def __init__(self, work: Callable[..., T], arguments: tuple[Any, ...] = ()) -> None:
        self._work = work
        self._arguments = arguments
        self._error: BaseException | None = None

    def do(self) -> Self:
        work, arguments = self._work, self._arguments
        self._work, self._arguments = NOTHING, ()
        try:
            self._value = work(*arguments)
        except BaseException as error:
            self._error = error
        return self

    def forget(self) -> None:
        """Nobody is to be told of an error."""
        self._error = None

    def take(self) -> T:
        """The value, or raises the error."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            value = self._value
            del self._value
            return value
        finally:
            del error
