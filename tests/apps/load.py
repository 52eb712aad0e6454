"""Clients of a web service that check every answer.

Owns pictures that differ from each other, what is true about each, and the HTTP load.
Refuses to know web frameworks, and to judge replies that are no answers.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from tests.polling import eventually

HOST = "127.0.0.1"
# Of one request: longer than a service may take to say that Triton is away.
CLIENT_TIMEOUT = 15.0


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


@contextlib.contextmanager
def asking(port: int, picture: Picture, *, sent: float = 1.0) -> Iterator[None]:
    """A client that has sent that part of a request, and leaves when the block ends."""
    body = picture.body
    head = f"POST /survey HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((HOST, port), timeout=CLIENT_TIMEOUT) as connection:
        connection.sendall(f"{head}\r\n".encode() + body[: int(len(body) * sent)])
        yield
