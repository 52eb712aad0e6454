"""Replies that no thread of a caller waits for.

Owns the one thread of a session that reads the replies to futures and to LATE slots
(the caller gave up, the connection is kept and the reply awaited), and hands LOST ones
to `draining`. Refuses slots that somebody still waits on. The thread starts with the
first of them and ends with the last one.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .background import Background
from .blocking import BlockingShell
from .board import Board
from .draining import Drainer
from .errors import PoolClosed, RequestLost, ShmlaneError
from .exchange import Answer, Exchange, Verdict
from .flights import Timetable
from .futures import Submission
from .slots import Holder, Label, Slot
from .trouble import timed_out, unread

T = TypeVar("T")

_RETRY_PAUSE = 0.25
# To start a thread costs more than a small model: it stays for the next future.
_LINGER = 0.05


class Receiver(Background):
    """Answers futures, and brings LATE slots back.

    `take_over` and `watch` may be called from finalisers.
    session: the session, or None once it is gone. shell: makes requests ready again.
    drainer: brings back what is LOST. give_back: called in the thread with each slot
    that the server no longer holds.
    """

    def __init__(
        self,
        exchange: Exchange,
        shell: BlockingShell,
        drainer: Drainer,
        *,
        session: Callable[[], object],
        give_back: Callable[[Slot], None],
    ) -> None:
        super().__init__(session)
        self.late_replies = 0
        self._exchange = exchange
        self._shell = shell
        self._drainer = drainer
        self._give_back = give_back
        # Whoever takes one out of here decides what becomes of its future.
        self._flying: dict[Submission, Submission] = {}
        self._submitted: deque[Submission] = deque()
        self._timetable = Timetable()
        self._stays_until = 0.0
        self._board: Board[Slot | Submission] | None = None

    @property
    def drains(self) -> int:
        return self._drainer.drains

    @property
    def retired(self) -> int:
        return self._drainer.retired

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self._drainer.is_busy

    def take_over(self, holder: Holder) -> None:
        """Bring back a slot whose caller has left."""
        slot: Slot = holder._hold[1]
        if slot.label is Label.LOST:
            self._drainer.take_over(holder)
        else:
            super().take_over(holder)

    def nudge(self) -> bool:
        is_drained = self._drainer.nudge()
        return super().nudge() and is_drained

    def stop(self) -> None:
        super().stop()
        self._drainer.stop()
        self._fail_all()

    def disown(self) -> None:
        super().disown()
        self._drainer.disown()
        if self._board is not None:
            self._board.close()

    def _has_work(self) -> bool:
        return bool(self._incoming or self._submitted)

    def _wake_up(self) -> None:
        board = self._board
        if board is not None:
            board.ring()

    # --- futures ----------------------------------------------------------------------

    def submit(self, submission: Submission) -> Future[Any]:
        """Send, and answer the future later; waits only to make the request ready."""
        future = submission.future
        if self._launch(submission):
            self._serve(submission)
            # Without a circle: what Ctrl-C leaves half done is dropped, and its slot
            # comes back.
            look = functools.partial(self._look_at, weakref.ref(submission))
            future.add_done_callback(look)
        try:
            return future
        finally:
            # What caused its error may hold this frame, and all those before it.
            del future

    def _launch(self, submission: Submission) -> bool:
        """Send; False if the future has got the error."""
        try:
            self._shell.launch(submission)
        except Exception as error:
            submission.fail(error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def _look_at(self, reference: weakref.ref[Submission], future: Future[Any]) -> None:
        submission = reference()
        if submission is not None and future.cancelled():
            self._abandon(submission)

    def _serve(self, submission: Submission) -> None:
        """Read the reply to a request that was sent."""
        future = submission.future
        try:
            self._flying[submission] = submission
            self._submitted.append(submission)
            self._wake_up()
            is_read = super().nudge()
        except BaseException:
            # Ctrl-C: nobody gets the future.
            self._abandon(submission)
            raise
        if self._stopping:
            self._fail_all()
        elif future.cancelled():
            self._abandon(submission)
        elif not is_read and self._flying.pop(submission, None) is not None:
            submission.fail(unread("no thread can be started"))

    def _abandon(self, submission: Submission) -> None:
        """The future was cancelled: its slot is LATE, if the request is in flight."""
        with self._handing:
            is_flying = self._flying.pop(submission, None)
        if is_flying:
            submission.give_up()
            # Without a late reply, nothing would tell the thread to expect no more.
            self._submitted.append(submission)
            self._wake_up()
            self.nudge()

    def _fail_all(self) -> None:
        for submission in list(self._flying):
            if self._flying.pop(submission, None):
                submission.fail(
                    PoolClosed("the session was closed before the reply came.")
                )

    def _mend(self, submission: Submission, problem: Verdict | RequestLost) -> None:
        """Send again, in a thread of its own, because that may have to wait."""
        try:
            _thread.start_new_thread(self._send_again, (submission, problem))
        except RuntimeError as error:
            self._conclude(submission.fail, unread(str(error)))

    def _send_again(
        self, submission: Submission, problem: Verdict | RequestLost
    ) -> None:
        try:
            self._shell.launch(submission, problem)
        except Exception as error:
            submission.fail(error)
        else:
            self._serve(submission)

    # --- in the thread ----------------------------------------------------------------

    def _work(self) -> None:
        try:
            board: Board[Slot | Submission] = Board()
        except OSError:
            # No descriptor left. The slots stay aside until there is one.
            time.sleep(_RETRY_PAUSE)
            for submission in list(self._flying):
                if submission.deadline.has_passed:
                    self._expire(submission)
            return
        with contextlib.closing(board):
            self._board = board
            try:
                self._receive(board)
            finally:
                self._board = None

    def _receive(self, board: Board[Slot | Submission]) -> None:
        while not self._stopping:
            while self._incoming:
                self._watch_late(board, self._incoming.popleft())
            while self._submitted:
                self._watch_flight(board, self._submitted.popleft())
            limit = self._timetable.remaining
            if board.is_empty:
                if time.monotonic() >= self._stays_until:
                    return
                limit = _LINGER
            for each in board.wait(limit):
                if isinstance(each, Slot):
                    self._read_late(board, each)
                else:
                    self._read_reply(board, each)
            for overdue in self._timetable.overdue(self._flying):
                # What has come in time is in time, whatever kept this thread from it.
                self._read_reply(board, overdue)
                board.forget(overdue)
                self._expire(overdue)

    def _expire(self, submission: Submission) -> None:
        if self._flying.pop(submission, None):
            self._conclude(submission.fail, timed_out(submission.limit))

    @staticmethod
    def _conclude(end: Callable[[T], None], outcome: T) -> None:
        """End a future, which calls what its owner wants to be called then."""
        try:
            end(outcome)
        except BaseException:
            # An Exception is told of by the future in the same way. The others would
            # end this thread, while futures of others wait for it.
            logging.getLogger("concurrent.futures").critical(
                "a callback of a future raised", exc_info=True
            )

    def _watch_flight(
        self, board: Board[Slot | Submission], submission: Submission
    ) -> None:
        problem: RequestLost | None = None
        # Cancelled in between, the slot and its connection would be another's by now.
        with self._handing:
            if submission not in self._flying:
                board.forget(submission)
                return
            channel = submission.slot.channel
            assert channel is not None
            try:
                board.expect(channel, submission)
            except (OSError, ValueError) as error:
                channel.close()
                problem = unread(f"its connection cannot be watched: {error}")
        if problem is not None:
            if self._flying.pop(submission, None):
                self._conclude(submission.fail, problem)
            return
        self._timetable.note(submission)
        self._stays_until = time.monotonic() + _LINGER

    def _read_reply(
        self, board: Board[Slot | Submission], submission: Submission
    ) -> None:
        with self._handing_over() as allowed:
            # Cancelled, it is late by now and comes by another way.
            if not allowed or submission not in self._flying:
                return
            outcome = self._outcome(submission)
            if outcome is None:
                assert submission.slot.channel is not None
                board.expect(submission.slot.channel, submission)
                return
            self._flying.pop(submission, None)
        if isinstance(outcome, Answer):
            self._conclude(submission.succeed, outcome)
        elif isinstance(outcome, (Verdict, RequestLost)):
            self._mend(submission, outcome)
        else:
            self._conclude(submission.fail, outcome)

    def _outcome(self, submission: Submission) -> Answer | Verdict | Exception | None:
        try:
            return submission.receive(self._exchange)
        except Exception as error:
            return error

    def _watch_late(self, board: Board[Slot | Submission], slot: Slot) -> None:
        channel = slot.channel
        # A session that closes takes the connection away, and stops this thread.
        if channel is None:
            return
        try:
            board.expect(channel, slot)
        except (OSError, ValueError):
            # It broke meanwhile, or the machine watches no more of them.
            channel.close()
            with self._handing_over() as allowed:
                if allowed:
                    self._lose(slot)

    def _read_late(self, board: Board[Slot | Submission], slot: Slot) -> None:
        with self._handing_over() as allowed:
            if not allowed:
                return
            if not self._has_ended(slot):
                assert slot.channel is not None
                board.expect(slot.channel, slot)
            elif slot.server_hold:
                self._lose(slot)
            else:
                self.late_replies += 1
                self._give_back(slot)

    def _lose(self, slot: Slot) -> None:
        """No reply comes any more; called where slots may change hands."""
        if slot.is_shared:
            self._drainer.watch(slot)
            return
        # What the server still does over the wire ends in its own memory.
        self._exchange.withdraw(slot)
        self._give_back(slot)

    def _has_ended(self, slot: Slot) -> bool:
        """Read on; whether that was the last of this connection or this reply."""
        channel = slot.channel
        assert channel is not None
        try:
            reply = channel.advance()
            if reply is None:
                return False
            self._exchange.accept(slot, reply, b"")
        except ShmlaneError:
            # An error of the model ends the request as well as a success does. What
            # leaves the slot held is a reply that cannot be trusted. Either way the
            # connection is not used again: an error may come twice, and names no id.
            channel.close()
        return True

    def __repr__(self) -> str:
        state = "running" if self.is_busy else "idle"
        flying, drains = len(self._flying), self._drainer.count
        return f"<Receiver {state}, {flying} futures, {drains} drains>"
