"""`memory="auto"` on a machine without shared memory: the wire, and one warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shmlane import Session, UnsupportedPlatform, WireFallback
from shmlane.testing import ScriptedServer
from tests.unit.asked import QUICK, places, scores

ROW = np.arange(4, dtype=np.float32)[None]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """For clients on another operating system."""
    with ScriptedServer([scores()]) as server:
        monkeypatch.setattr(sys, "platform", "darwin")
        yield server
        monkeypatch.undo()
        assert server.regions == {}


def session_of(server: ScriptedServer, memory: str = "auto") -> Session:
    return Session(server.url, "scores", memory=memory, slots=2, timeouts=QUICK)


def use(session: Session) -> None:
    for value in range(3):
        came = session.infer({"X": ROW + value})["Y"]
        assert came.tolist() == (ROW + value).tolist()


def enter(session: Session) -> None:
    with session:
        use(session)


def open_first(session: Session) -> None:
    session.open()
    use(session)
    session.close()


def use_at_once(session: Session) -> None:
    use(session)
    session.close()


WAYS: list[Callable[[Session], None]] = [enter, open_first, use_at_once]


@pytest.mark.parametrize("way", WAYS)
def test_the_wire_is_taken_and_whoever_opens_the_session_is_told_once(
    server: ScriptedServer, way: Callable[[Session], None]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        way(session_of(server))
    (warning,) = caught
    assert warning.category is WireFallback
    assert "tensors go over the wire, because" in str(warning.message)
    assert "Linux" in str(warning.message)
    assert warning.filename == __file__
    assert places(server) == ["wire"] * 3


def test_shared_memory_that_was_asked_for_is_an_error_there(
    server: ScriptedServer,
) -> None:
    session = session_of(server, "system")
    with pytest.raises(UnsupportedPlatform, match="Linux"):
        session.open()
    session.close()


def test_the_wire_that_was_asked_for_is_used_without_a_word(
    server: ScriptedServer,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with session_of(server, "wire") as session:
            use(session)


def test_each_session_tells_it(server: ScriptedServer) -> None:
    for _ in range(2):
        with pytest.warns(WireFallback), session_of(server) as session:
            use(session)
