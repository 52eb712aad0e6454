"""The FastAPI service, under uvicorn on one event loop, with a real Triton behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.server import TritonServer
from tests.apps import web_scenarios
from tests.apps.web_scenarios import BAD_BODIES, LIMITS, PARTS
from tests.apps.web_service import Service, nothing_left, triton

COMMAND = [
    *("-m", "uvicorn", "--host", "127.0.0.1", "--port", "{port}"),
    *("--log-level", "warning", "examples.web.fastapi_app:app"),
]


@pytest.fixture(scope="module")
def survey_server() -> Iterator[TritonServer]:
    with triton() as server:
        yield server


@pytest.fixture(scope="module")
def fastapi(
    survey_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("fastapi") / "log"
    with Service(COMMAND, survey_server, log, **LIMITS) as service:
        yield service
    for trouble in ("was dropped without", "Traceback", "never retrieved"):
        assert trouble not in service.log()


def test_every_request_gets_the_answer_to_its_own_picture(fastapi: Service) -> None:
    web_scenarios.every_request_gets_its_own_answer(fastapi)


@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_body_that_cannot_be_used_is_the_client_s_mistake(
    fastapi: Service, what: str
) -> None:
    web_scenarios.a_bad_body_is_the_client_s_mistake(fastapi, what)


def test_a_body_that_is_too_long_is_not_even_read(fastapi: Service) -> None:
    web_scenarios.a_body_too_long_is_not_read(fastapi)


@pytest.mark.parametrize("sent", PARTS)
def test_a_client_that_leaves_in_the_middle_takes_no_slot_along(
    fastapi: Service, sent: float
) -> None:
    web_scenarios.a_client_that_leaves_takes_no_slot_along(fastapi, sent)


def test_clients_that_leave_while_triton_works_take_no_slot_along(
    fastapi: Service, survey_server: TritonServer
) -> None:
    web_scenarios.clients_that_leave_while_triton_works_take_no_slot_along(
        fastapi, survey_server
    )


def test_a_triton_that_hangs_is_a_late_answer_and_then_a_full_house(
    fastapi: Service, survey_server: TritonServer
) -> None:
    web_scenarios.a_triton_that_hangs_is_a_late_answer_and_a_full_house(
        fastapi, survey_server
    )


def test_a_triton_that_is_gone_is_said_to_be_and_found_when_it_is_back(
    fastapi: Service, survey_server: TritonServer
) -> None:
    web_scenarios.a_triton_that_is_gone_is_said_to_be_and_found_again(
        fastapi, survey_server
    )


def test_its_session_lives_as_long_as_the_application(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with Service(COMMAND, survey_server, tmp_path / "log", **LIMITS) as service:
        regions = service.regions()
        assert list(regions.values()) == [service.pid]
        web_scenarios.answers_from_all_slots(service)
        # All is closed by then: uvicorn ends with the signal that it was sent.
        assert service.terminate() == -signal.SIGTERM
    nothing_left(survey_server, regions)
    assert "Traceback" not in service.log()


@pytest.mark.heavy
def test_it_ends_in_time_though_triton_hangs_and_the_next_one_cleans_up(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    # What is in flight is cancelled before its own limit has passed.
    command = [*COMMAND, "--timeout-graceful-shutdown", "1"]
    limits = LIMITS | {"TRITON_INFER_TIMEOUT": "2"}
    with Service(command, survey_server, tmp_path / "log", **limits) as service:
        regions = service.regions()
        with web_scenarios.all_slots_in_flight(service, survey_server):
            assert service.terminate() == -signal.SIGTERM
    assert "CancelledError" in service.log()
    with Service(COMMAND, survey_server, tmp_path / "next", **LIMITS) as service:
        nothing_left(survey_server, regions)
        web_scenarios.answers_from_all_slots(service)
