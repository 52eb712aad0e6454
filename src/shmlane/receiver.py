"""Late replies: one thread reads those that nobody waits for any more.

Owns LATE slots (the caller gave up, the connection is kept and the reply awaited), and
hands LOST ones to `draining`. Refuses slots that somebody still waits on. The thread
starts with the first LATE slot and ends with the last one.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from .background import Background
from .draining import Drainer
from .endpoint import Endpoint
from .errors import InferTimeout, ShmlaneError
from .exchange import Exchange
from .slots import Channel, Holder, Label, Slot

_RETRY_PAUSE = 0.25


class _Mailbox:
    """The connections on which late replies come, for one run of the thread."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as opened:
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._bell, self._rung = map(opened.enter_context, socket.socketpair())
            for end in (self._bell, self._rung):
                end.setblocking(False)
            self._selector.register(self._rung, selectors.EVENT_READ)
            self._opened = opened.pop_all()

    @property
    def is_empty(self) -> bool:
        return len(self._selector.get_map()) == 1

    def add(self, channel: Channel, slot: Slot) -> None:
        """Raises `ValueError` if the connection is closed, and OSError."""
        self._selector.register(channel, selectors.EVENT_READ, slot)

    def remove(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fd)

    def wait(self) -> list[selectors.SelectorKey]:
        """Those on which something has come; none if the bell rang."""
        keys = [key for key, _ in self._selector.select()]
        with contextlib.suppress(BlockingIOError):
            self._rung.recv(4096)
        return [key for key in keys if key.data is not None]

    def ring(self) -> None:
        # A full or closed pipe belongs to a thread that looks again by itself.
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")

    def close(self) -> None:
        self._opened.close()


class Receiver(Background):
    """Brings LATE and LOST slots back. `watch` may be called from finalisers.

    session: the session, or None once it is gone. Called in threads of their own:
    give_back with each slot that the server no longer holds, move_outputs before that
    if a server out of reach may still write to them, and retire with each slot that an
    old server may hold for ever.
    """

    def __init__(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        *,
        session: Callable[[], object],
        give_back: Callable[[Slot], None],
        move_outputs: Callable[[Slot], None],
        retire: Callable[[Slot], None],
    ) -> None:
        super().__init__(session)
        self.late_replies = 0
        self._exchange = exchange
        self._give_back = give_back
        self._drainer = Drainer(
            exchange,
            endpoint,
            session=session,
            give_back=give_back,
            move_outputs=move_outputs,
            retire=retire,
        )
        self._mailbox: _Mailbox | None = None

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

    def nudge(self) -> None:
        super().nudge()
        self._drainer.nudge()

    def stop(self) -> None:
        super().stop()
        self._drainer.stop()

    def _has_work(self) -> bool:
        return bool(self._incoming)

    def _wake_up(self) -> None:
        mailbox = self._mailbox
        if mailbox is not None:
            mailbox.ring()

    def _work(self) -> None:
        try:
            mailbox = _Mailbox()
        except OSError:
            # No descriptor left. The slots stay aside until there is one.
            time.sleep(_RETRY_PAUSE)
            return
        with contextlib.closing(mailbox):
            self._mailbox = mailbox
            try:
                self._receive(mailbox)
            finally:
                self._mailbox = None

    def _receive(self, mailbox: _Mailbox) -> None:
        while not self._stopping:
            while self._incoming:
                self._take_in(mailbox, self._incoming.popleft())
            if mailbox.is_empty:
                return
            for key in mailbox.wait():
                self._read(mailbox, key)

    def _take_in(self, mailbox: _Mailbox, slot: Slot) -> None:
        channel = slot.channel
        # A session that closes takes the connection away, and stops this thread.
        if channel is None:
            return
        try:
            mailbox.add(channel, slot)
        except (OSError, ValueError):
            # It broke meanwhile, or the machine watches no more of them.
            channel.close()
            with self._handing_over() as allowed:
                if allowed:
                    self._lose(slot)

    def _read(self, mailbox: _Mailbox, key: selectors.SelectorKey) -> None:
        slot: Slot = key.data
        with self._handing_over() as allowed:
            if not allowed or not self._has_ended(slot):
                return
            mailbox.remove(key)
            if slot.server_hold:
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
            reply = channel.feed(channel.receive(0))
            if reply is None:
                return False
            self._exchange.accept(slot, reply, b"")
        except InferTimeout:
            return False
        except ShmlaneError:
            # An error of the model ends the request as well as a success does. What
            # leaves the slot held is a reply that cannot be trusted. Either way the
            # connection is not used again: an error may come twice, and names no id.
            channel.close()
        return True

    def __repr__(self) -> str:
        state = "running" if self.is_busy else "idle"
        return f"<Receiver {state}, {self._drainer.count} drains>"
