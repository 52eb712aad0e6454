"""Steps of sequences: in order, each sent once, whatever else is allowed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmlane import (
    Connection,
    InferFailed,
    InferTimeout,
    RequestLost,
    RequestOptions,
    Session,
)
from shmlane.testing import Close, Delay, ScriptedServer
from tests.patience import given_up
from tests.polling import eventually
from tests.unit.asked import Repeat, asked, count_of, scores, session_on

ROW = np.ones((1, 4), np.float32)
FIRST = RequestOptions(sequence_id=7, sequence_start=True)
NEXT = RequestOptions(sequence_id=7)
OTHER = RequestOptions(sequence_id="seven")


@pytest.fixture(params=["system", "wire"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ScriptedServer, Session]]:
    with session_on(scores(), slots=3, memory=request.param) as pair:
        yield pair


def step(
    session: Session, options: RequestOptions | None, *, timeout: float = 10.0
) -> None:
    came = session.infer({"X": ROW}, options=options, timeout=timeout)
    assert came["Y"].tolist() == ROW.tolist()


def give_up_on_a_step(
    server: ScriptedServer, session: Session, options: RequestOptions
) -> threading.Event:
    """A step that the server works on until the event is set."""
    reply = threading.Event()
    server.script(Delay(reply))
    given_up(lambda limit: step(session, options, timeout=limit))
    server.wait_for(1)
    return reply


def test_steps_tell_what_they_are(pair: tuple[ScriptedServer, Session]) -> None:
    server, session = pair
    last = RequestOptions(sequence_id=7, sequence_end=True)
    for options in (FIRST, NEXT, last, OTHER):
        step(session, options)
    assert [dict(each.parameters) for each in asked(server)] == [
        {"sequence_id": 7, "sequence_start": True},
        {"sequence_id": 7},
        {"sequence_id": 7, "sequence_end": True},
        {"sequence_id": "seven"},
    ]


def test_a_step_waits_for_the_late_reply_of_the_last(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    reply = give_up_on_a_step(server, session, FIRST)
    # Others need not wait.
    step(session, OTHER)
    step(session, None)
    sent = len(asked(server))
    with pytest.raises(InferTimeout, match=r"last step of sequence 7 .* was not sent"):
        step(session, NEXT, timeout=0.05)
    assert len(asked(server)) == sent
    assert session.stats().free == 2
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(step, session, NEXT)
        eventually(lambda: session.stats().leased == 1, "the step has its slot")
        assert len(asked(server)) == sent
        reply.set()
        later.result(10.0)
    assert len(asked(server)) == sent + 1
    eventually(lambda: session.stats().free == 3, lambda: repr(session))


def test_a_sequence_that_begins_anew_waits_for_no_step_of_the_old_one(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    reply = give_up_on_a_step(server, session, NEXT)
    step(session, FIRST)
    reply.set()
    eventually(lambda: session.stats().free == 3, lambda: repr(session))
    step(session, NEXT)


def test_a_step_that_was_not_sent_is_not_waited_for(
    pair: tuple[ScriptedServer, Session],
) -> None:
    server, session = pair
    reply = give_up_on_a_step(server, session, FIRST)
    with pytest.raises(InferTimeout, match="was not sent"):
        step(session, NEXT, timeout=0.05)
    reply.set()
    step(session, NEXT)
    step(session, NEXT)
    assert len(asked(server)) == 3


def test_a_lost_step_is_not_sent_again() -> None:
    with session_on(scores(), connection=Connection(replay=True)) as (server, session):
        server.script(Close())
        with pytest.raises(RequestLost):
            step(session, FIRST)
        assert len(asked(server)) == 1
        eventually(lambda: session.stats().free == 1, lambda: repr(session))
        server.script(Close())
        step(session, None)
        assert len(asked(server)) == 3


def test_a_step_whose_output_did_not_fit_is_not_run_again() -> None:
    repeat = Repeat()
    with session_on(repeat.model, rerun=True, outputs={"Y": (4,)}) as (_, session):
        with pytest.raises(InferFailed, match="the model has run"):
            count_of(session, 4096, options=NEXT)
        assert (repeat.runs, session.stats().reruns) == (1, 0)
        # It has told its size.
        assert count_of(session, 4096, options=NEXT) == 4096
        assert repeat.runs == 2


def test_many_threads_step_through_sequences_of_their_own(
    pair: tuple[ScriptedServer, Session],
) -> None:
    _, session = pair

    def walk(number: int) -> None:
        for count in range(40):
            step(session, RequestOptions(sequence_id=1 + 1000 * number + count))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            for walked in [pool.submit(walk, number) for number in range(3)]:
                walked.result(60.0)
    finally:
        sys.setswitchinterval(before)
    assert session.stats().free == 3
