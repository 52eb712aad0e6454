"""`shmlane bench`: its arguments, its output and its exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shmlane.bench import Measured, Plan

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
    "over one np.copyto. preprocess: image_into over what is usual. handoff: a slot "
    "sent by another process. gil: threads against processes. many: streams and "
    "asyncio beside the C++ clients. wire: the clients without shared memory.",
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
    tritonclient-http, tritonclient-grpc; and on request shmlane-async, shmlane-stream,
    shmlane-wire, tritonclient-http-wire, tritonclient-grpc-wire, tritonclient-grpc-set,
    tritonclient-grpc-register.

    Exit code 1 if a client could not be measured or got a wrong value, or if a limit
    is not held.
    """
    from shmlane.bench import MATRIX, find_case, make_plan

    _refuse_lost_output(json_file)
    chosen = None if case is None else find_case(case)
    if chosen is not None:
        rounds = rounds or (_QUICK_CASE_ROUNDS if quick else _CASE_ROUNDS)
    plan = make_plan(
        contenders=_names(contenders),
        payloads=_names(payloads),
        concurrency=_numbers(concurrency),
        rounds=rounds,
        fill=fill,
        quick=quick,
        seed=seed,
        defaults=MATRIX if chosen is None else chosen.defaults,
    )
    if chosen is None or chosen.measure is None:
        is_held = _compare(plan, json_file)
    else:
        is_held = _show(str(case), chosen.measure(plan), json_file)
    if not is_held:
        raise typer.Exit(_FAILED)


def _compare(plan: Plan, json_file: Path | None) -> bool:
    from shmlane.bench import own_servers, render_table, run
    from shmlane.server.cache import say

    with own_servers(plan) as servers:
        report = run(plan, servers=servers, progress=say)
    typer.echo(render_table(report), nl=False)
    _write_json(json_file, report.to_json())
    return report.is_held


def _show(case: str, measured: Sequence[Measured], json_file: Path | None) -> bool:
    for each in measured:
        typer.echo(each.render(), nl=False)
    _write_json(json_file, {case: [each.to_json() for each in measured]})
    return all(each.is_held for each in measured)


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
