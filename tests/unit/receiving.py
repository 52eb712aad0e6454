"""Requests nobody waits for: slots in flight, and the server's end of everything.

Owns pairs of sockets in place of connections, and the threads that answer control
requests. Refuses real servers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator

import pytest

from shmlane import Session, draining, receiver
from shmlane.blocking import BlockingShell
from shmlane.calls import ServerCalls
from shmlane.draining import Drainer
from shmlane.endpoint import Endpoint
from shmlane.exchange import Exchange
from shmlane.receiver import Receiver
from shmlane.slots import Label, Slot
from shmlane.transport import HttpConnection
from tests.polling import eventually
from tests.unit.scripted import (
    FIRST_ID,
    PLAIN,
    REQUESTS,
    Request,
    error,
    http,
    memory,
    model,
    output,
    success,
)

OK = http(200)
FULL = output("Y", (1, 4))
IN_USE = error(500, "Cannot unregister shared memory region 'r', currently in use.")
GONE = error(404, "Unable to find system shared memory region: 'r'")
_PATIENCE = 10.0


class ControlServer:
    """Answers control requests, each connection on a pair of sockets of its own.

    It says its version, knows every region until it is unregistered, and has `answer`
    say what it says to unregistering; `asked` are the requests about regions.
    """

    def __init__(self, version: str = "2.51.0") -> None:
        self.version = version
        self.knows_nothing = False
        self.asked: list[str] = []
        self.gone: set[str] = set()
        self.answer: Callable[[str], bytes] = lambda line: OK
        self.is_away = False
        self.refusals = 0
        self._threads: list[threading.Thread] = []

    def connect(self, _timeout: float | None) -> socket.socket:
        if self.is_away:
            self.refusals += 1
            raise ConnectionRefusedError("nobody listens")
        near, far = socket.socketpair()
        thread = threading.Thread(target=self._serve, args=(far,), daemon=True)
        self._threads.append(thread)
        thread.start()
        return near

    def _serve(self, far: socket.socket) -> None:
        # A client on a busy machine may have no more patience, and be gone.
        with far, contextlib.suppress(ConnectionError):
            while data := far.recv(65536):
                reply = self._reply(Request.read(data).line)
                if not reply:
                    return
                far.sendall(reply)

    def _reply(self, line: str) -> bytes:
        if line == "GET /v2":
            return http(200, json.dumps({"version": self.version}))
        self.asked.append(line)
        name = line.split("/")[-2]
        if line.startswith("GET"):
            is_gone = self.knows_nothing or name in self.gone
            return GONE if is_gone else http(200, "[]")
        answer = self.answer(line)
        if answer == OK:
            self.gone.add(name)
        return answer

    def join(self) -> None:
        """Every connection was closed by its client."""
        for thread in self._threads:
            thread.join(_PATIENCE)
            assert not thread.is_alive()


@contextlib.contextmanager
def control_in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlServer]:
    """All connections go to a control server; receivers have little patience."""
    server = ControlServer()
    monkeypatch.setattr(Endpoint, "connect", lambda _, timeout: server.connect(timeout))
    monkeypatch.setattr(draining, "_CONTROL_LIMIT", 0.05)
    for module in (draining, receiver):
        monkeypatch.setattr(module, "_RETRY_PAUSE", 0.001)
    yield server
    server.join()


class Desk:
    """Slots in flight, each with the far end of its connection, and their receiver."""

    def __init__(self, version: str = "2.51.0") -> None:
        metadata = model(
            PLAIN.inputs.values(), PLAIN.outputs.values(), server_version=version
        )
        self.exchange = Exchange(REQUESTS, metadata)
        self.memory = memory(metadata)
        self.far: dict[Slot, socket.socket] = {}
        self.session: object = self
        self.returned: list[Slot] = []
        self.retired: list[Slot] = []
        self.give_back: Callable[[Slot], None] = self.returned.append
        self.move_outputs: Callable[[Slot], None] = self.memory.move_outputs
        session = Session("here:8000", "m")
        shell = BlockingShell(
            ServerCalls(session._settings), self.exchange, self.memory, replay=False
        )
        drainer = Drainer(
            self.exchange,
            Endpoint.parse("here:8000"),
            session=lambda: self.session,
            # Looked up when called: a test may put its own in their place.
            give_back=lambda slot: self.give_back(slot),
            move_outputs=lambda slot: self.move_outputs(slot),
            retire=self.retired.append,
        )
        self.receiver = Receiver(
            self.exchange,
            shell,
            drainer,
            session=lambda: self.session,
            give_back=lambda slot: self.give_back(slot),
        )

    def late(self, count: int = 1) -> list[Slot]:
        """Slots whose callers have left before the reply."""
        slots = self.memory.make_slots(count)
        for slot in slots:
            near, self.far[slot] = socket.socketpair()
            slot.channel = HttpConnection(near)
            slot.registrations[0].is_live = True
            self.exchange.prepare(slot, 1)
            slot.channel.send(self.exchange.begin(slot))
            assert Request.read(self.far[slot].recv(65536)).line.startswith("POST")
        return slots

    def lost(self, count: int = 1) -> list[Slot]:
        """Slots whose connections broke before the reply."""
        slots = self.late(count)
        for slot in slots:
            assert slot.channel is not None
            slot.channel.close()
            assert slot.label is Label.LOST
        return slots

    def watch(self, *slots: Slot) -> None:
        for slot in slots:
            self.receiver.watch(slot)

    def reply(self, slot: Slot, data: bytes | None = None) -> None:
        self.far[slot].sendall(success(FIRST_ID, FULL) if data is None else data)

    def came_back(self, *slots: Slot) -> None:
        """Exactly these slots come back, free, and the thread ends."""
        self.is_idle()
        assert sorted(map(id, self.returned)) == sorted(map(id, slots))
        for slot in slots:
            assert not slot.server_hold
            assert slot.record[0] == 0
        self.returned.clear()

    def is_idle(self) -> None:
        eventually(lambda: not self.receiver.is_busy, f"{self.receiver} ends")

    def close(self) -> None:
        self.receiver.stop()
        self.is_idle()
        for slot, far in self.far.items():
            slot.close()
            far.close()
        self.memory.close()


def read_by_the_other_end(far: socket.socket) -> bool:
    buffer = fcntl.ioctl(far, termios.TIOCOUTQ, bytes(4))
    return struct.unpack("i", buffer) == (0,)
