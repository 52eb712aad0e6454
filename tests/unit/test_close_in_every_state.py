"""A session that closes while its slot is in any state, on a server of every kind.

Whatever the state, the server is not made to crash, views stay as they are, and what
cannot be taken back now goes with the next session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmlane import (
    LeaseTimeout,
    PoolClosed,
    RequestLost,
    Session,
    ShmlaneError,
)
from shmlane.testing import Close, ScriptedServer, identity_model
from tests.patience import given_up
from tests.polling import eventually
from tests.sessions import Array
from tests.unit.one_slot import (
    OUTPUT,
    echo,
    files_of,
    fill,
    one_slot,
    serves_right,
    serving,
    state,
)

# Closing waits no longer than requests do, and should not wait long here.
_LIMIT, _PATIENCE = 0.2, 10.0

Way = Callable[[ScriptedServer, Session], contextlib.AbstractContextManager[Array]]


@contextlib.contextmanager
def free(_server: ScriptedServer, session: Session) -> Iterator[Array]:
    with session.lease() as lease:
        fill(lease, 1.0)
        copy = lease.infer(timeout=_PATIENCE).copy()[OUTPUT]
    yield copy


@contextlib.contextmanager
def leased(_server: ScriptedServer, session: Session) -> Iterator[Array]:
    with session.lease() as lease:
        view = fill(lease, 1.0)
        lease.infer(timeout=_PATIENCE)
        yield view


@contextlib.contextmanager
def in_flight(server: ScriptedServer, session: Session) -> Iterator[Array]:
    with session.lease() as lease, ThreadPoolExecutor(1) as pool:
        view = fill(lease, 1.0)
        server.hold()
        answer = pool.submit(lease.infer)
        server.wait_for(1)
        yield view
        server.release()
        # Its connection may have gone with the session.
        with contextlib.suppress(ShmlaneError):
            answer.result(10.0)


@contextlib.contextmanager
def late(server: ScriptedServer, session: Session) -> Iterator[Array]:
    with session.lease() as lease:
        view = fill(lease, 1.0)
        server.hold()
        given_up(lambda limit: lease.infer(timeout=limit))
    yield view


@contextlib.contextmanager
def lost(server: ScriptedServer, session: Session) -> Iterator[Array]:
    with session.lease() as lease:
        view = fill(lease, 1.0)
        server.hold()
        server.script(Close())
        with pytest.raises(RequestLost):
            lease.infer(timeout=_PATIENCE)
        server.wait_for(1)
    yield view


@contextlib.contextmanager
def pinned(_server: ScriptedServer, session: Session) -> Iterator[Array]:
    with session.lease() as lease:
        view = fill(lease, 1.0)
        lease.infer(timeout=_PATIENCE)
    yield view


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("way", [free, leased, in_flight, late, lost, pinned])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("version", ["2.49.0", "2.51.0", "2.53.0"])
def test_closing_is_harmless(version: str, wait: bool, way: Way) -> None:
    server = ScriptedServer([identity_model()], version=version)
    with server:
        session = one_slot(server.url, limit=_LIMIT).open()
        with way(server, session) as view:
            # An old server has no lost slots: they are given up at once.
            expected = way.__name__
            if (version, expected) == ("2.49.0", "lost"):
                expected = "free"
            eventually(lambda: state(session) == expected, expected)
            session.close(wait=wait)
            with pytest.raises(PoolClosed):
                session.lease()
            assert view[..., -1] == 1.0
        server.release()
        eventually(lambda: server.in_model == 0, "the last request ends")
        # The next one takes back what this one could not.
        with one_slot(server.url) as other:
            echo(other, 2.0)
            serves_right(other)
            assert view[..., -1] == 1.0
        if version != "2.49.0":
            assert server.regions == {}
        assert files_of(server) == []
        assert not server.crashed


def is_closing(session: Session) -> bool:
    """Whether it hands out nothing more."""
    try:
        session.lease(timeout=0).release()
    except PoolClosed:
        return True
    except LeaseTimeout:
        pass
    return False


def test_a_lease_that_ends_while_its_session_waits_is_waited_for() -> None:
    with serving() as server, ThreadPoolExecutor(1) as pool:
        session = one_slot(server.url).open()
        lease = session.lease()
        fill(lease, 1.0)
        with server.hold():
            given_up(lambda limit: lease.infer(timeout=limit), limit=0.01)
            closing = pool.submit(session.close)
            eventually(lambda: is_closing(session))
            lease.release()
            assert session.stats().late == 1
            assert not closing.done()
        closing.result(10.0)
        assert session.stats().late_replies == 1
        assert files_of(server) == []
