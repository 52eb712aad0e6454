"""What sessions learn of sizes: from many threads, over many shapes, among classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shmlane import (
    InferFailed,
    OutOfSharedMemory,
    RegionOptions,
    RequestOptions,
    Session,
)
from shmlane.requests import RequestBuilding
from shmlane.testing import FakeModel
from tests.sessions import Array
from tests.unit.asked import asked, doubling, places, session_on, words

THREADS = 8
ROUNDS = 60
# More elements than fit into the smallest block.
MANY = 5000


@pytest.fixture
def eager() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def count() -> FakeModel:
    """As many elements as N says, whatever the shape of X."""

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"Y": np.arange(int(inputs["N"][0]), dtype=np.float32)}

    return FakeModel(
        "count",
        inputs={"X": ("FP32", (-1,)), "N": ("INT32", (1,))},
        outputs={"Y": ("FP32", (-1,))},
        run=run,
    )


def ask(session: Session, length: int, **told: Any) -> None:
    sent = np.arange(length, dtype=np.float32)
    assert session.infer({"X": sent}, **told)["Y"].tolist() == (2 * sent).tolist()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_many_threads_learn_and_prepare_at_once(memory: str, rerun: bool) -> None:
    with session_on(doubling(), memory=memory, rerun=rerun, slots=THREADS) as (
        server,
        session,
    ):

        def work(thread: int) -> None:
            for number in range(ROUNDS):
                ask(session, 1 + (THREADS * number + thread) % 97)

        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(work, thread) for thread in range(THREADS)]:
                done.result(60.0)
        assert session.stats().free == THREADS
        assert len(asked(server)) == THREADS * ROUNDS


@pytest.mark.usefixtures("eager")
def test_many_threads_find_out_that_a_size_varies() -> None:
    with session_on(count(), slots=THREADS, rerun=True) as (_, session):

        def work(thread: int) -> None:
            for number in range(ROUNDS):
                wanted = 1 + (7 * number + thread) % 50
                given = {
                    "X": np.zeros(1 + number % 5, np.float32),
                    "N": np.array([wanted], np.int32),
                }
                assert len(session.infer(given)["Y"]) == wanted

        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(work, thread) for thread in range(THREADS)]:
                done.result(60.0)
        assert session.stats().free == THREADS


@pytest.mark.parametrize("slots", [1, 3])
def test_outputs_that_depend_on_the_data_fail_one_call_of_a_session(slots: int) -> None:
    failed = 0
    with session_on(count(), slots=slots) as (_, session):
        for length in range(1, 30):
            for wanted in (10, 10, MANY, 10, 2 * MANY):
                given = {
                    "X": np.zeros(length, np.float32),
                    "N": np.array([wanted], np.int32),
                }
                try:
                    assert len(session.infer(given)["Y"]) == wanted
                except InferFailed:
                    failed += 1
        assert session.stats().free == slots
    assert failed == 1


def test_a_learned_size_beyond_the_limit_of_the_session_is_told() -> None:
    limit = RegionOptions(max_bytes=100_000, hugepages="never", prefault=False)
    with session_on(doubling(), shapes={"X": (20_000,)}, region=limit) as (_, session):
        # Its size is learned over the wire.
        ask(session, 20_000)
        for _ in range(2):
            with pytest.raises(OutOfSharedMemory, match="its limit is 100000") as error:
                ask(session, 20_000)
            assert "max_bytes" in error.value.hint
            assert session.stats().free == 1
            for _ in range(2):
                ask(session, 8)


# --- classes --------------------------------------------------------------------------

BEST = RequestOptions(classification={"Y": 2})


@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("options", [{}, {"outputs": {"Y": (MANY,)}}], ids=str)
def test_classes_that_come_first_mislead_nobody(
    options: dict[str, Any], rerun: bool
) -> None:
    with session_on(doubling(), rerun=rerun, **options) as (server, session):
        for length in (3, 3, MANY, MANY):
            sent = np.arange(length, dtype=np.float32)
            for _ in range(2):
                came = session.infer({"X": sent}, options=BEST)["Y"]
                assert [each.rpartition(b":")[2] for each in came] == [
                    b"%d" % (length - 1),
                    b"%d" % (length - 2),
                ]
            ask(session, length)
        assert session.stats().reruns == 0
        assert len(asked(server)) == 12
        # The size is known: nothing of a class was taken for one.
        ask(session, MANY)
        assert places(server)[-1] == "memory"


def test_bytes_of_many_lengths_keep_their_place_in_shared_memory() -> None:
    with session_on(words(), rerun=True) as (server, session):
        for length in (200, 3, 100, 1, 200, 7):
            given = [b"x" * length, b"y"]
            assert session.infer({"W": given})["W_OUT"].tolist() == given
        assert places(server, "W_OUT") == ["wire"] + ["memory"] * 5
        assert places(server, "LENGTHS") == ["wire"] + ["memory"] * 5
        assert session.stats().reruns == 0


# --- what is prepared -----------------------------------------------------------------


@pytest.mark.parametrize("memory", ["system", "wire"])
@pytest.mark.parametrize("options", [{}, {"shapes": {"X": (8,)}}], ids=str)
@pytest.mark.parametrize("told", [{}, {"options": RequestOptions(priority=1)}], ids=str)
def test_equal_calls_are_prepared_once(
    memory: str,
    options: dict[str, Any],
    told: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = []
    real = RequestBuilding.prepare

    def prepare(*given: Any) -> None:
        prepared.append(given)
        real(*given)

    monkeypatch.setattr(RequestBuilding, "prepare", prepare)
    with session_on(doubling(), memory=memory, **options) as (_, session):
        for _ in range(3):
            ask(session, 4, **told)
        learned = len(prepared)
        for _ in range(10):
            ask(session, 4, **told)
        assert len(prepared) == learned
        # Once, and once more where what was learned gives the output another place.
        assert learned <= 2
        ask(session, 5, **told)
        assert len(prepared) == learned + 1
