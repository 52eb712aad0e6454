"""What is left when a home ends whose slots are with other processes: nothing."""

from __future__ import annotations

import numpy as np
import pytest

from shmlane import HandoffExpired, Session
from tests.polling import eventually
from tests.unit.one_slot import INPUT, OUTPUT, files_of, fill, serving

SHAPE = (1, 1, 1, 8)


@pytest.mark.parametrize("last", ["home", "borrower"])
@pytest.mark.parametrize("has_grown", [True, False])
def test_whoever_ends_last_removes_what_both_had_open(
    last: str, has_grown: bool
) -> None:
    with serving() as server:
        outputs = None if has_grown else {OUTPUT: SHAPE}
        home = Session(
            server.url, "identity", slots=1, shapes={INPUT: SHAPE}, outputs=outputs
        )
        borrower = Session(server.url, "identity", slots=1, shapes={INPUT: SHAPE})
        for session in (home, borrower):
            session.open()
        # From the second time on the output lies in shared memory of its own.
        for value in (1.0, 2.0, 3.0):
            with home.lease() as lease:
                fill(lease, value)
                ref = lease.detach()
            with borrower.adopt(ref) as lease:
                lease.infer()
        with home.lease() as lease:
            fill(lease, 4.0)
            # Nobody adopts it any more.
            lease.detach()
        first, second = (borrower, home) if last == "home" else (home, borrower)
        first.close()
        second.close()
        eventually(lambda: not files_of(server), lambda: f"left: {files_of(server)}")
        assert server.regions == {}


@pytest.mark.parametrize("is_shared", [True, False])
def test_only_shared_slots_can_be_adopted_after_their_home(is_shared: bool) -> None:
    shapes = {INPUT: SHAPE}
    with (
        serving() as server,
        Session(server.url, "identity", slots=1, shapes=shapes) as borrower,
    ):
        if is_shared:
            home = Session.attach(borrower.share(slots=1), slots=1)
        else:
            home = Session(server.url, "identity", slots=1, shapes=shapes)
        with home, home.lease() as lease:
            lease.write(INPUT, np.full(SHAPE, 7, np.float32))
            ref = lease.detach()
        if is_shared:
            with borrower.adopt(ref) as lease:
                assert lease.infer()[OUTPUT].max() == 7
        else:
            with pytest.raises(HandoffExpired, match="its home has ended"):
                borrower.adopt(ref)
    assert files_of(server) == []
