"""The demo from start to end: a server, two networks, checks, and a table of clients.

Owns the order of things and the verdict. Refuses to say that all is well while any
check failed, a client got a wrong value, or anything was left behind.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import shmlane
from shmlane.bench import own_servers
from shmlane.bench import run as run_benchmark
from shmlane.demo import clients, show
from shmlane.demo.look import Check, Findings, look
from shmlane.demo.traces import Traces
from shmlane.errors import UnsupportedPlatform
from shmlane.server import TritonServer, demo_models
from shmlane.server.cache import say
from shmlane.server.managed import find_installation

if TYPE_CHECKING:
    from pathlib import Path

    from shmlane.bench import Report

PICTURE = "shmlane-demo.png"


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that one run of the demo found."""

    server_version: str
    findings: Findings
    checks: list[Check]
    report: Report | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def facts(self) -> dict[str, Any]:
        """The outcome for programs, as JSON can carry it."""
        text = self.findings.text
        return {
            "passed": self.passed,
            "version": shmlane.__version__,
            "server_version": self.server_version,
            "seconds": round(self.seconds, 3),
            "picture": str(text.picture),
            "classes": {each.picture: each.top for each in self.findings.classes},
            "lines": text.lines,
            "lines_found": text.lines_found,
            "boxes": [
                {"corners": box.corners.tolist(), "score": box.score}
                for box in text.boxes
            ],
            "checks": [
                {
                    "claim": check.claim,
                    "passed": check.passed,
                    "detail": check.detail,
                    "difference": check.difference,
                }
                for check in self.checks
            ],
            "bench": None if self.report is None else self.report.to_json(),
        }


def run(folder: Path, *, quiet: bool, with_bench: bool) -> Outcome:
    """Run the demo, print what it finds as it goes unless `quiet`, and return it.

    The picture goes into `folder`. Raises what starting a server raises.
    """
    if sys.platform != "linux":
        raise UnsupportedPlatform(
            f"the demo starts a tritonserver, which does not exist on {sys.platform}.",
            hint="Run it on Linux.",
        )
    started = time.monotonic()
    console = show.make_console(quiet=quiet)
    traces = Traces()
    models = demo_models("resnet50", "ocr_det")
    # Here and not while it starts: progress lines tell one thing after the other.
    find_installation()
    say("starting a Triton server with both networks …")
    with TritonServer(models) as server:
        version, urls = server.version, {server.http_url}
        findings = look(server.http_url, picture=folder.absolute() / PICTURE)
    show.show_findings(console, findings)
    checks = list(findings.checks)
    report = None
    if with_bench:
        say("comparing clients, about a minute …")
        plan = clients.make_comparison()
        with own_servers(plan) as servers:
            report = run_benchmark(plan, servers=servers)
        urls |= {url for url in (servers.http, servers.unix) if url}
        show.show_clients(console, report)
        checks.append(clients.check(report))
    left = traces.left(urls)
    claim = "nothing left in /dev/shm, no process left"
    checks.append(Check(claim, not left, ", ".join(left)))
    show.show_checks(console, checks)
    return Outcome(version, findings, checks, report, time.monotonic() - started)
