"""Replies as objects: strict HTTP/1.1 framing and the KServe v2 JSON inside.

Owns the reading of every byte that comes from the server. Refuses to do I/O, to wait,
and to guess: framing that is not exactly right is a `ProtocolError`, after which the
connection is of no more use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .buffers import Inbox
from .errors import ProtocolError
from .metadata import Shape

T = TypeVar("T")

_MAX_HEAD_BYTES = 64 << 10
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n\0]*)?")
# Space around a value is cut off later: matched here, it could be tried at every byte.
_HEADER_LINE = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):([^\r\n\0]*)")
_DIGITS = re.compile(r"[0-9]{1,18}")
_JSON_LENGTH = "inference-header-content-length"
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")

# What `json` raises for bytes that are not JSON, or nested beyond reading.
_NOT_JSON = (ValueError, RecursionError)

# Answered by something between us and Triton while Triton may still run the request.
FOREIGN_STATUS = frozenset({408, 499, 502, 504})


@dataclass(frozen=True, slots=True)
class HttpReply:
    """One complete reply. Header names are lower case; `body` is ours to keep.

    A view of a large body keeps the memory that it was received into.
    """

    status: int
    headers: Mapping[str, str]
    body: bytearray | memoryview
    keep_alive: bool

    @property
    def error_text(self) -> str | None:
        """The text of Triton's `{"error": ...}`, None when the body is not that."""
        try:
            text = json.loads(bytes(self.body))["error"]
        except (*_NOT_JSON, KeyError, TypeError):
            return None
        return text if isinstance(text, str) else None

    @property
    def is_from_triton(self) -> bool:
        """False when something in between may have answered in Triton's place."""
        if "via" in self.headers or self.status in FOREIGN_STATUS:
            return False
        return self.status == 200 or self.error_text is not None

    def json(self) -> Any:
        try:
            return json.loads(bytes(self.body))
        except _NOT_JSON as error:
            raise ProtocolError(
                f"a reply of status {self.status} is not JSON:"
                f" {bytes(self.body[:80])!r}"
            ) from error


