"""The faults themselves: what is done to the server, to clients, and by strangers.

Owns one server and the seats of its clients, each fault, whether it is possible now,
and putting everything right again. Refuses to decide what comes next.

Whatever ends by itself later (a stop, an absence) is an errand with a time.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import secrets
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shmlane.server import TritonServer
from tests.chaos.between import BETWEEN, Between
from tests.chaos.client import Plan
from tests.chaos.handle import ChaosFailure, ClientProcess, clock
from tests.chaos.machine import stands_still

_LONGEST_STOP = 1.5
_LONGEST_ABSENCE = 1.0
_LONGEST_TROUBLE = 1.0
_LONGEST_RESPITE = 0.06
_BREAKS = 10
_SHM = Path("/dev/shm")
_STRANGER = "stranger-{pid}-"
_PAGE = 4096
_LAST_FAULTS = 12
_LAST_LINES = 20
_STILL_WITHIN = 10.0


def forget_strangers(pid: int) -> None:
    """Remove what a stranger of that process was registering when it was killed."""
    for path in _SHM.glob(_STRANGER.format(pid=pid) + "*"):
        path.unlink()


class Errand(NamedTuple):
    """Something to be done at a time."""

    when: float
    place: int
    do: Callable[[], None]


class Playground:
    """A real server and its clients, and everything that can happen to them.

    The client in the first seat is never killed, so that it can be compared with
    itself.
    """

    def __init__(
        self,
        server: TritonServer,
        between: Between,
        *,
        seats: int,
        seed: str,
        folder: Path,
    ) -> None:
        self.server = server
        self.between = between
        self.counts: Counter[str] = Counter()
        self.seats: list[ClientProcess | None] = [None] * seats
        self.dismissed: list[ClientProcess] = []
        self._dice = random.Random(f"{seed}/faults")
        self._seed = seed
        self._folder = folder
        self._errands: list[Errand] = []
        self._numbers = itertools.count()
        self._places = itertools.count()
        self._server_stopped = False
        self._server_away = False
        self._bystander = ""
        self._last_faults: deque[str] = deque(maxlen=_LAST_FAULTS)

    # --- faults -----------------------------------------------------------------------

    def possible(self, fault: str) -> bool:
        """Whether a fault can be had now; it does not wait for its turn."""
        if fault == "client stopped":
            return bool(self._stoppable_clients())
        if fault == "client killed":
            return any(self.seats[1:])
        if fault in BETWEEN or fault == "connections broken":
            return True
        if fault in ("server killed", "server killed amid requests"):
            return not self._server_away
        return not (self._server_away or self._server_stopped)

    def cause(self, fault: str) -> None:
        self.counts[fault] += 1
        self._last_faults.append(f"{clock()} {fault}")
        if fault not in BETWEEN:
            _OTHERS[fault](self)
        elif undo := BETWEEN[fault](self.between):
            self.later(self._dice.uniform(0.02, _LONGEST_TROUBLE), undo)

    def _kill_server(self) -> None:
        self._server_away = True
        self.server.kill()
        self._server_stopped = False
        self.later(self._dice.uniform(0, _LONGEST_ABSENCE), self.start_server)

    def _kill_server_amid_requests(self) -> None:
        # What is asked now is not answered: it is lost with the server.
        self._stop_server()
        self.later(self._dice.uniform(0.05, 0.3), self._kill_unless_away)

    def _kill_unless_away(self) -> None:
        if not self._server_away:
            self._kill_server()

    def _end_server(self) -> None:
        """It keeps its connections then, and closes new ones, until it is killed."""
        self._server_away = True
        os.kill(self.server.pid, signal.SIGTERM)
        self.later(self._dice.uniform(0.2, _LONGEST_STOP), self._kill_server)

    def _stop_server(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)
        self._server_stopped = True
        self.later(self._dice.uniform(0.02, _LONGEST_STOP), self.continue_server)

    def _stop_client(self) -> None:
        client = self._dice.choice(self._stoppable_clients())
        client.stop()
        self.later(
            self._dice.uniform(0.02, _LONGEST_STOP), lambda: self._continue(client)
        )

    def _kill_client(self) -> None:
        seat = self._dice.choice(
            [place for place in range(1, len(self.seats)) if self.seats[place]]
        )
        client, self.seats[seat] = self.seats[seat], None
        assert client is not None
        self._refuse_ended(client)
        client.kill()
        self.dismissed.append(client)
        self.later(
            self._dice.uniform(0, _LONGEST_ABSENCE), lambda: self.fill_seat(seat)
        )

    def _wipe(self) -> None:
        """A stranger unregisters everybody's regions."""
        self._bystander = ""
        # What is in use it keeps, and says so with an error.
        self.server.call("/v2/systemsharedmemory/unregister", {})

    def _come_and_go(self) -> None:
        """A stranger registers a region of its own; the one before must be there."""
        self.check_bystander()
        if self._bystander:
            self._ask(f"/v2/systemsharedmemory/region/{self._bystander}/unregister")
        name = _STRANGER.format(pid=os.getpid()) + secrets.token_hex(8)
        path = _SHM / name
        path.write_bytes(bytes(_PAGE))
        try:
            self._ask(
                f"/v2/systemsharedmemory/region/{name}/register",
                {"key": f"/{name}", "offset": 0, "byte_size": _PAGE},
            )
        finally:
            path.unlink()
        self._bystander = name

    def _break_off(self) -> None:
        """The server does not notice, and does all that it was asked.

        Several times in a row: what was sent again is quickly interrupted as well.
        """
        when = 0.0
        for _ in range(_BREAKS):
            self.later(when, self.between.break_off)
            when += self._dice.uniform(0, _LONGEST_RESPITE)

    def _break_off_amid_requests(self) -> None:
        """What it was asked it does only later, when nobody can hear its answer."""
        self._stop_server()
        self.later(self._dice.uniform(0.05, 0.3), self.between.break_off)

    def _ask(self, path: str, body: object = None) -> None:
        status, reply = self.server.call(path, {} if body is None else body)
        if status != 200:
            raise ChaosFailure(f"a stranger was refused {path}: {status} {reply}")

    # --- putting right ----------------------------------------------------------------

    def start_server(self) -> None:
        if self._server_away:
            # It may still be ending. The next one knows no region of this one's.
            self.server.kill()
            self._bystander = ""
            self._server_stopped = False
            self.server.start()
            self._server_away = False

    def continue_server(self) -> None:
        if self._server_stopped and self.server.is_alive:
            os.kill(self.server.pid, signal.SIGCONT)
        self._server_stopped = False

    def restart_server(self) -> None:
        """At once, while nobody asks it anything."""
        self._server_away = True
        self.start_server()

    def halt_server(self) -> None:
        """Stop it until `continue_server`, and return once it stands still."""
        os.kill(self.server.pid, signal.SIGSTOP)
        self._server_stopped = True
        deadline = time.monotonic() + _STILL_WITHIN
        while not stands_still(self.server.pid):
            if time.monotonic() > deadline:
                raise ChaosFailure(f"{self.server!r} was stopped and goes on")
            time.sleep(0.001)

    def fill_seat(self, seat: int) -> None:
        if self.seats[seat] is None:
            number = next(self._numbers)
            letters = str(self._folder / "letters")
            plan = Plan(self.urls, letters, number, self._seed, os.getpid())
            self.seats[seat] = ClientProcess(plan, self._folder)

    def dismiss(self) -> None:
        """All clients have ended well."""
        self.dismissed += self.clients
        self.seats = [None] * len(self.seats)

    def end(self) -> None:
        """End all clients, whatever they do."""
        for client in self.clients:
            client.kill()
        self.dismiss()

    def put_right(self) -> None:
        """Everybody is there and runs."""
        self._errands.clear()
        self._last_faults.append(f"{clock()} everything put right")
        self.between.put_right()
        self.start_server()
        self.continue_server()
        for seat, client in enumerate(self.seats):
            if client is not None:
                self._continue(client)
            self.fill_seat(seat)

    def _continue(self, client: ClientProcess) -> None:
        if client.is_stopped and not client.has_ended:
            client.go_on()

    # --- time -------------------------------------------------------------------------

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        errand = Errand(time.monotonic() + seconds, next(self._places), do)
        heapq.heappush(self._errands, errand)

    def run_errands(self) -> None:
        """Do what is due, and look whether anybody ended or complained."""
        while self._errands and self._errands[0].when <= time.monotonic():
            heapq.heappop(self._errands).do()
            self.check()

    # --- looking ----------------------------------------------------------------------

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the server is, straight and through what comes between."""
        return self.server.http_url, *self.between.urls

    @property
    def clients(self) -> list[ClientProcess]:
        return [client for client in self.seats if client is not None]

    def _stoppable_clients(self) -> list[ClientProcess]:
        return [
            each for each in self.clients if each.is_guarded and not each.is_stopped
        ]

    def check(self) -> None:
        """Raise `ChaosFailure` for the first thing that is not as it must be."""
        for client in (*self.clients, *self.dismissed):
            if client.complaints:
                raise ChaosFailure("\n".join(client.complaints[:3]))
        for client in self.clients:
            self._refuse_ended(client)
        if not (self._server_away or self.server.is_alive):
            raise ChaosFailure(f"{self.server!r} by itself")

    def _refuse_ended(self, client: ClientProcess) -> None:
        if client.has_ended:
            raise ChaosFailure(f"{client!r} ended by itself:\n{client.stacks()}")

    def check_bystander(self) -> None:
        """Nobody but a stranger may have touched the stranger's region."""
        _, regions = self.server.call("/v2/systemsharedmemory/status")
        names = {region["name"] for region in regions}
        if self._bystander and self._bystander not in names:
            raise ChaosFailure(f"somebody unregistered {self._bystander}")

    def story(self) -> str:
        """What happened last, for whoever must understand a failure."""
        lines = ["the last faults:", *self._last_faults]
        for client in (*self.clients, *self.dismissed):
            if said := client.said:
                lines += [f"{client!r} said:", *said.splitlines()[-_LAST_LINES:]]
        lines += ["the end of the server's log:"]
        lines += self.server.log_text().splitlines()[-_LAST_LINES:]
        return "\n  ".join(lines)

    def __repr__(self) -> str:
        return f"<Playground {self.server!r} {self.seats!r}>"


_OTHERS: dict[str, Callable[[Playground], None]] = {
    "server killed": Playground._kill_server,
    "server killed amid requests": Playground._kill_server_amid_requests,
    "server told to end": Playground._end_server,
    "server stopped": Playground._stop_server,
    "connections broken": Playground._break_off,
    "connections broken amid requests": Playground._break_off_amid_requests,
    "client stopped": Playground._stop_client,
    "client killed": Playground._kill_client,
    "regions wiped by a stranger": Playground._wipe,
    "region of a stranger": Playground._come_and_go,
}
FAULTS = (*_OTHERS, *BETWEEN)
