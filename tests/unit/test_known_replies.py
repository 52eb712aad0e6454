"""Replies known by their bytes: what they tell of outputs whose shapes change."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from shmlane import RequestOptions, Session, leases
from shmlane.testing import FakeModel
from tests.polling import eventually
from tests.unit.asked import doubling, session_on, slots_of, words
from tests.unit.pools import WITH_AND_WITHOUT_GIL, find_views_by

# Each size comes again after itself and after another.
SIZES = (2, 3, 2, 3, 2, 2, 3, 3, 2)
DECLARED: dict[str, Any] = {
    "shapes": {"W": 4096},
    "outputs": {"W_OUT": 4096, "LENGTHS": (8,)},
}


def elements(count: int, call: int) -> list[bytes]:
    """No two calls have the same; all elements have one length."""
    return [b"%02d of %02d" % (number, call) for number in range(count)]


# Its requests are equal but for what the input holds: replies are known by bytes.
SAY = FakeModel(
    "say",
    inputs={"N": ("INT32", (2,))},
    outputs={"S": ("BYTES", (-1,))},
    run=lambda inputs: {"S": np.array(elements(*inputs["N"]), object)},
)


def ask(session: Session, count: int, call: int) -> None:
    came = session.infer({"N": np.array([count, call], np.int32)})["S"]
    assert came.tolist() == elements(count, call)


@pytest.mark.parametrize("how", WITH_AND_WITHOUT_GIL)
@pytest.mark.parametrize(
    "options", [{"outputs": {"S": 4096}}, {"rerun": True}, {"memory": "wire"}], ids=str
)
def test_bytes_of_sizes_that_take_turns_are_all_there_and_no_more(
    options: dict[str, Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_views_by(how, monkeypatch)
    with session_on(SAY, **options) as (_, session):
        for call, count in enumerate(SIZES):
            ask(session, count, call)
        assert session.stats().free == session.stats().slots


def test_each_result_of_one_lease_has_its_own_size() -> None:
    with session_on(words(), **DECLARED) as (_, session), session.lease() as lease:
        for call, count in enumerate(SIZES):
            given = elements(count, call)
            lease.write("W", given)
            result = lease.infer()
            assert result["W_OUT"].tolist() == given
            assert repr(result) == f"<Result W_OUT [{count}], LENGTHS [{count}]>"
            # The same request once more: its reply is one that is known.
            assert lease.infer()["W_OUT"].tolist() == given


@pytest.mark.parametrize("how", WITH_AND_WITHOUT_GIL)
def test_bytes_come_right_after_their_memory_was_looked_at(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_views_by(how, monkeypatch)
    with session_on(SAY, outputs={"S": 4096}) as (_, session):
        for call, count in enumerate(SIZES[:2]):
            ask(session, count, call)
        # As a traceback out of decoding does.
        looks = [slots_of(session)[0].outputs["S"].root[:1]]
        pause = threading.Timer(0.05, looks.clear)
        pause.start()
        for call, count in enumerate(SIZES, 10):
            ask(session, count, call)
        pause.join()
        eventually(lambda: session.stats().pinned == 0)
        for call, count in enumerate(SIZES, 20):
            ask(session, count, call)


def test_to_show_a_result_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with session_on(words(), **DECLARED) as (_, session), session.lease() as lease:
        lease.write("W", ["a", "bc"])
        result = lease.infer()
        with monkeypatch.context() as patch:
            patch.setattr(leases, "decode", lambda *_: pytest.fail("decoded"))
            assert repr(result) == "<Result W_OUT [2], LENGTHS [2]>"
        assert result["W_OUT"].tolist() == [b"a", b"bc"]
    assert repr(result) == "<Result expired>"


# --- ids ------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["0", "1", "mine"])
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_ours_take_turns_again_after_one_id_of_a_caller(own: str, memory: str) -> None:
    sizes: dict[str, Any] = {"shapes": {"X": (64,)}, "outputs": {"Y": (64,)}}
    with session_on(doubling(), memory=memory, **sizes) as (_, session):
        session.infer({"X": np.ones(1, np.float32)}, options=RequestOptions(id=own))
        before = session.stats().connections
        for length in itertools.chain(range(2, 30), range(2, 30)):
            sent = np.arange(length, dtype=np.float32)
            assert session.infer({"X": sent})["Y"].tolist() == (2 * sent).tolist()
        # At most the one that the caller's id asked for.
        assert session.stats().connections - before <= 1


def test_the_reply_of_a_model_with_many_outputs_is_known_too() -> None:
    names = [f"OUTPUT__{number}" for number in range(150)]
    model = FakeModel(
        "many",
        inputs={"X": ("FP32", (8,))},
        outputs=dict.fromkeys(names, ("FP32", (8,))),
        run=lambda inputs: {
            name: inputs["X"] + number for number, name in enumerate(names)
        },
    )
    with session_on(model) as (_, session):
        for call in range(4):
            outputs = session.infer({"X": np.full(8, call, np.float32)})
            found = [float(outputs[name][-1]) for name in names]
            assert found == [call + number for number in range(len(names))]
        prepared = slots_of(session)[0].prepared
        assert prepared is not None
        reply, _, _ = prepared.known
        assert all(name.encode() in reply for name in names)
