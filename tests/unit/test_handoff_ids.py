"""A connection goes from one adopted slot to the next, and what was sent over it."""

from __future__ import annotations

import numpy as np

from shmlane import RequestOptions, Session, SlotRef
from tests.unit.asked import asked, scores, session_on

ROW = np.ones((1, 4), np.float32)


def filled(home: Session) -> SlotRef:
    with home.lease() as lease:
        lease.write("X", ROW)
        return lease.detach()


def test_no_id_comes_twice_over_one_connection() -> None:
    with session_on(scores(), slots=2) as (server, home):
        with Session(home.url, home.model, slots=1) as borrower:
            own = borrower.stats().connections
            for _ in range(3):
                for ref in [filled(home), filled(home)]:
                    with borrower.adopt(ref) as lease:
                        lease.infer()
            assert borrower.stats().connections == own + 1
        assert len({each.id for each in asked(server)}) == 6


def test_an_own_id_is_not_repeated_over_one_connection() -> None:
    options = RequestOptions(id="frame")
    with (
        session_on(scores(), slots=2) as (_, home),
        Session(home.url, home.model, slots=1) as borrower,
    ):
        own = borrower.stats().connections
        for ref in [filled(home), filled(home)]:
            with borrower.adopt(ref) as lease:
                assert lease.infer(options=options).request_id == "frame"
        # A late copy of the first reply cannot pass for the second.
        assert borrower.stats().connections == own + 2
