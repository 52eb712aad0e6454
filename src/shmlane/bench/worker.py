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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from shmlane.bench.plan import Cell, Contender
from shmlane.bench.results import METRICS, Sample
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
# In which every worker has read its order to begin.
_ORDER_NS = 2_000_000


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
            "flow": contender.flow,
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
        return one_round([self], self._stats)

    def prepare(self) -> None:
        """Register again, and send a little."""
        self._order(do="prepare", seconds=_SETTLE_S)
        self._read_reply(_SETTLE_S + _ROUND_MARGIN)

    def begin(self, at_ns: int) -> None:
        """Have it send for as long as the plan says, from that time on."""
        self._order(do="run", seconds=self._traffic_s, at_ns=at_ns)

    def finish(self) -> dict[str, Any]:
        """What came of what was begun."""
        return self._read_reply(self._traffic_s + _ROUND_MARGIN)

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

    def _order(self, **facts: Any) -> None:
        try:
            self._orders.write(json.dumps(facts).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            raise self._failure("broke off") from None

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


def one_round(workers: Sequence[Worker], stats: ServerStats) -> Sample:
    """One turn of all these workers at once, as if they were one client."""
    for worker in workers:
        worker.prepare()
    before = stats.settled()
    at_ns = time.perf_counter_ns() + _ORDER_NS * len(workers)
    for worker in workers:
        worker.begin(at_ns)
    replies = [worker.finish() for worker in workers]
    return make_sample(replies, stats.settled() - before)


def make_sample(replies: Sequence[Mapping[str, Any]], counted: Count) -> Sample:
    """What workers timed, with what the server counted over the same requests.

    Latencies of several workers are not put together: there are none then.
    """
    ended_ns = max(reply["ended_ns"] for reply in replies)
    window_s = (ended_ns - min(reply["began_ns"] for reply in replies)) / 1e9
    requests, wrong, cpu_ns = (
        sum(reply[name] for reply in replies)
        for name in ("requests", "wrong", "cpu_ns")
    )
    notes = []
    if wrong:
        notes.append(f"{wrong} of {requests} replies were wrong")
    if counted.inferences != requests:
        notes.append(f"sent {requests}, the server counted {counted.inferences}")
    only = replies[0] if len(replies) == 1 else {}
    return Sample(
        **{name: only[name] for name in METRICS if name in only},
        requests_per_s=counted.inferences / window_s,
        client_cpu_us=cpu_ns / requests / 1e3,
        server_us=counted.mean_us,
        verified=wrong == 0,
        note="; ".join(notes),
    )
