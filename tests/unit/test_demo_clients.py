"""The demo's table of clients, from reports whose numbers are known."""

from __future__ import annotations

import pytest

pytest.importorskip("cv2", reason="needs the extra [preprocess]")
pytest.importorskip("rich", reason="needs the extra [cli]")

from shmlane.bench import CONTENDERS, Report, Sample, make_plan
from shmlane.bench.results import make_ratios, make_results
from shmlane.demo import clients, show

ROUNDS = {
    "cpp-http": (100.0, 300.0, 200.0),
    "cpp-grpc": (240.0, 240.0, 240.0),
    "shmlane-http": (50.0, 60.0, 80.0),
    "shmlane-unix": (50.0, 150.0, 100.0),
    "tritonclient-grpc-wire": (9000.0, 9000.0, 9000.0),
    "tritonclient-http-wire": (8000.0, 8000.0, 8000.0),
    "tritonclient-grpc-set": (800.0, 800.0, 800.0),
    "tritonclient-grpc-register": (7000.0, 7000.0, 7000.0),
}


def report(*, without: str = "", wrong: str = "", slower: float = 1) -> Report:
    """What the benchmark would say after three rounds; wire clients may be slower."""
    plan = make_plan(contenders=ROUNDS, payloads=["yolov8"], concurrency=[1], rounds=3)
    (cell,) = plan.cells()
    samples = {
        name: [
            Sample(
                p50_us=p50 * factor,
                p99_us=2 * p50 * factor,
                requests_per_s=1e6 / p50 / factor,
                client_cpu_us=20.4,
                verified=name != wrong,
            )
            for p50 in rounds
        ]
        for name, rounds in ROUNDS.items()
        for factor in [slower if name.endswith("wire") else 1]
        if name != without
    }
    return Report(
        plan=plan,
        machine={},
        server={},
        results=tuple(make_results(cell, plan.contenders, samples)),
        ratios=tuple(make_ratios(cell, plan.contenders, samples)),
        notes=(f"{without} is left out",) if without else (),
    )


def ratios(found: Report) -> dict[str, float | None]:
    return {row.label: row.ratio for row in clients.rows(found)}


def test_every_client_of_the_table_is_one_the_benchmark_knows() -> None:
    assert set(ROUNDS) <= set(CONTENDERS)
    assert len(clients.rows(report())) == len(ROUNDS)


def test_the_package_is_compared_round_by_round() -> None:
    found = ratios(report())
    assert found["shmlane over TCP"] == pytest.approx(0.4)
    assert found["shmlane over a Unix socket"] == pytest.approx(0.5)


def test_other_clients_are_compared_by_their_medians() -> None:
    found = ratios(report())
    assert found["C++ perf_analyzer HTTP"] == 1
    assert found["C++ perf_analyzer gRPC"] == pytest.approx(1.2)
    assert found["tritonclient gRPC, copy per call"] == pytest.approx(4)


def test_a_complete_report_passes() -> None:
    check = clients.check(report())
    assert check.passed
    assert check.detail == "8 clients, C++ after its run"


def test_a_client_with_a_wrong_value_fails_the_check_by_name() -> None:
    check = clients.check(report(wrong="cpp-grpc"))
    assert not check.passed
    assert "wrong: cpp-grpc" in check.detail


def test_a_client_that_could_not_run_fails_the_check_and_is_shown_as_dashes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(without="cpp-http")
    check = clients.check(found)
    assert not check.passed
    assert "not measured: cpp-http" in check.detail
    assert set(ratios(found).values()) == {None}
    show.show_clients(show.make_console(quiet=False), found)
    printed = capsys.readouterr().out
    assert "cpp-http is left out" in printed
    (row,) = (line for line in printed.splitlines() if "perf_analyzer HTTP  " in line)
    assert row.split()[-5:] == ["-"] * 5


@pytest.mark.parametrize(
    ("slower", "ratio"), [(1, "45.00"), (2.65, "119"), (40, "1,800")]
)
def test_the_table_fits_eighty_columns(
    slower: float, ratio: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show.show_clients(show.make_console(quiet=False), report(slower=slower))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    (row,) = (line for line in lines if "gRPC, no shared memory" in line)
    assert row.split()[-1] == ratio
