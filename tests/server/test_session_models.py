"""Models of every kind: datatypes, outputs, batches and optional inputs."""

from __future__ import annotations

import numpy as np
import pytest

from shmlane import (
    InferFailed,
    Session,
    TensorMismatch,
)
from shmlane.server import TritonServer
from tests.sessions import Array, all_free, order

pytestmark = pytest.mark.usefixtures("no_leftovers")


def images(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).random(shape, np.float32)


def test_every_numeric_datatype_travels(models_server: TritonServer) -> None:
    with Session(models_server.http_url, "types") as session:
        tensors = session.metadata.inputs
        sent = {
            name: (np.arange(7) % 5).astype(spec.dtype)
            for name, spec in tensors.items()
        }
        outputs = session.infer(sent)
        assert len(outputs) == 12
        all_free(session)
    for name, array in sent.items():
        received = outputs["OUT" + name.removeprefix("IN")]
        assert received.dtype == array.dtype
        np.testing.assert_array_equal(received, array[::-1])


# --- outputs --------------------------------------------------------------------------


def test_only_the_outputs_asked_for_come(models_server: TritonServer) -> None:
    values = images((2, 3))
    for wanted, other in (("SUMS", "MARKED"), ("MARKED", "SUMS")):
        url = models_server.http_url
        with Session(url, "rows", outputs=[wanted]) as session:
            outputs = session.infer({"VALUES": values})
            assert list(outputs) == [wanted]
            with session.lease() as lease:
                lease.write("VALUES", values)
                result = lease.infer()
                assert wanted in result
                assert other not in result


def test_outputs_whose_size_follows_the_data(models_server: TritonServer) -> None:
    # The shapes of inputs never change here, those of outputs with every reply.
    for outputs in (None, {"REPLY": (6,)}):
        with Session(models_server.http_url, "moody", outputs=outputs) as session:
            for token in range(60):
                count = (0, 1, 2, 1, 1, 6)[token % 6]
                reply = session.infer({"ORDER": order(token, count=count)})["REPLY"]
                assert reply.tolist() == [token] * count
            all_free(session)


def test_an_output_larger_than_declared_fails_with_sizes(
    models_server: TritonServer,
) -> None:
    url = models_server.http_url
    with Session(url, "moody", slots=1, outputs={"REPLY": (4,)}) as session:
        with pytest.raises(InferFailed, match=r"needs 20 bytes.* has 16") as it:
            session.infer({"ORDER": order(1, count=5)})
        assert it.value.context["needed"] == 20
        assert "outputs={'REPLY'" in it.value.hint
        reply = session.infer({"ORDER": order(2, count=4)})["REPLY"]
        assert reply.tolist() == [2] * 4
        all_free(session)


# --- batches and optional inputs ------------------------------------------------------


def test_every_batch_size_is_answered_row_by_row(rows: Session) -> None:
    for batch in (1, 8, *range(1, 9), 3):
        values = images((batch, 3), seed=batch)
        marks = np.arange(2 * batch, dtype=np.int8).reshape(batch, 2)
        outputs = rows.infer({"VALUES": values, "MARKS": marks})
        sums = values.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(outputs["SUMS"], sums, rtol=1e-6)
        np.testing.assert_array_equal(outputs["MARKED"], marks)


def test_outputs_of_larger_batches_are_written_in_place_too(rows: Session) -> None:
    with rows.lease() as lease:
        lease.view("VALUES", (8, 3))[...] = 1
        sums = lease.infer()["SUMS"]
        sums[...] = 0
        lease.infer()
        assert sums.tolist() == [[3.0]] * 8
        del sums


def test_a_batch_too_large_is_refused_before_sending(rows: Session) -> None:
    with rows.lease() as lease:
        with pytest.raises(TensorMismatch, match=r"\(9, 3\).*at most 8"):
            lease.view("VALUES", (9, 3))
        lease.write("VALUES", images((8, 3)))
        assert lease.infer()["SUMS"].shape == (8, 1)


def test_batches_that_differ_between_inputs_fail(rows: Session) -> None:
    with pytest.raises(InferFailed, match="batch size does not match"):
        rows.infer({"VALUES": images((2, 3)), "MARKS": np.zeros((3, 2), np.int8)})
    assert rows.infer({"VALUES": images((2, 3))})["SUMS"].shape == (2, 1)


def test_an_open_batch_starts_at_one(rows: Session) -> None:
    with rows.lease() as lease:
        assert lease["VALUES"].shape == (1, 3)
        assert lease["MARKS"].shape == (1, 2)


def test_declared_shapes_give_the_batch_of_inputs_and_outputs(
    models_server: TritonServer,
) -> None:
    url = models_server.http_url
    with Session(url, "rows", shapes={"VALUES": (5, 3)}) as session:
        with session.lease() as lease:
            lease["VALUES"][...] = 1
            assert lease.infer()["SUMS"].tolist() == [[3.0]] * 5
        assert session.stats().growths == 0


def test_an_optional_input_comes_and_goes(rows: Session) -> None:
    for number in range(12):
        values = images((2, 3), seed=number)
        inputs = {"VALUES": values}
        if number % 3:
            inputs["MARKS"] = np.full((2, 2), number, np.int8)
        marked = rows.infer(inputs)["MARKED"]
        assert (marked == (number if number % 3 else -1)).all()


def test_an_optional_input_can_be_added_within_a_lease(rows: Session) -> None:
    with rows.lease() as lease:
        lease["VALUES"][...] = 1
        assert (lease.infer()["MARKED"] == -1).all()
        lease["MARKS"][...] = 4
        assert (lease.infer()["MARKED"] == 4).all()
