"""The order of a run: storms of faults, and calm points between them.

Owns what comes when, from one seed: faults are dealt from a shuffled deck, so that none
is left out by chance, with random pauses. Owns the calm points, where everything must
come free, and the end, where nothing may be left. Refuses to know how a fault is made.

The same seed makes the same choices; the machine decides what they meet.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from shmlane import Session
from shmlane.inventory import list_regions
from shmlane.server import TritonServer, demo_models
from tests.chaos import slow_model
from tests.chaos.faults import Playground
from tests.chaos.handle import ChaosFailure
from tests.chaos.machine import Usage
from tests.chaos.verdict import Calm, Run
from tests.fault_proxy import FaultProxy

SEATS = 3
_READY_WITHIN = 60.0
_LOOK = 0.01
_MEAN_PAUSE = 0.25
_PROGRESS = 10.0

_STORM = {
    "server killed": 1,
    "server killed amid requests": 1,
    "server told to end": 1,
    "server stopped": 5,
    "connections broken": 4,
    "connections broken amid requests": 3,
    "replies sent twice": 2,
    "408 from in between": 2,
    "bytes held up in between": 2,
    "client stopped": 5,
    "client killed": 2,
    "regions wiped by a stranger": 3,
    "region of a stranger": 4,
}
# What the server has from one calm point to the next, it still has at the end: there it
# can be compared with itself, and shows what clients forget to take back.
_GENTLE_STORM = {
    name: count
    for name, count in _STORM.items()
    if not name.startswith(("server killed", "server told", "regions wiped"))
}


class Deck:
    """Faults in random order, each as often in a round as its weight says."""

    def __init__(self, weights: dict[str, int], dice: random.Random) -> None:
        self._weights = weights
        self._dice = dice
        self._cards: list[str] = []

    def draw(self, playground: Playground) -> str | None:
        """The next fault that is possible now; the others keep their turn."""
        if not self._cards:
            self._cards = list(Counter(self._weights).elements())
            self._dice.shuffle(self._cards)
        for card in self._cards:
            if playground.possible(card):
                self._cards.remove(card)
                return card
        return None


class Conductor:
    """One run on one server."""

    def __init__(self, playground: Playground, *, seconds: float, seed: str) -> None:
        self._playground = playground
        self._seconds = seconds
        self._dice = random.Random(f"{seed}/order")
        self._started = time.monotonic()
        self._told = self._started

    def run(self) -> Run:
        """Everything in turn; raises `ChaosFailure` at the first wrong thing."""
        self._playground.put_right()
        calms = []
        storm = Deck(_STORM, self._dice)
        for deck in (storm, storm, Deck(_GENTLE_STORM, self._dice)):
            self._storm(deck, self._seconds / 3)
            calms.append(self._calm())
        self._end()
        return Run(
            seconds=self._seconds,
            faults=self._playground.counts,
            outcomes=self._outcomes(),
            calms=calms,
        )

    # --- storms -----------------------------------------------------------------------

    def _storm(self, deck: Deck, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            fault = deck.draw(self._playground)
            if fault is not None:
                self._playground.cause(fault)
            self._pause(self._dice.expovariate(1 / _MEAN_PAUSE))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            self._playground.run_errands()
            self._playground.check()
            self._tell_progress()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _LOOK))

    def _tell_progress(self) -> None:
        if time.monotonic() - self._told < _PROGRESS:
            return
        self._told = time.monotonic()
        outcomes, faults = self._outcomes(), self._playground.counts
        say(
            f"{self._told - self._started:5.0f} s: {faults.total()} faults,"
            f" {outcomes['requests']} requests, {outcomes['successes']} right replies"
        )

    # --- calm -------------------------------------------------------------------------

    def _calm(self) -> Calm:
        """Put everything right and hold the callers back: what is in use then?"""
        playground = self._playground
        playground.put_right()
        self._await_ready()
        for client in playground.clients:
            client.order("calm")
        clients = [client.await_calm() for client in playground.clients]
        playground.check()
        playground.check_bystander()
        self._clean()
        calm = Calm(
            requests=self._outcomes()["requests"],
            client=clients[0],
            server=Usage.of(playground.server.pid),
        )
        for client in playground.clients:
            client.order("go")
        return calm

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN
        while late := [each for each in self._playground.clients if not each.is_ready]:
            self._playground.check()
            if time.monotonic() > deadline:
                raise ChaosFailure(f"{late[0]!r} does not open:\n{late[0].stacks()}")
            time.sleep(_LOOK)

    def _clean(self) -> None:
        """The next session removes what the dead left, here and on the server."""
        for url in self._playground.urls:
            Session(url, "identity").open().close()
        if left := self._dead_regions():
            raise ChaosFailure(f"left by the dead and not cleaned up: {left}")

    def _dead_regions(self) -> list[str]:
        urls = self._playground.urls
        return [
            info.name
            for info in list_regions()
            if info.server in urls and not info.alive
        ]

    def _end(self) -> None:
        """Clients end well, and nothing is left of them."""
        playground = self._playground
        for client in playground.clients:
            client.order("end")
        for client in playground.clients:
            client.await_end()
        playground.dismiss()
        playground.check_bystander()
        self._clean()
        _, regions = playground.server.call("/v2/systemsharedmemory/status")
        left = [region["name"] for region in regions]
        ours = [name for name in left if name.startswith("shmlane.")]
        if ours or self._dead_regions():
            raise ChaosFailure(
                f"left at the end: {ours} registered, files {self._dead_regions()}"
            )

    # --- telling ----------------------------------------------------------------------

    def _outcomes(self) -> Counter[str]:
        everybody = (*self._playground.clients, *self._playground.dismissed)
        return sum((client.counts for client in everybody), Counter())


def run(*, seconds: float, seed: str, seats: int = SEATS) -> Run:
    """A whole run on a server of its own, of which nothing remains."""
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="shmlane-chaos-")
        folder = Path(stack.enter_context(made))
        slow = slow_model.build(folder / "models")
        server = TritonServer([*demo_models("identity"), slow])
        stack.callback(server.kill)
        server.start()
        between = FaultProxy(server.http_url, unix_socket=folder / "http.sock")
        stack.enter_context(between)
        playground = Playground(server, between, seats=seats, seed=seed, folder=folder)
        stack.callback(playground.end)
        return Conductor(playground, seconds=seconds, seed=seed).run()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
