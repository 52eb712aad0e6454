"""The order of a run: storms of faults, and calm points between them.

Owns what comes when, from one seed: faults are dealt from a shuffled deck, so that none
is left out by chance, with random pauses, and each calm point has trouble of its own
that must not matter. Refuses to know how a fault is made and what must hold then.

The same seed makes the same choices; the machine decides what they meet.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shmlane.inventory import clean_up
from shmlane.server import TritonServer, demo_models
from tests.chaos import slow_model
from tests.chaos.between import Between
from tests.chaos.examination import Examination
from tests.chaos.faults import Playground
from tests.chaos.handle import ChaosFailure
from tests.chaos.machine import Usage
from tests.chaos.verdict import Calm, Run

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
    "connections cut in a message": 2,
    "idle connections closed": 1,
    "bytes held up in between": 2,
    "replies delayed": 1,
    "replies sent twice": 2,
    "earlier replies sent again": 4,
    "408 from in between": 2,
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
        self._exam = Examination(playground)
        self._seconds = seconds
        self._dice = random.Random(f"{seed}/order")
        self._started = time.monotonic()
        self._told = self._started

    def run(self) -> Run:
        """Everything in turn; raises `ChaosFailure` at the first wrong thing."""
        try:
            return self._run()
        except ChaosFailure as failure:
            story = self._playground.story()
            raise ChaosFailure(f"{failure}\n{story}") from failure

    def _run(self) -> Run:
        self._playground.put_right()
        exam = self._exam
        storm, gentle = Deck(_STORM, self._dice), Deck(_GENTLE_STORM, self._dice)
        calms = [self._calm_after(storm)]
        exam.restart_server()
        exam.close_without_server()
        self._go()
        calms.append(self._calm_after(storm))
        exam.wipe_regions()
        exam.close_without_server()
        self._go()
        calms.append(self._calm_after(gentle))
        exam.close_without_server()
        self._end()
        return Run(
            seconds=self._seconds,
            faults=self._playground.counts,
            outcomes=self._outcomes(),
            calms=calms,
        )

    # --- storms -----------------------------------------------------------------------

    def _storm(self, deck: Deck) -> None:
        end = time.monotonic() + self._seconds / 3
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

    def _calm_after(self, deck: Deck) -> Calm:
        """A storm, and what is in use once all of it is put right."""
        playground = self._playground
        self._storm(deck)
        playground.put_right()
        self._await_ready()
        used = self._exam.come_to_rest()
        calm = Calm(
            requests=self._outcomes()["requests"],
            client=used[0],
            server=Usage.of(playground.server.pid),
        )
        self._exam.spoil_connections()
        return calm

    def _go(self) -> None:
        for client in self._playground.clients:
            client.order("go")

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN
        while late := [each for each in self._playground.clients if not each.is_ready]:
            self._playground.check()
            if time.monotonic() > deadline:
                raise ChaosFailure(f"{late[0]!r} does not open:\n{late[0].stacks()}")
            time.sleep(_LOOK)

    def _end(self) -> None:
        """Clients end well, and nothing is left of them."""
        playground = self._playground
        for client in playground.clients:
            client.order("end")
        for client in playground.clients:
            client.await_end()
        playground.dismiss()
        playground.check_bystander()
        self._exam.refuse_all()

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
        urls: list[str] = []
        # After a failure as well, where it must not be asked: it ends before this.
        stack.callback(_remove_files, urls)
        stack.callback(server.kill)
        server.start()
        dice = random.Random(f"{seed}/between")
        between = Between(server.http_url, folder=folder, dice=dice)
        stack.enter_context(between)
        urls += [server.http_url, *between.urls]
        playground = Playground(server, between, seats=seats, seed=seed, folder=folder)
        stack.callback(playground.end)
        return Conductor(playground, seconds=seconds, seed=seed).run()


def _remove_files(urls: Sequence[str]) -> None:
    for url in urls:
        clean_up(only=url)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
