"""The Django project, under gunicorn's threads, with a real Triton behind it."""

from __future__ import annotations

import os
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmlane.server import TritonServer
from tests.apps.load import Client, Picture, leave_early, load, npy
from tests.apps.web_service import Service, nothing_left, triton
from tests.sessions import stopped

SLOTS = 4
THREADS = 8
COMMAND = [
    *("-m", "gunicorn", "--bind", "127.0.0.1:{port}", "--no-control-socket"),
    *("--threads", f"{THREADS}", "examples.web.django_app:application"),
]
LIMITS = {
    "TRITON_SLOTS": f"{SLOTS}",
    "TRITON_LEASE_TIMEOUT": "0.3",
    "TRITON_INFER_TIMEOUT": "1.2",
}


@pytest.fixture(scope="module")
def survey_server() -> Iterator[TritonServer]:
    with triton() as server:
        yield server


@pytest.fixture(scope="module")
def django(
    survey_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("django") / "log"
    with Service(COMMAND, survey_server, log, **LIMITS) as service:
        yield service
    assert "ResourceWarning" not in service.log()


def rights(service: Service, *, first: int, count: int = 20) -> None:
    """The service answers as it should, from all of its slots."""
    replies = load(service.port, range(first, first + count), clients=SLOTS)
    assert [reply.status for reply in replies] == [200] * count
    slots = service.await_all_free()
    assert [each["slots"] for each in slots.values()] == [SLOTS]


def test_every_request_gets_the_answer_to_its_own_picture(django: Service) -> None:
    replies = load(django.port, range(200), clients=THREADS)
    assert [reply.status for reply in replies] == [200] * 200
    (slots,) = django.await_all_free().values()
    assert slots["slots"] == SLOTS
    # Once for each slot, however many requests there were.
    assert slots["registrations"] - slots["reregistrations"] == SLOTS


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG."""
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def png_of_zeros(side: int) -> bytes:
    """A large picture in a small file."""
    rows = zlib.compress(bytes((1 + 3 * side) * side), 1)
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = (chunk(b"IHDR", head), chunk(b"IDAT", rows), chunk(b"IEND", b""))
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
    "too many pixels": (png_of_zeros(6000), 400),
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_body_that_cannot_be_used_is_the_client_s_mistake(
    django: Service, what: str
) -> None:
    body, status = BAD_BODIES[what]
    with Client(django.port) as client:
        reply = client.ask("POST", "/survey", body)
    assert (reply.status, list(reply.content)) == (status, ["detail"])
    rights(django, first=300, count=1)


def test_a_body_that_is_too_long_is_not_even_read(django: Service) -> None:
    with Client(django.port) as client:
        assert client.announce(9 << 20).status == 413
    rights(django, first=310, count=1)


@pytest.mark.parametrize("sent", [0.0, 0.5, 1.0])
def test_a_client_that_leaves_in_the_middle_takes_no_slot_along(
    django: Service, sent: float
) -> None:
    for number in range(3 * SLOTS):
        leave_early(django.port, Picture(number), sent=sent)
    rights(django, first=400)


def test_a_triton_that_hangs_is_a_late_answer_and_then_a_full_house(
    django: Service, survey_server: TritonServer
) -> None:
    rights(django, first=500)
    with stopped(survey_server):
        replies = load_one_each(django, range(600, 600 + THREADS))
        # Whose clients have gone, the slots are still with Triton.
        leave_early(django.port, Picture(0), sent=1)
    assert sorted(replies) == [503] * (THREADS - SLOTS) + [504] * SLOTS
    rights(django, first=700)
    (slots,) = django.await_all_free().values()
    assert slots["late_replies"] >= SLOTS


def load_one_each(service: Service, numbers: range) -> list[int]:
    """The status of one request of each of so many clients, all at once."""
    replies = load(service.port, numbers, clients=len(numbers))
    for reply in replies:
        assert ("retry-after" in reply.headers) is (reply.status == 503)
    return [reply.status for reply in replies]


def test_a_triton_that_is_gone_is_said_to_be_and_found_when_it_is_back(
    django: Service, survey_server: TritonServer
) -> None:
    rights(django, first=800)
    survey_server.kill()
    try:
        with Client(django.port) as client:
            reply = client.survey(Picture(1))
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        # What is inside is told in the log alone.
        assert survey_server.http_url not in str(reply.content)
        assert survey_server.http_url in django.log()
    finally:
        survey_server.start()
    rights(django, first=900)


def test_it_starts_without_triton_and_ends_without_a_trace(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with Service(COMMAND, survey_server, tmp_path / "log", **LIMITS) as service:
        assert service.health()["slots"]["slots"] == 0
        assert service.regions() == {}
        rights(service, first=1000)
        regions = service.regions()
        assert len(regions) == 1
        os.kill(service.pid, signal.SIGTERM)
        assert service.terminate() == 0
        nothing_left(survey_server, regions)
        assert "Traceback" not in service.log()
