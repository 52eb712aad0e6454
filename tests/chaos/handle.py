"""The conductor's end of one client process.

Owns starting it, its orders and messages, stopping it in its tracks, and its end.
Refuses to let one outlive the conductor.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

from tests.chaos.client import FREE_WITHIN, HANG, Plan
from tests.chaos.machine import Usage

_ROOT = Path(__file__).parents[2]
_PROGRAM = "tests.chaos.client"
_DONE_WITHIN = HANG + FREE_WITHIN + 10
_STACKS_WITHIN = 5.0


def clock() -> str:
    """The time of day as the server's log has it."""
    return f"{datetime.now(tz=UTC):%H:%M:%S.%f}"


class ChaosFailure(AssertionError):
    """Something that no fault excuses."""


class ClientProcess:
    """A client that runs, is stopped, or was killed. Used by the conductor's thread.

    Start it from a thread that lives as long as it should: the kernel kills it then.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.number = plan.number
        self.is_stopped = False
        # Stopped before it can end with the conductor, it would outlive it for ever.
        self.is_guarded = False
        self.is_ready = False
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.errors = folder / f"client-{plan.number}.stderr"
        with self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "error",
                    "-m",
                    _PROGRAM,
                    json.dumps(asdict(plan)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=_ROOT,
                # Ctrl-C is for the conductor, which ends the clients itself.
                start_new_session=True,
                bufsize=0,
            )
        self._orders = cast("IO[bytes]", self._process.stdin)
        self._done: queue.SimpleQueue[tuple[str, Usage]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    # --- faults -----------------------------------------------------------------------

    def stop(self) -> None:
        self.is_stopped = True
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.is_stopped = False
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._tidy()

    # --- orders -----------------------------------------------------------------------

    def order(self, word: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(word.encode() + b"\n")

    def await_done(self, word: str) -> Usage:
        """What it uses now that an order is carried out."""
        done = ""
        while done != word:
            try:
                done, usage = self._done.get(timeout=_DONE_WITHIN)
            except queue.Empty:
                raise ChaosFailure(
                    f"client {self.number} does not carry out {word!r}:\n"
                    f"{self.stacks()}"
                ) from None
        return usage

    def await_end(self) -> None:
        """Wait for its end after the order "end"; it must be a good one."""
        try:
            code = self._process.wait(_DONE_WITHIN)
        except subprocess.TimeoutExpired:
            raise ChaosFailure(
                f"client {self.number} does not end:\n{self.stacks()}"
            ) from None
        self._tidy()
        if code or self.said:
            raise ChaosFailure(f"client {self.number} ended with {code}:\n{self.said}")

    @property
    def said(self) -> str:
        """What it wrote to stderr."""
        return self.errors.read_text(errors="replace")

    def stacks(self) -> str:
        """Where all its threads are now, after what it said before."""
        if not self.has_ended:
            self.go_on()
            self._process.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + _STACKS_WITHIN
            while "most recent call first" not in self.said:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        return self.said or "(it said nothing)"

    # --- messages ---------------------------------------------------------------------

    def _read(self) -> None:
        """In a thread of its own, until the client has ended."""
        for line in cast("IO[bytes]", self._process.stdout):
            # The last line of a client that was killed may be cut off.
            if line.endswith(b"\n"):
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "counts":
            self.counts = Counter(message["counts"])
        elif kind == "complaint":
            what = message["what"]
            self.complaints.append(f"{clock()} client {self.number}: {what}")
        elif kind == "done":
            self._done.put((message["order"], Usage(**message["usage"])))
        elif kind == "guarded":
            self.is_guarded = True
        else:
            self.is_ready = True

    def _tidy(self) -> None:
        self._reader.join()
        for pipe in (self._orders, cast("IO[bytes]", self._process.stdout)):
            pipe.close()

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else "stopped" if self.is_stopped else "runs"
        return f"<ClientProcess {self.number} pid {self.pid} {state}>"
