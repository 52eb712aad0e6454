"""A real Triton behind a network that fails: one test for each way to recover."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import (
    Connection,
    InferTimeout,
    ProtocolError,
    RequestLost,
    ServerUnreachable,
    Session,
    Timeouts,
)
from shmlane.server import TritonServer
from tests.fault_proxy import FaultProxy, How, Link
from tests.patience import given_up
from tests.polling import eventually
from tests.sessions import all_free, asking, sent_to, sink, stopped

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def proxy(server: TritonServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.http_url) as proxy:
        yield proxy


@pytest.fixture
def session(proxy: FaultProxy) -> Iterator[Session]:
    """A session of one slot that has served, and must serve right at the end."""
    with open_sink(proxy.url) as session:
        assert sink(session, 1) == 1
        yield session
        serves_right(session)


def open_sink(url: str, *, replay: bool = False) -> Session:
    return Session(
        url,
        "sink",
        slots=1,
        shapes={"INPUT__0": (1, 1, 1, 8)},
        connection=Connection(replay=replay),
        timeouts=Timeouts(connect=2.0, infer=10.0),
    ).open()


def serves_right(session: Session) -> None:
    all_free(session)
    for value in (2, 3, 4):
        assert sink(session, value) == value


def busy(proxy: FaultProxy) -> Link:
    """The connection of the session's slot."""
    return proxy.link


def heard_of_it(session: Session) -> None:
    """What was done to an idle connection has reached this end of it."""
    channel = session._ensure_open().pool.slots[0].channel
    assert channel is not None
    eventually(lambda: not channel.is_quiet, "there is something to read")


def give_up(session: Session) -> None:
    """A request whose reply has not come within its time."""
    with session.lease() as lease:
        lease["INPUT__0"][...] = 9
        given_up(lambda limit: lease.infer(timeout=limit))
    assert session.stats().late == 1


# --- idle -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", How)
def test_an_idle_connection_that_ended_is_replaced(
    proxy: FaultProxy, session: Session, how: How
) -> None:
    link = busy(proxy)
    if how is How.HALF_CLOSE:
        link.half_close()
    else:
        link.break_off(how)
    heard_of_it(session)
    assert sink(session, 5) == 5
    stats = session.stats()
    assert (stats.connections, stats.drains) == (2, 0)


def test_an_idle_connection_that_a_proxy_gives_notice_on_is_replaced(
    proxy: FaultProxy, session: Session
) -> None:
    link = busy(proxy)
    link.inject(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
    heard_of_it(session)
    assert sink(session, 5) == 5
    assert session.stats().connections == 2


def test_a_proxy_that_is_away_is_named_and_may_return(
    proxy: FaultProxy, session: Session
) -> None:
    proxy.stop()
    with pytest.raises((ServerUnreachable, InferTimeout)) as caught:
        session.infer({"INPUT__0": [[[[1.0]]]]}, timeout=0.2, cast=True)
    assert caught.value.retryable
    assert session.stats().free == 1
    proxy.start()


# --- in flight ------------------------------------------------------------------------


@pytest.mark.parametrize("how", [How.CLOSE, How.RESET])
def test_a_request_cut_short_is_lost_once(
    proxy: FaultProxy, session: Session, how: How
) -> None:
    busy(proxy).requests.change(cut_after=50, how=how)
    with pytest.raises(RequestLost) as caught:
        sink(session, 5)
    assert caught.value.retryable
    assert all_free(session).drains == 1


def test_garbage_in_place_of_a_reply_is_told(
    proxy: FaultProxy, session: Session
) -> None:
    link = busy(proxy)
    link.replies.change(is_stalled=True)
    with asking(session, 5) as answer:
        link.inject(b"\x00\xff")
        with pytest.raises(ProtocolError):
            answer.result(10.0)
    assert all_free(session).drains == 1


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize("after", [0, 40])
def test_a_reply_cut_short_is_asked_for_again_if_allowed(
    proxy: FaultProxy, how: How, after: int
) -> None:
    with open_sink(proxy.url, replay=True) as session:
        assert sink(session, 1) == 1
        busy(proxy).replies.change(cut_after=after, how=how)
        assert sink(session, 5) == 5
        stats = all_free(session)
        assert (stats.retries, stats.reregistrations) == (1, 1)
        serves_right(session)


def test_a_slow_network_costs_time_and_nothing_else(
    proxy: FaultProxy, session: Session
) -> None:
    proxy.on_requests(delay=0.02)
    proxy.on_replies(delay=0.02)
    assert sink(session, 5) == 5
    assert session.stats().connections == 1


# --- late -----------------------------------------------------------------------------


def test_a_connection_that_breaks_while_its_reply_is_late_is_drained(
    proxy: FaultProxy, session: Session
) -> None:
    link = busy(proxy)
    link.replies.change(is_stalled=True)
    give_up(session)
    link.break_off()
    stats = all_free(session)
    assert (stats.late_replies, stats.drains) == (0, 1)


def test_a_restart_while_a_reply_is_late(own_server: TritonServer) -> None:
    with open_sink(own_server.http_url) as session:
        assert sink(session, 1) == 1
        with stopped(own_server):
            give_up(session)
            own_server.kill()
            eventually(lambda: session.stats().lost == 1, "the connection broke")
            own_server.start()
        stats = all_free(session)
        assert (stats.late_replies, stats.drains) == (0, 1)
        serves_right(session)


# --- how soon -------------------------------------------------------------------------


def test_callers_are_served_within_a_second_of_a_restart(
    own_server: TritonServer,
) -> None:
    # Unless the machine stands still meanwhile, which it may do once or twice.
    assert any(seconds_after_a_restart(own_server) < 1.0 for _ in range(3))


def seconds_after_a_restart(own_server: TritonServer) -> float:
    """Until a caller is served that has waited since the server was killed."""
    with open_sink(own_server.http_url) as session, ThreadPoolExecutor(1) as pool:

        def ask_until_answered() -> float:
            while True:
                try:
                    assert sink(session, 7) == 7
                    return time.monotonic()
                except RequestLost:
                    pass

        with stopped(own_server), asking(session, 6) as lost:
            sent_to(own_server)
            own_server.kill()
            with pytest.raises(RequestLost):
                lost.result()
            answered = pool.submit(ask_until_answered)
            own_server.start()
            ready = time.monotonic()
        served = answered.result(10.0)
        serves_right(session)
    return served - ready
