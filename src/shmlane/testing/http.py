"""HTTP/1.1 as Triton's frontend reads and writes it (libevhtp).

Owns cutting requests out of a connection and turning replies into bytes. Refuses to
know what a path means. Chunked requests are refused by closing, as clients of shared
memory never need them.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from ..errors import ServerError

_RECEIVE_BYTES = 256 << 10
# Triton 2.51 takes a head of 8 KB and resets the connection at 16 KB.
_MAX_HEAD_BYTES = 12 << 10
_REQUEST_LINE = re.compile(r"([A-Z]+) (\S+) HTTP/(1\.[01])")
_HEADER_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
# What cannot become a request: no method, or a line that ends with LF alone.
_NO_HTTP = re.compile(rb"\A[^A-Z]|(?<!\r)\n")
_ABSOLUTE = re.compile(r"https?://[^/]*")
# evhtp has a phrase of its own for 405.
_PHRASES = {each.value: each.phrase for each in HTTPStatus} | {405: "Not Allowed"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came. Header names are lower case; `path` has no query."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    http: str = "1.1"

    @property
    def is_inference(self) -> bool:
        """Whether it asks a model to run."""
        return self.method == "POST" and self.path.endswith("/infer")

    @property
    def keeps_alive(self) -> bool:
        """HTTP/1.1 unless told to close, HTTP/1.0 only when told to stay."""
        token = self.headers.get("connection", "").lower()
        return token == "keep-alive" if self.http == "1.0" else token != "close"


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent back. pauses: the frontend stopped reading until it was ready."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    pauses: bool = False

    @classmethod
    def json(cls, content: Any) -> Reply:
        return cls(200, compact(content))

    @classmethod
    def empty(cls, status: int = 200) -> Reply:
        return cls(status, content_type="text/plain")

    @classmethod
    def of_error(cls, error: ServerError) -> Reply:
        """Triton's `{"error": ...}` for what was raised as `refused`."""
        status = cast(int, error.context["status"])
        kind = "text/plain" if error.context["plain"] else "application/json"
        return cls(status, compact({"error": error.message}), kind)

    def pack(self, request: Request) -> bytes:
        """The bytes of this reply to `request`."""
        reason = _PHRASES.get(self.status, "Unknown")
        lines = [f"HTTP/{request.http} {self.status} {reason}"]
        headers = [
            ("Content-Type", self.content_type),
            *self.headers,
            ("Content-Length", str(len(self.body))),
        ]
        if not request.keeps_alive:
            headers.append(("Connection", "close"))
        elif request.http == "1.0":
            headers.append(("Connection", "keep-alive"))
        lines += [f"{name}: {value}" for name, value in headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


def compact(content: Any) -> bytes:
    """JSON without spaces, as RapidJSON writes it."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def refused(status: int, text: str, *, plain: bool = False) -> ServerError:
    """What the server raises to answer `{"error": text}` with `status`.

    plain: the reply says text/plain, as those do that come from Triton's backends and
    from evhtp itself.
    """
    return ServerError(text, status=status, plain=plain)


class RequestReader:
    """Reads one request after the other from a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()

    def read(self, *, resumes: bool = True) -> Request | None:
        """The next request; None when the connection is over or makes no sense.

        resumes: False after a request that was answered at once. evhtp then looks at
        bytes that have already come only when more of them come, so that pipelined
        requests are stuck; it looks by itself only after a request that paused it.
        """
        if self._buffer and not resumes and not self._receive():
            return None
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            hopeless = _NO_HTTP.search(self._buffer)
            if hopeless or len(self._buffer) > _MAX_HEAD_BYTES or not self._receive():
                return None
        head = _parse_head(bytes(self._buffer[:end]))
        if end > _MAX_HEAD_BYTES or head is None:
            return None
        del self._buffer[: end + 4]
        return self._read_body(*head)

    def _read_body(
        self, method: str, target: str, http: str, headers: Mapping[str, str]
    ) -> Request | None:
        # Without a length there is no body; what follows is taken for a request.
        text = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not text.isdecimal():
            return None
        length = int(text)
        if "expect" in headers and not self._say_continue():
            return None
        while len(self._buffer) < length:
            if not self._receive():
                return None
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        path = _ABSOLUTE.sub("", target, count=1).partition("?")[0]
        return Request(method, path, headers, body, http)

    def _receive(self) -> bool:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            return False
        self._buffer += data
        return bool(data)

    def _say_continue(self) -> bool:
        try:
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        except OSError:
            return False
        return True


def _parse_head(head: bytes) -> tuple[str, str, str, dict[str, str]] | None:
    first, *lines = head.decode("latin-1").split("\r\n")
    start = _REQUEST_LINE.fullmatch(first)
    matches = [_HEADER_LINE.fullmatch(line) for line in lines]
    if start is None or not all(matches):
        return None
    headers = {match[1].lower(): match[2] for match in matches if match}
    return start[1], start[2], start[3], headers
