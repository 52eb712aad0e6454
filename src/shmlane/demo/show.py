"""What the demo prints: findings, checks and the table of clients, for 80 columns.

Owns words and layout. Refuses to judge: every verdict is made where it is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmlane.demo.look import Check, Findings

_WIDTH = 80


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
    note = "Weights of resnet50 are random: its classes are numbers without a meaning."
    console.print(note, style="dim")
    console.print("The page with its boxes was written to")
    console.print(str(text.picture), soft_wrap=True)


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """Every comparison with its outcome."""
    _heading(console, "Checks")
    table = _plain_table()
    for check in checks:
        verdict = Line("ok", "green") if check.passed else Line("FAILED", "bold red")
        table.add_row(verdict, check.claim, check.detail)
    console.print(table)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold")


def _plain_table() -> Table:
    return Table(box=None, show_header=False, padding=(0, 2, 0, 0))
