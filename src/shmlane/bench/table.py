"""A report as text for people: caveats first, then one block a cell, 80 columns.

Owns the layout. Refuses to hide a gap: what was not measured is shown as a dash.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from shmlane.bench.lines import Verdict
from shmlane.bench.plan import Cell
from shmlane.bench.report import Report
from shmlane.bench.results import Ratio, Result, Spread
from shmlane.bench.turns import verdict

WIDTH = 80
_VERDICTS = {True: "yes", False: "NO", None: "-"}
_NAME = 26


def render_table(report: Report) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield from _heading(report)
    for cell in report.plan.cells():
        yield ""
        yield from _cell(report, cell)
    if report.notes:
        yield ""
        yield "Notes"
        for note in report.notes:
            yield from _item(note)


def _heading(report: Report) -> Iterator[str]:
    machine, server = report.machine, report.server
    yield from textwrap.wrap(
        f"shmlane {machine['shmlane']} on Triton {server['version']}, "
        f"{machine['cores']} cores of {machine['cpu'] or 'an unknown processor'}, "
        f"Python {machine['python']}",
        WIDTH,
    )
    for caveat in report.caveats:
        yield from _item(caveat)


def _item(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=True
    )


def _cell(report: Report, cell: Cell) -> Iterator[str]:
    payload = cell.payload
    filled = "input written each call" if cell.fill else "input ready already"
    yield f"{payload.name} {payload.text}, {cell.concurrency} in flight, {filled}"
    yield (
        f"  {'':{_NAME}}{'p50':>7}{'p90':>7}{'p99':>7}{'req/s':>8}{'client':>8}"
        f"{'server':>7}{'right':>6}"
    )
    yield f"  {'':{_NAME}}{'µs':>7}{'µs':>7}{'µs':>7}{'':>8}{'CPU µs':>8}{'µs':>7}"
    for result in report.results:
        if _belongs(result, cell):
            yield _result(result)
    ratios = [ratio for ratio in report.ratios if _belongs(ratio, cell)]
    for contender in dict.fromkeys(ratio.contender for ratio in ratios):
        yield (
            f"  {contender + ' over':{_NAME}}{'p50 (range)':>20}{'p99':>7}"
            f"{'req/s':>8}{'CPU':>8}"
        )
        for ratio in ratios:
            if ratio.contender == contender:
                yield _ratio(ratio)
    for line in report.lines:
        if line.line.is_for(cell, report.plan.contenders):
            yield _line(line)


def _belongs(row: Result | Ratio, cell: Cell) -> bool:
    return (row.payload, row.concurrency, row.fill) == (
        cell.payload.name,
        cell.concurrency,
        cell.fill,
    )


def _result(row: Result) -> str:
    return (
        f"  {row.contender:{_NAME}}{_number(row.p50_us):>7}{_number(row.p90_us):>7}"
        f"{_number(row.p99_us):>7}{_number(row.requests_per_s):>8}"
        f"{_number(row.client_cpu_us):>8}{_number(row.server_us):>7}"
        f"{_VERDICTS[row.verified]:>6}"
    )


def _ratio(row: Ratio) -> str:
    return (
        f"    {row.baseline:{_NAME - 2}}{_spread(row.p50):>20}{_median(row.p99):>7}"
        f"{_median(row.requests_per_s):>8}{_median(row.client_cpu):>8}"
    )


def _line(row: Verdict) -> str:
    line = row.line
    what = "req/s" if line.is_least else "client CPU"
    name = f"{line.contender} {what} over {row.baseline}"
    bound = f"{'>=' if line.is_least else '<='} {line.bound:.2f}"
    return f"  {name:<40}{_spread(row.ratio):>18}{bound:>9}{verdict(row.is_held):>9}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    low, high = _quotient(spread.min), _quotient(spread.max)
    return f"{_quotient(spread.median)} ({low}-{high})"


def _median(spread: Spread | None) -> str:
    return "-" if spread is None else _quotient(spread.median)


def _quotient(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
