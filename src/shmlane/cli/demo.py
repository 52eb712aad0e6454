"""`shmlane demo`: its arguments, its JSON and its exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from shmlane.demo import require_extras

_FAILED = 1

_Output = typer.Option(file_okay=False, help="The folder for the picture.")
_Skip = typer.Option("--skip-bench", help="Leave out the table of clients.")
_Json = typer.Option("--json", help="Print one JSON document instead of text.")


def demo(
    output: Annotated[Path, _Output] = Path(),
    skip_bench: Annotated[bool, _Skip] = False,
    as_json: Annotated[bool, _Json] = False,
) -> None:
    """See it work: real networks on real pictures, checked, and clients compared.

    Exit code 1 if any check fails.
    """
    require_extras()
    _make_folder(output)
    from shmlane.demo import program

    outcome = program.run(output, quiet=as_json, with_bench=not skip_bench)
    if as_json:
        typer.echo(json.dumps(outcome.facts(), indent=2))
    if not outcome.passed:
        raise typer.Exit(_FAILED)


def _make_folder(folder: Path) -> None:
    """Before a server is started and networks are asked, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else "it cannot be written"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise typer.BadParameter(
            f"no picture can be put into {folder}: {reason}.", param_hint="--output"
        )
