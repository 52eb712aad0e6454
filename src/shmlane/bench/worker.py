"""A contender that runs in a process of its own and answers in JSON lines.

Owns that process from its start to its end, and one round of it as the server and the
client saw it. Refuses to wait without a limit: a worker that breaks off or falls silent
is `ContenderFailed`, with the end of what it printed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from shmlane.bench.plan import Cell, Contender
from shmlane.bench.report import METRICS, Sample
from shmlane.bench.server_stats import Count, ServerStats
from shmlane.errors import ContenderFailed
from shmlane.server.managed import isolated_python
from shmlane.server.programs import clean_environment

TRITONCLIENT = "tritonclient[grpc,http]==2.73.0"
_BENCH = Path(__file__).parent
_START_TIMEOUT = 60.0
_ROUND_MARGIN = 30.0
_END_TIMEOUT = 10.0
_SETTLE_S = 0.05
_LONGEST_LOG = 1 << 16


@dataclasses.dataclass(frozen=True)
class Program:
    """How to start a worker: a command to append its specification to."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None = None


def shmlane_program() -> Program:
    """The worker in this environment, as shmlane is installed in it."""
    module = "shmlane.bench.workers.shmlane_worker"
    return Program((sys.executable, "-m", module), dict(os.environ))


def tritonclient_program() -> Program:
    """The worker in an environment that has tritonclient, made on first use."""
    python = isolated_python(
        "tritonclient", [TRITONCLIENT], progress_label=f"installing {TRITONCLIENT}"
    )
    module = "workers.tritonclient_worker"
    return Program((str(python), "-m", module), clean_environment(), _BENCH)


class Worker:
    """One contender in one cell, kept for all its rounds."""

    def __init__(
        self,
        program: Program,
        contender: Contender,
        cell: Cell,
        stats: ServerStats,
        *,
        url: str,
        traffic_s: float,
    ) -> None:
        self._name = f"{contender.name} ({cell})"
        self._stats = stats
        self._traffic_s = traffic_s
        specification = {
            "contender": contender.name,
            "url": url,
            "model": stats.model,
            "shape": cell.payload.shape,
            "concurrency": cell.concurrency,
            "fill": cell.fill,
            "way": contender.way,
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [*program.command, json.dumps(specification)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=program.folder,
            env=program.environment,
            # Ctrl-C is for the program that runs the benchmark: it ends its workers.
            start_new_session=True,
        )
        self._orders = cast("IO[bytes]", self._process.stdin)
        self._replies = cast("IO[bytes]", self._process.stdout)
        self._unread = b""
        try:
            self._read_reply(_START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        code = self._process.poll()
        state = "running" if code is None else f"ended with {code}"
        return f"<Worker {self._name}, pid {self._process.pid}, {state}>"

    def round(self) -> Sample:
        """Register again, settle, then measure for as long as the plan says."""
        self._ask("prepare", _SETTLE_S)
        before = self._stats.settled()
        reply = self._ask("run", self._traffic_s)
        return make_sample(reply, self._stats.settled() - before)

    def close(self) -> None:
        """End the worker and wait for it; it takes back what it made on the server."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._wait_for_end()
        self._replies.close()
        self._log.close()

    def _wait_for_end(self) -> None:
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: str, seconds: float) -> dict[str, Any]:
        order = json.dumps({"do": what, "seconds": seconds}) + "\n"
        try:
            self._orders.write(order.encode())
            self._orders.flush()
        except BrokenPipeError:
            raise self._failure("broke off") from None
        return self._read_reply(seconds + _ROUND_MARGIN)

    def _read_reply(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                raise self._failure(f"did not answer within {timeout:.0f} s")
            part = os.read(self._replies.fileno(), 65536)
            if not part:
                self._wait_for_end()
                raise self._failure("broke off")
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        reply = cast("dict[str, Any]", json.loads(line))
        if error := reply.get("error"):
            self._wait_for_end()
            raise self._failure(f"failed with {error}")
        return reply

    def _failure(self, what: str) -> ContenderFailed:
        # Reading by position: the worker writes where a seek here would put it.
        log = os.pread(self._log.fileno(), _LONGEST_LOG, 0)
        return ContenderFailed(
            f"the worker of {self._name} {what.rstrip('.')}.",
            hint="The context of this error has all that it printed, as `log`.",
            contender=self._name,
            exit_code=self._process.poll(),
            log=log.decode(errors="replace"),
        )


def make_sample(reply: Mapping[str, Any], counted: Count) -> Sample:
    """What a worker timed, with what the server counted over the same requests."""
    window_s = reply["window_ns"] / 1e9
    requests = reply["requests"]
    notes = []
    if reply["wrong"]:
        notes.append(f"{reply['wrong']} of {requests} replies were wrong")
    if counted.inferences != requests:
        notes.append(f"sent {requests}, the server counted {counted.inferences}")
    return Sample(
        **{name: reply[name] for name in METRICS if name in reply},
        requests_per_s=counted.inferences / window_s,
        client_cpu_us=reply["cpu_ns"] / requests / 1e3,
        server_us=counted.mean_us,
        verified=reply["wrong"] == 0,
        note="; ".join(notes),
    )
