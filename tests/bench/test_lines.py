"""The lines: where one is drawn, what it is drawn over, and when it is held."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shmlane.bench import (
    LINES,
    Line,
    Report,
    Sample,
    Verdict,
    make_plan,
    render_table,
)
from shmlane.bench.lines import judge
from shmlane.bench.results import make_ratios, make_results

MEASURED = ("shmlane-stream", "shmlane-async", "cpp-http", "cpp-grpc")
ALL = {name: [1000.0] for name in MEASURED}


def report_of(
    rates: dict[str, list[float]],
    *,
    concurrency: int = 16,
    payload: str = "yolov8",
    fill: bool = False,
) -> Report:
    """Of clients whose CPU per request is 1000 µs over their requests per ms."""
    plan = make_plan(
        contenders=rates,
        payloads=[payload],
        concurrency=[concurrency],
        fill=fill,
        rounds=1,
    )
    (cell,) = plan.cells()
    rounds = {
        name: [
            Sample(p50_us=1, requests_per_s=rate, client_cpu_us=1e6 / rate)
            for rate in each
        ]
        for name, each in rates.items()
    }
    results = make_results(cell, plan.contenders, rounds)
    ratios = make_ratios(cell, plan.contenders, rounds)
    return Report(
        plan=plan,
        machine={"shmlane": "0", "cores": 2, "cpu": None, "python": "3"},
        server={"version": "2"},
        results=tuple(results),
        ratios=tuple(ratios),
        lines=tuple(judge(cell, plan.contenders, results, ratios)),
    )


def verdict_on(report: Report, contender: str, metric: str) -> Verdict:
    (found,) = (
        each
        for each in report.lines
        if (each.line.contender, each.line.metric) == (contender, metric)
    )
    return found


def test_requests_are_put_over_the_better_of_both_cpp_clients() -> None:
    cpp = {"cpp-http": [100.0, 900.0, 110.0], "cpp-grpc": [200.0, 200.0, 200.0]}
    report = report_of(ALL | {"shmlane-stream": [300.0, 200.0, 250.0]} | cpp)
    verdict = verdict_on(report, "shmlane-stream", "requests_per_s")
    assert verdict.baseline == "cpp-grpc"
    assert verdict.ratio is not None
    assert (verdict.ratio.min, verdict.ratio.median, verdict.ratio.max) == (
        1,
        1.25,
        1.5,
    )
    assert verdict.is_held


def test_client_cpu_is_put_over_the_http_one_even_if_the_other_is_better() -> None:
    rates = {"cpp-http": [400.0], "cpp-grpc": [800.0], "shmlane-stream": [1000.0]}
    verdict = verdict_on(report_of(ALL | rates), "shmlane-stream", "client_cpu")
    assert verdict.baseline == "cpp-http"
    assert verdict.ratio is not None
    assert verdict.ratio.median == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("contender", "metric", "concurrency", "bound"),
    [
        ("shmlane-stream", "requests_per_s", 16, 1.25),
        ("shmlane-stream", "requests_per_s", 64, 1.05),
        ("shmlane-stream", "client_cpu", 16, 0.40),
        ("shmlane-async", "requests_per_s", 16, 1.05),
    ],
)
def test_a_line_is_held_on_its_bound_and_not_beyond(
    contender: str, metric: str, concurrency: int, bound: float
) -> None:
    rate = 1000 * bound if metric == "requests_per_s" else 1000 / bound
    for change, held in ((1, True), (0.99, False)):
        rates = ALL | {contender: [rate * change]}
        report = report_of(rates, concurrency=concurrency)
        assert verdict_on(report, contender, metric).is_held is held


@pytest.mark.parametrize(
    "rates",
    [
        {"shmlane-stream": [9.0], "cpp-grpc": [1.0]},
        {"shmlane-http": [9.0], "cpp-http": [1.0], "cpp-grpc": [1.0]},
    ],
)
def test_no_line_is_drawn_without_all_that_it_is_about(
    rates: dict[str, list[float]],
) -> None:
    assert report_of(rates).lines == ()


def test_nothing_is_promised_of_other_cells() -> None:
    assert report_of(ALL, payload="tiny").lines == ()
    assert report_of(ALL, concurrency=4).lines == ()
    assert report_of(ALL, fill=True).lines == ()
    assert len(report_of(ALL).lines) + len(report_of(ALL, concurrency=64).lines) == 4
    assert len(LINES) == 4


def test_a_line_over_what_was_not_measured_is_not_held() -> None:
    report = report_of(ALL | {"cpp-http": []})
    assert verdict_on(report, "shmlane-stream", "requests_per_s").baseline == "cpp-grpc"
    verdict = verdict_on(report, "shmlane-stream", "client_cpu")
    assert verdict.ratio is None
    assert not verdict.is_held
    assert not report.is_held


def test_a_report_is_held_if_all_lines_are_and_all_was_measured() -> None:
    rates = ALL | {"shmlane-stream": [9000.0], "shmlane-async": [9000.0]}
    assert report_of(rates).is_held
    assert not report_of(ALL).is_held
    missing = dataclasses.replace(report_of(rates), results=())
    assert not missing.is_held


def test_the_table_shows_each_line_with_its_bound_and_verdict() -> None:
    rates = ALL | {"shmlane-stream": [2000.0], "cpp-http": [10_000.0]}
    text = render_table(report_of(rates))
    assert max(map(len, text.splitlines())) <= 80
    shown = [" ".join(line.split()) for line in text.splitlines()]
    assert (
        "shmlane-stream client CPU over cpp-http 5.00 (5.00-5.00) <= 0.40 NOT held"
    ) in shown
    better = ALL | {"shmlane-stream": [2000.0]}
    assert " >= 1.25 held" in " ".join(render_table(report_of(better)).split())


def test_the_json_has_the_line_the_ratio_and_the_verdict() -> None:
    told = json.loads(json.dumps(report_of(ALL).to_json()))["lines"]
    names = {field.name for field in dataclasses.fields(Line)}
    extra = {"baseline", "ratio", "ratio_min", "ratio_max", "is_held"}
    assert [set(row) for row in told] == [names | extra] * 3
    assert told[0]["ratio"] == 1.0
    assert told[0]["is_held"] is False
