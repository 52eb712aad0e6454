"""Talks about the memory of a slot: registered, taken back, drained, in any version."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shmlane import control
from shmlane.control import Drained, drain, forget, parse_version, register
from shmlane.errors import (
    AccessRestricted,
    RegionNotVisible,
    ServerError,
    SharedMemoryDisabled,
    ShmlaneError,
)
from shmlane.slots import Slot
from tests.unit.scripted import (
    OPEN,
    REQUESTS,
    Script,
    error,
    http,
    in_turn,
    memory,
)

RESTRICTED = error(403, "This API is restricted, expecting header 'K'")
IN_USE = error(500, "Cannot unregister shared memory region 'r', currently in use.")
GONE = error(404, "Unable to find system shared memory region: 'r'")
OK = http(200)
LISTED = http(200, "[]")


# --- registering ----------------------------------------------------------------------


@pytest.fixture
def slot() -> Iterator[Slot]:
    """A slot with two registrations: its region and a block that grew."""
    shared = memory(OPEN, shapes={"X": (8,)}, outputs={"Y": (8,)})
    (made,) = shared.make_slots(1)
    shared.grow(made, made.inputs["X"], 5000)
    yield made
    made.close()
    shared.close()


@pytest.fixture
def live(slot: Slot) -> Slot:
    for each in slot.registrations:
        each.is_live = True
    return slot


def names(slot: Slot) -> list[str]:
    return [each.name for each in slot.registrations]


def registering(*names: str) -> list[str]:
    return [f"POST /v2/systemsharedmemory/region/{name}/register" for name in names]


def unregistering(*names: str) -> list[str]:
    return [f"POST /v2/systemsharedmemory/region/{name}/unregister" for name in names]


def status_of(name: str) -> str:
    return f"GET /v2/systemsharedmemory/region/{name}/status"


def run(slot: Slot, *replies: bytes) -> Script:
    script = Script(in_turn(*replies))
    script.run(register(REQUESTS, slot))
    return script


def test_every_region_is_registered_whole_under_name_and_key(slot: Slot) -> None:
    script = run(slot, OK, OK)
    assert script.lines == registering(*names(slot))
    assert [request.body for request in script.asked] == [
        {"key": each.key, "byte_size": each.region.nbytes}
        for each in slot.registrations
    ]
    assert all(each.is_live for each in slot.registrations)
    assert slot.obsolete == []


def test_what_is_registered_is_left_alone(slot: Slot) -> None:
    slot.registrations[0].is_live = True
    assert run(slot, OK).lines == registering(names(slot)[1])
    assert run(slot).lines == []


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (
            error(500, "Unable to open shared memory region: '/k'"),
            RegionNotVisible,
            "--ipc=host",
        ),
        (
            error(501, "Client shared memory is disabled. Start the server"),
            SharedMemoryDisabled,
            "--allow-client-shm=true",
        ),
        (RESTRICTED, AccessRestricted, "expecting header 'K'"),
        (error(400, "failed to register: invalid args"), ServerError, "invalid args"),
    ],
)
def test_a_refused_registration_says_what_to_do(
    slot: Slot, reply: bytes, kind: type[ShmlaneError], words: str
) -> None:
    with pytest.raises(ShmlaneError) as caught:
        run(slot, reply)
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert not slot.registrations[0].is_live
    # The server has said that it does not know the name: there is nothing to undo.
    assert slot.obsolete == []


def test_a_region_that_the_server_cannot_open_is_named(slot: Slot) -> None:
    with pytest.raises(RegionNotVisible) as caught:
        run(slot, error(500, "Unable to open shared memory region: '/k'"))
    region = slot.registrations[0].region
    assert region.path in str(caught.value)
    assert caught.value.context["region"] == region.name


def interrupted(slot: Slot, *replies: bytes) -> Script:
    """A registration whose connection breaks when the replies are used up."""
    replies_left = list(replies)

    def answer(request: bytes) -> bytes:
        if not replies_left:
            raise ConnectionError("broken")
        return replies_left.pop(0)

    script = Script(answer)
    with pytest.raises(ConnectionError):
        script.run(register(REQUESTS, slot))
    return script


def test_an_interrupted_registration_is_taken_back_before_a_new_name(
    slot: Slot,
) -> None:
    base, extension = names(slot)
    interrupted(slot)
    assert slot.obsolete == [base]
    script = run(slot, OK, OK, OK)
    new = names(slot)[0]
    assert new not in (base, extension)
    assert script.lines == [*unregistering(base), *registering(new, extension)]
    assert slot.obsolete == []


def test_the_key_of_an_interrupted_registration_is_not_used_again(slot: Slot) -> None:
    # The server may come to it after its name was taken back, and must not meet its
    # key twice.
    keys = {each.key for each in slot.registrations}
    interrupted(slot)
    script = run(slot, OK, OK, OK)
    assert script.asked[1].body["key"] not in keys
    assert script.asked[1].body["key"].lstrip("/") == slot.registrations[0].region.name


def test_an_interrupted_registration_is_taken_back_once_more(slot: Slot) -> None:
    base = names(slot)[0]
    interrupted(slot)
    run(slot, OK, OK, OK)
    assert run(slot, OK).lines == unregistering(base)
    assert run(slot).lines == []


def test_an_interrupted_registration_is_taken_back_twice_at_the_end(slot: Slot) -> None:
    base = names(slot)[0]
    interrupted(slot)
    script = Script(in_turn(OK, OK))
    script.run(control.unregister(REQUESTS, slot))
    assert script.lines == unregistering(base)
    assert slot.is_forgotten
    # Again, once the file is gone: what came in between can come no more.
    script.run(control.unregister_doubtful(REQUESTS, slot))
    assert script.lines == unregistering(base, base)
    script.run(control.unregister_doubtful(REQUESTS, slot))
    assert script.lines == unregistering(base, base)


def test_a_registration_interrupted_twice_is_taken_back_twice(slot: Slot) -> None:
    doubtful = [names(slot)[0]]
    interrupted(slot)
    # First breaks the taking back, then the registering.
    interrupted(slot)
    interrupted(slot, OK)
    doubtful.append(names(slot)[0])
    assert slot.obsolete == [doubtful[1]]
    taken_back = unregistering(doubtful[1], doubtful[0])
    assert run(slot, OK, OK, OK, OK).lines[:2] == taken_back
    assert names(slot)[0] not in doubtful


@pytest.mark.parametrize(
    "reply",
    [
        http(502, "<html>Bad Gateway</html>"),
        http(503, "upstream"),
        error(504, "upstream"),
        error(500, "no", Via="1.1 varnish"),
    ],
)
def test_a_registration_answered_by_somebody_else_is_in_doubt(
    slot: Slot, reply: bytes
) -> None:
    base = names(slot)[0]
    with pytest.raises(ServerError):
        run(slot, reply)
    assert slot.obsolete == [base]
    assert run(slot, OK, OK, OK).lines[0] == unregistering(base)[0]
    assert names(slot)[0] != base


def test_names_that_are_no_longer_used_are_taken_back_first(live: Slot) -> None:
    before = names(live)
    live.renew_registrations()
    script = run(live, OK, OK, OK, OK)
    assert script.lines == [*unregistering(*before), *registering(*names(live))]


def test_a_name_that_cannot_be_taken_back_is_kept_for_later(live: Slot) -> None:
    live.obsolete = ["old", "older"]
    script = Script(lambda _: IN_USE)
    with pytest.raises(ServerError, match="unregistering old failed"):
        script.run(forget(REQUESTS, live))
    assert sum(script.pauses) < 0.3
    assert live.obsolete == ["old", "older"]
    Script(in_turn(OK, OK)).run(forget(REQUESTS, live))
    assert live.obsolete == []


def test_a_name_whose_last_request_was_answered_just_now_is_asked_for_again(
    live: Slot,
) -> None:
    live.obsolete = ["old", "older"]
    script = Script(in_turn(IN_USE, IN_USE, OK, OK))
    script.run(forget(REQUESTS, live))
    assert script.lines == unregistering("old", "old", "old", "older")
    assert len(script.pauses) == 2


def test_unregistering_takes_back_all_that_may_be_known(live: Slot) -> None:
    live.obsolete = ["doubtful"]
    live.registrations[1].is_live = False
    script = Script(in_turn(OK, OK))
    script.run(control.unregister(REQUESTS, live))
    assert script.lines == unregistering("doubtful", names(live)[0])
    assert not any(each.is_live for each in live.registrations)


def test_nothing_is_ever_unregistered_for_everybody(live: Slot) -> None:
    live.obsolete = ["doubtful"]
    script = Script(in_turn(*[OK] * 3))
    script.run(control.unregister(REQUESTS, live))
    assert "POST /v2/systemsharedmemory/unregister" not in script.lines


# --- draining -------------------------------------------------------------------------


ASKED_VERSION = "GET /v2"


def drained(slot: Slot, version: str, *replies: bytes) -> tuple[Script, Drained]:
    about = http(200, json.dumps({"version": version}))
    script = Script(in_turn(about, *replies))
    return script, script.run(drain(REQUESTS, slot))


@pytest.mark.parametrize("version", ["2.49.0", "2.36.0", "1.9.9"])
def test_old_servers_are_not_asked_and_prove_nothing(live: Slot, version: str) -> None:
    before = names(live)
    script, outcome = drained(live, version)
    assert outcome is Drained.GIVE_UP
    assert script.lines == [ASKED_VERSION]
    assert names(live) == before


def test_counting_servers_are_asked_until_they_agree(live: Slot) -> None:
    base, extension = names(live)
    replies = [LISTED, IN_USE, IN_USE, OK, GONE, LISTED, IN_USE, OK, GONE]
    script, outcome = drained(live, "2.51.0", *replies)
    assert outcome is Drained.PROVED
    assert script.lines == [
        ASKED_VERSION,
        status_of(base),
        *unregistering(base) * 3,
        status_of(base),
        status_of(extension),
        *unregistering(extension) * 2,
        status_of(extension),
    ]
    assert len(script.pauses) == 3


@pytest.mark.parametrize("version", ["2.53.0", "2.73.1", "3.0.0", "unknown"])
def test_deferring_servers_are_watched_until_the_region_is_gone(
    live: Slot, version: str
) -> None:
    base, extension = names(live)
    replies = [LISTED, OK, LISTED, LISTED, GONE, LISTED, OK, GONE]
    script, outcome = drained(live, version, *replies)
    assert outcome is Drained.PROVED
    assert script.lines == [
        ASKED_VERSION,
        status_of(base),
        *unregistering(base),
        *[status_of(base)] * 3,
        status_of(extension),
        *unregistering(extension),
        status_of(extension),
    ]
    assert len(script.pauses) == 2


def test_a_server_that_never_knew_the_slot_proves_nothing(live: Slot) -> None:
    base, extension = names(live)
    script, outcome = drained(live, "2.51.0", GONE, GONE)
    assert outcome is Drained.MOVE
    assert script.lines == [ASKED_VERSION, status_of(base), status_of(extension)]
    assert set(names(live)).isdisjoint({base, extension})
    # Another server may know them: they are taken back when one is talked to again.
    assert live.obsolete == [base, extension]


def test_one_registration_that_the_server_does_not_know_is_enough(live: Slot) -> None:
    _, outcome = drained(live, "2.51.0", LISTED, OK, GONE, GONE)
    assert outcome is Drained.MOVE


@pytest.mark.parametrize(
    "reply",
    [
        http(404, "<html>default backend</html>"),
        http(404, json.dumps({"error": "not found"})),
        error(404, "Unable to find system shared memory region: 'r'", Via="1.1 proxy"),
        RESTRICTED,
    ],
)
def test_a_gateway_that_finds_nothing_proves_nothing(live: Slot, reply: bytes) -> None:
    before = names(live)
    with pytest.raises(ServerError):
        drained(live, "2.55.0", LISTED, OK, reply)
    assert names(live) == before


def test_a_refusal_to_unregister_ends_the_drain(live: Slot) -> None:
    with pytest.raises(AccessRestricted):
        drained(live, "2.51.0", LISTED, RESTRICTED)


def test_a_drained_slot_gets_new_names(live: Slot) -> None:
    before = names(live)
    drained(live, "2.51.0", *[LISTED, OK, GONE] * 2)
    assert set(names(live)).isdisjoint(before)
    assert list(live.unregistered()) == live.registrations
    assert live.obsolete == []


def test_draining_does_not_forget_names_that_it_did_not_drain(live: Slot) -> None:
    live.obsolete = ["doubtful"]
    drained(live, "2.51.0", *[LISTED, OK, GONE] * 2)
    assert live.obsolete == ["doubtful"]


def test_pauses_grow_to_a_limit(live: Slot) -> None:
    replies = [LISTED, *[IN_USE] * 12, OK, GONE, GONE]
    script, _ = drained(live, "2.51.0", *replies)
    assert script.pauses == sorted(script.pauses)
    assert 0 < script.pauses[0] < 0.01
    assert script.pauses[-2:] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.51.0", (2, 51)),
        ("2.9", (2, 9)),
        ("10.0.1-rc1", (10, 0)),
        ("", (9999, 0)),
        ("latest", (9999, 0)),
    ],
)
def test_versions_are_compared_as_numbers(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version
