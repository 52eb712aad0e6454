"""The command line without a server: version, helps, and how regions are listed."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("typer", reason="needs the extra [cli]")

from typer.testing import CliRunner

import shmlane
from shmlane.bench import Measured, Plan, cases, plan
from shmlane.cli import regions
from shmlane.cli.app import app
from shmlane.inventory import RegionInfo

INFOS = [
    RegionInfo(
        name="shmlane.10c3d0e080355d88",
        nbytes=4_161_536,
        uid=0,
        alive=True,
        pid=31792,
        server="127.0.0.1:35113",
        model="identity",
        slots=2,
        registered=1,
    ),
    RegionInfo(
        name="shmlane.519811af07ee34e8",
        nbytes=8192,
        uid=0,
        alive=False,
        pid=7,
        server="unix:///run/somewhere/deep/down/triton/http.sock",
        model="a-model-with-a-long-name",
        slots=2,
        server_trouble="silent",
    ),
    RegionInfo(name="shmlane.5260e3481c860a39", nbytes=512, uid=1, alive=None),
]


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "list_regions", lambda: INFOS)
    monkeypatch.setenv("COLUMNS", "80")


def list_on_terminal(monkeypatch: pytest.MonkeyPatch, *, columns: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    regions.ls()


def test_both_ways_to_call_it_tell_the_version() -> None:
    for way in (["-m", "shmlane"], ["-c", "from shmlane.cli import main; main()"]):
        told = subprocess.run(
            [sys.executable, *way, "--version"], capture_output=True, text=True
        )
        assert told.stdout == f"shmlane {shmlane.__version__}\n"
        assert told.returncode == 0


def test_regions_are_a_line_each_where_nobody_watches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    regions.ls()
    heading, *lines = capsys.readouterr().out.splitlines()
    assert tuple(heading.split()) == (
        "region",
        "size",
        "owner",
        "model",
        "registered",
        "server",
    )
    assert [re.split("  +", line) for line in lines] == [
        [
            INFOS[0].name,
            "3.969 MiB",
            "alive 31792",
            "identity",
            "1 name",
            INFOS[0].server,
        ],
        [
            INFOS[1].name,
            "8 KiB",
            "dead 7",
            INFOS[1].model,
            "server silent",
            INFOS[1].server,
        ],
        [INFOS[2].name, "512 B", "-", "-", "-", "-"],
    ]


def test_a_narrow_terminal_gets_each_server_below_its_region(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    list_on_terminal(monkeypatch, columns=80)
    told = capsys.readouterr()
    assert "server" not in told.out.splitlines()[0]
    assert [line.split() for line in told.out.splitlines()[1:]] == [
        [INFOS[0].name, "3.969", "MiB", "alive", "31792", "identity", "1", "name"],
        ["server:", INFOS[0].server],
        [INFOS[1].name, "8", "KiB", "dead", "7", INFOS[1].model, "server", "silent"],
        ["server:", INFOS[1].server],
        [INFOS[2].name, "512", "B", "-", "-", "-"],
    ]
    assert told.err == ""


def test_a_narrow_terminal_gets_one_server_once_and_lines_that_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = [replace(INFOS[0], name=f"shmlane.{n:016}", registered=n) for n in range(3)]
    monkeypatch.setattr(regions, "list_regions", lambda: infos)
    list_on_terminal(monkeypatch, columns=80)
    heading, *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"server: {INFOS[0].server}"
    assert max(map(len, [heading, *lines, last])) <= 80
    assert [re.split("  +", line)[-1] for line in lines] == ["no", "1 name", "2 names"]


def test_a_narrow_terminal_gets_claims_and_loans_below_their_region(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = replace(
        INFOS[0], claims={0: 101, 1: 31792, 2: 101}, lent={1: 40200}, registered=12
    )
    monkeypatch.setattr(regions, "list_regions", lambda: [INFOS[0], shared])
    list_on_terminal(monkeypatch, columns=80)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[3:] == [
        "  3 claimed by 101, 31792",
        "  1 lent to 40200",
        f"server: {INFOS[0].server}",
    ]
    list_on_terminal(monkeypatch, columns=200)
    assert "alive 31792; 3 claimed by 101, 31792; 1 lent to 40200  identity" in (
        capsys.readouterr().out
    )


def test_a_wide_terminal_gets_the_servers_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    list_on_terminal(monkeypatch, columns=200)
    told = capsys.readouterr()
    assert "127.0.0.1:35113" in told.out
    assert told.err == ""


@pytest.mark.parametrize("command", ["", "bench", "demo", "serve", "ls", "clean"])
def test_helps_show_no_value_for_what_takes_none(command: str) -> None:
    told = CliRunner().invoke(app, [*command.split(), "--help"])
    assert told.exit_code == 0
    assert "--help" in told.output
    assert "bool" not in told.output.lower()


def test_helps_show_the_values_of_what_takes_one() -> None:
    told = CliRunner().invoke(app, ["clean", "--help"])
    assert "NAME=VALUE" in told.output


def test_the_help_of_serve_shows_how_options_are_passed_on() -> None:
    told = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "serve [OPTIONS] [-- OPTIONS]..." in told
    assert "--json" not in told


def test_the_help_of_clean_says_when_it_fails() -> None:
    told = CliRunner().invoke(app, ["clean", "--help"]).output
    assert "With --yes it ends with 1" in " ".join(told.split())


@pytest.mark.parametrize("command", ["bench", "demo", "serve", "ls", "clean"])
def test_helps_fill_their_lines(command: str) -> None:
    told = CliRunner().invoke(app, [command, "--help"])
    assert told.exit_code == 0
    prose = told.output.partition("╭")[0].replace("\n \n", "\n\n")
    for paragraph in re.split(r"\n\s*\n", prose):
        lines = [line.strip() for line in paragraph.strip().splitlines()]
        for line, following in itertools.pairwise(lines):
            room = 78 - len(line)
            assert len(following.split()[0]) >= room, f"{line!r} was broken early"


def test_the_help_of_bench_tells_its_defaults() -> None:
    told = " ".join(CliRunner().invoke(app, ["bench", "--help"]).output.split())
    assert ",".join(map(str, plan.DEFAULT_CONCURRENCY)) in told
    assert "the first six" in told
    assert len(plan.DEFAULT_CONTENDERS) == 6
    assert f"{plan.FULL_ROUNDS}, 30 for --case" in told
    assert ", ".join(plan.PAYLOADS) in told


@pytest.mark.parametrize(
    ("options", "rounds"),
    [([], 30), (["--quick"], 10), (["--quick", "--rounds", "3"], 3)],
)
def test_quick_holds_for_a_case_too(
    options: list[str], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measure(plan: Plan) -> list[Measured]:
        asked.append(plan.rounds)
        return []

    overhead = replace(cases.find_case("overhead"), measure=measure)
    monkeypatch.setitem(cases.CASES, "overhead", overhead)
    told = CliRunner().invoke(app, ["bench", "--case", "overhead", *options])
    assert told.exit_code == 0, told.output
    assert asked == [rounds]
