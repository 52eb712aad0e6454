"""A few real rounds against real servers: right values, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlane.bench import (
    CASES,
    CONTENDERS,
    Plan,
    Report,
    Servers,
    keys,
    make_plan,
    perf_analyzer,
    run,
    worker,
)
from shmlane.bench.server_stats import ServerStats
from shmlane.errors import ContenderFailed, InstallFailed, ServerUnreachable, UsageError
from shmlane.server import TritonServer
from tests.machine import descendants, is_running
from tests.polling import eventually

MEASURED = (
    "shmlane-http",
    "shmlane-unix",
    "shmlane-async",
    "shmlane-stream",
    "shmlane-wire",
    "cpp-grpc",
    "tritonclient-http",
    "tritonclient-http-wire",
    "tritonclient-grpc",
    "tritonclient-grpc-wire",
    "tritonclient-grpc-set",
    "tritonclient-grpc-register",
)
SHM = Path("/dev/shm")


def small_plan(*contenders: str, fill: bool = True, concurrency: int = 2) -> Plan:
    plan = make_plan(
        contenders=contenders,
        payloads=["resnet50"],
        concurrency=[concurrency],
        rounds=2,
        fill=fill,
        seed=3,
    )
    return dataclasses.replace(plan, traffic_s=0.03)


@pytest.fixture(scope="session")
def tools() -> None:
    """What contenders install on first use; fixtures have no time limit."""
    perf_analyzer.install()
    worker.tritonclient_program()


@pytest.fixture(scope="module")
def servers(server: TritonServer, unix_server: TritonServer) -> Servers:
    return Servers(
        http=server.http_url, grpc=server.grpc_url, unix=unix_server.unix_url
    )


@pytest.fixture
def no_processes_left(servers: Servers) -> Iterator[None]:
    """No process of ours stays, and no file of another client's without a user.

    Another benchmark may run on this machine, so files of living processes are its own,
    and perf_analyzer's are looked for under the lock that its runs hold.
    """
    children = _children()
    yield
    eventually(lambda: _children() <= children, "every process has ended")
    eventually(lambda: not _files_of_the_dead(), "tritonclient's files are gone")
    with keys.held():
        names = (keys.INPUT, keys.OUTPUT)
        assert not [name for name in names if (keys.FOLDER / name).exists()]


def _files_of_the_dead() -> list[Path]:
    return [
        file
        for file in SHM.glob("tritonclient_bench_*")
        if not Path("/proc", file.name.split("_")[2]).exists()
    ]


def _children() -> set[str]:
    """Processes started by this one and not yet waited for."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


@pytest.mark.usefixtures("tools", "no_leftovers", "no_processes_left")
@pytest.mark.parametrize("fill", [True, False])
def test_every_contender_is_measured_and_right(servers: Servers, fill: bool) -> None:
    report = run(small_plan(*MEASURED, fill=fill), servers=servers)
    assert report.notes == ()
    assert report.is_complete
    for row in report.results:
        numbers = (row.p50_us, row.p99_us, row.requests_per_s, row.server_us)
        assert all(number and number > 0 for number in numbers), row
        assert row.verified
    assert {row.memory for row in report.results} == {"system", "wire"}
    assert all(ratio.rounds == 2 for ratio in report.ratios)
    assert report.server["processes"] == 2
    json.dumps(report.to_json())


@pytest.mark.usefixtures("tools", "no_leftovers", "no_processes_left")
def test_workers_survive_that_perf_analyzer_wipes_all_regions(
    servers: Servers,
) -> None:
    names = ("cpp-http", "shmlane-http", "tritonclient-http", "tritonclient-grpc")
    plan = dataclasses.replace(small_plan(*names, concurrency=1), rounds=4)
    report = run(plan, servers=servers)
    assert report.is_complete
    assert {row.verified for row in report.results} == {True}


