"""Sessions and leases belong to their process: copies are refused, and harm nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest

from shmlane import AsyncSession, NotPicklable, Session, UsageError
from shmlane.testing import ScriptedServer
from tests.sessions import frame
from tests.unit.one_slot import INPUT, OUTPUT, one_slot, serving

WAYS: dict[str, Callable[[object], object]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "pickle of protocol 0": lambda what: pickle.dumps(what, 0),
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


@pytest.mark.parametrize("way", WAYS)
def test_a_session_and_its_lease_refuse_to_be_copied_and_go_on(
    server: ScriptedServer, way: str
) -> None:
    with one_slot(server.url) as session:
        with pytest.raises(NotPicklable, match="a Session cannot be pickled") as caught:
            WAYS[way](session)
        assert "Session.attach" in caught.value.hint
        with session.lease() as lease:
            with pytest.raises(NotPicklable, match="a Lease cannot be pickled"):
                WAYS[way](lease)
            lease.write(INPUT, frame(3))
            assert lease.infer()[OUTPUT].tolist() == frame(3).tolist()
        assert session.stats().free == 1


@pytest.mark.parametrize("kind", [Session, AsyncSession])
def test_one_that_was_never_opened_refuses_as_well(
    kind: type[Session | AsyncSession],
) -> None:
    session = kind("localhost:8000", "m")
    for error in (TypeError, UsageError):
        with pytest.raises(error, match=f"{kind.__name__} cannot be pickled"):
            pickle.dumps(session)
