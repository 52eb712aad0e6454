"""HTTP by hand: requests as bytes, and what a server makes of each.

Owns sending bytes that a client would not send and reading replies without judging
them. Refuses to reconnect.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT = 10.0
HEALTH = b"GET /v2/health/live HTTP/1.1\r\n\r\n"


class RawReply(NamedTuple):
    """One reply. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The text of `{"error": ...}`."""
        return str(json.loads(self.body)["error"])

    def json(self) -> Any:
        return json.loads(self.body)


class RawConnection:
    """One connection to a server, used by hand."""

    def __init__(self, url: str) -> None:
        self.socket = _connect(url)
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> RawReply | None:
        """The next reply; None when the connection ended first."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if not self._receive():
                return None
        first, *lines = self._buffer[:end].decode().split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        stop = end + 4 + int(headers.get("content-length", "0"))
        while len(self._buffer) < stop:
            if not self._receive():
                return None
        body, self._buffer = self._buffer[end + 4 : stop], self._buffer[stop:]
        return RawReply(int(first.split()[1]), headers, body)

    def ask(self, data: bytes) -> RawReply:
        self.send(data)
        reply = self.read()
        assert reply is not None, f"the server closed on {data[:80]!r}"
        return reply

    def is_alive(self) -> bool:
        """Whether the server still answers here."""
        try:
            self.send(HEALTH)
            return self.read() is not None
        except ConnectionError:
            return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _receive(self) -> bool:
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)


def _connect(url: str) -> socket.socket:
    if not url.startswith("unix://"):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        return socket.create_connection((parts.hostname, parts.port), TIMEOUT)
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(TIMEOUT)
    try:
        connected.connect(url.removeprefix("unix://"))
    except OSError:
        connected.close()
        raise
    return connected


def ask(url: str, data: bytes) -> RawReply:
    """One request on a connection of its own."""
    with RawConnection(url) as connection:
        return connection.ask(data)


# --- requests -------------------------------------------------------------------------


def request(
    method: str,
    path: str,
    content: Any = b"",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """A request; anything but bytes is sent as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if method != "GET":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def get(path: str) -> bytes:
    return request("GET", path)


def region_path(name: str, action: str) -> str:
    return f"/v2/systemsharedmemory/region/{name}/{action}"


def register(name: str, **fields: Any) -> bytes:
    """Register a region with just these fields: key, byte_size, offset."""
    return request("POST", region_path(name, "register"), fields)


def unregister(name: str) -> bytes:
    return request("POST", region_path(name, "unregister"))


def status(name: str) -> bytes:
    return get(region_path(name, "status"))


def place(region: str | None, nbytes: Any = None, offset: Any = None) -> dict[str, Any]:
    """Parameters that say where a tensor lies; None leaves one out."""
    given = {
        "shared_memory_region": region,
        "shared_memory_byte_size": nbytes,
        "shared_memory_offset": offset,
    }
    return {name: value for name, value in given.items() if value is not None}


def tensor(
    parameters: Mapping[str, Any] | None = None,
    *,
    shape: Sequence[Any] = (1, 1, 1, 16),
    datatype: str = "FP32",
    name: str = "INPUT__0",
    **fields: Any,
) -> dict[str, Any]:
    """One input of the demo models, as JSON."""
    described = {"name": name, "datatype": datatype, "shape": list(shape), **fields}
    return described | ({} if parameters is None else {"parameters": parameters})


def output(
    parameters: Mapping[str, Any] | None = None, *, name: str = "OUTPUT__0"
) -> dict[str, Any]:
    """One requested output of the demo models, as JSON."""
    return {"name": name} | ({} if parameters is None else {"parameters": parameters})


def infer(
    inputs: Sequence[Any] | None,
    outputs: Sequence[Any] | None = None,
    *,
    model: str = "identity",
    binary: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> bytes:
    """An inference with the id 7 unless `fields` say otherwise."""
    document = {"id": "7", **fields}
    if inputs is not None:
        document["inputs"] = list(inputs)
    if outputs is not None:
        document["outputs"] = list(outputs)
    text = json.dumps(document).encode()
    headers = dict(headers or {})
    if binary is not None:
        headers["Inference-Header-Content-Length"] = str(len(text))
    return request("POST", f"/v2/models/{model}/infer", text + (binary or b""), headers)
