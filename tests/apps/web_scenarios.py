"""What every web service of the examples must live through, whatever it is made of.

Owns the scenarios; each is given a service that answers, with `SLOTS` slots and the
limits in `LIMITS`, and leaves it answering. Refuses to start services.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator

import numpy as np

from shmlane.server import TritonServer
from tests.apps.load import Client, Picture, asking, load, npy
from tests.apps.web_service import Service
from tests.polling import eventually
from tests.sessions import stopped

SLOTS = 4
CLIENTS = 2 * SLOTS
# On a busy machine, too, all clients are answered in turn within these limits, and each
# slot has a request on its way at once.
LIMITS = {
    "TRITON_SLOTS": f"{SLOTS}",
    "TRITON_LEASE_TIMEOUT": "2",
    "TRITON_INFER_TIMEOUT": "3",
}


def answers_from_all_slots(service: Service, *, count: int = 20) -> dict[str, int]:
    """Right answers, and then no slot in use; what the session has counted."""
    replies = load(service.port, range(20_000, 20_000 + count), clients=SLOTS)
    assert [reply.status for reply in replies] == [200] * count
    (slots,) = service.await_all_free().values()
    # Spare ones, where a request that ended had views for a moment as others waited.
    assert slots["slots"] - slots["spare_slots"] == SLOTS
    return slots


def every_request_gets_its_own_answer(service: Service) -> None:
    replies = load(service.port, range(200), clients=CLIENTS)
    assert [reply.status for reply in replies] == [200] * 200
    slots = answers_from_all_slots(service)
    # Once for each slot, however many requests there were.
    assert slots["registrations"] - slots["reregistrations"] == SLOTS


def _chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG."""
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def _png_of_zeros(side: int) -> bytes:
    """A large picture in a small file."""
    rows = zlib.compress(bytes((1 + 3 * side) * side), 1)
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = (_chunk(b"IHDR", head), _chunk(b"IDAT", rows), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


BAD_BODIES = {
    "nothing": (b"", 400),
    "text": (b"hello", 400),
    "a PNG cut off": (Picture(0).body[:60], 400),
    "an array cut off": (npy(np.zeros((8, 8, 3), np.uint8))[:-1], 400),
    "objects": (npy(np.array([{}])), 400),
    "too few dimensions": (npy(np.zeros((8, 8), np.uint8)), 400),
    "a colour too many": (npy(np.zeros((8, 8, 4), np.uint8)), 422),
    "another datatype": (npy(np.zeros((8, 8, 3), np.int64)), 422),
    "no pixels": (npy(np.zeros((0, 8, 3), np.uint8)), 422),
    "too many pixels": (_png_of_zeros(6000), 400),
}


def a_bad_body_is_the_client_s_mistake(service: Service, what: str) -> None:
    body, status = BAD_BODIES[what]
    with Client(service.port) as client:
        reply = client.ask("POST", "/survey", body)
    assert (reply.status, list(reply.content)) == (status, ["detail"])
    answers_from_all_slots(service, count=1)


def a_body_too_long_is_not_read(service: Service) -> None:
    with Client(service.port) as client:
        assert client.announce(9 << 20).status == 413
    answers_from_all_slots(service, count=1)


# How much of a request is sent before the client leaves.
PARTS = (0.0, 0.5, 1.0)


def a_client_that_leaves_takes_no_slot_along(service: Service, sent: float) -> None:
    for number in range(3 * SLOTS):
        with asking(service.port, Picture(number), sent=sent):
            pass
    answers_from_all_slots(service)


@contextlib.contextmanager
def all_slots_in_flight(service: Service, server: TritonServer) -> Iterator[None]:
    """Triton hangs, and has a request from each slot; then all their clients leave."""
    with stopped(server):
        with contextlib.ExitStack() as clients:
            for number in range(SLOTS):
                clients.enter_context(asking(service.port, Picture(number)))
            eventually(
                lambda: service.health()["slots"]["in_flight"] == SLOTS,
                "all slots are in flight",
            )
        yield


def clients_that_leave_while_triton_works_take_no_slot_along(
    service: Service, server: TritonServer
) -> None:
    answers_from_all_slots(service)
    with all_slots_in_flight(service, server):
        slots = service.health()["slots"]
        # Nobody else gets what Triton still writes into.
        assert slots["in_flight"] + slots["late"] == SLOTS
    answers_from_all_slots(service)


def a_triton_that_hangs_is_a_late_answer_and_a_full_house(
    service: Service, server: TritonServer
) -> None:
    before = answers_from_all_slots(service)
    with stopped(server):
        replies = load(service.port, range(CLIENTS), clients=CLIENTS)
    statuses = sorted(reply.status for reply in replies)
    assert statuses == [503] * (CLIENTS - SLOTS) + [504] * SLOTS
    for reply in replies:
        assert ("retry-after" in reply.headers) is (reply.status == 503)
    after = answers_from_all_slots(service)
    assert after["late_replies"] - before["late_replies"] == SLOTS


def a_triton_that_is_gone_is_said_to_be_and_found_again(
    service: Service, server: TritonServer
) -> None:
    answers_from_all_slots(service)
    server.kill()
    try:
        with Client(service.port) as client:
            reply = client.survey(Picture(1))
    finally:
        server.start()
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    # What is inside is told in the log alone.
    assert server.http_url not in str(reply.content)
    assert server.http_url in service.log()
    answers_from_all_slots(service)
