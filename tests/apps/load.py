"""A web service in a process of its own, and clients that check every answer.

Owns pictures that differ from each other and are known, the HTTP load, and one process
group for each service. Refuses to know web frameworks, and to end what it did not
start.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from shmlane.errors import RegionError
from shmlane.header import RegionHeader
from shmlane.server import TritonServer
from tests.polling import eventually
from tests.sessions import region_files, registered

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "web" / "models"
HOST = "127.0.0.1"
# Of one request: longer than a service may take to say that Triton is away.
CLIENT_TIMEOUT = 15.0
_END_TIMEOUT = 20.0


# --- pictures -------------------------------------------------------------------------

_SIZES = ((224, 224), (448, 448), (112, 112), (336, 560))
_CELLS = 8
_STEP, _STEPS = 6, 30
# Less than half of what two pictures differ by; JPEG and resizing need 1.
_TOLERANCE = 2.0


@dataclass(frozen=True)
class Picture:
    """One of 27,000 pictures: a colour all over, and one white cell."""

    number: int

    @property
    def size(self) -> tuple[int, int]:
        return _SIZES[self.number % len(_SIZES)]

    @property
    def cell(self) -> tuple[int, int]:
        """Column and row of the brightest place."""
        return self.number * 5 % _CELLS, self.number * 3 // _CELLS % _CELLS

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """Red first."""
        height, width = self.size
        pixels = np.empty((height, width, 3), np.uint8)
        pixels[...] = [
            self.number // _STEPS**place % _STEPS * _STEP for place in range(3)
        ]
        column, row = self.cell
        high, wide = height // _CELLS, width // _CELLS
        pixels[row * high :, column * wide :][:high, :wide] = 255
        return pixels

    @property
    def body(self) -> bytes:
        """PNG, JPEG or `.npy`, in turn."""
        kinds: tuple[Callable[[], bytes], ...] = (self._png, self._jpeg, self._npy)
        return kinds[self.number % 3]()

    def _png(self) -> bytes:
        return cv2.imencode(".png", self.pixels[..., ::-1])[1].tobytes()

    def _jpeg(self) -> bytes:
        return cv2.imencode(".jpg", self.pixels[..., ::-1])[1].tobytes()

    def _npy(self) -> bytes:
        return npy(self.pixels)

    def is_in(self, answer: Mapping[str, Any]) -> bool:
        """Whether a service that answers so was given this very picture."""
        brightest = [(place + 0.5) / _CELLS for place in self.cell]
        colour = self.pixels.mean(axis=(0, 1))
        return bool(
            np.allclose(answer["brightest"], brightest)
            and np.allclose(answer["colour"], colour, rtol=0, atol=_TOLERANCE)
        )


def npy(array: npt.NDArray[Any]) -> bytes:
    """An array as `np.save` writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# --- clients --------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What a service said."""

    status: int
    headers: Mapping[str, str]
    content: Any


class Client:
    """One kept connection to a service, made anew after an error."""

    def __init__(self, port: int, *, timeout: float = CLIENT_TIMEOUT) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=timeout)

    def ask(self, method: str, path: str, body: bytes | None = None) -> Reply:
        try:
            self._connection.request(method, path, body)
            return self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> Reply:
        reply = self._connection.getresponse()
        headers = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, headers, json.loads(reply.read()))

    def survey(self, picture: Picture) -> Reply:
        """The service's reply; the test fails if it is another picture's answer."""
        reply = self.ask("POST", "/survey", picture.body)
        if reply.status == 200:
            assert picture.is_in(reply.content), f"{picture} got {reply.content}"
        return reply

    def announce(self, nbytes: int) -> Reply:
        """What comes of saying that so many bytes will be posted, before any is."""
        self._connection.putrequest("POST", "/survey")
        self._connection.putheader("Content-Length", str(nbytes))
        self._connection.endheaders()
        return self._read()

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(port: int, numbers: Iterable[int], *, clients: int = 8) -> list[Reply]:
    """The replies to pictures of these numbers, asked for by so many clients at once.

    Every answer is checked; whatever else comes is the caller's to judge.
    """
    waiting = iter(numbers)
    taking = threading.Lock()

    def ask_all() -> list[Reply]:
        replies: list[Reply] = []
        with Client(port) as client:
            while True:
                with taking:
                    number = next(waiting, None)
                if number is None:
                    return replies
                replies.append(client.survey(Picture(number)))

    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(ask_all) for _ in range(clients)]
        return [reply for future in futures for reply in future.result()]


class Traffic:
    """Clients that ask until they are told to stop, and take note of what they get.

    replies: by status, 0 where the connection broke or none was made. A wrong answer
    fails the test when the block ends.
    """

    def __init__(self, port: int, *, clients: int = 6) -> None:
        self.replies: dict[int, int] = {}
        self._port = port
        self._numbers = iter(range(27_000))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._futures = [self._pool.submit(self._ask) for _ in range(clients)]

    @property
    def answers(self) -> int:
        """How many right answers there were so far."""
        return self.replies.get(200, 0)

    def await_answers(self, count: int) -> None:
        """Wait until so many more have come."""
        wanted = self.answers + count
        eventually(
            lambda: self.answers >= wanted or any(f.done() for f in self._futures),
            lambda: f"{count} more answers, but there were {self.replies}",
            timeout=20,
        )

    def _ask(self) -> None:
        with Client(self._port) as client:
            while not self._stop.is_set():
                with self._lock:
                    picture = Picture(next(self._numbers))
                try:
                    status = client.survey(picture).status
                except (OSError, http.client.HTTPException):
                    status = 0
                    self._stop.wait(0.02)
                with self._lock:
                    self.replies[status] = self.replies.get(status, 0) + 1

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for future in self._futures:
            future.result()


def leave_early(port: int, picture: Picture, *, sent: float) -> None:
    """Send the first part of a request, 1 for all of it, and break the connection."""
    body = picture.body
    head = f"POST /survey HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((HOST, port), timeout=CLIENT_TIMEOUT) as connection:
        connection.sendall(f"{head}\r\n".encode() + body[: int(len(body) * sent)])


# --- services -------------------------------------------------------------------------


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
        self.port = free_port()
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
            assert self._process.poll() is None, self.log()
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
        makers = {path.name: _maker(path) for path in region_files()}
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
            if self._process.poll() is None:
                self.terminate()
        finally:
            self._kill_all()

    def _kill_all(self) -> None:
        """Nothing of it outlives the test, whatever became of the test."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_END_TIMEOUT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def nothing_left(names: Iterable[str], server: TritonServer) -> None:
    """None of these regions is there any more, and the server knows none of them."""
    names = set(names)
    assert names, "there was nothing to begin with"

    def left() -> set[str]:
        files = {path.name for path in region_files()}
        # A region is registered once for each slot: its name, slot and generation.
        known = {name.rsplit(".", 2)[0] for name in registered(server)}
        return names & (files | known)

    eventually(
        lambda: not left(),
        lambda: f"nothing is left, but there is {left()}",
        timeout=10,
    )


def _maker(path: Path) -> int:
    """The process that made a region, 0 where it cannot be told."""
    with contextlib.suppress(OSError, RegionError):
        return int(str(RegionHeader.parse(path.read_bytes()).description["pid"]))
    return 0
