"""The numbers: medians, per-round ratios, gaps, and the shape of the JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from shmlane.bench import Cell, Report, Sample, make_plan, render_table
from shmlane.bench.results import make_ratios, make_results
from shmlane.errors import UsageError

RESULT_KEYS = {
    "contender",
    "memory",
    "payload",
    "concurrency",
    "fill",
    "p50_us",
    "p90_us",
    "p99_us",
    "requests_per_s",
    "client_cpu_us",
    "server_us",
    "verified",
}
RATIO_KEYS = {"contender", "baseline", "payload", "concurrency", "fill", "rounds"} | {
    metric + suffix
    for metric in ("p50", "p99", "requests_per_s", "client_cpu")
    for suffix in ("", "_min", "_max")
}
CONTENDERS = ("shmlane-http", "shmlane-unix", "cpp-http", "tritonclient-grpc-wire")


def sample(p50: float | None, **facts: Any) -> Sample:
    return Sample(p50_us=p50, verified=True, **facts)


def report_of(**rounds: list[Sample]) -> Report:
    plan = make_plan(
        contenders=CONTENDERS, payloads=["tiny"], concurrency=[1], rounds=3, seed=1
    )
    by_name = {name.replace("_", "-"): samples for name, samples in rounds.items()}
    cell = plan.cells()[0]
    return Report(
        plan=plan,
        machine={"shmlane": "0", "cores": 2, "cpu": None, "python": "3"},
        server={"version": "2"},
        results=tuple(make_results(cell, plan.contenders, by_name)),
        ratios=tuple(make_ratios(cell, plan.contenders, by_name)),
        caveats=("Mind the gap.",),
        notes=("cpp-http fell over.",),
    )


@pytest.fixture
def report() -> Report:
    return report_of(
        shmlane_http=[sample(10), sample(40), sample(30)],
        shmlane_unix=[sample(9), sample(9), sample(9)],
        cpp_http=[sample(20), sample(40), sample(120)],
        tritonclient_grpc_wire=[sample(100), sample(None), sample(None)],
    )


def test_a_ratio_is_the_median_of_the_rounds_ratios(report: Report) -> None:
    found = report.ratio("shmlane-http", "cpp-http", payload="tiny", concurrency=1)
    assert found.p50 is not None
    # The medians, 30 and 40, would have given 0.75.
    assert (found.p50.median, found.p50.min, found.p50.max) == (0.5, 0.25, 1.0)
    assert found.rounds == 3


def test_shared_memory_is_not_compared_with_our_own_wire() -> None:
    plan = make_plan(
        contenders=["shmlane-unix", "shmlane-wire", "tritonclient-http-wire"],
        payloads=["tiny"],
        concurrency=[1],
    )
    found = make_ratios(plan.cells()[0], plan.contenders, {})
    assert [(each.contender, each.baseline) for each in found] == [
        ("shmlane-unix", "tritonclient-http-wire"),
        ("shmlane-wire", "tritonclient-http-wire"),
    ]


def test_a_round_in_which_one_side_is_missing_does_not_count(report: Report) -> None:
    found = report.ratio(
        "shmlane-http", "tritonclient-grpc-wire", payload="tiny", concurrency=1
    )
    assert found.p50 is not None
    assert (found.p50.median, found.rounds) == (0.1, 1)


def test_what_was_never_measured_is_null_and_not_zero(report: Report) -> None:
    found = report.ratio("shmlane-http", "cpp-http", payload="tiny", concurrency=1)
    assert found.client_cpu is None
    flat = found.to_json()
    assert (
        flat["client_cpu"] is flat["client_cpu_min"] is flat["client_cpu_max"] is None
    )


def test_a_contender_that_failed_early_keeps_its_rounds_aligned() -> None:
    report = report_of(
        shmlane_http=[sample(10), sample(20), sample(30)], cpp_http=[sample(40)]
    )
    found = report.ratio("shmlane-http", "cpp-http", payload="tiny", concurrency=1)
    assert found.p50 is not None
    assert (found.p50.median, found.rounds) == (0.25, 1)


def test_shmlane_is_compared_with_all_others_and_unix_with_tcp(report: Report) -> None:
    pairs = [(ratio.contender, ratio.baseline) for ratio in report.ratios]
    assert sorted(pairs) == [
        ("shmlane-http", "cpp-http"),
        ("shmlane-http", "tritonclient-grpc-wire"),
        ("shmlane-unix", "cpp-http"),
        ("shmlane-unix", "shmlane-http"),
        ("shmlane-unix", "tritonclient-grpc-wire"),
    ]


def test_a_result_is_the_median_over_the_rounds(report: Report) -> None:
    found = report.result("shmlane-http", payload="tiny", concurrency=1)
    assert (found.p50_us, found.p99_us) == (30, None)
    assert found.memory == "system"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([True, True], True),
        ([True, False], False),
        ([None, True], True),
        ([None, None], None),
        ([], None),
    ],
)
def test_one_wrong_reply_in_any_round_is_not_verified(
    verdicts: list[bool | None], expected: bool | None
) -> None:
    rounds = [Sample(p50_us=1, verified=verdict) for verdict in verdicts]
    found = report_of(shmlane_http=rounds).result(
        "shmlane-http", payload="tiny", concurrency=1
    )
    assert found.verified is expected


def test_a_report_is_complete_only_if_all_was_measured_and_right() -> None:
    whole = {name.replace("-", "_"): [sample(1)] for name in CONTENDERS}
    assert report_of(**whole).is_complete
    assert not report_of(**{**whole, "cpp_http": []}).is_complete
    wrong = [Sample(p50_us=1, verified=False)]
    assert not report_of(**{**whole, "cpp_http": wrong}).is_complete


def test_asking_for_what_was_not_measured_is_a_usage_error(report: Report) -> None:
    with pytest.raises(UsageError, match="contender='cpp-http'"):
        report.ratio("cpp-http", "shmlane-http", payload="tiny", concurrency=1)
    with pytest.raises(UsageError, match="concurrency=2"):
        report.result("cpp-http", payload="tiny", concurrency=2)


def test_the_json_has_exactly_the_documented_keys(report: Report) -> None:
    document = json.loads(json.dumps(report.to_json()))
    assert set(document) == {"machine", "server", "results", "ratios", "lines"}
    assert all(set(row) == RESULT_KEYS for row in document["results"])
    assert all(set(row) == RATIO_KEYS for row in document["ratios"])
    assert document["machine"]["run"]["seed"] == 1
    assert document["machine"]["run"]["notes"] == ["cpp-http fell over."]


def test_the_table_has_caveats_first_and_fits_80_columns(report: Report) -> None:
    lines = render_table(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1] == "- Mind the gap."
    assert lines[-1] == "- cpp-http fell over."
    row = next(line for line in lines if "cpp-http" in line)
    assert row.split() == ["cpp-http", "40", "-", "-", "-", "-", "-", "yes"]


def test_the_table_shows_ratios_with_their_range(report: Report) -> None:
    text = render_table(report)
    assert re.search(r"shmlane-http over +p50 \(range\)", text)
    assert re.search(r"cpp-http +0\.50 \(0\.25-1\.00\)", text)


def test_a_cell_says_what_the_client_was_asked_to_do() -> None:
    payload = make_plan(payloads=["resnet50"]).payloads[0]
    assert payload.nbytes == 3 * 224 * 224 * 4
    assert str(Cell(payload, 4, True)) == "resnet50 x4, filled"
