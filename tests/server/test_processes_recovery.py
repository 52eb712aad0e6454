"""A server that dies or restarts while slots are with other processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import Lease, RequestLost, Session, SlotRef
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import (
    all_free,
    fill,
    open_sink,
    registered,
    sent_to,
    sink,
    stopped,
)

pytestmark = pytest.mark.usefixtures("no_leftovers")


def filled(home: Session, value: float) -> SlotRef:
    with home.lease() as lease:
        fill(lease, value)
        return lease.detach()


def lose(server: TritonServer, borrower: Session, lease: Lease) -> None:
    """Kill the server with the request of an adopted slot in flight."""
    with ThreadPoolExecutor(1) as pool:
        with stopped(server):
            future = pool.submit(lease.infer)
            sent_to(server)
            server.kill()
        with pytest.raises(RequestLost):
            future.result()
    lease.release()
    assert borrower.stats().adopted == 1


def test_a_restart_while_a_slot_is_out_is_not_noticed(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server) as home, open_sink(own_server, slots=1) as borrower:
        ref = filled(home, 3)
        own_server.kill()
        own_server.start()
        with borrower.adopt(ref) as lease:
            assert lease.infer()["OUTPUT__0"] == [3]
        registrations = home.stats().registrations
        assert all_free(home).slots == 2
        # The borrower registered that one for both.
        assert sink(home, 4) == 4
        assert home.stats().registrations == registrations
        names = {name for name in registered(own_server) if ref.region in name}
        assert len(names) == 1


def test_a_request_lost_with_a_server_is_drained_by_the_borrower(
    own_server: TritonServer,
) -> None:
    with (
        open_sink(own_server, slots=1) as home,
        open_sink(own_server, slots=1) as borrower,
    ):
        lease = borrower.adopt(filled(home, 3))
        lose(own_server, borrower, lease)
        assert home.stats().lent == 1
        own_server.start()
        all_free(home)
        assert borrower.stats().drains == 1
        assert [sink(home, value) for value in (5, 6)] == [5, 6]
        # The output has moved, and is handed over as it lies now.
        with borrower.adopt(filled(home, 7)) as lease:
            assert lease.infer()["OUTPUT__0"] == [7]
        all_free(home)


def test_a_borrower_that_closes_meanwhile_leaves_it_to_the_home(
    own_server: TritonServer,
) -> None:
    with open_sink(own_server, slots=1) as home:
        borrower = open_sink(own_server, slots=1, connect=0.1)
        lease = borrower.adopt(filled(home, 3))
        lose(own_server, borrower, lease)
        borrower.close(wait=False)
        eventually(lambda: home.stats().lost == 1, "the slot is lost")
        own_server.start()
        assert all_free(home).drains == 1
        assert sink(home, 5) == 5
        del lease
        # What the borrower could not unregister is removed by the next.
        open_sink(own_server, slots=1).close()


def test_attached_sessions_live_through_a_restart(own_server: TritonServer) -> None:
    with open_sink(own_server, slots=1) as sharer:
        handle = sharer.share(slots=2)
        with Session.attach(handle) as one, Session.attach(handle) as two:
            for session in (one, two):
                assert sink(session, 1) == 1
            own_server.kill()
            own_server.start()
            for session in (one, two):
                assert sink(session, 2) == 2
            assert one.stats().registrations == two.stats().registrations == 1
        with Session.attach(handle, slots=2) as both:
            assert [sink(both, value) for value in (3, 4)] == [3, 4]
            assert both.stats().registrations == 0
