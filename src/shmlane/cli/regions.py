"""`shmlane ls` and `shmlane clean`: the shared memory regions of this machine.

Owns how they are shown: a line for each, because names are there to be copied and lines
to be filtered; in a terminal that is too narrow, servers and who has which slots have
lines of their own. Refuses to remove anything unless told `--yes`, and to have a
terminal obey what somebody wrote into a file or its name.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from shmlane.inventory import (
    ANY_SERVER,
    Cleaned,
    RegionInfo,
    clean_up,
    list_regions,
)

_Json = typer.Option("--json", help="Print JSON.")
_Yes = typer.Option("--yes", help="Remove; without it they are only listed.")
_Force = typer.Option(
    "--force", help="Remove files also where a server may still know them."
)
_Header = typer.Option(
    metavar="NAME=VALUE", help="Sent to servers that restrict an API; repeatable."
)

_FAILED = 1
_UNKNOWN = "-"
_OWNERS = {True: "alive", False: "dead", None: _UNKNOWN}
_HEADINGS = ("region", "size", "owner", "model", "registered", "server")
_KEPT = (
    "what was kept tells whose the registrations on its server are: try again when it"
    " answers (--header for a restricted API), or remove it with --force"
)


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
    yes: Annotated[bool, _Yes] = False,
    force: Annotated[bool, _Force] = False,
    header: Annotated[list[str] | None, _Header] = None,
    as_json: Annotated[bool, _Json] = False,
) -> None:
    """Remove regions whose owner is dead, here and on their servers.

    Never touches a region in use, or files of other users. With --yes it ends with 1
    where something had to be kept; without, always with 0.
    """
    headers = {ANY_SERVER: _parsed(header or [])}
    if not yes:
        _show_dead(as_json)
        return
    cleaned = clean_up(force=force, headers=headers)
    if as_json:
        typer.echo(json.dumps(cleaned.to_json()))
    else:
        _tell(cleaned)
    if cleaned.kept:
        raise typer.Exit(_FAILED)


def _show_dead(as_json: bool) -> None:
    dead = [info for info in list_regions() if info.is_own and info.alive is False]
    if as_json:
        typer.echo(json.dumps({"dead": [info.to_json() for info in dead]}))
    elif dead:
        _show(dead)
        typer.echo("nothing was removed; `shmlane clean --yes` removes them")
    else:
        typer.echo("nothing to remove")


def _tell(cleaned: Cleaned) -> None:
    lines = [
        *(f"removed {name}" for name in cleaned.files),
        *(f"unregistered {name}" for name in cleaned.registrations),
        *(f"kept {name}: {reason}" for name, reason in cleaned.kept.items()),
    ]
    for line in lines:
        typer.echo(_harmless(line))
    if cleaned.kept:
        typer.echo(_KEPT, err=True)
    elif not cleaned.files:
        typer.echo("nothing to remove")


def _parsed(headers: Sequence[str]) -> dict[str, str]:
    for text in headers:
        if "=" not in text.strip("="):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE.")
    return dict(text.split("=", 1) for text in headers)


def _show(infos: Sequence[RegionInfo]) -> None:
    lines = _aligned([_HEADINGS, *map(_row, infos)])
    if sys.stdout.isatty() and _is_too_wide(lines):
        lines = _folded(infos)
    for line in lines:
        typer.echo(line)


def _folded(infos: Sequence[RegionInfo]) -> list[str]:
    """The rest below each region; a server below all of them where it is the same."""
    heading, *lines = _aligned([row[:-1] for row in (_HEADINGS, *map(_brief, infos))])
    servers = [_brief(info)[-1] for info in infos]
    is_one = len(set(servers)) == 1
    folded = [heading]
    for line, info, server in zip(lines, infos, servers, strict=True):
        folded.append(line)
        folded.extend(f"  {each}" for each in _holders(info))
        if server != _UNKNOWN and not is_one:
            folded.append(f"  server: {server}")
    return [*folded, f"server: {servers[0]}"] if is_one else folded


def _is_too_wide(lines: Sequence[str]) -> bool:
    return max(map(len, lines)) > shutil.get_terminal_size().columns


def _row(info: RegionInfo) -> tuple[str, ...]:
    name, size, owner, *others = _brief(info)
    return (name, size, "; ".join([owner, *_holders(info)]), *others)


def _brief(info: RegionInfo) -> tuple[str, ...]:
    """A row without who has which slots."""
    cells = (
        info.name,
        _size(info.nbytes),
        f"{_OWNERS[info.alive]} {info.pid or ''}".rstrip(),
        info.model or _UNKNOWN,
        _registered(info),
        info.server or _UNKNOWN,
    )
    return tuple(map(_harmless, cells))


def _harmless(text: str) -> str:
    """One line of characters that a terminal shows; others as Python writes them."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _holders(info: RegionInfo) -> list[str]:
    """Who has how many of its slots."""
    parts = []
    for what, holders in (("claimed by", info.claims), ("lent to", info.lent)):
        if holders:
            pids = sorted({*holders.values()})
            parts.append(f"{len(holders)} {what} {', '.join(map(str, pids))}")
    return parts


def _registered(info: RegionInfo) -> str:
    if info.server_trouble:
        return f"server {info.server_trouble}"
    if info.registered is None:
        return _UNKNOWN
    return {0: "no", 1: "1 name"}.get(info.registered, f"{info.registered} names")


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
