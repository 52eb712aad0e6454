"""`shmlane ls` and `shmlane clean`: the shared memory regions of this machine.

Owns how they are shown. Refuses to remove anything unless told `--yes`.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shmlane.inventory import RegionInfo, clean_up, list_regions

_Json = typer.Option("--json", help="Print JSON.")
_Yes = typer.Option("--yes", help="Remove; without it they are only listed.")

_OWNERS = {True: "alive", False: "dead", None: "not ours to ask"}


def ls(as_json: Annotated[bool, _Json] = False) -> None:
    """List the shared memory regions of shmlane on this machine.

    Shows size, owner, server and under how many names the server has it registered.
    """
    infos = list_regions()
    if as_json:
        typer.echo(json.dumps([info.to_json() for info in infos]))
    elif infos:
        _show(infos)
    else:
        typer.echo("no regions")


def clean(
    yes: Annotated[bool, _Yes] = False, as_json: Annotated[bool, _Json] = False
) -> None:
    """Remove regions whose owner is dead, here and on their servers.

    Never touches a region in use, or files of other users.
    """
    if not yes:
        dead = [info for info in list_regions() if info.alive is False]
        if as_json:
            typer.echo(json.dumps({"dead": [info.to_json() for info in dead]}))
        elif dead:
            _show(dead)
            typer.echo("nothing was removed; `shmlane clean --yes` removes them")
        else:
            typer.echo("nothing to remove")
        return
    removed = clean_up(force=True)
    if as_json:
        typer.echo(json.dumps(removed.to_json()))
        return
    for name in removed.files:
        typer.echo(f"removed {name}")
    for name in removed.registrations:
        typer.echo(f"unregistered {name}")
    if not removed.files:
        typer.echo("nothing to remove")


def _show(infos: list[RegionInfo]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("region", "size", "owner", "model", "registered"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for info in infos:
        table.add_row(
            info.name,
            _size(info.nbytes),
            f"{_OWNERS[info.alive]}{f', pid {info.pid}' if info.pid else ''}",
            f"{info.model} at {info.server}" if info.server else "",
            _registered(info),
        )
    Console(soft_wrap=False).print(table)


def _registered(info: RegionInfo) -> str:
    if info.registered is None:
        return "server silent"
    return f"{info.registered} times" if info.registered else "no"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
