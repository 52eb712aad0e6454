"""The Django project, under gunicorn's threads, with a real Triton behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.server import TritonServer
from tests.apps import web_scenarios
from tests.apps.web_scenarios import BAD_BODIES, CLIENTS, LIMITS, PARTS
from tests.apps.web_service import Service, nothing_left, triton

# A thread for each client, so that requests meet where the slots are.
COMMAND = [
    *("-m", "gunicorn", "--bind", "127.0.0.1:{port}", "--no-control-socket"),
    *("--threads", f"{CLIENTS}", "examples.web.django_app:application"),
]


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
    assert "was dropped without" not in service.log()


def test_every_request_gets_the_answer_to_its_own_picture(django: Service) -> None:
    web_scenarios.every_request_gets_its_own_answer(django)


@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_body_that_cannot_be_used_is_the_client_s_mistake(
    django: Service, what: str
) -> None:
    web_scenarios.a_bad_body_is_the_client_s_mistake(django, what)


def test_a_body_that_is_too_long_is_not_even_read(django: Service) -> None:
    web_scenarios.a_body_too_long_is_not_read(django)


@pytest.mark.parametrize("sent", PARTS)
def test_a_client_that_leaves_in_the_middle_takes_no_slot_along(
    django: Service, sent: float
) -> None:
    web_scenarios.a_client_that_leaves_takes_no_slot_along(django, sent)


def test_clients_that_leave_while_triton_works_take_no_slot_along(
    django: Service, survey_server: TritonServer
) -> None:
    web_scenarios.clients_that_leave_while_triton_works_take_no_slot_along(
        django, survey_server
    )


def test_a_triton_that_hangs_is_a_late_answer_and_then_a_full_house(
    django: Service, survey_server: TritonServer
) -> None:
    web_scenarios.a_triton_that_hangs_is_a_late_answer_and_a_full_house(
        django, survey_server
    )


def test_a_triton_that_is_gone_is_said_to_be_and_found_when_it_is_back(
    django: Service, survey_server: TritonServer
) -> None:
    web_scenarios.a_triton_that_is_gone_is_said_to_be_and_found_again(
        django, survey_server
    )


def test_it_opens_no_session_before_it_is_asked_and_leaves_nothing_of_it(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with Service(COMMAND, survey_server, tmp_path / "log", **LIMITS) as service:
        assert service.health()["slots"]["slots"] == 0
        assert service.regions() == {}
        web_scenarios.answers_from_all_slots(service)
        regions = service.regions()
        assert len(regions) == 1
        assert service.terminate() == 0
    nothing_left(survey_server, regions)
    assert "Traceback" not in service.log()
