"""The list of commands.

Owns nothing but their registration; refuses to import what only one of them needs,
so that `shmlane --help` stays quick.
"""

from __future__ import annotations

import typer

from shmlane.cli import bench, demo, regions, serve

app = typer.Typer(
    name="shmlane",
    help="Triton inference through shared memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Triton inference through shared memory."""


app.command()(bench.bench)
app.command()(demo.demo)
app.command()(serve.serve)
app.command()(regions.ls)
app.command()(regions.clean)
