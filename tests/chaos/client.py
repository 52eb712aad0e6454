"""One client process: callers of every kind on a few sessions, told by lines on stdin.

Owns its sessions, threads and event loop, what it measures of itself, and the alarm
when a call never ends. Every line on stdout is a message in JSON for the conductor.
Refuses to outlive it, and to decide whether its numbers are good.

Orders: "calm" (hold the callers back, drop all views, tell when every slot is free and
has been used), "use" (every slot once more), "visit" (open sessions), "leave" (close
them), "go", and "end". Each but the last is answered when it is done.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shmlane import AsyncSession, SessionStats, ShmlaneError
from shmlane.session_base import BaseSession
from tests.chaos.caller import Caller
from tests.chaos.gate import Gate
from tests.chaos.lanes import SHARED, Lane, make_async_lanes, make_lanes
from tests.chaos.letters import Letterbox
from tests.chaos.loop import Loop
from tests.chaos.machine import Usage
from tests.chaos.rest import Rest
from tests.chaos.rest_async import AsyncRest
from tests.chaos.tally import Tally
from tests.chaos.tasks import AsyncCaller
from tests.chaos.tokens import Shelf, Tokens
from tests.chaos.witness import Witness

THREADS = 4
TASKS = 4
KEPT_VIEWS = 5
# Every call has limits of a few seconds; stops of this process and the machine's other
# load come on top.
HANG = 40.0
FREE_WITHIN = 20.0
OPEN_WITHIN = 60.0
ORDERED_WITHIN = 60.0

_TICK = 0.2
_LOOK = 0.05
_MEAN_THOUGHT = 0.008
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Plan:
    """What the conductor tells a client at its start.

    urls: the server, straight; through what comes between, over TCP and over a Unix
        socket. letters: the folder in which clients leave them for each other.
    """

    urls: Sequence[str]
    letters: str
    number: int
    seed: str
    conductor: int


class Voice:
    """Messages to the conductor, one a line, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, kind: str, **facts: object) -> None:
        line = json.dumps({"kind": kind, **facts}).encode() + b"\n"
        with self._lock:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    def complain(self, what: str) -> None:
        self.say("complaint", what=what)


class Ears:
    """Orders from the conductor, one a line."""

    def __init__(self) -> None:
        self._heard = b""

    def next(self) -> str | None:
        """The next order, None if there is none for a moment."""
        # Should this thread hang itself, in the interpreter or in a lock.
        faulthandler.dump_traceback_later(2 * HANG, exit=True)
        if b"\n" not in self._heard and select.select([0], [], [], _TICK)[0]:
            chunk = os.read(0, 64)
            if not chunk:
                os._exit(4)
            self._heard += chunk
        order, end, rest = self._heard.partition(b"\n")
        if not end:
            return None
        self._heard = rest
        return order.decode()


