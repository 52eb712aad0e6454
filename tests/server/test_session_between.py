"""Something in between that lies: never a wrong value, and no slot is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import (
    Connection,
    InferFailed,
    ProtocolError,
    RequestLost,
    Session,
    ShmlaneError,
    Timeouts,
)
from shmlane.server import TritonServer
from tests.liar import Liar
from tests.sessions import all_free, registered, sink

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def liar(server: TritonServer, tmp_path: Path) -> Iterator[Liar]:
    with Liar(server, tmp_path / "liar.sock") as liar:
        yield liar


@pytest.fixture
def session(liar: Liar) -> Iterator[Session]:
    """A session of one slot through the liar, which must serve right at the end."""
    limits = Timeouts(connect=1.0, infer=10.0)
    with Session(liar.url, "sink", slots=1, timeouts=limits) as session:
        assert sink(session, 1) == 1
        yield session
        liar.twist = lambda reply, _: [reply]
        all_free(session)
        for value in (2, 3, 4):
            assert sink(session, value) == value


def test_a_reply_in_pieces_is_read_whole(liar: Liar, session: Session) -> None:
    liar.twist = lambda reply, _: [reply[:1], reply[1:20], reply[20:-1], reply[-1:]]
    for value in range(6):
        assert sink(session, value) == value
    assert session.stats().connections == 1


def test_a_reply_is_not_known_by_its_beginning(liar: Liar, session: Session) -> None:
    def head_first(reply: bytes, _before: list[bytes]) -> list[bytes]:
        head = reply.index(b"\r\n\r\n") + 4
        return [reply[:head], reply[head:]]

    liar.twist = head_first
    for value in range(4):
        assert sink(session, value) == value
    # The same head with another body, as when the output has another shape.
    liar.twist = lambda reply, before: head_first(
        reply.replace(b'"shape":[1]', b'"shape":[7]'), before
    )
    for _ in range(2):
        with pytest.raises(InferFailed, match=r"'OUTPUT__0' came as FP32 \(7,\)"):
            sink(session, 5)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 9), (9, 8)])
def test_a_reply_that_comes_twice_answers_nothing_else(
    liar: Liar, session: Session, sizes: tuple[int, int]
) -> None:
    sink(session, 6, size=sizes[0])
    # The reply to the request before, once more, when the next one has been sent.
    liar.twist = lambda reply, before: [before[-1]]
    with pytest.raises(ProtocolError, match="belongs to another request"):
        sink(session, 7, size=sizes[1])
    assert all_free(session).drains == 1


def test_stray_bytes_on_an_idle_connection_are_not_read(
    liar: Liar, session: Session
) -> None:
    liar.twist = lambda reply, _: [reply + reply]
    with pytest.raises(ProtocolError, match="behind the end"):
        sink(session, 5)
    all_free(session)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\nsad",
        b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops",
        b'HTTP/1.1 200 OK\r\nVia: 1.1 x\r\nContent-Length: 15\r\n\r\n{"error":"fine"}'[
            :-1
        ],
    ],
    ids=["504", "502", "408", "500 of nobody", "Via"],
)
def test_an_answer_in_the_servers_place_means_lost(
    liar: Liar, session: Session, reply: bytes
) -> None:
    liar.twist = lambda _reply, _: [reply]
    with pytest.raises(RequestLost, match="answered in its place") as it:
        sink(session, 5)
    assert it.value.retryable
    assert all_free(session).drains == 1


@pytest.mark.parametrize(
    ("twist", "message"),
    [
        ((b"HTTP/1.1 200", b"SSH-2.0 hello"), "not an HTTP"),
        ((b"Content-Length:", b"X-Length:"), "content-length None"),
        ((b'"model_name"', b'"nodel_name"'), "not an inference reply"),
        ((b'"model_name":"sink"', b'"model_name":"sunk"'), "another request"),
    ],
    ids=["not HTTP", "no length", "no model", "other model"],
)
def test_a_reply_that_triton_does_not_send_is_refused(
    liar: Liar, session: Session, twist: tuple[bytes, bytes], message: str
) -> None:
    liar.twist = lambda reply, _: [reply.replace(*twist)]
    with pytest.raises(ProtocolError, match=message):
        sink(session, 5)
    assert all_free(session).drains == 1


@pytest.mark.parametrize(
    ("twist", "message"),
    [
        ((b'"OUTPUT__0"', b'"OUTPUT__1"'), "without output 'OUTPUT__0'"),
        ((b'"FP32"', b'"FP64"'), "came as FP64"),
        ((b'"shape":[1]', b'"shape":[2]'), r"does not fit 4 bytes"),
    ],
    ids=["no output", "other datatype", "too large"],
)
def test_outputs_that_are_not_there_are_an_error(
    liar: Liar, session: Session, twist: tuple[bytes, bytes], message: str
) -> None:
    liar.twist = lambda reply, _: [reply.replace(*twist)]
    for _ in range(3):
        with pytest.raises(InferFailed, match=message):
            sink(session, 5)
    all_free(session)


@pytest.mark.parametrize("sent", [0, 1, 40, -1])
def test_a_connection_cut_within_a_reply_means_lost(
    liar: Liar, session: Session, sent: int
) -> None:
    liar.twist = lambda reply, _: [*([reply[:sent]] if sent else []), None]
    with pytest.raises(RequestLost, match="connection broke"):
        sink(session, 5)
    assert all_free(session).drains == 1


def test_a_lost_reply_is_asked_for_again_if_allowed(
    liar: Liar, server: TritonServer
) -> None:
    cuts: list[None] = []

    def cut_once(reply: bytes, _before: list[bytes]) -> list[bytes | None]:
        return [cuts.pop() if cuts else reply]

    again = Connection(replay=True)
    with Session(liar.url, "sink", slots=1, connection=again) as session:
        liar.twist = cut_once
        for value in range(4):
            cuts.append(None)
            assert sink(session, value) == value
        stats = all_free(session)
        assert (stats.retries, stats.drains) == (4, 0)
    assert not registered(server)


def test_a_connection_that_died_idle_is_replaced(liar: Liar, session: Session) -> None:
    for value in range(5):
        before = session.stats().connections
        liar.hang_up()
        assert sink(session, value) == value
        assert session.stats().connections == before + 1
    assert session.stats().drains == 0


def test_a_reply_that_ends_its_connection_is_a_reply(
    liar: Liar, session: Session
) -> None:
    liar.twist = lambda reply, _: [
        reply.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1),
        None,
    ]
    for value in range(5):
        assert sink(session, value) == value
    assert session.stats().drains == 0


def test_a_connection_cut_while_opening_leaves_nothing(
    liar: Liar, server: TritonServer
) -> None:
    liar.hang_up_next = True
    with pytest.raises(ShmlaneError):
        Session(liar.url, "sink").open()
    with Session(liar.url, "sink") as session:
        assert sink(session, 5) == 5
