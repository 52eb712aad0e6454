"""The C++ contender: Triton's own perf_analyzer, started once a round.

Owns its installation, its command line, its export, and its traps:

- Its shared memory keys are fixed, so `keys` keeps two runs on one machine apart, and
  the keys are removed before and after each run.
- It makes its server forget every region; the workers register again in each round.
- At times it loses a completion and never ends: there is a time limit, then SIGINT
  twice, then SIGKILL, and one more try.
- The throughput that it prints is rounded by whole seconds: the export has the start
  and end of every request, and that is what counts here.

Its CPU time is read from the kernel's clock of the process while it runs, and only
between two readings that lie inside its traffic, so neither its start nor writing the
export counts. Every request sends the same input block and all share one output block;
that block is compared with the input's last element once the run is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from shmlane.bench import keys
from shmlane.bench.plan import Cell, Contender
from shmlane.bench.results import Sample
from shmlane.bench.server_stats import Count, ServerStats
from shmlane.bench.workers.harness import percentiles_us
from shmlane.errors import ContenderFailed, UnsupportedPlatform
from shmlane.server.cache import cache_root, make_once
from shmlane.server.interpreters import install_folder
from shmlane.server.managed import WHEEL, find_installation

Times = np.ndarray[Any, np.dtype[np.int64]]

VERSION = "2.48.0"
_LIBRARIES = {
    "libb64.so.0d": "libb64-*.so.0d",
    "libcudart.so.12": "libcudart-*.so.12.*",
}
_POLL_S = 0.01
_PILOT_REQUESTS = 400
_PILOT_S = 0.5
_START_LIMIT_S = 5.0
_SLOWDOWN_LIMIT = 8
_TRIES = 2
_SIGNAL_GRACE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Tool:
    """An installed perf_analyzer and the folder of libraries that it lacks."""

    executable: Path
    libraries: Path


def install() -> Tool:
    """The perf_analyzer kept in the cache, installed on first use."""
    if platform.machine() != "x86_64":
        raise UnsupportedPlatform(
            f"perf_analyzer {VERSION} exists for x86_64; this is {platform.machine()}.",
            hint="Compare with other contenders there.",
        )
    folder = make_once(
        cache_root() / f"perf_analyzer-{VERSION}",
        _build,
        label=f"installing perf_analyzer {VERSION}",
        healthy=lambda folder: all((folder / name).exists() for name in _LIBRARIES),
    )
    return Tool(folder / "client" / "bin" / "perf_analyzer", folder)


def _build(folder: Path) -> None:
    install_folder(folder / "client", f"tritonclient=={VERSION}")
    server = find_installation()
    if server.is_managed:
        wheel = server.executable.parents[3]
    else:
        wheel = folder / "server"
        install_folder(wheel, WHEEL)
    for name, pattern in _LIBRARIES.items():
        (found,) = wheel.glob(f"nvidia_pytriton.libs/{pattern}")
        (folder / name).symlink_to(found)


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run left: all requests, CPU readings, and the two blocks' values."""

    starts_ns: Times
    ends_ns: Times
    cpu: Sequence[tuple[int, int]]
    sent: bytes
    received: bytes

    def after(self, settle: int) -> tuple[Times, Times]:
        """Start and end of each request but the first ones, which only warm up."""
        return self.starts_ns[settle:], self.ends_ns[settle:]


@dataclasses.dataclass(frozen=True)
class Pilot:
    """How one mode did; the server counted the requests."""

    mode: str
    p50_us: float
    requests_per_s: float


def best_of(pilots: Sequence[Pilot], concurrency: int) -> Pilot:
    """One request at a time is about latency, several are about pace."""
    if concurrency == 1:
        return min(pilots, key=lambda pilot: pilot.p50_us)
    return max(pilots, key=lambda pilot: pilot.requests_per_s)


