"""The contender shmlane, through its public API: a session used by blocking threads.

Owns nothing but the ways in which threads use a session; `flows` has the ways without.
Refuses to know anything behind the public API.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import shmlane
from shmlane.preprocess import image_into

from .flows import BlockingClient, StreamClient, TasksClient
from .harness import Array, Client, Lane, Lanes, Spec, Traffic, serve


class ThreadsClient(BlockingClient):
    """One session that all threads share."""

    def traffic(self) -> Traffic:
        """One thread for each request in flight."""
        return Lanes(self.lane, self.spec.concurrency)

    def lane(self, index: int) -> Lane:
        """A thread that uses the session for every request."""
        return _LANES[self.spec.way](self.session, self.spec)


class BaseLane:
    """One thread's use of the session that all share."""

    def __init__(self, session: shmlane.Session, spec: Spec) -> None:
        self._session = session
        self._fill = spec.fill
        self._last = spec.last
        self._source = spec.source()

    def prepare(self) -> None:
        """Run each free slot once: a session notices lost registrations by itself."""
        self._session.warmup()

    def close(self) -> None:
        """Nothing here is this lane's alone."""


class InPlace(BaseLane):
    """Tensors lie in shared memory."""

    def call(self, marker: float) -> bool:
        """Lease, view, write in place, infer, read in place."""
        with self._session.lease() as lease:
            view = lease["INPUT__0"]
            self.fill(view)
            view[self._last] = marker
            result = lease.infer()
            return float(result["OUTPUT__0"][0]) == marker

    def fill(self, view: Array) -> None:
        """Write the whole input, or leave it as it is."""
        if self._fill:
            np.copyto(view, self._source)


class FromPicture(InPlace):
    """Tensors lie in shared memory, and each is made there from a picture of bytes."""

    def __init__(self, session: shmlane.Session, spec: Spec) -> None:
        super().__init__(session, spec)
        _, channels, height, width = spec.shape
        pixels = np.arange(height * width * channels, dtype=np.uint8)
        self._frame = pixels.reshape(height, width, channels)

    def fill(self, view: Array) -> None:
        """Pixels to floats from 0 to 1, channels to the front."""
        image_into(view, self._frame, layout="nchw")


class InTheRequest(BaseLane):
    """Tensors travel in the request and the reply."""

    def call(self, marker: float) -> bool:
        """Change the ready array, infer from where it lies, read."""
        self._source[self._last] = marker
        outputs = self._session.infer({"INPUT__0": self._source})
        return float(outputs["OUTPUT__0"][0]) == marker


_LANES: dict[str, type[InPlace | InTheRequest]] = {
    "in place": InPlace,
    "in the request": InTheRequest,
    "from a picture": FromPicture,
}

_CLIENTS: dict[str, Callable[[Spec], Client]] = {
    "threads": ThreadsClient,
    "tasks": TasksClient,
    "stream": StreamClient,
}


def make_client(spec: Spec) -> Client:
    """What keeps requests in flight the way that the contender stands for."""
    return _CLIENTS[spec.flow](spec)


if __name__ == "__main__":
    serve(make_client)