class Client:
    """Everything in this process."""

    def __init__(self, plan: Plan, voice: Voice) -> None:
        self._plan = plan
        self._voice = voice
        self._gate = Gate()
        self._ending = threading.Event()
        self._tally = Tally()
        self._shelf = Shelf(KEPT_VIEWS, voice.complain)
        witness = Witness(
            tokens=Tokens(plan.number),
            tally=self._tally,
            shelf=self._shelf,
            report=voice.complain,
        )
        self._lanes = make_lanes(*plan.urls)
        self._rest = Rest(self._lanes, witness)
        self._letters = Letterbox(Path(plan.letters))
        self._caller = Caller(self._lanes, witness, self._letters)
        self._threads = [
            threading.Thread(target=self._call_on, args=(self._dice(number),))
            for number in range(THREADS)
        ]
        self._async_lanes = make_async_lanes(*plan.urls)
        self._async_rest = AsyncRest(self._async_lanes, witness)
        self._loop = Loop(
            AsyncCaller(self._async_lanes, witness, self._letters).act,
            [self._dice(f"task {number}") for number in range(TASKS)],
            self._gate,
            self._tally,
            patience=ORDERED_WITHIN,
            report=voice.complain,
        )

    def start(self) -> None:
        for lane in self._lanes:
            self._open(lane, functools.partial(lane.session.open, wait=OPEN_WITHIN))
        self._loop.start()
        for each in self._async_lanes:
            self._open(each, functools.partial(self._open_in_loop, each.session))
        self._open(self._lanes[0], self._share)
        for thread in self._threads:
            thread.start()
        self._gate.open()
        self._voice.say("ready")

    @staticmethod
    def _open(lane: Lane[BaseSession], open_once: Callable[[], object]) -> None:
        """As soon as it can be had, whatever comes between."""
        deadline = time.monotonic() + OPEN_WITHIN
        while True:
            try:
                open_once()
            except ShmlaneError as error:
                if type(error) not in lane.expected or time.monotonic() > deadline:
                    raise
            else:
                return

    def _share(self) -> None:
        session = self._lanes[0].session
        self._letters.publish(str(session.share(slots=SHARED)))

    def _open_in_loop(self, session: AsyncSession) -> None:
        self._loop.call(session.open(wait=OPEN_WITHIN))

    def end(self) -> None:
        self._calm()
        # Nobody calls any more: a slot that was given away now would stay behind.
        self._ending.set()
        for thread in self._threads:
            thread.join(HANG)
        for lane in self._lanes:
            lane.session.close()
        for each in self._async_lanes:
            self._loop.call(each.session.close())
        self._loop.end()

    # --- callers ----------------------------------------------------------------------

    def _dice(self, what: object) -> random.Random:
        return random.Random(f"{self._plan.seed}/{self._plan.number}/{what}")

    def _call_on(self, dice: random.Random) -> None:
        while not self._ending.is_set():
            self._gate.run(lambda: self._caller.act(dice))
            self._ending.wait(dice.expovariate(1 / _MEAN_THOUGHT))

    # --- orders -----------------------------------------------------------------------

    def obey(self, ears: Ears) -> None:
        """Follow orders until told to end; tell the counts meanwhile."""
        acts = {
            "calm": self._calm,
            "use": self._use,
            "visit": self._visit,
            "leave": self._leave,
            "go": self._gate.open,
        }
        while (order := ears.next()) != "end":
            if order is not None:
                acts[order]()
            self._tell_counts()
            if order is not None:
                usage = asdict(Usage.of(os.getpid()))
                self._voice.say("done", order=order, usage=usage)
            if self._gate.longest > HANG:
                self._give_up("a call did not end")

    def _calm(self) -> None:
        if not self._gate.close(timeout=HANG):
            self._give_up("a call did not end")
        self._shelf.clear()
        gc.collect()
        self._wait_until_free()
        self._use()

    def _use(self) -> None:
        self._rest.use_every_slot()
        self._loop.call(self._async_rest.use_every_slot())

    def _visit(self) -> None:
        self._rest.visit()
        self._loop.call(self._async_rest.visit())

    def _leave(self) -> None:
        self._rest.leave()
        self._loop.call(self._async_rest.leave())

    def _wait_until_free(self) -> None:
        deadline = time.monotonic() + FREE_WITHIN
        while held := [stats for stats in self._stats() if stats.free != stats.slots]:
            if time.monotonic() > deadline:
                sessions = "\n".join(map(repr, self._sessions()))
                self._voice.complain(f"slots do not come free: {held}\n{sessions}")
                return
            time.sleep(_LOOK)
            # What a thread that outlived its stream has left in a circle.
            gc.collect()

    def _sessions(self) -> Iterator[BaseSession]:
        lanes: Sequence[Lane[BaseSession]] = (*self._lanes, *self._async_lanes)
        yield from (lane.session for lane in lanes)

    def _stats(self) -> list[SessionStats]:
        return [session.stats() for session in self._sessions()]

    def _tell_counts(self) -> None:
        tally = Tally()
        for stats in self._stats():
            tally.add_stats(stats)
        self._voice.say("counts", counts=self._tally.copy() + tally.copy())

    def _give_up(self, why: str) -> None:
        self._voice.complain(f"{why}; the stacks of all threads are on stderr")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)


def _die_with(conductor: int) -> None:
    """Have the kernel end this process with the one that started it, even stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != conductor:
        os._exit(4)


def _report_strays(voice: Voice) -> None:
    """What is raised where nobody can catch it is a fault as well."""

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        trace = "".join(traceback.format_exception(args.exc_value))
        voice.complain(
            f"raised in {args.object!r}, where nobody can catch it:\n{trace}"
        )

    def in_thread(args: threading.ExceptHookArgs) -> None:
        trace = "".join(traceback.format_exception(args.exc_value))
        voice.complain(f"ended a thread:\n{trace}")

    sys.unraisablehook = unraisable
    threading.excepthook = in_thread


def main() -> int:
    plan = Plan(**json.loads(sys.argv[1]))
    _die_with(plan.conductor)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    voice = Voice()
    voice.say("guarded")
    # Dropping leases is one of the ways to ask.
    warnings.filterwarnings("ignore", "<(Async)?Lease .* was dropped", ResourceWarning)
    _report_strays(voice)
    client = Client(plan, voice)
    client.start()
    client.obey(Ears())
    client.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
