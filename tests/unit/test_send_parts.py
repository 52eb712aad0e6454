"""Requests in parts: sent whole, or known not to have been, whatever the peer does."""

from __future__ import annotations

import hashlib
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from shmlane.errors import InferTimeout
from shmlane.timing import Deadline
from shmlane.transport import HttpConnection
from tests.polling import eventually
from tests.unit.interleaving import CtrlC, every
from tests.unit.loopback import (
    LONG,
    REPLY,
    REQUEST,
    SHORT,
    Wire,
    connected,
    during,
    readable,
    reset,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs poll")

REFUSAL = b"HTTP/1.1 400 Bad\r\nContent-Length: 13\r\n\r\n" + b'{"error":"x"}'
# Each time the same memory, for it is not what is sent that is large.
MEGABYTE = np.random.default_rng(1).bytes(1 << 20)
MORE_THAN_BUFFERS_HOLD = [REQUEST] + [MEGABYTE] * 64


@contextmanager
def pair() -> Iterator[Wire]:
    """A Unix socket in place of TCP."""
    near, peer = socket.socketpair()
    with peer, closing(HttpConnection(near)) as connection:
        yield Wire(connection, peer)


@pytest.fixture(params=[connected, pair], ids=["TCP", "Unix"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    with request.param() as wire:
        yield wire


def received(peer: socket.socket, nbytes: int) -> str:
    """The digest of so many bytes that come."""
    digest, room = hashlib.blake2b(), memoryview(bytearray(1 << 20))
    while nbytes and (count := peer.recv_into(room, min(nbytes, len(room)))):
        digest.update(room[:count])
        nbytes -= count
    assert nbytes == 0
    return digest.hexdigest()


def digest_of(parts: list[bytes]) -> str:
    digest = hashlib.blake2b()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


# --- sent whole -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [REQUEST],
        [REQUEST, b"", b"body"],
        [REQUEST, *[b"%d," % number for number in range(5000)]],
        [REQUEST, *[MEGABYTE] * 300],
    ],
    ids=["none", "one", "empty ones", "thousands", "300 MiB"],
)
def test_parts_arrive_as_one_request(
    connection: HttpConnection, peer: socket.socket, parts: list[bytes]
) -> None:
    digests: list[str] = []

    def read() -> None:
        digests.append(received(peer, sum(map(len, parts))))

    assert during(lambda: connection.send_parts(parts, Deadline(LONG)), read)
    assert digests == [digest_of(parts)]
    assert connection.is_quiet
    peer.send(REPLY)
    assert connection.receive(LONG) == REPLY
    assert connection.send(REQUEST)


def test_arrays_are_sent_as_their_bytes(
    connection: HttpConnection, peer: socket.socket
) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    parts = [b"head", array.data, array[1].data]
    assert connection.send_parts(parts, Deadline(LONG))
    assert peer.recv(1000) == b"head" + array.tobytes() + array[1].tobytes()


def test_what_is_no_contiguous_memory_is_refused_before_anything_is_sent(
    connection: HttpConnection, peer: socket.socket
) -> None:
    with pytest.raises(TypeError):
        connection.send_parts([REQUEST, np.zeros((4, 4)).T.data], Deadline(LONG))
    assert connection.send(b"next")
    assert peer.recv(100) == b"next"


# --- not sent -------------------------------------------------------------------------


def test_a_peer_that_reads_nothing_costs_the_time_that_was_given(
    connection: HttpConnection,
) -> None:
    start = time.monotonic()
    with pytest.raises(InferTimeout, match=r"bytes of the request were sent") as caught:
        connection.send_parts(MORE_THAN_BUFFERS_HOLD, Deadline(4 * SHORT))
    assert 4 * SHORT <= time.monotonic() - start < LONG / 3
    assert caught.value.context == {"timeout": 4 * SHORT}
    assert not connection.is_open


def test_an_error_that_somebody_keeps_holds_nothing_of_the_request(
    connection: HttpConnection,
) -> None:
    array = np.zeros(64 << 20, np.uint8)
    lives = weakref.ref(array)
    parts = [array.data]
    del array
    with pytest.raises(InferTimeout) as kept:
        connection.send_parts([REQUEST, parts.pop()], Deadline(SHORT))
    assert lives() is None
    assert kept.value.__traceback__ is not None


def test_a_peer_that_reads_a_little_at_a_time_does_not_put_off_the_deadline(
    connection: HttpConnection, peer: socket.socket
) -> None:
    def read_on() -> None:
        while peer.recv(1 << 16):
            time.sleep(SHORT / 10)

    def send() -> None:
        with pytest.raises(InferTimeout):
            connection.send_parts(MORE_THAN_BUFFERS_HOLD, Deadline(4 * SHORT))

    during(send, read_on)
    assert not connection.is_open


@pytest.mark.parametrize("end", [socket.socket.close, reset], ids=["end", "reset"])
def test_a_peer_that_has_gone_gets_nothing(
    connection: HttpConnection,
    peer: socket.socket,
    end: Callable[[socket.socket], object],
) -> None:
    end(peer)
    assert readable(connection)
    assert not connection.send_parts(MORE_THAN_BUFFERS_HOLD, Deadline(LONG))
    assert not connection.is_open


@pytest.mark.parametrize("end", [socket.socket.close, reset], ids=["end", "reset"])
def test_a_peer_that_goes_meanwhile_did_not_get_the_last_byte(
    connection: HttpConnection,
    peer: socket.socket,
    end: Callable[[socket.socket], object],
) -> None:
    def read_a_little() -> None:
        assert peer.recv(1)
        end(peer)

    assert not during(
        lambda: connection.send_parts(MORE_THAN_BUFFERS_HOLD, Deadline(LONG)),
        read_a_little,
    )
    assert not connection.is_open


def test_a_closed_connection_sends_no_parts(connection: HttpConnection) -> None:
    connection.close()
    assert not connection.send_parts([REQUEST], Deadline(LONG))


# --- answered before the end ----------------------------------------------------------


@pytest.mark.parametrize("closes", [False, True], ids=["stays", "closes"])
def test_an_answer_to_half_a_request_is_read_and_nothing_is_sent_behind_it(
    connection: HttpConnection, peer: socket.socket, closes: bool
) -> None:
    def refuse() -> None:
        assert peer.recv(1)
        peer.send(REFUSAL)
        if closes:
            peer.shutdown(socket.SHUT_RDWR)

    assert during(
        lambda: connection.send_parts(MORE_THAN_BUFFERS_HOLD, Deadline(LONG)), refuse
    )
    reply = connection.finish(connection.receive(LONG), Deadline(LONG))
    assert (reply.status, reply.error_text) == (400, "x")
    assert not connection.send(REQUEST)
    assert not connection.is_open


def test_nothing_in_parts_is_sent_behind_half_a_request_either(
    connection: HttpConnection, peer: socket.socket
) -> None:
    peer.send(REFUSAL)
    assert readable(connection)
    assert connection.send_parts(MORE_THAN_BUFFERS_HOLD, Deadline(LONG))
    connection.finish(connection.receive(LONG), Deadline(LONG))
    assert connection.is_quiet
    assert not connection.send_parts([REQUEST], Deadline(LONG))
    assert not connection.is_open


# --- Ctrl-C ---------------------------------------------------------------------------


def test_ctrl_c_at_any_moment_leaves_no_half_request_on_an_open_connection() -> None:
    parts = [REQUEST, *[MEGABYTE] * 8]

    def attempt(moment: int) -> CtrlC:
        with pair() as (connection, peer):
            thread = threading.Thread(target=count, args=(peer,))
            thread.start()
            pressed = CtrlC(
                lambda: connection.send_parts(parts, Deadline(LONG)), moment
            )
            was_open = connection.is_open
            connection.close()
            thread.join(LONG)
            assert not was_open or counts[-1] in (0, sum(map(len, parts)))
        return pressed

    def count(peer: socket.socket) -> None:
        counts.append(0)
        while data := peer.recv(1 << 20):
            counts[-1] += len(data)

    counts: list[int] = []
    closed = [counts[-1] for _ in every(attempt)]
    assert any(0 < nbytes < sum(map(len, parts)) for nbytes in closed)


def test_ctrl_c_while_the_peer_reads_nothing_closes(
    connection: HttpConnection,
) -> None:
    main = threading.get_ident()

    def press() -> None:
        eventually(lambda: waits.is_set(), "the sender waits")
        signal.pthread_kill(main, signal.SIGINT)

    waits = threading.Event()
    deadline = Deadline(LONG)

    class Noticed(Deadline):
        """Known to be asked for before each wait, and only then."""

        @property
        def remaining(self) -> float | None:
            waits.set()
            return deadline.remaining

    def send() -> None:
        with pytest.raises(KeyboardInterrupt):
            connection.send_parts(MORE_THAN_BUFFERS_HOLD, Noticed(LONG))

    during(send, press)
    assert not connection.is_open
