"""When a thread waits for several replies together, instead of for the next one.

Owns that choice: how quickly replies come, for how many to wait, and for how long not
to try again where they came in another order. Refuses to wait, and to know what is in
flight.

To fall asleep and to be woken costs a thread as much as to send a request and to read
the reply, where an idle processor is one of a virtual machine (13 to 19 us of its time,
measured), and the server, which wakes it, pays too.
"""

from __future__ import annotations

# That part of what is in flight, the oldest, is waited for together: two of sixteen.
# The server has the others to work on; to wait for more would save little.
_PART = 8
# Replies that come in longer intervals, in seconds, are each waited for.
_QUICK = 1e-4
# Looks that pass before the next try, after a first failure and after many.
_SHORT_REST = 16
_LONG_REST = 4096


class Gathering:
    """How many replies a stream waits for, by those that have come.

    count: 1 while it is to wait for any.
    """

    __slots__ = ("_most", "_next_rest", "_rest", "count")

    def __init__(self, in_flight: int) -> None:
        self.count = 1
        self._most = max(1, in_flight // _PART)
        self._rest = 0
        self._next_rest = _SHORT_REST

    def note(self, replies: int, seconds: float) -> None:
        """So many have come in that time."""
        if self._rest:
            self._rest -= 1
        is_quick = replies * _QUICK > seconds
        self.count = self._most if is_quick and not self._rest else 1

    def note_order(self, *, is_kept: bool) -> None:
        """Whether those waited for have come before the others, and in time."""
        if is_kept:
            self._next_rest = max(_SHORT_REST, self._next_rest - 1)
        else:
            self._rest = self._next_rest
            self._next_rest = min(_LONG_REST, 2 * self._next_rest)

    def __repr__(self) -> str:
        rest = f", {self._rest} looks of rest" if self._rest else ""
        return f"<Gathering {self.count} of at most {self._most}{rest}>"