def test_a_tool_that_cannot_be_installed_leaves_the_others(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise InstallFailed("No network today.")

    monkeypatch.setattr(worker, "tritonclient_program", fail)
    report = run(small_plan("shmlane-http", "tritonclient-grpc"), servers=servers)
    assert report.notes == ("tritonclient is left out: No network today.",)
    assert not report.is_complete
    facts = {row.contender: (row.p50_us, row.verified) for row in report.results}
    assert facts["tritonclient-grpc"] == (None, None)
    assert facts["shmlane-http"][1] is True


@pytest.mark.usefixtures("no_leftovers", "no_processes_left")
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('{\"ready\": true}', flush=True); input()", "broke off"),
        ('print(\'{"error": "no luck"}\', flush=True); input()', "failed with no luck"),
    ],
)
def test_a_contender_that_fails_is_left_out_and_the_others_go_on(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    broken = worker.Program((sys.executable, "-c", program), dict(os.environ))
    monkeypatch.setattr(worker, "tritonclient_program", lambda: broken)
    # One that said it failed and does not end is killed after that.
    monkeypatch.setattr(worker, "_END_TIMEOUT", 1.0)
    report = run(small_plan("tritonclient-grpc", "shmlane-http"), servers=servers)
    (note,) = report.notes
    assert note.startswith("tritonclient-grpc ")
    assert reason in note
    facts = {row.contender: row.p50_us for row in report.results}
    assert facts["tritonclient-grpc"] is None
    assert facts["shmlane-http"] is not None


@pytest.mark.usefixtures("no_leftovers", "no_processes_left")
def test_an_interrupt_ends_all_workers(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0

    def interrupt(self: worker.Worker) -> None:
        nonlocal rounds
        rounds += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.Worker, "round", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(small_plan("shmlane-http", "shmlane-unix"), servers=servers)
    assert rounds == 1


@pytest.mark.usefixtures("no_leftovers", "no_processes_left")
def test_a_worker_that_cannot_start_says_why(servers: Servers) -> None:
    plan = small_plan("shmlane-http")
    contender = plan.contenders[0]
    with pytest.raises(ContenderFailed, match=r"shmlane-http.*ModelNotReady") as caught:
        worker.Worker(
            worker.shmlane_program(),
            contender,
            plan.cells()[0],
            ServerStats(servers.url(contender), "no_such_model"),
            url=servers.url(contender),
            traffic_s=0.01,
        )
    assert "Traceback" in str(caught.value.context["log"])


def test_an_address_that_the_plan_needs_must_be_given(servers: Servers) -> None:
    plan = small_plan("shmlane-unix")
    with pytest.raises(UsageError, match="no server has the unix"):
        run(plan, servers=dataclasses.replace(servers, unix=None))
    with pytest.raises(UsageError, match="counted over HTTP"):
        run(small_plan("cpp-grpc"), servers=dataclasses.replace(servers, http=None))


def test_a_server_that_is_gone_is_an_error_and_not_a_row() -> None:
    with pytest.raises(ServerUnreachable, match="nothing"):
        ServerStats("127.0.0.1:1", "sink").read()


def test_the_command_prints_a_table_and_writes_the_json(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    reply = bench("--contenders", "shmlane-http,shmlane-unix", "--json", str(file))
    assert reply.returncode == 0, reply.stderr
    assert "tiny 1x1x1x16, 1 in flight" in reply.stdout
    assert "shmlane-unix over" in reply.stdout
    assert "cell 1 of 1" in reply.stderr
    document = json.loads(file.read_text())
    assert [row["verified"] for row in document["results"]] == [True, True]
    assert document["ratios"][0]["rounds"] == 1


def test_the_command_measures_a_write(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    reply = bench("--case", "write", "--json", str(file))
    assert reply.returncode == 0, reply.stderr
    assert "lease.write" in reply.stdout
    (row,) = json.loads(file.read_text())["write"]
    assert (row["payload"], row["verified"]) == ("tiny", True)


def test_the_command_refuses_an_unknown_case() -> None:
    reply = bench("--case", "wires")
    assert reply.returncode == 2
    assert "'wires'" in reply.stderr
    assert all(name in reply.stderr for name in CASES)
    assert reply.stdout == ""


def test_the_command_refuses_an_unknown_contender() -> None:
    reply = bench("--contenders", "shmlane-http,grpcio")
    assert reply.returncode == 2
    assert "grpcio" in reply.stderr
    assert "tritonclient-grpc-wire" in reply.stderr
    assert reply.stdout == ""


def test_the_command_refuses_to_measure_for_a_file_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    reply = bench("--json", str(tmp_path / "no" / "numbers.json"))
    assert reply.returncode == 2
    assert "--json" in reply.stderr
    assert "cell" not in reply.stderr


def test_the_command_help_names_every_contender() -> None:
    text = bench("--help").stdout
    assert [name for name in CONTENDERS if name not in text] == []


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    """The command with one payload, one request in flight and one round."""
    fixed = ["--quick", "--payloads", "tiny", "--concurrency", "1", "--rounds", "1"]
    program = "from shmlane.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "bench", *fixed, *options],
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_report_of_a_run_is_what_the_demo_reads(servers: Servers) -> None:
    report: Report = run(small_plan("shmlane-http", "shmlane-unix"), servers=servers)
    ratio = report.ratio(
        "shmlane-unix", "shmlane-http", payload="resnet50", concurrency=2, fill=True
    )
    assert ratio.p50 is not None
    assert ratio.p50.min <= ratio.p50.median <= ratio.p50.max


def _runs_perf_analyzer(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name == "perf_analyzer"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("tools", "no_leftovers", "no_processes_left")
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_no_process_outlives_a_benchmark_that_is_ended(number: str, code: int) -> None:
    options = ("--contenders", "cpp-http,shmlane-http", "--concurrency", "1")
    with subprocess.Popen(
        [sys.executable, "-m", "shmlane", "bench", "--quick", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as bench:
        started: set[int] = set()

        def measures() -> bool:
            started.update(descendants(bench.pid))
            return any(map(_runs_perf_analyzer, started))

        eventually(measures, "it runs perf_analyzer", timeout=60)
        bench.send_signal(signal.Signals[number])
        assert bench.wait(30) == code
    eventually(lambda: not any(map(is_running, started)), "all of them have ended")
