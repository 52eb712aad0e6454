"""What is not exactly a reply: refused or waited for, never taken for another."""

from __future__ import annotations

import http.client
import io

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shmlane.errors import ProtocolError
from shmlane.replies import HttpReply, ReplyParser
from tests.unit.http_replies import (
    CHUNKED,
    END,
    LENGTH,
    OK,
    bytewise,
    cut_places,
    read,
    replies,
    split,
)

REFUSED = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "HTTP/1.2": b"HTTP/1.2 200 OK\r\n" + LENGTH + END + b"{}",
    "lower case": b"http/1.1 200 OK\r\n" + LENGTH + END + b"{}",
    "two digits": b"HTTP/1.1 20 OK\r\n" + LENGTH + END + b"{}",
    "four digits": b"HTTP/1.1 2000 OK\r\n" + LENGTH + END + b"{}",
    "status 0xx": b"HTTP/1.1 099 OK\r\n" + LENGTH + END + b"{}",
    "superscript digit": b"HTTP/1.1 20\xb2 OK\r\n" + LENGTH + END + b"{}",
    "no space": b"HTTP/1.1 200OK\r\n" + LENGTH + END + b"{}",
    "two spaces": b"HTTP/1.1  200 OK\r\n" + LENGTH + END + b"{}",
    "a line before": END + OK + LENGTH + END + b"{}",
    "other protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
    "no length": OK + b"Server: x\r\n\r\n",
    "no headers": OK + END,
    "empty length": OK + b"Content-Length:\r\n\r\n",
    "negative length": OK + b"Content-Length: -2\r\n\r\n",
    "signed length": OK + b"Content-Length: +2\r\n\r\n{}",
    "hex length": OK + b"Content-Length: 0x2\r\n\r\n{}",
    "length with dot": OK + b"Content-Length: 2.0\r\n\r\n{}",
    "length with underscore": OK + b"Content-Length: 0_2\r\n\r\n{}",
    "superscript length": OK + b"Content-Length: \xb2\r\n\r\n{}",
    "space in length": OK + b"Content-Length: 1 0\r\n\r\n0123456789",
    "list of lengths": OK + b"Content-Length: 2, 2\r\n\r\n{}",
    "same length twice": OK + LENGTH + LENGTH + END + b"{}",
    "two lengths": OK + LENGTH + b"content-length: 3\r\n\r\n{} ",
    "length and chunked": OK + LENGTH + CHUNKED + END + b"2\r\n{}\r\n0\r\n\r\n",
    "chunked and length": OK + CHUNKED + LENGTH + END + b"2\r\n{}\r\n0\r\n\r\n",
    "chunked twice": OK + CHUNKED + CHUNKED + END + b"0\r\n\r\n",
    "gzip": OK + b"Transfer-Encoding: gzip\r\n\r\n",
    "gzip, chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": OK + b"Transfer-Encoding: identity\r\n" + LENGTH + END + b"{}",
    "chunked in 1.0": b"HTTP/1.0 200 OK\r\n" + CHUNKED + END + b"0\r\n\r\n",
    "huge length": OK + b"Content-Length: 999999999999999999\r\n\r\n",
    "length of 30 digits": OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    "folded header": OK + b"X: a\r\n b\r\n" + LENGTH + END + b"{}",
    "folded at once": OK + b" X: a\r\n" + LENGTH + END + b"{}",
    "space before colon": OK + b"Content-Length : 2\r\n\r\n{}",
    "no colon": OK + b"Server\r\n" + LENGTH + END + b"{}",
    "no name": OK + b": x\r\n" + LENGTH + END + b"{}",
    "name not ASCII": OK + b"\xdcber: x\r\n" + LENGTH + END + b"{}",
    "NUL in a value": OK + b"X: a\0b\r\n" + LENGTH + END + b"{}",
    "bare LF in a value": OK + b"X: a\nY: b\r\n" + LENGTH + END + b"{}",
    "bare CR in a value": OK + b"X: a\rY: b\r\n" + LENGTH + END + b"{}",
    "bare LF behind the status": b"HTTP/1.1 200 OK\n" + LENGTH + END + b"{}",
    "bare CR behind the status": b"HTTP/1.1 200 OK\r" + LENGTH + END + b"{}",
    "NUL in the status line": b"HTTP/1.1 200 \0\r\n" + LENGTH + END + b"{}",
    "chunk without size": OK + CHUNKED + END + b"\r\n{}\r\n0\r\n\r\n",
    "chunk size -2": OK + CHUNKED + END + b"-2\r\n{}\r\n0\r\n\r\n",
    "chunk size 0x2": OK + CHUNKED + END + b"0x2\r\n{}\r\n0\r\n\r\n",
    "chunk size not hex": OK + CHUNKED + END + b"g\r\n",
    "chunk size with bare LF": OK + CHUNKED + END + b"2\n{}\r\n0\r\n\r\n",
    "chunk size of 16 digits": OK + CHUNKED + END + b"0000000000000002\r\n{}\r\n",
    "huge chunk": OK + CHUNKED + END + b"fffffffffffffff\r\n",
    "chunk too long": OK + CHUNKED + END + b"2\r\n{}}\r\n0\r\n\r\n",
    "chunk too short": OK + CHUNKED + END + b"3\r\n{}\r\n0\r\n\r\n",
    "chunk without end": OK + CHUNKED + END + b"2\r\n{}xx0\r\n\r\n",
    "chunk with bare LF": OK + CHUNKED + END + b"2\r\n{}\n0\r\n\r\n",
    "trailer without colon": OK + CHUNKED + END + b"0\r\ntrailer\r\n\r\n",
    "folded trailer": OK + CHUNKED + END + b"0\r\nX: a\r\n b\r\n\r\n",
    "trailer with bare LF": OK + CHUNKED + END + b"0\r\nX: a\nY: b\r\n\r\n",
    "bad interim reply": b"HTTP/1.1 100 \r\nX\r\n\r\n" + OK + LENGTH + END + b"{}",
    "garbage behind an interim reply": b"HTTP/1.1 100 \r\n\r\n\r\n\r\n",
}


