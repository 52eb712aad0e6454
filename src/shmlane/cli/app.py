"""The list of commands.

Owns their registration and what their helps have in common; refuses to import what only
one of them needs, so that `shmlane --help` stays quick.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

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


class _FlagsWithoutValues:
    """Helps show no type for flags: `--yes <bool>` reads as if it took a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        given: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in given:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return given


class _Command(_FlagsWithoutValues, TyperCommand):
    pass


class _Group(_FlagsWithoutValues, TyperGroup):
    pass


app = typer.Typer(
    name="shmlane",
    cls=_Group,
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


for command in (bench.bench, demo.demo, serve.serve, regions.ls, regions.clean):
    app.command(cls=_Command)(command)
