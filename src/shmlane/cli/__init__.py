"""The `shmlane` command: entry point, messages and exit codes.

Each command is a function in a module of its own here, listed in `app`. Owns what a
failure looks like from the shell: one message on stderr, and 0 for done, 1 for failed,
2 for called wrongly (a missing extra counts as that), 130 for interrupted, 143 for
ended by SIGTERM, after which nothing is left running either. Refuses to show a
traceback for anything shmlane raises on purpose.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from shmlane.errors import ShmlaneError, UsageError

__all__ = ["main"]

FAILED = 1
CALLED_WRONGLY = 2
INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM

_EXTRA_MISSING = """\
shmlane: the command line needs {name}, which is not installed.
Install it with: pip install 'shmlane[cli]'
"""


def _terminate(number: int, _frame: object) -> NoReturn:
    """End in good order, as with Ctrl-C; what ends meanwhile is not disturbed."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(TERMINATED)


def main() -> None:
    """Run the command that the arguments name and exit with its code."""
    signal.signal(signal.SIGTERM, _terminate)
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
