"""Ids of requests: ours and callers' own, and which replies they tell apart."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shmlane import (
    Connection,
    InferFailed,
    ProtocolError,
    RequestOptions,
    Session,
    requests,
)
from shmlane.testing import Close, ScriptedServer, Status
from tests.unit.asked import asked, scores, session_on

ROW = np.ones((1, 4), np.float32)


@pytest.fixture
def pair() -> Iterator[tuple[ScriptedServer, Session]]:
    with session_on(scores()) as pair:
        yield pair


def refusal(own: str) -> str:
    """An error as Triton's core words it."""
    return f'{{"error":"[request id: {own}] no such mood"}}'


def ask(session: Session, own: str | None = None) -> str:
    """One inference; the id that its result tells."""
    options = None if own is None else RequestOptions(id=own)
    with session.lease() as lease:
        lease.write("X", ROW)
        result = lease.infer(options=options)
        assert result["Y"].tolist() == ROW.tolist()
        return result.request_id


def connections(session: Session, *own: str | None) -> int:
    """How many more connections requests with these ids take."""
    # Before the first, anything may have been on the connection.
    ask(session, "first")
    before = session.stats().connections
    for each in own:
        ask(session, each)
    return session.stats().connections - before


def test_each_of_ours_is_sent_once_and_not_told(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    assert {ask(session) for _ in range(30)} == {""}
    assert len({each.id for each in asked(server)}) == 30


def test_two_sessions_send_no_id_in_common() -> None:
    with (
        session_on(scores(), slots=3) as (server, session),
        Session(server.url, session.model, slots=3) as other,
    ):
        for each in (session, other):
            leases = [each.lease() for _ in range(3)]
            for lease in leases:
                for _ in range(5):
                    lease.write("X", ROW)
                    lease.infer()
            for lease in leases:
                lease.release()
        assert len({each.id for each in asked(server)}) == 2 * 3 * 5


@pytest.mark.parametrize(
    "own", ["frame 7", "]", "a]b", '"\\', "ä", "0", "1", "x" * 256]
)
def test_a_callers_own_id_goes_there_and_comes_back(
    pair: tuple[ScriptedServer, Session], own: str
) -> None:
    server, session = pair
    assert ask(session, own) == own
    assert [each.id for each in asked(server)] == [own]
    assert ask(session) == ""
    assert ask(session, own) == own


@pytest.mark.parametrize("own", ["7", "]", "a]b", "] ", "0"])
def test_an_error_that_begins_with_the_id_of_the_request_is_its_own(
    pair: tuple[ScriptedServer, Session], own: str
) -> None:
    server, session = pair
    server.script(Status(400, refusal(own)))
    with pytest.raises(InferFailed, match="no such mood"):
        ask(session, own)
    assert session.stats().free == 1
    assert ask(session, own) == own


@pytest.mark.parametrize(
    ("own", "other"), [("a", "a]b"), ("a]b", "a"), ("7", "77"), ("x", "0")]
)
def test_an_error_that_begins_with_another_id_is_not_believed(
    pair: tuple[ScriptedServer, Session], own: str, other: str
) -> None:
    server, session = pair
    server.script(Status(400, refusal(other)))
    with pytest.raises(ProtocolError, match="belongs to another request"):
        ask(session, own)


@pytest.mark.parametrize(
    ("ids", "more"),
    [
        (["x", "x"], 1),
        (["x", "x", "x"], 2),
        (["x", "y", "z"], 0),
        (["x", "y", "x"], 1),
        # The second one has not seen y.
        (["x", "y", "x", "y"], 1),
        (["x", "y", "x", "y", "x"], 2),
        ([None, None, None], 0),
        ([None, "x", None], 0),
        (["x", None, "x"], 1),
        (["x", None, None, "y", None, "x"], 1),
    ],
)
def test_an_id_never_meets_its_like_on_one_connection(
    pair: tuple[ScriptedServer, Session], ids: list[str | None], more: int
) -> None:
    _, session = pair
    assert connections(session, *ids) == more


def test_a_connection_that_has_seen_very_many_own_ids_is_replaced(
    pair: tuple[ScriptedServer, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = pair
    monkeypatch.setattr(requests, "_MOST_OWN_IDS", 5)
    assert connections(session, *map(str, range(4))) == 0
    before = session.stats().connections
    for number in range(4, 15):
        ask(session, str(number))
    assert session.stats().connections - before == 3


def test_options_made_once_are_sent_each_time(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    named = RequestOptions(id="x", priority=2, parameters={"mood": "good", "n": 1.5})
    plain = RequestOptions(parameters={"flag": True})
    for options in (named, named, plain, plain, None):
        session.infer({"X": ROW}, options=options)
    told = [(each.id, dict(each.parameters)) for each in asked(server)]
    first = ("x", {"mood": "good", "n": 1.5, "priority": 2})
    assert told[:2] == [first, first]
    assert [parameters for _, parameters in told[2:]] == [{"flag": True}] * 2 + [{}]
    ours = [own for own, _ in told[2:]]
    assert len({*ours}) == 3
    assert "x" not in ours


def test_an_id_goes_again_with_a_request_that_is_sent_again() -> None:
    with session_on(scores(), connection=Connection(replay=True)) as (server, session):
        server.script(Close())
        assert ask(session, "x") == "x"
        assert [each.id for each in asked(server)] == ["x", "x"]


def test_what_the_model_attaches_is_read(
    pair: tuple[ScriptedServer, Session],
) -> None:
    _, session = pair
    with session.lease() as lease:
        lease.write("X", ROW)
        for own in ("", "x"):
            result = lease.infer(options=RequestOptions(id=own))
            assert result.parameters == {"mood": "good", "seen": 3}
            assert (result.request_id, result.model_version) == (own, "1")
