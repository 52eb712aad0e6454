"""A session that closes in the very moment before a request leaves.

It waits for what is in flight by then. What is not is read by whoever sent it, or is
not sent; nothing is left behind either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shmlane import PoolClosed
from shmlane.exchange import Exchange
from shmlane.slots import Slot
from shmlane.testing import ScriptedServer
from tests.polling import eventually
from tests.sessions import frame
from tests.unit.asked import asked
from tests.unit.one_slot import INPUT, OUTPUT, files_of, one_slot, serving
from tests.unit.tasks import asking, in_a_loop


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server
        # A task's session ends in a thread of its own.
        eventually(lambda: not files_of(server), lambda: f"left: {files_of(server)}")
        assert server.regions == {}


def before_it_leaves(
    monkeypatch: pytest.MonkeyPatch, close: Callable[[], object]
) -> None:
    """Close right before the slot is seen to be in flight."""
    begin = Exchange.begin

    def begin_too_late(slot: Slot) -> bytearray:
        close()
        return begin(slot)

    monkeypatch.setattr(Exchange, "begin", staticmethod(begin_too_late))


def test_a_future_has_nobody_left_to_read_its_reply_and_is_not_sent(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = one_slot(server.url).open()
    before_it_leaves(monkeypatch, session.close)
    future = session.submit({INPUT: frame(1)})
    with pytest.raises(PoolClosed, match="nothing was sent"):
        future.result(10)
    assert asked(server) == []
    assert session.stats().free == 1


def test_a_thread_reads_its_reply_itself(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = one_slot(server.url).open()
    before_it_leaves(monkeypatch, session.close)
    found = session.infer({INPUT: frame(1)})
    assert found[OUTPUT].tolist() == frame(1).tolist()
    assert session.stats().free == 1


def test_a_stream_reads_the_replies_to_what_it_sent(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = one_slot(server.url).open()
    before_it_leaves(monkeypatch, session.close)
    stream = session.stream([{INPUT: frame(1)}] * 3)
    assert next(stream)[OUTPUT].tolist() == frame(1).tolist()
    with pytest.raises(PoolClosed):
        next(stream)
    assert session.stats().free == 1


@in_a_loop
async def test_a_task_reads_its_reply_itself(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await asking(server.url).open()
    before_it_leaves(monkeypatch, lambda: session._close_in_thread(wait=True))
    found = await session.infer({INPUT: frame(1)})
    assert found[OUTPUT].tolist() == frame(1).tolist()
    await session.close()
    assert session.stats().free == 1
