"""A session on a real Triton through a network that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from shmlane import ProtocolError, RequestLost, Session, Timeouts
from shmlane.server import TritonServer
from tests.fault_proxy import FaultProxy, How
from tests.patience import given_up
from tests.sessions import all_free, registered, sink

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def proxy(server: TritonServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.http_url) as proxy:
        yield proxy


def open_session(proxy: FaultProxy) -> Session:
    return Session(proxy.url, "sink", slots=2, timeouts=Timeouts(infer=5.0))


def works_again(session: Session) -> None:
    all_free(session)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert sink(session, value) == value


@pytest.mark.parametrize("how", How)
def test_reply_that_is_cut_loses_one_request_and_no_slot(
    server: TritonServer, proxy: FaultProxy, how: How
) -> None:
    before = registered(server)
    with open_session(proxy) as session:
        assert sink(session, 0.5) == 0.5
        for link in proxy.links:
            link.replies.change(cut_after=10, how=how)
        with pytest.raises(RequestLost):
            sink(session, 9.0)
        works_again(session)
        assert session.stats().drains == 1
    assert registered(server) == before


def test_late_reply_frees_its_slot(proxy: FaultProxy) -> None:
    with open_session(proxy) as session:
        assert sink(session, 0.5) == 0.5
        with proxy.stalled(), session.lease() as lease:
            lease.view("INPUT__0", (1, 1, 1, 8)).fill(9.0)
            given_up(lambda limit: lease.infer(timeout=limit))
        assert all_free(session).late_replies == 1
        works_again(session)


def test_reply_that_comes_twice_is_never_the_next_one(proxy: FaultProxy) -> None:
    with open_session(proxy) as session:
        assert sink(session, 0.5) == 0.5
        for link in proxy.links:
            link.replies.change(copies=2)
        for value in range(6):
            # Found behind the first one or before the next request, as it happens.
            with contextlib.suppress(ProtocolError):
                assert sink(session, float(value)) == value
        works_again(session)


def test_closed_idle_connections_are_replaced(proxy: FaultProxy) -> None:
    with open_session(proxy) as session:
        assert sink(session, 0.5) == 0.5
        proxy.close_idle()
        works_again(session)