class ReplyParser:
    """Reads one reply from any split of its bytes.

    `feed` returns the reply when its last byte has come, else None. Bytes behind the
    end are an error: one request at a time is all that is ever asked.

    A body of known length that does not come at once gets memory from `inbox`, its
    binary part aligned. From then on `room` says where its next bytes belong, so that
    they can be received in place, and `filled` that they were.
    """

    def __init__(
        self, *, max_body_bytes: int = 1 << 40, inbox: Inbox | None = None
    ) -> None:
        self.room: memoryview | None = None
        self._buffer = bytearray()
        self._head: tuple[int, Mapping[str, str], bool] | None = None
        self._length: int | None = None
        self._body = bytearray()
        self._placed: memoryview | None = None
        self._max_body_bytes = max_body_bytes
        self._inbox = inbox

    def feed(self, data: bytes | bytearray | memoryview) -> HttpReply | None:
        self._buffer += data
        while self._head is None:
            if not self._read_head():
                return None
        complete = self._read_chunks() if self._length is None else self._read_body()
        if not complete:
            return None
        if self._buffer:
            raise ProtocolError(
                f"{len(self._buffer)} bytes came behind the end of a reply."
            )
        status, headers, keep_alive = self._head
        body = self._body if self._placed is None else self._placed
        return HttpReply(status, headers, body, keep_alive)

    def filled(self, count: int) -> HttpReply | None:
        """As `feed`, for so many bytes that were put into `room`."""
        assert self.room is not None
        self.room = self.room[count:]
        return self.feed(b"")

    def _read_head(self) -> bool:
        """True when a head was taken from the buffer; it may be an interim one."""
        end = self._find_end(b"\r\n\r\n", 0, "head")
        if end < 0:
            self._check_beginning()
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        match = _STATUS_LINE.fullmatch(lines[0])
        if match is None:
            raise ProtocolError(f"this is not an HTTP status line: {lines[0][:80]!r}")
        status = int(match[2])
        headers = _parse_headers(lines[1:])
        if 100 <= status < 200 and status != 101:
            return True
        self._length = _body_length(match[1], headers)
        if self._length is not None and self._length > self._max_body_bytes:
            raise ProtocolError(f"a reply announces {self._length} bytes.")
        self._head = (status, headers, _keeps_alive(match[1], headers))
        return True

    def _find_end(self, mark: bytes, start: int, what: str) -> int:
        """Where `mark` ends the lines that begin at `start`, -1 if it has not come.

        Their length is limited alike whether they came at once or byte by byte.
        """
        end = self._buffer.find(mark, start)
        least = len(self._buffer) + 1 if end < 0 else end + len(mark)
        if least - start > _MAX_HEAD_BYTES:
            raise ProtocolError(
                f"the {what} of a reply exceeds {_MAX_HEAD_BYTES} bytes."
            )
        return end

    def _check_beginning(self) -> None:
        # Not waiting for more of what can never become a reply.
        beginning = bytes(self._buffer[:7])
        if beginning == b"HTTP/1."[: len(beginning)]:
            return
        hint = "Is this the HTTP address of a tritonserver?"
        # An HTTP/2 server begins with a SETTINGS frame (RFC 9113, 3.4).
        if self._buffer[3:5] == b"\x04\x00":
            hint = (
                "The server speaks HTTP/2: this looks like Triton's gRPC port; give its"
                " HTTP port (8000 unless changed)."
            )
        raise ProtocolError(f"this is not an HTTP reply: {beginning!r}.", hint=hint)

    def _read_body(self) -> bool:
        assert self._length is not None
        if self.room is None:
            missing = self._length - len(self._body)
            if len(self._buffer) >= missing:
                if self._inbox is not None:
                    self._inbox.weigh(self._length)
                self._body += self._buffer[:missing]
                del self._buffer[:missing]
                return True
            self.room = self._placed = self._take_memory(self._length)
        count = min(len(self._buffer), len(self.room))
        self.room[:count] = self._buffer[:count]
        self.room = self.room[count:]
        del self._buffer[:count]
        return not self.room

    def _take_memory(self, nbytes: int) -> memoryview:
        assert self._head is not None
        inbox = Inbox() if self._inbox is None else self._inbox
        try:
            return inbox.take(nbytes, _json_length(self._head[1], nbytes) or 0)
        except MemoryError as error:
            raise ProtocolError(
                f"a reply announces {nbytes} bytes, for which there is no memory."
            ) from error

    def _read_chunks(self) -> bool:
        while (end := self._find_end(b"\r\n", 0, "chunk size")) >= 0:
            match = _CHUNK_SIZE.fullmatch(self._buffer[:end])
            if match is None:
                raise ProtocolError("a chunk does not start with its size.")
            size = int(match[1], 16)
            if len(self._body) + size > self._max_body_bytes:
                raise ProtocolError(f"a reply exceeds {self._max_body_bytes} bytes.")
            if size == 0:
                return self._read_trailers(end)
            stop = end + 2 + size
            if len(self._buffer) < stop + 2:
                return False
            if self._buffer[stop : stop + 2] != b"\r\n":
                raise ProtocolError("a chunk does not end where it should.")
            self._body += self._buffer[end + 2 : stop]
            del self._buffer[: stop + 2]
        return False

    def _read_trailers(self, end: int) -> bool:
        """The last chunk is next in the buffer; its size line ends at `end`."""
        stop = self._find_end(b"\r\n\r\n", end, "trailer")
        if stop < 0:
            return False
        _parse_headers(bytes(self._buffer[end:stop]).split(b"\r\n")[1:])
        del self._buffer[: stop + 4]
        # Known now: whatever is fed from here on is behind the end, not a next chunk.
        self._length = len(self._body)
        return True


