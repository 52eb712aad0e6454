"""Who sees what comes of every call of a client, whichever way it was made.

Owns whether a value is right, and whether an error is one that a fault explains.
Refuses to make calls. Everything here may be used from any thread.
"""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Iterator

from shmlane import ShmlaneError
from shmlane.session_base import BaseSession
from tests.chaos.lanes import Lane
from tests.chaos.tally import Tally
from tests.chaos.tokens import Array, Kept, Shape, Shelf, Tokens, complaint


class Clumsy(Exception):
    """What a caller's own function raises at times."""


class Witness:
    """Judges values and errors, keeps views, and counts.

    report: called with whatever no fault excuses.
    """

    def __init__(
        self,
        *,
        tokens: Tokens,
        tally: Tally,
        shelf: Shelf,
        report: Callable[[str], None],
    ) -> None:
        self.tokens = tokens
        self.tally = tally
        self.report = report
        self._shelf = shelf

    # --- values -----------------------------------------------------------------------

    def judge(
        self, output: Array, token: int, shape: Shape, lane: Lane[BaseSession]
    ) -> None:
        if wrong := complaint(output, token, shape):
            self.report(f"a reply of {lane.session!r} {wrong}")

    def keep(self, view: Array, token: int, what: str, lane: Lane[BaseSession]) -> None:
        """Have a view of this lane stay alive, and be full of its token."""
        self._shelf.put(Kept(view, token, f"{what} of {lane.session.model}"))

    def glance(self, dice: random.Random) -> None:
        """A look at one of the views that are kept."""
        if self._shelf.look(dice, drop=dice.random() < 0.1):
            self.tally.add("looks at kept views")

    # --- errors -----------------------------------------------------------------------

    @contextlib.contextmanager
    def excusing(self, lane: Lane[BaseSession]) -> Iterator[None]:
        """A call that may fail as calls do under faults. Lets cancellation through."""
        try:
            yield
        except Exception as error:
            self.excuse(lane, error)

    def excuse(self, lane: Lane[BaseSession], error: Exception) -> None:
        """Count an error, and report it unless a fault or the caller explains it."""
        if isinstance(error, ShmlaneError | Clumsy):
            self.tally.add(type(error).__name__)
        if not isinstance(error, ShmlaneError | Clumsy):
            self._complain("not an error of shmlane's", lane, error)
        elif type(error) not in {*lane.expected, Clumsy}:
            self._complain("an error that no fault explains", lane, error)

    def _complain(self, what: str, lane: Lane[BaseSession], error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        self.report(f"{what}, of {lane.session!r}:\n{trace}")
