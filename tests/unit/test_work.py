"""Work of threads: what came of it belongs to whoever takes it."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from shmlane.work import Work
from tests.unit.tasks import in_a_loop


class Thing:
    """Something that can be seen to die."""


@in_a_loop
async def test_what_was_taken_is_nobody_elses() -> None:
    loop = asyncio.get_running_loop()
    thing = (await loop.run_in_executor(None, Work(Thing).do)).take()
    alive = weakref.ref(thing)
    del thing
    assert alive() is None


def test_an_error_is_raised_once() -> None:
    work = Work(dict[str, str].__getitem__, ({}, "nothing")).do()
    with pytest.raises(KeyError, match="nothing"):
        work.take()
    with pytest.raises(AttributeError):
        work.take()
