"""What happens to requests, whichever way they are sent: one list of scenarios.

Owns what goes on at a scripted server, and what must come of that. Refuses to know the
ways of asking (`flavours`); `server/test_scenarios` brings both together.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from shmlane import (
    InferFailed,
    InferTimeout,
    LeaseTimeout,
    ModelNotReady,
    PoolClosed,
    ProtocolError,
    RequestLost,
    RequestOptions,
    ServerUnreachable,
    TensorMismatch,
    UsageError,
)
from shmlane.testing import Status
from tests.fault_proxy import FaultProxy
from tests.polling import eventually
from tests.sessions import frame
from tests.unit.asked import asked
from tests.worlds import (
    INPUT,
    OUTPUT,
    Scripted,
    all_come_back,
    are_right,
    fails,
    frames,
    good,
    serves_right,
)

# Too short for a server that holds a request, long enough for that to be sent where
# many share a core.
SHORT = 0.25

# --- scenarios on a scripted server ---------------------------------------------------


def errors_of_the_model_come_to_those_who_asked(world: Scripted) -> None:
    with world.client("counting") as client:
        counts = [3, -1, 2, 1, -1, 4]
        items = [{"X": np.array([count], np.float32)} for count in counts]
        outcomes = client.ask(items)
        for count, outcome in zip(counts, outcomes, strict=True):
            if count < 0:
                assert isinstance(outcome, InferFailed)
                assert "negative" in str(outcome)
            else:
                assert good(outcome)["Y"].tolist() == list(range(count))
        assert client.stats().drains == 0


def bytes_of_any_length_come_back(world: Scripted) -> None:
    lists: list[list[Any]] = [
        [b"a", b"", b"xyz"],
        [b"q" * 5000],
        [b"b"] * 40,
        ["größer"],
    ]
    with world.client("words") as client:
        outcomes = client.ask([{"W": words} for words in lists])
        for given, outcome in zip(lists, outcomes, strict=True):
            sent = [w if isinstance(w, bytes) else w.encode() for w in given]
            assert list(good(outcome)["W_OUT"]) == sent
            assert good(outcome)["LENGTHS"].tolist() == [len(word) for word in sent]


def an_output_that_did_not_fit_fits_the_next_time(world: Scripted) -> None:
    (item,) = [{"X": np.array([600], np.float32)}]
    with world.client("counting", slots=1, outputs={"Y": (2,)}) as client:
        (error,) = fails(client.ask([item]), InferFailed)
        assert "2400 bytes" in str(error)
        assert len(good(client.ask([item])[0])["Y"]) == 600


def an_output_that_did_not_fit_is_made_again_if_allowed(world: Scripted) -> None:
    (item,) = [{"X": np.array([600], np.float32)}]
    with world.client("counting", slots=1, outputs={"Y": (2,)}, rerun=True) as client:
        assert len(good(client.ask([item])[0])["Y"]) == 600
        assert client.stats().reruns == 1


def wrong_inputs_are_refused_before_they_are_sent(world: Scripted) -> None:
    with world.client() as client:
        wrong = [{INPUT: np.zeros((1, 1, 1, 8), np.int64)}]
        fails(client.ask(wrong), TensorMismatch)
        fails(client.ask([{"NO": np.zeros(1)}]), UsageError)
        fails(client.ask([{}]), UsageError)
        fails(client.ask(frames(1), timeout=-1.0), UsageError)
        assert not asked(world.server)
        serves_right(client)


def a_reply_that_does_not_come_in_time_is_late(world: Scripted) -> None:
    with world.client() as client:
        serves_right(client)
        with world.server.hold():
            fails(client.ask(frames(1, 2), timeout=SHORT), InferTimeout)
            assert client.stats().late == 2
        serves_right(client)
        assert client.stats().late_replies == 2


def nobody_waits_longer_for_a_slot_than_he_wants(world: Scripted) -> None:
    with world.client(slots=1, lease=0.05) as client:
        with client.holding():
            (error,) = fails(client.ask(frames(1)), LeaseTimeout)
            assert "1 leased" in str(error)
        # Nor does he have to: one after the other finds the slot free.
        for item in frames(2, 3, 4):
            all_come_back(client)
            are_right(client.ask([item]), [item])


def many_callers_share_the_slots(world: Scripted) -> None:
    with world.client() as client:
        asked_for = [frames(*range(begin, begin + 20)) for begin in range(0, 400, 100)]
        begun = [client.begin(items) for items in asked_for]
        for each, items in zip(begun, asked_for, strict=True):
            are_right(each.result(20.0), items)
        serves_right(client)


def a_large_request_that_nobody_reads_ends_in_time(world: Scripted) -> None:
    # Parameters have no limit, and go with the request wherever its tensors lie.
    large = RequestOptions(parameters={"text": "x" * (16 << 20)})
    with (
        FaultProxy(world.url) as proxy,
        world.client(url=proxy.url, slots=1) as client,
    ):
        serves_right(client)
        # To build it takes its time, too: the next one is ready to be sent.
        are_right(client.ask(frames(1), options=large), frames(1))
        link = proxy.link
        link.requests.change(is_stalled=True)
        fails(client.ask(frames(1), options=large, timeout=2 * SHORT), InferTimeout)
        serves_right(client)
        assert client.stats().drains == 0


def over_the_wire_no_slot_waits_for_a_late_reply(world: Scripted) -> None:
    with world.client(memory="wire") as client:
        serves_right(client)
        with world.server.hold():
            fails(client.ask(frames(1, 2), timeout=SHORT), InferTimeout)
            all_come_back(client)
        serves_right(client)
        assert client.stats().late_replies == 0


def over_the_wire_a_lost_request_keeps_no_slot(world: Scripted) -> None:
    with (
        FaultProxy(world.url) as proxy,
        world.client(url=proxy.url, slots=1, memory="wire") as client,
    ):
        serves_right(client)
        link = proxy.link
        link.replies.change(cut_after=20)
        fails(client.ask(frames(1)), RequestLost)
        serves_right(client)
        assert client.stats().drains == 0


def callers_are_served_in_turn(world: Scripted) -> None:
    with world.client("noting", slots=1) as client:
        with client.holding():
            begun = []
            for number in range(6):
                begun.append(client.begin(frames(number)))
                eventually(
                    lambda number=number: client.stats().waits > number,  # type: ignore[misc]
                    "another caller waits",
                )
        for each in begun:
            good(each.result(10.0)[0])
        assert world.noted[-6:] == [0, 1, 2, 3, 4, 5]


def closing_waits_for_replies(world: Scripted) -> None:
    items = frames(1, 2)
    with world.client() as client, ThreadPoolExecutor(1) as pool:
        with world.server.hold():
            begun = client.begin(items)
            world.server.wait_for(2)
            closing = pool.submit(client.close)
            # From then on nothing new is begun.
            eventually(lambda: isinstance(client.ask(frames(3))[0], PoolClosed))
            assert not closing.done()
        are_right(begun.result(10.0), items)
        closing.result(10.0)
        eventually(lambda: not world.server.regions, "nothing is registered")


def closing_ends_the_wait_for_a_slot(world: Scripted) -> None:
    with world.client(slots=1) as client:
        with client.holding():
            begun = client.begin(frames(1))
            eventually(lambda: client.stats().waits == 1, "it waits for a slot")
            client.close()
            fails(begun.result(10.0), PoolClosed)
        eventually(lambda: not world.server.regions, "nothing is registered")


def a_server_that_restarted_is_told_of_the_memory_again(world: Scripted) -> None:
    with world.client() as client:
        serves_right(client)
        world.server.restart()
        serves_right(client, first=200)
        stats = client.stats()
        assert stats.reregistrations >= 2
        assert stats.drains == 0


def a_server_that_is_away_is_named_and_may_return(world: Scripted) -> None:
    with world.client() as client:
        world.server.stop()
        for error in fails(client.ask(frames(1, 2), timeout=0.3), Exception):
            assert isinstance(error, ServerUnreachable | InferTimeout)
            assert error.retryable
        world.server.start()
        serves_right(client)


def registrations_that_a_stranger_took_back_are_made_again(world: Scripted) -> None:
    with world.client() as client:
        client.warm_up()
        with world.server.hold():
            items = frames(1, 2)
            begun = client.begin(items)
            world.server.wait_for(2)
            world.server.unregister_all()
        are_right(begun.result(10.0), items)
        world.server.unregister_all()
        serves_right(client)
        assert client.stats().drains == 0


def a_model_that_is_not_ready_is_told_of(world: Scripted) -> None:
    with world.client() as client:
        world.identity.is_ready = False
        try:
            (error,) = fails(client.ask(frames(1)), ModelNotReady)
            assert isinstance(error, ModelNotReady)
            assert error.retryable
        finally:
            world.identity.is_ready = True
        serves_right(client)


def a_connection_that_breaks_loses_one_request(world: Scripted) -> None:
    with (
        FaultProxy(world.url) as proxy,
        world.client(url=proxy.url, slots=1) as client,
    ):
        serves_right(client)
        link = proxy.link
        link.replies.change(cut_after=20)
        (error,) = fails(client.ask(frames(1)), RequestLost)
        assert isinstance(error, RequestLost)
        assert error.retryable
        serves_right(client)
        assert client.stats().drains == 1


def a_request_that_was_lost_is_sent_again_if_allowed(world: Scripted) -> None:
    items = frames(1)
    with (
        FaultProxy(world.url) as proxy,
        world.client(url=proxy.url, slots=1, replay=True) as client,
    ):
        serves_right(client)
        link = proxy.link
        link.replies.change(cut_after=20)
        are_right(client.ask(items), items)
        serves_right(client)
        assert client.stats().retries == 1


def what_a_proxy_answers_is_not_taken_for_the_server(world: Scripted) -> None:
    with world.client(slots=1) as client:
        serves_right(client)
        world.server.script(Status(502, "bad gateway"))
        fails(client.ask(frames(1)), RequestLost)
        serves_right(client)


def a_reply_that_comes_twice_is_nobody_elses(world: Scripted) -> None:
    with (
        FaultProxy(world.url) as proxy,
        world.client(url=proxy.url, slots=1) as client,
    ):
        serves_right(client)
        link = proxy.link
        link.replies.change(copies=2)
        (outcome,) = client.ask(frames(1))
        if not isinstance(outcome, ProtocolError):
            are_right([outcome], frames(1))
        for value in range(2, 5):
            are_right(client.ask(frames(value)), frames(value))


def what_a_request_asks_for_reaches_the_server(world: Scripted) -> None:
    with world.client(slots=1) as client:
        items = frames(1)
        options = RequestOptions(id="mine", priority=2, parameters={"mood": "good"})
        are_right(client.ask(items, options=options), items)
        (request,) = asked(world.server)
        assert request.id == "mine"
        assert request.parameters == {"mood": "good", "priority": 2}
        fails(client.ask(items, options="mine"), UsageError)
        serves_right(client)


def steps_of_a_sequence_are_sent_in_order_and_none_overtakes(world: Scripted) -> None:
    steps = [RequestOptions(sequence_id=5, sequence_start=True)]
    steps += [RequestOptions(sequence_id=5) for _ in range(4)]
    with world.client("noting") as client:
        with world.server.hold():
            first = client.ask(frames(0), options=steps[0], timeout=SHORT)
            fails(first, InferTimeout)
            world.server.wait_for(1)
            second = client.begin(frames(1), options=steps[1])
            eventually(lambda: client.stats().leased == 1, "the next step waits")
            assert len(asked(world.server)) == 1
        good(second.result(10.0)[0])
        for number, step in enumerate(steps[2:], 2):
            good(client.ask(frames(number), options=step)[0])
        assert world.noted[-5:] == [0, 1, 2, 3, 4]


def views_keep_their_slot_and_others_get_spare_ones(world: Scripted) -> None:
    shape = frame(0).shape
    with world.client(shapes={INPUT: shape}, outputs={OUTPUT: shape}) as client:
        kept = [client.keep(item) for item in frames(1, 2)]
        items = frames(3, 4, 5, 6, 7)
        are_right(client.ask(items), items)
        for value, views in enumerate(kept, 1):
            np.testing.assert_array_equal(views[OUTPUT], frame(value))
        assert client.stats().spare_slots == 2
        kept.clear()
        del views
        serves_right(client)


def views_outlive_their_session(world: Scripted) -> None:
    with world.client(slots=1) as client:
        (item,) = frames(9)
        client.ask([item])
        kept = client.keep(item)
        client.close()
        np.testing.assert_array_equal(kept[OUTPUT], frame(9))


SCENARIOS: list[Callable[[Scripted], None]] = [
    errors_of_the_model_come_to_those_who_asked,
    bytes_of_any_length_come_back,
    an_output_that_did_not_fit_fits_the_next_time,
    an_output_that_did_not_fit_is_made_again_if_allowed,
    wrong_inputs_are_refused_before_they_are_sent,
    a_reply_that_does_not_come_in_time_is_late,
    nobody_waits_longer_for_a_slot_than_he_wants,
    many_callers_share_the_slots,
    a_large_request_that_nobody_reads_ends_in_time,
    over_the_wire_no_slot_waits_for_a_late_reply,
    over_the_wire_a_lost_request_keeps_no_slot,
    callers_are_served_in_turn,
    closing_waits_for_replies,
    closing_ends_the_wait_for_a_slot,
    a_server_that_restarted_is_told_of_the_memory_again,
    a_server_that_is_away_is_named_and_may_return,
    registrations_that_a_stranger_took_back_are_made_again,
    a_model_that_is_not_ready_is_told_of,
    a_connection_that_breaks_loses_one_request,
    a_request_that_was_lost_is_sent_again_if_allowed,
    what_a_proxy_answers_is_not_taken_for_the_server,
    a_reply_that_comes_twice_is_nobody_elses,
    what_a_request_asks_for_reaches_the_server,
    steps_of_a_sequence_are_sent_in_order_and_none_overtakes,
    views_keep_their_slot_and_others_get_spare_ones,
    views_outlive_their_session,
]
