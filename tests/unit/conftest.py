"""One connection over loopback, for whoever asks for either end of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shmlane.transport import HttpConnection
from tests.unit.loopback import Wire, connected


@pytest.fixture
def wire() -> Iterator[Wire]:
    with connected() as wire:
        yield wire


@pytest.fixture
def connection(wire: Wire) -> HttpConnection:
    return wire.connection


@pytest.fixture
def peer(wire: Wire) -> socket.socket:
    """The server's end of the connection."""
    return wire.peer
