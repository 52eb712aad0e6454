"""Sessions of event loops that nobody closed: ended without keeping the loop."""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shmlane.testing import Delay, ScriptedServer
from tests.unit.children import run_python
from tests.unit.one_slot import files_of, serving
from tests.unit.tasks import asking, comes, in_a_loop


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


class Slow(ThreadPoolExecutor):
    """Threads that are slow to let go of what they have done."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[object] = []

    def submit(
        self, work: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Future[Any]:
        self._kept.append((work, arguments, named))
        return super().submit(work, *arguments, **named)


@in_a_loop
async def test_the_thread_that_opened_a_session_does_not_keep_it(
    server: ScriptedServer,
) -> None:
    asyncio.get_running_loop().set_default_executor(Slow())
    sessions = [await asking(server.url).open()]
    with pytest.warns(ResourceWarning, match="dropped without close"):
        sessions.clear()
    await comes(lambda: not files_of(server), "its memory is removed")
    assert server.regions == {}


@in_a_loop
async def test_a_session_that_is_dropped_keeps_no_loop_waiting_for_its_server(
    server: ScriptedServer,
) -> None:
    go = threading.Event()
    sessions = [await asking(server.url).open()]
    server.script(Delay(go), path="/unregister")
    with pytest.warns(ResourceWarning, match="dropped without close"):
        sessions.clear()
    # Had the loop waited for the answer, it would have given up by now.
    assert len(server.regions) == 1
    go.set()
    await comes(lambda: not files_of(server), "its memory is removed")
    assert server.regions == {}


@in_a_loop
async def test_a_session_that_is_dropped_where_no_thread_can_be_had_ends_at_once(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    sessions = [await asking(server.url).open()]
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    with pytest.warns(ResourceWarning, match="dropped without close"):
        sessions.clear()
    assert (server.regions, files_of(server)) == ({}, [])


DROP = """
import asyncio, atexit, os, sys, warnings
from shmlane import AsyncSession

warnings.simplefilter("ignore", ResourceWarning)

async def main():
    session = await AsyncSession(sys.argv[1], "identity", slots=1).open()
    del session
    if not (child := os.fork()):
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

asyncio.run(main())
"""


def test_a_session_that_is_dropped_last_is_ended_before_the_interpreter(
    server: ScriptedServer,
) -> None:
    server.script(Delay(0.2), path="/unregister")
    assert run_python(DROP, server.url) == ""
    assert (server.regions, files_of(server)) == ({}, [])
