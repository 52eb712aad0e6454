"""Running a plan: contenders take turns in random order, round after round.

Owns the order, the life of the contenders' processes, and what happens when one fails:
it is left out from there on, with a note, and the others go on. Refuses to let two
contenders run at the same time.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from shmlane.bench import perf_analyzer, worker
from shmlane.bench.lines import Verdict, judge
from shmlane.bench.machine import machine_facts
from shmlane.bench.plan import Cell, Contender, Plan, Program
from shmlane.bench.report import Report
from shmlane.bench.results import Ratio, Result, Sample, make_ratios, make_results
from shmlane.bench.servers import Servers
from shmlane.errors import LocalServerError, ShmlaneError, UnsupportedPlatform

Progress = Callable[[str], None]


class Runner(Protocol):
    """One contender in one cell, ready for its turns."""

    def round(self) -> Sample:
        """Take one turn."""

    def close(self) -> None:
        """Leave nothing behind."""


Opener = Callable[[Contender, Cell], Runner]


def run(
    plan: Plan, *, servers: Servers, progress: Progress = lambda line: None
) -> Report:
    """Measure all that `plan` names against `servers` and report it.

    `progress` gets one line of text now and then, never while anything is measured.
    A contender that fails is left out with a note in the report; only a plan that
    `servers` cannot serve, or a server that is gone, raises.
    """
    for contender in plan.contenders:
        servers.url(contender)
    return _Bench(plan, servers, progress).run()


class _Bench:
    """One run of one plan."""

    def __init__(self, plan: Plan, servers: Servers, progress: Progress) -> None:
        self._plan = plan
        self._servers = servers
        self._progress = progress
        self._random = random.Random(plan.seed)
        self._notes: list[str] = []
        self._clients: dict[str, str] = {}
        self._modes: dict[str, str] = {}

    def run(self) -> Report:
        plan = self._plan
        machine = machine_facts()
        cells = plan.cells()
        self._progress(
            f"clients: {len(plan.contenders)}, cells: {len(cells)}, rounds: "
            f"{plan.rounds}; about {plan.expected_s:.0f} s"
        )
        openers = self._install()
        results: list[Result] = []
        ratios: list[Ratio] = []
        lines: list[Verdict] = []
        for number, cell in enumerate(cells, 1):
            self._progress(f"cell {number} of {len(cells)}: {cell}")
            rounds = self._measure(cell, openers)
            found = make_results(cell, plan.contenders, rounds)
            compared = make_ratios(cell, plan.contenders, rounds)
            lines += judge(cell, plan.contenders, found, compared)
            results += found
            ratios += compared
        return Report(
            plan=plan,
            machine=machine,
            server=self._server_facts(),
            results=tuple(results),
            ratios=tuple(ratios),
            lines=tuple(lines),
            caveats=tuple(caveats(plan)),
            notes=tuple(self._notes),
        )

    def _install(self) -> dict[Program, Opener]:
        """How to open each program that the plan needs and this machine can have."""
        makers: dict[Program, Callable[[], Opener]] = {
            "shmlane": self._shmlane,
            "tritonclient": self._tritonclient,
            "perf_analyzer": self._perf_analyzer,
        }
        openers: dict[Program, Opener] = {}
        for program in sorted(self._plan.programs()):
            try:
                openers[program] = makers[program]()
            except (LocalServerError, UnsupportedPlatform) as error:
                self._note(f"{program} is left out: {error}")
        return openers

    def _shmlane(self) -> Opener:
        return self._worker_opener(worker.shmlane_program())

    def _tritonclient(self) -> Opener:
        opener = self._worker_opener(worker.tritonclient_program())
        self._clients["tritonclient"] = worker.TRITONCLIENT.rpartition("==")[2]
        return opener

    def _worker_opener(self, program: worker.Program) -> Opener:
        def open_worker(contender: Contender, cell: Cell) -> Runner:
            return worker.Worker(
                program,
                contender,
                cell,
                self._servers.stats(contender),
                url=self._servers.url(contender),
                traffic_s=self._plan.traffic_s,
            )

        return open_worker

    def _perf_analyzer(self) -> Opener:
        tool = perf_analyzer.install()
        self._clients["perf_analyzer"] = perf_analyzer.VERSION

        pilots: dict[tuple[str, int], perf_analyzer.Pilot] = {}

        def open_perf_analyzer(contender: Contender, cell: Cell) -> Runner:
            key = (contender.name, cell.concurrency)
            runner = perf_analyzer.PerfAnalyzer(
                tool,
                contender,
                cell,
                self._servers.stats(contender),
                url=self._servers.url(contender),
                traffic_s=self._plan.traffic_s,
                pilots=self._plan.pilots,
                pilot=pilots.get(key),
            )
            pilots[key] = runner.pilot
            self._modes[f"{contender.name} x{cell.concurrency}"] = runner.pilot.mode
            return runner

        return open_perf_analyzer

    def _measure(
        self, cell: Cell, openers: Mapping[Program, Opener]
    ) -> dict[str, list[Sample]]:
        samples: dict[str, list[Sample]] = defaultdict(list)
        with contextlib.ExitStack() as open_runners:
            runners: dict[str, Runner] = {}
            for contender in self._plan.contenders:
                if opener := openers.get(contender.program):
                    runner = self._guarded(contender, cell, opener)
                    if runner is not None:
                        open_runners.callback(runner.close)
                        runners[contender.name] = runner
            for _ in range(self._plan.rounds):
                self._one_round(cell, runners, samples)
        return samples

    def _guarded(
        self, contender: Contender, cell: Cell, opener: Opener
    ) -> Runner | None:
        try:
            return opener(contender, cell)
        except ShmlaneError as error:
            self._note(f"{contender.name} is left out of {cell}: {error}")
            return None

    def _one_round(
        self,
        cell: Cell,
        runners: dict[str, Runner],
        samples: dict[str, list[Sample]],
    ) -> None:
        order = list(runners)
        self._random.shuffle(order)
        for name in order:
            try:
                sample = runners[name].round()
            except LocalServerError as error:
                self._note(f"{name} left {cell}: {error}")
                del runners[name]
                continue
            if sample.note:
                self._note(f"{name}, {cell}: {sample.note}")
            samples[name].append(sample)

    def _note(self, line: str) -> None:
        self._notes.append(line)
        self._progress(line)

    def _server_facts(self) -> dict[str, Any]:
        first = self._servers.stats(self._plan.contenders[0])
        endpoints = {contender.endpoint for contender in self._plan.contenders}
        return {
            "version": first.server_version(),
            "model": self._servers.model,
            "processes": len({"unix"} & endpoints) + bool(endpoints - {"unix"}),
            "clients": dict(self._clients),
            "perf_analyzer_modes": dict(self._modes),
        }


def caveats(plan: Plan) -> list[str]:
    """What a reader must know before the numbers; only what applies to this plan."""
    programs = plan.programs()
    endpoints = {contender.endpoint for contender in plan.contenders}
    ways = {contender.way for contender in plan.contenders}
    lines = [
        "Server and clients share these cores: trust the ratios, not the times.",
        f"Rounds: {plan.rounds} of {plan.traffic_s:g} s each, in random order (seed "
        f"{plan.seed}). A line holds on the median.",
    ]
    if len(endpoints) > 1 and "unix" in endpoints:
        lines.append(
            "Triton has one HTTP address, so shmlane-unix talks to a server process "
            "of its own."
        )
    if "perf_analyzer" in programs:
        lines.append(
            "Python clients are timed from taking the memory to having read the "
            "value, cpp-* (perf_analyzer) from send to reply: it writes no input and "
            "reads no value, filled or not. Synchronous or asynchronous, the better "
            "counts."
        )
    if any(contender.flow == "stream" for contender in plan.contenders):
        lines.append(
            "shmlane-stream hands results out in order: its latency counts that wait."
        )
    if ways & {"set per call", "register per call"}:
        lines.append("*-set and *-register copy their input in, filled or not.")
    if "in the request" in ways:
        lines.append(
            "*-wire clients send one ready array in each call, its last element "
            "changed, filled or not."
        )
    return lines
