"""gunicorn's preforked workers, each with a session of its own, under load.

Workers are stopped, killed, recycled and reloaded while clients ask; no client ever
gets another's answer, and nothing of a worker outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmlane.server import TritonServer
from tests.apps.load import Client, Picture, Traffic, load
from tests.apps.web_service import Service, nothing_left, triton
from tests.polling import eventually
from tests.sessions import registered, stopped

pytestmark = pytest.mark.heavy

WORKERS = 2
SLOTS = 4


@pytest.fixture(scope="module")
def survey_server() -> Iterator[TritonServer]:
    with triton() as server:
        yield server


@contextlib.contextmanager
def gunicorn(
    server: TritonServer,
    folder: Path,
    *options: str,
    config: str = "gunicorn_conf",
    workers: int = WORKERS,
    infer_timeout: float = 3,
) -> Iterator[Service]:
    """gunicorn as its configuration has it; afterwards nothing of it is left."""
    command = [
        *("-m", "gunicorn", "-c", f"python:examples.web.{config}"),
        *("--bind", "127.0.0.1:{port}", "--no-control-socket", *options),
        "examples.web.django_app:application",
    ]
    limits = {
        "WORKERS": f"{workers}",
        "TRITON_SLOTS": f"{SLOTS}",
        "TRITON_INFER_TIMEOUT": f"{infer_timeout}",
    }
    with Service(command, server, folder / "log", **limits) as service:
        service.await_all_free(workers=workers)
        yield service
        if service.is_alive:
            service.await_all_free(workers=workers)
            assert service.terminate() == 0
    nothing_left(server)
    for trouble in ("Traceback", "was dropped without"):
        assert trouble not in service.log(), service.log()


def test_each_worker_has_its_session_and_all_answer_what_they_were_asked(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with gunicorn(survey_server, tmp_path) as service:
        replies = load(service.port, range(600), clients=16)
        assert [reply.status for reply in replies] == [200] * 600
        workers = {int(reply.headers["x-worker"]) for reply in replies}
        assert len(workers) == WORKERS
        assert set(service.regions().values()) == workers
        for slots in service.await_all_free(workers=WORKERS).values():
            assert slots["registrations"] == slots["connections"] == SLOTS


def test_a_killed_worker_leaves_nothing_to_the_one_that_takes_its_place(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with gunicorn(survey_server, tmp_path) as service:
        with Traffic(service.port) as traffic:
            traffic.await_answers(100)
            region, worker = next(iter(service.regions().items()))
            os.kill(worker, signal.SIGKILL)
            traffic.await_answers(100)
            nothing_left(survey_server, {region})
            eventually(
                lambda: len(service.regions()) == WORKERS, "there is a new worker"
            )
        # Whoever was asking the dead worker knows it; nobody else noticed.
        assert traffic.replies.keys() <= {0, 200}
        assert worker not in service.await_all_free(workers=WORKERS)


def test_a_worker_killed_while_triton_works_for_it_harms_nobody(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with gunicorn(survey_server, tmp_path) as service:
        region, worker = next(iter(service.regions().items()))
        with Traffic(service.port) as traffic:
            traffic.await_answers(50)
            with stopped(survey_server):
                end(worker)
            traffic.await_answers(200)
        assert traffic.replies.keys() <= {0, 200, 503, 504}
        nothing_left(survey_server, {region})


def end(worker: int) -> None:
    """Kill a worker and wait until gunicorn knows of it."""
    os.kill(worker, signal.SIGKILL)

    def is_gone() -> bool:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return True
        return False

    eventually(is_gone, f"worker {worker} is gone")


def test_workers_that_are_recycled_all_the_time_answer_right(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    options = ("--max-requests", "60", "--max-requests-jitter", "20")
    with gunicorn(survey_server, tmp_path, *options) as service:
        first = set(service.regions())
        with Traffic(service.port, clients=4) as traffic:
            traffic.await_answers(400)
        assert traffic.replies.keys() <= {0, 200}
        nothing_left(survey_server, first)


def test_a_reload_under_load_changes_all_workers(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with gunicorn(survey_server, tmp_path) as service:
        first = service.regions()
        with Traffic(service.port, clients=4) as traffic:
            traffic.await_answers(50)
            os.kill(service.pid, signal.SIGHUP)
            nothing_left(survey_server, first)
            traffic.await_answers(50)
        assert traffic.replies.keys() <= {0, 200}
        assert not set(first.values()) & set(service.regions().values())


def test_requests_in_flight_at_sigterm_are_answered(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    # One worker, because each tells of its own slots alone.
    one = gunicorn(survey_server, tmp_path, workers=1, infer_timeout=30)
    with one as service, ThreadPoolExecutor(1) as clients:
        with stopped(survey_server):
            replies = clients.submit(load, service.port, range(SLOTS), clients=SLOTS)
            eventually(
                lambda: service.health()["slots"]["in_flight"] == SLOTS,
                "all are in flight",
            )
            os.kill(service.pid, signal.SIGTERM)
            eventually(lambda: "signal: term" in service.log(), "it is ending")
        assert [reply.status for reply in replies.result()] == [200] * SLOTS
        assert service.terminate() == 0


def test_a_triton_that_restarts_under_load_is_found_again(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with gunicorn(survey_server, tmp_path) as service:
        with Traffic(service.port) as traffic:
            traffic.await_answers(100)
            survey_server.kill()
            eventually(lambda: traffic.replies.get(503), "clients are told of it")
            survey_server.start()
            traffic.await_answers(200)
        assert traffic.replies.keys() <= {200, 503, 504}


def test_a_session_opened_before_the_fork_says_what_is_wrong(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    config = tmp_path / "too_early.py"
    config.write_text(
        "from examples.web.gunicorn_conf import *\n"
        "from examples.web import worker_session\n"
        "def when_ready(server):\n"
        "    worker_session.session.open()\n"
    )
    command = [
        *("-m", "gunicorn", "-c", str(config), "--bind", "127.0.0.1:{port}"),
        *("--no-control-socket", "examples.web.django_app:application"),
    ]
    with Service(command, survey_server, tmp_path / "log") as service:
        regions = service.regions()
        with Client(service.port) as client:
            assert client.survey(Picture(1)).status == 500
        assert "Open a session of its own in each process" in service.log()
        assert set(regions.values()) == {service.pid}
        assert service.terminate() == 0
    nothing_left(survey_server, regions)


# --- one region for all ---------------------------------------------------------------

SHARED = "gunicorn_shared"


def test_workers_that_share_a_region_make_and_register_nothing(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with gunicorn(survey_server, tmp_path, config=SHARED) as service:
        regions = service.regions()
        known = registered(survey_server)
        # Its own, with one slot, and the one that it shares.
        assert list(regions.values()) == [service.pid] * 2
        assert len(known) == 1 + (WORKERS + 1) * SLOTS
        replies = load(service.port, range(600), clients=16)
        assert [reply.status for reply in replies] == [200] * 600
        workers = {int(reply.headers["x-worker"]) for reply in replies}
        assert len(workers) == WORKERS
        assert service.regions() == regions
        assert registered(survey_server) == known


def test_slots_of_a_killed_worker_serve_the_one_that_takes_its_place(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with gunicorn(survey_server, tmp_path, config=SHARED) as service:
        regions = service.regions()
        for _ in range(3):
            killed = next(iter(service.await_all_free(workers=WORKERS)))
            with Traffic(service.port) as traffic:
                traffic.await_answers(50)
                with stopped(survey_server):
                    # Its requests are with Triton, which writes into its slots later.
                    end(killed)
                traffic.await_answers(150)
            assert traffic.replies.keys() <= {0, 200, 503, 504}
            assert killed not in service.await_all_free(workers=WORKERS)
        # There were slots to spare: no worker had to make its own.
        assert service.regions() == regions
        assert "no shared slots" not in service.log()


def test_workers_beyond_the_shared_slots_make_their_own(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    more = ("--workers", f"{WORKERS + 2}")
    with gunicorn(survey_server, tmp_path, *more, config=SHARED) as service:
        eventually(lambda: "no shared slots" in service.log(), "one gets none")

        def has_made_its_own() -> bool:
            # New connections each time, of which it gets some.
            replies = load(service.port, range(16), clients=8)
            assert [reply.status for reply in replies] == [200] * 16
            return len(service.regions()) == 3

        eventually(has_made_its_own, "it has made its own", timeout=20)


def test_a_triton_that_restarts_is_told_of_shared_slots_again(
    survey_server: TritonServer, tmp_path: Path
) -> None:
    with gunicorn(survey_server, tmp_path, config=SHARED) as service:
        with Traffic(service.port) as traffic:
            traffic.await_answers(100)
            survey_server.kill()
            eventually(lambda: traffic.replies.get(503), "clients are told of it")
            survey_server.start()
            traffic.await_answers(200)
        assert traffic.replies.keys() <= {200, 503, 504}