@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED)
def test_what_is_not_exactly_a_reply_is_refused(raw: bytes) -> None:
    assert read(raw) == "refused"
    assert read(*bytewise(raw)) == "refused"


@pytest.mark.timeout(5)
def test_a_hostile_header_costs_no_more_than_any_other() -> None:
    assert read(OK + b"X:" + b" " * 65_000 + b"\0\r\n\r\n") == "refused"


FRAGMENTS = [
    *(OK, LENGTH, CHUNKED, END, b"\r\n\r\n", b"\r", b"\n", b" ", b"\t", b":", b"\0"),
    *(b"HTTP/1.", b"100", b"0", b"2", b"f", b"-", b";", b",", b"{}", b"2\r\n{}\r\n"),
    *(b"0\r\n\r\n", b"Connection: close\r\n", b"\xff"),
]
fragments = st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=4))
garbage = st.one_of(st.binary(max_size=200), st.lists(fragments).map(b"".join))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A reply with a few places overwritten, cut out, or with something put in."""
    raw = draw(replies()).raw
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(raw)))
        stop = start + draw(st.integers(0, 6))
        raw = raw[:start] + draw(fragments) + raw[stop:]
    return raw


def body_of(raw: bytes) -> tuple[int, bytes]:
    """Status and body as the standard library, which is more lenient, reads them."""
    head, blank, rest = raw.partition(b"\r\n\r\n")
    # It takes space behind a value for a part of the value.
    lines = [line.rstrip(b" \t") for line in head.split(b"\r\n")]

    class Socket:
        def makefile(self, _mode: str) -> io.BytesIO:
            return io.BytesIO(b"\r\n".join(lines) + blank + rest)

    response = http.client.HTTPResponse(Socket())  # type: ignore[arg-type]
    response.begin()
    return response.status, response.read()


def assert_read_right(reply: HttpReply, raw: bytes) -> None:
    # Bodies of these are never sent to other clients, whatever the headers say.
    assume(reply.status not in (204, 304) and not raw.startswith(b"HTTP/1.1 1"))
    assume(not raw.startswith(b"HTTP/1.0 1"))
    assert (reply.status, bytes(reply.body)) == body_of(raw)


@given(st.one_of(damaged(), garbage))
@example(OK + b"Content-Length: 3\r\n\r\n{}\n")
def test_neither_noise_nor_a_damaged_reply_is_ever_misread(raw: bytes) -> None:
    outcome = read(raw)
    if isinstance(outcome, HttpReply):
        assert_read_right(outcome, raw)


@given(st.one_of(damaged(), garbage), cut_places)
def test_the_split_never_decides_what_becomes_of_the_bytes(
    raw: bytes, cuts: list[int]
) -> None:
    assert read(*split(raw, cuts)) == read(raw)
    assert read(*bytewise(raw)) == read(raw)


def test_a_refusal_quotes_what_came() -> None:
    with pytest.raises(ProtocolError, match=r"status line: b'HTTP/1\.1 OK'"):
        ReplyParser().feed(b"HTTP/1.1 OK\r\n\r\n")
    with pytest.raises(ProtocolError, match="content-length None, not a number"):
        ReplyParser().feed(OK + END)
