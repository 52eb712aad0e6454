"""What the demo prints: findings, checks and the table of clients, for 80 columns.

Owns words and layout. Refuses to judge: every verdict is made where it is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from shmlane.demo.clients import PAYLOAD, ROUNDS, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmlane.bench import Report
    from shmlane.demo.look import Check, Findings

_WIDTH = 80
_READING = (
    "x C++: p50 over that of C++ perf_analyzer HTTP; below 1 is faster. CPU: the"
    " client's, for one request. All but the first two rows use shared memory; shmlane"
    " and C++ find their input in place. Server and clients share the cores:"
    f" trust the ratios. Medians of {ROUNDS} short rounds in random order."
)


def make_console(*, quiet: bool) -> Console:
    """A console at most 80 columns wide, so that a log reads as the screen does."""
    probe = Console()
    return Console(width=min(_WIDTH, probe.width), quiet=quiet, highlight=False)


def show_findings(console: Console, findings: Findings) -> None:
    """What the two networks saw."""
    _heading(console, "Two real networks, pixels written and results read in place")
    table = _plain_table()
    for classes in findings.classes:
        top = ", ".join(f"{name} ({share:.1%})" for name, share in classes.top)
        table.add_row("resnet50", classes.picture, f"class {top}")
    text = findings.text
    boxes = f"{len(text.boxes)} boxes on {text.lines} lines of text"
    table.add_row("ocr_det", "text page", boxes)
    console.print(table)
    note = "resnet50 has random weights: its classes are numbers without a meaning."
    console.print(note, style="dim")
    console.print("The page with its boxes was written to")
    console.print(str(text.picture), soft_wrap=True)


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """Every comparison with its outcome, and the sum of them."""
    _heading(console, "Checks")
    table = _plain_table()
    table.add_column()
    table.add_column(no_wrap=True)
    for check in checks:
        verdict = Line("ok", "green") if check.passed else Line("FAILED", "bold red")
        table.add_row(verdict, check.claim, check.detail)
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print()
    if failed:
        console.print(f"{failed} of {len(checks)} checks FAILED.", style="bold red")
    else:
        console.print(f"All {len(checks)} checks passed.", style="bold")


def show_clients(console: Console, report: Report) -> None:
    """The table of clients and what to know when reading it."""
    size = PAYLOAD.nbytes / 1e6
    _heading(
        console,
        f"Clients: {PAYLOAD.text} FP32, {size:.1f} MB, to model sink, one in flight",
    )
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    table.add_column("", max_width=36)
    for heading in ("p50 µs", "p99 µs", "req/s", "CPU µs", "x C++"):
        table.add_column(heading, justify="right")
    for row in rows(report):
        numbers = (row.p50_us, row.p99_us, row.requests_per_s, row.client_cpu_us)
        style = "bold" if row.label.startswith("shmlane") else ""
        table.add_row(row.label, *map(_number, numbers), _ratio(row.ratio), style=style)
    console.print(table)
    console.print(_READING, style="dim")
    if not report.is_complete:
        for note in report.notes:
            console.print(f"- {note}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    """Two decimals; none where they would say nothing and take the room."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 99.995 else f"{value:,.0f}"


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold")


def _plain_table() -> Table:
    return Table(box=None, show_header=False, padding=(0, 2, 0, 0))
