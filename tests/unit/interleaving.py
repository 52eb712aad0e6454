"""Races made to happen: something else runs at a chosen instruction of an operation.

Owns the tracing that stops inside the pool, the slots and what brings them back.
Refuses to depend on time: a test goes through every instruction, or every line.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from shmlane import background, draining, pool, receiver, slots

T = TypeVar("T")
Place = TypeVar("Place", "Intrusion[Any]", "Halt[Any]", "CtrlC")

_PACKAGE = os.path.dirname(pool.__file__)

_TRACED = {each.__file__ for each in (background, draining, pool, receiver, slots)}
_PATIENCE = 10.0


class _Tracer:
    """Calls `action` at the step number `at`, counted in instructions or in lines."""

    def __init__(self, at: int, action: Callable[[], object], *, event: str) -> None:
        self._left = at
        self._action = action
        self._event = event
        self.was_reached = False

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        if frame.f_code.co_filename not in _TRACED:
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        if event == self._event and not self.was_reached:
            self.was_reached = self._left == 0
            self._left -= 1
            if self.was_reached:
                self._action()
        return self

    def run(self, operation: Callable[[], T]) -> T:
        before = sys.gettrace()
        # Python 3.12 looks at this when tracing begins, for all frames to come.
        sys._getframe().f_trace_opcodes = self._event == "opcode"
        sys.settrace(self)
        try:
            return operation()
        finally:
            sys.settrace(before)


class Intrusion(Generic[T]):
    """`operation` with `intruder` run in the same thread at one of its instructions.

    That is what a finaliser, a callback or a signal does, and what another thread does
    with calls that take no lock. `was_reached` is False when it ended before.
    """

    def __init__(
        self, operation: Callable[[], T], intruder: Callable[[], object], at: int
    ) -> None:
        tracer = _Tracer(at, intruder, event="opcode")
        self.result = tracer.run(operation)
        self.was_reached = tracer.was_reached


class CtrlC:
    """`operation` with Ctrl-C pressed at one of the moments Python looks for it.

    That is where a function of the package begins or ends, or has called one in C. Not
    in a finaliser: Python drops what is raised there.
    """

    def __init__(self, operation: Callable[[], object], at: int) -> None:
        self._left = at
        self.was_reached = False
        before = sys.getprofile()
        # What the collector ends is not the operation's, and drops what is raised.
        gc.disable()
        sys.setprofile(self._look)
        try:
            operation()
        except KeyboardInterrupt:
            assert self.was_reached
        finally:
            sys.setprofile(before)
            gc.enable()

    def _look(self, frame: FrameType, event: str, _arg: object) -> None:
        is_ours = frame.f_code.co_filename.startswith(_PACKAGE)
        if event != "c_call" and is_ours and not is_finaliser(frame):
            self._left -= 1
            if self._left == -1:
                self.was_reached = True
                raise KeyboardInterrupt


def is_finaliser(frame: FrameType | None) -> bool:
    """Whether what runs in this frame was called by a finaliser."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class Halt(Generic[T]):
    """`operation` in a thread of its own, halted before one of its lines.

    Inside the `with` block it stands still, or has ended before that line. `end`, or
    leaving the block, lets it go on and waits for it; then `result` can be read.
    """

    def __init__(self, operation: Callable[[], T], at: int) -> None:
        self._operation = operation
        self._tracer = _Tracer(at, self._stand_still, event="line")
        self._stands = threading.Event()
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._outcome: list[T] = []

    @property
    def was_reached(self) -> bool:
        return self._tracer.was_reached

    @property
    def result(self) -> T:
        assert self._outcome, "the operation failed in its thread"
        return self._outcome[0]

    def end(self) -> T:
        self._go.set()
        self._thread.join(_PATIENCE)
        assert not self._thread.is_alive()
        return self.result

    def _stand_still(self) -> None:
        self._stands.set()
        assert self._go.wait(_PATIENCE)

    def _run(self) -> None:
        try:
            self._outcome.append(self._tracer.run(self._operation))
        finally:
            self._stands.set()

    def __enter__(self) -> Halt[T]:
        self._thread.start()
        assert self._stands.wait(_PATIENCE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def every(run: Callable[[int], Place]) -> Iterator[Place]:
    """`run(0)`, `run(1)`, ... until the place is no longer reached."""
    at = 0
    while (one := run(at)).was_reached:
        yield one
        at += 1
    assert at > 0, "nothing of the package was traced"
