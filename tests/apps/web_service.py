"""A web service in a process group of its own, with a real Triton behind it.

Owns its start, its end, and what it has in shared memory. Refuses to know web
frameworks, and to end what it did not start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.ports import HeldPort
from shmlane.server import TritonServer
from tests.apps.load import Client
from tests.polling import eventually
from tests.sessions import SHM, region_files, registered

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "web" / "models"
_END_TIMEOUT = 20.0
# Nearly every header of a region fits.
_HEADER_BYTES = 64 << 10


def triton() -> TritonServer:
    """A server with the model of the examples, to be started."""
    # Connections that are still open delay its end for no longer than that.
    return TritonServer(MODELS, extra_args=["--exit-timeout-secs=1"])


class Service:
    """A web service in a process group of its own, that answers /healthz.

    command: Python's arguments, in which `{port}` is the port. Ends with the block: by
    SIGTERM, as an init system does it, or with SIGKILL if that does not help, which
    fails the test.
    """

    def __init__(
        self,
        command: Sequence[str],
        server: TritonServer,
        log: Path,
        **environment: str,
    ) -> None:
        # Until it listens, nobody else is given it.
        self._held = HeldPort()
        self.port = self._held.port
        self.server = server
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *(word.format(port=self.port) for word in command),
                ],
                cwd=ROOT,
                env=os.environ
                | {
                    "TRITON_URL": server.http_url,
                    "PYTHONWARNINGS": "default::ResourceWarning",
                    "PYTHONUNBUFFERED": "1",
                }
                | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def health(self) -> dict[str, Any]:
        """What one of its workers says of itself."""
        with Client(self.port) as client:
            reply = client.ask("GET", "/healthz")
        assert reply.status == 200, reply
        health: dict[str, Any] = reply.content
        return health

    def await_ready(self) -> None:
        def is_ready() -> bool:
            assert self.is_alive, self.log()
            with contextlib.suppress(OSError):
                return bool(self.health())
            return False

        eventually(is_ready, lambda: f"the service answers\n{self.log()}", timeout=30)

    def await_all_free(self, *, workers: int = 1) -> dict[int, dict[str, int]]:
        """The slots of so many workers by pid, once none of them has one in use."""
        free: dict[int, dict[str, int]] = {}

        def all_are_free() -> bool:
            health = self.health()
            slots = health["slots"]
            free.pop(health["worker"], None)
            if slots["free"] == slots["slots"] > 0:
                free[health["worker"]] = slots
            return len(free) >= workers

        eventually(
            all_are_free, lambda: f"all slots are free\n{self.log()}", timeout=20
        )
        return free

    def regions(self) -> dict[str, int]:
        """Its files of shared memory, with the process that made each."""
        makers = {path.name: _maker(path.name) for path in region_files()}
        return {name: pid for name, pid in makers.items() if self._is_ours(pid)}

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return pid > 0 and os.getpgid(pid) == self.pid
        return False

    def terminate(self) -> int:
        """Ask it to end, as an init system does, and wait; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_END_TIMEOUT)

    def __enter__(self) -> Service:
        try:
            self.await_ready()
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.is_alive:
                self.terminate()
        finally:
            self._kill_all()

    def _kill_all(self) -> None:
        """Nothing of it outlives the test, whatever became of the test."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_END_TIMEOUT)


def nothing_left(server: TritonServer, names: Iterable[str] | None = None) -> None:
    """None of these regions is there any more, and the server knows none of them.

    Without names: none that anybody made for this server.
    """

    def left() -> set[str]:
        files = {path.name for path in region_files()}
        # A region is registered once for each slot: its name, slot and generation.
        known = {name.rsplit(".", 2)[0] for name in registered(server)}
        if names is None:
            return known | {name for name in files if _server(name) == server.http_url}
        return (files | known) & set(names)

    eventually(
        lambda: not left(),
        lambda: f"nothing is left, but there is {left()}",
        timeout=10,
    )


def _header(name: str) -> Mapping[str, object]:
    """What a region says of itself; nothing where it is gone, or not a region."""
    with contextlib.suppress(OSError, RegionError), (SHM / name).open("rb") as file:
        return RegionHeader.parse(file.read(_HEADER_BYTES)).description
    return {}


def _maker(name: str) -> int:
    return int(str(_header(name).get("pid", 0)))


def _server(name: str) -> str:
    return str(_header(name).get("server", ""))
