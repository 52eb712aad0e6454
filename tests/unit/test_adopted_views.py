"""Views of adopted slots that outlive the session which adopted them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane import Session
from shmlane.testing import ScriptedServer
from tests.polling import eventually
from tests.sessions import Array, all_free, frame
from tests.unit.one_slot import OUTPUT, files_of, fill, one_slot, serving


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


def sockets() -> int:
    """How many this process has open."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(descriptor).startswith("socket:")
    return count


def adopted_view(home: Session, borrower: Session, *, closes_first: bool) -> Array:
    """A reply in an adopted slot; the session closes while it is leased, or after."""
    with home.lease() as lease:
        fill(lease, 3)
        ref = lease.detach()
    with borrower.adopt(ref) as lease:
        output: Array = lease.infer()[OUTPUT]
        if closes_first:
            borrower.close()
    borrower.close()
    return output


@pytest.mark.parametrize("closes_first", [True, False])
def test_a_closed_session_keeps_no_connection_for_a_view(
    server: ScriptedServer, closes_first: bool
) -> None:
    with one_slot(server.url) as home:
        with one_slot(server.url) as borrower:
            before = sockets()
            # This server runs here as well: with every connection two sockets go.
            view = adopted_view(home, borrower, closes_first=closes_first)
        eventually(lambda: sockets() < before, "no connection is kept")
        assert view.tolist() == frame(3).tolist()
        assert home.stats().lent == 1
        del view, borrower
        all_free(home)
    assert files_of(server) == []
