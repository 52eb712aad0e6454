"""One connection or one slot, and ids of requests that are known beforehand."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shmlane import slots
from shmlane.transport import HttpConnection
from tests.sessions import all_free
from tests.unit.flowing import Pair, flowing, unharmed
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


@pytest.fixture(params=["system", "wire"])
def single(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A session whose items are all on the same slot."""
    with flowing(slots=1, memory=request.param) as pair, unharmed(pair):
        yield pair
        all_free(pair[1])
