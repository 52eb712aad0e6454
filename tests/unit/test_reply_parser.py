"""Reading replies: any split of any reply gives that reply, within limits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlane.errors import ProtocolError
from shmlane.replies import ReplyParser
from tests.unit.http_replies import (
    CHUNKED,
    END,
    LENGTH,
    OK,
    Sent,
    accepted,
    bytewise,
    cut_places,
    interim_replies,
    read,
    replies,
    split,
)

MAX_HEAD = 64 << 10
JSON_LENGTH = "Inference-Header-Content-Length"


@given(replies(), cut_places)
def test_any_split_of_a_reply_gives_that_reply(sent: Sent, cuts: list[int]) -> None:
    reply = accepted(*split(sent.raw, cuts))
    assert (reply.status, reply.headers) == (sent.status, sent.headers)
    assert bytes(reply.body) == sent.body
    assert reply.keep_alive


@given(replies())
def test_a_reply_is_complete_with_its_last_byte_and_not_before(sent: Sent) -> None:
    parser = ReplyParser()
    early = [parser.feed(piece) for piece in bytewise(sent.raw[:-1])]
    assert early == [None] * len(early)
    assert read(sent.raw[-1:], parser=parser) == accepted(sent.raw)


@given(replies(), st.lists(interim_replies(), max_size=3), cut_places)
def test_interim_replies_are_passed_over(
    sent: Sent, interim: list[bytes], cuts: list[int]
) -> None:
    raw = b"".join(interim) + sent.raw
    assert accepted(*split(raw, cuts)) == accepted(sent.raw)


@given(replies(), st.sampled_from([bytes, bytearray, memoryview]))
def test_received_bytes_may_have_any_type(
    sent: Sent, kind: type[bytes | bytearray | memoryview]
) -> None:
    assert ReplyParser().feed(kind(sent.raw)) == accepted(sent.raw)


@given(replies(), cut_places)
def test_bytes_put_where_they_belong_give_the_same_reply(
    sent: Sent, cuts: list[int]
) -> None:
    parser, reply = ReplyParser(), None
    for piece in split(sent.raw, cuts):
        if parser.room:
            parser.room[: len(piece)] = piece
            reply = parser.filled(len(piece)) or reply
        else:
            reply = parser.feed(piece) or reply
    assert reply == accepted(sent.raw)


@given(replies(), st.binary(min_size=1, max_size=9))
def test_there_is_no_room_behind_the_end(sent: Sent, strays: bytes) -> None:
    parser = ReplyParser()
    read(*bytewise(sent.raw), parser=parser)
    assert not parser.room
    assert read(strays, parser=parser) == "refused"


@given(replies(), st.binary(min_size=1, max_size=9), st.booleans())
def test_bytes_behind_the_end_are_refused(
    sent: Sent, strays: bytes, at_once: bool
) -> None:
    pieces = [sent.raw + strays] if at_once else [sent.raw, strays]
    assert read(*pieces) == "refused"


@given(replies())
def test_a_second_reply_is_never_joined_to_the_first(sent: Sent) -> None:
    assert read(sent.raw, sent.raw) == "refused"
    assert read(sent.raw + sent.raw) == "refused"


def test_repeated_headers_are_joined_in_their_order() -> None:
    raw = OK + b"Via: 1.1 a\r\nContent-Length: 0\r\nVIA: 1.1 b\r\n\r\n"
    assert accepted(raw).headers["via"] == "1.1 a, 1.1 b"


@pytest.mark.parametrize(
    ("minor", "lines", "keep_alive"),
    [
        ("1", "", True),
        ("1", "Connection: keep-alive\r\n", True),
        ("1", "Connection: close\r\n", False),
        ("1", "connection: Close , x\r\n", False),
        ("1", "Connection: x\r\nConnection: close\r\n", False),
        ("1", "Connection: closed\r\n", True),
        ("0", "", False),
        ("0", "Connection: Keep-Alive\r\n", True),
        ("0", "Connection: keep-alive, close\r\n", False),
    ],
)
def test_a_reply_tells_whether_its_connection_goes_on(
    minor: str, lines: str, keep_alive: bool
) -> None:
    raw = f"HTTP/1.{minor} 200 OK\r\nContent-Length: 0\r\n{lines}\r\n".encode()
    assert accepted(raw).keep_alive is keep_alive


@pytest.mark.parametrize("length", ["0", "3", "9", "10", "11", "-1", "", "x", "2, 2"])
def test_a_body_in_pieces_is_read_whatever_its_json_part_is_said_to_be(
    length: str,
) -> None:
    """Whether that can be is asked of inferences alone, when they are read."""
    raw = OK + f"Content-Length: 10\r\n{JSON_LENGTH}: {length}\r\n\r\n".encode()
    assert bytes(accepted(raw, b"01234", b"56789").body) == b"0123456789"


# --- limits ---------------------------------------------------------------------------


def padded(head: bytes, nbytes: int) -> bytes:
    """`head` filled up with one long header to so many bytes, blank line included."""
    filler = nbytes - len(head) - len(b"X: \r\n\r\n")
    return head + b"X: " + b"x" * filler + b"\r\n\r\n"


LIMITED = {
    "head": padded(OK + LENGTH, MAX_HEAD) + b"{}",
    "interim head": padded(b"HTTP/1.1 100 \r\n", MAX_HEAD) + OK + LENGTH + END + b"{}",
    "chunk size": OK
    + CHUNKED
    + END
    + b"2;".ljust(MAX_HEAD - 2, b"x")
    + b"\r\n{}\r\n0\r\n\r\n",
    "trailers": OK + CHUNKED + END + b"2\r\n{}\r\n0" + padded(b"\r\n", MAX_HEAD),
}


def in_random_pieces(raw: bytes) -> list[bytes]:
    """A few pieces, with single bytes around each place where a limit may strike."""
    near = [at for at in range(len(raw)) if abs(at - MAX_HEAD) < 200]
    return split(raw, [*near, *random.sample(range(len(raw)), 20)])


@pytest.mark.parametrize("raw", LIMITED.values(), ids=LIMITED)
def test_lines_up_to_the_limit_are_read(raw: bytes) -> None:
    assert bytes(accepted(raw).body) == b"{}"
    assert accepted(*in_random_pieces(raw)) == accepted(raw)


@pytest.mark.parametrize("raw", LIMITED.values(), ids=LIMITED)
def test_lines_over_the_limit_are_refused_however_they_come(raw: bytes) -> None:
    longer = raw.replace(b"xx", b"xxx", 1)
    assert read(longer) == "refused"
    assert read(*in_random_pieces(longer)) == "refused"


@pytest.mark.parametrize(
    "beginning",
    [OK + b"X: ", OK + CHUNKED + END + b"2;", OK + CHUNKED + END + b"0\r\nX: "],
    ids=["head", "chunk size", "trailers"],
)
def test_an_endless_line_is_refused_before_it_ends(beginning: bytes) -> None:
    parser = ReplyParser()
    assert read(beginning, parser=parser) == "waiting"
    assert read(*[b"x" * 4096] * 17, parser=parser) == "refused"


@pytest.mark.parametrize("count", [9, 10, 11])
@pytest.mark.parametrize("framing", ["length", "one chunk", "two chunks"])
def test_a_body_over_the_limit_is_refused_before_it_comes(
    framing: str, count: int
) -> None:
    announced = {
        "length": b"Content-Length: %d\r\n\r\n" % count,
        "one chunk": CHUNKED + b"\r\n%x\r\n" % count,
        "two chunks": CHUNKED + b"\r\n4\r\nabcd\r\n%x\r\n" % (count - 4),
    }[framing]
    outcome = read(OK + announced, parser=ReplyParser(max_body_bytes=10))
    assert outcome == ("waiting" if count <= 10 else "refused")


def test_a_grpc_port_is_recognised() -> None:
    with pytest.raises(ProtocolError, match="gRPC port"):
        ReplyParser().feed(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00")
