"""What can happen to a server or its regions while slots are in each of their states.

The rows that a real server of one version cannot show: every dialect, and a server that
is another one when it comes back.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmlane import InferFailed, RequestLost, Session
from shmlane.testing import Answer, Close, ScriptedServer, identity_model
from tests.fault_proxy import FaultProxy, How
from tests.patience import given_up
from tests.polling import eventually
from tests.unit.asked import slots_of
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
from tests.unit.scripted import OF_FIRST, error

pytestmark = pytest.mark.usefixtures("counted_ids")

COUNTING = ["2.50.0", "2.52.0", "2.53.0", "2.70.0"]


@pytest.fixture(params=COUNTING)
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    """A server of each way to unregister what is in use, none of which crashes."""
    with serving(request.param) as server:
        yield server


@pytest.fixture
def session(server: ScriptedServer) -> Iterator[Session]:
    with one_slot(server.url) as session:
        yield session


def lose(server: ScriptedServer, session: Session) -> None:
    """A request that stays inside the held model, and whose connection broke."""
    server.script(Close())
    with pytest.raises(RequestLost):
        echo(session, 1.0)
    server.wait_for(1)
    is_kept(session, "lost")


# --- a stranger unregisters everything ------------------------------------------------


def test_regions_wiped_between_requests(
    server: ScriptedServer, session: Session
) -> None:
    echo(session, 1.0)
    server.unregister_all()
    serves_right(session)
    assert session.stats().reregistrations == 1


def test_regions_wiped_before_the_first_request(
    server: ScriptedServer, session: Session
) -> None:
    session.open()
    server.unregister_all()
    serves_right(session)


def test_regions_wiped_during_a_request(
    server: ScriptedServer, session: Session
) -> None:
    echo(session, 1.0)
    with ThreadPoolExecutor(1) as pool:
        with server.hold():
            answer = pool.submit(echo, session, 2.0)
            server.wait_for(1)
            server.unregister_all()
        answer.result(10.0)
    serves_right(session)
    assert session.stats().drains == 0


def test_regions_wiped_while_a_slot_is_late(
    server: ScriptedServer, session: Session
) -> None:
    with server.hold():
        with session.lease() as lease:
            fill(lease, 1.0)
            given_up(lambda limit: lease.infer(timeout=limit))
        server.unregister_all()
        is_kept(session, "late")
    serves_right(session)
    assert session.stats().late_replies == 1


def test_regions_wiped_while_a_slot_is_lost(
    server: ScriptedServer, session: Session
) -> None:
    echo(session, 1.0)
    with server.hold():
        lose(server, session)
        server.unregister_all()
        is_kept(session, "lost")
    serves_right(session)
    assert session.stats().drains == 1


# --- a server without memory ----------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"{OF_FIRST} failed to allocate CPU memory for output 'OUTPUT__0'",
        "Failed to increase the shared memory pool size for key 'triton_python_backend'"
        " to 67108864 bytes. No space left on device",
        "bad allocation",
    ],
)
def test_a_server_without_memory_for_the_output_says_so(
    server: ScriptedServer, session: Session, text: str
) -> None:
    server.script(Answer(error(500, text)))
    with pytest.raises(InferFailed, match=r"No space|alloc") as caught:
        echo(session, 1.0)
    assert caught.value.context["status"] == 500
    # The request has ended, and nothing has to be waited for.
    assert state(session) == "free"
    serves_right(session)
    assert session.stats().drains == 0


# --- a server that restarts -----------------------------------------------------------


def test_a_restart_while_a_slot_is_late(
    server: ScriptedServer, session: Session
) -> None:
    with session.lease() as lease:
        fill(lease, 1.0)
        output = lease.infer()[OUTPUT]
        with server.hold():
            given_up(lambda limit: lease.infer(timeout=limit))
            lease.release()
            is_kept(session, "late")
            server.stop()
            becomes(session, "lost")
            server.start()
    # The process that is gone might still write to the output, for all that can be
    # known: it has moved, and who looks at the old one keeps nobody waiting.
    serves_right(session)
    assert output[..., -1] == 1.0
    assert (session.stats().late_replies, session.stats().drains) == (0, 1)


def test_a_restart_while_a_slot_is_lost(
    server: ScriptedServer, session: Session
) -> None:
    echo(session, 1.0)
    with server.hold():
        lose(server, session)
        server.restart()
        becomes(session, "free")
    serves_right(session)
    assert session.stats().drains == 1


@pytest.mark.parametrize(
    ("before", "after", "retired"),
    [
        ("2.49.0", "2.53.0", 0),
        ("2.50.0", "2.70.0", 0),
        ("2.70.0", "2.50.0", 0),
        ("2.53.0", "2.49.0", 1),
    ],
)
def test_a_server_of_another_version_comes_back(
    tmp_path: Path, before: str, after: str, retired: int
) -> None:
    path = tmp_path / "http.sock"
    first = ScriptedServer(
        [identity_model()], version=before, unix_socket=path, allow_client_shm=True
    )
    with first:
        session = one_slot(first.url).open()
        with ThreadPoolExecutor(1) as pool, first.hold():
            lost = pool.submit(echo, session, 1.0)
            first.wait_for(1)
            first.stop()
            with pytest.raises(RequestLost):
                lost.result(10.0)
    with serving(after, unix_socket=path), session:
        serves_right(session)
        stats = session.stats()
        assert (stats.retired, stats.drains) == (retired, 1 - retired)


# --- a request that is sent again -----------------------------------------------------


def test_a_lost_request_is_sent_again_only_when_its_model_has_ended(
    server: ScriptedServer,
) -> None:
    with one_slot(server.url, replay=True) as session, ThreadPoolExecutor(1) as pool:
        with server.hold():
            answer = pool.submit(echo, session, 1.0)
            server.wait_for(1)
            # Not before: the server might let go of the memory first, and run then.
            (slot,) = slots_of(session)
            assert slot.channel is not None
            with socket.socket(fileno=os.dup(slot.channel.fileno())) as twin:
                twin.shutdown(socket.SHUT_RDWR)
            eventually(
                lambda: server.requests[-1].path.endswith(("status", "unregister")),
                "the slot is drained",
            )
            assert state(session) == "lost"
        answer.result(10.0)
        assert session.stats().retries == 1
        serves_right(session)


def test_a_lost_request_is_not_sent_again_where_its_end_cannot_be_known() -> None:
    server = ScriptedServer([identity_model()], version="2.49.0")
    with server, one_slot(server.url, replay=True) as session:
        server.script(Close())
        with pytest.raises(RequestLost):
            echo(session, 1.0)
        serves_right(session)
        assert (session.stats().retries, session.stats().retired) == (0, 1)
        assert not server.crashed


# --- a network that fails, at every part of a request ---------------------------------


@pytest.mark.parametrize("how", How)
def test_a_request_that_did_not_leave_whole_is_lost_or_sent_again(
    server: ScriptedServer, how: How
) -> None:
    with FaultProxy(server.url) as proxy, one_slot(proxy.url) as session:
        echo(session, 1.0)
        for link in proxy.links:
            link.requests.change(cut_after=50, how=how)
        with pytest.raises(RequestLost) as caught:
            echo(session, 2.0)
        assert caught.value.retryable
        serves_right(session)


def test_a_network_that_is_slow_costs_time_and_nothing_else(
    server: ScriptedServer,
) -> None:
    with FaultProxy(server.url) as proxy, one_slot(proxy.url) as session:
        echo(session, 1.0)
        proxy.on_requests(delay=0.02)
        proxy.on_replies(delay=0.02)
        serves_right(session)
        assert session.stats().connections == 1
