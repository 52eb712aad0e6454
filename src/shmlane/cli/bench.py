"""`shmlane bench`: its arguments, its output and its exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shmlane.bench import Overhead, Plan, Preprocessing, Report, Writing

    Measured = Sequence[Overhead | Writing | Preprocessing]

_FAILED = 1
_CASE_ROUNDS = 30
_QUICK_CASE_ROUNDS = 10

_Quick = typer.Option("--quick", help="Short rounds, fewer of them: some two minutes.")
_Json = typer.Option("--json", dir_okay=False, help="Write the numbers here as well.")
_Contenders = typer.Option(
    metavar="A,B", help="Only these clients, by name.", show_default="the first six"
)
_Payloads = typer.Option(
    metavar="P,Q",
    help="Of tiny, resnet50, yolov8.",
    show_default="all; yolov8 for --case",
)
_Concurrency = typer.Option(
    metavar="N,M", help="Requests in flight.", show_default="1,4,16"
)
_Rounds = typer.Option(
    min=1,
    metavar="N",
    help="How often each client has its turn.",
    show_default="15, 30 for --case; fewer with --quick",
)
_Fill = typer.Option("--fill", help="Write the whole input in every call.")
_Seed = typer.Option(
    metavar="N", help="Repeats the order of an earlier run.", show_default="random"
)
_Case = typer.Option(
    metavar="NAME",
    help="overhead: what shmlane adds to the bare bytes, by part. write: lease.write "
    "over one np.copyto. preprocess: image_into over what is usual. wire: the clients "
    "without shared memory, yolov8, 1 in flight.",
)


def bench(
    quick: Annotated[bool, _Quick] = False,
    json_file: Annotated[Path | None, _Json] = None,
    contenders: Annotated[str | None, _Contenders] = None,
    payloads: Annotated[str | None, _Payloads] = None,
    concurrency: Annotated[str | None, _Concurrency] = None,
    rounds: Annotated[int | None, _Rounds] = None,
    fill: Annotated[bool, _Fill] = False,
    seed: Annotated[int | None, _Seed] = None,
    case: Annotated[str | None, _Case] = None,
) -> None:
    """Compare clients of one server, each in a process of its own, round by round.

    Clients: shmlane-http, shmlane-unix, cpp-http, cpp-grpc (perf_analyzer),
    tritonclient-http, tritonclient-grpc; and on request shmlane-wire,
    tritonclient-http-wire, tritonclient-grpc-wire, tritonclient-grpc-set,
    tritonclient-grpc-register.

    Exit code 1 if a client could not be measured or got a wrong value, or if a limit
    of a case is not held.
    """
    from shmlane.bench import MATRIX, WIRE, make_plan

    _refuse_lost_output(json_file)
    if case is not None:
        rounds = rounds or (_QUICK_CASE_ROUNDS if quick else _CASE_ROUNDS)
        if case != "wire":
            _run_case(case, _names(payloads) or ["yolov8"], rounds, json_file)
            return
    plan = make_plan(
        contenders=_names(contenders),
        payloads=_names(payloads),
        concurrency=_numbers(concurrency),
        rounds=rounds,
        fill=fill,
        quick=quick,
        seed=seed,
        defaults=MATRIX if case is None else WIRE,
    )
    report = _compare(plan)
    _write_json(json_file, report.to_json())
    if not report.is_complete:
        raise typer.Exit(_FAILED)


def _compare(plan: Plan) -> Report:
    from shmlane.bench import own_servers, render_table, run
    from shmlane.server.cache import say

    with own_servers(plan) as servers:
        report = run(plan, servers=servers, progress=say)
    typer.echo(render_table(report), nl=False)
    return report


def _run_case(
    case: str, payloads: list[str], rounds: int, json_file: Path | None
) -> None:
    from shmlane.bench import make_plan

    cases: Mapping[str, Callable[[Plan, int], Measured]] = {
        "overhead": _overheads,
        "write": _writings,
        "preprocess": _preprocessings,
    }
    if case not in cases:
        known = ", ".join([*cases, "wire"])
        raise typer.BadParameter(f"no case {case!r}; known are {known}.")
    measured = cases[case](make_plan(payloads=payloads), rounds)
    for each in measured:
        typer.echo(each.render(), nl=False)
    _write_json(json_file, {case: [each.to_json() for each in measured]})
    if not all(each.is_held for each in measured):
        raise typer.Exit(_FAILED)


def _overheads(plan: Plan, rounds: int) -> Measured:
    from shmlane.bench import measure_overhead
    from shmlane.server import TritonServer, demo_models

    with TritonServer(demo_models("sink")) as server:
        return [
            measure_overhead(server.http_url, payload, rounds=rounds)
            for payload in plan.payloads
        ]


def _writings(plan: Plan, rounds: int) -> Measured:
    from shmlane.bench import measure_write

    return [measure_write(payload, rounds=rounds) for payload in plan.payloads]


def _preprocessings(plan: Plan, rounds: int) -> Measured:
    from shmlane.bench import measure_preprocess

    return [measure_preprocess(payload, rounds=rounds) for payload in plan.payloads]


def _write_json(file: Path | None, facts: Mapping[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(facts, indent=2) + "\n")


def _refuse_lost_output(file: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if file is not None and not os.access(file.absolute().parent, os.W_OK):
        raise typer.BadParameter(
            f"the folder of {file} cannot be written.", param_hint="--json"
        )


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _numbers(text: str | None) -> list[int] | None:
    names = _names(text)
    try:
        return None if names is None else [int(name) for name in names]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers such as 1,16.",
            param_hint="--concurrency",
        ) from None
