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
_PART = 3
_LEAST_IN_FLIGHT = 16
# Replies that come in longer intervals, in seconds, are each waited for: little could
# be saved, and a server that is not busy with others is kept waiting.
_QUICK = 1e-4
# What one look tells of that counts for so much less after the next one.
_FADING = 0.9
# To wait for several and for each take turns, to see which is the quicker: where some
# replies take longer than others, the quick ones wait for the slow ones. Seconds of a
# turn of the one and the other, where it is not slower to wait for several, and where
# it is.
_TURNS_TOGETHER = 0.045, 0.005
_TURNS_ALONE = 0.005, 0.2
# It is slower if a reply takes so many times as long.
_BEARABLE = 1.15
# What is known of a way after so many turns is believed; each weighs so much then.
_TURNS, _WEIGHT = 4, 0.25


class _Way:
    """How long a reply takes where replies are waited for in this way."""

    __slots__ = ("pace", "turns")

    def __init__(self) -> None:
        self.pace = 0.0
        self.turns = 0

    def note(self, pace: float) -> None:
        self.turns += 1
        self.pace += (pace - self.pace) * max(_WEIGHT, 1 / self.turns)


class Gathering:
    """How many replies a stream waits for, by those that have come.

    count: 1 while it is to wait for any. Times are those of `time.monotonic`.
    """

    __slots__ = (
        "_alone",
        "_began",
        "_came",
        "_most",
        "_replies",
        "_seconds",
        "_together",
        "_until",
        "_way",
        "count",
    )

    def __init__(self, in_flight: int) -> None:
        self.count = 1
        self._most = in_flight // _PART if in_flight >= _LEAST_IN_FLIGHT else 1
        self._replies = self._seconds = 0.0
        self._together, self._alone = _Way(), _Way()
        # The turn: of which way, since when, until when, and what came in it.
        self._way = self._alone
        self._began = self._until = 0.0
        self._came = 0

    def note(self, replies: int, since: float, now: float) -> None:
        """So many have come between these times, of which some may be the caller's."""
        self._replies = _FADING * self._replies + replies
        self._seconds = _FADING * self._seconds + now - since
        is_quick = self._seconds < self._replies * _QUICK
        self._came += replies
        if now >= self._until:
            self._change_ways(now, counts=is_quick)
        is_together = self._way is self._together
        self.count = self._most if is_quick and is_together else 1

    def note_failure(self, now: float) -> None:
        """Those waited for have not come in time: this turn is over."""
        self._until = min(self._until, now)

    def _change_ways(self, now: float, *, counts: bool) -> None:
        """counts: whether what came in this turn tells something of its way."""
        lasted, planned = now - self._began, self._until - self._began
        # Not if the caller made a pause in it.
        if counts and self._came and lasted < 2 * planned:
            self._way.note(lasted / self._came)
        alone, together = self._alone, self._together
        is_known = min(alone.turns, together.turns) >= _TURNS
        is_slower = is_known and together.pace > _BEARABLE * alone.pace
        turns = _TURNS_ALONE if is_slower else _TURNS_TOGETHER
        self._way = together if self._way is alone else alone
        self._began, self._came = now, 0
        self._until = now + turns[self._way is alone]

    def __repr__(self) -> str:
        return f"<Gathering {self.count} of at most {self._most}>"
