"""Replies as servers may send them, for Hypothesis, and what a parser makes of bytes.

Owns the strategies that tests of `ReplyParser` share. Refuses to judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from hypothesis import strategies as st

from shmlane.errors import ProtocolError
from shmlane.replies import HttpReply, ReplyParser

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = b"Content-Length: 2\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
END = b"\r\n"
FRAMING = ("content-length", "transfer-encoding", "connection")
TOKEN = "!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

Outcome = HttpReply | Literal["refused", "waiting"]


def read(*pieces: bytes, parser: ReplyParser | None = None) -> Outcome:
    """What comes of these bytes. Any exception but `ProtocolError` fails the test."""
    parser = parser or ReplyParser()
    reply: HttpReply | None = None
    for piece in pieces:
        try:
            reply = parser.feed(piece) or reply
        except ProtocolError:
            return "refused"
    return reply or "waiting"


def accepted(*pieces: bytes) -> HttpReply:
    reply = read(*pieces)
    assert isinstance(reply, HttpReply), reply
    return reply


def bytewise(raw: bytes) -> list[bytes]:
    return [raw[at : at + 1] for at in range(len(raw))]


def split(raw: bytes, cuts: Iterable[int]) -> list[bytes]:
    """`raw` in pieces that end at these places, empty ones included."""
    ends = [*sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    return [raw[a:b] for a, b in zip([0, *ends], ends, strict=False)]


# --- replies as servers may send them -------------------------------------------------


class Sent(NamedTuple):
    """What a server meant, and the bytes it sent."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes


Header = tuple[str, str]
cases = st.sampled_from([str.lower, str.upper, str.title, str.swapcase])
spaces = st.sampled_from(["", " ", "\t", " \t "])
names = st.text(TOKEN, min_size=1, max_size=12)
values = st.text(
    st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=20
).map(lambda text: text.strip(" "))
others = names.filter(lambda name: name.lower() not in FRAMING)
header_lists = st.lists(st.tuples(others, values), max_size=4)
cut_places = st.lists(st.integers(0, 400), max_size=8)


@st.composite
def head_lines(draw: st.DrawFn, headers: Sequence[Header]) -> str:
    """Header lines in any order, case and spacing that HTTP allows."""
    lines = [
        f"{draw(cases)(name)}:{draw(spaces)}{value}{draw(spaces)}\r\n"
        for name, value in headers
    ]
    return "".join(draw(st.permutations(lines)))


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """The body in chunks of any size, with extensions and trailers."""
    extensions = st.sampled_from(["", ";x", " ;name=value", '; q="a b"', " \t"])
    digits = st.sampled_from(["{:x}", "{:X}", "{:05x}"])
    raw = b""
    for piece in split(body, draw(cut_places)):
        if piece:
            size = draw(digits).format(len(piece)) + draw(extensions)
            raw += size.encode() + b"\r\n" + piece + b"\r\n"
    last = draw(st.sampled_from(["0", "000"])) + draw(extensions)
    trailers = draw(head_lines(draw(header_lists)))
    return raw + f"{last}\r\n{trailers}\r\n".encode("latin-1")


@st.composite
def replies(draw: st.DrawFn) -> Sent:
    status = draw(st.integers(200, 599))
    reason = draw(st.sampled_from(["", " ", " OK", " Not Found", " \xfc"]))
    body = draw(st.binary(max_size=60))
    # Lines of one name are joined in their order, which the shuffle must not change.
    headers = {name.lower(): value for name, value in draw(header_lists)}
    if draw(st.booleans()):
        headers["content-length"] = draw(st.sampled_from(["", "00"])) + str(len(body))
        framed = body
    else:
        headers["transfer-encoding"] = draw(cases)("chunked")
        framed = draw(chunked(body))
    lines = draw(head_lines(list(headers.items())))
    head = f"HTTP/1.1 {status}{reason}\r\n{lines}\r\n"
    return Sent(status, headers, body, head.encode("latin-1") + framed)


@st.composite
def interim_replies(draw: st.DrawFn) -> bytes:
    status = draw(st.sampled_from([100, 102, 103, 199]))
    lines = draw(head_lines(draw(header_lists)))
    return f"HTTP/1.1 {status} Go on\r\n{lines}\r\n".encode("latin-1")
