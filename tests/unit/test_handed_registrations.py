"""A registration that one process began is never taken for one that nobody made."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shmlane import InferTimeout, Lease, Session, SlotRef, Timeouts
from shmlane.testing import Delay, ScriptedServer
from tests.polling import eventually
from tests.sessions import all_free
from tests.unit.one_slot import INPUT, OUTPUT, serving

SMALL, LARGE = (1, 1, 1, 8), (1, 1, 1, 4000)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as server:
        yield server


def session(server: ScriptedServer, *, infer: float = 10.0) -> Session:
    return Session(
        server.url,
        "identity",
        slots=1,
        shapes={INPUT: SMALL},
        outputs={OUTPUT: LARGE},
        timeouts=Timeouts(infer=infer),
    )


def fill(lease: Lease, shape: tuple[int, ...], value: float) -> None:
    lease.view(INPUT, shape)[...] = value


def answers(lease: Lease, value: float) -> bool:
    return bool((lease.infer()[OUTPUT] == value).all())


@pytest.mark.parametrize("next_one", ["home", "another"])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_whoever_has_the_slot_next_uses_another_name(
    server: ScriptedServer, shape: tuple[int, ...], next_one: str
) -> None:
    """Of the slot, and of memory that an input of it moved to."""
    go = threading.Event()
    with (
        session(server) as home,
        session(server, infer=0.5) as hasty,
        session(server) as another,
    ):
        with home.lease() as lease:
            fill(lease, shape, 1)
            ref = lease.detach()
        if shape == SMALL:
            # It has to be registered anew.
            server.unregister_all()
        server.script(Delay(go), path="/register")
        with hasty.adopt(ref) as lease, pytest.raises(InferTimeout):
            lease.infer()
        all_free(home)
        count = len(server.regions)
        go.set()
        eventually(lambda: len(server.regions) > count, "it is registered late")
        with home.lease() as lease:
            fill(lease, shape, 2)
            if next_one == "home":
                assert answers(lease, 2)
            else:
                ref = SlotRef.parse(str(lease.detach()))
        if next_one == "another":
            with another.adopt(ref) as lease:
                assert answers(lease, 2)
        all_free(home)


def test_borrowers_that_gave_up_leave_names_and_keys_that_nobody_uses_again(
    server: ScriptedServer,
) -> None:
    """Each has registered memory of the home's, and died before it could tell."""
    with session(server) as home:
        for value in range(1, 4):
            go = threading.Event()
            with home.lease() as lease:
                fill(lease, LARGE, value)
                ref = lease.detach()
            with session(server, infer=0.5) as borrower:
                server.script(Delay(go))
                with borrower.adopt(ref) as lease, pytest.raises(InferTimeout):
                    lease.infer()
                borrower.close(wait=False)
            go.set()
            all_free(home)
        with home.lease() as lease:
            fill(lease, LARGE, 9)
            assert answers(lease, 9)
    assert server.regions == {}