class PerfAnalyzer:
    """One protocol in one cell; synchronous or not, whichever a pilot finds faster."""

    def __init__(
        self,
        tool: Tool,
        contender: Contender,
        cell: Cell,
        stats: ServerStats,
        *,
        url: str,
        traffic_s: float,
        pilots: int = 1,
        pilot: Pilot | None = None,
    ) -> None:
        self._tool = tool
        self._name = f"{contender.name} ({cell})"
        self._stats = stats
        self._settle = max(20, 4 * cell.concurrency)
        self._concurrency = cell.concurrency
        self._command = [
            str(tool.executable), "-m", stats.model, "-u", url,
            "-i", contender.endpoint,
            "--shape", "INPUT__0:" + ",".join(map(str, cell.payload.shape)),
            "--shared-memory", "system", "--output-shared-memory-size", "64",
            "--concurrency-range", str(cell.concurrency),
            "--percentile", "99", "-s", "999",
        ]  # fmt: skip
        self._traffic_s = traffic_s
        self._pilot = pilot or self._try_modes(pilots)
        wanted = int(self._pilot.requests_per_s * traffic_s)
        self._requests = self._settle + max(self._settle, wanted)

    def __repr__(self) -> str:
        return (
            f"<PerfAnalyzer {self._name}, {self._pilot.mode}, {self._requests} "
            "requests a round>"
        )

    @property
    def pilot(self) -> Pilot:
        """What was chosen; holds for other payloads, whose data never move."""
        return self._pilot

    def round(self) -> Sample:
        """One run; a second one if the first never ended. Null numbers after that."""
        for _ in range(_TRIES):
            sample = self._sample(self._pilot.mode, self._requests, self._traffic_s)
            if sample is not None:
                return sample
        return Sample(note=f"it did not end, {_TRIES} times in a row")

    def close(self) -> None:
        """Nothing runs between rounds."""

    def _try_modes(self, pilots: int) -> Pilot:
        tried = (self._try(mode) for mode in ("--sync", "--async") * pilots)
        ended = [pilot for pilot in tried if pilot is not None]
        if not ended:
            raise ContenderFailed(
                f"perf_analyzer never ended for {self._name}, in either mode.",
                hint="See what else keeps this machine busy and try again.",
            )
        return best_of(ended, self._concurrency)

    def _try(self, mode: str) -> Pilot | None:
        # At the pace of many in flight, few requests would be over in no time.
        requests = self._settle + max(_PILOT_REQUESTS, 100 * self._concurrency)
        sample = self._sample(mode, requests, _PILOT_S)
        if sample is None or not (sample.p50_us and sample.requests_per_s):
            return None
        return Pilot(mode, sample.p50_us, sample.requests_per_s)

    def _sample(self, mode: str, requests: int, expected_s: float) -> Sample | None:
        """One run beside the server's own count of it; None if it never ended."""
        before = self._stats.settled()
        run = self._run(mode, requests, expected_s)
        if run is None:
            return None
        return make_sample(run, self._stats.settled() - before, self._settle)

    def _run(self, mode: str, requests: int, expected_s: float) -> Run | None:
        """One run under the machine's lock, or None if it did not end by itself."""
        with (
            keys.held(),
            tempfile.TemporaryDirectory(prefix="shmlane-bench-") as scratch,
        ):
            export = Path(scratch) / "export.json"
            options = [mode, "--request-count", str(requests)]
            keys.remove()
            try:
                return self._watched(
                    [*options, "--profile-export-file", str(export)],
                    export,
                    limit_s=_START_LIMIT_S + _SLOWDOWN_LIMIT * expected_s,
                )
            finally:
                keys.remove()

    def _watched(
        self, options: Sequence[str], export: Path, *, limit_s: float
    ) -> Run | None:
        with (
            tempfile.TemporaryFile() as log,
            contextlib.ExitStack() as opened,
            _process([*self._command, *options], self._tool, log) as process,
        ):
            blocks = [
                _Block(keys.FOLDER / name, opened) for name in (keys.INPUT, keys.OUTPUT)
            ]
            cpu = _watch(process, blocks, limit_s)
            if cpu is None:
                return None
            if process.returncode != 0:
                log.seek(0)
                raise ContenderFailed(
                    f"perf_analyzer ended with {process.returncode} for {self._name}.",
                    hint=_last_lines(log.read()),
                    exit_code=process.returncode,
                )
            starts, ends = _read_export(export)
            sent, received = blocks
            return Run(starts, ends, cpu, sent.read(-4), received.read(0))


