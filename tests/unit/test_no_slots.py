"""Sessions that have claimed no slots say so, whatever is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmlane import AsyncSession, Session, SessionHandle, UsageError
from tests.sessions import frame
from tests.unit.one_slot import INPUT, one_slot, serving

ITEM = {INPUT: frame(1)}


@pytest.fixture(scope="module")
def handle() -> Iterator[SessionHandle]:
    with serving() as server, one_slot(server.url) as home:
        yield home.share(slots=1)


USES: dict[str, Callable[[Any], Any]] = {
    "lease": lambda session: session.lease(),
    "infer": lambda session: session.infer(ITEM),
    "submit": lambda session: session.submit(ITEM),
    "stream": lambda session: session.stream([ITEM]),
    "stream of one": lambda session: session.stream([ITEM], in_flight=1),
}


@pytest.mark.parametrize("use", USES)
def test_in_a_thread(handle: SessionHandle, use: str) -> None:
    with (
        Session.attach(handle, slots=0) as session,
        pytest.raises(UsageError, match=r"claimed no slots.*slots=1"),
    ):
        USES[use](session)


@pytest.mark.parametrize("use", USES)
def test_in_a_task(handle: SessionHandle, use: str) -> None:
    async def body() -> None:
        async with AsyncSession.attach(handle, slots=0) as session:
            with pytest.raises(UsageError, match=r"claimed no slots.*slots=1"):
                await USES[use](session)

    asyncio.run(body())
