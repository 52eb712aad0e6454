"""The `shmlane` command: entry point, messages and exit codes.

Each command is a function in a module of its own here, listed in `app`. Owns what a
failure looks like from the shell: one message on stderr, and 0 for done, 1 for failed,
2 for called wrongly (a missing extra counts as that), 130 for interrupted. Refuses to
show a traceback for anything shmlane raises on purpose.
"""

from __future__ import annotations

import sys

from shmlane.errors import ShmlaneError, UsageError

__all__ = ["main"]

FAILED = 1
CALLED_WRONGLY = 2
INTERRUPTED = 130

_EXTRA_MISSING = """\
shmlane: the command line needs {name}, which is not installed.
Install it with: pip install 'shmlane[cli]'
"""


def main() -> None:
    """Run the command that the arguments name and exit with its code."""
    try:
        from shmlane.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(_EXTRA_MISSING.format(name=error.name))
        sys.exit(CALLED_WRONGLY)
    try:
        app(prog_name="shmlane")
    except ShmlaneError as error:
        sys.stderr.write(f"shmlane: {error}\n")
        sys.exit(CALLED_WRONGLY if isinstance(error, UsageError) else FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
