"""A session of one slot on a scripted server, and the state that its slot is in.

Owns what the tests of single transitions share. Refuses real servers.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmlane import Connection, Lease, LeaseTimeout, Session, Timeouts
from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.testing import ScriptedServer, identity_model
from tests.polling import eventually
from tests.sessions import Array, all_free, frame, region_files

INPUT = "INPUT__0"
OUTPUT = "OUTPUT__0"
STATES = ("free", "leased", "in_flight", "late", "lost", "pinned")


@contextlib.contextmanager
def serving(version: str = "2.51.0", **options: Any) -> Iterator[ScriptedServer]:
    """A server that is never made to crash, and on which nothing is left."""
    server = ScriptedServer(
        [identity_model()], version=version, allow_client_shm=True, **options
    )
    with server:
        yield server
        server.release()
        eventually(lambda: server.in_model == 0, "the last request ends")
        assert server.regions == {}
    assert not server.crashed
    gc.collect()
    eventually(lambda: not _mapped(), lambda: f"no region is left: {_mapped()}")


def _mapped() -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    return [str(path) for path in region_files() if str(path) in maps]


def files_of(server: ScriptedServer) -> list[str]:
    """Region files of clients of this server, dead ones included."""
    found = []
    for path in region_files():
        with contextlib.suppress(FileNotFoundError, RegionError):
            header = RegionHeader.parse(path.read_bytes())
            if header.description["server"] == server.url:
                found.append(path.name)
    return found


def one_slot(url: str, *, replay: bool = False, limit: float = 5.0) -> Session:
    """Its input and its output of eight numbers lie in shared memory."""
    shape = (1, 1, 1, 8)
    return Session(
        url,
        "identity",
        slots=1,
        shapes={INPUT: shape},
        outputs={OUTPUT: shape},
        connection=Connection(replay=replay),
        timeouts=Timeouts(connect=min(limit, 2.0), infer=limit, lease=limit),
    )


@contextlib.contextmanager
def home_of_one(server: ScriptedServer) -> Iterator[Session]:
    """Its input grows with what is written, its output has room for all of that."""
    shapes, outputs = {INPUT: (1, 1, 1, 8)}, {OUTPUT: (1, 1, 1, 5000)}
    with Session(
        server.url, "identity", slots=1, shapes=shapes, outputs=outputs
    ) as home:
        yield home


def state(session: Session) -> str:
    """The states of all slots, which is one word as long as there is one slot."""
    stats = session.stats()
    return " ".join(name for name in STATES if getattr(stats, name))


def becomes(session: Session, wanted: str) -> None:
    eventually(
        lambda: state(session) == wanted,
        lambda: f"the slot is {wanted}, but it is {state(session)}",
    )


def is_kept(session: Session, wanted: str) -> None:
    """The slot is in this state, and nobody can have it."""
    assert state(session) == wanted
    with pytest.raises(LeaseTimeout, match=f"1 {wanted}"):
        session.lease(timeout=0)
    assert state(session) == wanted


def fill(lease: Lease, value: float) -> Array:
    """Fill the input, and return the view of it."""
    view = lease[INPUT]
    view[...] = frame(value)
    return view


def echo(session: Session, value: float) -> None:
    """What is sent comes back."""
    sent = frame(value)
    came = session.infer({INPUT: sent})[OUTPUT]
    np.testing.assert_array_equal(came, sent)


def serves_right(session: Session) -> None:
    """Every slot is free, and both of its prepared requests are answered right."""
    all_free(session)
    for value in (11.0, 12.0, 13.0):
        echo(session, value)
    assert state(session) == "free"