def _parse_headers(lines: Iterable[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER_LINE.fullmatch(line)
        if match is None:
            raise ProtocolError(f"this is not a header line: {line[:80]!r}")
        name = match[1].decode("ascii").lower()
        value = match[2].decode("latin-1").strip(" \t")
        # Two lengths, be they equal, make a list that is no number.
        if name in headers:
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def _body_length(minor: bytes, headers: Mapping[str, str]) -> int | None:
    """Bytes of the body, None for chunked; anything less certain is refused."""
    encoding = headers.get("transfer-encoding")
    length = headers.get("content-length")
    if encoding is not None:
        # HTTP/1.0 has no chunks: what passed it on may not know that these are some.
        if encoding.lower() != "chunked" or length is not None or minor == b"0":
            raise ProtocolError(f"a reply is framed as {encoding!r} and {length!r}.")
        return None
    if length is None or not _DIGITS.fullmatch(length):
        raise ProtocolError(f"a reply has content-length {length!r}, not a number.")
    return int(length)


def _keeps_alive(minor: bytes, headers: Mapping[str, str]) -> bool:
    tokens = {
        token.strip() for token in headers.get("connection", "").lower().split(",")
    }
    return "close" not in tokens and (minor == b"1" or "keep-alive" in tokens)


@dataclass(frozen=True, slots=True)
class OutputReply:
    """One output of a reply. `data` has its bytes when they came over the wire."""

    name: str
    datatype: str
    shape: Shape
    data: memoryview | None


@dataclass(frozen=True, slots=True)
class InferReply:
    """A successful inference as the server reports it."""

    request_id: str
    model_name: str
    model_version: str
    outputs: tuple[OutputReply, ...]
    parameters: Mapping[str, Any]

    @classmethod
    def parse(cls, reply: HttpReply) -> InferReply:
        """Read a reply of status 200; `ProtocolError` when it is not an inference."""
        text, blobs = _split_binary(reply)
        try:
            answer = json.loads(text)
            return cls(
                _field(answer, "id", str, ""),
                _field(answer, "model_name", str),
                _field(answer, "model_version", str),
                tuple(_parse_outputs(_field(answer, "outputs", list), blobs)),
                _field(answer, "parameters", dict, {}),
            )
        except (*_NOT_JSON, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"a reply of status 200 is not an inference reply: {error!r}"
            ) from error


def _field(fields: Any, name: str, kind: type[T], default: T | None = None) -> T:
    """A field of a JSON object, which must be of that kind."""
    value = fields.get(name, default)
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _sizes(values: list[Any]) -> Shape:
    # JSON's true is a number to Python, and int() would make one of 1.5 and of "1".
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values} are not sizes")
    return tuple(values)


def _split_binary(reply: HttpReply) -> tuple[bytes, memoryview]:
    """The JSON part and the binary part behind it (KServe binary tensor extension)."""
    if _JSON_LENGTH not in reply.headers:
        return bytes(reply.body), memoryview(b"")
    split = _json_length(reply.headers, len(reply.body))
    if split is None:
        raise ProtocolError(
            f"a reply of {len(reply.body)} bytes announces"
            f" {reply.headers[_JSON_LENGTH]!r} bytes of JSON."
        )
    whole = memoryview(reply.body)
    return bytes(whole[:split]), whole[split:]


def _json_length(headers: Mapping[str, str], nbytes: int) -> int | None:
    """Bytes of the JSON part of a body of `nbytes`, None where nothing can be told."""
    length = headers.get(_JSON_LENGTH, "")
    if not _DIGITS.fullmatch(length) or int(length) > nbytes:
        return None
    return int(length)


def _parse_outputs(outputs: list[Any], blobs: memoryview) -> Iterable[OutputReply]:
    offset = 0
    names: set[str] = set()
    for output in outputs:
        name, data = _field(output, "name", str), None
        if name in names:
            raise ProtocolError(f"output {name!r} comes twice.")
        names.add(name)
        if "data" in output:
            # Never asked for: what lies in shared memory would be an earlier result.
            raise ProtocolError(f"output {name!r} came as JSON text.")
        parameters = _field(output, "parameters", dict, {})
        if "binary_data_size" in parameters:
            (size,) = _sizes([parameters["binary_data_size"]])
            if offset + size > len(blobs):
                raise ProtocolError(
                    f"output {name!r} announces {size} bytes,"
                    f" {len(blobs) - offset} are left."
                )
            data = blobs[offset : offset + size]
            offset += size
        shape = _sizes(_field(output, "shape", list))
        yield OutputReply(name, _field(output, "datatype", str), shape, data)
    if offset != len(blobs):
        raise ProtocolError(f"{len(blobs) - offset} bytes belong to no output.")
