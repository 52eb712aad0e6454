"""How the streams of a session share its slots.

Owns how many slots each of them may keep while another one waits for more. Refuses to
take slots and to give them back.
"""

from __future__ import annotations

from typing import Protocol

from .lifetimes import Weakly
from .pool import SlotPool


class Sharer(Protocol):
    """A stream as this file sees it."""

    @property
    def busy(self) -> int: ...
    def wake(self) -> None: ...


class Fairness:
    """Who lacks slots, of the streams of one session, and what is each one's part.

    A stream keeps its slots from item to item: one that begins later would have to live
    on what the others leave. While it waits for more, those with more than their part
    let go of a slot with each reply. Safe to use from any thread.

    Whoever has let go of slots says so with `wake`: the pool tells only those who wait
    in its queue.

    lacking: those that wait for more.
    """

    __slots__ = ("_pool", "_streams", "lacking")

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._streams: Weakly[Sharer] = Weakly()
        self.lacking: dict[Sharer, Sharer] = {}

    def join(self, stream: Sharer) -> None:
        """From now on it counts, while anything of it is on its way."""
        self._streams.add(stream)

    @property
    def part(self) -> int:
        """How many slots a stream may have, of those that streams use or could.

        One at least: with nothing on its way, a stream waits in turn.
        """
        busy = [each.busy for each in self._streams]
        running = sum(count > 0 for count in busy) or 1
        # Rounded up: nothing is left over.
        return max(1, -(-(sum(busy) + self._pool.free) // running))

    def ask(self, stream: Sharer) -> None:
        """It waits for a slot of others, or for a reply, whatever comes first."""
        self.lacking[stream] = stream
        # What came free before this could be seen was told to nobody.
        if self._pool.free:
            stream.wake()

    def ask_no_more(self, stream: Sharer) -> None:
        self.lacking.pop(stream, None)

    def wake(self) -> None:
        """Tell whoever waits for slots, if there are any now."""
        if self._pool.free:
            # A list: made in one step, while other threads ask.
            for stream in list(self.lacking):
                stream.wake()

    def __repr__(self) -> str:
        return f"<Fairness: {len(self.lacking)} lacking, {self.part} slots for each>"
