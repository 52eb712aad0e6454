"""One list of scenarios, run on every way to send requests.

What a way cannot do is declared in `NOT_FOR`, with the reason. After each scenario all
slots are free, nothing is registered or left in /dev/shm, and the server lives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from shmlane import InferTimeout, RequestOptions, UsageError
from shmlane.server import TritonServer
from tests.flavours import (
    Client,
    LeaseInfer,
    LeaseSubmit,
    SessionInfer,
    SessionStream,
    SessionStreamWithWorkers,
    SessionSubmit,
)
from tests.flavours_async import (
    AsyncLeaseInfer,
    AsyncLeaseSubmit,
    AsyncSessionInfer,
    AsyncSessionStream,
    AsyncSessionStreamWithWorkers,
    AsyncSessionSubmit,
)
from tests.scenarios import (
    SCENARIOS,
    SHORT,
    steps_of_a_sequence_are_sent_in_order_and_none_overtakes,
    views_keep_their_slot_and_others_get_spare_ones,
    views_outlive_their_session,
)
from tests.sessions import frame, registered, stopped
from tests.worlds import (
    INPUT,
    OUTPUT,
    Flavour,
    Scripted,
    World,
    are_right,
    fails,
    frames,
    good,
    serves_right,
)

pytestmark = pytest.mark.usefixtures("no_leftovers")

FLAVOURS: tuple[type[Client], ...] = (
    SessionInfer,
    LeaseInfer,
    SessionSubmit,
    LeaseSubmit,
    SessionStream,
    SessionStreamWithWorkers,
    AsyncSessionInfer,
    AsyncLeaseInfer,
    AsyncSessionSubmit,
    AsyncLeaseSubmit,
    AsyncSessionStream,
    AsyncSessionStreamWithWorkers,
)
STREAMS = [flavour for flavour in FLAVOURS if "Stream" in flavour.__name__]
COPYING = [
    flavour
    for flavour in FLAVOURS
    if flavour.__name__.endswith(("SessionInfer", "SessionSubmit"))
]

# Scenarios that make no sense for some ways: which, and why.
NOT_FOR: dict[Callable[..., None], tuple[list[Any], str]] = {
    steps_of_a_sequence_are_sent_in_order_and_none_overtakes: (
        STREAMS,
        "a stream has many requests in flight, and a sequence one",
    ),
    views_keep_their_slot_and_others_get_spare_ones: (COPYING, "it hands out copies"),
    views_outlive_their_session: (COPYING, "it hands out copies"),
}


# --- scenarios on a real server -------------------------------------------------------


def many_requests_get_the_right_values(world: World) -> None:
    with world.client("sink", slots=4) as client:
        for begin in (0, 1000):
            values = [float(begin + number) for number in range(100)]
            outcomes = client.ask(frames(*values))
            assert [float(good(each)[OUTPUT][0]) for each in outcomes] == values


def shapes_may_change_and_grow(world: World) -> None:
    with world.client() as client:
        items = [
            *frames(1, 2, size=8),
            *frames(3, size=5000),
            *frames(4, 5, size=3),
            *frames(6, 7, 8, size=9000),
        ]
        for _ in range(2):
            are_right(client.ask(items), items)
        assert client.stats().growths > 0


def tensors_can_go_over_the_wire(world: World) -> None:
    with world.client(memory="wire") as client:
        for size in (8, 300_000, 3):
            items = frames(1, 2, 3, 4, 5, size=size)
            are_right(client.ask(items), items)
        assert client.stats().shared_bytes == 0


REAL: list[Callable[[World], None]] = [
    many_requests_get_the_right_values,
    shapes_may_change_and_grow,
    tensors_can_go_over_the_wire,
]


# --- all of them ----------------------------------------------------------------------


def product(scenarios: list[Any]) -> list[Any]:
    return [
        pytest.param(scenario, flavour, id=f"{scenario.__name__}-{flavour.__name__}")
        for scenario in scenarios
        for flavour in FLAVOURS
        if flavour not in NOT_FOR.get(scenario, ([], ""))[0]
    ]


@pytest.mark.parametrize(("scenario", "flavour"), product(SCENARIOS))
def test_scripted(scenario: Callable[[Scripted], None], flavour: Flavour) -> None:
    world = Scripted(flavour)
    try:
        scenario(world)
    finally:
        world.end()


@pytest.mark.parametrize(("scenario", "flavour"), product(REAL))
def test_real(
    server: TritonServer, scenario: Callable[[World], None], flavour: Flavour
) -> None:
    scenario(World(flavour, server.http_url))
    assert server.is_alive


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_real_server_that_stands_still_is_not_waited_for_longer_than_said(
    own_server: TritonServer, flavour: Flavour
) -> None:
    world, shape = World(flavour, own_server.http_url), frame(0).shape
    with world.client(shapes={INPUT: shape}, outputs={OUTPUT: shape}) as client:
        # Nothing is to be connected or registered any more.
        client.warm_up()
        with stopped(own_server):
            fails(client.ask(frames(1, 2), timeout=SHORT), InferTimeout)
            assert client.stats().late == 2
        serves_right(client)
        assert client.stats().late_replies == 2


def test_a_real_server_that_restarts_is_told_of_the_memory_again(
    own_server: TritonServer,
) -> None:
    with contextlib.ExitStack() as opened:
        clients = [
            opened.enter_context(World(flavour, own_server.http_url).client("sink"))
            for flavour in FLAVOURS
        ]
        for restarts in range(2):
            if restarts:
                own_server.kill()
                own_server.start()
            for number, client in enumerate(clients, 10 * restarts):
                (outcome,) = client.ask(frames(number))
                assert good(outcome)[OUTPUT].tolist() == [number]
        assert all(client.stats().reregistrations for client in clients)
    assert registered(own_server) == set()


def test_what_is_declared_is_a_scenario_and_nothing_is_left_out() -> None:
    assert set(NOT_FOR) <= {*SCENARIOS, *REAL}
    assert len(FLAVOURS) == len(set(FLAVOURS)) == 12
    asked = len(product(SCENARIOS)) + len(product(REAL))
    left_out = sum(len(flavours) for flavours, _ in NOT_FOR.values())
    assert asked + left_out == 12 * (len(SCENARIOS) + len(REAL))


@pytest.mark.parametrize("flavour", STREAMS)
def test_a_sequence_is_no_stream(flavour: Flavour) -> None:
    world = Scripted(flavour)
    with world.client() as client:
        step = RequestOptions(sequence_id=1, sequence_start=True)
        fails(client.ask(frames(1), options=step), UsageError)
    world.end()
