"""Where a server is, and how it is talked to.

Owns URLs, the options of the sockets made from them, and what a caller says about
connections. Refuses to try twice and to send anything (`transport`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import UsageError

# What connecting ends in when the time for it is up.
NO_TIME = (TimeoutError, BlockingIOError)

# Linux reports the path of a Unix socket in 108 bytes with the closing zero.
_MAX_UNIX_PATH = 107
# Stricter than the resolver, which takes spaces and separators for parts of a name.
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_ADDRESS = re.compile(
    rf"(?:(?P<name>{_LABEL}(?:\.{_LABEL})*\.?)"
    r"|\[(?P<ipv6>[0-9A-Fa-f:.]+)(?P<zone>%[A-Za-z0-9._~-]+)?\])"
    r"(?::(?P<port>[0-9]{0,5}))?/?"
)
_DEFAULT_PORT = 8000
_MAX_PORT = 65535

# TCP finds the size that it needs by itself. A Unix socket keeps the system's, which
# has whoever sends a large request woken for every part of it.
_UNIX_SEND_BYTES = 1 << 20

# A peer that vanishes without a word (its machine, or what leads to it) is noticed
# within a minute: asked from half of it on, and no longer waited for at its end.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    # Milliseconds, for bytes that the peer never acknowledged: no probe is sent then.
    "TCP_USER_TIMEOUT": 60_000,
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Connection:
    """How the server is talked to.

    headers: sent with every request, control and inference alike (a restricted API
        expects a key there).
    replay: when the connection breaks with a request in flight, wait until the server
        cannot touch its memory any more and send it again, instead of `RequestLost`.
        The model may then run twice for one call.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    replay: bool = False

    def __post_init__(self) -> None:
        # Frozen for everybody else; what is kept is ours, not the caller's.
        object.__setattr__(self, "headers", _checked_headers(self.headers))
        if not isinstance(self.replay, bool):
            raise _refusal("replay", self.replay, "True or False")

    def __repr__(self) -> str:
        # Names only: values are often keys, and this may go to a log.
        return f"Connection(headers={list(self.headers)}, replay={self.replay})"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the HTTP frontend of a server listens. Port 8000 if none is given."""

    url: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read `host:port`, `http://host:port` or `unix:///path`; else `UsageError`."""
        scheme, rest = url.split("://", 1) if "://" in url else ("http", url)
        if scheme.lower() == "unix":
            return cls._unix(url, rest)
        if scheme.lower() != "http":
            raise UsageError(
                f"{url!r}: scheme {scheme!r} is not supported.",
                hint="Use host:port, http://host:port or unix:///path/to/http.sock.",
            )
        match = _ADDRESS.fullmatch(rest)
        port = int(match["port"] or _DEFAULT_PORT) if match else 0
        if match is None or not 0 < port <= _MAX_PORT or not _is_ipv6(match["ipv6"]):
            raise UsageError(
                f"{url!r} is not a server address.",
                hint=_address_hint(url),
            )
        return cls(url, match["name"] or match["ipv6"] + (match["zone"] or ""), port)

    @classmethod
    def _unix(cls, url: str, path: str) -> Endpoint:
        length = len(os.fsencode(path))
        if not path.startswith("/") or "\0" in path or length > _MAX_UNIX_PATH:
            raise UsageError(
                f"{url!r} is not a Unix socket address: the path must be absolute and"
                f" at most {_MAX_UNIX_PATH} bytes, this one has {length}."
            )
        return cls(url, "localhost", 0, path)

    @property
    def address(self) -> str:
        """What is connected to, in words: the port also where the URL leaves it out."""
        return self.url if self.path else self.host_header

    @property
    def host_header(self) -> str:
        if self.path:
            return self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def connect(self, timeout: float | None) -> socket.socket:
        """One attempt at a connected socket; raises OSError."""
        if self.path:
            return _connected(socket.AF_UNIX, self.path, timeout)
        refused: OSError | None = None
        for family, _, _, _, address in socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM
        ):
            try:
                return _connected(family, address, timeout)
            except OSError as error:
                refused = refused or error
        try:
            raise refused or OSError("the name has no address")
        finally:
            # It holds this frame, and with it those of all callers and their views.
            del refused

    def is_deserted(self, timeout: float | None) -> bool:
        """True when no server is there; what one knew that was, is gone with it."""
        try:
            self.connect(timeout).close()
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
        return False


def _address_hint(url: str) -> str:
    if url.startswith("/"):
        return f"Perhaps unix://{url}."
    if url.lower().startswith("unix:/"):
        path = url.partition(":")[2]
        return (
            f"Perhaps unix://{path} (three slashes; tritonserver's own option has one)."
        )
    return (
        "Give host:port with a port from 1 to 65535 and no path, for example"
        " localhost:8000 or [::1]:8000."
    )


def _checked_headers(headers: object) -> dict[str, str]:
    wanted = "a mapping from names of headers to text"
    if not isinstance(headers, Mapping):
        raise _refusal("headers", headers, wanted)
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, str):
            strange = name if not isinstance(name, str) else text
            raise _refusal(f"headers={{{name!r}: ...}}", strange, wanted)
    return dict(headers)


def _refusal(what: str, value: object, allowed: str) -> UsageError:
    """Without the value, which is often a key."""
    return UsageError(
        f"Connection({what}): give {allowed}, not {type(value).__name__}."
    )


def _connected(
    family: socket.AddressFamily, address: Any, timeout: float | None
) -> socket.socket:
    """A socket connected to one address, with the options of its family."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            _set_unix_options(made)
        else:
            _set_tcp_options(made, address)
        made.settimeout(timeout)
        made.connect(address)
    except BaseException:
        made.close()
        raise
    return made


def _set_unix_options(unix: socket.socket) -> None:
    if unix.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < _UNIX_SEND_BYTES:
        unix.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)


def _set_tcp_options(tcp: socket.socket, address: Any) -> None:
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        # Not every system has each of them; then its own values hold.
        if hasattr(socket, name):
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if _is_loopback(address[0]) and hasattr(socket, "TCP_CONGESTION"):
        # Within a machine nothing is congested, and algorithms that pace what they
        # send (BBR, where it is the default) only wait. Before connecting: pacing once
        # begun goes on under every other algorithm. Reno is in every kernel.
        with contextlib.suppress(OSError):
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_ipv6(address: str | None) -> bool:
    """Whether the resolver takes it; True for None, where a name stands instead."""
    try:
        return address is None or bool(socket.inet_pton(socket.AF_INET6, address))
    except OSError:
        return False
