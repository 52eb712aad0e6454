"""When a thread waits for several replies together, instead of for the next one.

Owns that choice: how quickly replies come, for how many to wait, and for how long not
to try again where they came in another order. Refuses to wait, and to know what is in
flight.

To fall asleep and to be woken costs a thread as much as to send a request and to read
the reply, where an idle processor is one of a virtual machine (13 to 19 us of its time,
measured), and the server, which wakes it, pays too.
"""

from __future__ import annotations

# That part of what is in flight, the oldest, is waited for together. The server has the
# others to work on; with fewer it would run out of work meanwhile.
_PART = 4
_LEAST_IN_FLIGHT = 16
# Replies that come in longer intervals, in seconds, are each waited for: little could
# be saved, and a server that is not busy with others is kept waiting.
_QUICK = 1e-4
# What one look tells of that counts for so much less after the next one.
_FADING = 0.9
# Seconds until the next try, after a first wait in vain and after many; a first one is
# any that none came before for a second.
_SHORT_REST = 0.05
_LONG_REST = 2.0
_FORGOTTEN = 1.0


class Gathering:
    """How many replies a stream waits for, by those that have come.

    count: 1 while it is to wait for any. Times are those of `time.monotonic`.
    """

    __slots__ = ("_most", "_next_rest", "_replies", "_rests_until", "_seconds", "count")

    def __init__(self, in_flight: int) -> None:
        self.count = 1
        self._most = in_flight // _PART if in_flight >= _LEAST_IN_FLIGHT else 1
        self._replies = self._seconds = 0.0
        self._rests_until = 0.0
        self._next_rest = _SHORT_REST

    def note(self, replies: int, since: float, now: float) -> None:
        """So many have come between these times."""
        self._replies = _FADING * self._replies + replies
        self._seconds = _FADING * self._seconds + now - since
        is_quick = self._seconds < self._replies * _QUICK
        self.count = self._most if is_quick and now >= self._rests_until else 1

    def note_failure(self, now: float) -> None:
        """Those waited for have not come in time: they do not keep the order."""
        if now > self._rests_until + _FORGOTTEN:
            self._next_rest = _SHORT_REST
        self._rests_until = now + self._next_rest
        self._next_rest = min(_LONG_REST, 2 * self._next_rest)

    def __repr__(self) -> str:
        return f"<Gathering {self.count} of at most {self._most}>"
