"""Many requests from one thread: how many are in flight, and what counts as right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmlane.bench import CONTENDERS, PAYLOADS
from shmlane.bench.workers.flows import Overlapping
from shmlane.bench.workers.harness import Log, Spec, measure, prepare
from shmlane.bench.workers.shmlane_worker import make_client
from shmlane.metadata import Array
from shmlane.testing import FakeModel, ScriptedServer

FLOWS = ["shmlane-http", "shmlane-async", "shmlane-stream"]
IN_FLIGHT = 4
Run = Callable[[Any], dict[str, Array]]


def last_element(inputs: Any) -> dict[str, Array]:
    return {"OUTPUT__0": inputs["INPUT__0"].reshape(-1)[-1:]}


def measured(contender: str, run: Run, *, fill: bool = False) -> dict[str, Any]:
    """What the contender's worker reports of a short round with this model."""
    model = FakeModel(
        "sink",
        inputs={"INPUT__0": ("FP32", (-1, -1, -1, -1))},
        outputs={"OUTPUT__0": ("FP32", (1,))},
        run=run,
    )
    chosen, shape = CONTENDERS[contender], PAYLOADS["tiny"].shape
    with ScriptedServer([model], allow_client_shm=True) as server:
        spec = Spec(
            contender,
            server.url,
            "sink",
            shape,
            IN_FLIGHT,
            fill,
            chosen.way,
            chosen.flow,
        )
        client = make_client(spec)
        traffic = client.traffic()
        try:
            prepare(traffic, 0.01)
            return measure(traffic, 0.03)
        finally:
            traffic.close()
            client.close()


@pytest.mark.usefixtures("no_leftovers")
@pytest.mark.parametrize("contender", FLOWS)
def test_every_reply_is_right(contender: str) -> None:
    turn = measured(contender, last_element)
    assert turn["requests"] >= IN_FLIGHT
    assert turn["wrong"] == 0
    assert turn["ended_ns"] > turn["began_ns"]
    assert 0 < turn["p50_us"] <= turn["p99_us"]


@pytest.mark.parametrize("contender", FLOWS)
def test_a_reply_of_an_earlier_request_is_not_taken_for_right(contender: str) -> None:
    earlier: list[Array] = [np.zeros(1, np.float32)]

    def stale(inputs: Any) -> dict[str, Array]:
        earlier.append(inputs["INPUT__0"].reshape(-1)[-1:].copy())
        return {"OUTPUT__0": earlier[-2]}

    turn = measured(contender, stale)
    assert turn["wrong"] > turn["requests"] // 2


@pytest.mark.parametrize("contender", FLOWS)
def test_as_many_are_in_flight_as_were_asked_for(contender: str) -> None:
    inside, full = set[int](), threading.Event()

    def meet(inputs: Any) -> dict[str, Array]:
        """Keep everybody until all are here, but for the zeros that come before."""
        if not inputs["INPUT__0"].any():
            return last_element(inputs)
        inside.add(threading.get_ident())
        if len(inside) == IN_FLIGHT:
            full.set()
        assert full.wait(10.0)
        return last_element(inputs)

    assert measured(contender, meet)["wrong"] == 0
    assert len(inside) == IN_FLIGHT


@pytest.mark.parametrize("contender", FLOWS)
@pytest.mark.parametrize("fill", [True, False])
def test_the_whole_input_is_written_only_where_it_is_filled(
    contender: str, fill: bool
) -> None:
    sums: list[float] = []

    def weigh(inputs: Any) -> dict[str, Array]:
        sums.append(float(inputs["INPUT__0"].reshape(-1)[:-1].sum()))
        return last_element(inputs)

    measured(contender, weigh, fill=fill)
    # Before the round each slot is run with zeros once.
    assert bool(sums[-1]) is fill


def test_overlapping_requests_are_timed_from_their_own_beginning() -> None:
    turn = Overlapping(Log(2), 0.0, 3)
    values = list(turn)
    assert len(values) == 3
    assert len(set(values)) == 3
    turn.finish(values)
    first, second, third = turn.times_ns
    assert turn.requests == 3
    assert turn.wrong == 0
    assert min(first, second, third) > 0
    # None of them is longer than the turn, and the first began with it.
    whole = turn.ended_ns - turn.began_ns
    assert max(first, second, third) <= whole


@pytest.mark.parametrize("order", [[1, 0], [0, 0]])
def test_results_out_of_order_are_wrong(order: list[int]) -> None:
    turn = Overlapping(Log(0), 0.0, 2)
    values = list(turn)
    turn.finish(values[index] for index in order)
    assert turn.wrong == sum(index != place for place, index in enumerate(order))
