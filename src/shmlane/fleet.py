"""What a stream has in flight, and the one wait for all of its replies.

Owns the passages that are under way, their sending, and how long and for how many of
them to wait. Refuses to choose items, and to know what becomes of a reply (`streams`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, TypeVar

from .blocking import BlockingShell
from .board import Board
from .errors import RequestLost
from .exchange import Exchange, Verdict
from .flights import Timetable
from .gathering import Gathering
from .leases import BaseLease
from .passages import Passage
from .slots import Slot

L = TypeVar("L", bound=BaseLease)

# So long, at most, a reply waits for others to be taken in with it.
_GATHER = 1e-3


class Fleet(Generic[L]):
    """The passages of one stream, used in its thread; `abandon` may come in another.

    flying: those in flight or about to be, the longest first. at_hand: the one whose
    request is just being sent, or its reply read. board: where replies are watched for,
    while the stream runs. looked: when they were last looked for. parting: the one that
    is just being let go of.
    """

    __slots__ = (
        "_exchange",
        "_gathering",
        "_most",
        "_shell",
        "at_hand",
        "board",
        "flying",
        "looked",
        "parting",
        "timetable",
    )

    board: Board[Passage[L]]

    def __init__(self, shell: BlockingShell, exchange: Exchange, most: int) -> None:
        """most: how many there may be."""
        self._shell = shell
        self._exchange = exchange
        self._most = most
        self._gathering = Gathering(most)
        self.flying: OrderedDict[Passage[L], Passage[L]] = OrderedDict()
        self.at_hand: Passage[L] | None = None
        self.parting: Passage[L] | None = None
        self.timetable = Timetable()
        self.looked = 0.0

    def launch(
        self,
        passage: Passage[L],
        problem: Verdict | RequestLost | None = None,
        *,
        is_quiet: bool = False,
    ) -> None:
        """Send its request; `problem` is why again. Raises what ends the request.

        is_quiet: whether its connection has just been looked at.
        """
        self.at_hand = passage
        try:
            is_ready = problem is None and passage.is_ready(is_quiet=is_quiet)
            if not (is_ready and passage.send(self._exchange)):
                self._shell.launch(passage, problem)
            # As `expect`, without its call.
            channel = passage.slot.channel
            assert channel is not None
            self.board.expect(channel, passage)
        finally:
            self.at_hand = None
        if passage.when < self.timetable.next:
            self.timetable.note(passage)

    def expect(self, passage: Passage[L]) -> None:
        """More of its reply is to come."""
        channel = passage.slot.channel
        assert channel is not None
        self.board.expect(channel, passage)

    def wait(self, timeout: float | None) -> list[Passage[L]]:
        """Those for which something has come; none if the bell rang, or time is up."""
        if self._gathering.count > 1 and timeout != 0:
            timeout = self._gather(timeout)
        came = self.board.wait(timeout)
        now = time.monotonic()
        self._gathering.note(len(came), self.looked, now)
        self.looked = now
        return came

    def _gather(self, timeout: float | None) -> float | None:
        """Wait, but not for long, until the reply of one that is not the oldest comes.

        By then those of older ones are there: replies come in the order of the
        requests, more or less. Whoever rings the bell waits for that long. Returns how
        long is still to be waited for any.
        """
        count, oldest = self._gathering.count, list(self.flying)
        if len(oldest) < self._most:
            return timeout
        channel = oldest[count - 1].slot.channel
        if channel is None:
            return timeout
        if not channel.comes_within(_GATHER):
            self._gathering.note_failure(time.monotonic())
        return 0

    def leave(self, kept: Collection[Slot]) -> bool:
        """Let go of those whose replies are to come; False if there are none.

        Not of the one at hand, nor of one whose reply has been read, nor of `kept`.
        """
        at_hand = self.at_hand
        left = [
            each
            for each in list(self.flying)
            if each.slot.server_hold and each is not at_hand and each.slot not in kept
        ]
        for passage in left:
            self.let_go(passage)
        if left:
            # In a handler this may be right before the wait for all of them.
            self.board.ring()
        return bool(left)

    def abandon(self) -> None:
        """Let go of all: what is in flight is late from now on."""
        self.at_hand = None
        for passage in list(self.flying):
            self.let_go(passage)

    def let_go(self, passage: Passage[L]) -> bool:
        """Release its slot; False if that was done, or is done, by somebody else.

        A stream that is dropped may end in any thread, while its own closes the
        session; a signal handler may close it in the middle of this.
        """
        before, self.parting = self.parting, passage
        try:
            if self.flying.pop(passage, None) is None:
                return False
            passage.lease.release()
        finally:
            self.parting = before
        return True

    @property
    def in_hand(self) -> list[Slot]:
        """Those that a signal handler interrupts the use of: it waits in vain."""
        return [each.slot for each in (self.at_hand, self.parting) if each is not None]

    def __repr__(self) -> str:
        return f"<Fleet {len(self.flying)} of at most {self._most} in flight>"
