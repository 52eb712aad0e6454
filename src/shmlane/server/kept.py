"""A child process that cannot be left behind.

Owns the handle on a keeper (`keeper.py`) and through it one server: starting, asking
for an orderly end, killing, and knowing whether it lives. Refuses to act in a forked
child of the process that started the server: there the handle is only a memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from shmlane.errors import ServerStartFailed

_KEEPER = Path(__file__).with_name("keeper.py")
_GRACE = 10.0
_KEEPER_MARGIN = 10.0


@dataclasses.dataclass(frozen=True)
class Leavings:
    """What to remove once the process has ended, however it ended."""

    files: Sequence[str] = ()
    shm_prefix: str = ""


class KeptProcess:
    """A running command in a process group of its own; its output goes to `log`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        leavings: Leavings,
    ) -> None:
        self._owner = os.getpid()
        plan = {
            "command": list(command),
            "log": str(log),
            "owner": self._owner,
            "grace": _GRACE,
            "unlink": list(leavings.files),
            "shm_prefix": leavings.shm_prefix,
        }
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_KEEPER), json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self._orders = cast("IO[bytes]", self._keeper.stdin)
        self._replies = cast("IO[bytes]", self._keeper.stdout)
        self.pid = self._read_pid()

    def __repr__(self) -> str:
        state = "running" if self.is_alive else f"ended with {self.exit_code}"
        return f"<KeptProcess pid {self.pid}, {state}>"

    @property
    def is_alive(self) -> bool:
        """Whether the command runs, or is being cleared up after."""
        if os.getpid() != self._owner:
            return False
        return self._keeper.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The command's exit code (128 + n after signal n), None while it runs."""
        return self._keeper.returncode

    def stop(self) -> None:
        """Ask for an orderly end and wait; killed when that takes too long."""
        self._order(b"T")

    def kill(self) -> None:
        """Kill with SIGKILL and wait until the whole group is gone."""
        self._order(b"K")

    def _order(self, letter: bytes) -> None:
        if os.getpid() != self._owner:
            return
        if self._keeper.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._orders.write(letter)
        try:
            self._keeper.wait(_GRACE + _KEEPER_MARGIN)
        except subprocess.TimeoutExpired:
            self._keeper.send_signal(signal.SIGKILL)
            self._keeper.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._orders.close()
        self._replies.close()

    def _read_pid(self) -> int:
        line = self._replies.readline()
        if line.strip().isdigit():
            return int(line)
        code = self._keeper.wait()
        self._close_pipes()
        raise ServerStartFailed(
            f"the process that keeps a server ended with {code} before starting it.",
            hint="Its message is on stderr.",
        )
