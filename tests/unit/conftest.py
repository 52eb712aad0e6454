"""One connection over loopback, and ids of requests that are known beforehand."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shmlane import slots
from shmlane.transport import HttpConnection
from tests.unit.loopback import Wire, connected
from tests.unit.scripted import SERIES


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


@pytest.fixture(scope="module")
def counted_ids() -> Iterator[None]:
    """The first request of every slot has FIRST_ID."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "first_series", lambda: SERIES)
        yield
