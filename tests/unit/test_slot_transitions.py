"""Each way of a slot from one state to the next, on a server of every kind."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import (
    InferTimeout,
    ProtocolError,
    RequestLost,
    Session,
    TransportError,
)
from shmlane.testing import (
    Answer,
    Close,
    Delay,
    Fault,
    Garbage,
    Reset,
    ScriptedServer,
    Status,
    Truncate,
    identity_model,
)
from shmlane.transport import HttpConnection
from tests.fault_proxy import FaultProxy, How
from tests.patience import given_up
from tests.polling import eventually
from tests.unit.one_slot import (
    OUTPUT,
    becomes,
    echo,
    fill,
    is_kept,
    one_slot,
    serves_right,
    serving,
    state,
)
from tests.unit.scripted import error


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@pytest.fixture
def session(server: ScriptedServer) -> Iterator[Session]:
    """A session of one slot, which must serve right at the end."""
    with one_slot(server.url) as session:
        yield session
        server.release()
        serves_right(session)


@pytest.fixture
def go(session: Session) -> Iterator[threading.Event]:
    """What a slow answer waits for."""
    go = threading.Event()
    yield go
    go.set()


def give_up(session: Session, value: float) -> None:
    """A call whose time is over before the model ends."""
    with session.lease() as lease:
        fill(lease, value)
        given_up(lambda limit: lease.infer(timeout=limit))
        assert state(session) == "in_flight"


def asked(server: ScriptedServer, what: str) -> int:
    """How often the server was asked for the status of a region, or to unregister."""
    return sum(each.path.endswith(f"/{what}") for each in server.requests)


def with_via(reply: bytes) -> bytes:
    """The true reply, as a proxy passes it on."""
    return reply.replace(b"\r\n\r\n", b"\r\nVia: 1.1 proxy\r\n\r\n", 1)


def with_other_id(reply: bytes) -> bytes:
    """The reply to another request."""
    return re.sub(rb'"id":"\w', b'"id":"0', reply, count=1)


# --- answered in time -----------------------------------------------------------------


def test_free_leased_in_flight_leased_free(
    server: ScriptedServer, session: Session
) -> None:
    assert state(session) == "free"
    with session.lease() as lease, ThreadPoolExecutor(1) as pool:
        is_kept(session, "leased")
        fill(lease, 1.0)
        with server.hold():
            answer = pool.submit(lease.infer)
            server.wait_for(1)
            assert state(session) == "in_flight"
        answer.result(10.0)
        is_kept(session, "leased")
    assert state(session) == "free"


# --- late -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        lambda reply: reply,
        error(500, "the model broke"),
        error(404, "Unable to find shared memory region: 'r'"),
    ],
    ids=["success", "error of the model", "lost region"],
)
def test_in_flight_late_free(
    server: ScriptedServer,
    session: Session,
    reply: bytes | Callable[[bytes], bytes],
) -> None:
    server.script(Answer(reply))
    with server.hold():
        give_up(session, 1.0)
        is_kept(session, "late")
    becomes(session, "free")
    stats = session.stats()
    assert (stats.late_replies, stats.drains, stats.reregistrations) == (1, 0, 0)


def test_late_pinned_free(server: ScriptedServer, session: Session) -> None:
    with session.lease() as lease:
        fill(lease, 1.0)
        kept = lease.infer()[OUTPUT]
        with server.hold():
            given_up(lambda limit: lease.infer(timeout=limit))
            lease.release()
            is_kept(session, "late")
    becomes(session, "pinned")
    assert session.stats().late_replies == 1
    assert kept[..., -1] == 1.0
    del kept
    becomes(session, "free")


@pytest.mark.parametrize("how", How)
def test_late_lost_free_when_the_connection_breaks(
    server: ScriptedServer, how: How
) -> None:
    with FaultProxy(server.url) as proxy, one_slot(proxy.url) as session:
        with server.hold():
            give_up(session, 1.0)
            is_kept(session, "late")
            if how is How.HALF_CLOSE:
                proxy.links[-1].half_close()
            else:
                proxy.break_off(how)
            becomes(session, "lost")
            # Asked for, the region is still in use.
            eventually(lambda: asked(server, "unregister"), "the slot is drained")
            is_kept(session, "lost")
        serves_right(session)
        assert (session.stats().late_replies, session.stats().drains) == (0, 1)


@pytest.mark.parametrize(
    "reply",
    [
        error(504, "no words of Triton"),
        with_via,
        b"\x00 no HTTP",
        with_other_id,
    ],
    ids=["gateway", "Via", "garbage", "another request's"],
)
def test_late_lost_free_when_the_reply_is_not_the_answer(
    server: ScriptedServer,
    session: Session,
    go: threading.Event,
    reply: bytes | Callable[[bytes], bytes],
) -> None:
    server.script(Answer(reply))
    server.script(Delay(go), path="/region/")
    with server.hold():
        give_up(session, 1.0)
        is_kept(session, "late")
    becomes(session, "lost")
    is_kept(session, "lost")
    go.set()
    becomes(session, "free")
    assert (session.stats().late_replies, session.stats().drains) == (0, 1)


# --- lost -----------------------------------------------------------------------------

LIKE_TRITONS = '{"error":"no words of Triton"}'
FAULTS: dict[str, tuple[Fault, type[TransportError]]] = {
    "closed": (Close(), RequestLost),
    "closed before the model": (Close(model_runs=False), RequestLost),
    "reset": (Reset(), RequestLost),
    "no reply": (Truncate(0), RequestLost),
    "half a reply": (Truncate(100), RequestLost),
    "garbage": (Garbage(), ProtocolError),
    "408": (Status(408, LIKE_TRITONS), RequestLost),
    "499": (Status(499, LIKE_TRITONS), RequestLost),
    "502": (Status(502, LIKE_TRITONS), RequestLost),
    "504": (Status(504, LIKE_TRITONS), RequestLost),
    "500 of nobody": (Status(500, "oops"), RequestLost),
    "an error Via": (Status(500, LIKE_TRITONS, {"Via": "1.1 proxy"}), RequestLost),
    "a success Via": (Answer(with_via), RequestLost),
    "another request's": (Answer(with_other_id), ProtocolError),
}


@pytest.mark.parametrize(("fault", "kind"), FAULTS.values(), ids=FAULTS)
def test_in_flight_lost_free(
    server: ScriptedServer,
    session: Session,
    go: threading.Event,
    fault: Fault,
    kind: type[TransportError],
) -> None:
    server.script(fault)
    server.script(Delay(go), path="/region/")
    before = set(server.regions)
    with session.lease() as lease:
        fill(lease, 1.0)
        with pytest.raises(kind) as caught:
            lease.infer()
        assert caught.value.retryable == (kind is RequestLost)
        # The lease is no reason to call it anything else.
        assert state(session) == "lost"
    is_kept(session, "lost")
    go.set()
    becomes(session, "free")
    assert (session.stats().drains, session.stats().reregistrations) == (1, 1)
    echo(session, 2.0)
    assert not before & set(server.regions)


@pytest.mark.parametrize("version", ["2.50.0", "2.52.0", "2.53.0", "2.70.0"])
def test_lost_is_kept_until_the_model_ends_in_every_dialect(version: str) -> None:
    with serving(version) as server, one_slot(server.url) as session:
        server.script(Close())
        with server.hold():
            with pytest.raises(RequestLost):
                echo(session, 1.0)
            server.wait_for(1)
            asks_again = "unregister" if version < "2.53" else "status"
            eventually(
                lambda: asked(server, asks_again) > 3, "the server is asked again"
            )
            is_kept(session, "lost")
        serves_right(session)
        assert session.stats().drains == 1
        if version >= "2.53":
            assert asked(server, "unregister") == 1


def test_lost_pinned_free(server: ScriptedServer, session: Session) -> None:
    server.script(Close())
    with server.hold():
        with session.lease() as lease:
            kept = fill(lease, 1.0)
            with pytest.raises(RequestLost):
                lease.infer()
        is_kept(session, "lost")
    becomes(session, "pinned")
    assert session.stats().drains == 1
    echo(session, 2.0)
    assert session.stats().spare_slots == 1
    assert kept[..., -1] == 1.0
    del kept


def test_lost_retired_where_asking_would_end_the_server() -> None:
    server = ScriptedServer([identity_model()], version="2.49.0")
    with server, one_slot(server.url) as session:
        with session.lease() as lease:
            fill(lease, 1.0)
            kept = lease.infer()[OUTPUT]
            kept[...] = -1.0
            server.script(Close())
            server.hold()
            with pytest.raises(RequestLost):
                lease.infer()
            assert state(session) == "lost"
        becomes(session, "free")
        assert (session.stats().slots, session.stats().retired) == (1, 1)
        with session.lease() as lease:
            view = fill(lease, 7.0)
            server.release()
            # The old memory is written, which only those see who saw it before.
            eventually(lambda: kept[..., -1] == 1.0, "the model has ended")
            assert view[..., -1] == 7.0
            assert lease.infer()[OUTPUT][..., -1] == 7.0
            del view
        serves_right(session)
        assert asked(server, "unregister") == 0
    assert not server.crashed


# --- reply and giving up at the same moment -------------------------------------------


def test_a_reply_that_comes_as_its_time_is_over_frees_the_slot(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up_as_it_comes(channel: HttpConnection, timeout: float | None) -> bytes:
        eventually(lambda: not channel.is_quiet, "the reply is there")
        raise InferTimeout("no time is left.", timeout=timeout)

    with session.lease() as lease:
        fill(lease, 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(HttpConnection, "receive", give_up_as_it_comes)
            with pytest.raises(InferTimeout):
                lease.infer()
        assert state(session) == "in_flight"
    becomes(session, "free")
    assert (session.stats().late_replies, session.stats().drains) == (1, 0)
