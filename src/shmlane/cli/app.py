"""The list of commands.

Owns nothing but their registration; refuses to import what only one of them needs,
so that `shmlane --help` stays quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from shmlane import __version__
from shmlane.cli import bench, demo, regions, serve


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shmlane {__version__}")
        raise typer.Exit


_Version = typer.Option(
    "--version",
    callback=_show_version,
    is_eager=True,
    help="Show the version and exit.",
)

app = typer.Typer(
    name="shmlane",
    help="Triton inference through shared memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # The one way of typer to fill lines anew: docstrings are broken for the source.
    rich_markup_mode="markdown",
)


@app.callback()
def _commands(version: Annotated[bool, _Version] = False) -> None:
    """Triton inference through shared memory."""


app.command()(bench.bench)
app.command()(demo.demo)
app.command()(serve.serve)
app.command()(regions.ls)
app.command()(regions.clean)
