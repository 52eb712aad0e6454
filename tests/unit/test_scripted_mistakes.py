"""Mistakes in a user's own test: the scripted server tells them where they are seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmlane import InferFailed, Session, UsageError
from shmlane.testing import (
    Close,
    Delay,
    FakeModel,
    ScriptedServer,
    Status,
    identity_model,
)
from tests.raw_http import ask, infer, tensor
from tests.sessions import all_free


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        (503, "Status(503)"),
        (Close, "Close(...)"),
        (Delay, "Delay(...)"),
        (None, "Faults are made by Delay, Close"),
        ([Close()], "Faults are made by Delay, Close"),
        (ValueError("x"), "Faults are made by Delay, Close"),
    ],
)
def test_what_is_no_fault_is_refused_and_nothing_is_scripted(
    fault: Any, hint: str
) -> None:
    server = ScriptedServer([identity_model()])
    with pytest.raises(UsageError, match="not a fault to script") as caught:
        server.script(Status(503), fault)
    assert hint in caught.value.hint
    assert server.faults == ()


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "returned NoneType, not arrays by name such as {'O': array}"),
        (np.ones((1, 2), np.float32), "returned ndarray, not arrays by name"),
        ({"P": np.ones((1, 2), np.float32)}, "returned output 'P'; its outputs are: O"),
        (
            {"O": np.ones((1, 2))},
            "returned output 'O' as FP64 [1, 2]; it declares FP32 [-1, 2]: return it"
            " with .astype(np.float32)",
        ),
        (
            {"O": np.ones((3, 4), np.float32)},
            "returned output 'O' as FP32 [3, 4]; it declares FP32 [-1, 2]",
        ),
        (
            {"O": np.ones(2, np.float32)},
            "returned output 'O' as FP32 [2]; it declares FP32 [-1, 2]",
        ),
        ({"O": [[1.0, 2.0]]}, "returned output 'O' as FP64 [1, 2]"),
        ({"O": [[1.0], [2.0, 3.0]]}, "returned output 'O' as what makes no array"),
        ({"O": None}, "returned output 'O' as dtype object, which Triton has not"),
        (
            {"O": np.ones((1, 2), np.complex64)},
            "returned output 'O' as dtype complex64",
        ),
    ],
)
def test_a_function_that_returns_the_wrong_thing_is_told_so(
    returned: Any, told: str
) -> None:
    model = FakeModel(
        "rows",
        inputs={"I": ("FP32", (2,))},
        outputs={"O": ("FP32", (2,))},
        run=lambda inputs: returned,
        max_batch_size=4,
    )
    with ScriptedServer([model]) as server, Session(server.url, "rows") as session:
        with pytest.raises(InferFailed) as caught:
            session.infer({"I": np.ones((1, 2), np.float32)})
        assert f"the function of fake model 'rows' {told}" in str(caught.value)
        assert caught.value.context["status"] == 500
        all_free(session)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ({"A": np.ones(1, np.float32)}, "returned these outputs: A; missing: B, C"),
        ({}, "returned these outputs: none; missing: A, B, C"),
    ],
)
@pytest.mark.parametrize("memory", ["system", "wire"])
def test_a_function_that_leaves_out_outputs_is_told_which(
    memory: str, returned: Any, told: str
) -> None:
    model = three_outputs(returned)
    given = {"I": np.ones(1, np.float32)}
    with (
        ScriptedServer([model]) as server,
        Session(server.url, "three", memory=memory) as session,
    ):
        with pytest.raises(InferFailed) as caught:
            session.infer(given)
        assert f"the function of fake model 'three' {told}" in str(caught.value)
        all_free(session)


def test_an_output_that_nobody_asks_for_may_be_left_out() -> None:
    model = three_outputs({"A": np.ones(1, np.float32)})
    with (
        ScriptedServer([model]) as server,
        Session(server.url, "three", outputs=["A"]) as session,
    ):
        assert session.infer({"I": np.ones(1, np.float32)})["A"].tolist() == [1.0]


def three_outputs(returned: Any) -> FakeModel:
    return FakeModel(
        "three",
        inputs={"I": ("FP32", (1,))},
        outputs=dict.fromkeys("ABC", ("FP32", (1,))),
        run=lambda inputs: returned,
    )


GOOD: dict[str, Any] = {
    "inputs": {"I": ("FP32", (2,))},
    "outputs": {"O": ("FP32", (2,))},
    "run": dict,
}


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ({"inputs": {"a": ("FP32", 3)}}, "inputs={'a': ('FP32', 3)}: give datatype"),
        ({"inputs": {"a": "FP32"}}, "inputs={'a': 'FP32'}: give datatype and sizes"),
        ({"inputs": {"a": ("FP32",)}}, "inputs={'a': ('FP32',)}: give datatype"),
        ({"inputs": {"a": ("FP32", (1.5,))}}, "give datatype and sizes, as in"),
        ({"inputs": {"a": (np.float32, (1,))}}, "give datatype and sizes, as in"),
        ({"inputs": {"a": ("FP32", (1,), True, 4)}}, "give datatype and sizes"),
        ({"inputs": {1: ("FP32", (1,))}}, "give tensors by name, as in"),
        ({"inputs": ["a"]}, "inputs=['a']: give tensors by name, as in {'IMAGE': ("),
        ({"inputs": None}, "inputs=None: give tensors by name"),
        ({"inputs": {}}, "inputs={}: give one input or more, as in"),
        ({"outputs": {"a": ("FP32", 3)}}, "outputs={'a': ('FP32', 3)}: give datatype"),
        ({"outputs": ["a"]}, "outputs=['a']: give tensors by name"),
        ({"versions": ["a"]}, "versions=['a']: give numbers as text"),
        ({"versions": "12"}, "versions='12': give numbers as text"),
        ({"versions": [1]}, "versions=[1]: give numbers as text, one or more"),
        ({"versions": 1}, "versions=1: give numbers as text"),
        ({"versions": []}, "versions=[]: give numbers as text, one or more"),
        ({"run": None}, "run=None: give a function that takes and returns arrays"),
        ({"max_batch_size": "8"}, "max_batch_size='8': give a whole number, 0 for"),
        ({"max_batch_size": -1}, "max_batch_size=-1: give a whole number"),
        ({"max_batch_size": True}, "max_batch_size=True: give a whole number"),
        ({"name": ""}, "name='': give text"),
        ({"name": 5}, "name=5: give text"),
    ],
    ids=str,
)
def test_a_fake_model_that_cannot_be_is_refused_where_it_is_made(
    argument: dict[str, Any], told: str
) -> None:
    arguments = {"name": "rows", **GOOD, **argument}
    with pytest.raises(UsageError) as caught:
        FakeModel(**arguments)
    assert str(caught.value).startswith(f"fake model {arguments['name']!r}: ")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("models", "told"),
    [
        (identity_model(), "models=<FakeModel 'identity' ready> is not a list"),
        ("identity", "models='identity' is not a list of models"),
        (None, "models=None is not a list of models"),
        (["identity"], "'identity' is not a fake model"),
        pytest.param([identity_model], "is not a fake model", id="a function"),
    ],
    ids=str,
)
def test_a_server_of_what_are_no_models_is_refused(models: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        ScriptedServer(models)
    assert told in str(caught.value)
    assert "ScriptedServer([identity_model()])" in caught.value.hint


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("24.10", '24.10 is a release of the container, whose server is "2.51.0"'),
        ("24.10-py3", '24.10 is a release of the container, whose server is "2.51.0"'),
        ("22.01", 'whose server is "2.18.0": give that'),
        ("25.06", 'whose server is "2.59.0": give that'),
        ("25.07", 'whose server is "2.59.1": give that'),
        ("25.08", 'whose server is "2.60.0": give that'),
        ("26.07", 'whose server is "2.71.0": give that'),
        ("21.12", "21.12 is a release of the container: give the version that GET /v2"),
        ("29.12", "29.12 is a release of the container: give the version that GET /v2"),
        ("3.0", "GET /v2 tells them"),
        ("24.100", "GET /v2 tells them"),
        ("two", 'Give numbers as in "2.51.0"'),
        ("", 'Give numbers as in "2.51.0"'),
        ("2", 'Give numbers as in "2.51.0"'),
        ("\u0662.51", 'Give numbers as in "2.51.0"'),
    ],
)
def test_a_version_that_is_none_of_tritons_is_refused(version: str, told: str) -> None:
    with pytest.raises(UsageError, match="is not a version of Triton") as caught:
        ScriptedServer([], version=version)
    assert told in caught.value.hint


@pytest.mark.parametrize("version", [2.51, 2, None, (2, 51), b"2.51.0"])
def test_a_version_is_text(version: Any) -> None:
    with pytest.raises(UsageError, match="give the version of a Triton as text"):
        ScriptedServer([], version=version)


def test_numbers_are_not_taken_for_bytes() -> None:
    model = FakeModel(
        "words",
        inputs={"I": ("FP32", (1,))},
        outputs={"O": ("BYTES", (1,))},
        run=lambda inputs: {"O": np.array([7], np.object_)},
    )
    asked = infer([tensor(name="I", shape=[1], data=[1.0])], model="words")
    with ScriptedServer([model]) as server:
        reply = ask(server.url, asked)
    assert reply.status == 500
    assert "declares BYTES [1]: return an array of bytes objects" in reply.error
