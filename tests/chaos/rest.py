"""What a client does while its callers are held back: calls that have to succeed.

Owns the use of every slot, and sessions that are closed while the server stands still.
Refuses to excuse an error: nothing goes wrong meanwhile but what must not matter.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

from shmlane import InferTimeout, Timeouts
from tests.chaos.caller import INPUT, OUTPUT, Lane, Tally
from tests.chaos.tokens import Tokens, complaint, fill

_PATIENCE = 30.0
_HARDLY_ANY = 0.05
_LIMITS = Timeouts(connect=0.3, lease=1.0, infer=0.6)


class Rest:
    """Orders for quiet times. Used by one thread."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        tokens: Tokens,
        tally: Tally,
        report: Callable[[str], None],
    ) -> None:
        self._lanes = lanes
        self._tokens = tokens
        self._tally = tally
        self._report = report
        self._visits: list[Lane] = []

    def use_every_slot(self) -> None:
        """What is said to be free can be had, and works, whatever befell it before.

        Twice in a row: afterwards the last two replies on each connection are known.
        """
        for lane in self._lanes:
            session = lane.session
            with self._told(lane), contextlib.ExitStack() as leases:
                for _ in range(session.stats().slots):
                    lease = leases.enter_context(session.lease(timeout=_PATIENCE))
                    for _ in range(2):
                        token = self._tokens.make()
                        view = lease[INPUT]
                        fill(view, token)
                        self._tally.add("calls at rest")
                        output = lease.infer(timeout=_PATIENCE)[OUTPUT]
                        if wrong := complaint(output, token, view.shape):
                            self._report(f"at rest a reply of {session!r} {wrong}")

    def visit(self) -> None:
        """Open small sessions, which `leave` closes."""
        self._visits = [lane.visit(_LIMITS) for lane in self._lanes]
        for visit in self._visits:
            with self._told(visit):
                visit.session.open(wait=_PATIENCE)

    def leave(self) -> None:
        """Close them, while the server stands still: idle, or with a request on it."""
        leaving = [
            threading.Thread(target=self._leave, args=(visit, number))
            for number, visit in enumerate(self._visits)
        ]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        self._tally.add("sessions left", len(self._visits))
        self._visits = []

    def _leave(self, visit: Lane, number: int) -> None:
        with self._told(visit):
            if number % 3:
                self._ask_in_vain(visit)
            visit.session.close(wait=number % 3 != 2)

    def _ask_in_vain(self, visit: Lane) -> None:
        with visit.session.lease() as lease, contextlib.suppress(InferTimeout):
            fill(lease[INPUT], self._tokens.make())
            lease.infer(timeout=_HARDLY_ANY)
            self._report("a server that stands still has answered")

    @contextlib.contextmanager
    def _told(self, lane: Lane) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            self._report(f"a failure of {lane.session!r} at rest:\n{trace}")
