"""Large replies: received where they belong, beside everything that may come between.

What is said of a reply that comes at once holds for one that does not.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from shmlane import buffers
from shmlane.buffers import Inbox
from shmlane.errors import InferTimeout, ProtocolError, RequestLost
from shmlane.replies import HttpReply, InferReply
from shmlane.timing import Deadline
from shmlane.transport import HttpConnection
from tests.polling import eventually
from tests.unit.loopback import (
    LONG,
    REPLY,
    SHORT,
    Wire,
    connected,
    during,
    readable,
    reset,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs poll")

LARGE = np.random.default_rng(2).bytes(5_000_000)


@pytest.fixture(params=["TCP", "Unix"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    if request.param == "TCP":
        with connected() as wire:
            yield wire
        return
    near, peer = socket.socketpair()
    with peer:
        connection = HttpConnection(near)
        yield Wire(connection, peer)
        connection.close()


@pytest.fixture
def connection(wire: Wire) -> HttpConnection:
    return wire.connection


@pytest.fixture
def peer(wire: Wire) -> socket.socket:
    return wire.peer


def framed(body: bytes, *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in lines)
    return f"HTTP/1.1 200 OK\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + (
        body
    )


def received(connection: HttpConnection, peer: socket.socket, raw: bytes) -> HttpReply:
    return during(
        lambda: connection.finish(connection.receive(LONG), Deadline(LONG)),
        lambda: peer.sendall(raw),
    )


def inference(*arrays: npt.NDArray[np.float32], padding: int = 0) -> bytes:
    outputs = [
        {
            "name": str(number),
            "datatype": "FP32",
            "shape": array.shape,
            "parameters": {"binary_data_size": array.nbytes},
        }
        for number, array in enumerate(arrays)
    ]
    answer = {"model_name": "m", "model_version": "1", "outputs": outputs}
    text = json.dumps(answer).encode() + b" " * padding
    blobs = b"".join(array.tobytes() for array in arrays)
    return framed(text + blobs, f"Inference-Header-Content-Length: {len(text)}")


# --- where it lies --------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 1, 30, 63])
def test_outputs_are_aligned_whatever_stands_before_them(
    connection: HttpConnection, peer: socket.socket, padding: int
) -> None:
    sent = [np.arange(n, dtype=np.float32) for n in (400_000, 16, 300_000)]
    reply = received(connection, peer, inference(*sent, padding=padding))
    outputs = InferReply.parse(reply).outputs
    for output, array in zip(outputs, sent, strict=True):
        assert output.data is not None
        got = np.frombuffer(output.data, np.float32)
        assert got.__array_interface__["data"][0] % 64 == 0
        np.testing.assert_array_equal(got, array)


def test_the_next_reply_is_never_written_over_one_that_is_looked_at(
    connection: HttpConnection, peer: socket.socket
) -> None:
    bodies = [bytes([number]) * 1_000_000 for number in range(3)]
    kept = [received(connection, peer, framed(body)).body for body in bodies]
    assert list(map(bytes, kept)) == bodies


@pytest.mark.skipif(not buffers._COUNTS_ARE_EXACT, reason="needs the GIL")
def test_replies_that_nobody_looks_at_take_turns_in_one_memory(
    connection: HttpConnection, peer: socket.socket
) -> None:
    places = set()
    for _ in range(3):
        body = received(connection, peer, framed(LARGE)).body
        places.add(np.frombuffer(body, np.uint8).__array_interface__["data"][0])
        assert bytes(body) == LARGE
        del body
    assert len(places) == 1


# --- what comes between ---------------------------------------------------------------


def test_a_small_reply_behind_a_large_one_is_not_waited_for_in_vain(
    connection: HttpConnection, peer: socket.socket
) -> None:
    for _ in range(2):
        assert bytes(received(connection, peer, framed(LARGE)).body) == LARGE
        assert connection.is_quiet
        peer.send(b"H")
        eventually(lambda: not connection.is_quiet, "one byte is noticed")
        peer.send(REPLY[1:])
        reply = connection.finish(connection.receive(LONG), Deadline(LONG))
        assert bytes(reply.body) == b"{}"


def by_finish(connection: HttpConnection) -> HttpReply:
    return connection.finish(connection.receive(LONG), Deadline(LONG))


def by_feed(connection: HttpConnection) -> HttpReply:
    while (reply := connection.feed(connection.receive(LONG))) is None:
        pass
    return reply


@pytest.mark.parametrize("read_on", [by_finish, by_feed])
@pytest.mark.parametrize("cut", [70, 100_000, 4_000_000])
def test_a_large_reply_cut_by_a_time_out_is_read_on_later(
    connection: HttpConnection,
    peer: socket.socket,
    cut: int,
    read_on: Callable[[HttpConnection], HttpReply],
) -> None:
    raw = framed(LARGE)

    def give_up() -> None:
        data = connection.receive(LONG)
        with pytest.raises(InferTimeout):
            connection.finish(data, Deadline(4 * SHORT))

    during(give_up, lambda: peer.sendall(raw[:cut]))
    assert connection.is_open
    sender = threading.Thread(target=peer.sendall, args=[raw[cut : cut + 1]])
    sender.start()
    # Whoever watches the connection is woken by the next byte, not by many.
    assert readable(connection)
    sender.join()
    reply = during(lambda: read_on(connection), lambda: peer.sendall(raw[cut + 1 :]))
    assert bytes(reply.body) == LARGE
    assert connection.is_quiet


def test_a_large_reply_is_not_read_on_behind_the_deadline(
    connection: HttpConnection, peer: socket.socket
) -> None:
    """However much of it is there: a reply without end would hold the caller."""
    raw, cut = framed(LARGE[:60_000]), 1000
    peer.sendall(raw[cut:])
    assert readable(connection)
    with pytest.raises(InferTimeout, match=r"no complete reply came within 0 s"):
        connection.finish(raw[:cut], Deadline(0))
    assert bytes(by_finish(connection).body) == LARGE[:60_000]


@pytest.mark.parametrize("end", [socket.socket.close, reset], ids=["end", "reset"])
def test_a_large_reply_cut_by_the_end_is_lost(
    connection: HttpConnection,
    peer: socket.socket,
    end: Callable[[socket.socket], object],
) -> None:
    def send_half() -> None:
        peer.sendall(framed(LARGE)[:2_000_000])
        end(peer)

    def read() -> None:
        with pytest.raises(RequestLost):
            connection.finish(connection.receive(LONG), Deadline(LONG))

    during(read, send_half)
    assert not connection.is_open


def test_a_last_large_reply_closes_the_connection(
    connection: HttpConnection, peer: socket.socket
) -> None:
    reply = received(connection, peer, framed(LARGE, "Connection: close"))
    assert bytes(reply.body) == LARGE
    assert not connection.is_open


def test_what_comes_behind_a_large_reply_keeps_its_connection_from_use(
    connection: HttpConnection, peer: socket.socket
) -> None:
    def send() -> None:
        peer.sendall(framed(LARGE) + b"x")

    def read() -> None:
        reply = connection.finish(connection.receive(LONG), Deadline(LONG))
        assert bytes(reply.body) == LARGE

    during(read, send)
    eventually(lambda: not connection.is_quiet, "the stray is noticed")


def test_a_large_reply_in_chunks_is_read(
    connection: HttpConnection, peer: socket.socket
) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b"%x\r\n%s\r\n" % (len(LARGE), LARGE) + b"3\r\nend\r\n0\r\n\r\n"
    assert bytes(received(connection, peer, raw).body) == LARGE + b"end"


def test_a_large_error_keeps_its_text(
    connection: HttpConnection, peer: socket.socket
) -> None:
    text = "x" * 500_000
    raw = framed(json.dumps({"error": text}).encode()).replace(b"200 OK", b"400 No")
    reply = received(connection, peer, raw)
    assert reply.error_text == text
    assert reply.is_from_triton
    assert reply.json() == {"error": text}


def test_a_reply_for_which_there_is_no_memory_is_refused(
    connection: HttpConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_inbox: Inbox, _nbytes: int, _aligned: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(Inbox, "take", refuse)
    with pytest.raises(ProtocolError, match="5000000 bytes, for which there is no mem"):
        connection.feed(framed(LARGE)[:1000])
    assert not connection.is_open
