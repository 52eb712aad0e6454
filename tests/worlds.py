"""Servers for scenarios, with clients of one flavour, and what must come from there.

Owns the models, what is asked of them, and the state that must hold when a client or a
server ends. Refuses to know the ways of asking (`flavours`) and what happens meanwhile
(`scenarios`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shmlane import Connection, Timeouts
from shmlane.testing import FakeModel, ScriptedServer, identity_model
from tests.flavours import Client, Item, Outcome
from tests.polling import eventually
from tests.sessions import Array, frame
from tests.unit.asked import words

INPUT, OUTPUT = "INPUT__0", "OUTPUT__0"
Flavour = Callable[..., Client]


class World:
    """A server, and clients of one flavour on it."""

    def __init__(self, flavour: Flavour, url: str) -> None:
        self._flavour = flavour
        self.url = url

    @contextlib.contextmanager
    def client(
        self,
        model: str = "identity",
        *,
        url: str = "",
        slots: int = 2,
        infer: float = 10.0,
        lease: float = 10.0,
        connect: float = 2.0,
        replay: bool = False,
        shapes: Any = None,
        outputs: Any = None,
        memory: str = "system",
        rerun: bool = False,
    ) -> Iterator[Client]:
        """Its slots are free in the end, and can be had."""
        client = self._flavour(
            url or self.url,
            model,
            slots=slots,
            connection=Connection(replay=replay),
            timeouts=Timeouts(connect=connect, infer=infer, lease=lease),
            shapes=shapes,
            outputs=outputs,
            memory=memory,
            rerun=rerun,
        )
        try:
            yield client
            if not client.is_closed:
                all_come_back(client)
        finally:
            client.close()
            client.end()


class Scripted(World):
    """On a scripted server, one model of which notes what it sees."""

    def __init__(self, flavour: Flavour) -> None:
        self.noted: list[float] = []
        self.identity = identity_model()
        self.server = ScriptedServer(
            [self.identity, self._noting(), _counting(), words()],
            allow_client_shm=True,
        )
        self.server.start()
        super().__init__(flavour, self.server.url)

    def _noting(self) -> FakeModel:
        def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            self.noted.append(float(inputs[INPUT].flat[-1]))
            return {OUTPUT: inputs[INPUT]}

        tensor = ("FP32", (-1, -1, -1, -1))
        return FakeModel(
            "noting", inputs={INPUT: tensor}, outputs={OUTPUT: tensor}, run=run
        )

    def end(self) -> None:
        """It has not crashed, and knows of nothing that was registered."""
        self.server.release()
        eventually(lambda: not self.server.in_model, "the last request ends")
        eventually(lambda: not self.server.regions, "nothing is registered")
        assert not self.server.crashed
        self.server.stop()


def _counting() -> FakeModel:
    """As many numbers as it is told, which it refuses below 0."""

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        count = int(inputs["X"][0])
        if count < 0:
            raise ValueError(f"{count} is negative")
        return {"Y": np.arange(count, dtype=np.float32)}

    return FakeModel(
        "counting",
        inputs={"X": ("FP32", (1,))},
        outputs={"Y": ("FP32", (-1,))},
        run=run,
    )


def all_come_back(client: Client) -> None:
    eventually(
        lambda: client.stats().free == client.stats().slots,
        lambda: f"all slots are free: {client.stats()}",
    )


# --- what is asked, and what must come ------------------------------------------------


def frames(*values: float, size: int = 8) -> list[Item]:
    return [{INPUT: frame(value, size=size)} for value in values]


def are_right(outcomes: Iterable[Outcome], items: Iterable[Item]) -> None:
    """`identity` gave back what each was given."""
    for outcome, item in zip(outcomes, items, strict=True):
        np.testing.assert_array_equal(good(outcome)[OUTPUT], item[INPUT])


def good(outcome: Outcome) -> dict[str, Array]:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def serves_right(client: Client, *, first: float = 100.0) -> None:
    """Every slot, more than once."""
    all_come_back(client)
    count = 3 * client.stats().slots
    items = frames(*(first + number for number in range(count)))
    are_right(client.ask(items), items)


def fails(outcomes: list[Outcome], kind: type[Exception]) -> list[Exception]:
    """Each of them is an error of this kind."""
    errors = [each for each in outcomes if isinstance(each, kind)]
    assert len(errors) == len(outcomes), outcomes
    return errors
