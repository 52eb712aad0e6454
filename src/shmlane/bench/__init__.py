"""Measuring shmlane against other clients of the same server, fairly.

`make_plan` says what, `run` measures it, `render_table` shows it::

    plan = make_plan(contenders=["shmlane-http", "cpp-grpc"], payloads=["yolov8"])
    with own_servers(plan) as servers:
        report = run(plan, servers=servers, progress=print)
    ratio = report.ratio("shmlane-http", "cpp-grpc", payload="yolov8", concurrency=1)

Every contender runs in a process of its own; perf_analyzer and tritonclient are
installed into the cache on first use and never imported here.
"""

from __future__ import annotations

from shmlane.bench.cases import CASES, Case, Measured, find_case
from shmlane.bench.crews import CrewReport, measure_crews
from shmlane.bench.handing import Handoff, measure_handoff
from shmlane.bench.lines import LINES, Line, Verdict
from shmlane.bench.overhead import Overhead, measure_overhead
from shmlane.bench.plan import (
    CONTENDERS,
    MATRIX,
    PAYLOADS,
    WIRE,
    Cell,
    Contender,
    Defaults,
    Payload,
    Plan,
    make_plan,
)
from shmlane.bench.preprocessing import Preprocessing, measure_preprocess
from shmlane.bench.report import Report
from shmlane.bench.results import Ratio, Result, Sample, Spread
from shmlane.bench.rounds import run
from shmlane.bench.servers import Servers, own_servers
from shmlane.bench.table import render_table
from shmlane.bench.turns import Versus
from shmlane.bench.writing import Writing, measure_write

__all__ = [
    "CASES",
    "CONTENDERS",
    "LINES",
    "MATRIX",
    "PAYLOADS",
    "WIRE",
    "Case",
    "Cell",
    "Contender",
    "CrewReport",
    "Defaults",
    "Handoff",
    "Line",
    "Measured",
    "Overhead",
    "Payload",
    "Plan",
    "Preprocessing",
    "Ratio",
    "Report",
    "Result",
    "Sample",
    "Servers",
    "Spread",
    "Verdict",
    "Versus",
    "Writing",
    "find_case",
    "make_plan",
    "measure_crews",
    "measure_handoff",
    "measure_overhead",
    "measure_preprocess",
    "measure_write",
    "own_servers",
    "render_table",
    "run",
]
