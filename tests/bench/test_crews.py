"""The case `gil`: who takes turns, what they are compared with, and how it is told."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shmlane.bench import (
    CrewReport,
    Plan,
    Sample,
    Servers,
    find_case,
    make_plan,
    measure_crews,
)
from shmlane.bench.crews import ALONE, FILLINGS, Beside, Crew
from shmlane.bench.server_stats import Count
from shmlane.bench.worker import make_sample
from shmlane.server import TritonServer

THREADS, PROCESSES = Crew("threads", 2), Crew("processes", 2)


def small_plan(*workers: int) -> Plan:
    plan = make_plan(
        payloads=["resnet50"],
        concurrency=workers,
        rounds=2,
        seed=3,
        defaults=find_case("gil").defaults,
    )
    return dataclasses.replace(plan, traffic_s=0.03)


@pytest.fixture(scope="module")
def report(server: TritonServer) -> CrewReport:
    plan = small_plan(2)
    return measure_crews(plan.payloads[0], plan, Servers(http=server.http_url))


def test_threads_and_processes_are_measured_beside_one_thread(
    report: CrewReport,
) -> None:
    assert report.verified
    assert report.notes == ()
    assert [(row.filling, row.crew) for row in report.results] == [
        (filling.name, crew)
        for filling in FILLINGS
        for crew in (ALONE, THREADS, PROCESSES)
    ]
    for row in report.results:
        assert row.requests_per_s > 0
        assert row.client_cpu_us > 0
        if row.crew == ALONE:
            assert (row.to_one.rate.least, row.to_one.rate.most) == (1, 1)


def test_the_text_says_what_it_means_before_any_number(report: CrewReport) -> None:
    text = report.render()
    assert max(map(len, text.splitlines())) <= 80
    before, _, after = text.partition("\n\n")
    assert "Replies are right" in before
    assert f"on the same {report.cores} cores" in before
    assert "2 processes over 2 threads: " in before
    assert after.count("\n  1 thread") == after.count("2 processes") == len(FILLINGS)
    told = dataclasses.replace(report, has_gil=False, notes=("Half of it.",)).render()
    assert "without the GIL" in told
    assert told.endswith("- Half of it.\n")


def test_the_json_has_every_number(report: CrewReport) -> None:
    told = json.loads(json.dumps(report.to_json()))
    assert set(told) == {field.name for field in dataclasses.fields(CrewReport)}
    assert told["results"][0]["crew"] == {"kind": "threads", "workers": 1}


def test_a_wrong_reply_is_told_and_not_held(report: CrewReport) -> None:
    wrong = dataclasses.replace(report, verified=False)
    assert report.is_held
    assert not wrong.is_held
    assert "WRONG" in wrong.render()


def test_one_crew_is_put_over_another_round_by_round() -> None:
    def sample(rate: float, cpu: float) -> Sample:
        return Sample(requests_per_s=rate, client_cpu_us=cpu)

    measured = [
        {ALONE: sample(100, 10), THREADS: sample(150, 20)},
        {ALONE: sample(200, 10), THREADS: sample(200, 30)},
        {ALONE: sample(100, 10), THREADS: sample(200, 10)},
    ]
    found = Beside.of(THREADS, ALONE, measured)
    assert (found.rate.least, found.rate.ratio, found.rate.most) == (1, 1.5, 2)
    assert (found.cpu.least, found.cpu.ratio, found.cpu.most) == (1, 2, 3)


def test_several_workers_are_counted_as_one_client_over_one_window() -> None:
    first = reply(began_ms=0, ended_ms=80, requests=30, wrong=0, cpu_us=900)
    later = reply(began_ms=20, ended_ms=100, requests=10, wrong=1, cpu_us=300)
    together = make_sample([first, later], Count(40, 0, 40_000))
    assert together.requests_per_s == pytest.approx(40 / 0.1)
    assert together.client_cpu_us == pytest.approx(1200 / 40)
    assert together.verified is False
    assert together.p50_us is None
    assert make_sample([first], Count(30, 0, 30_000)).p50_us == 5.0


def reply(
    *, began_ms: int, ended_ms: int, requests: int, wrong: int, cpu_us: int
) -> dict[str, float]:
    return {
        "began_ns": began_ms * 1_000_000,
        "ended_ns": ended_ms * 1_000_000,
        "requests": requests,
        "wrong": wrong,
        "cpu_ns": cpu_us * 1000,
        "p50_us": 5.0,
    }
