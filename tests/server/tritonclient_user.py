"""A user's program that has tritonclient, as test_migration.py needs it.

Owns its clients, and how it looks at things where there is no pytest. Refuses to know
what a scenario is about.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import shmlane

SLOW_MS = 1000
GIVES_UP = 0.2
# What both protocols say then.
TIMED_OUT = ("timed out", "deadline exceeded")


class Program:
    """A program of a user's: its client of tritonclient, as before shmlane came."""

    def __init__(self, *, protocol: str, http: str, grpc: str) -> None:
        self.protocol = protocol
        self.session_url = http
        self.url = http if protocol == "http" else grpc
        self.api = importlib.import_module(f"tritonclient.{protocol}")
        # One that gives up has its limit in another place in each protocol.
        self.limit = {"client_timeout": GIVES_UP} if protocol == "grpc" else {}

    @contextlib.contextmanager
    def client(self, *, gives_up: bool = False) -> Iterator[Any]:
        options = {}
        if gives_up and self.protocol == "http":
            options = {"network_timeout": GIVES_UP}
        with contextlib.closing(
            self.api.InferenceServerClient(self.url, **options)
        ) as client:
            yield client

    def session(self, model: str, **options: Any) -> shmlane.Session:
        return shmlane.Session(self.session_url, model, **options)

    def objects(self, lease: shmlane.Lease) -> dict[str, list[Any]]:
        return {
            "inputs": lease.triton_inputs(protocol=self.protocol),
            "outputs": lease.triton_outputs(protocol=self.protocol),
        }

    def give_up(self, session: shmlane.Session, token: int) -> None:
        """A request whose client leaves long before the model is done."""
        with self.client(gives_up=True) as client, session.lease() as lease:
            order(lease, token, milliseconds=SLOW_MS)
            objects = self.objects(lease)
            with raises(Exception, *TIMED_OUT):
                client.infer("moody", **objects, **self.limit)
            assert session.stats().in_flight == 1


def order(
    lease: shmlane.Lease, token: int, *, count: int = 4, milliseconds: int = 0
) -> None:
    lease["ORDER"][...] = (token, count, milliseconds)


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    caught: BaseException | None = None
    try:
        yield
    except kind as error:
        caught = error
    assert caught is not None, f"{kind.__name__} was not raised"
    known = any(word.lower() in str(caught).lower() for word in words)
    assert known or not words, f"{caught!r} says none of {words}"


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"not so within 10 s: {what}"
        time.sleep(0.01)


def is_free(session: shmlane.Session) -> bool:
    stats = session.stats()
    return stats.free == stats.slots
