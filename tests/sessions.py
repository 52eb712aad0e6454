"""What the tests of sessions share: the models they ask for, and how they look at it.

Owns the repository of Python models, clients in processes of their own, and the state
that must hold after every fault. Refuses to start servers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shmlane import Connection, Lease, Session, SessionStats, Timeouts
from shmlane.datatypes import DTYPES
from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.server import TritonServer
from tests.polling import eventually

Array = npt.NDArray[Any]
SHM = Path("/dev/shm")
CLIENT_TIMEOUT = 30.0

# As the kernel tells it.
_ESTABLISHED = "01"

_PROGRAM = Path(__file__).with_name("session_model.py")
_ROWS = """\
max_batch_size: 8
input [
  { name: "VALUES" data_type: TYPE_FP32 dims: [ 3 ] },
  { name: "MARKS" data_type: TYPE_INT8 dims: [ 2 ] optional: true }
]
output [
  { name: "SUMS" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "MARKED" data_type: TYPE_INT8 dims: [ 2 ] }
]
"""
_MOODY = """\
input [{ name: "ORDER" data_type: TYPE_INT32 dims: [ 3 ] }]
output [{ name: "REPLY" data_type: TYPE_INT32 dims: [ -1 ] }]
"""


def write_models(folder: Path, *names: str) -> Path:
    """A model repository with the named models: `rows`, `types`, `moody`."""
    configs = {"rows": _ROWS, "types": _types(), "moody": _MOODY}
    for name in names:
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_bytes(_PROGRAM.read_bytes())
        (folder / name / "config.pbtxt").write_text(
            f'name: "{name}"\nbackend: "python"\n{configs[name]}'
        )
    return folder


def _types() -> str:
    """One input and one output of each datatype."""
    return "\n".join(
        f'{kind} [{{ name: "{prefix}_{datatype}" data_type: TYPE_{datatype}'
        " dims: [ -1 ] }]"
        for kind, prefix in (("input", "IN"), ("output", "OUT"))
        for datatype in DTYPES
        # The Python backend has no NumPy type for it.
        if datatype != "BF16"
    )


# --- asking ---------------------------------------------------------------------------


def frame(last: float, *, size: int = 8) -> Array:
    """An input for `sink` and `identity` that ends with `last`."""
    array = np.zeros((1, 1, 1, size), np.float32)
    array[..., -1] = last
    return array


def order(token: int, *, count: int = 1, milliseconds: int = 0) -> Array:
    """An input for `moody`."""
    return np.array([token, count, milliseconds], np.int32)


def open_sink(
    server: TritonServer,
    *,
    slots: int = 2,
    connect: float = 2.0,
    infer: float = 30.0,
    replay: bool = False,
) -> Session:
    """An open session with `sink`, made for the `frame` of the usual size."""
    return Session(
        server.http_url,
        "sink",
        slots=slots,
        shapes={"INPUT__0": frame(0).shape},
        timeouts=Timeouts(connect=connect, infer=infer),
        connection=Connection(replay=replay),
    ).open()


def fill(lease: Lease, value: float) -> None:
    """Write `value` into the whole input of `sink`."""
    lease["INPUT__0"][...] = value


def sink(session: Session, value: float, *, size: int = 8) -> float:
    """What `sink` makes of `value`, through the short form."""
    output = session.infer({"INPUT__0": frame(value, size=size)})["OUTPUT__0"]
    return float(output[0])


# --- looking --------------------------------------------------------------------------


def region_files() -> set[Path]:
    """The region files that exist now, whoever made them."""
    return set(SHM.glob("shmlane.*"))


def own_region_files() -> set[Path]:
    """Those of them that this process made: others come and go as they like."""
    return {path for path in region_files() if is_own(path)}


def is_own(path: Path) -> bool:
    try:
        header = RegionHeader.parse(path.read_bytes())
    except (FileNotFoundError, RegionError):
        return False
    return bool(header.description["pid"] == os.getpid())


def regions_open() -> Counter[str]:
    """How many descriptors this process has of each region."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        # Another thread may close one meanwhile.
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    regions = (link for link in links if link.startswith("/dev/shm/shmlane."))
    return Counter(link for link in regions if os.path.exists(link))


def registered(server: TritonServer) -> set[str]:
    """Names of the regions that the server knows."""
    _, regions = server.call("/v2/systemsharedmemory/status")
    return {region["name"] for region in regions}


def all_free(session: Session, *, timeout: float = 10.0) -> SessionStats:
    """The session's counters once every slot is free again and can be had."""

    def free() -> SessionStats | None:
        stats = session.stats()
        return stats if stats.free == stats.slots > 0 else None

    stats = eventually(free, f"all slots of {session!r} are free", timeout=timeout)
    assert stats is not None
    with contextlib.ExitStack() as leases:
        for _ in range(stats.slots):
            leases.enter_context(session.lease(timeout=timeout))
    return stats


# --- requests that hang ---------------------------------------------------------------


@contextlib.contextmanager
def stopped(server: TritonServer) -> Iterator[None]:
    """The server does not run, as on a machine that is overloaded."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        eventually(lambda: _is_stopped(server.pid), "the server stands still")
        yield
    finally:
        if server.is_alive:
            os.kill(server.pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """Whether every thread of a process has come to its stop."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    try:
        states = [task.read_text().rpartition(")")[2].split()[0] for task in tasks]
    except (FileNotFoundError, ProcessLookupError):
        # One of them has ended instead.
        return False
    return set(states) == {"T"}


def sent_to(server: TritonServer, count: int = 1) -> None:
    """Wait until so many requests lie with a server that stands still.

    A slot is in flight before the first byte leaves.
    """
    eventually(lambda: _unread(server) == count, f"{count} requests are there")


def _unread(server: TritonServer) -> int:
    """Connections to its port with bytes that it has not read."""
    port = f":{int(server.http_url.rpartition(':')[2]):04X}"
    count = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        if state == _ESTABLISHED and local.endswith(port):
            count += int(queues.partition(":")[2], 16) > 0
    return count


@contextlib.contextmanager
def asking(session: Session, value: float) -> Iterator[Future[float]]:
    """A request in another thread, which is in flight when the block begins."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sink, session, value)
        eventually(lambda: session.stats().in_flight == 1, "a request is in flight")
        yield future


# --- clients in other processes -------------------------------------------------------


def start_client(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Python running `script`, in which every warning is an error."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_client(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same, run to its end."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT,
        check=False,
    )


def kill(client: subprocess.Popen[str]) -> None:
    """End a client as a crash would."""
    client.send_signal(signal.SIGKILL)
    client.communicate(timeout=CLIENT_TIMEOUT)