class _Block:
    """One of perf_analyzer's blocks: opened while its name exists, readable after."""

    def __init__(self, path: Path, opened: contextlib.ExitStack) -> None:
        self._path = path
        self._opened = opened
        self._file: IO[bytes] | None = None

    def try_open(self) -> None:
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = self._opened.enter_context(self._path.open("rb"))

    def read(self, offset: int) -> bytes:
        """Four bytes, from the end if negative; nothing if it was never seen."""
        if self._file is None:
            return b""
        self._file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        return self._file.read(4)


@contextlib.contextmanager
def _process(
    command: Sequence[str], tool: Tool, log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LD_LIBRARY_PATH": str(tool.libraries)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _watch(
    process: subprocess.Popen[bytes], blocks: Sequence[_Block], limit_s: float
) -> list[tuple[int, int]] | None:
    """Readings of wall and CPU clock until it ends; None if it had to be ended."""
    # The kernel's own clock of another process (clock_getcpuclockid does the same).
    cpu_clock = (~process.pid << 3) | 2
    readings = []
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            _end(process)
            return None
        for block in blocks:
            block.try_open()
        with contextlib.suppress(OSError):
            readings.append((time.time_ns(), time.clock_gettime_ns(cpu_clock)))
        time.sleep(_POLL_S)
    return readings


def _end(process: subprocess.Popen[bytes]) -> None:
    """The first SIGINT asks it to finish, which a hung one never does."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SIGNAL_GRACE_S)
    process.wait()


def _read_export(path: Path) -> tuple[Times, Times]:
    """Start and end of every request, in order of their start."""
    requests = json.loads(path.read_bytes())["experiments"][0]["requests"]
    pairs = [(each["timestamp"], each["response_timestamps"][0]) for each in requests]
    times = np.array(sorted(pairs), np.int64)
    return times[:, 0], times[:, 1]


def _last_lines(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return " | ".join(line for line in lines[-4:] if "WARNING" not in line)


def make_sample(run: Run, counted: Count, settle: int) -> Sample:
    """What the server counted, timed by the export less its first `settle` requests."""
    starts, ends = run.after(settle)
    window_s = float(ends.max() - starts[0]) / 1e9
    notes = []
    if counted.inferences != len(run.ends_ns):
        notes.append(
            f"exported {len(run.ends_ns)}, the server counted {counted.inferences}"
        )
    if counted.failures:
        notes.append(f"{counted.failures} requests failed")
    # The export's times place the requests that the server counted in the window.
    settled = counted.inferences * len(ends) / len(run.ends_ns)
    return Sample(
        **percentiles_us(ends - starts),
        requests_per_s=settled / window_s,
        client_cpu_us=_cpu_per_request_us(run, starts[0]),
        server_us=counted.mean_us,
        verified=_verdict(run, counted),
        note="; ".join(notes),
    )


def _cpu_per_request_us(run: Run, began_ns: int) -> float | None:
    ended = run.ends_ns.max()
    inside = [(at, cpu) for at, cpu in run.cpu if began_ns <= at <= ended]
    if len(inside) < 2:
        return None
    (first, cpu_before), (last, cpu_after) = inside[0], inside[-1]
    done = int(np.count_nonzero((run.ends_ns > first) & (run.ends_ns <= last)))
    return (cpu_after - cpu_before) / done / 1e3 if done else None


def _verdict(run: Run, counted: Count) -> bool | None:
    """None where the blocks could not be seen, or hold zeros before any reply too."""
    if not run.sent.strip(b"\0") or not run.received:
        return None
    return run.sent == run.received and not counted.failures
