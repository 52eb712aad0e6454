"""Views of adopted slots that outlive the session which adopted them."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane import Lease, LeaseTimeout, Session, SlotRef
from shmlane.testing import ScriptedServer
from tests.patience import given_up
from tests.polling import eventually
from tests.sessions import Array, all_free, frame
from tests.unit.one_slot import (
    INPUT,
    OUTPUT,
    files_of,
    fill,
    home_of_one,
    one_slot,
    serving,
)


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


def lent(home: Session, size: int) -> SlotRef:
    """A slot that is full of threes."""
    with home.lease() as lease:
        lease.write(INPUT, np.full((1, 1, 1, size), 3, np.float32))
        return lease.detach()


def view_of_an_ended_session(
    server: ScriptedServer, home: Session, *, size: int, grown_by: str, end: str
) -> Array:
    """What an adopted slot was filled with; the session ends with that alive."""
    borrower = one_slot(server.url).open()
    if grown_by == "its borrower":
        with borrower.adopt(lent(home, 8)) as lease:
            lease.write(INPUT, np.zeros((1, 1, 1, size), np.float32))
        all_free(home)
    lease = borrower.adopt(lent(home, size))
    view: Array = lease[INPUT]
    if "late" in end:
        server.hold()
        given_up(lambda limit: lease.infer(timeout=limit), limit=0.01)
    lease.release()
    if end != "dropped":
        borrower.close(wait=False)
    if "collected" in end:
        # Only the collector ends it, and all that it has with it.
        vars(borrower)["itself"] = borrower
    return view


@pytest.mark.parametrize(
    "end", ["closed", "dropped", "late", "closed and collected", "late and collected"]
)
@pytest.mark.parametrize(
    ("size", "grown_by"), [(8, "nobody"), (2000, "its home"), (2000, "its borrower")]
)
def test_memory_under_a_view_is_not_used_again(
    server: ScriptedServer, size: int, grown_by: str, end: str
) -> None:
    """Whatever became of the session that had adopted it, and wherever it lies."""
    with one_slot(server.url) as home:
        with warnings.catch_warnings(action="ignore"):
            view = view_of_an_ended_session(
                server, home, size=size, grown_by=grown_by, end=end
            )
            gc.collect()
        server.release()
        eventually(lambda: server.in_model == 0, "the request ends")
        assert home.stats().lent == 1
        with pytest.raises(LeaseTimeout):
            home.lease(timeout=0.05)
        assert (view == 3).all()
        del view
        gc.collect()
        all_free(home)
    assert files_of(server) == []


def grow(lease: Lease, size: int) -> None:
    lease.write(INPUT, np.full((1, 1, 1, size), 3, np.float32))
    lease.infer()


@pytest.mark.parametrize("end", ["closed", "closed while leased", "dropped"])
def test_what_a_slot_moved_to_goes_home_with_it_when_the_view_dies(
    server: ScriptedServer, end: str
) -> None:
    with home_of_one(server) as home, warnings.catch_warnings(action="ignore"):
        borrower = one_slot(server.url).open()
        with borrower.adopt(lent(home, 8)) as lease:
            grow(lease, 2000)
            view: Array = lease[INPUT]
            if end == "closed while leased":
                borrower.close(wait=False)
        if end == "closed":
            borrower.close()
        del lease, borrower
        gc.collect()
        assert home.stats().lent == 1
        assert (view == 3).all()
        del view
        gc.collect()
        all_free(home)
    assert files_of(server) == []


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_a_slot_had_outgrown_under_a_view_is_taken_back(
    server: ScriptedServer, is_closed: bool
) -> None:
    """Of what it grew to first, the server is told only with the next request."""
    with home_of_one(server) as home, warnings.catch_warnings(action="ignore"):
        borrower = one_slot(server.url).open()
        with borrower.adopt(lent(home, 8)) as lease:
            grow(lease, 2000)
            lease.write(INPUT, np.full((1, 1, 1, 5000), 3, np.float32))
            view: Array = lease[INPUT]
        if is_closed:
            borrower.close()
        del lease, borrower
        gc.collect()
        assert len(server.regions) == 1
        assert (view == 3).all()
        del view
        gc.collect()
        all_free(home)
    assert files_of(server) == []
