"""What a blocking session says to its server beside inference, and over what.

Owns the connections that a session makes, the talks that it has over them, and how many
there were of both. Refuses to know how servers differ (`control`) and who uses a slot.
Thread-safe, as long as a slot belongs to one caller.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

from . import control
from .endpoint import NO_TIME
from .errors import ServerUnreachable, ShmlaneError
from .metadata import ModelMetadata
from .settings import Settings
from .slots import Channel, Slot
from .timing import Deadline, no_time_left
from .transport import HttpConnection

T = TypeVar("T")


def run(talk: control.Talk[T], channel: Channel, deadline: Deadline) -> T:
    """The outcome of a talk over `channel`; raises what the talk and `call` raise."""
    reply = None
    while True:
        try:
            step = talk.send(reply)
        except StopIteration as done:
            outcome: T = done.value
            return outcome
        if isinstance(step, control.Pause):
            reply = None
            time.sleep(step.seconds)
        else:
            reply = channel.call(step, deadline)


@contextlib.contextmanager
def in_time_of(deadline: Deadline) -> Iterator[None]:
    """A server that did not answer until the caller's own time was up is no error.

    Then it is `InferTimeout`, and nothing was sent; not where `Timeouts.connect` came
    first, or the server was seen to be away.
    """
    try:
        yield
    except ServerUnreachable as error:
        was_waiting = isinstance(error.__cause__, NO_TIME)
        if was_waiting and deadline.has_passed:
            raise no_time_left(deadline.limit) from error
        raise


class ServerCalls:
    """Connects, registers and unregisters for one session.

    connections, registrations: counters for `SessionStats`.
    """

    def __init__(self, settings: Settings) -> None:
        self.connections = 0
        self.registrations = 0
        self._settings = settings
        self._requests = settings.requests

    def connect(self, deadline: Deadline) -> HttpConnection:
        limit = deadline.within(self._settings.timeouts.connect)
        connection = HttpConnection.open(self._settings.endpoint, limit)
        self.connections += 1
        return connection

    def discover(self, channel: Channel, deadline: Deadline) -> ModelMetadata:
        model, version = self._settings.model, self._settings.version
        talk = control.discover(self._requests, model, version=version)
        return run(talk, channel, deadline)

    def drain(
        self, slot: Slot, channel: Channel, deadline: Deadline
    ) -> control.Drained:
        return run(control.drain(self._requests, slot), channel, deadline)

    def register(self, slot: Slot, channel: Channel, deadline: Deadline) -> None:
        self.registrations += sum(1 for _ in slot.unregistered())
        run(control.register(self._requests, slot), channel, deadline)

    def unregister(
        self, slots: Collection[Slot], channel: Channel | None = None
    ) -> bool:
        """Take back what no request is on; True when the server knows nothing more.

        It still may where it does not answer in time, or works on a request.
        """
        if not any(slot.is_shared for slot in slots):
            return True
        deadline = Deadline(self._settings.timeouts.connect)
        with contextlib.suppress(ShmlaneError):
            if channel is None or not channel.is_open:
                channel = self.connect(deadline)
            for slot in slots:
                if not slot.server_hold:
                    run(control.unregister(self._requests, slot), channel, deadline)
        if channel is not None:
            channel.close()
        if all(slot.is_forgotten for slot in slots):
            return True
        return self._settings.endpoint.is_deserted(self._settings.timeouts.connect)

    def unregister_doubtful(self, slots: Iterable[Slot]) -> None:
        """Once the files are gone: take back what was registered late."""
        doubtful = [slot for slot in slots if slot.doubtful]
        if not doubtful:
            return
        deadline = Deadline(self._settings.timeouts.connect)
        with (
            contextlib.suppress(ShmlaneError),
            contextlib.closing(self.connect(deadline)) as channel,
        ):
            for slot in doubtful:
                talk = control.unregister_doubtful(self._requests, slot)
                run(talk, channel, deadline)

    def __repr__(self) -> str:
        return f"<ServerCalls to {self._settings.url}>"
