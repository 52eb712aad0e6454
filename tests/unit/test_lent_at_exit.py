"""Processes that end, without closing their session, with a slot of another's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from shmlane import Session, SlotRef
from shmlane.inventory import clean_up
from shmlane.testing import ScriptedServer
from tests.others import Other, other
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.one_slot import INPUT, echo, files_of, fill, home_of_one, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

# What such a process may still have, and how it comes to have that.
IDLE = {
    "a lease": "None",
    "a lease that a thread keeps": "go_on(keep); del lease",
    "a lease and a view": f"view = lease[{INPUT!r}]",
    "a view": f"view = lease[{INPUT!r}]; lease.release()",
    "a lease of a closed session": "session.close(wait=False)",
    "a block that it has outgrown": "grow(4000)",
}
REQUEST = "go_on(shmlane.Lease.infer)"

_TOOLS = f"""
import threading, warnings

# It is told of leases that it drops.
warnings.simplefilter("ignore")

def go_on(use):
    threading.Thread(target=use, args=(lease,), daemon=True).start()

def keep(lease):
    threading.Event().wait()

def grow(size):
    lease.write({INPUT!r}, np.full((1, 1, 1, size), 3, np.float32))
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@pytest.fixture
def home(server: ScriptedServer) -> Iterator[Session]:
    with home_of_one(server) as home:
        yield home


@pytest.fixture
def borrower(server: ScriptedServer, home: Session) -> Iterator[Other]:
    """A process with a slot of `home` whose input has grown there."""

    def lent() -> SlotRef:
        with home.lease() as lease:
            fill(lease, 1)
            return lease.detach()

    with other() as borrower:
        borrower.ask(_TOOLS)
        borrower.ask(f"session = Session({server.url!r}, 'identity', slots=1).open()")
        borrower.adopt(lent)
        borrower.ask("grow(2000); lease.infer()")
        yield borrower


def nothing_is_left(server: ScriptedServer) -> None:
    assert (files_of(server), dict(server.regions)) == ([], {})


@pytest.mark.parametrize("had", IDLE)
def test_a_slot_goes_home_with_the_process_that_had_it(
    server: ScriptedServer, home: Session, borrower: Other, had: str
) -> None:
    borrower.ask(IDLE[had])
    borrower.end()
    all_free(home)
    echo(home, 2)
    home.close()
    nothing_is_left(server)


@pytest.mark.parametrize("had", IDLE)
def test_what_is_left_of_a_home_goes_with_the_last_process_that_had_its_slots(
    server: ScriptedServer, home: Session, borrower: Other, had: str
) -> None:
    borrower.ask(IDLE[had])
    home.close()
    borrower.end()
    nothing_is_left(server)


def test_a_slot_with_a_request_goes_home_when_the_server_lets_go_of_it(
    server: ScriptedServer, home: Session, borrower: Other
) -> None:
    with server.hold():
        borrower.ask(REQUEST)
        eventually(lambda: server.in_model == 1, "the request is there")
        borrower.end()
        eventually(lambda: home.stats().lost == 1, "the slot is lost")
    all_free(home)
    echo(home, 2)
    home.close()
    nothing_is_left(server)


def test_memory_with_a_request_stays_for_the_next_to_clean_up(
    server: ScriptedServer, home: Session, borrower: Other
) -> None:
    with server.hold():
        borrower.ask(REQUEST)
        eventually(lambda: server.in_model == 1, "the request is there")
        home.close()
        borrower.end()
        assert len(files_of(server)) == len(server.regions) == 2
    eventually(lambda: server.in_model == 0, "the request ends")
    clean_up(only=server.url)
    nothing_is_left(server)
