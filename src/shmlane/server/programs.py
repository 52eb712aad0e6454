"""Programs that run to their end: other interpreters, installers, converters.

Owns their environment, their time limit, and the error that shows the end of what a
failed one printed. Refuses to run anything that stays: that is for `kept`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shmlane.errors import InstallFailed

_SHOWN_LINES = 12
_MISLEADING = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
    "VIRTUAL_ENV",
)


def clean_environment() -> dict[str, str]:
    """The process environment less what would lead another Python astray."""
    return {k: v for k, v in os.environ.items() if k not in _MISLEADING}


def run_program(
    command: Sequence[str | Path],
    *,
    name: str,
    timeout: float,
    if_slow: str,
    if_failed: str,
) -> None:
    """Run to the end; raise if that takes longer than `timeout` or fails.

    The errors call the program `name`; `if_slow` and `if_failed` are their hints.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            env=clean_environment(),
        )
    except subprocess.TimeoutExpired:
        raise InstallFailed(
            f"{name} was not done after {timeout:.0f} s.",
            hint=if_slow,
            timeout=timeout,
        ) from None
    if done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-_SHOWN_LINES:])
        raise InstallFailed(
            f"{name} ended with exit code {done.returncode}:\n{tail}",
            hint=f"\n{if_failed}",
            exit_code=done.returncode,
            log=tail,
        )


def what_it_prints(command: Sequence[str], *, timeout: float) -> str:
    """What a quick question to a program is answered; nothing if it does not run."""
    try:
        reply = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=clean_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return reply.stdout
